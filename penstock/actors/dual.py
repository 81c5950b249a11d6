"""The central scheduler of the two paradigms (PAPERS rows D2, D4, D6): part of the JobMaster.

It looks at the workers' counters a few times a second, lets a `BurstDetector` a range decide, and tells the workers.
What it tells is what should be, not what should change: a worker that was started again, or that missed a word, is
told at the next look. Spark is started beside the running flow, with the job or when the detector first sees it coming;
when it cannot be had, the job goes on with records, and says so once.

It must never hold up the job: it asks workers with a time limit, and nothing waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from penstock.actors import spark_bridge
from penstock.bridge.burst import BurstDetector, BurstOptions, Decision, Event, Observation
from penstock.bridge.cost import BatchCost, Calibration, MicroBatch
from penstock.bridge.forms import RangeForm, range_form
from penstock.bridge.session import SparkOptions
from penstock.runtime.diversion import Divert
from penstock.runtime.plan import Plan

logger = logging.getLogger(__name__)

_LOOK_S = 0.25

# What Spark is taken to do before it has shown it: on two cores a micro-batch costs about a quarter of a second, and
# rows that stay columns go through at some hundred thousand a second.
_FIRST_GUESS = Calibration(batch=BatchCost(0.25, 400_000.0))

# Within which a bridge that has failed to answer a micro-batch must show that it lives.
_ALIVE_S = 5.0

# How long the bridge may take to end Spark with the job.
_STOP_S = 20.0


@dataclass(frozen=True)
class DualOptions:
    """How a job uses Spark: the detector's options, and the session's."""

    burst: BurstOptions
    spark: SparkOptions


@dataclass
class _Range:
    """A range of the job, and what has been seen of it."""

    form: RangeForm
    detector: BurstDetector
    decision: Decision | None = None
    queue: float | None = None  # at the last look
    taken: int = 0  # records by then, in both paradigms
    diverted: int = 0  # of those, in the operation stream
    busy_ns: int = 0
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each task: its diversion, the last micro-batch
    failures: set[tuple[int, str]] = field(default_factory=set)  # diversions that ended by themselves, and why
    failed: str | None = None  # the last of them


class Dual:
    """See the module's docstring. `ask` gives the workers' reports, `tell(worker, method, arguments)` sends a word."""

    def __init__(
        self,
        plan: Plan,
        options: DualOptions,
        name: str,
        ask: Callable[[], list[dict[str, Any]]],
        tell: Callable[[int, str, tuple[Any, ...]], None],
    ) -> None:
        self._options = options
        self._name = name
        self._ask = ask
        self._tell = tell
        self._lives = 0  # of the bridge
        self._bridge: Any = None
        self._bridge_name = ""
        self._spark: dict[str, Any] | str | None = None  # what it is, or why there is none
        self._starting: threading.Thread | None = None
        self._outcome: tuple[Event, str] | None = None  # of the last start, until the next look
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.stays: dict[str, str] = {}  # chain -> why nothing of it can cross
        self._ranges: list[_Range] = []
        for chain in plan.chains:
            form = range_form(plan, chain)
            if isinstance(form, str):
                self.stays[chain.name] = form
            else:
                self._ranges.append(_Range(form, BurstDetector(options.burst, _FIRST_GUESS)))
        threading.Thread(target=self._run, name="penstock-dual", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """Which operators are in which paradigm, and why."""
        spark = self._spark
        return {
            "mode": self._options.burst.mode,
            "spark": spark if isinstance(spark, str) or spark is None else spark["session"],
            "processes": {what: spark[what] for what in ("bridge", "executors")} if isinstance(spark, dict) else {},
            "ranges": [
                {
                    "chain": range_.form.chain,
                    "operators": range_.form.names,
                    "partials": range_.form.combiner is not None,
                    "state": range_.detector.state,
                    "paradigm": "operation" if range_.detector.state in ("OPERATION", "RETURNING") else "record",
                    "reason": range_.decision.reason if range_.decision is not None else "",
                    "figures": vars(range_.decision.figures) if range_.decision is not None else {},
                    "records_in_spark": range_.diverted,
                    "failed": range_.failed,
                }
                for range_ in self._ranges
            ],
            "stays": self.stays,
        }

    def close(self) -> None:
        """Decide nothing more, and end Spark."""
        self._over.set()
        with self._lock:
            bridge, self._bridge = self._bridge, None
        if bridge is not None:
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
        reports = self._ask()
        now = time.monotonic()
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            self._tell_detectors(outcome[0], now, outcome[1])
        for range_ in self._ranges:
            tasks = [
                (report["index"], task)
                for report in reports
                for task in report["tasks"]
                if task["chain"] == range_.form.chain
            ]
            if not tasks:
                continue
            self._decide(range_, tasks, now)

    def _decide(self, range_: _Range, tasks: list[tuple[int, dict[str, Any]]], now: float) -> None:
        detector = range_.detector
        decision = detector.observe(self._observation(range_, [task for _, task in tasks], now))
        range_.decision = decision
        if decision.warning is not None:
            logger.warning("job %s: %s", self._name, decision.warning)
        if decision.prepare:
            self._prepare(now)
        diverted = [worker for worker, task in tasks if task["diverted"] is not None]
        running = [task for _, task in tasks if not task["finished"]]
        failures = [task["diversion_failed"] for _, task in tasks if task["diversion_failed"]]
        new = [failure for failure in failures if failure not in range_.failures]
        if new:
            range_.failures.update(new)
            range_.failed = new[0][1]
            self._fail(range_, now, new[0][1])
        state = detector.state
        workers = sorted({worker for worker, _ in tasks})
        if state in ("SWITCHING", "OPERATION"):
            spark = self._spark
            if self._bridge is None or not isinstance(spark, dict):
                return
            form = range_.form
            divert = Divert(form.chain, form.position, decision.interval.seconds, columns=True)
            for worker in workers:
                self._tell(worker, "divert", (divert, self._bridge_name, spark["node"]))
            if state == "SWITCHING" and running and len(diverted) >= len(running):
                detector.happened("switched", now)
        elif diverted or state == "RETURNING":
            for worker in workers:
                self._tell(worker, "undivert", (range_.form.chain,))
            if state == "RETURNING" and not diverted:
                detector.happened("returned", now)

    def _observation(self, range_: _Range, tasks: list[dict[str, Any]], now: float) -> Observation:
        taken = sum(task["operators"][0]["records_in"] for task in tasks)
        queue = float(sum(task["queued"] + task["behind"] for task in tasks))
        busy = sum(task["busy_ns"] for task in tasks)
        batches: list[MicroBatch] = []
        in_spark = 0
        for task in tasks:
            story = task["diverted"]
            if story is None:
                continue
            diversion, last = range_.seen.get(task["number"], (story["id"], 0))
            if diversion != story["id"]:
                last = 0
            for number, records, seconds in story["recent"]:
                if number > last:
                    range_.seen[task["number"]] = (story["id"], number)
                    in_spark += records
                    if number > 1:  # the first loads and compiles
                        batches.append(MicroBatch(records, seconds))
        before, range_.queue = range_.queue, queue
        more, range_.taken = max(0, taken - range_.taken), taken
        busy, range_.busy_ns = max(0, busy - range_.busy_ns), busy
        range_.diverted += in_spark
        if before is None:
            return Observation(now, queue, 0.0)
        return Observation(
            now,
            queue,
            arrivals=max(0.0, more + queue - before),
            processed=max(0.0, more - in_spark),
            busy_s=busy / 1e9 / len(tasks),
            batches=tuple(batches),
        )

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
        try:
            bridge = spark_bridge.start(name, self._options.spark, [range_.form for range_ in self._ranges])
            spark = ray.get(bridge.prepare.remote())
        except Exception as error:
            why = str(getattr(error, "cause", None) or error).strip()
            self._spark = f"not to be had: {why}"
            if bridge is not None:
                ray.kill(bridge)
            self._outcome = ("prepare failed", why)
            return
        with self._lock:
            if self._over.is_set():
                ray.kill(bridge)
                return
            self._bridge, self._bridge_name, self._spark = bridge, name, spark
        self._outcome = ("ready", "")

    def _tell_detectors(self, event: Event, now: float, why: str = "") -> None:
        for range_ in self._ranges:
            if range_.detector.awaits_preparation:
                range_.detector.happened(event, now, why)

    def _fail(self, range_: _Range, now: float, why: str) -> None:
        """A micro-batch of a range was not answered: its tasks go on with records."""
        with self._lock:
            bridge = self._bridge
        others = False
        if bridge is not None:
            try:
                ray.get(bridge.executors.remote(), timeout=_ALIVE_S)
            except Exception:
                others = True  # it is gone for all
                ray.kill(bridge)
                with self._lock:
                    self._bridge = None
        for one in self._ranges:
            if one is range_ or others:
                one.detector.happened("bridge lost", now, why)
