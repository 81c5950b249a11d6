"""A worker has no memory for the state of tasks that were removed, whoever still refers to these tasks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.operators.process import ProcessContext
from penstock.runtime.program.flow import Flow, KeyedStream
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from tests.worker.test_loop import loop_of

KEYS = 20
_made: list[weakref.ref[Value]] = []


class Value:
    """A record whose end shows."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.time = 1_700_000_000_000 + number
        _made.append(weakref.ref(self))

    def __lt__(self, other: Value) -> bool:
        return self.number < other.number

    def __gt__(self, other: Value) -> bool:
        return self.number > other.number

    def __reduce__(self) -> tuple[Any, ...]:
        return Value, (self.number,)


class Endless(Source):
    """Makes a value for each key, and then nothing."""

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("all")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _EndlessReader()


class _EndlessReader(Reader):
    def __init__(self) -> None:
        self._made = False

    def read(self, limit: int) -> list[Any]:
        made, self._made = self._made, True
        return [] if made else [Value(number) for number in range(KEYS)]

    def offsets(self) -> dict[str, Any]:
        return {}


def _keep(ctx: ProcessContext, key: int, record: Value) -> None:
    ctx.set(record)
    ctx.set_timer(after_s=3600)


def _ring(ctx: ProcessContext, key: int, at_ms: int) -> None: ...


KINDS: dict[str, Callable[[KeyedStream], Any]] = {
    "reduce": lambda keyed: keyed.reduce(lambda old, new: new, emit="final"),
    "max": lambda keyed: keyed.max(lambda value: value, emit="final"),
    "process": lambda keyed: keyed.process(_keep, on_timer=_ring),
    "window": lambda keyed: keyed.window(Tumbling(3600)).max(lambda value: value),
}


def _alive() -> int:
    return sum(made() is not None for made in _made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epochs", [True, False])
def test_state_goes_when_its_task_is_removed(kind: str, epochs: bool) -> None:
    _made.clear()
    flow = Flow("f")
    stream = flow.read(Endless()).watermark(lambda value: value.time)
    KINDS[kind](stream.key_by(lambda value: value.number)).write(Null())
    loop, _ = loop_of(flow, output_caches=OutputCaches() if epochs else None)
    tasks = list(loop.tasks)
    for task in tasks:
        task.open()
    for _ in range(10):
        for task in tasks:
            if task.runnable():
                task.step()
    assert _alive() >= KEYS
    loop.remove_tasks({task.task.number for task in tasks}, 0)
    assert loop.tasks == []
    assert _alive() == 0, f"{_alive()} values live on in {len(tasks)} removed tasks"
