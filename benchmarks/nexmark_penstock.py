"""A Nexmark query as a local job over the lines of nexmark_load.py: `python -m benchmarks.nexmark_penstock JSON`.

Each result says when it was due and when it was there. The job has a program of its own, as the other contestants have,
so that it does not share Python's interpreter lock with the server of the load.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks.nexmark_load import event_of
from penstock.apps.nexmark.queries import QUERIES, WINDOW_S, winning_bids
from penstock.jobs.run import run as start_job

WORKERS = 2


def _due(query: str) -> Callable[[Any], tuple[int, Any]]:
    """Returns a function that says of a result when it was due, and a value of it."""
    window = int(WINDOW_S * 1000)
    found: dict[str, Callable[[Any], tuple[int, Any]]] = {
        "q1": lambda row: (row["date_time"], row["price"]),
        "q2": lambda row: (row["date_time"], row["price"]),
        "q4": lambda row: (row[1]["closed"], row[1]["total"] // row[1]["auctions"]),
        "q5": lambda row: (row[2] + window, row[1]),
        "q7": lambda row: (row[3] - row[3] % window + window, row[1]),
        "q8": lambda row: (row[2] + window, row[0]),
        "q11": lambda row: (row[3], row[1]),
    }
    return found[query]


def _timed(query: str, events: ps.Stream) -> ps.Stream:
    """Returns the results of a query, with a time where the query leaves it out."""
    if query == "q2":
        bids = events.filter(ps.col("kind") == "bid").filter(ps.col("auction") % 123 == 0)
        return bids.select("auction", "price", "date_time")
    if query == "q4":
        prices = winning_bids(events).map(
            lambda pair: {"category": pair[0]["category"], "price": pair[1]["price"], "expires": pair[0]["expires"]}
        )
        results = {"total": ps.sum("price"), "auctions": ps.count(), "closed": ps.max("expires")}
        return prices.key_by("category").agg(**results)
    return QUERIES[query](events)


def main(asked: dict[str, Any]) -> None:
    """See the module."""
    query, folder = asked["query"], Path(asked["out"])
    due = _due(query)

    def stamped(result: Any) -> str:
        at, value = due(result)
        return f"{at},{time.time() * 1000:.1f},{value}"

    flow = ps.Flow("bench-nexmark", parallelism=WORKERS)
    lines = flow.read(ps.sources.SocketLines("127.0.0.1", asked["port"]), name="lines", parallelism=1)
    events = lines.map(event_of, name="parse").watermark("date_time", name="watermark")
    _timed(query, events).map(stamped, name="stamped").write(ps.sinks.Files(folder), name="results")
    start_job(flow, workers=WORKERS, local=True, epoch_interval_s=1.0).wait(600, progress=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
