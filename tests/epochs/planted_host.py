"""Faults to plant into the JobHost: entries of the table of tests/planting.py. The simulated cluster must find all but
one, which does no harm where no ring grows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from penstock.host.decide.barriers import Barriers
from penstock.host.decide.commands import FindOlder, JobEnd, KillProcess
from penstock.host.decide.driver_requests import DriverRequests, RescaleRequest
from penstock.host.decide.generations import Generations
from penstock.host.decide.job_host import JobHost
from penstock.host.decide.present_plan import PresentPlan
from penstock.host.decide.status import StatusBuilder
from penstock.host.decide.worker_lives import WorkerLives
from penstock.runtime.epochs.coordinator import BuildTasks, Coordinator, RemoveTasks, Trigger
from tests.epochs.sim import Faults
from tests.planting import Seeds, Test, planted_fault

HOST = "penstock/host/decide/job_host.py"
REQUESTS = "penstock/host/decide/driver_requests.py"
BARRIERS = "penstock/host/decide/barriers.py"
PLAN = "penstock/host/decide/present_plan.py"
GENERATIONS = "penstock/host/decide/generations.py"
COORDINATOR = "penstock/runtime/epochs/coordinator.py"
SCENES = "tests/host/test_job_host.py"


def _patch(name: str, new: Any, owner: Any = JobHost) -> Any:
    return mock.patch.object(owner, name, new)


@contextlib.contextmanager
def _all(*patches: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@planted_fault(REQUESTS, Seeds(168, lambda faults: faults.migrations > 0 and faults.rescales > 0))
def _plan_of_before() -> Any:
    """What was planned for another plan, or another placement, is taken up."""

    def serve(self: DriverRequests, now: float) -> None:
        assert self._better is not None
        (_, _, wanted), self._better = self._better, None
        self._obey(self._coordinator.migrate(wanted, now), now)

    return _patch("_serve_better", serve, DriverRequests)


@planted_fault(GENERATIONS, Test(f"{SCENES}::test_processes_start_and_tasks_are_built_when_all_have_removed_theirs"))
def _removal_not_awaited() -> Any:
    """Tasks are built, and processes started, before all workers have removed theirs."""
    remove = Generations.remove

    def at_once(self: Generations, command: RemoveTasks) -> None:
        remove(self, command)
        self._removing.clear()

    return _patch("remove", at_once, Generations)


@planted_fault(
    BARRIERS,
    Test(f"{SCENES}::test_no_barrier_of_a_stop_begins_before_all_workers_know_which_tasks_stop_after_it"),
)
def _barrier_before_all_know() -> Any:
    """The barrier of a stop begins before all workers know which tasks stop after it."""
    trigger = Barriers.trigger

    def at_once(self: Barriers, command: Trigger, now: float) -> None:
        trigger(self, command, now)
        self._begin(now)

    return _patch("trigger", at_once, Barriers)


@planted_fault(
    COORDINATOR,
    Test(f"{SCENES}::test_after_a_death_all_tasks_are_built_again_and_none_runs_before_the_job_has_stopped"),
)
def _stop_forgotten_at_a_death() -> Any:
    """After a death the tasks of a job that has stopped with its savepoint run again."""
    go_back = Coordinator._go_back

    def forget(self: Coordinator, *arguments: Any) -> Any:
        self._halted_for = None
        return go_back(self, *arguments)

    return _patch("_go_back", forget, Coordinator)


@planted_fault(GENERATIONS, Seeds(29, lambda faults: faults.kills > 0))
def _addresses_of_before() -> Any:
    """Workers that build tasks are told where the others were when tasks were removed."""
    remove, build = Generations.remove, Generations._build
    known: dict[int, dict[int, str]] = {}

    def note(self: Generations, command: RemoveTasks) -> None:
        known[id(self)] = {info["index"]: info["address"] for info in self._lives.infos()}
        remove(self, command)

    def with_old(self: Generations, command: BuildTasks) -> None:
        old = known.get(id(self)) or self._lives.addresses()
        with mock.patch.object(WorkerLives, "addresses", return_value=old):
            build(self, command)

    return _all(_patch("remove", note, Generations), _patch("_build", with_old, Generations))


@planted_fault(HOST, Seeds(17, lambda faults: faults.kills > 0 and faults.workers == 1))
def _finished_while_saving() -> Any:
    """A job in which no run loop runs has finished, also while the coordinator puts off a death."""
    end = JobHost._end_if_over

    def too_early(self: JobHost, now: float) -> None:
        if not self.lives.running and self.coordinator.state == "RUNNING" and not self._failures:
            self._fail(JobEnd("FINISHED"), now)
        end(self, now)

    return _patch("_end_if_over", too_early)


@planted_fault(COORDINATOR, Seeds(26, lambda faults: faults.kills > 0))
def _death_told_twice() -> Any:
    """The death of a worker is told to the coordinator twice, so that two processes are started for it."""
    lost = Coordinator.worker_lost

    def twice(self: Coordinator, *told: Any) -> Any:
        return [*lost(self, *told), *lost(self, *told)]

    return _patch("worker_lost", twice, Coordinator)


@planted_fault("penstock/host/decide/status.py", Seeds(11, lambda faults: faults.rescales > 0 and faults.asks > 0))
def _status_of_another_plan() -> Any:
    """The status keeps the plan of the job's start while tasks change."""
    return _patch("of", lambda self, plan: self, StatusBuilder)


@planted_fault(PLAN, Test(f"{SCENES}::test_where_tasks_are_is_known_after_they_have_moved"))
def _placed_as_at_the_start() -> Any:
    """That tasks run elsewhere is not noted."""
    return _patch("move", lambda self, placed: None, PresentPlan)


@planted_fault(REQUESTS, Seeds(39, lambda faults: faults.rescales > 0))
def _request_forgotten() -> Any:
    """A rescale for which the epoch does not do is given up without a reply."""
    replan = DriverRequests._replan

    def careless(self: DriverRequests, request: RescaleRequest, now: float) -> None:
        replan(self, request, now)
        if request in self.at_epoch:
            self.at_epoch.remove(request)

    return _patch("_replan", careless, DriverRequests)


@planted_fault(HOST, Seeds(21, lambda faults: faults.hangs > 0 and faults.kills > 2))
def _another_is_killed() -> Any:
    """A process is killed because an earlier one of its worker hung."""

    def process_hangs(self: JobHost, worker: int, incarnation: int, stopped: bool, now: float) -> Any:
        self.lives.hangs(worker, incarnation, None)
        self._out.append(KillProcess(worker, self.lives.incarnation(worker)))
        return self._settled(now)

    return _patch("process_hangs", process_hangs)


@planted_fault(HOST, Seeds(167, lambda faults: faults.damages > 0))
def _begins_anew() -> Any:
    """A job of which no epoch is left begins again, whatever its sinks have committed."""

    def found_older(self: JobHost, manifest: Any, refused: FindOlder, now: float) -> Any:
        self._obey(self.coordinator.rewind(manifest, now), now)
        return self._settled(now)

    return _patch("found_older", found_older)


@planted_fault(REQUESTS, Seeds(387, lambda faults: faults.rescales > 0 and faults.master_kills > 0))
def _parallelism_not_saved() -> Any:
    """Manifests do not say how many tasks operators have been given."""
    replan = DriverRequests._replan

    def careless(self: DriverRequests, request: RescaleRequest, now: float) -> None:
        replan(self, request, now)
        self._present.parallelism.clear()

    return _patch("_replan", careless, DriverRequests)


@planted_fault(HOST, Seeds(36, lambda faults: faults.master_kills > 0 and faults.kills > 0))
def _numbers_of_an_earlier_life() -> Any:
    """A JobHost that is made anew counts generations from the beginning again."""
    init = JobHost.__init__

    def forgetful(self: JobHost, *arguments: Any, earlier: int = 0, **others: Any) -> None:
        init(self, *arguments, **others)
        self.coordinator.generation = 0

    return _patch("__init__", forgetful)


@planted_fault(GENERATIONS, Seeds(9, lambda faults: faults.kills > 2))
def _the_dead_are_waited_for() -> Any:
    """A worker that has died before it removed its tasks is waited for."""
    over = JobHost._over

    def waits(self: JobHost, worker: int, now: float, then: Callable[[], None] = lambda: None) -> None:
        waiting = worker in self._generations._removing
        over(self, worker, now, then)
        if waiting:
            self._generations._removing.add(worker)

    return _patch("_over", waits)


def _any(faults: Faults) -> bool:
    return True


@planted_fault(HOST, Seeds(1, _any))
def _commits_are_not_awaited() -> Any:
    """Whether workers have committed the last epoch is not told to the coordinator."""
    complete = JobHost._complete

    def deaf(self: JobHost, command: Any, now: float) -> None:
        complete(self, command, now)
        if command.final:
            opened = self._calls._open
            for number, (worker, handler) in list(opened.items()):
                opened[number] = (worker, type(handler)(lambda answer, now: None, handler.refused))

    return _patch("_complete", deaf)
