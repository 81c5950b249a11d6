"""The Nexmark queries that Bytewax can express with its own operators: `python -m benchmarks.nexmark_bytewax JSON`.

Q4 and q5 are not among them: Bytewax has no join by the times of records, and nothing that says when all counts of a
window are there. The watermark follows the greatest time of a key's records.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import Any

import msgspec

QUERIES = ("q1", "q2", "q7", "q8", "q11")
_BATCH = 1_000
_WINDOW = timedelta(seconds=10)
_DISORDER = timedelta(seconds=60)  # of event time, by which one worker may be ahead of the other
_BEGIN = datetime(1970, 1, 1, tzinfo=timezone.utc)

Event = dict[str, Any]


def _at(event: Event) -> datetime:
    return datetime.fromtimestamp(event["date_time"] / 1000, timezone.utc)


def _at_first(events: list[Event]) -> datetime:
    return _at(events[0])


def _of(kind: str, by: str, events: list[Event]) -> list[tuple[str, Event]]:
    return [(str(event[by]), event) for event in events if event["kind"] == kind]


def _euros(events: list[Event]) -> list[tuple[Any, ...]]:
    return [
        (bid["auction"], bid["bidder"], 0.908 * bid["price"], bid["date_time"], bid["extra"])
        for bid in events
        if bid["kind"] == "bid"
    ]


def _every_123rd(events: list[Event]) -> list[tuple[int, int]]:
    return [(bid["auction"], bid["price"]) for bid in events if bid["kind"] == "bid" and bid["auction"] % 123 == 0]


def _lists(events: list[Event]) -> list[tuple[str, list[Event]]]:
    return [("all", [bid]) for bid in events if bid["kind"] == "bid"]


def _higher(one: list[Event], other: list[Event]) -> list[Event]:
    if one[0]["price"] == other[0]["price"]:
        return one + other
    return one if one[0]["price"] > other[0]["price"] else other


def _rows(window: tuple[str, tuple[int, list[Event]]]) -> list[tuple[Any, ...]]:
    return [(bid["auction"], bid["price"], bid["bidder"], bid["date_time"], bid["extra"]) for bid in window[1][1]]


def build(query: str, files: list[str], count: Callable[[int], None]) -> Any:
    """Makes the dataflow. `count` is told how many results there are."""
    import bytewax.operators as op
    import bytewax.operators.windowing as win
    from bytewax.dataflow import Dataflow
    from bytewax.inputs import DynamicSource, StatelessSourcePartition
    from bytewax.outputs import DynamicSink, StatelessSinkPartition

    decode = msgspec.json.Decoder().decode

    class Part(StatelessSourcePartition):  # type: ignore[misc]
        def __init__(self, paths: list[str]) -> None:
            self._lines = (line for path in paths for line in open(path, "rb"))  # noqa: SIM115

        def next_batch(self) -> list[list[Event]]:
            events = [decode(line) for line in islice(self._lines, _BATCH)]
            if not events:
                raise StopIteration
            return [events]

    class Files(DynamicSource):  # type: ignore[misc]
        def build(self, step_id: str, worker_index: int, worker_count: int) -> Part:
            return Part(files[worker_index::worker_count])

    class Counted(StatelessSinkPartition):  # type: ignore[misc]
        def write_batch(self, items: list[Any]) -> None:
            count(len(items))

    class Drop(DynamicSink):  # type: ignore[misc]
        def build(self, step_id: str, worker_index: int, worker_count: int) -> Counted:
            return Counted()

    flow = Dataflow("nexmark")
    events = op.input("events", flow, Files())  # lists of events
    tumbling = win.TumblingWindower(align_to=_BEGIN, length=_WINDOW)
    if query == "q1":
        results = op.flat_map("q1", events, _euros)
    elif query == "q2":
        results = op.flat_map("q2", events, _every_123rd)
    elif query == "q7":
        lists = op.flat_map("lists", events, _lists)
        clock = win.EventClock(_at_first, _DISORDER)
        results = op.flat_map("q7", win.reduce_window("highest", lists, clock, tumbling, _higher).down, _rows)
    elif query == "q8":
        persons = op.flat_map("persons", events, lambda some: _of("person", "id", some))
        sellers = op.flat_map("sellers", events, lambda some: _of("auction", "seller", some))
        clock = win.EventClock(_at, _DISORDER)
        joined = win.join_window("joined", clock, tumbling, persons, sellers).down
        results = op.filter("q8", joined, lambda pair: None not in pair[1][1])
    else:
        bids = op.flat_map("bids", events, lambda some: [event for event in some if event["kind"] == "bid"])
        clock = win.EventClock(_at, _DISORDER)
        sessions = win.SessionWindower(gap=_WINDOW)
        results = win.count_window("q11", bids, clock, sessions, lambda bid: str(bid["bidder"])).down
    op.output("results", results, Drop())
    return flow


def main(asked: dict[str, Any]) -> None:
    """See the module."""
    from bytewax.run import cli_main

    counts: list[int] = []
    flow = build(asked["query"], asked["files"], counts.append)
    began = time.perf_counter()
    cli_main(flow, workers_per_process=2)
    print(json.dumps({"seconds": time.perf_counter() - began, "results": sum(counts)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
