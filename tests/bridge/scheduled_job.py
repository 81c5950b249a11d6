"""A job on two workers and its Spark, in virtual time, around a ParadigmScheduler: workers and Spark do what they are
told, or what a test has them do instead. Each command is checked when it is given (command_checks.py)."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeAlias

from penstock.bridge.burst import BurstOptions
from penstock.bridge.commands import CheckSpark, Command, DivertTasks, TakeSample, TryRange, UndivertTasks, Warn
from penstock.bridge.cost import BatchCost
from penstock.bridge.paradigm_scheduler import DualOptions, ParadigmScheduler
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import RangeTrial, SparkFacts
from penstock.runtime.operators.micro_batch import DiversionStats, DivertRequest
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.codec import encode
from penstock.runtime.status import RangeStatus
from penstock.runtime.worker.load import OperatorReport, TaskLoad, divert_load
from penstock.runtime.worker.sample import RecordSample
from tests.bridge.command_checks import CommandChecks, Life, can_follow

LOOK_S = 0.25
PREPARE_S = 120.0  # the limit on Spark's start
HANG_S = 60.0  # the limit on Spark's silence

DIED = "the process has died"

FACTS = SparkFacts(
    session="a session",
    costs={0: BatchCost(0.125, 64_000.0)},
    bridge=4711,
    log="/logs/penstock-spark-4711.log",
    executors={"1": 4712},
    name="a bridge",
    node="here",
)

TRIAL = RangeTrial(BatchCost(0.25, 32_000.0), "in some way")


#: The fields of a TaskLoad, as they are now; operators are (name, records in, records out).
ChangingLoad: TypeAlias = dict[str, Any]


class ScheduledJob:
    """See the module's docstring."""

    def __init__(self, flow: Flow, burst: BurstOptions) -> None:
        self.now = 100.0
        self.flow = flow
        self.plan = flow.plan(1)
        self._checks = CommandChecks(self.plan, PREPARE_S, HANG_S, FACTS.node)
        self.lives = self._checks.lives
        self.why_not: str | None = None  # Spark is not to be had
        self.takes_long = False  # to start
        self.silent: set[int] = set()  # workers that are paused: they neither report nor do anything
        self.busy: set[int] = set()  # workers that report, but do not come to do what they are told
        self.told: list[DivertTasks | UndivertTasks] = []  # by the last look
        self.warnings: list[str] = []
        self.checks = 0  # how often Spark was asked whether it lives
        self.has_records = True  # workers that were asked for a sample have one when they are asked again
        self.cannot_sample: str | None = None  # why they cannot
        self.trial = TRIAL  # what comes of a trial in Spark that is ready
        self.trials: list[TryRange] = []  # those that were asked for
        self.questions: list[TakeSample] = []
        self._collecting: set[tuple[int, int]] = set()  # (worker, chain)
        self._inboxes: dict[int, deque[DivertTasks | UndivertTasks | TakeSample]] = {0: deque(), 1: deque()}
        self._being_tried: list[TryRange] = []
        self._ids = iter(range(1, 10**9))
        self.make_tasks()
        options = DualOptions(burst, SparkOptions(prepare_s=PREPARE_S))
        self.scheduler = ParadigmScheduler(self.plan, options, HANG_S)

    # --- the workers -----------------------------------------------------------------------------------------------

    def make_tasks(self) -> None:
        """The workers' tasks, as of the plan."""
        self.tasks: dict[int, ChangingLoad] = {}
        self.chains: dict[int, list[ChangingLoad]] = {}
        self.workers: dict[int, int] = {}
        for task in self.plan.tasks:
            load: ChangingLoad = {
                **TaskLoad(number=task.number, chain=task.chain),
                "operators": [(operator.name, 0, 0) for operator in self.plan.chains[task.chain].operators],
            }
            self.tasks[task.number] = load
            self.chains.setdefault(task.chain, []).append(load)
            self.workers[task.number] = task.index % 2

    def barrier(self, *chains: int) -> None:
        """Tasks that are to be diverted are from now on; of all chains, unless some are named."""
        for task in self._tasks(chains):
            if task["divert"] is not None and task["diverted"] is None:
                task["diverted"] = DiversionStats(next(self._ids)).plain()

    def answers(self, *chains: int) -> None:
        """All micro-batches are answered: tasks that are to take up records do."""
        for task in self._tasks(chains):
            if task["divert"] is None:
                task["diverted"] = None

    def fail(self, task: ChangingLoad, why: str) -> None:
        """A micro-batch of a task is not answered: it goes on with records."""
        assert task["diverted"] is not None
        task["diversion_failed"] = (task["diverted"]["id"], why)
        task["divert"] = task["diverted"] = None

    def rebuild(self, task: ChangingLoad) -> None:
        """A task was removed and built anew."""
        task["divert"] = task["diverted"] = task["diversion_failed"] = None
        task["answered"] = task["unprocessed"] = task["busy_ns"] = 0
        task["operators"] = [(name, 0, 0) for name, _, _ in task["operators"]]

    def restart(self, worker: int) -> None:
        """A worker's process has died, and there is another."""
        inbox = self._inboxes[worker]
        while inbox:
            self._refused(inbox.popleft(), None)
        self._collecting = {(of, chain) for of, chain in self._collecting if of != worker}
        for number, task in self.tasks.items():
            if self.workers[number] == worker:
                self.rebuild(task)

    def refuse(self, why: str | None) -> int:
        """The workers refuse all that they have not come to. Returns how many requests these were."""
        waiting = [command for inbox in self._inboxes.values() for command in inbox]
        for inbox in self._inboxes.values():
            inbox.clear()
        for command in waiting:
            self._refused(command, why)
        return len(waiting)

    def _refused(self, command: DivertTasks | UndivertTasks | TakeSample, why: str | None) -> None:
        if isinstance(command, TakeSample):
            self._checks.sampled(command.number)
            self.do(self.scheduler.not_sampled(self.now, command.number, why))
            return
        self._checks.answered(command.number)
        self.do(self.scheduler.refused(self.now, command.number, why))

    def calm(self) -> None:
        """Whatever is disturbed comes to rest: all processes run, and nothing waits."""
        self.silent, self.busy, self.why_not, self.takes_long = set(), set(), None, False
        for task in self.tasks.values():
            task["record_by_record"], task["queued"] = False, 0
        if self.present is not None and self.present.state == "PAUSED":
            self.present.state = "READY"

    def change_plan(self, plan: Plan) -> None:
        """The job has another plan, its workers not yet: `make_tasks`."""
        self.plan = self._checks.plan = plan
        self.do(self.scheduler.plan_changed(plan))

    def _tasks(self, chains: Iterable[int] = ()) -> list[ChangingLoad]:
        return [task for task in self.tasks.values() if not chains or task["chain"] in chains]

    def _follow(self, task: ChangingLoad, divert: DivertRequest) -> None:
        of_plan = divert.concerns(task["chain"], (name for name, _, _ in task["operators"]))
        if of_plan and can_follow(task):
            is_elsewhere = task["diverted"] is not None and task["divert"].life != divert.life
            task["divert"] = None if is_elsewhere else divert_load(divert)

    # --- time ------------------------------------------------------------------------------------------------------

    def look(self, times: int = 1, *, every: float = LOOK_S) -> None:
        """Some looks, after each of which workers and Spark do what they were told."""
        for _ in range(times):
            self.now += every
            self.told.clear()
            reports = {worker: self._reports(worker) for worker in sorted(set(self._inboxes) - self.silent)}
            self._checks.looks(every, reports)
            self.do(self.scheduler.looked(self.now, self.now, reports))
            self._checks.check_ranges(self.states())
            status = json.dumps(self.scheduler.status().plain())
            assert json.loads(status)["ranges"] is not None
            self.obey()
            self.settle()

    def _reports(self, worker: int) -> list[TaskLoad]:
        return [
            reported({**task, "at_ns": round(self.now * 1e9)})
            for number, task in self.tasks.items()
            if self.workers[number] == worker
        ]

    def obey(self) -> None:
        """The workers that are not paused do what they were told, and say so."""
        for worker in set(self._inboxes) - self.silent - self.busy:
            inbox = self._inboxes[worker]
            while inbox:
                command = inbox.popleft()
                if isinstance(command, TakeSample):
                    self._sample(command)
                    continue
                chain = command.divert.chain if isinstance(command, DivertTasks) else command.chain
                for task in self._tasks([chain]):
                    if self.workers[task["number"]] != worker:
                        continue
                    if isinstance(command, DivertTasks):
                        self._follow(task, command.divert)
                    else:
                        task["divert"] = None
                self._checks.answered(command.number)
                self.do(self.scheduler.done(self.now, command.number))

    def _sample(self, command: TakeSample) -> None:
        """A worker is asked for a sample: it begins to collect, or has one."""
        if self.cannot_sample is not None:
            self._refused(command, self.cannot_sample)
            return
        place = command.worker, command.request.chain
        sample = None
        if place not in self._collecting:
            self._collecting.add(place)
        elif self.has_records:
            self._collecting.discard(place)
            sample = RecordSample(2, (encode(["a b", "c"]),))
        self._checks.sampled(command.number)
        self.do(self.scheduler.sampled(self.now, command.number, sample))

    def _try_ranges(self) -> None:
        """Spark answers to TryRange. While it is starting, it only keeps the records."""
        trying, self._being_tried = self._being_tried, []
        for command in trying:
            life = self.lives[command.life]
            if life.state == "PAUSED":
                self._being_tried.append(command)
                continue
            life.trials.discard(command.chain)
            if life.state in ("DEAD", "GIVEN_UP"):
                self.do(self.scheduler.trial_failed(self.now, command.life, command.chain, DIED))
                continue
            trial = RangeTrial() if life.state == "STARTING" else self.trial
            self.do(self.scheduler.range_tried(self.now, command.life, command.chain, trial))

    def settle(self) -> None:
        """Spark does what it was told, unless that takes long."""
        self._try_ranges()
        for number, life in list(self.lives.items()):
            if life.state == "STARTING" and not self.takes_long:
                if self.why_not is None:
                    life.state, life.was_ready = "READY", True
                    self.do(self.scheduler.spark_ready(self.now, number, FACTS))
                else:
                    life.has_failed = True
                    self.do(self.scheduler.spark_failed(self.now, number, self.why_not))
            elif life.asked and life.state == "READY":
                life.asked = False
                self.do(self.scheduler.spark_answered(number))
            elif life.state == "DEAD" and not life.has_failed and (life.asked or not life.was_ready):
                life.asked, life.has_failed = False, True
                self.do(self.scheduler.spark_failed(self.now, number, DIED))

    # --- commands --------------------------------------------------------------------------------------------------

    def do(self, commands: list[Command]) -> None:
        """Carry out commands, each of which is checked."""
        for command in commands:
            self._checks.check(command)
            if isinstance(command, CheckSpark):
                self.checks += 1
            elif isinstance(command, Warn):
                self.warnings.append(command.text)
            elif isinstance(command, TryRange):
                self.trials.append(command)
                self._being_tried.append(command)
            elif isinstance(command, TakeSample):
                self.questions.append(command)
                self._inboxes[command.worker].append(command)
            elif isinstance(command, DivertTasks | UndivertTasks):
                self.told.append(command)
                self._inboxes[command.worker].append(command)

    # --- what is seen ----------------------------------------------------------------------------------------------

    @property
    def present(self) -> Life | None:
        """The Spark that was not given up."""
        return self._checks.present

    def status(self, chain: int = 0) -> RangeStatus:
        """The status of the range that begins with a chain."""
        (found,) = (status for status in self.scheduler.status().ranges if status.chain == chain)
        return found

    def state(self, chain: int = 0) -> str:
        """The state of the range that begins with a chain."""
        return self.status(chain).state

    def states(self) -> set[str]:
        """The states of all ranges."""
        return {str(status["state"]) for status in self.scheduler.status()["ranges"]}

    def diverts(self) -> dict[tuple[int, int], DivertRequest]:
        """(worker, chain) -> what was told at the last look."""
        return {(one.worker, one.divert.chain): one.divert for one in self.told if isinstance(one, DivertTasks)}

    def undiverts(self) -> set[tuple[int, int]]:
        """(worker, chain) of what was told at the last look."""
        return {(one.worker, one.chain) for one in self.told if isinstance(one, UndivertTasks)}

    def diverted(self) -> set[int]:
        """The tasks that are diverted, or will be at the next barrier."""
        return {task["number"] for task in self._tasks() if task["divert"] or task["diverted"]}

    def index(self, operator: str) -> int:
        """The chain that begins with an operator."""
        return next(chain.index for chain in self.plan.chains if chain.operators[0].name == operator)

    def into_operation(self) -> None:
        """Look until all ranges are in Spark, in a mode that has them there."""
        for _ in range(8):
            self.look()
            self.barrier()
        assert self.states() == {"OPERATION"}


def reported(task: ChangingLoad) -> TaskLoad:
    """The report of a task, which nobody changes afterwards."""
    operators = [OperatorReport(*counts) for counts in task["operators"]]
    diverted = task["diverted"] and dict(task["diverted"])
    return TaskLoad(**{**task, "operators": operators, "diverted": diverted, "sends": list(task["sends"])})


def did(task: ChangingLoad, taken: int, *, busy_s: float = 0.0, **load: int) -> None:
    """A task has taken so many more records, and is in this state now."""
    name, before, given = task["operators"][0]
    task["operators"] = [(name, before + taken, given + taken), *task["operators"][1:]]
    task["busy_ns"] += int(busy_s * 1e9)
    task.update(load)


def ran(task: ChangingLoad, **counts: tuple[int, int]) -> None:
    """Operators of a task have taken and given so many more records."""
    task["operators"] = [
        (name, taken + counts.get(name, (0, 0))[0], given + counts.get(name, (0, 0))[1])
        for name, taken, given in task["operators"]
    ]


def story(id_: int, *recent: tuple[int, int, float], under_way: int = 0) -> dict[str, Any]:
    """What a diverted task tells: `recent` are (number, records, seconds). How long Spark had them is not known."""
    batches = deque((*one, None) for one in recent)
    return DiversionStats(id_, under_way=under_way, recent=batches).plain()
