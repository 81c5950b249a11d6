"""Running a flow in the calling process, for users' own tests: no Ray, no workers, the same answer every time.

    flow = build_flow()
    out = penstock.testing.run(flow, {"read": ["to be", "or not"]})
    assert out["write"] == [...]

The tasks, operators, key partitioning and channels are the real ones, run by one run loop in a fixed order; sources
and sinks named in `inputs` and all sinks are replaced by lists.

It must never let pass what a job of two workers refuses: the flow is pickled and unpickled, what goes from task to task
is encoded, decoded and looked at for keys that do not hash, and the state is saved in epochs. And it must never wait
for time to pass: when nothing can run, its clock is put forward to what is due next.

A run may go back to the last complete epoch, as a job does when its workers have died. Then nothing of the tasks must
be left but what the epoch has saved: the flow is unpickled anew, and the state is read from its bytes.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from penstock.runtime.epochs.manifest import Blob, TaskEntry
from penstock.runtime.epochs.restore import read_same
from penstock.runtime.epochs.snapshot import encode_snapshot
from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.event_time.watermark import as_ms, other_unit
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.lazy_names import lazy_names
from penstock.runtime.mistakes import called, refusing
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.ends import Read, Write
from penstock.runtime.operators.late import LATE, late_words
from penstock.runtime.program.flow import check_flow
from penstock.runtime.program.graph import Graph
from penstock.runtime.program.mixing import mixing, mixing_words
from penstock.runtime.program.plan import Plan, make_plan
from penstock.runtime.records.pickling import copied, dumps, loads
from penstock.runtime.records.userfunc import check_picklable
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.generator import Generator
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.memory import MemoryNetwork, MemoryTransport
from penstock.runtime.units import is_whole, seconds
from penstock.runtime.worker.run_loop import RunLoop, Saved
from penstock.runtime.worker.task import Snapshot, Steps
from penstock.runtime.worker.wiring import SinkRecords, Wiring, build

if TYPE_CHECKING:
    from penstock.runtime.program.flow import Flow

__all__ = ["Pause", "run"]

if not TYPE_CHECKING:  # what runs a flow many times is built on what runs it once, so it is loaded when it is used
    __getattr__, __dir__ = lazy_names(
        __name__, {"torment": "penstock.runtime.torment", "check_sink": "penstock.runtime.sinks.sink_check"}
    )

logger = logging.getLogger(__name__)

# The simulated time at which a run starts, for timers: 2024-01-01 00:00 UTC, the same in every run.
_BEGIN_S = 1_704_067_200
_LOOK_NS = 1000  # the simulated time that passes with each look at the clock
# After this many reads that gave nothing although a reader had said so, its reader must use another clock.
_FRUITLESS = 100
_REAL_WAIT_S = 0.005
_INBOX_BYTES = 1 << 30


class Pause:
    """An item in a list of records, in `inputs`: the records after it enter this many seconds later, by the simulated
    clock. Timers that are due meanwhile fire before them. `duration_s`: seconds, or a timedelta."""

    def __init__(self, duration_s: float | timedelta) -> None:
        self.duration_s = seconds(duration_s, "testing.Pause: duration_s")

    def __repr__(self) -> str:
        return f"Pause({self.duration_s:g})"


@refusing
def run(
    flow: Flow,
    inputs: Mapping[str, Iterable[Any]] | Iterable[Any] | None = None,
    *,
    parallelism: int | None = 1,
    batch_size: int = 1,
    order: Iterable[str] | None = None,
    fail_at: int | Iterable[int] | Mapping[str, int | Iterable[int]] | None = None,
    begin: datetime | float | None = None,
) -> dict[str, list[Any]]:
    """Run `flow` to its end. Returns the records that reached each sink, by the name of the sink's operator.

    `inputs`: records that replace sources, by operator name; for a flow with one source, simply the records. Other
    sources are read as they are, and must end. `parallelism`: replaces the flow's own default (None: 1). Records enter
    `batch_size` at a time, so with 1 every update of an aggregate shows. What has entered passes all tasks before more
    enters.

    `order`: the names of sources in the order in which their records enter, one name for each record, such as
    `["orders", "orders", "rules", "orders"]`. Records that it does not count enter after all others. Watermarks need
    nothing of this kind, because the flow itself makes them, of the records.

    `fail_at`: after how many records, of all sources together, the job loses all its workers: a number, or several, or
    numbers by the name of a source, such as `{"orders": 3}`. The run then goes back to the last complete epoch, which
    is from before the last of these records (2 or more: with 1 the run begins anew). All tasks are built again, from
    nothing but the flow and the state that the epoch has saved. The sources read again what has entered since, and what
    has reached the sinks since is dropped. The clock goes back too. So the results are those of a run without the
    failure, unless an operator keeps something where no epoch saves it: in an attribute of a ProcessFunction, in a
    variable of a module. What it has kept there is then lost, or counts twice.

    The clock is simulated. It begins at `begin`, a datetime with a time zone or milliseconds since 1970 (None:
    2024-01-01 00:00 UTC), and each look at it adds a microsecond. When nothing is left to do, it jumps to the next
    timer, to the next record of a paced source, or to the end of a `Pause` among the records. Only a reader that uses
    another clock than that of its context makes the run wait in real time; a paced record costs some tenths of a
    millisecond of computing, whatever its rate is. The calls of `map_async` are made for real too, and their timeouts
    count real time: the run stands still until all calls that are under way have ended.

    The run is as strict as a job. RecordError is raised for an error of a user's function, for records and state that
    cannot be pickled, and for keys whose hash differs between processes. FlowError is raised when the flow cannot be
    pickled. As in a worker, functions run as copies: what they assign to variables of the program is not visible there.
    The flow itself is not changed, and can be run again. As at the end of a job, a warning is logged when records were
    dropped because they came too late for their windows.

    The run is stricter in one thing: RecordError is raised when a function changes a record that several tasks have,
    because the stream has several branches, or because the record came through broadcast(). In a job, the tasks of a
    worker share these records.
    """
    check_flow(flow, "testing.run()")
    if parallelism is not None and not (is_whole(parallelism) and parallelism >= 1):
        raise FlowError(f"testing.run(): parallelism={parallelism!r}; it must be a whole number, 1 or more, or None")
    if not is_whole(batch_size) or batch_size < 1:
        raise FlowError(f"testing.run(): batch_size={batch_size!r}; it must be a whole number, 1 or more")
    failures = _failures(flow, fail_at)
    turns = _turns(order)
    course = Course(batch_size=lambda: batch_size, order=turns, failures=failures, goes_back=bool(failures))
    begin_s = _BEGIN_S if begin is None else _begin_s(begin)
    outputs, entry, late = _simulate(flow, inputs, parallelism, course, begin_s)
    if late:
        logger.warning("testing.run(%r): %s", flow.name, late)
    missed = {name: counts for name, counts in entry.failures.items() if counts}
    for name, counts in missed.items():
        entered = entry.total if name is None else entry.counts[name]
        where = "the flow" if name is None else f"source {name!r}"
        raise FlowError(
            f"testing.run(): fail_at={shorten(fail_at)}: only {entered:,} records have entered {where}, so nothing has "
            f"failed after record {counts[0]:,}; give a number of at most {entered:,}"
        )
    return outputs


@dataclass
class Course:
    """How a run goes. `batch_size` is asked for each batch that enters. `order` and `failures` are those of `run`,
    the latter by the names of sources, None being all of them. With `goes_back`, epochs are kept and the run can go
    back to them. `saves` and `dies` are asked in each pass of the run loop, and say whether to begin an epoch, and to
    go back (None: as `failures` say). `one_by_one`: what has entered passes all tasks before more enters. `apart`:
    the tasks share no records, as if they were in different workers."""

    batch_size: Callable[[], int]
    order: list[str] = field(default_factory=list)
    failures: dict[str | None, list[int]] = field(default_factory=dict)
    goes_back: bool = False
    saves: Callable[[], bool] | None = None
    dies: Callable[[], bool] | None = None
    one_by_one: bool = True
    apart: bool = True
    credit_window: int = CREDIT_WINDOW_BYTES


def simulate(
    flow: Flow, inputs: Mapping[str, Iterable[Any]], parallelism: int | None, course: Course
) -> dict[str, list[Any]]:
    """Runs a flow on a course to its end. Returns what `run` returns."""
    return _simulate(flow, inputs, parallelism, course, _BEGIN_S)[0]


def _simulate(
    flow: Flow,
    inputs: Mapping[str, Iterable[Any]] | Iterable[Any] | None,
    parallelism: int | None,
    course: Course,
    begin_s: float,
) -> tuple[dict[str, list[Any]], _Entry, str]:
    """Returns the records that have reached the sinks, the records that have entered, and a message about late
    records."""
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
            given = chain.source.source
            if not isinstance(given, _Given):
                check_picklable(chain.splits, f"the splits of source {chain.source.name!r}")
            elif course.goes_back:
                check_picklable(given.records, f"the records of source {chain.source.name!r}")
    clock = _Clock(begin_s)
    entry = _Entry(course, plan, clock)
    plans = _Plans(plan, entry, course.goes_back)
    plan = plans.make()
    transport = _Transport(MemoryNetwork(1, _INBOX_BYTES), clock, entry)
    epochs = _Epochs(plan, course.goes_back, clock, entry)
    taken = _Sinks(name for name, operator in graph.operators.items() if isinstance(operator, Write))
    wiring = build(
        plan,
        {task.number: 0 for task in plan.tasks},
        0,
        transport,
        clock=clock,
        report=taken.add,
        credit_window=course.credit_window,
        output_caches=OutputCaches(),
        on_snapshot=epochs.on_snapshot,
        wall=clock.wall,
        apart=course.apart,
        check_shared=True,
        # The size of steps, and so which records are processed together, must not depend on the real time. Records that
        # enter one by one are processed one by one. When nobody goes back to the epochs, they must not have any effect.
        steps=Steps(stopwatch=lambda: 0, waits_for_more=False, barriers_let_go=course.goes_back),
    )
    Loop(wiring, transport, clock, epochs, taken, plans, course).run()
    dropped: dict[str, int] = {}
    for stage in (stage for task in wiring.tasks.values() for stage in task.stages):
        name = stage.context.operator.name
        if stage.late and (name, LATE) not in plan.side_outputs:
            dropped[name] = dropped.get(name, 0) + stage.late
    return taken.all(), entry, late_words(dropped, mixing_words(mixing(plan)))


def _turns(order: Iterable[str] | None) -> list[str]:
    if isinstance(order, str) or not isinstance(order, Iterable | None):
        raise FlowError(
            f"testing.run(): order={shorten(order)}; give a list with the name of a source for each record, such as "
            '["orders", "rules"]'
        )
    return list(order or ())


def _failures(flow: Flow, fail_at: object) -> dict[str | None, list[int]]:
    """Returns after how many records to fail, by source; None: of all sources together."""
    if fail_at is None:
        return {}
    by_source = dict(fail_at) if isinstance(fail_at, Mapping) else {None: fail_at}
    reads = [name for name, op in flow.graph.operators.items() if isinstance(op, Read)]
    failures: dict[str | None, list[int]] = {}
    for name, counts in by_source.items():
        if name is not None and name not in reads:
            raise FlowError(
                f"testing.run(): fail_at={shorten(fail_at)}: flow {flow.name!r} has no source {name!r}; its sources: "
                f"{', '.join(reads)}"
            )
        several: list[Any] = list(counts) if isinstance(counts, Iterable) and not isinstance(counts, str) else [counts]
        if not all(is_whole(count) and count >= 1 for count in several):
            raise FlowError(
                f"testing.run(): fail_at={shorten(fail_at)}; it must be a whole number of records, 1 or more, or "
                "several, or such numbers by the name of a source"
            )
        failures[name] = sorted(several)
    return failures


def _begin_s(begin: object) -> float:
    try:
        begin_ms = as_ms(begin)
    except (TypeError, ValueError) as error:
        raise FlowError(f"testing.run(): begin={begin!r}: {error}") from None
    if (unit := other_unit(begin)) is not None:
        raise FlowError(
            f"testing.run(): begin={begin!r}: the time is most likely in {unit} since 1970; give milliseconds, or a "
            "datetime with a time zone"
        )
    return begin_ms / 1000


#: A reader: the name of its source, and the index of its task.
_Place = tuple[str, int]


class _Entry:
    """Decides which source may read how many records now, and counts the records that have entered the flow. After the
    run has gone back, records enter together with the same others as before."""

    def __init__(self, course: Course, plan: Plan, clock: _Clock) -> None:
        self.clock = clock
        self.held = False  # nothing may be read now
        self.failures = course.failures
        self.readers: dict[_Place, _SlicedReader] = {}
        self.moved = True  # something has entered, so that it may be the turn of another source
        self._batch_size = course.batch_size
        # What has entered in each pass, if the run may go back and has an order to keep, and what of it has to enter
        # again.
        self._keeps = course.goes_back and course.one_by_one
        self._passes: list[dict[_Place, int]] = []
        self._now: dict[_Place, int] = {}
        self._again: deque[dict[_Place, int]] = deque()
        sources = {chain.source.name: chain.source.source for chain in plan.chains if chain.source is not None}
        given = {name: source.records for name, source in sources.items() if isinstance(source, _Given)}
        self._check(course.order, sources, given)
        self._in_turn = set(given) if course.order else set()
        self._orders = course.one_by_one and bool(course.order)
        # Each turn with its number among those of its source, so that a turn is over when this many have entered.
        seen: Counter[str] = Counter()
        self._turns: list[tuple[str, int]] = []
        for name in course.order:
            self._turns.append((name, seen[name]))
            seen[name] += 1
        self._turn = 0

    def _check(self, order: list[str], sources: Mapping[str, Source], given: Mapping[str, list[Any]]) -> None:
        for name, turns in Counter(order).items():
            if name not in sources:
                raise FlowError(
                    f"testing.run(): order has {name!r}, which is no source; the sources are: {', '.join(sources)}"
                )
            if name not in given:
                raise FlowError(
                    f"testing.run(): order has source {name!r}, whose records are not in `inputs`; give them there"
                )
            if (records := sum(not isinstance(record, Pause) for record in given[name])) < turns:
                raise FlowError(
                    f"testing.run(): order has source {name!r} {turns:,} times, which has {records:,} records"
                )

    @property
    def counts(self) -> dict[str, int]:
        """The number of records that have entered, by source."""
        counts: dict[str, int] = {}
        for (name, _), reader in self.readers.items():
            counts[name] = counts.get(name, 0) + reader.entered
        return counts

    @property
    def total(self) -> int:
        """The number of records that have entered."""
        return sum(reader.entered for reader in self.readers.values())

    def fails(self) -> bool:
        """Whether the run goes back now. Each failure happens once."""
        for name, places in self.failures.items():
            if places and self._entered(name) >= places[0]:
                places.pop(0)
                return True
        return False

    def has_turn(self, place: _Place) -> bool:
        """Whether a reader may read, as far as the order is concerned."""
        if self._again:
            return place in self._again[0]
        turn = self._next_turn()
        return place[0] not in self._in_turn or turn is None or turn[0] == place[0]

    def allowed(self, place: _Place) -> int:
        """Returns how many records a reader may read now."""
        if self.held or not self.has_turn(place):
            return 0
        name = place[0]
        if self._again:
            return self._again[0][place]
        most = self._batch_size()
        if name in self._in_turn and self._next_turn() is not None:
            most = min(most, sum(1 for _ in takewhile(lambda turn: turn[0] == name, self._turns[self._turn :])))
        return most

    def note(self, place: _Place, records: int) -> None:
        """Notes that a reader has read a number of records."""
        self.moved = True
        if self._orders and self._turn < len(self._turns):  # it was the turn of this record
            self.held = True  # the next one waits until the run loop has seen this one pass all tasks
        if self._again:
            left = self._again[0]
            left[place] -= records
            if not left[place]:
                del left[place]
        elif self._keeps:
            self._now[place] = self._now.get(place, 0) + records

    def next_pass(self) -> None:
        """Notes that the run loop has asked all readers."""
        if self._again and not self._again[0]:
            self._again.popleft()
            self.moved = True
        if self._now:
            self._passes.append(self._now)
            self._now = {}

    @property
    def passes(self) -> int:
        """The number of passes in which something has entered, as far as they are kept."""
        return len(self._passes) - len(self._again)

    def goes_back(self, entered: Mapping[_Place, int], passes: int) -> None:
        """Goes back to the records that had entered at an epoch."""
        for place, reader in self.readers.items():
            reader.entered = entered.get(place, 0)
        self._again = deque(dict(each) for each in self._passes[passes:])
        self._turn = 0
        self.moved = True

    def _entered(self, name: str | None) -> int:
        return self.total if name is None else self.counts[name]

    def _next_turn(self) -> tuple[str, int] | None:
        if not self._turns:
            return None
        counts = self.counts
        while self._turn < len(self._turns):
            name, number = self._turns[self._turn]
            if number >= counts[name]:
                return self._turns[self._turn]
            self._turn += 1
        return None


class _Plans:
    """Makes a new plan for each life of the tasks, without changes of an earlier life."""

    def __init__(self, plan: Plan, entry: _Entry, goes_back: bool) -> None:
        self._plan = plan
        self._entry = entry
        self._pickled = dumps(plan) if goes_back else None

    def make(self) -> Plan:
        plan: Plan = self._plan if self._pickled is None else loads(self._pickled)
        for chain in plan.chains:
            if chain.source is not None:
                source = chain.operators[0] = copy.copy(chain.source)
                source.source = _Sliced(source.source, self._entry)
        return plan


class _Sinks:
    """The records that have reached the sinks, with their epochs."""

    def __init__(self, names: Iterable[str]) -> None:
        self._records: dict[str, list[tuple[int, list[Any]]]] = {name: [] for name in names}

    def add(self, reported: SinkRecords) -> None:
        self._records[reported.channel].append((reported.epoch, reported.records))

    def go_back(self, epoch: int) -> None:
        """Drops the records of later epochs than this complete one."""
        for name, parts in self._records.items():
            self._records[name] = [part for part in parts if part[0] <= epoch]

    def all(self) -> dict[str, list[Any]]:
        """Returns all records, by the name of the sink's operator."""
        return {name: [record for _, part in parts for record in part] for name, parts in self._records.items()}


class _Clock:
    """A simulated clock: each look at it is a little later, and it jumps forward when nothing can be done."""

    def __init__(self, begin_s: float) -> None:
        self.now = 0
        self._begin_s = begin_s

    def __call__(self) -> int:
        self.now += _LOOK_NS
        return self.now

    def wall(self) -> float:
        """Returns seconds since 1970, for timers."""
        return self._begin_s + self.now / 1e9


class _Transport(MemoryTransport):
    """A transport that advances the clock when it would wait."""

    def __init__(self, network: MemoryNetwork, clock: _Clock, entry: _Entry) -> None:
        super().__init__(network, 0)
        self._entry = entry
        self._clock = clock

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        if not timeout:  # None: only another thread, of a reader, can continue
            return super().receive(timeout)
        messages = super().receive(0)
        if not messages:
            if any(reader.fruitless > _FRUITLESS for reader in self._entry.readers.values()):
                time.sleep(min(timeout, _REAL_WAIT_S))
            self._clock.now += max(_LOOK_NS, round(timeout * 1e9))
        return messages

    def receive_later(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        """Receives the messages that have come, or waits in real time until it is woken."""
        return super().receive(timeout)


@dataclass
class _Part:
    """A task's part of an epoch. `epoch` is the first one that it is a part of, if the task has ended."""

    epoch: int
    finished: bool
    whole: bool
    data: bytes


@dataclass
class _Moment:
    """The other things to which an epoch goes back: the time, how many records each reader had read, and in how many
    passes."""

    now: int
    passes: int = 0
    entered: dict[_Place, int] = field(default_factory=dict)


class _Epochs:
    """The epochs of a run. They check that a job could save all state; with `keeps` they also keep it."""

    def __init__(self, plan: Plan, keeps: bool, clock: _Clock, entry: _Entry) -> None:
        self.open: dict[int, set[int]] = {}  # epoch -> tasks that have not saved their part yet
        self.ended: set[int] = set()
        self.last = 0  # the last complete epoch; 0: the begin of the run
        self._plan = plan
        self._keeps = keeps
        self._clock = clock
        self._entry = entry
        self._begun = 0
        self._parts: dict[int, list[_Part]] = {task.number: [] for task in plan.tasks}
        self._moments = {0: _Moment(0)}

    def begin(self, tasks: Iterable[int]) -> int:
        """Begins the next epoch of these tasks, and returns its number."""
        self._begun += 1
        self.open[self._begun] = set(tasks) - self.ended
        # Those of tasks that have ended say it now, and the others when they take part in the epoch.
        entered = {place: reader.entered for place, reader in self._entry.readers.items()}
        self._moments[self._begun] = _Moment(self._clock.now, self._entry.passes, entered)
        return self._begun

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Takes a task's part of an epoch. Raises RecordError for state that cannot be saved."""
        data = encode_snapshot(snapshot.states, self._plan.key_groups)
        number = snapshot.task.number
        if self._keeps:
            part = _Part(snapshot.epoch, snapshot.finished, snapshot.whole, b"".join(data))
            self._parts[number].append(part)
        if snapshot.finished:
            self.ended.add(number)
        source = self._plan.chains[snapshot.task.chain].source
        for epoch, waiting in self.open.items():
            if number in waiting and (snapshot.finished or epoch <= snapshot.epoch):
                waiting.remove(number)
                if source is not None:
                    place = source.name, snapshot.task.index
                    self._moments[epoch].entered[place] = self._entry.readers[place].entered

    def complete(self) -> int | None:
        """Returns an epoch that is complete, the oldest first, or None."""
        epoch = next(iter(self.open), None)
        if epoch is None or self.open[epoch]:
            return None
        del self.open[epoch]
        self._moments = {each: moment for each, moment in self._moments.items() if each >= epoch}
        self.last = epoch
        return epoch

    def go_back(self) -> dict[int, Saved]:
        """Forgets all events after the last complete epoch. Returns what each task has saved until then."""
        self.open.clear()
        moment = self._moments[self.last]
        self._moments = {self.last: moment}
        self._clock.now = moment.now
        entries: dict[int, TaskEntry] = {}
        for number, parts in self._parts.items():
            parts[:] = [part for part in parts if part.epoch <= self.last]
            # The last part that is whole says everything, and what follows it are changes.
            base = max((at for at, part in enumerate(parts) if part.whole), default=0)
            del parts[:base]
            task = self._plan.by_number[number]
            chain = self._plan.chains[task.chain]
            entries[number] = TaskEntry(
                number=number,
                name=chain.name,
                index=task.index,
                parallelism=chain.parallelism,
                operators=[operator.name for operator in chain.operators],
                finished=bool(parts) and parts[-1].finished,
                groups=None,
                blobs=[Blob("", len(part.data), 0, part.data) for part in parts],
            )
        self.ended = {number for number, entry in entries.items() if entry.finished}
        if not self.last:
            return {number: ({}, False, True, None) for number in entries}
        return {number: read_same(self._plan, self._plan.by_number[number], entries, _data) for number in entries}

    def went_back(self) -> None:
        """Lets the new readers count from the epoch on."""
        moment = self._moments[self.last]
        self._entry.goes_back(moment.entered, moment.passes)


def _data(blob: Blob) -> bytes:
    assert blob.data is not None
    return blob.data


class Loop(RunLoop):
    """A run loop that is also the coordinator of the epochs. Epochs become more and more rare, so that saving the state
    costs in proportion to the input, and each source has one after its last record."""

    def __init__(
        self,
        wiring: Wiring,
        transport: _Transport,
        clock: Callable[[], int],
        epochs: _Epochs,
        taken: _Sinks,
        plans: _Plans,
        course: Course,
    ) -> None:
        super().__init__(wiring, transport, clock)
        self._epochs = epochs
        self._entry = transport._entry
        self._taken = taken
        self._plans = plans
        self._course = course
        self._next = 1
        self._generation = 1
        self._read = {task.task.number for task, _ in self._sources}  # tasks that still have records

    def _renew_tasks(self) -> None:
        super()._renew_tasks()
        self._others = [task for task in self.tasks if not task.input.is_read]
        self._pending = [task.pending for task in self.tasks if task.pending is not None]
        for stage in self._pending:
            stage.attach(time.monotonic_ns, self.transport.wake)  # calls take real time

    def _wait_for_calls(self) -> None:
        """Stands still while calls are under way, so that the next step does not depend on when they end."""
        assert isinstance(self.transport, _Transport)
        while waiting := [stage for stage in self._pending if not stage.settled()]:
            due = min((due for stage in waiting if (due := stage.ready_in()) is not None), default=None)
            if due == 0:  # its task has to see to that
                return
            super().deliver(self.transport.receive_later(due))

    def deliver(self, messages: Any) -> None:
        super().deliver(messages)
        self._wait_for_calls()
        entry, epochs, course = self._entry, self._epochs, self._course
        entry.next_pass()
        while (epoch := epochs.complete()) is not None:
            self.complete(epoch)
        numbers = [task.task.number for task in self.tasks]
        if entry.fails() or (course.dies is not None and course.dies()):
            self._go_back(set(numbers))
        if len(epochs.ended) == len(numbers) and all(task.finished for task in self.tasks):
            self.end()
            return
        over = {task.task.number for task, input_ in self._sources if input_.reader.finished} & self._read
        self._read -= over
        if over or self._saves():
            self.trigger(epochs.begin(numbers))
        # What was read passes all tasks before more is read. Otherwise records would meet on their way, and would be
        # processed together.
        entry.held = course.one_by_one and (bool(epochs.open) or any(task.runnable() for task in self._others))
        if entry.moved:
            entry.moved = False
            for _, input_ in self._sources:
                input_.wake()

    def _saves(self) -> bool:
        """Whether an epoch begins now."""
        if self._epochs.open:
            return False
        if self._course.saves is not None:
            return self._course.saves()
        # With failures, the place of an epoch must not depend on how many passes the records take.
        reached = self._entry.total if self._course.goes_back else self.passes
        if reached < self._next:
            return False
        self._next = reached + 1 + reached // 8
        return True

    def _go_back(self, numbers: set[int]) -> None:
        """Throws all tasks away, and builds them again from the last complete epoch."""
        epochs = self._epochs
        saved = epochs.go_back()
        self._taken.go_back(epochs.last)
        self.remove_tasks(numbers, epochs.last)
        self._generation += 1
        self.wiring.plan = self._plans.make()
        self.build_tasks(numbers, self._generation, epochs.last, saved)
        self.connect_tasks(numbers, self._generation)
        epochs.went_back()
        self._next = self._entry.total + 1
        self._read = {task.task.number for task, _ in self._sources} - epochs.ended


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
    """Replaces sources by the caller's records, and sinks by ones that bring their records here."""
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
        offset = (splits[0].offset or 0) if splits else 0
        first, until = offset if isinstance(offset, tuple) else (offset, None)
        return _GivenReader(self.records if splits else [], first, until, context.clock)


class _GivenReader(Reader):
    def __init__(self, records: list[Any], first: int, until: int | None, clock: Callable[[], int]) -> None:
        self._records = records
        self._next = first
        self._clock = clock
        # The end of the pause that comes next, if it has begun. The clock goes back with the tasks, so a pause that was
        # saved ends when it would have ended.
        self._until = until
        self.finished = first >= len(records)

    def read(self, limit: int) -> list[Any]:
        while self._next < len(self._records) and isinstance(pause := self._records[self._next], Pause):
            now = self._clock()
            if self._until is None:
                self._until = now + round(pause.duration_s * 1e9)
            if now < self._until:
                return []
            self._until = None
            self._next += 1
        ready = self._records[self._next : self._next + limit]
        records = list(takewhile(lambda record: not isinstance(record, Pause), ready))
        self._next += len(records)
        self.finished = self._next >= len(self._records)
        return records

    def ready_in(self) -> float:
        return 0.0 if self._until is None else max(0, self._until - self._clock()) / 1e9

    def offsets(self) -> dict[str, Any]:
        return {"given": self._next if self._until is None else (self._next, self._until)}


class _Sliced(Source):
    """A source whose readers read when they may, and as much as they may."""

    def __init__(self, source: Source, entry: _Entry) -> None:
        self._source = source
        self._entry = entry

    def splits(self, parallelism: int) -> list[Split]:
        return self._source.splits(parallelism)

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        place = context.operator, context.index
        reader = self._entry.readers[place] = _SlicedReader(self._source.reader(splits, context), self._entry, place)
        return reader


class _SlicedReader(Reader):
    def __init__(self, reader: Reader, entry: _Entry, place: _Place) -> None:
        self._reader = reader
        self._entry = entry
        self._place = place
        self.entered = 0  # the number of records that it has read since the begin of the run
        self.fruitless = 0  # the number of reads in a row that gave nothing although the reader had said so
        self._due: float | None = None  # when it has said that it would be ready, by the simulated clock

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return self._reader.finished

    @property
    def split(self) -> str | None:  # type: ignore[override]
        return self._reader.split

    def by_split(self, records: list[Any]) -> list[tuple[str | None, list[Any]]]:
        return self._reader.by_split(records)

    def has_ended(self, split: str) -> bool:
        return self._reader.has_ended(split)

    def read(self, limit: int) -> list[Any]:
        allowed = self._entry.allowed(self._place)
        if not allowed:
            return []
        records = self._reader.read(min(limit, allowed))
        self.entered += len(records)
        if records:
            self._entry.note(self._place, len(records))
        if records or isinstance(self._reader, _GivenReader):  # a pause ends by the simulated clock
            self.fruitless = 0
        elif self._due is None or self._entry.clock.now >= self._due:  # otherwise another source has woken the loop
            self.fruitless += 1
        return records

    def offsets(self) -> dict[str, Any]:
        return self._reader.offsets()

    def ready_in(self) -> float | None:
        if not self._entry.has_turn(self._place):
            return None  # it is woken when it may be its turn
        if self._entry.held:
            return 0.0
        ready_in = self._reader.ready_in()
        self._due = None if ready_in is None else self._entry.clock.now + ready_in * 1e9
        return ready_in

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
