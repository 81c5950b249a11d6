"""Faults to plant into what sinks prepare and commit: entries of the table of tests/planting.py."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest import mock

from penstock.host.carry.store_keeper import StoreKeeper
from penstock.runtime.epochs import participant
from penstock.runtime.sinks.base import Sink, SinkContext
from penstock.runtime.sinks.two_phases import SavedSink, TwoPhases, commit_saved
from penstock.runtime.worker.run_loop import RunLoop
from tests.planting import Seeds, Test, planted_fault

PHASES = "penstock/runtime/sinks/two_phases.py"
BOTH_STEPS = "tests/epochs/test_committables.py::test_all_is_committed_before_writers_are_made"
PARTICIPANT = "penstock/runtime/epochs/participant.py"


@planted_fault(PARTICIPANT, Test(BOTH_STEPS))
def _writers_are_made_before_all_is_committed() -> Any:
    """A restored task makes its writer when it is built, and not when all workers have committed."""
    build = RunLoop.build_tasks

    def at_once(self: RunLoop, numbers: set[int], generation: int, epoch: int, saved: Any) -> None:
        build(self, numbers, generation, epoch, saved)
        for number in numbers:
            if (task := self.wiring.tasks.get(number)) is not None:
                task.passage.begin()

    return mock.patch.object(RunLoop, "build_tasks", at_once)


@planted_fault(PARTICIPANT, Test(BOTH_STEPS))
def _removed_tasks_are_forgotten() -> Any:
    """What tasks had prepared that there are no more is not committed."""

    def forgetful(sink: Sink, context: SinkContext, saved: list[SavedSink]) -> None:
        kept = [[one for one in each.committables if one.index < context.parallelism] for each in saved]
        commit_saved(sink, context, [SavedSink(None, committables) for committables in kept])

    return mock.patch.object(participant, "commit_saved", forgetful)


@planted_fault(
    PHASES,
    Test("tests/sinks/test_two_phases.py::test_what_is_prepared_is_saved_with_every_epoch_until_it_is_committed"),
)
def _epochs_that_are_passed_over_are_forgotten() -> Any:
    """A task saves only what it has prepared for the epoch itself, not what may still have to be committed."""
    prepare = TwoPhases.prepare

    def newest(self: TwoPhases, epoch: int, patiently: Any) -> Any:
        saved = prepare(self, epoch, patiently)
        assert not isinstance(saved, Future)
        if saved is not None:
            saved.committables = [one for one in saved.committables if one.epoch == epoch]
        return saved

    return mock.patch.object(TwoPhases, "prepare", newest)


@planted_fault(PHASES, Seeds(26))
def _what_is_under_way_is_committed_too() -> Any:
    """A task commits everything that it has prepared when an epoch is complete, also of later epochs."""
    complete = TwoPhases.complete

    def everything(self: TwoPhases, epoch: int, *, last: bool = False) -> Any:
        return complete(self, max([epoch, *(prepared for prepared, _ in self._held)]), last=last)

    return mock.patch.object(TwoPhases, "complete", everything)


@planted_fault("penstock/host/carry/store_keeper.py", Seeds(237, lambda faults: faults.log and faults.damages > 0))
def _goes_back_behind_what_stays() -> Any:
    """A job whose last epoch is damaged goes back to an older one, although a sink cannot take back."""
    return mock.patch.object(StoreKeeper, "_may_go_back", return_value=None)
