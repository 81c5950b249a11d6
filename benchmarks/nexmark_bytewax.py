"""The Nexmark queries that Bytewax can express with its own operators: `python -m benchmarks.nexmark_bytewax JSON`.

Q4 and q5 are not among them: Bytewax has no join by the times of records, and nothing that says when all counts of a
window are there. The watermark follows the greatest time of a key's records.

With a port, the query reads the lines of nexmark_load.py from a socket, and each result says when it was due and when
it was there. The events then come in the order of their times, and windows wait 0.1 s for late ones: Bytewax moves
watermarks on by the clock, so that a worker that is busy for a while would otherwise lose events.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.nexmark_load import event_of

QUERIES = ("q1", "q2", "q7", "q8", "q11")
_BATCH = 1_000
_WINDOW = timedelta(seconds=10)
_DISORDER = timedelta(seconds=60)  # of event time, by which one worker may be ahead of the other
_LAG = timedelta(seconds=0.1)  # by which the clock, which moves watermarks on, may be ahead of what a worker has done
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


def _every_123rd(events: list[Event]) -> list[tuple[int, int, int]]:
    return [
        (bid["auction"], bid["price"], bid["date_time"])
        for bid in events
        if bid["kind"] == "bid" and bid["auction"] % 123 == 0
    ]


def _lists(events: list[Event]) -> list[tuple[str, list[Event]]]:
    return [("all", [bid]) for bid in events if bid["kind"] == "bid"]


def _higher(one: list[Event], other: list[Event]) -> list[Event]:
    if one[0]["price"] == other[0]["price"]:
        return one + other
    return one if one[0]["price"] > other[0]["price"] else other


def _rows(window: tuple[str, tuple[int, list[Event]]]) -> list[tuple[Any, ...]]:
    return [(bid["auction"], bid["price"], bid["bidder"], bid["date_time"], bid["extra"]) for bid in window[1][1]]


def _none() -> tuple[int, int]:
    return 0, 0


def _one_more(sum_: tuple[int, int], bid: Event) -> tuple[int, int]:
    return sum_[0] + 1, max(sum_[1], bid["date_time"])


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], max(one[1], other[1])


def build(query: str, source: Any, sink: Any, *, timed: bool) -> Any:
    """Makes the dataflow. `source` gives lists of events; `timed` says that they are in order, and that results are to
    say what their time is."""
    import bytewax.operators as op
    import bytewax.operators.windowing as win
    from bytewax.dataflow import Dataflow

    disorder = _LAG if timed else _DISORDER
    flow = Dataflow("nexmark")
    events = op.input("events", flow, source)
    tumbling = win.TumblingWindower(align_to=_BEGIN, length=_WINDOW)
    if query == "q1":
        results = op.flat_map("q1", events, _euros)
    elif query == "q2":
        results = op.flat_map("q2", events, _every_123rd)
    elif query == "q7":
        lists = op.flat_map("lists", events, _lists)
        clock = win.EventClock(_at_first, disorder)
        results = op.flat_map("q7", win.reduce_window("highest", lists, clock, tumbling, _higher).down, _rows)
    elif query == "q8":
        persons = op.flat_map("persons", events, lambda some: _of("person", "id", some))
        sellers = op.flat_map("sellers", events, lambda some: _of("auction", "seller", some))
        clock = win.EventClock(_at, disorder)
        joined = win.join_window("joined", clock, tumbling, persons, sellers).down
        results = op.filter("q8", joined, lambda pair: None not in pair[1][1])
    else:
        bids = op.flat_map("bids", events, lambda some: [event for event in some if event["kind"] == "bid"])
        clock = win.EventClock(_at, disorder)
        sessions = win.SessionWindower(gap=_WINDOW)
        if timed:  # count_window says no times
            keyed = op.key_on("by bidder", bids, lambda bid: str(bid["bidder"]))
            results = win.fold_window("q11", keyed, clock, sessions, _none, _one_more, _both).down
        else:
            results = win.count_window("q11", bids, clock, sessions, lambda bid: str(bid["bidder"])).down
    op.output("results", results, sink)
    return flow


def _files(paths: list[str]) -> Any:
    from bytewax.inputs import DynamicSource, StatelessSourcePartition

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
            return Part(paths[worker_index::worker_count])

    return Files()


def _lines_from(port: int) -> Any:
    """A source that reads a socket in its first worker."""
    from bytewax.inputs import DynamicSource, StatelessSourcePartition

    class Lines(StatelessSourcePartition):  # type: ignore[misc]
        def __init__(self, reads: bool) -> None:
            self._socket = socket.create_connection(("127.0.0.1", port)) if reads else None
            if self._socket is not None:
                self._socket.setblocking(False)
            self._rest = b""

        def next_batch(self) -> list[list[Event]]:
            if self._socket is None:
                raise StopIteration
            try:
                received = self._socket.recv(1 << 18)
            except BlockingIOError:
                return []
            if not received:
                raise StopIteration
            *lines, self._rest = (self._rest + received).split(b"\n")
            return [[event_of(line.decode()) for line in lines]] if lines else []

        def next_awake(self) -> datetime:
            return datetime.now(timezone.utc) + timedelta(milliseconds=1)

    class Socket(DynamicSource):  # type: ignore[misc]
        def build(self, step_id: str, worker_index: int, worker_count: int) -> Lines:
            return Lines(worker_index == 0)

    return Socket()


def _counted(write: Callable[[list[Any]], None]) -> Any:
    from bytewax.outputs import DynamicSink, StatelessSinkPartition

    class Part(StatelessSinkPartition):  # type: ignore[misc]
        def write_batch(self, items: list[Any]) -> None:
            write(items)

    class Sink(DynamicSink):  # type: ignore[misc]
        def build(self, step_id: str, worker_index: int, worker_count: int) -> Part:
            return Part()

    return Sink()


#: When a result was due, and a value of it. Bytewax names a window by its number.
_DUE: dict[str, Callable[[Any], tuple[int, Any]]] = {
    "q1": lambda row: (row[3], row[2]),
    "q2": lambda row: (row[2], row[1]),
    "q7": lambda row: (row[3] - row[3] % 10_000 + 10_000, row[1]),
    "q8": lambda pair: (pair[1][0] * 10_000 + 10_000, pair[0]),
    "q11": lambda pair: (pair[1][1][1] + 10_000, pair[1][1][0]),
}


def main(asked: dict[str, Any]) -> None:
    """See the module."""
    from bytewax.run import cli_main

    began = time.perf_counter()
    if "port" in asked:
        of = _DUE[asked["query"]]
        with Path(asked["out"], "results").open("w") as file:

            def write(items: list[Any]) -> None:
                now = time.time() * 1000
                file.writelines(f"{due},{now:.1f},{value}\n" for due, value in map(of, items))

            flow = build(asked["query"], _lines_from(asked["port"]), _counted(write), timed=True)
            cli_main(flow, workers_per_process=2)
        print("{}")
        return
    counts: list[int] = []
    flow = build(asked["query"], _files(asked["files"]), _counted(lambda items: counts.append(len(items))), timed=False)
    cli_main(flow, workers_per_process=2)
    print(json.dumps({"seconds": time.perf_counter() - began, "results": sum(counts)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
