"""A driver on a host of the tests, with the job of one contestant: `python -m benchmarks.hosts_peer JSON`.

It joins the cluster of RAY_ADDRESS, runs the job to its end, and prints nothing; the job's sources and sinks leave
files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks.common import run_job
from benchmarks.pacing import Latencies, Pacer
from benchmarks.penstock_parts import LatencySink, Paced
from benchmarks.throughput import Input
from benchmarks.wordcount_throughput import build


def wordcount(settings: dict[str, Any]) -> ps.Flow:
    """The flow of wordcount_throughput, with two tasks of each operator."""
    data = Input(Path(settings["folder"]), settings["paths"], 0, None, None)
    return build("final")(data, "bench-hosts-wordcount")


def arrived(record: tuple[int, str]) -> tuple[str, int, int]:
    """What the sink takes: text, due time, and a number."""
    return record[1], record[0], 1


def one_way(settings: dict[str, Any]) -> ps.Flow:
    """Paced records from a source in one worker to a sink in the other."""
    texts = Path(settings["texts"]).read_text().splitlines()
    flow = ps.Flow("bench-hosts-one-way", parallelism=1)
    (
        flow.read(Paced(Pacer(texts, settings["rate"], settings["records"])))
        .map(arrived)
        .rebalance()
        .write(LatencySink(Latencies(settings["out"], settings["records"])), parallelism=1)
    )
    return flow


def main(settings: dict[str, Any]) -> None:
    """Run it."""
    import ray

    from penstock.actors.cluster import NAMESPACE

    ray.init(namespace=NAMESPACE, logging_level="error", log_to_driver=False)
    flow = {"wordcount": wordcount, "one_way": one_way}[settings["flow"]](settings)
    over = {"nodes": 2} if settings["hosts"] == 2 else {}
    parallelism = 2 if settings["flow"] == "wordcount" else None
    status = run_job(flow, workers=2, parallelism=parallelism, epoch_interval_s=None, **over)
    on = {worker["node_id"] for worker in status["workers"]}
    assert len(on) == settings["hosts"], f"the workers are on {len(on)} hosts"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
