"""A worker's part in the epochs: carries out the commands of the coordinator, and reports the results to it.

The participant stands between a run loop, the store, and whatever carries messages to the coordinator. Snapshots are
encoded in the loop's thread, so that they show one moment, and written in order by another thread, so that the loop
continues meanwhile. `build_tasks` reads snapshots in the thread of its caller, and only building the tasks is a call
into the loop. The participant must never acknowledge a snapshot that is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from penstock.runtime.calls import when_done
from penstock.runtime.epochs.coordinator import (
    BuildTasks,
    Complete,
    ConnectTasks,
    End,
    Park,
    ParticipantCommand,
    RemoveTasks,
    SaveWholeState,
    Trigger,
    Unpark,
)
from penstock.runtime.epochs.manifest import Blob
from penstock.runtime.epochs.restore import read_changed, read_same
from penstock.runtime.epochs.snapshot import begin_snapshot
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import FlowError, StoreError, describe
from penstock.runtime.operators.ends import Write
from penstock.runtime.program.plan import TaskId
from penstock.runtime.sinks.two_phases import SavedSink, commit_saved
from penstock.runtime.transport.base import Buffer
from penstock.runtime.worker.run_loop import RunLoop, Saved
from penstock.runtime.worker.task import Snapshot


@dataclass(frozen=True)
class Acknowledged:
    """A task has saved its part of an epoch."""

    task: int
    generation: int
    epoch: int
    finished: bool
    whole: bool
    blob: Blob
    quiet: bool = False
    parked: bool = False
    uncommitted: tuple[str, ...] = ()  # the sinks of which the blob has committables


@dataclass(frozen=True)
class Declined:
    """A task could not save its part of an epoch. `may_pass` means the same as in StoreError, or that room must be
    freed."""

    task: int
    generation: int
    epoch: int
    reason: str
    may_pass: bool = False


@dataclass(frozen=True)
class NoLongerQuiet:
    """A record has come to a task that had none between its last two snapshots."""

    task: int
    generation: int


#: What a worker reports of its tasks' parts of epochs.
EpochReport = Acknowledged | Declined | NoLongerQuiet


class Participant:
    """See the module's docstring. `send` carries a report to the coordinator, in order. `later(work)` does pieces of
    work one after the other in a thread of its own, and repeats a piece that returns False. Without a store the job has
    no epochs, and its tasks are built once."""

    def __init__(
        self,
        store: Store | None,
        key_groups: int,
        send: Callable[[EpochReport], None],
        later: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._store = store
        self._key_groups = key_groups
        self._send = send
        self._later = later
        self._ends: dict[int, tuple[Snapshot, Sequence[Buffer]]] = {}  # by task: what it saved at its end
        self.loop: RunLoop  # must be set before the first command

    def obey(self, command: ParticipantCommand) -> Future[None]:
        """Carries out a command of the coordinator. Raises StoreError when the snapshots of tasks that are to be built
        cannot be read."""
        loop = self.loop
        work: Callable[[], None]
        match command:
            case Trigger(epoch):
                work = partial(loop.trigger, epoch)
            case Park(epoch, tasks):
                work = partial(loop.park, epoch, tasks)
            case Unpark():
                work = loop.unpark
            case Complete(epoch, final):
                return self._after(partial(loop.complete, epoch, last=final), final)
            case SaveWholeState(tasks):
                work = partial(self._save_whole_state, tasks)
            case RemoveTasks(tasks, epoch):
                return self._after(partial(loop.remove_tasks, set(tasks), epoch), True)
            case BuildTasks():
                saved = self.read(command)
                self._commit_saved(command, saved)
                work = partial(self._build_tasks, command, saved)
            case ConnectTasks():
                work = partial(self._connect_tasks, command)
            case End():
                work = loop.end
        return loop.call(work)

    def _after(self, work: Callable[[], list[Future[None]]], wait: bool) -> Future[None]:
        """Has the loop do something, after which sinks are at work beside it. The future is done when this is done, and
        with `wait` when the sinks are done too."""
        done: Future[None] = Future()
        asked = self.loop.call(work)

        def asked_for() -> None:
            if (error := asked.exception()) is not None:
                done.set_exception(error)
            else:
                when_done(asked.result() if wait else [], lambda: done.set_result(None))

        when_done([asked], asked_for)
        return done

    def _commit_saved(self, command: BuildTasks, saved: dict[int, Saved]) -> None:
        """Commits the committables in the saved state of these tasks. Some of them are of tasks that no longer exist.
        Writers are made when all workers have done this (`connect_tasks`). It runs in the thread of the caller, as it
        may take long."""
        wiring = self.loop.wiring
        plan = wiring.plan if command.change is None else command.change.plan
        writes = {write.name: write for chain in plan.chains for write in chain.operators if isinstance(write, Write)}
        for name, write in writes.items():
            mine = [number for number, (states, _, _, _) in saved.items() if name in states]
            prepared: list[SavedSink] = [own for number in mine for own in saved[number][0][name].own]
            if prepared:
                task = plan.by_number[mine[0]]
                context = wiring.sink_context(plan, write, task, command.generation, restoring=True)
                context.patience = self.loop.patience.part(write.sink.patience_s)
                with context.errors.blamed(f"(committing epoch {command.epoch})"):
                    commit_saved(write.sink, context, prepared)

    def _save_whole_state(self, tasks: frozenset[int]) -> None:
        for number in tasks:
            task = self.loop.wiring.tasks.get(number)
            if task is None:
                continue
            task.save_whole()
            end = self._ends.get(number)  # no later snapshot will follow, so this one is written again
            if end is not None and end[0].generation == task.generation:
                self._later(partial(self._write, *end))

    def _build_tasks(self, command: BuildTasks, saved: dict[int, Saved]) -> None:
        if command.change is not None:
            self.loop.wiring.replan(command.change.plan, command.change.placed)
        self.loop.build_tasks(set(command.tasks), command.generation, command.epoch, saved)

    def _connect_tasks(self, command: ConnectTasks) -> None:
        """Connects tasks, and sends them the entries that they have missed."""
        self.loop.connect_tasks(set(command.tasks), command.generation)
        for epoch in command.triggers:
            self.loop.trigger(epoch, command.tasks)

    def read(self, command: BuildTasks) -> dict[int, Saved]:
        """Reads the saved state of this worker's tasks."""
        try:
            return self._read(command)
        finally:
            self._note_reading("")

    def _read(self, command: BuildTasks) -> dict[int, Saved]:
        wiring = self.loop.wiring
        plan = wiring.plan if command.change is None else command.change.plan
        placed = wiring.workers if command.change is None else command.change.placed
        store = command.origin or self._store
        saved: dict[int, Saved] = {}
        for task in plan.tasks:
            if task.number not in command.tasks or placed[task.number] != wiring.worker:
                continue
            if not command.entries:
                saved[task.number] = ({}, False, True, None)
                continue
            assert store is not None
            self._note_reading(f"while it read the saved state of task {plan.task_name(task)!r}")
            if command.changed:
                entries = list(command.entries.values())
                other = command.origin is not None
                try:
                    saved[task.number] = read_changed(plan, task, entries, store.pieces, other_program=other)
                except (StoreError, FlowError):
                    raise
                except Exception as error:  # the program's classes decide what unpickling them raises
                    if not other:
                        raise
                    raise FlowError(
                        f"task {plan.task_name(task)} cannot continue from state that another program has saved: "
                        f"{describe(error)}. The classes of the program must be able to take the saved objects "
                        "(docs/flows.md, Classes of the main script): keep a class that cannot under its old name, and "
                        "convert its objects; or start the job without the savepoint"
                    ) from error
            else:
                saved[task.number] = read_same(plan, task, command.entries, store.pieces)
        return saved

    def _note_reading(self, what: str) -> None:
        """Notes the entry that is being read, because unpickling it may kill this process."""
        if self.loop.box is not None:
            self.loop.box.doing(what, reads=True)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Encodes a task's part of an epoch, and has it written, as soon as its sinks have answered. It is called in
        the loop's thread."""
        encoded = begin_snapshot(snapshot.states, self._key_groups)
        owns = {name: state.own for name, (state, _) in snapshot.states.items() if state is not None}
        sinks = {name: own for name, own in owns.items() if isinstance(own, SavedSink | Future)}
        awaited = [own for own in sinks.values() if isinstance(own, Future)]
        # The garbage collector would visit long lists that live on, and stop the loop meanwhile.
        snapshot = replace(snapshot, states={})

        def write() -> None:
            parts = encoded()
            saved = {name: own.result() if isinstance(own, Future) else own for name, own in sinks.items()}
            uncommitted = tuple(name for name, own in saved.items() if own is not None and own.committables)
            written = replace(snapshot, uncommitted=uncommitted)
            if snapshot.finished:
                self._ends[snapshot.task.number] = (written, parts)
            self._later(lambda: self._write(written, parts))

        if awaited:
            when_done(awaited, lambda: self.loop.call_or_fail(write))
        else:
            write()

    def on_motion(self, task: TaskId, generation: int) -> None:
        """Reports that a task that was quiet has a record again. It is called in the loop's thread."""

        def say() -> bool:
            self._send(NoLongerQuiet(task.number, generation))
            return True

        self._later(say)  # after the snapshot that was quiet

    def _write(self, snapshot: Snapshot, parts: Sequence[Buffer]) -> bool:
        number = snapshot.task.number
        name = f"snapshots/{snapshot.epoch:08d}-{number}-{snapshot.generation}"
        assert self._store is not None
        try:
            blob = self._store.put(name, parts)
        except StoreError as error:
            self._send(Declined(number, snapshot.generation, snapshot.epoch, str(error), error.may_pass))
            if snapshot.finished:
                return False  # no later snapshot will follow, so this one is tried again

            def again() -> None:
                task = self.loop.wiring.tasks.get(number)
                if task is not None and task.generation == snapshot.generation:
                    task.save_whole()

            self.loop.call(again)
            return True
        self._send(
            Acknowledged(
                number,
                snapshot.generation,
                snapshot.epoch,
                snapshot.finished,
                snapshot.whole,
                blob,
                snapshot.quiet,
                snapshot.parked,
                snapshot.uncommitted,
            )
        )
        return True
