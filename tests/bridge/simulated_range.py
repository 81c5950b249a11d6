"""A range of operators under a virtual clock, whose burst detector decides, and a judge of what it decides.

The judge simulates three choices beside the detector's own: never to go to Spark, and to go there half a second after a
burst has begun, until the burst is over or some seconds longer. It compares for how long all records together have
waited.

    python -m tests.bridge.simulated_range 200        # the cases 0 to 199; lists those that cost more than the best

Arguments: the number of cases, and the first one.
"""

from __future__ import annotations

import math
import random
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.bridge.burst import BurstDetector, BurstOptions, Decision, Mode, Observation
from penstock.bridge.cost import BatchCost, Calibration, MicroBatch
from penstock.runtime.operators.micro_batch import ROWS_MAX

RECORD_RATE = 30_000.0  # PD
SPARK = BatchCost(0.2, 120_000.0)  # t_s + t_ot, PO


@dataclass
class SimulatedRange:
    """A range before which a queue stands, driven by a detector; one step is a tenth of a second.

    Record tasks take `record_rate` a second, of which they are busy for as long as if they took `alone` a second. Spark
    takes what waits when an interval is over and it is free; it needs fixed_s + n / rate. Making it ready takes
    `prepare_s`, a switch `switch_s`, in which nobody works. `mode`: the detector's at a time. `slowness`: how many
    times as long a record takes in the record tasks at a time. `follows`: the records/s that what follows the range
    takes of Spark's answers; micro-batches take no longer by that, but the next one begins later. `under_way_max`: how
    many micro-batches Spark has at the same time, one after the other; a diversion lets it have two. `longer`: how many
    times as long a micro-batch takes as the detector is told, because those of other tasks share Spark with it.
    """

    load: Callable[[float], float]
    record_rate: float = RECORD_RATE
    alone: float | None = None  # None: as the record rate
    spark: BatchCost = SPARK
    prepare_s: float = 5.0
    switch_s: float = 0.5
    calibration: Calibration = field(default_factory=Calibration)
    step_s: float = 0.1
    mode: Callable[[float], Mode] = lambda now: "auto"
    slowness: Callable[[float], float] = lambda now: 1.0
    follows: float | None = None
    under_way_max: int = 1
    longer: float = 1.0
    options: BurstOptions = field(default_factory=BurstOptions)

    def run(self, until_s: float) -> None:
        self.detector = BurstDetector(self.options, self.calibration)
        self.waited = 0.0  # for how long all records together
        self.queues: list[float] = []
        self.states: list[tuple[float, str]] = []
        self.came = self.done = 0.0
        self.history: list[tuple[float, float]] = []  # after each step: the records that have come, and that are done
        self.intervals: list[tuple[float, float]] = []  # (time, how long micro-batches gather)
        queue = 0.0
        running: deque[tuple[float, MicroBatch]] = deque()  # (when it is answered, what is told of it)
        ready_at = switched_at = None
        cut_at = 0.0
        self.decision: Decision | None = None
        for number in range(int(until_s / self.step_s)):
            now = number * self.step_s
            arrived = self.load(now) * self.step_s
            queue += arrived
            self.came += arrived
            processed, batches = 0.0, []
            while running and running[0][0] <= now:
                self.done += running[0][1].records
                batches.append(running.popleft()[1])
            state = self.detector.state
            if state in ("RECORD", "PREPARING"):
                processed = min(queue, self.record_rate / self.slowness(now) * self.step_s)
                queue -= processed
                self.done += processed
            elif state == "OPERATION" and len(running) < self.under_way_max and now >= cut_at and queue > 0:
                assert self.decision is not None
                rows = min(queue, ROWS_MAX)
                batch = MicroBatch(rows, self.spark.seconds(rows))
                begins = max(now, running[-1][0]) if running else now
                takes_s = max(self.longer * batch.seconds, rows / (self.follows or math.inf))
                running.append((begins + takes_s, batch))
                cut_at = now if rows == ROWS_MAX else now + self.decision.interval_s
                queue -= rows
            waiting = queue + sum(batch.records for _, batch in running)
            self.waited += waiting * self.step_s
            untried = self.decision is not None and self.decision.figures.queue_switch is None
            if untried and self.detector.prepared:
                batches += [MicroBatch(n, self.spark.seconds(n)) for n in (1_000, 10_000, 50_000)]
            self.detector.mode = self.mode(now)
            busy_s = processed / (self.alone or self.record_rate) * self.slowness(now)
            self.decision = self.detector.observe(Observation(now, waiting, arrived, processed, busy_s, tuple(batches)))
            if self.decision.prepare and ready_at is None and not self.detector.prepared:
                ready_at = now + self.prepare_s
            if ready_at is not None and now >= ready_at:
                ready_at = None
                self.detector.happened("ready", now)
            if self.detector.state in ("SWITCHING", "RETURNING"):
                switched_at = now + self.switch_s if switched_at is None else switched_at
                if now >= switched_at and not running:
                    switched_at = None
                    cut_at = now
                    self.detector.happened("switched" if self.detector.state == "SWITCHING" else "returned", now)
            if not self.states or self.states[-1][1] != self.detector.state:
                self.states.append((now, self.detector.state))
            self.queues.append(queue)
            self.intervals.append((now, self.decision.interval_s))
            self.history.append((self.came, self.done))
        self.left = queue + sum(batch.records for _, batch in running)

    @property
    def most(self) -> float:
        """The most records that have waited, those in Spark too."""
        return max(came - done for came, done in self.history)

    def delay(self, quantile: float) -> float:
        """The delay that this share of the records does not exceed; those that are not done do not count."""
        done = [one for _, one in self.history]
        found: list[tuple[float, float]] = []  # (delay, records)
        before = 0.0
        for step, (came, _) in enumerate(self.history):
            at = bisect_left(done, came - 1e-6, lo=step)
            if came > before and at < len(done):
                found.append(((at - step) * self.step_s, came - before))
            before = came
        left = quantile * sum(records for _, records in found)
        for delay, records in sorted(found):
            left -= records
            if left <= 0:
                return delay
        return math.inf


@dataclass(frozen=True)
class Case:
    """A burst, and what the detector has made of it. `more`: what it cost, divided by what the best choice cost."""

    seed: int
    more: float
    about: dict[str, float]
    states: dict[str, float]  # the states of the range, and when each began for the last time
    taken_back: bool  # a switch was taken for one that did not pay


# Half a second after the beginning of a burst somebody who sees it may have decided. Nobody cares for less than a
# twentieth of a second that a record waits.
_SEEN_S = 0.5
_NOTHING_S = 0.05
_BEGINS_S = 20.0
_LONGER_S = (0.0, 5.0, 20.0)


def decided(seed: int) -> Case:
    """Lets a detector decide about a random burst, beside a Spark of random speed that is known."""
    rng = random.Random(seed)
    record_rate = 10 ** rng.uniform(3.5, 5.5)
    spark = BatchCost(rng.uniform(0.05, 0.6), record_rate * 10 ** rng.uniform(-0.5, 1.3))
    usual, in_burst = record_rate * rng.uniform(0.05, 0.6), record_rate * rng.uniform(0.5, 4)
    lasts_s, prepare_s = rng.uniform(1, 60), rng.choice([0.5, 3.0, 12.0])
    alone = record_rate * rng.choice([1, 1, 3, 10])
    over_s = _BEGINS_S + lasts_s

    def simulated(mode: Callable[[float], Mode]) -> SimulatedRange:
        run = SimulatedRange(
            lambda now: in_burst if _BEGINS_S <= now < over_s else usual,
            record_rate,
            alone,
            spark,
            prepare_s,
            calibration=Calibration(None, spark, prepare_s, switch_s=0.5),
            mode=mode,
        )
        run.run(over_s + lasts_s + 60)
        return run

    def until(end_s: float) -> Callable[[float], Mode]:
        return lambda now: "spark-only" if _BEGINS_S + _SEEN_S <= now < end_s else "off"

    own = simulated(lambda now: "auto")
    best = min(run.waited for run in (simulated(lambda now: "off"), *(simulated(until(over_s + s)) for s in _LONGER_S)))
    nothing = own.came * _NOTHING_S
    about = {
        "record_rate": record_rate,
        "alone": alone,
        "operation_rate": spark.rate,
        "fixed_s": spark.fixed_s,
        "usual": usual,
        "in_burst": in_burst,
        "lasts_s": lasts_s,
        "prepare_s": prepare_s,
    }
    states = {name: at for at, name in own.states}
    return Case(
        seed, (own.waited + nothing) / (best + nothing), about, states, bool(own.detector.refusals.remembered())
    )


def main(count: int, first: int) -> None:
    """Decides cases, and lists those that cost at least a tenth more than the best choice."""
    worse = taken_back = 0
    for seed in range(first, first + count):
        case = decided(seed)
        taken_back += case.taken_back
        if case.more > 1.1:
            worse += 1
            about = ", ".join(f"{name} {value:,.4g}" for name, value in case.about.items())
            print(f"case {seed} cost {case.more:.2f} times the best choice: {about}; {case.states}", flush=True)
    print(f"{worse} of {count} cases cost more than 1.1 times the best choice; at most {count // 20} may")
    print(f"{taken_back} switches were taken back; none may be, because Spark does what is known of it")
    if taken_back or worse > count // 20:
        sys.exit(1)


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    main(numbers[0] if numbers else 200, numbers[1] if len(numbers) > 1 else 0)
