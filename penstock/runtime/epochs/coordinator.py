"""The coordinator of a job's epochs: decides when barriers begin, when an epoch is complete, and which tasks go back.

It is a pure state machine. Events are methods, which return a list of commands for its host (the JobHost, also in the
simulated cluster of the tests). The host reports the results as further events. The coordinator must never know a
clock, Ray or a file system. The table `COORDINATOR` says which events can come in which state (docs/states.md draws
it). A late event is ignored for the reason that the table gives. An impossible event is refused, with what led there.

    run      Trigger: every source task sends barrier n; each task saves its part and acknowledges it
             all have acknowledged: Save the manifest; then the epoch is complete: sinks commit, caches drop messages
    recover  a worker is lost: RemoveTasks: all workers remove the tasks of this worker and all tasks downstream,
             and the tasks upstream continue; Start: a new process; BuildTasks: the tasks are built again from the
             last complete epoch; ConnectTasks: when all are built, the tasks upstream send what their caches keep
    stop     with a savepoint: all tasks stop at the barrier of one epoch, whose manifest says so. When it is complete
             and committed, CopySavepointAndStop; then End. From such an epoch, whoever continues the job does the same,
             so no task runs again, and nothing is emitted that the savepoint does not have

Invariants:

- An epoch is complete only when its manifest is written. A manifest is written only when every task has acknowledged
  the epoch under its present generation, or had ended before it.
- No sink is told to commit before that. No task goes back further than the last complete epoch, except that all tasks
  go back together (`FallBack`) when that epoch turns out to be damaged.
- A message of an older generation of a task never has an effect.
- No epoch builds on a snapshot that is known to be lost from the store: the tasks that live save their whole state
  (`lost`).
- Epochs that are not complete survive a failure. The acknowledgements of the tasks that go back are dropped, and their
  sources begin these epochs again, because barriers of them are in the channels of other tasks.
- Starting a job is recovering all tasks to epoch 0, so there is only one way in which tasks are built.

Recovery of the affected tasks only, with caches, is docs/papers.md: D5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from penstock.runtime.backoff import Backoff
from penstock.runtime.epochs.manifest import Blob, Manifest, TaskEntry
from penstock.runtime.epochs.restore import same_tasks, savers_of
from penstock.runtime.epochs.store import Store
from penstock.runtime.lifecycle import State, StateMachine, Table
from penstock.runtime.program.plan import Plan

# In a job in which no record comes, epochs begin this many times more rarely, because an idle job should cost next to
# nothing. Nothing is lost by this: the first record after a pause brings the next epoch (`no_longer_quiet`).
QUIET_INTERVALS = 60

# The number of tries, one for each epoch interval, to write the last manifest before the job fails.
FINAL_TRIES = 30


@dataclass(frozen=True)
class EpochOptions:
    """How often epochs begin, and how many failures a job tolerates. Times are in seconds."""

    interval_s: float | None = 1.0  # None: no epochs, and the death of a worker ends the job
    timeout_s: float = 60.0  # the time after which the next epoch begins beside one that does not complete
    max_restarts: int = 10  # within `restart_window_s`
    restart_window_s: float = 600.0
    backoff_first_s: float = 0.05  # the pause before the second restart without a complete epoch between; it doubles
    backoff_max_s: float = 10.0


# --- commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Start a process for this worker after a delay. The answer is `started` or `worker_lost`."""

    worker: int
    after_s: float = 0.0


@dataclass(frozen=True)
class RemoveTasks:
    """Tell all live workers to remove these tasks, which go back to this epoch. No task is parked any more. `planned`:
    somebody has asked for this, and no process has died."""

    tasks: frozenset[int]
    epoch: int
    planned: bool = False


@dataclass(frozen=True)
class Change:
    """Another plan, and the workers that run its tasks."""

    plan: Plan
    placed: dict[int, int]


@dataclass(frozen=True)
class BuildTasks:
    """Tell all workers to build these tasks again from the saved state in `entries` (no entries: from the start). Each
    worker answers `built`.

    `change`: the tasks belong to this plan from now on. `changed`: the entries, by number, are all those of another
    plan; otherwise they are those of the tasks themselves. `origin`: the store of the entries, if it is not the job's
    own.
    """

    tasks: frozenset[int]
    generation: int
    epoch: int
    entries: dict[int, TaskEntry]
    after_s: float = 0.0
    change: Change | None = None
    changed: bool = False
    origin: Store | None = None


@dataclass(frozen=True)
class ConnectTasks:
    """Tell all workers that these tasks are built. Their sources begin the barriers of `triggers`."""

    tasks: frozenset[int]
    generation: int
    triggers: tuple[int, ...]


@dataclass(frozen=True)
class Trigger:
    """Tell all workers that sources begin the barrier of this epoch. The tasks in `parking` stop after it, because they
    migrate. The host fills `begin_ns`, the time on its monotonic clock at which all sources begin together."""

    epoch: int
    parking: frozenset[int] = frozenset()
    begin_ns: int = 0


@dataclass(frozen=True)
class Park:
    """Let these tasks stop after the barrier of an epoch that has not begun yet. The host makes it of a Trigger."""

    epoch: int
    tasks: frozenset[int]


@dataclass(frozen=True)
class Unpark:
    """Tell all workers that the tasks that were to migrate stay where they are and continue."""


@dataclass(frozen=True)
class SaveWholeState:
    """Tell all workers that the next snapshot of these tasks must be whole. Tasks that have ended save their end
    again."""

    tasks: frozenset[int]


@dataclass(frozen=True)
class Save:
    """Write the manifest. The answer is `saved` or `not_saved`."""

    manifest: Manifest


@dataclass(frozen=True)
class Complete:
    """Tell all workers that this epoch is complete. `final`: it is the last one, and each worker answers
    `committed`."""

    epoch: int
    final: bool


@dataclass(frozen=True)
class CopySavepointAndStop:
    """Copy the last complete epoch to this place. The answer is `copied`, and the job ends, or `not_copied`, and it
    continues."""

    place: str
    generation: int


@dataclass(frozen=True)
class End:
    """Tell all workers that the job has ended well."""


@dataclass(frozen=True)
class FallBack:
    """Find an older epoch, because the last complete one cannot be read. The answer is `rewind`, or the job fails."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Fail:
    """Let the job fail."""

    reason: str


Command = (
    Start
    | RemoveTasks
    | BuildTasks
    | ConnectTasks
    | Trigger
    | Unpark
    | SaveWholeState
    | Save
    | Complete
    | CopySavepointAndStop
    | End
    | FallBack
    | Fail
)

#: The commands that workers carry out.
ParticipantCommand = RemoveTasks | BuildTasks | ConnectTasks | Trigger | Park | Unpark | SaveWholeState | Complete | End


# --- states ------------------------------------------------------------------------------------------------------


class CoordinatorState(State):
    """The event that the coordinator waits for. In all states but the last two, the tasks that do not go back
    continue."""

    CREATED = "CREATED", "The host has not asked for anything yet."
    STARTING = "STARTING", "Processes of workers are awaited."
    BUILDING = "BUILDING", "Tasks are being built."
    RUNNING = "RUNNING", "All tasks run, and epochs follow each other."
    FALLING_BACK = "FALLING_BACK", "The last complete epoch is damaged; an older one is being looked for."
    FINISHING = "FINISHING", "The last epoch is complete; its commits are awaited."
    HALTED = "HALTED", "All tasks have stopped at the last complete epoch; its commits and its savepoint are awaited."
    ENDED = "ENDED", "The job has ended well; no more commands come."
    FAILED = "FAILED", "The job has failed; no more commands come."


CoordinatorEvent = Literal[
    # What the coordinator learns:
    "start",
    "started",
    "built",
    "not built",
    "damaged",
    "late answer",
    "rewind",
    "worker lost",
    "begin",
    "acknowledged",
    "declined",
    "no longer quiet",
    "late word",
    "lost",
    "saved",
    "not saved",
    "committed",
    "migrate",
    "replan",
    "stop",
    "copied",
    # What it decides:
    "build",
    "connect",
    "go back",
    "halt",
    "go on",
    "finish",
    "end",
    "fail",
]
"""`late answer`: to a command that has been given up since. `late word`: of a task, of an older generation of it. The
others are named after the methods and the commands."""

_S = CoordinatorState
_BEFORE_RUNNING = (_S.STARTING, _S.BUILDING)
_OVER = (_S.ENDED, _S.FAILED)
_RECOVERABLE = (_S.STARTING, _S.BUILDING, _S.RUNNING, _S.FINISHING, _S.HALTED)
_BEGUN = tuple(state for state in _S if state is not _S.CREATED)

_TOLD: tuple[tuple[CoordinatorEvent, tuple[CoordinatorState, ...]], ...] = (
    # A process that was lost while an older epoch is looked for may be ready before the search has ended.
    ("started", (_S.STARTING, _S.FALLING_BACK)),
    ("built", (_S.BUILDING,)),
    ("not built", (_S.BUILDING,)),
    ("rewind", (_S.FALLING_BACK,)),
    ("worker lost", (*_RECOVERABLE, _S.FALLING_BACK)),
    ("begin", (_S.RUNNING,)),
    # Tasks that do not go back, and tasks that had ended and say so again, speak at any time.
    ("acknowledged", (*_RECOVERABLE, _S.FALLING_BACK)),
    ("declined", (*_RECOVERABLE, _S.FALLING_BACK)),
    ("no longer quiet", (*_RECOVERABLE, _S.FALLING_BACK)),
    ("lost", (*_BEFORE_RUNNING, _S.RUNNING)),
    # A worker that is lost while a manifest is written is handled when that is done (`worker_lost`).
    ("saved", (_S.RUNNING,)),
    ("not saved", (_S.RUNNING,)),
    ("committed", (_S.FINISHING, _S.HALTED)),
    ("migrate", (_S.RUNNING,)),
    ("replan", (_S.RUNNING,)),
    ("stop", (_S.RUNNING,)),
    ("copied", (_S.HALTED,)),
)

COORDINATOR: Table[CoordinatorState, CoordinatorEvent] = Table(
    CoordinatorState,
    CoordinatorState.CREATED,
    {
        (_S.CREATED, "start"): _S.STARTING,
        **{(state, event): state for event, states in _TOLD for state in states},
        (_S.STARTING, "build"): _S.BUILDING,
        (_S.RUNNING, "build"): _S.BUILDING,  # nobody has died: somebody wants another plan, or tasks elsewhere
        (_S.BUILDING, "connect"): _S.RUNNING,
        (_S.BUILDING, "damaged"): _S.FALLING_BACK,
        **{(state, "go back"): _S.STARTING for state in (*_RECOVERABLE, _S.FALLING_BACK)},
        (_S.RUNNING, "finish"): _S.FINISHING,
        (_S.FINISHING, "end"): _S.ENDED,
        (_S.RUNNING, "halt"): _S.HALTED,
        (_S.BUILDING, "halt"): _S.HALTED,  # the tasks were built from an epoch at which the job stops
        (_S.HALTED, "go on"): _S.RUNNING,
        (_S.HALTED, "end"): _S.ENDED,
        **{(state, "fail"): _S.FAILED for state in (*_RECOVERABLE, _S.FALLING_BACK)},
    },
    [
        ("late answer", _BEGUN, "the workers have been asked for something else since, or their process has died"),
        ("late word", _BEGUN, "the task has been built again since, or is not part of the plan any more"),
        ("built", (_S.FALLING_BACK,), "another worker has found its snapshots damaged: all tasks are built again"),
        ("not built", (_S.FALLING_BACK,), "another worker has found its snapshots damaged: all tasks are built again"),
        ("damaged", (_S.FALLING_BACK,), "another worker has found the same, and the search continues"),
        ("begin", (*_BEFORE_RUNNING, _S.FALLING_BACK), "tasks are missing; the epoch is asked for again"),
        ("begin", (_S.FINISHING, *_OVER), "no epoch follows the last one"),
        ("begin", (_S.HALTED,), "no epoch follows, unless the savepoint cannot be written; then one is due"),
        ("migrate", (*_BEFORE_RUNNING, _S.FALLING_BACK), "tasks are missing; the migration is asked for again"),
        ("migrate", (_S.FINISHING, _S.HALTED, *_OVER), "all tasks have ended, or have stopped"),
        ("replan", (*_BEFORE_RUNNING, _S.FALLING_BACK), "tasks are missing; the plan is asked for again"),
        ("replan", (_S.FINISHING, _S.HALTED, *_OVER), "all tasks have ended, or have stopped"),
        ("stop", (*_BEFORE_RUNNING, _S.FALLING_BACK), "tasks are missing; the stop is asked for again"),
        ("stop", (_S.FINISHING, _S.HALTED, *_OVER), "all tasks have ended, or have stopped already"),
        ("lost", (_S.FALLING_BACK,), "files that the older epoch lacks too are reported again"),
        ("lost", (_S.FINISHING, *_OVER), "no task saves anything any more"),
        ("lost", (_S.HALTED,), "no task saves anything now; if the savepoint needs it, the job continues"),
        (
            "committed",
            (*_BEFORE_RUNNING, _S.RUNNING, _S.FALLING_BACK),
            "a worker was lost before all had committed: there will be another last epoch",
        ),
        # The job has failed because another worker was lost too often; the others have not heard of it yet.
        ("started", (_S.FAILED,), "the job has failed, and its processes end with it"),
        ("built", (_S.FAILED,), "the job has failed"),
        ("not built", (_S.FAILED,), "the job has failed"),
        ("damaged", (_S.FAILED,), "the job has failed"),
        ("committed", (_S.FAILED,), "the job has failed; the last epoch is complete all the same"),
        ("copied", tuple(state for state in _BEGUN if state is not _S.HALTED), "a worker was lost; it is copied again"),
        ("worker lost", _OVER, "the job has ended, and its processes end with it"),
        ("acknowledged", _OVER, "the job has ended: no epoch follows"),
        ("declined", _OVER, "the job has ended: no epoch follows"),
        ("no longer quiet", _OVER, "the job has ended: no epoch follows"),
    ],
)


@dataclass
class _Pending:
    """An epoch that is not complete yet."""

    begun: float
    entries: dict[int, TaskEntry] = field(default_factory=dict)
    declined: str | None = None
    quiet: bool = True  # no record has come since the epoch before
    parked: set[int] = field(default_factory=set)  # tasks that have stopped after its barrier
    late: bool = False  # it is known that it did not complete in time


class Coordinator:
    """See the module's docstring. `placed`: task number -> worker. `manifest`: the epoch from which to continue. It may
    be in another store (`origin`), or belong to another plan (`changed`)."""

    def __init__(
        self,
        plan: Plan,
        placed: dict[int, int],
        workers: int,
        options: EpochOptions,
        manifest: Manifest | None = None,
        *,
        origin: Store | None = None,
        changed: bool = False,
    ) -> None:
        self.plan = plan
        self.placed = placed
        self.options = options
        self._life = StateMachine(COORDINATOR, f"coordinator of job {plan.name!r}")
        self.epoch = 0  # the last complete epoch
        self.begun = 0  # the last epoch that was begun
        self.generation = 0
        self.restarts = 0
        self.last_failure: str | None = None  # why an epoch did not complete, until one does
        self._tasks = frozenset(task.number for task in plan.tasks)
        self._workers = frozenset(range(workers))
        self._entries: dict[int, TaskEntry] = {}  # of the last complete epoch
        self._chains: dict[int, list[Blob] | None] = {}  # the snapshots of each task so far; None: one was lost
        self._generations = dict.fromkeys(self._tasks, 0)
        self._finished: dict[int, TaskEntry] = {}
        self._pending: dict[int, _Pending] = {}
        self._last_trigger: float | None = None
        self._saving: Manifest | None = None
        # Workers that were lost while a manifest was being written.
        self._lost_meanwhile: list[tuple[int, float, str, str]] = []
        self._going_back: frozenset[int] = frozenset()
        self._migration: tuple[int, dict[int, int]] | None = (
            None  # the epoch at which tasks migrate, and the new workers
        )
        self._stop: tuple[int, str] | None = None  # the epoch at which the job is to stop, and the savepoint's place
        self._halted_for: str | None = None  # the place, when the last complete epoch is one at which the job stops
        self._missing: set[int] = set()  # workers that are being started
        self._lost_together: set[int] = set()  # workers that were lost since tasks began to go back
        self._building: set[int] = set()  # workers that are building tasks
        self._committing: set[int] = set()
        self._restart_times: deque[tuple[float, str]] = deque()  # and what the worker was doing that had died
        self._final_failures = 0
        self._quiet = False  # no record had come in the last complete epoch
        first_s, most_s = options.backoff_first_s, options.backoff_max_s
        self._restart_backoff = Backoff(first_s, most_s, free=1)  # an epoch that completes ends it
        self._restart_wait_s = 0.0  # before the last restart
        self._store_backoff = Backoff(first_s, most_s)  # while the store does not return what is saved
        self._unreadable = False  # something of the last complete epoch is lost from the store
        self._lost_since = False  # snapshots were lost from the store since the last epoch began
        self._downstream = _tasks_downstream(plan)
        # Until an epoch is complete that belongs to the job alone:
        self._change: Change | None = None
        self._changed = changed
        self._origin = origin
        if manifest is not None:
            self._take(manifest)

    @property
    def state(self) -> CoordinatorState:
        """The event that the coordinator waits for."""
        return self._life.state

    # --- events --------------------------------------------------------------------------------------------------
    # Each event first goes to the table of states, which accepts it, ignores it, or refuses it with what led there.

    def start(self) -> list[Command]:
        """Begins the job."""
        self._life.move("start")
        self._missing = set(self._workers)
        self._going_back = self._tasks
        return [Start(worker) for worker in sorted(self._workers)]

    def started(self, worker: int) -> list[Command]:
        """Notes that the process of a worker is ready to build tasks."""
        if not self._life.move("started"):
            return []
        self._has_answered(self._missing, "started", worker)
        if self.state is not _S.STARTING or self._missing:
            return []
        return self._build()

    def built(self, worker: int, generation: int, now: float) -> list[Command]:
        """Notes that a worker has built its tasks."""
        if not self._life.move("built" if generation == self.generation else "late answer"):
            return []
        self._has_answered(self._building, "built", worker)
        if self._building:
            return []
        self._store_backoff.succeeded()
        if self._halted_for is not None:  # building the tasks has committed the epoch; none of them is to run
            self._life.move("halt")
            return [CopySavepointAndStop(self._halted_for, self.generation)]
        self._life.move("connect")
        self._quiet = False  # tasks that were just built report no record before their first quiet snapshot
        self._last_trigger = now
        back, self._going_back = self._going_back, frozenset()
        # Tasks that had ended have acknowledged again by now, so nothing else may be missing.
        return [ConnectTasks(back, self.generation, tuple(sorted(self._pending))), *self._try_to_save()]

    def not_built(self, worker: int, generation: int, reason: str, damaged: bool, now: float) -> list[Command]:
        """Notes that a worker could not build its tasks, because their snapshots are damaged, or because the store or
        another worker does not answer."""
        if generation != self.generation:
            self._life.move("late answer")
            return []
        if damaged:
            return [FallBack(self.epoch, reason)] if self._life.move("damaged", reason) else []
        if not self._life.move("not built"):
            return []
        # No process has died, or its death is reported separately. So this counts as no restart, however long the store
        # does not answer.
        self.last_failure = f"tasks could not be built: {reason}"
        return self._go_back(frozenset(), [], now, self._store_backoff.failed(), self.last_failure)

    def rewind(self, manifest: Manifest | None, now: float) -> list[Command]:
        """Goes back to an older epoch than the last complete one (None: to the start), with all tasks together."""
        self._life.move("rewind")
        begun = self.begun
        self._entries, self._chains, self.epoch, self._halted_for = {}, {}, 0, None
        self._finished, self._pending = {}, {}
        if manifest is not None:
            self._changed = not same_tasks(self.plan, manifest.tasks)
            self._take(manifest)
        self.begun = max(begun, self.begun)  # each number is used once, because sinks know epochs by it
        return self._again(self._tasks, [], now, "going back to an older epoch")

    def worker_lost(self, worker: int, now: float, reason: str = "", doing: str = "") -> list[Command]:
        """Notes that the process of a worker has died. `doing`: what it was doing beside records, as words that follow
        "died"."""
        if not self._life.move("worker lost"):
            return []
        if self._saving is not None:
            self._lost_meanwhile.append((worker, now, reason, doing))
            return []
        self._missing.add(worker)
        if self.state is _S.FALLING_BACK:  # all tasks go back when it is known to which epoch
            return [Start(worker)]
        if not self._going_back:
            self._lost_together.clear()
        # One cause may take several workers, such as a machine that fails. They are lost one after the other, but count
        # once. A worker that is lost again counts again.
        counts = not self._lost_together or worker in self._lost_together
        self._lost_together.add(worker)
        tasks, reason = tasks_on(self.placed, (worker,)), reason or f"worker {worker} died"
        if not counts:
            return self._go_back(tasks, [worker], now, self._restart_wait_s, reason)
        return self._again(tasks, [worker], now, reason, doing)

    def tick(self, now: float) -> list[Command]:
        """Notes the time, and begins an epoch when one is due."""
        due = self.due()
        if due is None or now < due:
            return []  # time passes in every state
        for epoch, pending in self._pending.items():
            if pending.declined is None and now - pending.begun >= self.options.timeout_s:
                waited = f"{self.options.timeout_s:g} s"
                self.last_failure = f"epoch {epoch} did not complete within {waited}: it {self.late(epoch)}"
                pending.late = True
        return self.begin(now) if self._stop is None else []

    def begin(self, now: float) -> list[Command]:
        """Begins an epoch now, if this is possible. `begun` is then its number."""
        if not self._life.move("begin"):
            return []
        self._last_trigger = now
        self._lost_since = False
        if self._all_finished:
            return self._try_to_save()
        stay = self._stay()  # the epoch at which tasks were to migrate does not complete
        self.begun += 1
        self._pending[self.begun] = _Pending(now)
        return [*stay, Trigger(self.begun)]

    def migrate(self, placed: dict[int, int], now: float) -> list[Command]:
        """Lets tasks migrate to other workers. They stop at the barrier of an epoch that is begun for this. When the
        epoch is complete, they are built in their new places, and all other tasks continue meanwhile. When a task could
        not stop there, because another epoch has begun before its worker knew, it goes back to the epoch with all tasks
        downstream, as in a recovery. Nothing happens when the job is not running, nor to tasks
        that have ended. A death ends the attempt."""
        if not self._life.move("migrate"):
            return []
        moved = self._elsewhere(placed, self._finished)
        if self._saving is not None or self.migrating or not moved:
            return []  # whoever wants tasks elsewhere looks at `migrating` and at their places, and asks again
        self.begin(now)
        self._migration = (self.begun, dict(placed))
        return [Trigger(self.begun, moved)]

    @property
    def migrating(self) -> bool:
        """Whether tasks are about to stop, to migrate or to end with the job."""
        return self._migration is not None or self._stop is not None

    def stop(self, place: str, now: float) -> list[Command]:
        """Lets the job end at the barrier of an epoch that is begun for this, and that is copied to this place: a
        savepoint. All tasks stop there. Nothing happens when the job is not running. A death, or an epoch that does not
        complete, ends the attempt; whoever wants the stop looks at `migrating` and at `halted_for`, and asks again."""
        if not self._life.move("stop"):
            return []
        if self._saving is not None or self.migrating or self._all_finished:
            return []
        self.begin(now)
        self._stop = (self.begun, place)
        return [Trigger(self.begun, self._tasks.difference(self._finished))]

    @property
    def halted_for(self) -> str | None:
        """The place of the savepoint with which the job ends, or None when it does not."""
        return self._halted_for

    def copied(self, generation: int) -> list[Command]:
        """Notes that the savepoint with which the job ends is written."""
        if not self._life.move("copied" if generation == self.generation else "late answer"):
            return []
        if self.state is not _S.HALTED:
            return []
        self._life.move("end")
        return [End()]

    def not_copied(self, generation: int, reason: str, now: float) -> list[Command]:
        """Notes that the savepoint could not be written: the job continues. `halted_for` is then None."""
        if not self._life.move("copied" if generation == self.generation else "late answer"):
            return []
        if self.state is not _S.HALTED:
            return []
        self._life.move("go on", reason)
        self.last_failure = f"the job could not stop with its savepoint: {reason}"
        self._halted_for, self._last_trigger = None, now
        back, self._going_back = self._going_back, frozenset()
        if not back:
            return [Unpark()]
        return [ConnectTasks(back, self.generation, tuple(sorted(self._pending)))]

    def due(self) -> float | None:
        """Returns when the next epoch begins, by the clock of `tick`, or None when this is not known."""
        interval = self.options.interval_s
        if interval is None or self.state is not _S.RUNNING or self._last_trigger is None:
            return None
        if self._stop is not None:  # no epoch follows; a late one is told once
            stop = self._pending.get(self._stop[0])
            return None if stop is None or stop.late else stop.begun + self.options.timeout_s
        if self._quiet:
            interval *= QUIET_INTERVALS
        if self._all_finished and self._saving is not None:
            return None
        open_since = [pending.begun for pending in self._pending.values() if pending.declined is None]
        if open_since and not self._all_finished:
            # Epochs beside each other make each other slower. Without a limit, more and more would be under way when
            # one takes longer than the time-out.
            patience = self.options.timeout_s * 2.0 ** min(len(open_since) - 1, 30)
            return max(self._last_trigger + interval, max(open_since) + patience)
        return self._last_trigger if self._lost_since else self._last_trigger + interval

    def acknowledged(
        self,
        task: int,
        generation: int,
        epoch: int,
        *,
        finished: bool,
        whole: bool,
        blob: Blob,
        quiet: bool = False,
        parked: bool = False,
        uncommitted: Iterable[str] = (),
    ) -> list[Command]:
        """Notes that a task has saved its part of an epoch. `finished`: it has ended, and this is its part of all later
        epochs too. `parked`: it has stopped after the barrier. `uncommitted`: see TaskEntry."""
        if not self._counts("acknowledged", task, generation):
            return []
        chain = self._chains.get(task, [])
        if whole or finished:  # an ended task needs nothing but the snapshot of its end
            chain = [blob]
        elif chain is None:
            return self.declined(task, generation, epoch, "it builds on a snapshot that could not be written")
        else:
            chain = [*chain, blob]
        self._chains[task] = chain
        entry = self._entry(task, chain, finished, uncommitted)
        if finished:
            self._finished[task] = entry
        elif epoch in self._pending:
            self._pending[epoch].entries[task] = entry
            self._pending[epoch].quiet &= quiet
            if parked:
                self._pending[epoch].parked.add(task)
        return self._try_to_save()

    def no_longer_quiet(self, task: int, generation: int) -> None:
        """Notes that a task that was quiet at its last snapshot has a record again. The next epoch is due as in a busy
        job. The epoch of the quiet snapshot may still be under way."""
        if not self._counts("no longer quiet", task, generation):
            return
        self._quiet = False
        for pending in self._pending.values():
            pending.quiet = False

    def declined(self, task: int, generation: int, epoch: int, reason: str) -> list[Command]:
        """Notes that a task could not save its part. Its next snapshot will be whole. If the task has ended, it saves
        its end again by itself."""
        if not self._counts("declined", task, generation):
            return []
        self._chains[task] = None
        self.last_failure = f"epoch {epoch}: {self.plan.task_name(self.plan.by_number[task])}: {reason}"
        if epoch in self._pending:
            self._pending[epoch].declined = reason
        return self._stay(epoch)

    def lost(self, names: Collection[str], reason: str, now: float) -> list[Command]:
        """Notes that snapshots of these names are lost from the store, or useless. Their tasks save their whole state,
        if they live, in an epoch that begins at once, or as soon as no other is under way that may complete. The host
        calls this again as long as the last manifest refers to a lost snapshot."""
        if not self._life.move("lost"):
            return []
        self._unreadable = any(_among(names, entry.blobs) for entry in self._entries.values())
        # Tasks that go back read what there is. If they can, the next look at the store finds out what is still
        # missing.
        tasks = self._tasks - self._going_back
        lost = frozenset(task for task in tasks if _among(names, self._chains.get(task) or ()))
        if not lost:
            return []
        for task in lost:
            self._chains[task] = None
            self._finished.pop(task, None)
            for pending in self._pending.values():
                if task in pending.entries and _among(names, pending.entries[task].blobs):
                    del pending.entries[task]
                    pending.declined = reason
        # Losses may be found one after the other, and told again and again. An epoch for each would be one of many that
        # make each other slower. The one under way will do, unless it turns out to build on what is lost.
        self._lost_since = True
        commands = [*self._stay(), SaveWholeState(lost), *self.tick(now)]
        self.last_failure = reason
        return commands

    def saved(self, epoch: int) -> list[Command]:
        """Notes that the manifest is written: the epoch is complete."""
        manifest = self._written("saved", epoch)
        self.epoch = epoch
        self._quiet = epoch in self._pending and self._pending[epoch].quiet
        self._entries = {entry.number: entry for entry in manifest.tasks}
        parked = self._pending[epoch].parked if epoch in self._pending else set()
        self._pending = {n: pending for n, pending in self._pending.items() if n > epoch}
        self._change, self._changed, self._origin = None, False, None
        self._restart_backoff.succeeded()
        self._unreadable = False
        self.last_failure = None
        halts = "stop" in manifest.extra
        commands: list[Command] = [Complete(epoch, manifest.final or halts)]
        if manifest.final or halts:
            self._life.move("finish" if manifest.final else "halt")
            self._committing = set(self._workers)
        if halts:
            self._stop, self._halted_for = None, str(manifest.extra["stop"])
            return [*commands, *self._after_save()]
        # An epoch that was begun earlier may complete first. A death makes tasks go back anyway.
        if self._migration is not None and self._migration[0] <= epoch and not self._lost_meanwhile:
            if moves := self._migrate_now(self._migration[1], parked):
                self._migration = None
                return [*commands, *moves]
            commands += self._stay()
        elif self._stop is not None and self._stop[0] <= epoch:  # some task could not stop there
            commands += self._stay()
        return [*commands, *self._after_save()]

    def not_saved(self, epoch: int, reason: str) -> list[Command]:
        """Notes that the manifest could not be written, and is certainly not there."""
        final = self._written("not saved", epoch).final
        self.last_failure = f"epoch {epoch}: its manifest could not be written: {reason}"
        if epoch in self._pending:
            self._pending[epoch].declined = reason
        if final:
            self._final_failures += 1
            if self._final_failures >= FINAL_TRIES:
                self._life.move("fail", reason)
                return [Fail(f"the last {self.last_failure}")]
        stay = self._stay(epoch)
        return [*stay, *self._after_save(try_to_save=not final)]  # the last one is tried again when it is due

    def committed(self, worker: int, epoch: int) -> list[Command]:
        """Notes that a worker has committed the last epoch."""
        if not self._life.move("committed" if epoch == self.epoch else "late answer"):
            return []
        self._has_answered(self._committing, "committed", worker)
        if self._committing:
            return []
        if self._halted_for is not None:
            return [CopySavepointAndStop(self._halted_for, self.generation)]
        self._life.move("end")
        return [End()]

    def replan(self, plan: Plan, placed: dict[int, int]) -> list[Command]:
        """Continues with another plan from the last complete epoch. The tasks of chains that have changed go back to
        it, with all tasks downstream. The others send again what their caches keep. This should be asked for when an
        epoch has just completed, because everything since then is done again. Nothing happens when the job is not
        running, or when all of its tasks have ended."""
        if not self._life.move("replan"):
            return []
        if self._saving is not None or self.migrating or self.epoch == 0:
            return []  # whoever wants another plan asks again when another epoch has completed
        if self._unreadable or self._all_finished or all(entry.finished for entry in self._entries.values()):
            return []
        kept = _same_chains(self.plan, plan)
        before = {task.number for task in self.plan.tasks if task.chain not in kept}
        before.update(*(self._downstream[task] for task in before))
        self.plan, self.placed = plan, placed
        self._downstream = _tasks_downstream(plan)
        after = {task.number for task in plan.tasks if task.chain not in kept}
        after.update(*(self._downstream[task] for task in after))
        self._tasks = frozenset(task.number for task in plan.tasks)
        self._change, self._changed = Change(plan, placed), True
        self._undo(before | after)
        self._going_back = frozenset(after)
        return [RemoveTasks(frozenset(before), self.epoch, planned=True), *self._build()]

    # --- what others may look at -----------------------------------------------------------------------------------

    def entries(self) -> dict[int, TaskEntry]:
        """The state that each task has saved with the last complete epoch."""
        return self._entries

    def finished(self) -> frozenset[int]:
        """The tasks that have ended."""
        return frozenset(self._finished)

    def late(self, epoch: int) -> str:
        """Describes which tasks have not acknowledged an epoch."""
        acknowledged = self._pending[epoch].entries if epoch in self._pending else {}
        missing = sorted(self._tasks - acknowledged.keys() - self._finished.keys())
        if not missing:
            return "waits for its manifest to be written"
        shown = ", ".join(self.plan.task_name(self.plan.by_number[task]) for task in missing[:5])
        return f"waits for {shown}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")

    def replace_chain(self, task: int, old: list[Blob], new: Blob) -> None:
        """Notes that the consecutive snapshots `old` of a task were compacted into one."""
        for chain in (self._chains.get(task), self._entries[task].blobs if task in self._entries else None):
            if chain is not None and old[0] in chain:
                first = chain.index(old[0])
                if chain[first : first + len(old)] == old:
                    chain[first : first + len(old)] = [new]

    # ---------------------------------------------------------------------------------------------------------------

    def _counts(
        self, event: Literal["acknowledged", "declined", "no longer quiet"], task: int, generation: int
    ) -> bool:
        """Whether a message of a task counts. It does not when the task was built again since."""
        current = task in self._tasks and generation == self._generations[task]
        return self._life.move(event if current else "late word")

    def _has_answered(self, awaited: set[int], event: CoordinatorEvent, worker: int) -> None:
        """Notes that a worker has given the answer that was awaited."""
        if worker not in awaited:
            raise self._life.refusal(event, f"worker {worker} has answered before, or was not asked")
        awaited.remove(worker)

    def _written(self, event: Literal["saved", "not saved"], epoch: int) -> Manifest:
        """Returns the manifest whose writing has ended. No manifest is being written now."""
        self._life.move(event)
        manifest, self._saving = self._saving, None
        if manifest is None or manifest.epoch != epoch:
            raise self._life.refusal(event, f"no manifest of epoch {epoch} is being written")
        return manifest

    @property
    def _all_finished(self) -> bool:
        return len(self._finished) == len(self._tasks)

    def _take(self, manifest: Manifest) -> None:
        """Starts from an epoch."""
        self.epoch = self.begun = manifest.epoch
        self._unreadable = False
        self._halted_for = str(manifest.extra["stop"]) if "stop" in manifest.extra else None
        self.generation = max(self.generation, int(manifest.extra.get("generation", 0)))
        self._entries = {entry.number: entry for entry in manifest.tasks}
        if not self._changed:
            self._chains = {number: list(entry.blobs) for number, entry in self._entries.items()}

    def _again(self, lost: frozenset[int], dead: list[int], now: float, reason: str, doing: str = "") -> list[Command]:
        """Recovers from a death, if this is allowed."""
        times = self._restart_times
        while times and times[0][0] <= now - self.options.restart_window_s:
            times.popleft()
        if self.options.interval_s is None or len(times) >= self.options.max_restarts:
            self._life.move("fail", reason)
            if self.options.interval_s is None or not self.options.max_restarts:
                return [Fail(reason)]
            often, each = ("once", "") if len(times) == 1 else (f"{len(times)} times", "each time ")
            why = ""
            if doing and all(before == doing for _, before in times):
                why = f", {each}after a worker had died {doing}"
            return [
                Fail(
                    f"{reason}. The job has been restarted {often} in the last "
                    f"{self.options.restart_window_s:g} s{why}, which is all that "
                    f"max_restarts={self.options.max_restarts} allows; correct the cause, and resume the job"
                )
            ]
        times.append((now, doing))
        self.restarts += 1
        self._restart_wait_s = self._restart_backoff.failed()
        return self._go_back(lost, dead, now, self._restart_wait_s, reason)

    def _go_back(self, lost: frozenset[int], dead: list[int], now: float, wait: float, reason: str) -> list[Command]:
        """Makes the lost tasks, and all tasks downstream, go back to the last complete epoch."""
        self._life.move("go back", reason)
        self._migration = self._stop = None
        back = self._going_back | lost
        if self._halted_for is not None:  # none of the others may run on
            back = self._tasks
        back = back.union(*(self._downstream[task] for task in back))
        self.generation += 1
        self._going_back = back
        self._building.clear()
        self._generations.update(dict.fromkeys(back, self.generation))
        self._undo(back)
        for pending in self._pending.values():
            pending.begun = now
        commands: list[Command] = [RemoveTasks(back, self.epoch), *(Start(worker, wait) for worker in dead)]
        if not self._missing:
            commands += self._build(wait)
        return commands

    def _stay(self, epoch: int | None = None) -> list[Command]:
        """Ends the migration or the stop (at this epoch), and its tasks continue where they are."""
        attempt = self._migration or self._stop
        if attempt is None or epoch not in (None, attempt[0]):
            return []
        if self._saving is not None and "stop" in self._saving.extra:  # nobody knows yet whether the job stops
            return []
        self._migration = self._stop = None
        return [Unpark()]

    def _migrate_now(self, placed: dict[int, int], parked: set[int]) -> list[Command]:
        """Moves tasks to their new workers, because the epoch at which they migrate is complete. Does nothing for tasks
        that have ended by then."""
        ended = [number for number, entry in self._entries.items() if entry.finished]
        moved = self._elsewhere(placed, ended)
        if self.state is not _S.RUNNING or not moved:
            return []  # the epoch was the last of the job
        back = moved if moved <= parked else moved.union(*(self._downstream[task] for task in moved))
        self.placed = {**self.placed, **{task: placed[task] for task in moved}}
        self._change = Change(self.plan, self.placed)
        self._going_back = back
        self._undo(back)
        return [RemoveTasks(back, self.epoch, planned=True), *self._build()]

    def _elsewhere(self, placed: dict[int, int], ended: Iterable[int]) -> frozenset[int]:
        """Returns the tasks that shall run on another worker than now and have not ended."""
        return frozenset(task for task in self._tasks.difference(ended) if placed[task] != self.placed[task])

    def _undo(self, tasks: Iterable[int]) -> None:
        """Drops the reports of these tasks since the last complete epoch."""
        for task in tasks:
            self._finished.pop(task, None)
            self._chains.pop(task, None)
            if not self._changed and task in self._entries:
                self._chains[task] = list(self._entries[task].blobs)
            for pending in self._pending.values():
                pending.entries.pop(task, None)

    def _build(self, after_s: float = 0.0) -> list[Command]:
        self._life.move("build")
        self.generation += 1
        self._building = set(self._workers)
        for task in self._going_back:
            self._generations[task] = self.generation
        entries = self._entries
        if not self._changed:
            needed = {number for task in self._going_back for number in savers_of(self.plan, self.plan.by_number[task])}
            entries = {task: entries[task] for task in sorted(needed) if task in entries}
        return [
            BuildTasks(
                self._going_back,
                self.generation,
                self.epoch,
                entries,
                after_s,
                self._change,
                self._changed,
                self._origin,
            )
        ]

    def _entry(self, number: int, chain: list[Blob], finished: bool, uncommitted: Iterable[str]) -> TaskEntry:
        task = self.plan.by_number[number]
        chain_of = self.plan.chains[task.chain]
        return TaskEntry(
            number=number,
            name=self.plan.task_name(task),
            index=task.index,
            parallelism=chain_of.parallelism,
            operators=[operator.name for operator in chain_of.operators],
            finished=finished,
            groups=self.plan.groups(task),
            blobs=list(chain),
            uncommitted=list(uncommitted),
        )

    def _try_to_save(self) -> list[Command]:
        """Writes the manifest of the newest epoch that every task has acknowledged."""
        if self.state is not _S.RUNNING or self._saving is not None:
            return []
        if self._all_finished:
            self._stop = None  # the job ends by itself
            self.begun += 1
            return self._save(self.begun, {}, final=True)
        for epoch in sorted(self._pending, reverse=True):
            pending = self._pending[epoch]
            if pending.declined is None and self._tasks <= pending.entries.keys() | self._finished.keys():
                return self._save(epoch, pending.entries, final=False)
        return []

    def _save(self, epoch: int, acknowledged: dict[int, TaskEntry], final: bool) -> list[Command]:
        tasks = [acknowledged.get(task) or self._finished[task] for task in sorted(self._tasks)]
        extra: dict[str, str | int | float] = {"generation": self.generation}
        attempt = self._stop if self._stop is not None and self._stop[0] == epoch and not final else None
        if attempt is not None and self._pending[epoch].parked >= self._tasks.difference(self._finished):
            extra["stop"] = attempt[1]
        self._saving = Manifest(
            job=self.plan.name,
            epoch=epoch,
            created=0.0,  # whoever writes the manifest sets this
            final=final,
            key_groups=self.plan.key_groups,
            tasks=tasks,
            extra=extra,
        )
        return [Save(self._saving)]

    def _after_save(self, try_to_save: bool = True) -> list[Command]:
        commands: list[Command] = []
        lost, self._lost_meanwhile = self._lost_meanwhile, []
        for worker, now, reason, doing in lost:
            commands += self.worker_lost(worker, now, reason, doing)
        return commands or (self._try_to_save() if try_to_save else [])


def _among(names: Collection[str], blobs: Iterable[Blob]) -> bool:
    """Whether one of the blobs has one of the names."""
    return any(blob.data is None and blob.name in names for blob in blobs)


def _tasks_downstream(plan: Plan) -> dict[int, frozenset[int]]:
    """Returns for each task all tasks that its records can reach."""
    direct: dict[int, set[int]] = {task.number: set() for task in plan.tasks}
    for exchange in plan.exchanges:
        for sender in range(exchange.senders):
            targets = (plan.task(exchange.target, index).number for index in exchange.targets(sender))
            direct[plan.task(exchange.source, sender).number].update(targets)
    downstream: dict[int, frozenset[int]] = {}

    def reach(task: int) -> frozenset[int]:
        if task not in downstream:
            downstream[task] = frozenset(direct[task]).union(*(reach(target) for target in direct[task]))
        return downstream[task]

    for task in direct:
        reach(task)
    return downstream


def _same_chains(before: Plan, after: Plan) -> set[int]:
    """Returns the chains that are the same in both plans, with the same tasks. There are none when chains are fused in
    another way."""
    names = [[operator.name for operator in chain.operators] for chain in before.chains]
    if names != [[operator.name for operator in chain.operators] for chain in after.chains]:
        return set()
    pairs = zip(before.chains, after.chains, strict=True)
    return {one.index for one, other in pairs if one.parallelism == other.parallelism and one.table == other.table}


def tasks_on(placed: dict[int, int], workers: Iterable[int]) -> frozenset[int]:
    """Returns the tasks that these workers run."""
    chosen = set(workers)
    return frozenset(task for task, worker in placed.items() if worker in chosen)
