"""What is no Exception, out of a user's function: sys.exit() and the like are failures of the record at hand, by the
operator's policy, wherever the function is called. As what they are they would end the worker's process, and the job
would start it again for the same record."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock as ps
from penstock.bridge.forms import RangeForm, RangeRun, range_form
from penstock.runtime.errors import RecordError
from penstock.runtime.operators.base import StageContext
from penstock.runtime.operators.ends import Write
from penstock.runtime.operators.processing import Processing
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.sinks.base import Committable, Sink, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split


class Stop(BaseException):
    """Of somebody's own."""


def leave(value: Any) -> Any:
    """Ends the process for 3."""
    if value == 3:
        sys.exit("enough")
    return value


def leave_process(ctx: ps.ProcessContext, key: int, record: int) -> list[int]:
    return [leave(record)]


def leave_in_timer(ctx: ps.ProcessContext, key: int, at_ms: int) -> list[int]:
    return [leave(key)]


def set_timer(ctx: ps.ProcessContext, key: int, record: int) -> None:
    ctx.set_timer(after_s=record)


def late_leave(value: int) -> Iterator[int]:
    yield leave(value)


def in_window(numbers: Any, policy: Any) -> Any:
    timed = numbers.watermark(leave, name="it", on_error=policy)
    return timed.key_by(lambda record: 0).window(ps.Tumbling(1)).count()


def whole(numbers: Any, policy: Any) -> Any:
    return numbers.key_by(lambda n: n).sum(leave, name="it", on_error=policy, emit="final").map(lambda pair: pair[1])


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "map": lambda s, p: s.map(leave, name="it", on_error=p),
    "filter": lambda s, p: s.filter(lambda n: leave(n) is not None, name="it", on_error=p),
    "flat_map": lambda s, p: s.flat_map(late_leave, name="it", on_error=p),
    "map_batches": lambda s, p: s.map_batches(lambda some: list(map(leave, some)), batch_size=1, name="it", on_error=p),
    "process": lambda s, p: s.key_by(lambda n: n).process(leave_process, name="it", on_error=p),
    "on_timer": lambda s, p: s.key_by(lambda n: n).process(set_timer, on_timer=leave_in_timer, name="it", on_error=p),
    "selector": whole,
    "reduce": lambda s, p: (
        s.key_by(lambda n: 0)
        .reduce(lambda a, n: leave(n), name="it", on_error=p, emit="every")
        .map(lambda pair: pair[1])
    ),
}


def flow_of(place: str, policy: str) -> ps.Flow:
    flow = ps.Flow("exits")
    PLACES[place](flow.read(ps.sources.Memory([1, 2, 3, 4])), policy).write(ps.sinks.Collect(), name="out")
    return flow


@pytest.mark.parametrize("place", PLACES)
def test_sys_exit_is_an_error_that_names_operator_record_and_line(place: str) -> None:
    with pytest.raises(RecordError) as failed:
        ps.testing.run(flow_of(place, "fail"))
    error = failed.value
    assert error.operator == "it"
    assert str(error).startswith("operator 'it' failed")
    assert ": called sys.exit('enough')" in str(error)
    assert "3" in error.record
    assert error.location is not None
    assert "test_exits.py" in error.location
    assert 'sys.exit("enough")' in error.location


@pytest.mark.parametrize("place", PLACES)
def test_sys_exit_is_let_go_where_the_policy_says_so(place: str) -> None:
    assert sorted(ps.testing.run(flow_of(place, "skip"))["out"]) == [1, 2, 4]


def test_sys_exit_in_the_time_of_a_record_and_in_its_key() -> None:
    flow = ps.Flow("exits")
    in_window(flow.read(ps.sources.Memory([1, 2, 3, 4])), "skip").write(ps.sinks.Collect(), name="out")
    assert ps.testing.run(flow)["out"] == [(0, 0, 1000, 3)]
    flow = ps.Flow("exits")
    flow.read(ps.sources.Memory([1, 2, 3, 4])).key_by(leave).count().write(ps.sinks.Collect())
    with pytest.raises(RecordError, match=r"called sys\.exit"):
        ps.testing.run(flow)


@pytest.mark.parametrize("error", [SystemExit(), GeneratorExit(), asyncio.CancelledError(), Stop("own")])
def test_the_like_of_sys_exit(error: BaseException) -> None:
    def fail(record: int) -> int:
        if record == 2:
            raise error
        return record

    flow = ps.Flow("exits")
    flow.read(ps.sources.Memory([1, 2, 3])).map(fail, on_error="skip").write(ps.sinks.Collect(), name="out")
    assert ps.testing.run(flow)["out"] == [1, 3]


@pytest.mark.parametrize("place", PLACES)
def test_what_a_function_raises_is_told_from_the_end_of_a_generator_of_ours(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(value: Any) -> Any:
        if value == 3:
            raise GeneratorExit
        return value

    monkeypatch.setattr(sys.modules[__name__], "leave", end)
    assert sorted(ps.testing.run(flow_of(place, "skip"))["out"]) == [1, 2, 4]
    with pytest.raises(RecordError, match=r"operator 'it' failed.*: GeneratorExit"):
        ps.testing.run(flow_of(place, "fail"))


def test_the_end_of_a_generator_of_ours_is_no_failure() -> None:
    stage = Processing(lambda ctx, key, n: range(10_000), name="it", on_error="skip")
    running = stage.stage(StageContext(stage))
    running.open()
    pieces = running.expand(KeyedBatch([1], [1]))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert running.errors.skipped == 0


class LeavingProcess(ps.ProcessFunction):
    """Ends the process in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def open(self, ctx: ps.ProcessContext) -> None:
        self._maybe("open")

    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
        self._maybe("process")

    def finish(self, ctx: ps.ProcessContext) -> None:
        self._maybe("finish")

    def close(self) -> None:
        self._maybe("close")

    def _maybe(self, name: str) -> None:
        if self.method == name:
            sys.exit(1)


@pytest.mark.parametrize("method", ["open", "process", "finish", "close"])
def test_sys_exit_in_a_process(method: str) -> None:
    flow = ps.Flow("exits")
    keyed = flow.read(ps.sources.Memory([1])).key_by(lambda n: n)
    keyed.process(LeavingProcess(method), name="it").write(ps.sinks.Collect())
    with pytest.raises(RecordError, match=r"operator 'it' failed: called sys\.exit\(1\)"):
        ps.testing.run(flow)


def test_sys_exit_in_a_worker_of_spark() -> None:
    """What runs there fails with an ordinary error; the task then processes the record."""
    plan = flow_of("map", "skip").plan(1)
    form = range_form(plan, plan.chains[0])
    assert isinstance(form, RangeForm)
    run = RangeRun(form)
    run.take([1, 2, 3, 4])
    answer = run.answer()
    assert answer.unprocessed, "it comes back"
    assert "called sys.exit('enough')" in answer.unprocessed[0].why


# --- sources and sinks -----------------------------------------------------------------------------------------


class Leaving(Source):
    """A source of ten records whose reader ends the process in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("only")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        if self.method == "reader":
            sys.exit(1)
        return _LeavingReader(self.method)


class _LeavingReader(Reader):
    def __init__(self, method: str) -> None:
        self.method = method

    def read(self, limit: int) -> list[Any]:
        if self.method == "read":
            sys.exit(1)
        self.finished = True
        return list(range(10))

    def offsets(self) -> dict[str, Any]:
        return {"only": 10 if self.finished else 0}

    def close(self) -> None:
        if self.method == "close":
            sys.exit(1)


@pytest.mark.parametrize("method", ["reader", "read", "close"])
def test_sys_exit_in_a_source(method: str) -> None:
    flow = ps.Flow("exits")
    flow.read(Leaving(method), name="it").write(ps.sinks.Collect())
    with pytest.raises(RecordError, match=r"operator 'it' failed: called sys\.exit\(1\)"):
        ps.testing.run(flow)


class LeavingSink(Sink):
    """A sink that ends the process in one of its writer's methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def writer(self, context: SinkContext) -> SinkWriter:
        method = self.method

        class Writer(SinkWriter):
            def write(self, records: list[Any]) -> None:
                self._maybe("write")

            def flush(self) -> None:
                self._maybe("flush")

            def finish(self) -> None:
                self._maybe("finish")

            def prepare(self, epoch: int) -> Any:
                self._maybe("prepare")
                return "something"

            def _maybe(self, name: str) -> None:
                if method == name:
                    sys.exit(1)

        return Writer()

    def committer(self, context: SinkContext) -> SinkCommitter:
        class Committer(SinkCommitter):
            def commit(self, committables: list[Committable]) -> None:
                sys.exit(1)

        return Committer()


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("write", lambda stage: stage.run([1])),
        ("flush", lambda stage: stage.flush()),
        ("finish", lambda stage: list(stage.finish())),
        ("prepare", lambda stage: stage.snapshot(1, True)),
        ("commit", lambda stage: (stage.snapshot(1, True), stage.commit(1))),
    ],
)
def test_sys_exit_in_a_sink(method: str, call: Callable[[Any], Any]) -> None:
    stage = Write(LeavingSink(method), name="it").stage(StageContext(Write(LeavingSink(method), name="it")))
    stage.open()
    with pytest.raises(RecordError, match=r"operator 'it' failed: called sys\.exit\(1\)"):
        call(stage)


@pytest.mark.parametrize("batches", [False, True])
def test_sys_exit_in_a_function_that_is_a_sink(batches: bool) -> None:
    def take(given: Any) -> None:
        sys.exit()

    operator = Write(ps.sinks.Call(take, batches=batches), name="it", on_error="skip")
    stage = operator.stage(StageContext(operator))
    stage.open()
    stage.run([1, 2])
    assert stage.errors.skipped == 2


# --- at the end of a process -------------------------------------------------------------------------------------


def test_a_process_that_ends_says_nothing_of_native_objects() -> None:
    """What keeps one alive to the end is not the user's business, and would hide what the process died of."""
    leak = """
import ctypes
from penstock.runtime._native import RingHandle
ring = RingHandle.create(65536, 64, "/dev/shm")
ctypes.pythonapi.Py_IncRef(ctypes.py_object(ring))
"""
    run = subprocess.run([sys.executable, "-c", leak], capture_output=True, text=True, check=True)
    assert run.stderr == ""
