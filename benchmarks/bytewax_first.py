"""The word count of local_peer.py as a Bytewax dataflow."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import DynamicSource, StatelessSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition


class _Lines(StatelessSourcePartition):  # type: ignore[misc]
    def __init__(self, line: Callable[[int], str]) -> None:
        self._line = line
        self._number = 0

    def next_batch(self) -> list[str]:
        self._number += 1
        return [self._line(self._number)]

    def next_awake(self) -> datetime:
        return datetime.now(timezone.utc) + timedelta(milliseconds=1)


class _Source(DynamicSource):  # type: ignore[misc]
    def __init__(self, line: Callable[[int], str]) -> None:
        self._line = line

    def build(self, step_id: str, worker_index: int, worker_count: int) -> StatelessSourcePartition:
        return _Lines(self._line)


class _Results(StatelessSinkPartition):  # type: ignore[misc]
    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take

    def write_batch(self, items: list[Any]) -> None:
        for item in items:
            self._take(item)


class _Sink(DynamicSink):  # type: ignore[misc]
    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take

    def build(self, step_id: str, worker_index: int, worker_count: int) -> StatelessSinkPartition:
        return _Results(self._take)


def _count(state: int | None, _: int) -> tuple[int, int]:
    total = (state or 0) + 1
    return total, total


def dataflow(line: Callable[[int], str], take: Callable[[Any], None]) -> Dataflow:
    """Lines to running counts of their words."""
    flow = Dataflow("first_result")
    lines = op.input("in", flow, _Source(line))
    keyed = op.map("key", op.flat_map("split", lines, str.split), lambda word: (word.lower(), 1))
    op.output("out", op.stateful_map("count", keyed, _count), _Sink(take))
    return flow
