"""The generations of a job's tasks: how the tasks of one are removed, and those of the next are built.

No task is built, and no process is started, before all running workers have answered the last removal. Only then are
all records of the removed tasks sent or dropped, and the new addresses of rings known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.host.decide.commands import HostCommand, StartProcess, UndoSinkRecords
from penstock.host.decide.job_state import JobLife
from penstock.host.decide.present_plan import PresentPlan
from penstock.host.decide.process_commands import Build, Remove, Removed
from penstock.host.decide.suspects import Suspects
from penstock.host.decide.worker_calls import Handler, WorkerCalls
from penstock.host.decide.worker_lives import WorkerLives
from penstock.runtime.epochs import coordinator as protocol
from penstock.runtime.epochs.coordinator import Coordinator
from penstock.runtime.errors import PenstockError, SnapshotDamaged, StoreError
from penstock.runtime.transport.base import PeerGone

logger = logging.getLogger(__name__)


class Generations:
    """See the module's docstring."""

    def __init__(
        self,
        calls: WorkerCalls,
        lives: WorkerLives,
        life: JobLife,
        present: PresentPlan,
        suspects: Suspects,
        coordinator: Coordinator,
        out: list[HostCommand],
        obey: Callable[[list[protocol.Command], float], None],
    ) -> None:
        """`obey` carries out commands of the coordinator, which hears of the workers that have built their tasks."""
        self._calls = calls
        self._lives = lives
        self._life = life
        self._present = present
        self._suspects = suspects
        self._coordinator = coordinator
        self._out = out
        self._obey = obey
        self._removing: set[int] = set()  # the workers that have not answered the last removal
        self._removal: object = None  # identifies it
        self._starts: list[tuple[float, int]] = []  # when, and which worker's process
        self._building: tuple[float, protocol.BuildTasks] | None = None  # the tasks to be built, and when

    def due(self) -> list[float]:
        """Returns when `release` has something to do, unless that depends on an answer."""
        if self._removing:
            return []
        return [at for at, _ in self._starts] + ([] if self._building is None else [self._building[0]])

    def start(self, command: protocol.Start, now: float) -> None:
        """Starts a worker's process as soon as nothing holds it back."""
        self._starts.append((now + command.after_s, command.worker))

    def remove(self, command: protocol.RemoveTasks) -> None:
        """Removes tasks from all workers."""
        self._life.removed(planned=command.planned)
        self._building = None  # the tasks of an earlier command are removed too, and a later command builds them
        self._removing = set(self._lives.running)

        def answered(worker: int, answer: Removed, now: float) -> None:
            self._lives.ring_has_changed(worker, answer.address)
            for dead, size in answer.rings.items():
                self._lives.ring_has_grown(dead, size)
            if removal is self._removal:
                self._removing.discard(worker)

        removal = self._removal = object()
        self._calls.call_all(Remove(command, self._lives.without_run()), answered)

    def build(self, command: protocol.BuildTasks, now: float) -> None:
        """Builds tasks as soon as nothing holds it back."""
        if command.change is not None and command.change.placed != self._present.placed:
            self._present.move(command.change.placed)
        self._building = (now + command.after_s, command)

    def over(self, worker: int) -> None:
        """Waits no more for a worker, whose process does nothing more."""
        self._removing.discard(worker)

    def release(self, now: float) -> None:
        """Starts processes, and builds tasks, when nothing holds them back any more."""
        if self._removing:
            return
        due = [worker for at, worker in self._starts if at <= now]
        self._starts = [(at, worker) for at, worker in self._starts if at > now]
        for worker in due:
            incarnation, ring_bytes = self._lives.starting(worker), self._lives.ring_bytes(worker)
            self._out.append(StartProcess(worker, incarnation, ring_bytes, self._present.plan, self._present.placed))
        if self._building is not None and self._building[0] <= now:
            (_, command), self._building = self._building, None
            self._build(command)

    def _build(self, command: protocol.BuildTasks) -> None:
        plan = self._present.plan
        self._out.append(UndoSinkRecords(command.tasks, command.generation, frozenset(plan.by_number)))
        modes = {task: how for task, how in self._suspects.modes().items() if task in command.tasks}
        for task, how in modes.items():
            logger.warning(
                "job %s: task %s was running at two deaths, so until %s epochs have completed it takes its records one "
                "by one, to find a record that kills; meanwhile it is slower, and a map_async in it makes one call at "
                "a time",
                plan.name,
                plan.task_name(plan.by_number[task]),
                f"{how.epochs:,}",
            )
        addresses = self._lives.addresses()
        for worker in sorted(self._lives.running):

            def answered(_: Any, now: float, worker: int = worker) -> None:
                self._obey(self._coordinator.built(worker, command.generation, now), now)

            def refused(error: PenstockError, now: float, worker: int = worker) -> None:
                why = why_not_built(worker, getattr(error, "error", None))
                if why is None:
                    self._calls.refused(error, now)
                    return
                reason, damaged = why
                self._obey(self._coordinator.not_built(worker, command.generation, reason, damaged, now), now)

            self._calls.call(worker, Build(command, addresses, modes), Handler(answered, refused))


def why_not_built(worker: int, error: Exception | None) -> tuple[str, bool] | None:
    """Returns why a worker could not build its tasks, and whether their snapshots are damaged. Returns None when trying
    again would have the same result, so that the job fails."""
    if isinstance(error, SnapshotDamaged):
        return str(error), True
    if isinstance(error, StoreError) and error.may_pass:
        return f"their snapshots could not be read: {error}", False
    if isinstance(error, PeerGone):
        return f"worker {worker} cannot reach another worker: {error}", False
    return None
