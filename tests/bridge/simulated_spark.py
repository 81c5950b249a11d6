"""A ParadigmScheduler in a simulated job (tests/epochs/sim.py), and its Spark.

`SimulatedSpark` carries the scheduler as actors/spark_carrier.py does in a JobMaster. Its looks ask the real tasks of
the simulated workers for their load: what they answer is of some moments before, a worker that is paused does not
answer in time, and one that has answered may have died since. Its messages take the way of all calls of workers,
through the JobHost; so they find workers that are about to die, to remove their tasks, or to take up another plan.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.bridge.burst import BurstOptions, Mode
from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeRun
from penstock.bridge.paradigm_scheduler import (
    CheckSpark,
    Command,
    DivertTasks,
    DualOptions,
    EndSpark,
    KillSpark,
    Note,
    ParadigmScheduler,
    PrepareSpark,
    TakeSample,
    TryRange,
    UndivertTasks,
    Warn,
)
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import RangeTrial, SparkFacts
from penstock.runtime.program.plan import Plan
from penstock.runtime.worker.load import TaskLoad
from penstock.runtime.worker.sample import RecordSample
from tests.bridge.command_checks import CommandChecks, Life

if TYPE_CHECKING:
    from tests.epochs.sim import EpochCluster, Process

PACE = 100.0  # seconds of the scheduler in a virtual second

# In the scheduler's seconds.
PREPARE_S = 10.0  # the limit on Spark's start
HANG_S = 5.0  # the limit on Spark's silence

# In virtual seconds.
LOOK_S = 0.0025
ANSWERS_S = 0.004  # the longest time for which a look waits for the workers

NODE = "here"

_Event = Callable[[float], list[Command]]  # takes the time of the scheduler's clock


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


class SimulatedSpark:
    """See the module's docstring. It lives as long as the JobHost that its cluster has now."""

    def __init__(self, cluster: EpochCluster, mode: Mode, trouble: float, rng: random.Random) -> None:
        """`trouble`: the chance that a Spark does not start, and that one that has started dies or falls silent."""
        self._cluster = cluster
        self._trouble = trouble
        self._rng = rng
        self.plan: Plan = cluster.plan  # the last one that the carrier was told
        burst = BurstOptions(
            mode=mode,
            toggle_s=rng.choice((0.3, 1.0, 3.0)),
            backoff_first_s=0.2,
            backoff_max_s=1.0,
            interval_min_s=0.0005,
            interval_max_s=0.005,
            epoch_s=None,
        )
        self._scheduler = ParadigmScheduler(self.plan, DualOptions(burst, SparkOptions(prepare_s=PREPARE_S)), HANG_S)
        self._checks = CommandChecks(self.plan, PREPARE_S, HANG_S, NODE)
        self._sparks: dict[int, Spark] = {}
        self._events: deque[_Event] = deque()  # for the scheduler
        self._calls: deque[Callable[[], None]] = deque()  # for the JobHost
        # Messages that the JobHost has: (method, number) -> (worker, incarnation).
        self._at: dict[tuple[str, int], tuple[int, int]] = {}
        self._warnings: set[str] = set()
        self._told: dict[int, str] = {}  # states of ranges, in the story
        self._looked_s: float | None = None
        self._over = False
        self._ask()

    # --- looks -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask the workers for their load."""
        if self._over:
            return
        cluster, rng = self._cluster, self._rng
        asked_s = self._now()
        reports: dict[int, Report] = {}
        for process in cluster.live:
            if process.ready:
                cluster._after(rng.random() * ANSWERS_S, partial(self._report, process, reports), masters=False)

        def is_due() -> None:
            in_time = dict(reports)
            self._put(lambda now: self._looked(now, asked_s, in_time))
            cluster._after(LOOK_S, self._ask)

        cluster._after(ANSWERS_S * (0.5 + rng.random()), is_due)

    def _report(self, process: Process, reports: dict[int, Report]) -> None:
        if process.alive and process.paused_until <= self._cluster.now:
            loop = process.loop
            sparks = {task.task.number: task.diversion._bridge.spark for task in loop.tasks if task.diversion}
            reports[process.worker] = Report(loop.load(), sparks)

    def _looked(self, now: float, asked_s: float, reports: dict[int, Report]) -> list[Command]:
        lives = self._cluster.host.lives
        for message, (worker, incarnation) in self._at.items():
            assert lives.incarnation(worker) == incarnation, f"{message} to worker {worker} is never answered"
        loads = {worker: report.loads for worker, report in reports.items()}
        self._checks.looks(0.0 if self._looked_s is None else now - self._looked_s, loads)
        self._looked_s = now
        before = self._states()
        commands = self._scheduler.looked(now, asked_s, loads)
        for chain, state in self._states().items():
            if state == "OPERATION" and before[chain] != state:
                self._cluster.counts["switches to Spark"] += 1
                self._check_in_spark(chain, reports)
        return commands

    def _check_in_spark(self, chain: int, reports: dict[int, Report]) -> None:
        """The scheduler says that a range is in Spark from now on."""
        for report in reports.values():
            for task in report.loads:
                spark = report.sparks.get(task["number"])
                assert task["chain"] != chain or spark is None or spark.life is self._checks.present, (
                    f"the range of chain {chain} is in Spark, and task {task['number']} in Spark {spark.number}"
                )

    def _states(self) -> dict[int, str]:
        return {one["chain"]: one["state"] for one in self._scheduler.status()["ranges"]}

    # --- the scheduler's thread ------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._cluster.now * PACE

    def _put(self, event: _Event) -> None:
        """Give the scheduler an event, in its turn."""
        self._events.append(event)
        self._cluster._after(self._rng.random() * 0.001, self._take)

    def _take(self) -> None:
        event = self._events.popleft()
        if self._over:
            return
        for command in event(self._now()):
            self._do(command)
        states = self._states()
        self._checks.check_ranges(states.values())
        if states != self._told:
            self._told = states
            self._cluster.story.append((self._cluster.now, f"PARADIGMS {states}"))

    def _do(self, command: Command) -> None:
        self._checks.check(command)
        if not isinstance(command, Warn | Note):
            self._cluster.story.append((self._cluster.now, command))
        if isinstance(command, PrepareSpark):
            spark = self._sparks[command.life] = Spark(command.life, self._checks.lives[command.life])
            self._start(spark)
        elif isinstance(command, CheckSpark):
            spark = self._sparks[command.life]
            answer = partial(spark.when_it_speaks, action=lambda: self._answer(spark))
            self._after(0.002, lambda: answer(self._cluster.now))
        elif isinstance(command, KillSpark):
            self._end(self._sparks[command.life])
        elif isinstance(command, EndSpark):
            spark = self._sparks[command.life]
            self._after(0.01, lambda: self._end(spark))
        elif isinstance(command, DivertTasks):
            self._tell(command.worker, command.number, "divert", (command.divert, command.node))
        elif isinstance(command, UndivertTasks):
            self._tell(command.worker, command.number, "undivert", (command.chain,))
        elif isinstance(command, TakeSample):
            self._take_sample(command)
        elif isinstance(command, TryRange):
            self._try_range(self._sparks[command.life], command)
        else:
            assert isinstance(command, Warn | Note)
            if isinstance(command, Warn):
                self._warnings.add(command.text)

    def plan_changed(self, plan: Plan) -> None:
        """The job has this plan from now on."""
        self.plan = plan

        def event(now: float) -> list[Command]:
            self._checks.plan = plan
            return self._scheduler.plan_changed(plan)

        self._put(event)

    def close(self) -> None:
        """The job has ended."""
        for command in self._scheduler.stop():
            self._do(command)
        self._checks.stopped = True
        self._over = True
        assert self._scheduler.looked(self._now(), self._now(), {}) == [], "nothing follows the end"

    # --- messages --------------------------------------------------------------------------------------------------

    def _tell(self, worker: int, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        scheduler, answered = self._scheduler, partial(self._checks.answered, number)
        self._send(
            worker,
            number,
            method,
            arguments,
            lambda _, now: scheduler.done(now, number),
            lambda why, now: scheduler.refused(now, number, why),
            answered,
        )

    def _take_sample(self, command: TakeSample) -> None:
        scheduler, number = self._scheduler, command.number

        def done(sample: RecordSample | None, now: float) -> list[Command]:
            if sample is not None:
                self._cluster.counts["samples"] += 1
            return scheduler.sampled(now, number, sample)

        self._send(
            command.worker,
            number,
            "take_sample",
            (command.request,),
            done,
            lambda why, now: scheduler.not_sampled(now, number, why),
            partial(self._checks.sampled, number),
        )

    def _send(
        self,
        worker: int,
        number: int,
        method: str,
        arguments: tuple[Any, ...],
        done: Callable[[Any, float], list[Command]],
        refused: Callable[[str | None, float], list[Command]],
        answered: Callable[[], None],
    ) -> None:
        """Send a message by the JobHost. `answered` is called before the scheduler hears of the answer."""
        cluster = self._cluster

        def end(event: _Event) -> None:
            self._at.pop((method, number), None)

            def told(now: float) -> list[Command]:
                answered()
                return event(now)

            self._put(told)

        def call() -> None:
            self._at[method, number] = worker, cluster.host.lives.incarnation(worker)
            cluster.counts[f"messages to {method}"] += 1
            cluster._do(
                cluster.host.call(
                    worker,
                    method,
                    arguments,
                    lambda answer: end(lambda now: done(answer, now)),
                    lambda why: end(lambda now: refused(why, now)),
                )
            )

        self._calls.append(call)
        cluster._after(self._rng.random() * 0.001, self._call)

    def _call(self) -> None:
        self._calls.popleft()()

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
        facts = SparkFacts("a session", costs, 4711, "a log", {"1": 4712}, NODE, untried=untried)

        def event(now: float) -> list[Command]:
            if spark.life.state == "STARTING":
                spark.life.state, spark.life.was_ready = "READY", True
                self._cluster.counts["Sparks"] += 1
            return self._scheduler.spark_ready(now, spark.number, facts)

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

            def event(now: float) -> list[Command]:
                spark.life.trials.discard(command.chain)
                if not spark.lives:
                    return self._scheduler.trial_failed(now, spark.number, command.chain, "the process has died")
                return self._scheduler.range_tried(now, spark.number, command.chain, trial)

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

        def event(now: float) -> list[Command]:
            if spark.life.state != "GIVEN_UP":
                spark.life.asked = False
            return self._scheduler.spark_answered(spark.number)

        self._put(event)

    def _failed(self, spark: Spark, why: str) -> None:
        def event(now: float) -> list[Command]:
            spark.life.asked, spark.life.has_failed = False, True
            return self._scheduler.spark_failed(now, spark.number, why)

        self._put(event)
