"""The scheduler of the two paradigms: it decides for each range of operators whether Ray tasks process its records one
by one, or Spark in micro-batches (docs/papers.md: D2, D4, D6).

The scheduler looks at the workers' counters a few times a second. For each chain with operators that can run in Spark,
a `BurstDetector` decides whether they should, and the scheduler has the workers told. When a chain's input goes to
Spark, `switch_range` says how many operators go with it, by the magnifications that were measured. The range may
continue into other chains, whose own detectors then wait. By default the range is as long as operators can cross, and
does not end where Eq. 8 ends it: in the paper, each operator costs a micro-batch of its own, but here a range's part in
one chain is one job in Spark, and the longer the range is, the fewer records come back (`BurstOptions.range_below`).

This module is without Ray, threads, clock and files. The JobHost (host/decide/job_host.py), or a test, calls the
methods for the events, each with the time of a clock that does not go back, and passes on the commands that they
return:

    event                                   what it may lead to
    looked: what the workers report         PrepareSpark, DivertTasks, UndivertTasks, TakeSample, CheckSpark, KillSpark,
                                            Warn, Note
    spark_ready                             GreetBridge
    spark_failed                            KillSpark
    spark_answered                          nothing: Spark lives
    sampled: a worker's records             TryRange
    not_sampled                             nothing: another worker is asked, or the same one again
    range_tried: what a range costs         nothing
    trial_failed                            CheckSpark
    done, refused: a worker's answer        CheckSpark, Warn
    plan_changed                            EndSpark

The JobHost has only to answer: each DivertTasks and UndivertTasks by `done` or `refused`, also when the worker's
process has died; each TakeSample by `sampled` or `not_sampled`, likewise; each PrepareSpark by `spark_ready` or
`spark_failed`; each CheckSpark by `spark_answered` or `spark_failed`; each TryRange by `range_tried` or `trial_failed`.
Answers may take any time, and those of an earlier life of Spark may come or not.

A range that its source has no sample for is tried on records that its tasks have taken lately (sample_requests.py): at
Spark's start if they come in time, else while no range is in Spark. A switch never waits for this.

What must never happen:

- A message without need. A worker is told only when its tasks, by its own last report, do otherwise than they should
  (divert_requests.py). So a worker that was started again needs no special message, and one that is paused finds one
  request for each chain when it continues.
- A diversion that outlives Spark: when Spark is lost, all ranges return.
- Spark killed without a reason (spark_life.py).
- Decisions by the wrong plan. A rescale changes the plan while the scheduler runs. When the chains have changed,
  everything that was known of ranges is void, and Spark is prepared again, because it has compiled the old ranges.
  Until a worker has the new plan too, the scheduler ignores its reports, and the worker ignores the scheduler's
  messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.bridge import parts
from penstock.bridge.burst import BurstDetector, BurstOptions, Decision, Event, Figures
from penstock.bridge.commands import (
    CheckSpark,
    Command,
    DivertTasks,
    EndSpark,
    GreetBridge,
    KillSpark,
    Note,
    PrepareSpark,
    TakeSample,
    TryRange,
    UndivertTasks,
    Warn,
)
from penstock.bridge.cost import BatchCost, Calibration
from penstock.bridge.divert_requests import DivertRequests, is_diverted, is_diverted_to
from penstock.bridge.forms import RangeForm, range_form
from penstock.bridge.range import NoRange, switch_range
from penstock.bridge.range_load import OperatorCounts, RangeMeter
from penstock.bridge.sample_requests import SampleRequests
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import RangeTrial, SparkFacts, SparkLife, SparkState
from penstock.runtime.backoff import Backoff
from penstock.runtime.operators.micro_batch import ROWS_MAX, UNDER_WAY_MAX, DivertRequest
from penstock.runtime.program.plan import Plan
from penstock.runtime.sources.base import Source
from penstock.runtime.status import DualStatus, RangeFigures, RangeStatus, SparkProcesses
from penstock.runtime.worker.load import TaskLoad
from penstock.runtime.worker.sample import RecordSample, SampleRequest
from penstock.runtime.worker.waiting import WaitingRecords

# What Spark is assumed to cost before it was measured: on two cores a micro-batch costs about a quarter of a second,
# and rows that stay columns go through at some hundred thousand a second.
_FIRST_COST = BatchCost(0.25, 400_000.0)
_FIRST_GUESS = Calibration(batch=_FIRST_COST)

# When micro-batches are under way and none is answered for this long, Spark is asked whether it lives.
_QUIET_S = 10.0

# In an overload, all micro-batches that are under way together fit into Spark's memory, whatever Spark answers, and an
# answer comes within seconds. But they are not so small that the fixed cost is most of the cost.
_ROWS_UNDER_WAY = 600_000
_ROWS_LEAST = 50_000

# Of records that take long, a micro-batch has as many as Spark processes within the longest interval, and not less than
# these.
_ROWS_FEWEST = 256

# What the reason of a range says when its source does not count what waits before it.
_BLIND = (
    "; its source cannot tell how many records wait there (Reader.backlog), so that a burst is seen only by what has "
    "been read"
)

# After a trial that was given up, because the job needed Spark, a range is not tried again before.
_TRY_AGAIN_S = 10.0

# When even a small micro-batch takes longer, the machines were most likely busy with something else, such as the job's
# start. Such a trial would speak against Spark for good, so it is repeated, ever more rarely while nothing changes.
_BUSY_S = 1.0
_BUSY_FIRST_S, _BUSY_MOST_S = 60.0, 960.0


@dataclass(frozen=True)
class DualOptions:
    """How a job uses Spark: the detector's options, and the session's."""

    burst: BurstOptions
    spark: SparkOptions


@dataclass
class _Range:
    """A range of operators of the job, with its measurements."""

    form: RangeForm
    detector: BurstDetector
    meter: RangeMeter = field(default_factory=RangeMeter)
    decision: Decision | None = None
    blind: bool = False  # its source cannot tell how many records wait there
    failed: str | None = None  # why tasks had to process a micro-batch, or records of one, the last time
    parts: dict[int, int] = field(default_factory=dict)  # while it is in Spark: chain -> up to which position
    extent: str = ""  # why it ends there
    tried: bool = False  # a trial in Spark has told what its micro-batches cost
    tried_in: int | None = None  # the life of Spark in which it was tried last, or in which it cannot be
    way: str | None = None  # how it runs in Spark, as far as that is known
    busy: Backoff = field(default_factory=lambda: Backoff(_BUSY_FIRST_S, _BUSY_MOST_S))

    @property
    def chains(self) -> list[int]:
        """The chains whose tasks are diverted with this range."""
        return list(self.parts) or [self.form.chain]


@dataclass
class _Look:
    """The reports of the workers about the tasks that belong to the plan."""

    now: float
    asked_s: float
    reports: dict[int, list[TaskLoad]]  # by worker

    def of_chain(self, chain: int) -> dict[int, list[TaskLoad]]:
        """The tasks of a chain by worker; workers without any are left out."""
        found = {worker: [t for t in tasks if t.chain == chain] for worker, tasks in self.reports.items()}
        return {worker: tasks for worker, tasks in found.items() if tasks}

    def tasks(self, *chains: int) -> list[TaskLoad]:
        """The tasks of these chains, of all workers."""
        return [task for chain in chains for tasks in self.of_chain(chain).values() for task in tasks]


def _layout(plan: Plan) -> list[list[str]]:
    """The operators of each chain."""
    return [[operator.name for operator in chain.operators] for chain in plan.chains]


def _is_of(task: TaskLoad, layout: list[list[str]]) -> bool:
    """Whether a worker's task belongs to this plan."""
    chain = task.chain
    return chain < len(layout) and layout[chain] == [operator.name for operator in task.operators]


class ParadigmScheduler:
    """See the module's docstring. `hang_timeout_s`: for how long Spark may owe an answer to CheckSpark."""

    def __init__(self, plan: Plan, options: DualOptions, hang_timeout_s: float) -> None:
        self._plan = plan
        self._options = options
        self._spark = SparkLife(options.spark.prepare_limit_s, hang_timeout_s)
        self._requests = DivertRequests()
        self._samples = SampleRequests()
        self._trying: tuple[int, int] | None = None  # (life, chain) of a trial without an answer
        self._counts = OperatorCounts()
        self._waiting = WaitingRecords()
        self._why_not_in_spark: dict[str, str] = {}  # chain -> why nothing of it can cross
        self._ranges: list[_Range] = []
        self._failures: dict[int, int] = {}  # of each task: its last diversion that ended by itself
        self._warned: set[str] = set()  # since Spark was ready
        self._looked_s: float | None = None
        self._quiet_s = 0.0  # for how long micro-batches have been under way without an answer
        self._answers = 0  # records that Spark had answered by the last look
        self._find_ranges()

    def status(self) -> DualStatus:
        """The paradigm that each range of operators is in, and why."""
        facts = self._spark.facts
        return DualStatus(
            mode=self._options.burst.mode,
            spark=self._about_spark,
            spark_state=self._spark.state.value,
            processes=SparkProcesses() if facts is None else SparkProcesses(facts.bridge, dict(facts.executors)),
            ranges=[self._status(range_) for range_ in self._ranges],
            stays=dict(self._why_not_in_spark),
        )

    # --- events ----------------------------------------------------------------------------------------------------

    def looked(self, now: float, asked_s: float, reports: Mapping[int, Sequence[TaskLoad]]) -> list[Command]:
        """The workers were asked for their load at `asked_s`, and these, by their numbers, have answered. To be called
        a few times a second, also when no worker answers."""
        passed = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s = now
        commands: list[Command] = []
        life, starting = self._spark.number, self._spark.state is SparkState.PREPARING
        if life is not None and (why := self._spark.pass_time(passed)) is not None:
            commands += self._lost(now, life, why, starting=starting)
        layout = _layout(self._plan)
        of_plan = {worker: [task for task in tasks if _is_of(task, layout)] for worker, tasks in reports.items()}
        look = _Look(now, asked_s, of_plan)
        self._counts.take(task for tasks in look.reports.values() for task in tasks)
        for tasks in look.reports.values():
            for task in tasks:
                self._waiting.look(task, task.operators[0].records_in)
        for range_ in self._ranges:
            own = look.tasks(range_.form.chain)
            if self._leader(range_) is not None:
                range_.meter.take_answers(own)
                if range_.detector.state == "SWITCHING":  # it must not go by itself when its leader comes back
                    range_.detector.happened("calm", now, "its operators are in Spark with those before them")
            elif own:
                commands += self._decide(range_, look)
            elif range_.detector.state not in ("SWITCHING", "OPERATION"):
                commands += self._undivert(range_, look)
        return commands + self._take_samples(look) + self._watch_answers(look, passed)

    def spark_ready(self, now: float, life: int, facts: SparkFacts) -> list[Command]:
        """Spark was started, and the ranges were tried in it."""
        if life != self._spark.number:  # it was given up meanwhile
            return []
        self._spark.ready(facts)
        self._warned.clear()
        self._quiet_s = 0.0
        for range_ in self._ranges:
            chain = range_.form.chain
            range_.tried_in, range_.way = None if chain in facts.untried else life, facts.ways.get(chain)
            if (cost := facts.costs.get(chain)) is not None:
                range_.detector.tried(cost)  # what was measured is of an earlier Spark
                self._take_cost(now, range_, cost)
            elif facts.cores is not None and not range_.tried:
                tasks = self._plan.chains[chain].parallelism
                range_.detector.untried(_FIRST_COST, facts.cores / tasks)
        # After the costs: a range that was waiting for Spark decides anew by what its trial has measured.
        self._tell_detectors("ready", now)
        return [GreetBridge(facts.name, facts.node)]

    def spark_failed(self, now: float, life: int, why: str) -> list[Command]:
        """Spark could not be started, or has reported that it does not work, or its process has died."""
        if life != self._spark.number:
            return []
        starting = self._spark.state is SparkState.PREPARING
        # The range that has raised the doubt has told its reason already: the others must not tell another.
        cause = self._spark.with_log(self._spark.doubt_reason or why)
        return self._lost(now, life, self._spark.fail(why), starting=starting, cause=cause)

    def spark_answered(self, life: int) -> list[Command]:
        """Spark has answered to CheckSpark."""
        if life == self._spark.number:
            self._spark.answered()
            self._quiet_s = 0.0
        return []

    def sampled(self, now: float, number: int, sample: RecordSample | None) -> list[Command]:
        """A worker has answered to TakeSample of this number: with records, or with None when it has too few so far."""
        chain = self._samples.answered(number, now)
        range_ = next((one for one in self._ranges if one.form.chain == chain), None)
        life = self._spark.number
        if sample is None or range_ is None or life is None or not self._wants_trial(range_):
            return []
        range_.tried_in = life
        if self._spark.state is SparkState.READY:  # else Spark tries one range after the other when it starts
            self._trying = (life, range_.form.chain)
        return [TryRange(life, range_.form.chain, sample)]

    def not_sampled(self, now: float, number: int, why: str | None) -> list[Command]:
        """A worker cannot give the sample for TakeSample of this number; `why` is None when its process has died."""
        self._samples.refused(number, now, died=why is None)
        return []

    def range_tried(self, now: float, life: int, chain: int, trial: RangeTrial) -> list[Command]:
        """Spark has answered to TryRange."""
        if (range_ := self._tried_range(life, chain)) is None:
            return []
        if trial.again:
            range_.tried_in = None
            self._samples.wait(chain, now + _TRY_AGAIN_S)
        if trial.way is not None:
            range_.way = trial.way
        if trial.cost is not None:
            self._take_cost(now, range_, trial.cost)
        return []

    def _take_cost(self, now: float, range_: _Range, cost: BatchCost) -> None:
        """A trial has measured the cost of a micro-batch of a range."""
        range_.tried = True
        if not range_.detector.has_measured_spark:
            range_.detector.tried(cost)
        if cost.fixed_s > _BUSY_S:
            range_.tried_in = None
            self._samples.wait(range_.form.chain, now + range_.busy.failed())
        else:
            range_.busy.succeeded()

    def trial_failed(self, now: float, life: int, chain: int, why: str) -> list[Command]:
        """Nothing came of TryRange, perhaps because Spark has died."""
        return [] if self._tried_range(life, chain) is None else self._doubt(why)

    def _tried_range(self, life: int, chain: int) -> _Range | None:
        """Note that the trial of a range is over. Returns the range, if the trial is one of the present Spark."""
        if self._trying == (life, chain):
            self._trying = None
        if life != self._spark.number:
            return None
        return next((range_ for range_ in self._ranges if range_.form.chain == chain), None)

    def done(self, now: float, number: int) -> list[Command]:
        """A worker has carried out DivertTasks or UndivertTasks of this number."""
        self._requests.end(number, now, refused=False)
        return []

    def refused(self, now: float, number: int, why: str | None) -> list[Command]:
        """A worker could not carry out the command of this number; `why` is None when its process has died."""
        self._requests.end(number, now, refused=why is not None)
        return [] if why is None else [*self._warn(why), *self._doubt(why)]

    def plan_changed(self, plan: Plan) -> list[Command]:
        """The job has this plan from now on."""
        before, self._plan = self._plan, plan
        if _layout(plan) == _layout(before):
            self._waiting.keep(plan.by_number)
            for range_ in self._ranges:
                chain = range_.form.chain
                if plan.chains[chain].parallelism != before.chains[chain].parallelism:
                    range_.detector.rescaled()
            return []
        self._waiting = WaitingRecords()
        self._find_ranges()
        self._samples.forget()
        self._counts.forget_tasks()
        life = self._spark.replace()
        return [] if life is None else [EndSpark(life, "the job's operators were divided among its tasks anew")]

    # --- ranges ----------------------------------------------------------------------------------------------------

    def _find_ranges(self) -> None:
        self._why_not_in_spark, self._ranges = {}, []
        for chain in self._plan.chains:
            form = range_form(self._plan, chain)
            if isinstance(form, str):
                self._why_not_in_spark[chain.name] = form
            else:
                self._ranges.append(_Range(form, BurstDetector(self._options.burst, _FIRST_GUESS)))

    def _leader(self, range_: _Range) -> _Range | None:
        """The range that begins before this one and has taken its operators to Spark too."""
        chain = range_.form.chain
        return next((other for other in self._ranges if other is not range_ and chain in other.parts), None)

    def _extend(self, range_: _Range) -> None:
        """Find out how many operators go with a range that is about to go to Spark."""
        forms = [one.form for one in self._ranges if not one.parts and self._leader(one) is None]
        plan = self._plan
        found = switch_range(
            parts.vertices(plan, forms, self._counts.lately),
            parts.head(plan, range_.form.chain),
            parts.crosses(plan, forms),
            below=self._options.burst.range_below,
            absorb_ends=True,
        )
        range_.extent = found.reason
        range_.parts = {} if isinstance(found, NoRange) else parts.parts(forms, found.operators)
        range_.parts.setdefault(range_.form.chain, range_.form.position)

    def _decide(self, range_: _Range, look: _Look) -> list[Command]:
        detector = range_.detector
        chain = range_.form.chain
        held_back = self._waiting.held_back(chain)
        held_up = self._waiting.held_up(chain, {one.form.chain for one in self._ranges}.difference(range_.chains))
        receivers = look.tasks(*{edge.target for edge in self._plan.exchanges if edge.source == chain})
        range_.blind = not all(task.backlog_known for task in look.tasks(chain))
        seen = range_.meter.observe(look.tasks(chain), look.now, held_back, held_up, receivers)
        decision = detector.observe(seen)
        range_.decision = decision
        commands: list[Command] = []
        if decision.warning is not None:
            commands += self._warn(decision.warning)  # each range has it to say
        if decision.note is not None:
            names = ", ".join(range_.form.names)
            commands.append(Note(f"{names}: {decision.note}"))
        if decision.prepare:
            commands += self._prepare(look.now)
        if detector.state == "SWITCHING" and not range_.parts:
            self._extend(range_)
        tasks = look.tasks(*range_.chains)
        for task in tasks:
            if task.diverted is not None and task.diverted["failed"] is not None:
                range_.failed = task.diverted["failed"]
        if (why := self._new_failure(tasks)) is not None:
            range_.failed = why
            if detector.state in ("SWITCHING", "OPERATION"):
                detector.happened("bridge lost", look.now, self._spark.with_log(why))
            commands += self._doubt(why)
        if detector.state in ("SWITCHING", "OPERATION"):
            return commands + self._divert(range_, decision, look)
        if not any(is_diverted(task) for task in tasks):
            if detector.state == "RETURNING":
                detector.happened("returned", look.now)
            range_.parts = {}
        return commands + self._undivert(range_, look)

    def _divert(self, range_: _Range, decision: Decision, look: _Look) -> list[Command]:
        life, facts = self._spark.number, self._spark.facts
        if life is None or facts is None or self._spark.state is not SparkState.READY:
            return []
        tasks = look.tasks(*range_.chains)
        running = [task for task in tasks if not task.finished]
        commands: list[Command] = []
        # Those of a worker that has not reported count too: what others are told must not change with its silence.
        all_running = sum(self._plan.chains[chain].parallelism for chain in range_.chains) - len(tasks) + len(running)
        rows = self._rows_max(decision, max(1, all_running))
        for chain, position in range_.parts.items():
            names = tuple(operator.name for operator in self._plan.chains[chain].operators)
            divert = DivertRequest(chain, position, decision.interval_s, True, rows, names, life)
            for worker, tasks in look.of_chain(chain).items():
                number = self._requests.begin_divert(worker, divert, tasks, look.asked_s)
                if number is not None:
                    commands.append(DivertTasks(worker, number, divert, facts.name, facts.node))
        # A task may still be diverted to an earlier Spark, if its worker has not reported for a while.
        there = [task.diverted is not None and is_diverted_to(task, life) for task in running]
        if range_.detector.state == "SWITCHING" and running and all(there):
            range_.detector.happened("switched", look.now)
        return commands

    def _rows_max(self, decision: Decision, tasks: int) -> int:
        """The greatest number of records of a micro-batch, when a number of tasks have one each."""
        rows = min(ROWS_MAX, max(_ROWS_LEAST, _ROWS_UNDER_WAY // (UNDER_WAY_MAX * tasks)))
        if (rate := decision.figures.operation_rate) is None:
            return rows
        in_time = max(_ROWS_FEWEST, rate * self._options.burst.timing.interval_max_s / tasks)
        # A power of two, so that tasks are not told anew whenever a figure changes a little.
        return min(rows, 1 << math.ceil(math.log2(in_time)))

    def _undivert(self, range_: _Range, look: _Look) -> list[Command]:
        commands: list[Command] = []
        for chain in range_.chains:
            for worker, tasks in look.of_chain(chain).items():
                number = self._requests.begin_undivert(worker, chain, tasks, look.asked_s)
                if number is not None:
                    commands.append(UndivertTasks(worker, number, chain))
        return commands

    def _new_failure(self, tasks: Sequence[TaskLoad]) -> str | None:
        """Why a diversion has ended by itself, if one has since the last look."""
        found = None
        for task in tasks:
            if task.diversion_failed is not None:
                diversion, why = task.diversion_failed
                if self._failures.get(task.number) != diversion:
                    self._failures[task.number] = diversion
                    found = found or why
        return found

    # --- trials ----------------------------------------------------------------------------------------------------

    def _take_samples(self, look: _Look) -> list[Command]:
        """Ask for the records of ranges that are to be tried on them."""
        commands: list[Command] = []
        for range_ in self._ranges:
            if not self._wants_trial(range_):
                continue
            chain = range_.form.chain
            if (question := self._samples.begin(chain, look.of_chain(chain), look.now)) is not None:
                names = tuple(operator.name for operator in self._plan.chains[chain].operators)
                request = SampleRequest(chain, names, question.least)
                commands.append(TakeSample(question.worker, question.number, request))
        return commands

    def _wants_trial(self, range_: _Range) -> bool:
        """Whether a range is to be tried on records that its tasks have taken. It is not while some range is in Spark,
        because both would be slower."""
        life, state = self._spark.number, self._spark.state
        if life is None or range_.tried_in == life or self._leader(range_) is not None:
            return False
        if state is SparkState.PREPARING:
            source = range_.form.source
            has_sample = source is not None and type(source).sample is not Source.sample
            return not has_sample and range_.detector.state in ("RECORD", "PREPARING")
        calm = all(one.detector.state in ("RECORD", "PREPARING") for one in self._ranges)
        trying = self._trying is not None and self._trying[0] == life
        return state is SparkState.READY and calm and not trying

    # --- Spark -----------------------------------------------------------------------------------------------------

    def _prepare(self, now: float) -> list[Command]:
        """Start Spark, unless it is there or being started."""
        if self._spark.state is SparkState.READY:
            self._tell_detectors("ready", now)
        if self._spark.state is not SparkState.ABSENT:
            return []
        return [PrepareSpark(self._spark.prepare(), tuple(range_.form for range_ in self._ranges))]

    def _doubt(self, why: str) -> list[Command]:
        """Ask Spark whether it lives, unless it has been asked already."""
        life = self._spark.number
        if life is None or self._spark.state is not SparkState.READY:
            return []
        self._spark.doubt(why)
        return [CheckSpark(life)]

    def _watch_answers(self, look: _Look, passed: float) -> list[Command]:
        """Doubt Spark when it owes answers and gives none for a while."""
        answers = sum(range_.meter.records_in_spark for range_ in self._ranges)
        stories = [task.diverted for tasks in look.reports.values() for task in tasks]
        waiting = any(story["under_way"] for story in stories if story is not None)
        self._quiet_s = self._quiet_s + passed if waiting and answers == self._answers else 0.0
        self._answers = answers
        return self._doubt(f"no micro-batch was answered for {self._quiet_s:.0f} s") if self._quiet_s > _QUIET_S else []

    def _lost(self, now: float, life: int, why: str, *, starting: bool, cause: str | None = None) -> list[Command]:
        """Spark has been given up. `cause`: what the ranges tell of it, when not the whole reason."""
        cause = why if cause is None else cause
        if starting:
            self._tell_detectors("prepare failed", now, cause)
        else:
            for range_ in self._ranges:
                # One that has told of a failure already waits for its next try.
                if range_.detector.prepared or range_.detector.awaits_preparation:
                    range_.detector.happened("bridge lost", now, cause)
        return [KillSpark(life, why)]

    def _tell_detectors(self, event: Event, now: float, why: str = "") -> None:
        for range_ in self._ranges:
            if range_.detector.awaits_preparation:
                range_.detector.happened(event, now, why)

    def _warn(self, text: str) -> list[Command]:
        if text in self._warned:
            return []
        self._warned.add(text)
        return [Warn(text)]

    # --- status ----------------------------------------------------------------------------------------------------

    @property
    def _about_spark(self) -> str | None:
        """The session, or the facts about a missing one."""
        if self._spark.facts is not None:
            return self._spark.facts.session
        if self._spark.state is not SparkState.PREPARING:
            return self._spark.absence
        ranges = "1 range is" if len(self._ranges) == 1 else f"{len(self._ranges)} ranges are"
        before = "" if self._spark.absence is None else f"; the time before, Spark was {self._spark.absence}"
        return f"Spark is starting, and {ranges} being tried in it, for {self._spark.waited_s:.0f} s now{before}"

    def _reason(self, range_: _Range) -> str:
        """Why a range is where it is. What Spark could do is no reason while there is no Spark."""
        if range_.decision is None:
            return "no task of the range has reported yet"
        reason, state = range_.decision.reason, self._spark.state
        there = state not in (SparkState.ABSENT, SparkState.PREPARING)
        in_records = range_.detector.state in ("RECORD", "PREPARING")
        failure = range_.detector.last_failure
        if there or not in_records or range_.detector.mode == "off" or (failure and failure in reason):
            return reason
        waiting = range_.decision.figures.waiting
        if state is SparkState.PREPARING:
            return f"Spark is starting, and ranges are being tried in it; {waiting}"
        why = "Spark has not been started yet" if self._spark.absence is None else "there is no Spark now"
        return f"{why}; {waiting}"

    def _status(self, range_: _Range) -> RangeStatus:
        parts_, form = range_.parts, range_.form
        forms = [one.form for one in self._ranges if one.form.chain in parts_] if parts_ else [form]
        leader = self._leader(range_) or range_
        figures = Figures() if leader.decision is None else leader.decision.figures
        return RangeStatus(
            chain=form.chain,
            operators=[name for one in forms for name in one.before(parts_.get(one.chain, one.position)).names],
            partials=form.combiner is not None,
            extent=leader.extent,
            state=leader.detector.state.value,
            paradigm="operation" if leader.detector.state in ("OPERATION", "RETURNING") else "record",
            burst=leader.decision is not None and leader.decision.burst,
            reason=self._reason(leader) + (_BLIND if leader.blind else ""),
            figures=RangeFigures(
                **{**figures, "operation_measured": leader.tried or leader.detector.has_measured_spark}
            ),
            switches=[story.status() for story in range_.detector.switches],
            did_not_pay=range_.detector.refusals.remembered(),
            records_in_spark=range_.meter.records_in_spark,
            unprocessed=range_.meter.unprocessed,
            failed=range_.failed,
            way=None if self._spark.facts is None else range_.way,
        )
