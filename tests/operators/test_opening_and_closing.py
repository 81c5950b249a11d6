"""Errors of what a task calls once: `__init__`, open() and close() of a user's objects. No record is to blame for
them, but the operator and the user's line are named, as for a record that fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import RecordError
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter

METHODS = ["__init__", "open", "close"]


def fail_in(method: str, at: str) -> None:
    if method == at:
        raise KeyError(f"of {method}")  # the user's line


class Fails:
    """A function of records, and of lists of them, that fails in one of its methods."""

    def __init__(self, at: str) -> None:
        self.at = at
        fail_in("__init__", at)

    def open(self) -> None:
        fail_in("open", self.at)

    def __call__(self, given: Any) -> Any:
        return given

    def close(self) -> None:
        fail_in("close", self.at)


class FailsOfMany(Fails):
    def __call__(self, given: Any) -> list[Any]:
        return [given]


class FailsLater(Fails):
    async def __call__(self, given: Any) -> Any:
        return given


class OpensLater(FailsLater):
    async def open(self) -> None:  # type: ignore[override]
        fail_in("open", self.at)

    async def close(self) -> None:  # type: ignore[override]
        fail_in("close", self.at)


class FailsOfWindow(Fails):
    def __call__(self, ctx: Any, key: Any, window: Any, records: Iterable[Any]) -> list[Any]:  # type: ignore[override]
        return list(records)


class FailsOfRow(Fails):
    def __call__(self, given: Any) -> dict[str, Any]:
        return {"name": "one"}


class FailingProcess(ps.ProcessFunction):
    def __init__(self, at: str) -> None:
        self.at = at

    def open(self, ctx: ps.ProcessContext) -> None:
        fail_in("open", self.at)

    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> list[Any]:
        return [record]

    def close(self) -> None:
        fail_in("close", self.at)


# How a class is given whose object each task makes, and how an object, of which each task has a copy.
OF_A_CLASS: dict[str, Callable[[Any, str], Any]] = {
    "map": lambda s, at: s.map(Fails, fn_constructor_args=(at,), name="it"),
    "flat_map": lambda s, at: s.flat_map(FailsOfMany, fn_constructor_args=(at,), name="it"),
    "map_batches": lambda s, at: s.map_batches(Fails, fn_constructor_kwargs={"at": at}, name="it"),
    "map_batches as columns": lambda s, at: s.map(lambda n: {"n": n}).map_batches(
        Fails, fn_constructor_args=(at,), batch_format="numpy", name="it"
    ),
}
OF_AN_OBJECT: dict[str, Callable[[Any, str], Any]] = {
    "map of an object": lambda s, at: s.map(Fails(at), name="it"),
    "filter": lambda s, at: s.filter(Fails(at), name="it"),
    "process": lambda s, at: s.key_by(lambda n: n).process(FailingProcess(at), name="it"),
    "map_async in threads": lambda s, at: s.map_async(Fails(at), name="it"),
    "map_async": lambda s, at: s.map_async(FailsLater(at), name="it"),
    "map_async with async hooks": lambda s, at: s.map_async(OpensLater(at), name="it"),
    "lookup": lambda s, at: s.map(lambda n: {"id": n}).lookup(FailsOfRow(at), on="id", name="it"),
    "window": lambda s, at: (
        s.watermark(lambda n: n).key_by(lambda n: n).window(ps.Tumbling(1)).process(FailsOfWindow(at), name="it")
    ),
}
CASES = [(place, make, at) for place, make in OF_A_CLASS.items() for at in METHODS] + [
    (place, make, at) for place, make in OF_AN_OBJECT.items() for at in ("open", "close")
]


def flow_of(make: Callable[[Any, str], Any], at: str) -> ps.Flow:
    flow = ps.Flow("once")
    numbers = flow.read(ps.sources.Memory([1, 2]))
    make(numbers, at).write(ps.sinks.Collect(), name="out")
    return flow


def check(error: Exception, at: str, operator: str | None) -> None:
    line = inspect.getsourcelines(fail_in)[1] + 2
    assert operator == "it"
    assert f"operator 'it' failed: KeyError: 'of {at}'" in str(error)
    assert f"at {__file__}:{line} in fail_in: raise KeyError" in str(error)
    assert f"operator declared at {__file__}" in str(error)
    assert "Traceback" not in str(error)


@pytest.mark.parametrize(("place", "make", "at"), CASES, ids=[f"{place}-{at}" for place, _, at in CASES])
def test_the_operator_and_the_line_are_named(place: str, make: Callable[[Any, str], Any], at: str) -> None:
    with pytest.raises(RecordError) as failed:
        ps.testing.run(flow_of(make, at))
    check(failed.value, at, failed.value.operator)
    assert "(closing)" in failed.value.record if at == "close" else "(opening)" in failed.value.record
    assert failed.value.location is not None
    assert "in fail_in" in failed.value.location


class FailingSink(Sink):
    """A sink whose writer fails when it is made or closed."""

    def __init__(self, at: str) -> None:
        self.at = at

    def writer(self, context: SinkContext) -> SinkWriter:
        at = self.at
        fail_in("open", at)

        class Writer(SinkWriter):
            def write(self, records: list[Any]) -> None:
                pass

            def close(self, failed: bool) -> None:
                fail_in("close", at)

        return Writer()


def with_sink(at: str) -> ps.Flow:
    flow = ps.Flow("once")
    flow.read(ps.sources.Memory([1, 2])).write(FailingSink(at), name="it")
    return flow


IN_JOBS = {
    **{f"map-{at}": (partial(flow_of, OF_A_CLASS["map"]), at) for at in METHODS},
    "process-close": (partial(flow_of, OF_AN_OBJECT["process"]), "close"),
    "sink-open": (with_sink, "open"),
    "sink-close": (with_sink, "close"),
}


@pytest.mark.parametrize("case", IN_JOBS)
def test_a_job_of_worker_processes_says_the_same(case: str, tmp_path: Path) -> None:
    make, at = IN_JOBS[case]
    job = ps.run(make(at), local=True, workers=1, checkpoints=tmp_path)
    with pytest.raises(ps.JobFailed) as failed:
        job.wait(60, progress=False)
    check(failed.value, at, failed.value.operator)


def test_the_first_error_of_closing_is_told_and_all_is_closed(tmp_path: Path) -> None:
    class Noted(Fails):
        def close(self) -> None:
            (tmp_path / self.at).touch()
            raise ValueError(f"of {self.at}")

    flow = ps.Flow("once")
    first = flow.read(ps.sources.Memory([1])).map(Noted("first"), name="first")
    first.map(Noted("second"), name="second").write(ps.sinks.Collect())
    with pytest.raises(RecordError, match="operator 'first' failed: ValueError: of first") as failed:
        ps.testing.run(flow)
    assert failed.value.operator == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_what_a_record_has_done_is_told_before_what_closing_has_done() -> None:
    class Both(Fails):
        def __call__(self, given: Any) -> Any:
            raise ValueError("of a record")

    flow = ps.Flow("once")
    flow.read(ps.sources.Memory([1])).map(Both("close"), name="it").write(ps.sinks.Collect())
    with pytest.raises(RecordError, match="operator 'it' failed: ValueError: of a record"):
        ps.testing.run(flow)


class FailingSource(ps.sources.Source):
    def __init__(self, at: str) -> None:
        self.at = at

    def splits(self, parallelism: int) -> list[ps.sources.Split]:
        return [ps.sources.Split("all")]

    def reader(self, splits: list[ps.sources.Split], context: ps.sources.SourceContext) -> ps.sources.Reader:
        fail_in("reader", self.at)
        return FailingReader(self.at)


class FailingReader(ps.sources.Reader):
    def __init__(self, at: str) -> None:
        self.at = at

    def read(self, limit: int) -> list[Any]:
        fail_in("read", self.at)
        self.finished = True
        return None if self.at == "nothing" else []  # type: ignore[return-value]

    def offsets(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        fail_in("close", self.at)


@pytest.mark.parametrize("at", ["reader", "read", "close", "nothing"])
def test_an_error_of_a_source_names_the_operator_and_the_line(at: str, fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(FailingSource(at), name="it").write(ps.sinks.Null())
    with pytest.raises(ps.JobFailed) as caught:
        ps.run(flow, workers=1, local=True).wait(60, progress=False)
    assert "operator 'it' failed" in str(caught.value)
    if at == "nothing":
        assert "read() of a FailingReader must return a list, and it returned None" in str(caught.value)
    else:
        assert "test_opening_and_closing.py:" in str(caught.value)
