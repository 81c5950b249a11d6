"""What must hold of each command of a ParadigmScheduler, whoever carries it: a job in which tests play the workers
(scheduled_job.py), or the simulated cluster (simulated_spark.py).

A carrier gives each command to `check` before it carries it out, and notes in `lives` what the scheduler has been told
of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.bridge.commands import (
    CheckSpark,
    Command,
    DivertTasks,
    EndSpark,
    KillSpark,
    PrepareSpark,
    TakeSample,
    TryRange,
    UndivertTasks,
)
from penstock.bridge.forms import RangeForm
from penstock.runtime.program.plan import Plan
from penstock.runtime.worker.load import TaskLoad, divert_load

COUNTED_MAX_S = 5.0  # what one look adds at most to the time that something was waited for


@dataclass
class Life:
    """A start of Spark. STARTING until it is READY; PAUSED says nothing; DEAD was killed by others; GIVEN_UP was killed
    or ended by the scheduler."""

    forms: tuple[RangeForm, ...]
    state: Literal["STARTING", "READY", "PAUSED", "DEAD", "GIVEN_UP"] = "STARTING"
    was_ready: bool = False
    asked: bool = False  # whether it owes an answer to CheckSpark
    waited_s: float = 0.0  # for its start, or for this answer, as far as it counts
    has_failed: bool = False  # and has said so
    reason: str = ""  # why it was given up
    trials: set[int] = field(default_factory=set)  # chains whose ranges are being tried


class CommandChecks:
    """See the module's docstring. `prepare_s`, `hang_s`: the limits on Spark's start and on its silence; `node`: where
    Spark runs."""

    def __init__(self, plan: Plan, prepare_s: float, hang_s: float, node: str) -> None:
        self.plan = plan  # the last one that the scheduler was told
        self.lives: dict[int, Life] = {}
        self.waiting: dict[int, tuple[int, int]] = {}  # messages without an answer: number -> (worker, chain)
        self.sampling: dict[int, tuple[int, int]] = {}  # questions for samples without one, likewise
        self.stopped = False
        self._prepare_s = prepare_s
        self._hang_s = hang_s
        self._node = node
        self._reported: Mapping[int, Sequence[TaskLoad]] = {}

    @property
    def present(self) -> Life | None:
        """The Spark that was not given up."""
        found = [life for life in self.lives.values() if life.state != "GIVEN_UP"]
        return found[0] if found else None

    def looks(self, passed_s: float, reports: Mapping[int, Sequence[TaskLoad]]) -> None:
        """The scheduler is about to look at these reports, so long after its last look."""
        for life in self.lives.values():
            life.waited_s += min(passed_s, COUNTED_MAX_S)
        self._reported = reports

    def answered(self, number: int) -> None:
        """The scheduler is about to hear what has come of a message."""
        del self.waiting[number]

    def sampled(self, number: int) -> None:
        """The scheduler is about to hear what has come of a question for a sample."""
        del self.sampling[number]

    def check_ranges(self, states: Iterable[str]) -> None:
        """Check the states of the ranges after an event: a diversion does not outlive Spark."""
        assert self.present is not None or not {"SWITCHING", "OPERATION"} & set(states), "there is no Spark"

    def check(self, command: Command) -> None:
        """Check a command, and note what it says."""
        assert not self.stopped, f"{command} after the end"
        if isinstance(command, PrepareSpark):
            assert command.life == len(self.lives) + 1, "a number is not used again"
            assert self.present is None, "there is one Spark at a time"
            self.lives[command.life] = Life(command.forms)
        elif isinstance(command, CheckSpark):
            life = self.lives[command.life]
            assert life.state in ("READY", "PAUSED", "DEAD"), f"{command} of a Spark that is {life.state}"
            assert not life.asked, "it owes an answer already"
            life.asked, life.waited_s = True, 0.0
        elif isinstance(command, KillSpark | EndSpark):
            life = self.lives[command.life]
            assert life.state != "GIVEN_UP", "it is killed or ended once"
            assert command.reason
            if isinstance(command, KillSpark):
                self._check_kill(life)
            life.state, life.reason = "GIVEN_UP", command.reason
        elif isinstance(command, DivertTasks | UndivertTasks):
            self._check_message(command)
        elif isinstance(command, TakeSample):
            self._check_question(command)
        elif isinstance(command, TryRange):
            life = self.lives[command.life]
            assert life.state != "GIVEN_UP", f"{command}, and Spark is given up"
            assert command.chain in [form.chain for form in life.forms], f"Spark has not compiled chain {command.chain}"
            assert command.chain not in life.trials, "it is being tried"
            assert life.state == "STARTING" or not life.trials, "one range at a time is tried"
            assert command.sample.count == len(command.sample.records()) > 0
            life.trials.add(command.chain)

    def _check_question(self, command: TakeSample) -> None:
        worker, chain = command.worker, command.request.chain
        life = self.present
        assert life is not None, "there is no Spark to try a range in"
        assert chain in [form.chain for form in life.forms], "no range of the present plan"
        assert command.request.operators == tuple(operator.name for operator in self.plan.chains[chain].operators)
        assert worker in self._reported, f"worker {worker} has not reported"
        assert (worker, chain) not in self.sampling.values(), "one question at a time"
        assert command.number not in self.sampling
        tasks = [task for task in self._reported[worker] if task["chain"] == chain]
        assert any(task["diverted"] is None and not task["finished"] for task in tasks), "they take no records"
        self.sampling[command.number] = worker, chain

    def _check_kill(self, life: Life) -> None:
        if life.has_failed:
            return
        starting = life.state == "STARTING"
        assert starting or life.asked, "it was killed without a question"
        limit_s = self._prepare_s if starting else self._hang_s
        assert life.waited_s >= limit_s, f"a silence of {life.waited_s} s is no reason"

    def _check_message(self, command: DivertTasks | UndivertTasks) -> None:
        worker = command.worker
        chain = command.divert.chain if isinstance(command, DivertTasks) else command.chain
        assert worker in self._reported, f"worker {worker} has not reported"
        assert (worker, chain) not in self.waiting.values(), "one at a time"
        assert command.number not in self.waiting
        names = tuple(operator.name for operator in self.plan.chains[chain].operators)
        tasks = [
            task
            for task in self._reported[worker]
            if task["chain"] == chain and tuple(_operators(task)) == names  # else it belongs to another plan
        ]
        if isinstance(command, UndivertTasks):
            assert any(task["divert"] is not None for task in tasks), "a message without need"
        else:
            divert, life = command.divert, self.lives[command.divert.life]
            told = divert_load(divert)
            assert any(task["divert"] != told and can_follow(task) for task in tasks), "a message without need"
            assert life.state in ("READY", "PAUSED", "DEAD"), f"{command}, and Spark is {life.state}"
            assert not life.asked, "Spark is doubted"
            assert command.node == self._node
            assert divert.operators == names
            positions = [form.position for form in life.forms if form.chain == chain]
            assert positions, f"{command}, and Spark has not compiled this range"
            assert 1 <= divert.position <= positions[0]
        self.waiting[command.number] = worker, chain


def _operators(task: TaskLoad) -> Iterable[str]:
    return (operator.name for operator in task.operators)


def can_follow(task: Any) -> bool:
    """Whether a task does what DivertTasks says."""
    is_leaving = task["diverted"] is not None and task["divert"] is None
    return not (task["finished"] or task["record_by_record"] or is_leaving)
