"""The requests to change a running job: savepoints, rescales, migrations, and a stop with a savepoint, which its
drivers ask for, and the moves that placement wants.

A savepoint or a rescale is done when an epoch that was begun for it is complete. Migrations are carried out one after
the other, and placement waits for those of drivers. Each request has one reply, whose number is its carrier's: when it
is carried out, when it is refused, and at the latest when the job ends.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.host.decide.commands import CopySavepoint, HostCommand, JobEnd, Reply
from penstock.host.decide.job_state import JobLife
from penstock.host.decide.present_plan import PresentPlan
from penstock.runtime.epochs import coordinator as protocol
from penstock.runtime.epochs.coordinator import Coordinator
from penstock.runtime.errors import JobError, PenstockError
from penstock.runtime.program.mixing import mixing, mixing_words
from penstock.runtime.program.plan import Plan

logger = logging.getLogger(__name__)


@dataclass
class SavepointRequest:
    """Copy the state of all tasks to a place. `epoch`: the one to wait for; None while none has been begun for it."""

    number: int
    place: str
    epoch: int | None = None


@dataclass
class RescaleRequest:
    """Give an operator another number of tasks. `epoch`: as of a savepoint."""

    number: int
    operator: str
    parallelism: int
    epoch: int | None = None


@dataclass
class MigrateRequest:
    """Let tasks, by number, run on these workers."""

    number: int
    wanted: dict[int, int]


@dataclass
class StopRequest:
    """End the job with a savepoint in this place."""

    number: int
    place: str


class DriverRequests:
    """See the module's docstring. A new request is carried out by the next `serve`."""

    def __init__(
        self,
        coordinator: Coordinator,
        present: PresentPlan,
        life: JobLife,
        out: list[HostCommand],
        obey: Callable[[list[protocol.Command], float], None],
        adopt: Callable[[Plan, dict[int, int], float], None],
        *,
        workers: int,
        interval_s: float | None,
    ) -> None:
        """`out`: the list of the host's commands. `obey` carries out commands of the coordinator, and `adopt` continues
        with another plan. `interval_s`: of epochs; None in a job without epochs, which has none of these requests."""
        self._coordinator = coordinator
        self._present = present
        self._life = life
        self._out = out
        self._obey = obey
        self._adopt = adopt
        self._workers = workers
        self._interval_s = interval_s
        self.at_epoch: list[SavepointRequest | RescaleRequest] = []  # oldest first
        self.rescaling: list[int] = []  # rescales that are done when the job runs again
        self._migrations: deque[MigrateRequest] = deque()  # one after the other, the oldest first
        self._stops: list[StopRequest] = []  # all for the same place
        #: What placement has found last, and for which plan and places; None when this is done, or cannot be.
        self._better: tuple[Plan, dict[int, int], dict[int, int]] | None = None
        self._move_after = 0.0  # the first migration is not tried again before this time
        self._end: JobEnd | None = None

    # --- requests ------------------------------------------------------------------------------------------------

    def savepoint(self, request: int, place: str) -> None:
        """Takes a request to copy the state of all tasks to a place, which the carrier has checked."""
        if self._may_ask(request, "a savepoint"):
            self.at_epoch.append(SavepointRequest(request, place))

    def give_up_savepoint(self, request: int) -> str | None:
        """Forgets a savepoint that still waits for its epoch, because its driver waits no longer. Returns what it has
        waited for, or None when there is no such request any more, because its epoch is being copied."""
        coordinator = self._coordinator
        for waiting in self.at_epoch:
            if waiting.number == request:
                self.at_epoch.remove(waiting)
                if coordinator.state in ("FINISHING", "ENDED"):
                    return "an epoch, and none follows, because the job has only to end"
                if coordinator.state != "RUNNING":
                    return f"the tasks to run, and the job is {self._life.state}"
                return f"epoch {coordinator.begun}, which {coordinator.late(coordinator.begun)}"
        return None

    def stop_with_savepoint(self, request: int, place: str) -> None:
        """Takes a request to end the job at an epoch that is copied to a place, which the carrier has checked. The
        reply comes with the job's end, or when the savepoint could not be written and the job continues. A driver may
        ask again for the same place."""
        if not self._may_ask(request, "a savepoint"):
            return
        others = {other.place for other in self._stops} | {self._coordinator.halted_for or place}
        if self._life.stopping:
            self._refuse(request, "is stopping already, without a savepoint; let it finish, or cancel it")
        elif others != {place}:
            self._refuse(request, f"is stopping already, with a savepoint in {next(iter(others - {place}))!r}")
        else:
            self._stops.append(StopRequest(request, place))

    def has_stopped_with(self, place: str) -> bool:
        """Whether the job has ended well with a savepoint in this place."""
        return self._end is not None and self._end.state == "FINISHED" and self._coordinator.halted_for == place

    def rescale(self, request: int, operator: str, parallelism: int) -> None:
        """Takes a request to give an operator another number of tasks."""
        if not self._may_ask(request, "rescale"):
            return
        now = self._present.plan
        try:
            plan = self._present.rescaled(operator, parallelism)
        except PenstockError as error:
            self._out.append(Reply(request, error))
            return
        before = mixing(now)
        words = mixing_words({mark: met for mark, met in mixing(plan).items() if mark not in before})
        if words:
            logger.warning("job %s: after rescale(%r, %d) %s", now.name, operator, parallelism, words)
        self.at_epoch.append(RescaleRequest(request, operator, parallelism))

    def migrate(self, request: int, tasks: Mapping[str, int]) -> None:
        """Takes a request to let tasks, given by name, migrate to other workers."""
        if not self._may_ask(request, "migrate"):
            return
        plan = self._present.plan
        numbers = {plan.task_name(task): task.number for task in plan.tasks}
        unknown = sorted(set(tasks) - set(numbers))
        beyond = [worker for worker in tasks.values() if not 0 <= worker < self._workers]
        if unknown:
            self._refuse(request, f"has no task {unknown[0]!r}; it has: {', '.join(sorted(numbers))}")
        elif beyond:
            why = f"there is no worker {beyond[0]}; the job has 0 to {self._workers - 1}"
            self._out.append(Reply(request, JobError(why)))
        else:
            wanted = {numbers[name]: worker for name, worker in tasks.items()}
            if stuck := self._present.stuck(wanted):
                self._out.append(Reply(request, JobError(stuck)))
            else:
                self._migrations.append(MigrateRequest(request, wanted))

    def better_placed(self, plan: Plan, placed: dict[int, int], wanted: dict[int, int]) -> None:
        """Takes the better workers for tasks that placement has found for this plan and these places. Nothing comes of
        it when the plan or the places have changed meanwhile, or when a driver has asked for a migration. While an
        epoch is being saved, the tasks wait for its end."""
        self._better = plan, placed, wanted

    def _may_ask(self, request: int, what: str) -> bool:
        if self._end is not None:
            self._out.append(Reply(request, JobError(self._end.words(self._present.plan.name))))
        elif self._interval_s is None:
            needs = (
                f"{what} needs epochs, and job {self._present.plan.name!r} runs without; run it with epochs "
                "(epoch_interval_s=1, or --epoch-interval 1 on the command line)"
            )
            self._out.append(Reply(request, JobError(needs)))
        else:
            return True
        return False

    def _refuse(self, request: int, why: str) -> None:
        self._out.append(Reply(request, JobError(f"job {self._present.plan.name!r} {why}")))

    # --- the job ---------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Returns when `serve` can do something that depends on the time; None: that depends on the next event."""
        return self._move_after if (self._migrations or self._stops) and self._can_move() else None

    def serve(self, now: float) -> None:
        """Carries out all requests that can be carried out now. Called after every event."""
        if self.at_epoch:
            self._serve_at_epoch(now)
        if self._migrations:
            self._serve_migrations(now)
        if self._stops and self._can_move() and now >= self._move_after:
            self._move_after = now + (self._interval_s or 0.0)  # as of migrations
            self._obey(self._coordinator.stop(self._stops[0].place, now), now)
        if self._better is not None:
            self._serve_better(now)

    def connected(self) -> None:
        """Replies to the rescales that are done, because the job's tasks are connected."""
        self._out += [Reply(request) for request in self.rescaling]
        self.rescaling.clear()

    def not_copied(self, generation: int, error: Exception, now: float) -> None:
        """Notes that the savepoint with which the job was to end could not be written: the job continues."""
        if self._end is None and (commands := self._coordinator.not_copied(generation, str(error), now)):
            self._out += [Reply(request.number, error) for request in self._stops]
            self._stops.clear()
            name = self._present.plan.name
            logger.warning("job %s continues, because its savepoint could not be written: %s", name, error)
            self._obey(commands, now)
            if isinstance(commands[0], protocol.Unpark):  # otherwise connecting the tasks does this
                self._life.connected()

    def end(self, end: JobEnd) -> None:
        """Replies to all open requests, because the job has ended."""
        self._end = end
        error = JobError(end.words(self._present.plan.name))
        stopped = [stop.number for stop in self._stops if self.has_stopped_with(stop.place)]
        others = [
            *(request.number for request in self.at_epoch),
            *self.rescaling,
            *(request.number for request in self._migrations),
            *(stop.number for stop in self._stops if stop.number not in stopped),
        ]
        self._out += [Reply(request) for request in stopped]
        self._out += [Reply(request, error) for request in others]

    def _can_move(self) -> bool:
        return self._coordinator.state == "RUNNING" and not self._coordinator.migrating

    def _serve_at_epoch(self, now: float) -> None:
        coordinator = self._coordinator
        for request in list(self.at_epoch):
            if coordinator.state != "RUNNING":
                break
            if request.epoch is None:
                begun = coordinator.begin(now)
                request.epoch = coordinator.begun
                self._obey(begun, now)
            elif coordinator.epoch >= request.epoch:
                if isinstance(request, SavepointRequest):
                    self.at_epoch.remove(request)
                    self._out.append(CopySavepoint(request.number, request.place, self._present.plan))
                else:
                    self._replan(request, now)

    def _replan(self, request: RescaleRequest, now: float) -> None:
        """Carries out a rescale, because the epoch that it has waited for is complete."""
        error: PenstockError | None = None
        plan = self._present.plan
        try:
            plan = self._present.rescaled(request.operator, request.parallelism)
        except PenstockError as refused:
            error = refused
        if plan is self._present.plan:
            self.at_epoch.remove(request)
            self._out.append(Reply(request.number, error))
            return
        placed = self._present.grown(plan)
        commands = self._coordinator.replan(plan, placed)
        if not commands:  # this epoch could not be used
            request.epoch = None
            return
        self.at_epoch.remove(request)
        self.rescaling.append(request.number)
        self._present.parallelism[request.operator] = request.parallelism
        self._adopt(plan, placed, now)
        self._obey(commands, now)

    def _serve_migrations(self, now: float) -> None:
        """Starts the first requested migration. Called after every event until it has been carried out."""
        if not self._can_move():
            return
        present, request = self._present, self._migrations[0]
        finished = self._coordinator.finished()
        moves = {
            task: worker
            for task, worker in request.wanted.items()
            if task not in finished and present.placed.get(task, worker) != worker
        }
        if not moves:
            self._migrations.popleft()
            ended = [
                present.plan.task_name(present.plan.by_number[task])
                for task in sorted(request.wanted.keys() & finished)
            ]
            error = JobError(f"tasks that have ended cannot migrate: {', '.join(ended)}") if ended else None
            self._out.append(Reply(request.number, error))
        elif now >= self._move_after:
            self._move_after = now + (self._interval_s or 0.0)  # a store that is gone refuses each epoch
            self._obey(self._coordinator.migrate({**present.placed, **moves}, now), now)

    def _serve_better(self, now: float) -> None:
        """Lets tasks migrate as placement wants, if this is possible now."""
        assert self._better is not None
        plan, placed, wanted = self._better
        changed = self._present.plan is not plan or self._present.placed != placed or self._migrations
        if not changed and self._can_move():
            self._obey(self._coordinator.migrate(wanted, now), now)
        if changed or self._coordinator.state != "RUNNING" or self._coordinator.migrating:
            self._better = None
