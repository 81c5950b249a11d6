"""The Bytewax contestants, each run in processes of its own: `python -m benchmarks.bytewax_peer JSON`.

Written as a Bytewax user would who knows it well: sources and sinks of the stateless kinds, batches of 1,000 lines,
and for every benchmark several forms, of which the best counts.
"""

from __future__ import annotations

import json
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from itertools import islice
from time import monotonic_ns, time_ns
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import DynamicSource, StatelessSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.run import cli_main

from benchmarks.pacing import Latencies, Pacer, split, word_of
from benchmarks.stamps import Counts, FirstRead, Lines
from benchmarks.text import NEEDLE, key

_BATCH = 1_000


class LinesSource(DynamicSource):  # type: ignore[misc]
    """Files shared among the workers; batches of lines."""

    def __init__(self, paths: list[str], out: str, batch: int = _BATCH) -> None:
        self._paths = paths
        self._out = out
        self._batch = batch

    def build(self, step_id: str, worker_index: int, worker_count: int) -> StatelessSourcePartition:
        return _LinesPartition(self._paths[worker_index::worker_count], self._out, self._batch)


class _LinesPartition(StatelessSourcePartition):  # type: ignore[misc]
    def __init__(self, paths: list[str], out: str, batch: int) -> None:
        self._first = FirstRead(out)
        self._lines = (line.rstrip("\n") for path in paths for line in open(path, encoding="utf-8"))  # noqa: SIM115
        self._batch = batch

    def next_batch(self) -> list[str]:
        self._first.now()
        lines = list(islice(self._lines, self._batch))
        if not lines:
            raise StopIteration
        return lines

    def close(self) -> None:
        self._first.save()


class EndSink(DynamicSink):  # type: ignore[misc]
    """Counts or Lines as a sink."""

    def __init__(self, make: Callable[[str], Counts | Lines], out: str) -> None:
        self._make = make
        self._out = out

    def build(self, step_id: str, worker_index: int, worker_count: int) -> StatelessSinkPartition:
        return _EndPartition(self._make(self._out))


class _EndPartition(StatelessSinkPartition):  # type: ignore[misc]
    def __init__(self, end: Counts | Lines) -> None:
        self._end = end

    def write_batch(self, items: list[Any]) -> None:
        self._end.write(items)

    def close(self) -> None:
        self._end.save()


class _SumBatches(op.StatefulBatchLogic):  # type: ignore[misc]
    """A running sum that emits its newest value once a batch."""

    def __init__(self, total: int) -> None:
        self._total = total

    def on_batch(self, values: list[int]) -> tuple[Iterable[int], bool]:
        self._total += sum(values)
        return (self._total,), op.StatefulBatchLogic.RETAIN

    def snapshot(self) -> int:
        return self._total


def _words(lines: list[str]) -> list[str]:
    return [word for line in lines for word in line.split()]


def _pairs(lines: list[str]) -> list[tuple[str, int]]:
    return [(key(word), 1) for line in lines for word in line.split()]


def _combined(lines: list[str]) -> Iterable[tuple[str, int]]:
    return Counter(key(word) for line in lines for word in line.split()).items()


def _add_one(total: int | None, _: object) -> tuple[int, int]:
    total = (total or 0) + 1
    return total, total


def wordcount(settings: dict[str, Any]) -> Dataflow:
    """`input`: "line" (one call a line and word), "batch" (one call a batch of lines) or "combined" (the user counts
    each batch himself); `count`: "final", "stateful" (an update a word) or "stateful_batch" (an update a batch)."""
    flow = Dataflow("wordcount")
    lines = op.input("lines", flow, LinesSource(settings["paths"], settings["out"]))
    form, count = settings["input"], settings["count"]
    if form == "line" and count == "final":
        counted = op.count_final("count", op.flat_map("split", lines, str.split), key)
    elif form == "line":
        keyed = op.key_on("key", op.flat_map("split", lines, str.split), key)
        if count == "stateful":
            counted = op.stateful_map("count", keyed, _add_one)
        else:
            ones = op.map_value("one", keyed, lambda _: 1)
            counted = op.stateful_batch("count", ones, lambda state: _SumBatches(state or 0))
    else:
        pairs = op.flat_map_batch("split", lines, _pairs if form == "batch" else _combined)
        if count == "final":
            counted = op.reduce_final("count", pairs, operator.add)
        elif count == "stateful":
            counted = op.stateful_map("count", pairs, _add_one)
        else:
            counted = op.stateful_batch("count", pairs, lambda state: _SumBatches(state or 0))
    op.output("out", counted, EndSink(Counts, settings["out"]))
    return flow


def grep(settings: dict[str, Any]) -> Dataflow:
    """`input`: "line" (a call a line) or "batch"."""
    import re

    search = re.compile(NEEDLE).search
    flow = Dataflow("grep")
    lines = op.input("lines", flow, LinesSource(settings["paths"], settings["out"]))
    if settings["input"] == "line":
        found = op.filter("find", lines, lambda line: search(line) is not None)
    else:
        found = op.flat_map_batch("find", lines, lambda batch: filter(search, batch))
    op.output("out", found, EndSink(Lines, settings["out"]))
    return flow


class PacedSource(DynamicSource):  # type: ignore[misc]
    """A Pacer in the first worker. `awake`: "due" sleeps until the next record is due, "auto" leaves it to Bytewax
    (a look each millisecond), "spin" looks all the time."""

    def __init__(self, pacer: Pacer, awake: str) -> None:
        self._pacer = pacer
        self._awake = awake

    def build(self, step_id: str, worker_index: int, worker_count: int) -> StatelessSourcePartition:
        return _PacedPartition(self._pacer if worker_index == 0 else None, self._awake)


class _PacedPartition(StatelessSourcePartition):  # type: ignore[misc]
    def __init__(self, pacer: Pacer | None, awake: str) -> None:
        self._pacer = pacer
        self._awake = awake
        # Bytewax's clock is the wall's; ours is the monotonic one.
        self._offset_ns = time_ns() - monotonic_ns()

    def next_batch(self) -> list[tuple[int, str]]:
        if self._pacer is None or self._pacer.finished:
            raise StopIteration
        return self._pacer.due(1 << 30)

    def next_awake(self) -> datetime | None:
        if self._pacer is None or self._awake == "auto":
            return None
        if self._awake == "spin":
            return datetime.fromtimestamp(0, timezone.utc)
        at = self._pacer.next_ns() + self._offset_ns
        return datetime.fromtimestamp(at // 1_000_000_000, timezone.utc) + timedelta(
            microseconds=at % 1_000_000_000 // 1_000
        )


class LatencySink(DynamicSink):  # type: ignore[misc]
    """The user's function for every record."""

    def __init__(self, latencies: Callable[[], Latencies]) -> None:
        self._latencies = latencies

    def build(self, step_id: str, worker_index: int, worker_count: int) -> StatelessSinkPartition:
        return _LatencyPartition(self._latencies())


class _LatencyPartition(StatelessSinkPartition):  # type: ignore[misc]
    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        latencies.open()

    def write_batch(self, items: list[Any]) -> None:
        record = self._latencies.record
        for item in items:
            record(item)

    def close(self) -> None:
        self._latencies.save()


def _running(count: int | None, pair: tuple[str, int]) -> tuple[int, tuple[int, int]]:
    count = (count or 0) + 1
    return count, (pair[1], count)


def _flatten(items: list[tuple[str, tuple[int, int]]]) -> list[tuple[str, int, int]]:
    return [(word, due, count) for word, (due, count) in items]


def _paced(settings: dict[str, Any]) -> tuple[Dataflow, Any, LatencySink]:
    flow = Dataflow(settings["flow"])
    with open(settings["texts"], encoding="utf-8") as file:
        texts = file.read().splitlines()
    pacer = Pacer(texts, settings["rate"], settings["records"])
    records = op.input("paced", flow, PacedSource(pacer, settings["awake"]))
    return flow, records, LatencySink(lambda: Latencies(settings["out"], settings["updates"]))


def wordcount_latency(settings: dict[str, Any]) -> Dataflow:
    """The flow of wordcount_latency.py. `input`: "line" or "batch", as above."""
    flow, records, sink = _paced(settings)
    if settings["input"] == "line":
        keyed = op.key_on("key", op.flat_map("split", records, split), word_of)
    else:
        keyed = op.flat_map_batch(
            "split", records, lambda batch: [(word_of(pair), pair) for one in batch for pair in split(one)]
        )
    counted = op.stateful_map("count", keyed, _running)
    op.output("out", op.flat_map_batch("flat", counted, _flatten), sink)
    return flow


def grep_latency(settings: dict[str, Any]) -> Dataflow:
    """The flow of grep_latency.py."""
    import re

    search = re.compile(NEEDLE).search
    flow, records, sink = _paced(settings)
    if settings["input"] == "line":
        found = op.filter("find", records, lambda record: search(record[1]) is not None)
        shaped = op.map("shape", found, lambda record: (record[1], record[0], 1))
    else:
        shaped = op.flat_map_batch(
            "find", records, lambda batch: [(text, due, 1) for due, text in batch if search(text)]
        )
    op.output("out", shaped, sink)
    return flow


FLOWS = {flow.__name__: flow for flow in (wordcount, grep, wordcount_latency, grep_latency)}


def main() -> None:
    """Run one flow; with `addresses`, as one process of several."""
    settings = json.loads(sys.argv[1])
    flow = FLOWS[settings["flow"]](settings)
    if settings.get("addresses"):
        cli_main(flow, process_id=settings["process"], addresses=settings["addresses"])
    else:
        cli_main(flow, workers_per_process=settings.get("threads", 1))


if __name__ == "__main__":
    main()
