"""The central scheduler of the two paradigms (docs/papers.md: D2, D4, D6): part of the JobMaster.

The scheduler looks at the workers' counters a few times a second. For each chain with operators that can run in Spark,
a `BurstDetector` decides whether they should, and the scheduler tells the workers. When a chain's input goes to Spark,
`switch_range` says how many operators go with it, by the magnifications that were measured. The range may continue into
other chains, whose own detectors then wait. By default the range is as long as operators can cross, and does not end
where Eq. 8 ends it: in the paper, each operator costs a micro-batch of its own, but here a range is one job in Spark,
and the longer the range is, the fewer records come back (`BurstOptions.range_below`).

A message to a worker says what should be, not what should change. So a worker that was started again, or that missed a
message, is told at the next look. Spark is started beside the running flow, either with the job or when the detector
first sees a burst coming. When Spark cannot be started, the job goes on with records, and the log says so once.

A rescale changes the plan while the scheduler runs. The scheduler takes the job's plan anew at each look. When the
chains have changed, everything that was known of ranges is void, and Spark is prepared again, because it has compiled
the old ranges. Until a worker has the new plan too, the scheduler ignores its reports, and the worker ignores the
scheduler's messages.

The scheduler must never hold up the job: it asks workers with a time limit, and nothing waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from penstock.actors import spark_bridge
from penstock.bridge import parts
from penstock.bridge.burst import BurstDetector, BurstOptions, Decision, Event, Observation
from penstock.bridge.cost import BatchCost, Calibration, MicroBatch
from penstock.bridge.forms import RangeForm, range_form
from penstock.bridge.range import NoRange, switch_range
from penstock.bridge.session import SparkOptions
from penstock.runtime.operators.micro_batch import ROWS_MAX, UNDER_WAY_MAX, DivertRequest
from penstock.runtime.program.plan import Plan

logger = logging.getLogger(__name__)

_LOOK_S = 0.25

# What Spark is assumed to cost before it was measured: on two cores a micro-batch costs about a quarter of a second,
# and rows that stay columns go through at some hundred thousand a second.
_FIRST_GUESS = Calibration(batch=BatchCost(0.25, 400_000.0))

# The time within which a bridge that has failed to answer a micro-batch must show that it lives.
_ALIVE_S = 5.0

# When no task has gone to Spark for this long after a switch began, the bridge may have died before it was used:
# workers cannot find it then, and there is no micro-batch that would fail.
_UNHEARD_S = 10.0

# In an overload, all micro-batches that are under way together fit into Spark's memory, whatever Spark answers, and an
# answer comes within seconds. But they are not so small that the fixed cost is most of the cost.
_ROWS_UNDER_WAY = 600_000
_ROWS_LEAST = 50_000

# The weight of an operator's earlier counts at the next look: magnifications are those of the last ten seconds or so.
_KEPT = 0.975

# How long the bridge may take to end Spark when the job ends.
_STOP_S = 20.0


@dataclass(frozen=True)
class DualOptions:
    """How a job uses Spark: the detector's options, and the session's."""

    burst: BurstOptions
    spark: SparkOptions


@dataclass
class _Range:
    """A range of operators of the job, and what has been measured of it."""

    form: RangeForm
    detector: BurstDetector
    decision: Decision | None = None
    # Of each task by the last observation: records taken in both paradigms, records that waited, ns busy.
    done: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    answered: dict[int, int] = field(default_factory=dict)  # of each task: records that Spark has answered
    diverted: int = 0  # of all
    observed: int = 0  # of those, by the last observation
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each task: its diversion, the last micro-batch
    failed: str | None = None  # why the last diversion ended that did so by itself
    parts: dict[int, int] = field(default_factory=dict)  # while it is in Spark: chain -> up to which position
    extent: str = ""  # why it ends there


_Tasks = list[tuple[int, dict[str, Any]]]  # (worker, the task's load)


def _workers(tasks: _Tasks) -> list[int]:
    return sorted({worker for worker, _ in tasks})


def _layout(plan: Plan) -> list[list[str]]:
    """The operators of each chain."""
    return [[operator.name for operator in chain.operators] for chain in plan.chains]


def _is_of(task: dict[str, Any], layout: list[list[str]]) -> bool:
    """Whether a worker's task belongs to this plan."""
    chain = task["chain"]
    return chain < len(layout) and layout[chain] == [name for name, _, _ in task["operators"]]


class Dual:
    """See the module's docstring. `plan` returns the job's present plan, `ask` returns each worker's load, and
    `tell(worker, method, arguments)` sends a worker a message, which may be lost."""

    def __init__(
        self,
        plan: Callable[[], Plan],
        options: DualOptions,
        name: str,
        ask: Callable[[], list[tuple[int, list[dict[str, Any]]]]],
        tell: Callable[[int, str, tuple[Any, ...]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._current = plan
        self._plan = plan()  # as of the last look
        self._options = options
        self._name = name
        self._ask = ask
        self._tell = tell
        self._clock = clock
        self._lives = 0  # of the bridge
        self._bridge: Any = None
        self._bridge_name = ""
        self._spark: dict[str, Any] | str | None = None  # what it is, or why there is none
        self._starting: threading.Thread | None = None
        self._outcome: tuple[Event, str] | None = None  # of the last start, until the next look
        self._lock = threading.Lock()  # what a start of Spark leaves behind changes under it, all together
        self._over = threading.Event()
        self.stays: dict[str, str] = {}  # chain -> why nothing of it can cross
        self._ranges: list[_Range] = []
        self._counts: dict[str, tuple[float, float]] = {}  # of operators that run as records
        self._counted: dict[tuple[int, str], tuple[int, int, bool]] = {}  # by the last look; the task was diverted
        self._failures: set[tuple[int, str]] = set()  # diversions that ended by themselves, and why
        self._warned: set[str] = set()  # since Spark was there
        self._find_ranges()
        threading.Thread(target=self._run, name="penstock-dual", daemon=True).start()

    def _find_ranges(self) -> None:
        stays, ranges = {}, []
        for chain in self._plan.chains:
            form = range_form(self._plan, chain)
            if isinstance(form, str):
                stays[chain.name] = form
            else:
                ranges.append(_Range(form, BurstDetector(self._options.burst, _FIRST_GUESS)))
        self.stays, self._ranges = stays, ranges

    def _take_plan(self) -> None:
        """Go on with the job's present plan."""
        before, self._plan = self._plan, self._current()
        if self._plan is before or _layout(self._plan) == _layout(before):
            return
        self._find_ranges()
        self._counted.clear()  # tasks have other numbers
        with self._lock:
            bridge, self._bridge, self._spark, self._outcome = self._bridge, None, None, None
        if bridge is not None:
            threading.Thread(target=self._end, args=(bridge,), name="penstock-end-bridge", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """The paradigm that each range of operators is in, and why."""
        spark = self._spark
        return {
            "mode": self._options.burst.mode,
            "spark": spark if isinstance(spark, str) or spark is None else spark["session"],
            "processes": {what: spark[what] for what in ("bridge", "executors")} if isinstance(spark, dict) else {},
            "ranges": [self._status(range_) for range_ in self._ranges],
            "stays": self.stays,
        }

    def _status(self, range_: _Range) -> dict[str, Any]:
        parts_, form = range_.parts, range_.form
        forms = [one.form for one in self._ranges if one.form.chain in parts_] if parts_ else [form]
        leader = self._leader(range_) or range_
        return {
            "chain": form.chain,
            "operators": [name for one in forms for name in one.before(parts_.get(one.chain, one.position)).names],
            "partials": form.combiner is not None,
            "extent": leader.extent,
            "state": leader.detector.state,
            "paradigm": "operation" if leader.detector.state in ("OPERATION", "RETURNING") else "record",
            "reason": "" if leader.decision is None else leader.decision.reason,
            "figures": {} if leader.decision is None else vars(leader.decision.figures),
            "records_in_spark": range_.diverted,
            "failed": range_.failed,
        }

    def close(self) -> None:
        """Make no more decisions, and end Spark."""
        self._over.set()
        with self._lock:
            bridge, self._bridge = self._bridge, None
        if bridge is not None:
            self._end(bridge)

    def _end(self, bridge: Any) -> None:
        try:
            ray.get(bridge.stop.remote(), timeout=_STOP_S)
        except Exception as error:
            logger.warning("job %s: Spark did not end by itself: %s", self._name, error)
        ray.kill(bridge)

    # ---------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            try:
                self._look()
            except Exception:
                logger.exception("job %s: the scheduler of the paradigms failed; it goes on", self._name)

    def _look(self) -> None:
        self._take_plan()
        layout = _layout(self._plan)
        reports = [(worker, [task for task in loads if _is_of(task, layout)]) for worker, loads in self._ask()]
        now = self._clock()
        with self._lock:
            outcome, self._outcome = self._outcome, None
        if outcome is not None:
            self._tell_detectors(outcome[0], now, outcome[1])
            costs = self._spark["costs"] if isinstance(self._spark, dict) else {}
            for range_ in self._ranges:
                if (cost := costs.get(range_.form.chain)) is not None:
                    range_.detector.tried(cost)
        tasks: defaultdict[int, _Tasks] = defaultdict(list)
        for worker, loads in reports:
            for task in loads:
                tasks[task["chain"]].append((worker, task))
        self._count(task for _, loads in reports for task in loads)
        for range_ in self._ranges:
            own = tasks[range_.form.chain]
            led = self._leader(range_) is not None
            if own and not led:
                self._decide(range_, tasks, now)
                continue
            self._answered(range_, [task for _, task in own])
            if led and range_.detector.state == "SWITCHING":  # it must not go by itself when its leader comes back
                range_.detector.happened("calm", now, "its operators are in Spark with those before them")

    def _leader(self, range_: _Range) -> _Range | None:
        """The range that begins before this one and has taken its operators to Spark too."""
        chain = range_.form.chain
        return next((other for other in self._ranges if other is not range_ and chain in other.parts), None)

    def _count(self, loads: Iterable[dict[str, Any]]) -> None:
        """Add up the records that operators have taken and given since the last look. Diverted tasks are left out:
        their operators count only the records at the ends of the range."""
        found: dict[str, tuple[int, int]] = {}
        for task in loads:
            diverted = task["diverted"] is not None
            for name, taken, given in task["operators"]:
                at = (task["number"], name)
                before_taken, before_given, was_diverted = self._counted.get(at, (0, 0, False))
                self._counted[at] = (taken, given, diverted)
                if not (diverted or was_diverted) and taken >= before_taken and given >= before_given:
                    so_far = found.get(name, (0, 0))
                    found[name] = (so_far[0] + taken - before_taken, so_far[1] + given - before_given)
        for name, (taken, given) in found.items():
            kept = self._counts.get(name, (0.0, 0.0))
            self._counts[name] = (_KEPT * kept[0] + taken, _KEPT * kept[1] + given)

    def _cut(self, range_: _Range) -> None:
        """Find out how many operators a range has that is about to go to Spark."""
        forms = [one.form for one in self._ranges if not one.parts and self._leader(one) is None]
        plan = self._plan
        found = switch_range(
            parts.vertices(plan, forms, self._counts),
            parts.head(plan, range_.form.chain),
            parts.crosses(plan, forms),
            below=self._options.burst.range_below,
            absorb_ends=True,
        )
        range_.extent = found.reason
        range_.parts = {} if isinstance(found, NoRange) else parts.parts(forms, found.operators)
        range_.parts.setdefault(range_.form.chain, range_.form.position)

    def _decide(self, range_: _Range, by_chain: Mapping[int, _Tasks], now: float) -> None:
        detector = range_.detector
        decision = detector.observe(self._observation(range_, [task for _, task in by_chain[range_.form.chain]], now))
        range_.decision = decision
        if decision.warning is not None and decision.warning not in self._warned:  # each range has it to say
            self._warned.add(decision.warning)
            logger.warning("job %s: %s", self._name, decision.warning)
        if decision.prepare:
            self._prepare(now)
        if detector.state == "SWITCHING" and not range_.parts:
            self._cut(range_)
        tasks = [one for chain in range_.parts or (range_.form.chain,) for one in by_chain[chain]]
        diverted = [worker for worker, task in tasks if task["diverted"] is not None]
        running = [task for _, task in tasks if not task["finished"]]
        failures = [task["diversion_failed"] for _, task in tasks if task["diversion_failed"]]
        new = [failure for failure in failures if failure not in self._failures]
        if new:
            self._failures.update(new)
            range_.failed = new[0][1]
            self._fail(range_, now, new[0][1])
        elif detector.state == "SWITCHING" and not diverted and now - (detector.since_s or now) > _UNHEARD_S:
            self._lose_if_dead(now, "the bridge does not answer")
        state = detector.state
        if state in ("SWITCHING", "OPERATION"):
            spark = self._spark
            if self._bridge is None or not isinstance(spark, dict):
                return
            rows = min(ROWS_MAX, max(_ROWS_LEAST, _ROWS_UNDER_WAY // (UNDER_WAY_MAX * max(1, len(running)))))
            for chain, position in range_.parts.items():
                names = tuple(operator.name for operator in self._plan.chains[chain].operators)
                divert = DivertRequest(chain, position, decision.interval.seconds, True, rows, names)
                for worker in _workers(by_chain[chain]):
                    self._tell(worker, "divert", (divert, self._bridge_name, spark["node"]))
            if state == "SWITCHING" and running and len(diverted) >= len(running):
                detector.happened("switched", now)
            return
        if diverted or state == "RETURNING":
            for chain in range_.parts or (range_.form.chain,):
                for worker in _workers(by_chain[chain]):
                    self._tell(worker, "undivert", (chain,))
            if diverted:
                return
            if state == "RETURNING":
                detector.happened("returned", now)
        range_.parts = {}

    def _observation(self, range_: _Range, tasks: list[dict[str, Any]], now: float) -> Observation:
        batches = self._answered(range_, tasks)
        in_spark, range_.observed = range_.diverted - range_.observed, range_.diverted
        waiting = arrivals = more = busy_ns = 0
        for task in tasks:
            taken, busy = task["operators"][0][1], task["busy_ns"]
            # What is under way in Spark waits too: it counts as taken when it is answered.
            queue = task["queued"] + task["behind"] + task["under_way"]
            waiting += queue
            # Task by task: one of a worker that has missed a look, or was started again, counts from where it was.
            taken_before, queue_before, busy_before = range_.done.get(task["number"], (taken, queue, busy))
            range_.done[task["number"]] = (taken, queue, busy)
            more += max(0, taken - taken_before)
            arrivals += max(0, taken - taken_before) + queue - queue_before
            busy_ns += max(0, busy - busy_before)
        return Observation(
            now,
            float(waiting),
            arrivals=float(max(0, arrivals)),
            processed=float(max(0, more - in_spark)),
            busy_s=busy_ns / 1e9 / len(tasks),
            batches=batches,
        )

    def _answered(self, range_: _Range, tasks: list[dict[str, Any]]) -> tuple[MicroBatch, ...]:
        """Count the records that Spark has answered. Returns the micro-batches by which Spark is measured."""
        batches: list[MicroBatch] = []
        # Those under way share Spark's cores: each takes as much longer, and all together no less.
        beside = max(1, sum(task["diverted"]["under_way"] for task in tasks if task["diverted"] is not None))
        for task in tasks:
            answered, before = task["answered"], range_.answered.get(task["number"], 0)
            range_.answered[task["number"]] = answered
            range_.diverted += answered - before if answered >= before else answered  # it was started again
            story = task["diverted"]
            if story is None:
                continue
            diversion, last = range_.seen.get(task["number"], (story["id"], 0))
            if diversion != story["id"]:
                last = 0
            for number, records, seconds in story["recent"]:
                if number > last:
                    range_.seen[task["number"]] = (story["id"], number)
                    if number > 1:  # the first loads and compiles
                        batches.append(MicroBatch(records, seconds / beside))
        return tuple(batches)

    # --- the bridge ------------------------------------------------------------------------------------------------

    def _prepare(self, now: float) -> None:
        """Start Spark, unless it is there or being started."""
        if self._starting is not None and self._starting.is_alive():
            return
        with self._lock:
            if self._bridge is not None:
                self._tell_detectors("ready", now)
                return
        self._starting = threading.Thread(target=self._start, name="penstock-prepare", daemon=True)
        self._starting.start()

    def _start(self) -> None:
        self._lives += 1
        name = f"penstock.bridge.{self._name}.{self._lives}.{time.time_ns():x}"
        bridge = None
        ranges = self._ranges
        try:
            bridge = spark_bridge.start(name, self._options.spark, [range_.form for range_ in ranges])
            spark = ray.get(bridge.prepare.remote())
        except Exception as error:
            why = str(getattr(error, "cause", None) or error).strip()
            if bridge is not None:
                ray.kill(bridge)
            with self._lock:
                if self._ranges is ranges:
                    self._spark, self._outcome = f"not to be had: {why}", ("prepare failed", why)
            return
        with self._lock:
            wanted = self._ranges is ranges and not self._over.is_set()
            if wanted:
                self._bridge, self._bridge_name, self._spark = bridge, name, spark
                self._outcome = ("ready", "")
        if not wanted:  # the job has ended, or Spark has compiled the ranges of an old plan
            ray.kill(bridge)

    def _tell_detectors(self, event: Event, now: float, why: str = "") -> None:
        if event == "ready":
            self._warned.clear()
        for range_ in self._ranges:
            if range_.detector.awaits_preparation:
                range_.detector.happened(event, now, why)

    def _fail(self, range_: _Range, now: float, why: str) -> None:
        """A micro-batch of a range was not answered, and its tasks go on with records."""
        # A range that is coming back already needs no further reason to.
        if not self._lose_if_dead(now, why) and range_.detector.state != "RETURNING":
            range_.detector.happened("bridge lost", now, self._with_log(why))

    def _with_log(self, why: str) -> str:
        """A failure, and the file in which Spark may have written more about it."""
        spark = self._spark
        return f"{why}; what Spark wrote is in {spark['log']}" if isinstance(spark, dict) else why

    def _lose_if_dead(self, now: float, why: str) -> bool:
        """Whether the bridge has died. If it has, all ranges are told that it is lost."""
        with self._lock:
            bridge = self._bridge
        if bridge is None:
            return False
        try:
            ray.get(bridge.executors.remote(), timeout=_ALIVE_S)
            return False
        except Exception:
            ray.kill(bridge)
        with self._lock:
            if self._bridge is not bridge:  # the job has ended meanwhile
                return False
            why = self._with_log(why)
            self._bridge, self._spark = None, f"lost: {why}"
        for one in self._ranges:
            one.detector.happened("bridge lost", now, why)
        return True
