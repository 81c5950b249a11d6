"""Running a flow in the calling process, for users' own tests: no Ray, no workers, the same answer every time.

    flow = build_flow()
    out = penstock.testing.run(flow, {"read": ["to be", "or not"]})
    assert out["write"] == [...]

The tasks, operators, key partitioning and channels are the real ones, run by one run loop in a fixed order; sources
and sinks named in `inputs` and all sinks are replaced by lists.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.runtime.build import build
from penstock.runtime.errors import FlowError
from penstock.runtime.loop import RunLoop
from penstock.runtime.operators import Operator, Read, Write
from penstock.runtime.plan import make_plan
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.transport.memory import MemoryNetwork

if TYPE_CHECKING:
    from penstock.runtime.flow import Flow


def run(
    flow: Flow,
    inputs: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None,
    *,
    parallelism: int | None = 1,
    batch_size: int = 1,
) -> dict[str, list[Any]]:
    """Run `flow` to its end; the records that reached each sink, by the sink operator's name.

    `inputs` gives records for sources by operator name (or, for a flow with one source, just the records); other
    sources are read as they are and must be bounded. `parallelism` replaces the flow's own default (None: 1).
    Records enter `batch_size` at a time, so with 1 every update of an aggregate shows. Errors of user functions are
    raised as RecordError. The flow itself is not changed and can be run again.
    """
    operators = _replace(flow, inputs)
    graph = copy.copy(flow.graph)
    graph.operators = operators
    plan = make_plan(graph, parallelism=parallelism, key_groups=flow.key_groups, workers=1, chaining=flow.chaining)
    for chain in plan.chains:
        if chain.source is not None:
            source = chain.operators[0] = copy.copy(chain.source)
            source.source = _Sliced(source.source, batch_size)
    now = 0

    def clock() -> int:
        """A clock of its own: each look is a microsecond later."""
        nonlocal now
        now += 1000
        return now

    outputs: dict[str, list[Any]] = {name: [] for name, op in operators.items() if isinstance(op, Write)}
    transport = MemoryNetwork(1).transport(0)
    wiring = build(
        plan,
        {task.number: 0 for task in plan.tasks},
        0,
        transport,
        clock=clock,
        report=lambda reported: outputs[reported.channel].extend(reported.records),
    )
    for task in wiring.tasks.values():
        task.stopwatch = lambda: 0  # the size of steps, and so what is seen together, must not follow the real time
    RunLoop(wiring, transport, clock).run()
    return outputs


def _replace(flow: Flow, inputs: Mapping[str, Iterable[Any]] | Iterable[Any] | None) -> dict[str, Operator]:
    reads = [name for name, op in flow.graph.operators.items() if isinstance(op, Read)]
    given: dict[str, Iterable[Any]]
    if inputs is None:
        given = {}
    elif isinstance(inputs, Mapping):
        given = dict(inputs)
    elif len(reads) == 1:
        given = {reads[0]: inputs}
    else:
        raise FlowError(f"flow {flow.name!r} has {len(reads)} sources; give inputs by name: {', '.join(reads)}")
    for name in given:
        if name not in reads:
            raise FlowError(f"flow {flow.name!r} has no source {name!r}; its sources: {', '.join(reads)}")
    operators: dict[str, Operator] = {}
    for name, operator in flow.graph.operators.items():
        replaced = copy.copy(operator)
        if isinstance(replaced, Read):
            if name in given:
                replaced.source = _Given(list(given[name]))
            elif not replaced.source.bounded:
                raise FlowError(f"source {name!r} never ends; give its records in `inputs`")
        elif isinstance(replaced, Write):
            replaced.sink = _Taken()
        operators[name] = replaced
    return operators


class _Given(Source):
    """The records of a list, all in the first task."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("given")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _GivenReader(self.records if splits else [])


class _GivenReader(Reader):
    def __init__(self, records: list[Any]) -> None:
        self._records = records
        self._next = 0
        self.finished = not records

    def read(self, limit: int) -> list[Any]:
        records = self._records[self._next : self._next + limit]
        self._next += len(records)
        self.finished = self._next >= len(self._records)
        return records

    def offsets(self) -> dict[str, Any]:
        return {"given": self._next}


class _Sliced(Source):
    """A source whose readers hand out at most `size` records at a time."""

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self._size = size

    def splits(self, parallelism: int) -> list[Split]:
        return self._source.splits(parallelism)

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _SlicedReader(self._source.reader(splits, context), self._size)


class _SlicedReader(Reader):
    def __init__(self, reader: Reader, size: int) -> None:
        self._reader = reader
        self._size = size

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return self._reader.finished

    def read(self, limit: int) -> list[Any]:
        return self._reader.read(min(limit, self._size))

    def offsets(self) -> dict[str, Any]:
        return self._reader.offsets()

    def ready_in(self) -> float | None:
        return self._reader.ready_in()

    def close(self) -> None:
        self._reader.close()


class _Taken(Sink):
    def writer(self, context: SinkContext) -> SinkWriter:
        return _TakenWriter(context)


class _TakenWriter(SinkWriter):
    def __init__(self, context: SinkContext) -> None:
        self._context = context

    def write(self, records: list[Any]) -> None:
        self._context.report(self._context.operator, records)
