"""Running a flow in the calling process, for users' own tests: no Ray, no workers, the same answer every time.

    flow = build_flow()
    out = penstock.testing.run(flow, {"read": ["to be", "or not"]})
    assert out["write"] == [...]

The tasks, operators, key partitioning and channels are the real ones, run by one run loop in a fixed order; sources
and sinks named in `inputs` and all sinks are replaced by lists.

It must never let pass what a job of two workers refuses: the flow is pickled and unpickled, what goes from task to task
is encoded, decoded and looked at for keys that do not hash, and the state is saved in epochs. And it must never wait
for time to pass: when nothing can run, its clock is put forward to what is due next.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.runtime.epochs.snapshot import encode_snapshot
from penstock.runtime.errors import FlowError
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.mistakes import called, refusing
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.operators.windowing import LATE, late_words
from penstock.runtime.program.flow import check_flow
from penstock.runtime.program.graph import Graph
from penstock.runtime.program.mixing import mixing, mixing_words
from penstock.runtime.program.plan import make_plan
from penstock.runtime.records.pickling import copied
from penstock.runtime.records.userfunc import check_picklable
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.generator import Generator
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.memory import MemoryNetwork, MemoryTransport
from penstock.runtime.units import is_whole
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.source_task import SourceTask
from penstock.runtime.worker.task import Snapshot, Steps
from penstock.runtime.worker.wiring import Wiring, build

if TYPE_CHECKING:
    from penstock.runtime.program.flow import Flow

logger = logging.getLogger(__name__)

# The simulated time at which a run starts, for timers: 2024-01-01 00:00 UTC, the same in every run.
_BEGIN_S = 1_704_067_200
_LOOK_NS = 1000  # the simulated time that passes with each look at the clock
# After this many reads that gave nothing although a reader had said so, its reader must use another clock.
_FRUITLESS = 100
_REAL_WAIT_S = 0.005
_INBOX_BYTES = 1 << 30


@refusing
def run(
    flow: Flow,
    inputs: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None,
    *,
    parallelism: int | None = 1,
    batch_size: int = 1,
) -> dict[str, list[Any]]:
    """Run `flow` to its end. Returns the records that reached each sink, by the name of the sink's operator.

    `inputs`: records that replace sources, by operator name; for a flow with one source, simply the records. Other
    sources are read as they are, and must end. `parallelism`: replaces the flow's own default (None: 1). Records enter
    `batch_size` at a time, so with 1 every update of an aggregate shows.

    The clock is simulated. It begins at 2024-01-01 00:00 UTC, and each look at it adds a microsecond. When nothing is
    left to do, it jumps to the next timer or to the next record of a paced source. Only a reader that uses another
    clock than that of its context makes the run wait in real time.

    The run is as strict as a job. RecordError is raised for an error of a user's function, for records and state that
    cannot be pickled, and for keys whose hash differs between processes. FlowError is raised when the flow cannot be
    pickled. As in a worker, functions run as copies: what they assign to variables of the program is not visible there.
    The flow itself is not changed, and can be run again. As at the end of a job, a warning is logged when records were
    dropped because they came too late for their windows.

    The run is stricter in one thing: RecordError is raised when a function changes a record that several tasks have,
    because the record came through broadcast(). In a job, the tasks of a worker share these records.
    """
    check_flow(flow, "testing.run()")
    if parallelism is not None and not (is_whole(parallelism) and parallelism >= 1):
        raise FlowError(f"testing.run(): parallelism={parallelism!r}; it must be a whole number, 1 or more, or None")
    if not is_whole(batch_size) or batch_size < 1:
        raise FlowError(f"testing.run(): batch_size={batch_size!r}; it must be a whole number, 1 or more")
    graph = copy.copy(flow.graph)
    graph.operators = _replace(flow, _travelled(flow.graph), inputs)
    plan = make_plan(
        graph,
        parallelism=parallelism,
        key_groups=flow.key_groups,
        workers=1,
        chaining=flow.chaining,
        fuse_keys=False,
    )
    for chain in plan.chains:
        if chain.source is not None:
            if not isinstance(chain.source.source, _Given):
                check_picklable(chain.splits, f"the splits of source {chain.source.name!r}")
            source = chain.operators[0] = copy.copy(chain.source)
            source.source = _Sliced(source.source, batch_size)
    outputs: dict[str, list[Any]] = {name: [] for name, op in graph.operators.items() if isinstance(op, Write)}
    clock = _Clock()
    transport = _Transport(MemoryNetwork(1, _INBOX_BYTES), clock)
    epochs = _Epochs(plan.key_groups)
    wiring = build(
        plan,
        {task.number: 0 for task in plan.tasks},
        0,
        transport,
        clock=clock,
        report=lambda reported: outputs[reported.channel].extend(reported.records),
        output_caches=OutputCaches(),
        on_snapshot=epochs.on_snapshot,
        wall=clock.wall,
        apart=True,
        check_shared=True,
        # The size of steps, and so which records are processed together, must not depend on the real time. Records that
        # enter one by one are processed one by one. Nobody goes back to these epochs, and they must not have any
        # effect.
        steps=Steps(stopwatch=lambda: 0, waits_for_more=False, barriers_let_go=False),
    )
    for task in wiring.tasks.values():
        if isinstance(task, SourceTask):
            assert isinstance(task.reader, _SlicedReader)
            transport.readers.append(task.reader)
    Loop(wiring, transport, clock, epochs).run()
    dropped: dict[str, int] = {}
    for stage in (stage for task in wiring.tasks.values() for stage in task.stages):
        name = stage.context.operator.name
        if stage.late and (name, LATE) not in plan.side_outputs:
            dropped[name] = dropped.get(name, 0) + stage.late
    if said := late_words(dropped, mixing_words(mixing(plan))):
        logger.warning("testing.run(%r): %s", flow.name, said)
    return outputs


class _Clock:
    """A simulated clock: each look at it is a little later, and it jumps forward when nothing can be done."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += _LOOK_NS
        return self.now

    def wall(self) -> float:
        """Returns seconds since 1970, for timers."""
        return _BEGIN_S + self.now / 1e9


class _Transport(MemoryTransport):
    """A transport that advances the clock when it would wait."""

    def __init__(self, network: MemoryNetwork, clock: _Clock) -> None:
        super().__init__(network, 0)
        self.readers: list[_SlicedReader] = []
        self._clock = clock

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        if not timeout:  # None: only another thread, of a reader, can continue
            return super().receive(timeout)
        messages = super().receive(0)
        if not messages:
            if any(reader.fruitless > _FRUITLESS for reader in self.readers):
                time.sleep(min(timeout, _REAL_WAIT_S))
            self._clock.now += max(_LOOK_NS, round(timeout * 1e9))
        return messages


class _Epochs:
    """Epochs that are not kept. They check that a job could save all state."""

    def __init__(self, key_groups: int) -> None:
        self.open: dict[int, set[int]] = {}  # epoch -> tasks that have not saved their part yet
        self.ended: set[int] = set()
        self._key_groups = key_groups
        self._begun = 0

    def begin(self, tasks: Iterable[int]) -> int:
        """Begins the next epoch of these tasks, and returns its number."""
        self._begun += 1
        self.open[self._begun] = set(tasks) - self.ended
        return self._begun

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Takes a task's part of an epoch. Raises RecordError for state that cannot be saved."""
        encode_snapshot(snapshot.states, self._key_groups)
        number = snapshot.task.number
        if snapshot.finished:
            self.ended.add(number)
        for epoch, waiting in self.open.items():
            if snapshot.finished or epoch <= snapshot.epoch:
                waiting.discard(number)

    def complete(self) -> int | None:
        """Returns an epoch that is complete, the oldest first, or None."""
        epoch = next(iter(self.open), None)
        if epoch is None or self.open[epoch]:
            return None
        del self.open[epoch]
        return epoch


class Loop(RunLoop):
    """A run loop that is also the coordinator of the epochs. Epochs become more and more rare, so that saving the state
    costs in proportion to the input, and each source has one after its last record."""

    def __init__(self, wiring: Wiring, transport: _Transport, clock: Callable[[], int], epochs: _Epochs) -> None:
        super().__init__(wiring, transport, clock)
        self._epochs = epochs
        self._readers = transport.readers
        self._others = [task for task in self.tasks if not isinstance(task, SourceTask)]
        self._next = 1
        self._read = {task.task.number for task in self._sources}  # tasks that still have records

    def _deliver(self, messages: Any) -> None:
        super()._deliver(messages)
        numbers = [task.task.number for task in self.tasks]
        while (epoch := self._epochs.complete()) is not None:
            self.complete(epoch)
        if len(self._epochs.ended) == len(numbers):
            self.end()
            return
        over = {task.task.number for task in self._sources if task.reader.finished} & self._read
        self._read -= over
        if over or (self.passes >= self._next and not self._epochs.open):
            self._next = self.passes + 1 + self.passes // 8
            self.trigger(self._epochs.begin(numbers))
        # What was read passes all tasks before more is read. Otherwise records would meet on their way, and would be
        # processed together.
        held = bool(self._epochs.open) or any(task.runnable() for task in self._others)
        for reader in self._readers:
            reader.held = held


def _travelled(graph: Graph) -> dict[str, Operator]:
    """Returns the operators as a worker gets them."""
    try:
        travelled: dict[str, Operator] = copied(graph.operators)
    except Exception:  # find out which operator is the cause, and name it
        for name, operator in graph.operators.items():
            check_picklable(vars(operator), f"operator {name!r}")
        raise
    return travelled


def _replace(
    flow: Flow, travelled: dict[str, Operator], inputs: Mapping[str, Iterable[Any]] | Iterable[Any] | None
) -> dict[str, Operator]:
    """Replaces sources by what the caller gives, and sinks by ones that bring their records here."""
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
    for name, records in given.items():
        if name not in reads:
            raise FlowError(f"flow {flow.name!r} has no source {name!r}; its sources: {', '.join(reads)}")
        if isinstance(records, str | bytes) or not isinstance(records, Iterable):
            raise FlowError(f"testing.run(): source {name!r} needs a list of records, got {called(records)}")
    operators: dict[str, Operator] = {}
    for name, operator in travelled.items():
        replaced = copy.copy(operator)
        if isinstance(replaced, Read):
            if name in given:
                replaced.source = _Given(list(given[name]))
            elif not replaced.source.bounded:
                raise FlowError(f"source {name!r} never ends; give its records in `inputs`")
            elif isinstance(source := replaced.source, Generator) and source.schedule is None and source.limit is None:
                raise FlowError(
                    f"source {name!r} makes as many records as it can in its duration, and time does not pass here; "
                    "give it a rate or a limit, or give its records in `inputs`"
                )
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
    """A source whose readers return at most `size` records at a time."""

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
        self.fruitless = 0  # the number of reads in a row that gave nothing
        self.held = False  # nothing may be read now

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return self._reader.finished

    def read(self, limit: int) -> list[Any]:
        if self.held:
            return []
        records = self._reader.read(min(limit, self._size))
        self.fruitless = 0 if records else self.fruitless + 1
        return records

    def offsets(self) -> dict[str, Any]:
        return self._reader.offsets()

    def ready_in(self) -> float | None:
        return 0.0 if self.held else self._reader.ready_in()

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
