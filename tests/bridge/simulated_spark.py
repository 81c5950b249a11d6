"""A ParadigmScheduler in a simulated job (tests/epochs/sim.py), and its Spark.

The scheduler is a part of the real JobHost. `SimulatedSpark` carries out what it commands about Spark, and asks the
real tasks of the simulated workers for their load: what they answer is of some moments before, a worker that is paused
does not answer in time, and one that has answered may have died since. The scheduler's messages are calls of workers
like all others; so they find workers that are about to die, to remove their tasks, or to take up another plan.

Spark starts, or does not, or not in time; it dies, falls silent for a while or for good, and leaves micro-batches
unanswered. What it says late, of an earlier life too, arrives all the same.

Each command is checked (command_checks.py). What else must hold:

- Each message to a worker is answered, also when the worker's process dies before it comes to it.
- A range is in Spark only when its tasks are diverted to the Spark that there is.

The scheduler counts in seconds, and a simulated job takes less than one of them: its clock is PACE times as quick.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.bridge.burst import BurstOptions, Mode, Timing
from penstock.bridge.commands import (
    CheckSpark,
    Command,
    DivertTasks,
    EndSpark,
    KillSpark,
    PrepareSpark,
    SparkCommand,
    TakeSample,
    TryRange,
    UndivertTasks,
    WorkerCommand,
)
from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeRun
from penstock.bridge.paradigm_scheduler import DualOptions, ParadigmScheduler
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import RangeTrial, SparkFacts
from penstock.runtime.program.plan import Plan
from penstock.runtime.worker.load import TaskLoad
from penstock.runtime.worker.sample import RecordSample
from tests.bridge.command_checks import CommandChecks, Life

if TYPE_CHECKING:
    from penstock.host.decide.paradigms import SparkEvent
    from tests.epochs.sim import EpochCluster, Process

PACE = 100.0  # seconds of the scheduler in a virtual second

# In the scheduler's seconds.
PREPARE_S = 10.0  # the limit on Spark's start
HANG_S = 5.0  # the limit on Spark's silence

# In virtual seconds.
LOOK_S = 0.0025
ANSWERS_S = 0.004  # the longest time for which a look waits for the workers

NODE = "here"


#: The words for messages to workers, in what is counted.
MESSAGES: dict[type, str] = {DivertTasks: "divert", UndivertTasks: "undivert", TakeSample: "take_sample"}


@dataclass(eq=False)
class Spark:
    """One start of Spark, as it is; what the scheduler knows of it is its Life."""

    number: int
    life: Life
    lives: bool = True
    silent_until: float = 0.0
    held: list[Callable[[], None]] = field(default_factory=list)  # what is to happen when it is no longer silent

    def when_it_speaks(self, now: float, action: Callable[[], None]) -> None:
        """Do something now, or when Spark goes on, or is dead."""
        if self.lives and self.silent_until > now:
            self.held.append(action)
        else:
            action()


@dataclass
class Report:
    """What a worker answers to a look. `sparks`: of each diverted task, the Spark that it is diverted to; the scheduler
    is not told."""

    loads: list[TaskLoad]
    sparks: dict[int, Spark]


class CheckedScheduler(ParadigmScheduler):
    """The ParadigmScheduler of a simulated JobHost. Its Spark checks each event and each command."""

    def __init__(self, spark: SimulatedSpark, plan: Plan, options: DualOptions) -> None:
        super().__init__(plan, options, HANG_S)
        self._of = spark

    def looked(self, now: float, asked_s: float, reports: Mapping[int, Sequence[TaskLoad]]) -> list[Command]:
        self._of.looks(now * PACE, reports)
        return self._of.checked(lambda: super(CheckedScheduler, self).looked(now * PACE, asked_s * PACE, reports))

    def spark_ready(self, now: float, life: int, facts: SparkFacts) -> list[Command]:
        return self._of.checked(lambda: super(CheckedScheduler, self).spark_ready(now * PACE, life, facts))

    def spark_failed(self, now: float, life: int, why: str) -> list[Command]:
        return self._of.checked(lambda: super(CheckedScheduler, self).spark_failed(now * PACE, life, why))

    def spark_answered(self, life: int) -> list[Command]:
        return self._of.checked(lambda: super(CheckedScheduler, self).spark_answered(life))

    def sampled(self, now: float, number: int, sample: RecordSample | None) -> list[Command]:
        self._of.answered(number, sampled=True)
        self._of.counts["samples"] += sample is not None
        return self._of.checked(lambda: super(CheckedScheduler, self).sampled(now * PACE, number, sample))

    def not_sampled(self, now: float, number: int, why: str | None) -> list[Command]:
        self._of.answered(number, sampled=True)
        return self._of.checked(lambda: super(CheckedScheduler, self).not_sampled(now * PACE, number, why))

    def range_tried(self, now: float, life: int, chain: int, trial: RangeTrial) -> list[Command]:
        return self._of.checked(lambda: super(CheckedScheduler, self).range_tried(now * PACE, life, chain, trial))

    def trial_failed(self, now: float, life: int, chain: int, why: str) -> list[Command]:
        return self._of.checked(lambda: super(CheckedScheduler, self).trial_failed(now * PACE, life, chain, why))

    def done(self, now: float, number: int) -> list[Command]:
        self._of.answered(number, sampled=False)
        return self._of.checked(lambda: super(CheckedScheduler, self).done(now * PACE, number))

    def refused(self, now: float, number: int, why: str | None) -> list[Command]:
        self._of.answered(number, sampled=False)
        return self._of.checked(lambda: super(CheckedScheduler, self).refused(now * PACE, number, why))

    def plan_changed(self, plan: Plan) -> list[Command]:
        return self._of.checked(lambda: super(CheckedScheduler, self).plan_changed(plan))


class SimulatedSpark:
    """See the module's docstring. It lives as long as the JobHost that its cluster has now."""

    def __init__(self, cluster: EpochCluster, mode: Mode, trouble: float, rng: random.Random) -> None:
        """`trouble`: the chance that a Spark does not start, and that one that has started dies or falls silent."""
        self._cluster = cluster
        self._trouble = trouble
        self._rng = rng
        self._burst = BurstOptions(
            mode=mode,
            toggle_s=rng.choice((0.3, 1.0, 3.0)),
            epoch_s=None,
            timing=Timing(backoff_first_s=0.2, backoff_max_s=1.0, interval_min_s=0.0005, interval_max_s=0.005),
        )
        self.counts = cluster.counts
        self.checks: CommandChecks
        self._scheduler: CheckedScheduler
        self._sparks: dict[int, Spark] = {}
        self._events: deque[SparkEvent] = deque()  # for the JobHost
        # Messages to workers without an answer: (whether it is a question for a sample, number) -> (worker, life).
        self._at: dict[tuple[bool, int], tuple[int, int]] = {}
        self._told: dict[int, str] = {}  # states of ranges, in the story
        self._looked_s: float | None = None
        self._reports: dict[int, Report] = {}  # of the last look
        self._looking = False
        self._over = False

    def schedule(self, plan: Plan) -> ParadigmScheduler:
        """Makes the scheduler of the JobHost."""
        self.checks = CommandChecks(plan, PREPARE_S, HANG_S, NODE)
        self._scheduler = CheckedScheduler(self, plan, DualOptions(self._burst, SparkOptions(prepare_s=PREPARE_S)))
        return self._scheduler

    # --- looks -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask the workers for their load, from now on."""
        if not self._looking:
            self._looking = True
            self._ask()

    def _ask(self) -> None:
        if self._over:
            return
        cluster, rng = self._cluster, self._rng
        asked_s = cluster.now
        reports: dict[int, Report] = {}
        for process in cluster.live:
            if process.ready:
                cluster._after(rng.random() * ANSWERS_S, partial(self._report, process, reports), masters=False)

        def is_due() -> None:
            in_time = dict(reports)

            def event(scheduler: ParadigmScheduler, now: float) -> list[Command]:
                self._reports = in_time
                return scheduler.looked(now, asked_s, {worker: report.loads for worker, report in in_time.items()})

            self._put(event)
            cluster._after(LOOK_S, self._ask)

        cluster._after(ANSWERS_S * (0.5 + rng.random()), is_due)

    def _report(self, process: Process, reports: dict[int, Report]) -> None:
        if process.alive and process.paused_until <= self._cluster.now:
            loop = process.loop
            sparks = {task.task.number: task.diversion._bridge.spark for task in loop.tasks if task.diversion}
            reports[process.worker] = Report(loop.load(), sparks)

    # --- what the scheduler hears and says -------------------------------------------------------------------------

    def looks(self, now: float, loads: Mapping[int, Sequence[TaskLoad]]) -> None:
        """The scheduler is about to look."""
        self.checks.plan = self._cluster.host.present.plan
        lives = self._cluster.host.lives
        for message, (worker, incarnation) in self._at.items():
            if lives.incarnation(worker) != incarnation:
                self._cluster.fault = AssertionError(f"{message} to worker {worker} is never answered")
        self.checks.looks(0.0 if self._looked_s is None else now - self._looked_s, loads)
        self._looked_s = now

    def answered(self, number: int, *, sampled: bool) -> None:
        """The scheduler is about to hear of the answer to a message, or that there will be none."""
        self._at.pop((sampled, number), None)
        (self.checks.sampled if sampled else self.checks.answered)(number)

    def checked(self, event: Callable[[], list[Command]]) -> list[Command]:
        """Give the scheduler an event, and check what comes of it."""
        cluster = self._cluster
        try:
            assert not self._over, "nothing follows the end"
            before = self._states()
            commands = event()
            for command in commands:
                self.checks.check(command)
                if isinstance(command, WorkerCommand):
                    incarnation = cluster.host.lives.incarnation(command.worker)
                    self._at[isinstance(command, TakeSample), command.number] = command.worker, incarnation
                    cluster.counts[f"messages to {MESSAGES[type(command)]}"] += 1
                if isinstance(command, WorkerCommand | SparkCommand):
                    cluster.story.append((cluster.now, command))
            states = self._states()
            self.checks.check_ranges(states.values())
            for chain, state in states.items():
                if state == "OPERATION" and before.get(chain) != state:
                    cluster.counts["switches to Spark"] += 1
                    self._check_in_spark(chain)
        except Exception as error:
            cluster.fault = error
            raise
        if states != self._told:
            self._told = states
            cluster.story.append((cluster.now, f"PARADIGMS {states}"))
        return commands

    def _check_in_spark(self, chain: int) -> None:
        """The scheduler says that a range is in Spark from now on."""
        for report in self._reports.values():
            for task in report.loads:
                spark = report.sparks.get(task["number"])
                assert task["chain"] != chain or spark is None or spark.life is self.checks.present, (
                    f"the range of chain {chain} is in Spark, and task {task['number']} in Spark {spark.number}"
                )

    def _states(self) -> dict[int, str]:
        return {one["chain"]: one["state"] for one in self._scheduler.status()["ranges"]}

    # --- what Spark is told, and says ------------------------------------------------------------------------------

    def _put(self, event: SparkEvent) -> None:
        """Give the JobHost an event, in its turn."""
        self._events.append(event)
        self._cluster._after(self._rng.random() * 0.001, self._take)

    def _take(self) -> None:
        event = self._events.popleft()
        if not self._over:
            self._cluster._do(self._cluster.host.of_scheduler(event, self._cluster.now))

    def carry_out(self, command: SparkCommand) -> None:
        """Spark is started, asked or ended."""
        if isinstance(command, PrepareSpark):
            spark = self._sparks[command.life] = Spark(command.life, self.checks.lives[command.life])
            self._start(spark)
            return
        spark = self._sparks[command.life]
        if isinstance(command, CheckSpark):
            answer = partial(spark.when_it_speaks, action=lambda: self._answer(spark))
            self._after(0.002, lambda: answer(self._cluster.now))
        elif isinstance(command, KillSpark):
            self._end(spark)
        elif isinstance(command, EndSpark):
            self._after(0.01, lambda: self._end(spark))
        else:
            self._try_range(spark, command)

    def close(self) -> None:
        """The job has ended."""
        self.checks.stopped = self._over = True
        cluster = self._cluster
        looked = cluster.host.of_scheduler(lambda scheduler, now: scheduler.looked(now, now, {}), cluster.now)
        assert looked == [], "nothing follows the end"

    def bridge(self, process: Process, number: int) -> Spark:
        """The Spark of this life, to which a worker connects. ConnectionError: it is dead, and the worker had no
        connection before."""
        spark = self._sparks[number]
        if process.spark is not spark:
            if not spark.lives:
                raise ConnectionError("there is no such bridge")
            process.spark = spark
        return spark

    # --- Spark -----------------------------------------------------------------------------------------------------

    def _after(self, most_s: float, action: Callable[[], Any]) -> None:
        """Spark does something soon, whoever is paused."""
        self._cluster._after(self._rng.random() * most_s, action, masters=False)

    def _start(self, spark: Spark) -> None:
        rng = self._rng
        drawn = rng.random() / self._trouble if self._trouble else 1.0
        if drawn < 0.1:
            self._after(0.02, lambda: self._failed(spark, "there is no Spark"))
        elif drawn >= 0.2:  # else it does not come to it
            self._after(rng.choice((0.002, 0.02)), lambda: self._ready(spark))

    def _ready(self, spark: Spark) -> None:
        if not spark.lives:
            self._failed(spark, "it was killed")
            return
        rng = self._rng
        costs = {form.chain: rng.choice((None, BatchCost(0.0002, 1e6))) for form in spark.life.forms}
        untried = frozenset(chain for chain, cost in costs.items() if cost is None)
        name = f"bridge {spark.number}"
        facts = SparkFacts("a session", costs, 4711, "a log", {"1": 4712}, name, NODE, untried=untried)

        def event(scheduler: ParadigmScheduler, now: float) -> list[Command]:
            if spark.life.state == "STARTING":
                spark.life.state, spark.life.was_ready = "READY", True
                self._cluster.counts["Sparks"] += 1
            return scheduler.spark_ready(now, spark.number, facts)

        self._put(event)
        self._draw_fate(spark)

    def _try_range(self, spark: Spark, command: TryRange) -> None:
        """Spark runs a range on a sample of its records; while it is starting, it only keeps them."""
        (form,) = (form for form in spark.life.forms if form.chain == command.chain)
        run = RangeRun(form)
        run.take(command.sample.records())  # raises an error for records that are not those of this range
        run.answer()
        self._cluster.counts["trials"] += 1

        def answer() -> None:
            trial = RangeTrial()
            if spark.life.was_ready:
                trial = self._rng.choice(
                    (RangeTrial(BatchCost(0.0002, 1e6), "in some way"), RangeTrial(), RangeTrial(again=True))
                )

            def event(scheduler: ParadigmScheduler, now: float) -> list[Command]:
                spark.life.trials.discard(command.chain)
                if not spark.lives:
                    return scheduler.trial_failed(now, spark.number, command.chain, "the process has died")
                return scheduler.range_tried(now, spark.number, command.chain, trial)

            self._put(event)

        self._after(0.02, lambda: spark.when_it_speaks(self._cluster.now, answer))

    def _draw_fate(self, spark: Spark) -> None:
        rng = self._rng
        drawn = rng.random() / self._trouble if self._trouble else 1.0
        if drawn < 0.5:
            self._after(0.05, lambda: self._end(spark, "SPARK DIES"))
        elif drawn < 1.0:
            self._after(0.05, lambda: self._fall_silent(spark, rng.choice((0.01, 0.05, math.inf))))

    def _fall_silent(self, spark: Spark, seconds: float) -> None:
        if not spark.lives:
            return
        cluster = self._cluster
        cluster.counts["silences of Spark"] += 1
        cluster.story.append((cluster.now, f"SPARK {spark.number} IS SILENT for {seconds:.3f}"))
        spark.silent_until = cluster.now + seconds

        def goes_on() -> None:
            if spark.lives:
                self._release(spark)
                self._draw_fate(spark)

        if seconds < math.inf:
            cluster._after(seconds + 1e-6, goes_on, masters=False)

    def _end(self, spark: Spark, why: str = "") -> None:
        if not spark.lives:
            return
        if why:
            self._cluster.counts["deaths of Spark"] += 1
            self._cluster.story.append((self._cluster.now, f"{why}: {spark.number}"))
        spark.lives = False
        self._release(spark)

    def _release(self, spark: Spark) -> None:
        held, spark.held = spark.held, []
        for action in held:
            action()

    def _answer(self, spark: Spark) -> None:
        """Spark's answer to CheckSpark, or what comes in its place."""
        if not spark.lives:
            self._failed(spark, "the process has died")
            return

        def event(scheduler: ParadigmScheduler, now: float) -> list[Command]:
            if spark.life.state != "GIVEN_UP":
                spark.life.asked = False
            return scheduler.spark_answered(spark.number)

        self._put(event)

    def _failed(self, spark: Spark, why: str) -> None:
        def event(scheduler: ParadigmScheduler, now: float) -> list[Command]:
            spark.life.asked, spark.life.has_failed = False, True
            return scheduler.spark_failed(now, spark.number, why)

        self._put(event)
