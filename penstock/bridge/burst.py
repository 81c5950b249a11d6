"""Burst detection: when a range of operators goes to Spark, and when it comes back (docs/papers.md: D2).

From DO (ICPP 2018), section 4.2. With L records waiting before the range, arriving at V a second, and micro-batches
gathered for T seconds, a record takes

    LatencyD = L / PD + t_dt                              as a record          (Eq. 4)
    LatencyO = T/2 + t_s + V*T / PO + t_ot                in a micro-batch     (Eq. 5)

so Spark answers sooner from this queue length on:

    L_switch = K * (V*T) + C * PD      K = PD / PO,  C = T/2 + t_s + t_ot - t_dt          (Eq. 6)
    L_up = (1 + delta) * L_switch      L_down = (1 - delta) * L_switch                    (Eq. 7)

The code says `record_rate` for PD, the speed of the *data stream* (record by record), and `operation_rate` for PO, that
of the *operation stream* (Spark). Read the other way round, the equations would hardly ever switch. t_s is the time to
schedule a micro-batch, and t_ot and t_dt are the times of transmission in the two streams.

Where we differ from the paper, and why:

- **PD is what the record tasks sustain**, which is what they process while records wait before them. Records per busy
  second would be several times as much where others hold them up: a burst would be answered late or never.
- **K is measured.** The paper sets it "empirically to 0.2", though by its own throughput figures it is 0.38. A wrong K
  switches when it cannot pay. (`BurstOptions.k` sets it by hand, to decide by Eq. 7 alone.)
- **PO is Spark's speed without its fixed cost**, which is t_s + t_ot and stands in C already (`cost.py` fits both).
- **A queue that others hold up is theirs.** L counts without what waits because a range further down takes no more: of
  several ranges with long queues, the last one whose queue is its own goes to Spark, and takes along what follows.
- **t_dt is in t_ot too.** What a range makes goes to the next tasks by the same channels in both paradigms, and what is
  measured as t_ot comes on top: it is the paper's t_ot - t_dt. So C is T/2 + t_s + t_ot with what is measured, and is
  never negative. (By the letter, with the paper's Table 2, L_switch is negative for every PD above 8,421/s: an empty
  queue would be a burst.)
- **The queue that there is goes to Spark too**, and Spark has to be made ready. Eq. 5 compares states that have lasted
  for ever. So beyond L > L_up, which is necessary, a switch must pay: Spark is quicker by a margin, its fixed cost at
  the longest interval included, and with the time to prepare and to switch it is through with the queue sooner.
- **L < L_down is not enough to come back.** In the operation stream the queue swings between 0 and V*T with every
  batch: the greatest L of the longest interval counts. And the record tasks must be able to bear V, or the burst is
  there again at once.
- **What the record tasks could do while Spark works is not known.** So the range comes back for a probe now and then,
  ever more rarely while these fail (`probes.py`).
- **L counts as it will be when Spark can answer.** L includes what comes beyond PD until then, if the queue is seen to
  grow as quickly: an old PD may be wrong. As nothing comes back while V > PD, L_up is then L_switch itself. With both,
  the delay has no peak at a switch that is higher than what micro-batches cost anyway.
- **A switch must have paid.** What Spark carries is measured (`switch_outcome.py`). When it is less than the record
  tasks would carry, the switch is taken back, and similar loads are refused for a while.
- **The first moments of a job are slow**, because its record tasks load and compile what they need. So a range does not
  switch in the first second of its work, and it stays in a paradigm for a multiple of what switching costs.

The table `RANGE` says how a range moves (docs/states.md draws it). The detector only decides. Its host observes, does
what the state says, and tells by `happened` what came of it.

It never reads a clock, never does I/O, and never lets a range move in a way that is not in the table.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple, get_args

from penstock.bridge.cost import (
    BatchCost,
    BatchSpeed,
    Calibration,
    MicroBatch,
    RecordSpeed,
    ShownSpeed,
    SustainedSpeed,
    interval,
)
from penstock.bridge.probes import Probes
from penstock.bridge.switch_outcome import ANSWERS_MIN, JUDGED_AFTER_S, Refusals, SwitchStory
from penstock.runtime.backoff import Backoff
from penstock.runtime.errors import WrongValue
from penstock.runtime.lifecycle import State, StateMachine, Table
from penstock.runtime.status import RangeFigures
from penstock.runtime.units import (
    Seconds,
    above_zero,
    choice,
    flag,
    number,
    number_above_zero,
    part_of_one,
)

Paradigm = Literal["record", "operation"]

Mode = Literal["auto", "off", "spark-only", "toggle"]
"""auto: as measured. off: never Spark. spark-only: Spark as soon as it is ready, and for good. toggle: there and back
every `toggle_s` whatever the load, to try the switch itself."""


class RangeState(State):
    """Where a range runs."""

    RECORD = "RECORD", "The range runs record by record."
    PREPARING = "PREPARING", "Spark is being made ready; the range still runs record by record."
    SWITCHING = "SWITCHING", "Its tasks are told to send their input to Spark; some still process it as records."
    OPERATION = "OPERATION", "Spark runs the range in micro-batches."
    RETURNING = (
        "RETURNING",
        "The range comes back: what Spark was given is answered first, and later records wait for the record tasks.",
    )


Event = Literal["burst", "ready", "switched", "calm", "returned", "prepare failed", "bridge lost"]
"""`burst` and `calm` are the detector's own, but for a `calm` in SWITCHING; the others come from its host."""

_S = RangeState

RANGE: Table[RangeState, Event] = Table(
    RangeState,
    RangeState.RECORD,
    {
        (_S.RECORD, "burst"): _S.PREPARING,
        (_S.RECORD, "ready"): _S.RECORD,  # it was prepared ahead
        (_S.RECORD, "prepare failed"): _S.RECORD,  # the same, in vain
        (_S.RECORD, "bridge lost"): _S.RECORD,
        (_S.PREPARING, "ready"): _S.SWITCHING,
        (_S.PREPARING, "calm"): _S.RECORD,  # over before Spark was ready
        (_S.PREPARING, "prepare failed"): _S.RECORD,
        (_S.PREPARING, "bridge lost"): _S.RECORD,
        (_S.SWITCHING, "switched"): _S.OPERATION,
        (_S.SWITCHING, "calm"): _S.RECORD,  # a range upstream has taken its operators along
        (_S.SWITCHING, "bridge lost"): _S.RETURNING,  # something may have gone there
        (_S.OPERATION, "calm"): _S.RETURNING,
        (_S.OPERATION, "bridge lost"): _S.RETURNING,
        (_S.RETURNING, "returned"): _S.RECORD,
        (_S.RETURNING, "bridge lost"): _S.RETURNING,
    },
)

WANTED: dict[RangeState, Paradigm] = {
    _S.RECORD: "record",
    _S.PREPARING: "operation",
    _S.SWITCHING: "operation",
    _S.OPERATION: "operation",
    _S.RETURNING: "record",
}

# The switches of a range that its status tells of.
_SWITCHES_KEPT = 10

# A Spark that was ready within so many seconds of a burst found the load of that time.
_SOON_READY_S = 1.0

# Times of the way to the next tasks of which the median counts: one second or two of observations.
_WAYS_KEPT = 9

# After so much time record tasks have loaded and compiled what they need.
_WARM_S = 1.0

# How much more than one micro-batch that gathers and one that is under way may wait when Spark has caught up.
_CAUGHT_UP = 1.5

# A queue that has not become shorter by this share in so many seconds is not being worked off by Spark.
_CATCHES_UP_S = 6.0
_SHORTER = 0.9
_ANSWERS_SEEN = 3  # within this time, or the time is longer

# Over so long the arrival rate is smoothed: one full buffer must not be taken for a burst, nor a burst be seen late.
_SMOOTHING_S = 1.0

# Over so long the growth of a queue is taken: over two looks of the scheduler, and a little more.
_GROWTH_S = 0.6

# Buffers of a source that were full whenever they were looked at for so long are not full by a moment's pause.
_FULL_S = 2.0

# The time for which the record tasks would work on the least queue that is called a burst.
_LEAST_BURST_S = 0.2

# From this part of the deciding queue length on, Spark is made ready.
_NEAR = 0.7

# A range stays in a paradigm for so many seconds at least, for the longest interval of micro-batches, and for so many
# times what the switch there and back takes. So at most 1/7 of the time is lost on switching.
_DWELL_MIN_S = 2.0
_DWELL_COSTS = 3.0

# The time in Spark until the record tasks are tried again, which doubles with each try that fails, and its longest.
_PROBE_FIRST_S, _PROBE_MAX_S = 10.0, 600.0

FAILURES: frozenset[Event] = frozenset({"prepare failed", "bridge lost"})


class Timing(NamedTuple):
    """The times of a detector, in seconds: the first and the longest wait after Spark has failed, which doubles with
    each failure, and the shortest and the longest time for which a micro-batch gathers records."""

    backoff_first_s: float = 10.0
    backoff_max_s: float = 600.0
    interval_min_s: float = 0.2
    interval_max_s: float = 2.0


@dataclass(frozen=True)
class BurstOptions:
    """Says when ranges of a job switch to Spark and back. Defaults are in parentheses.

    Durations are in seconds, or timedeltas. A *paradigm* is one of the two ways to process a range: in record tasks, or
    in Spark. docs/papers.md names the equations.

    `mode` ("auto"): "auto" switches as measured, and is what `dual="on"` means. "off" never uses Spark. "spark-only"
    uses Spark as soon as it is ready, and stays there. "toggle" changes sides every `toggle_s` whatever the load.

    When a switch pays:

    `delta` (0.2): the hysteresis of Eq. 7. A range switches to Spark above (1 + delta) times the queue length that
    decides, and back below (1 - delta) times this length. It is above 0 and below 1.
    `k` (None): the K of Eq. 6, above 0. With None it is measured. With a number (the paper takes 0.2) only the queue
    length decides, and nobody asks whether the switch pays.
    `margin` (0.2): the part by which a paradigm must be quicker than the other one, 0 or more. Below a tenth, noise
    decides.
    `range_below` (0): a range ends at the operator that is handed fewer than this many records for each record that the
    range receives (the 1 of Eq. 8). With 0, a range is as long as its operators can run in Spark.

    When Spark is made ready:

    `ahead` (False): True makes Spark ready when the job starts. False waits until the load is near what decides. With
    `dual="on"` instead of options, it is True. The modes "spark-only" and "toggle" make Spark ready when the job
    starts, whatever `ahead` is.

    Times:

    `toggle_s` (10): the time between two switches of the mode "toggle", above 0.
    `epoch_s` (1): the time between epochs, to which micro-batches are aligned, or None without epochs. `run` replaces
    this number with its own `epoch_interval_s`.
    `timing` (Timing(backoff_first_s=10.0, backoff_max_s=600.0, interval_min_s=0.2, interval_max_s=2.0)): times that
    only tests change.
    """

    mode: Mode = "auto"
    delta: float = 0.2
    k: float | None = None
    margin: float = 0.2
    ahead: bool = False
    toggle_s: Seconds = Seconds(10.0, above=True)
    epoch_s: float | None = 1.0
    range_below: float = 0.0
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        mode: object = self.mode
        choice(mode, "mode", get_args(Mode), "; 'auto' is what dual='on' means" if mode == "on" else "")
        flag(self.ahead, "ahead")
        part_of_one(self.delta, "delta")
        for name in ("margin", "range_below"):
            number(getattr(self, name), name)
        if self.k is not None:
            number_above_zero(self.k, "k", " (the paper takes 0.2), or None: as measured")
        if self.epoch_s is not None:
            epoch_s = above_zero(self.epoch_s, "epoch_s", ", or None for a job without epochs")
            if epoch_s == math.inf:
                raise WrongValue("epoch_s=inf; it must be finite, or None for a job without epochs")
            object.__setattr__(self, "epoch_s", epoch_s)  # a timedelta becomes seconds


@dataclass(frozen=True)
class Observation:
    """The work of a range since the last observation. The first one only says where counting begins."""

    time_s: float  # of any clock that does not go back
    queue: float  # L: records before the range, with those that its source knows to be due but has not read
    arrivals: float  # records that joined the queue
    processed: float = 0.0  # records that the record tasks took out of it
    busy_s: float = 0.0  # how long these were busy; with several tasks, on average
    batches: tuple[MicroBatch, ...] = ()  # that Spark finished
    held_up: float = 0.0  # of the queue: what waits only because a range further down takes no more
    way_s: float | None = None  # for how long results that wait for nobody are on their way to the next tasks
    answered: float = 0.0  # records that Spark has answered
    full: bool = False  # the buffers of its source are full: more records wait than `queue` says


class Figures(RangeFigures, frozen=True):
    """The figures behind a decision, and their consequences."""

    @property
    def outgrown(self) -> bool:
        """Returns whether more comes than the record tasks sustain, so that more and more records wait. The fewest that
        count are those of `_LEAST_BURST_S`: fewer wait whenever a task was not scheduled for a moment. A source whose
        buffers stay full shows neither how much comes nor how much waits, because it takes only as much as the tasks
        do."""
        if self.full:
            return True
        pd = self.record_rate
        return pd is not None and self.arrival_rate > pd and self.growth > 0 and self.own > _LEAST_BURST_S * pd

    @property
    def burst(self) -> bool:
        """Returns whether there is a burst, even if nothing can be done about it: more waits than Spark would answer
        sooner, or more comes than the record tasks sustain."""
        return self.outgrown or (self.queue_up is not None and self.soon > self.queue_up)

    @property
    def soon(self) -> float:
        """Returns the part of the queue that will be the range's own when Spark could give its first answer."""
        return self.own if self.queue_soon is None else self.queue_soon

    @property
    def waiting(self) -> str:
        """Returns how many records wait, in words."""
        soon = f", {self.soon:,.0f} when Spark could answer" if self.soon > self.own else ""
        return f"{self.own:,.0f} records wait{soon}"

    @property
    def own(self) -> float:
        """Returns the range's own part of the queue."""
        return max(0.0, self.queue - self.held_up)


@dataclass(frozen=True)
class Decision:
    """The next action of the host, and the reason."""

    wanted: Paradigm
    state: RangeState
    prepare: bool  # make Spark ready, if that is not begun: it is needed, or nearly. Once begun it ends by an event
    interval_s: float  # how long micro-batches should gather
    reason: str
    warning: str | None  # to be told to the user; each once
    figures: Figures
    note: str | None = None  # a switch and what it did; each once

    @property
    def burst(self) -> bool:
        """Returns whether there is a burst at the range, or the range is to be in Spark."""
        return self.wanted == "operation" or self.figures.burst


def switch_length(
    arrival_rate: float,
    record_rate: float,
    operation_rate: float,
    interval_s: float,
    fixed_s: float,
    k: float | None = None,
) -> float:
    """Returns L_switch, the queue length from which on Spark answers sooner (Eq. 6). `fixed_s`: by how much longer than
    as a record a record in a micro-batch is under way whatever waits, the paper's t_s + t_ot - t_dt. `k`: K by hand."""
    k = record_rate / operation_rate if k is None else k
    return k * (arrival_rate * interval_s) + (interval_s / 2 + fixed_s) * record_rate


def thresholds(length: float, delta: float) -> tuple[float, float]:
    """Returns (L_up, L_down), around L_switch (Eq. 7)."""
    return (1 + delta) * length, (1 - delta) * length


@dataclass
class _Pending:
    """The arrivals of observations that came at one time. `queue`: the records that waited then."""

    since: float
    queue: float
    arrivals: float = 0.0
    processed: float = 0.0
    busy_s: float = 0.0


@dataclass
class _Failures:
    """The failures since Spark last served a burst to its end."""

    backoff: Backoff
    until: float = -math.inf  # no try before
    last: str = ""
    told: bool = False
    warning: str | None = None  # to go out with the next decision


class BurstDetector:
    """Decides for one range; see the module's docstring."""

    def __init__(self, options: BurstOptions | None = None, calibration: Calibration | None = None) -> None:
        self.options = options or BurstOptions()
        self.mode: Mode = self.options.mode  # may be set while the job runs
        self._life = StateMachine(RANGE, "a range of operators")
        self.since_s: float | None = None  # when the state began; None: before the first observation
        self.prepared = False  # Spark is ready for this range
        self._failures = self._no_failures()
        self._pending: _Pending | None = None
        self._arrival_rate: float | None = None
        self._queues: deque[tuple[float, float]] = deque()  # (time, L) of the last interval_max_s
        self._mosts: deque[tuple[float, float]] = deque()  # in Spark: (time, the most of L in interval_max_s)
        self._answered_at: deque[float] = deque(maxlen=_ANSWERS_SEEN)  # when Spark has answered, lately
        self._phase_s = 0.0  # when the range came to run in the paradigm that it is in
        self._stay_until = -math.inf
        self._worked = False  # the record tasks have processed records
        self._probes = Probes(_PROBE_FIRST_S, _PROBE_MAX_S)
        self.switches: deque[SwitchStory] = deque(maxlen=_SWITCHES_KEPT)
        self.refusals = Refusals()
        self._figures_now = Figures(0.0, 0.0)
        self._seen: Observation | None = None  # the last one
        self._full_since: float | None = None  # since when the buffers of the source have been full
        self._reason = ""  # of the last burst
        self._story: SwitchStory | None = None  # of the last switch, while it is not judged
        self._notes: deque[str] = deque()
        self._gathers_s: float | None = None  # the interval that was told last
        self._prepare_since: float | None = None  # when the host was told to; None: it was not, or it is done
        self._guess: tuple[BatchCost, float] | None = None  # what Spark costs at least, and its cores for each task
        self.calibrate(calibration or Calibration())

    @property
    def state(self) -> RangeState:
        """Where the range runs."""
        return self._life.state

    @property
    def story(self) -> tuple[str, ...]:
        """Returns the last transitions, oldest first."""
        return self._life.story()

    def calibrate(self, calibration: Calibration) -> None:
        """Takes this calibration from now on, until there are measurements; earlier measurements are forgotten."""
        self._records = RecordSpeed(calibration.record_rate)
        self._sustained = SustainedSpeed()
        self._shown = ShownSpeed()
        self._batches = BatchSpeed(calibration.batch)
        self._ways = BatchSpeed()
        self._record_ways: deque[float] = deque(maxlen=_WAYS_KEPT)
        self._prepare_s = calibration.prepare_s
        self._switch_s = self._return_s = calibration.switch_s

    def rescaled(self) -> None:
        """Forgets the speed of the record tasks, because there are more or fewer of them now."""
        self._records, self._sustained, self._shown = RecordSpeed(), SustainedSpeed(), ShownSpeed()

    def tried(self, cost: BatchCost) -> None:
        """Takes this cost of Spark's micro-batches until there are measurements. Measurements of the record tasks
        remain."""
        self._guess = None
        self._batches = BatchSpeed(cost)

    def untried(self, guess: BatchCost, cores_a_task: float) -> None:
        """Takes a guess of the cost of Spark's micro-batches until there are measurements, because the range could not
        be tried. Spark's Python workers run it then, with the functions of the record tasks: a core of Spark is not
        quicker than a record task that nothing else holds up. Spark has `cores_a_task` cores for each of these."""
        if not self._batches.measured:
            self._guess = guess, cores_a_task

    @property
    def last_failure(self) -> str:
        """Returns the failure that has kept the range from Spark since Spark last served a burst to its end; empty:
        nothing has."""
        return self._failures.last

    @property
    def has_measured_spark(self) -> bool:
        """Whether a micro-batch of the range has been measured. Until then Spark's figures are those of a trial, or
        assumed."""
        return self._batches.measured

    @property
    def awaits_preparation(self) -> bool:
        """Whether the host is to make Spark ready and has not reported the outcome."""
        return self._prepare_since is not None

    @property
    def dwell_s(self) -> float:
        """Returns how long the range stays in a paradigm at least: long enough that it does not spend most of its time
        on switching, and that it is watched for a whole interval before it is called calm."""
        return max(_DWELL_MIN_S, self.options.timing.interval_max_s, _DWELL_COSTS * (self._switch_s + self._return_s))

    def observe(self, seen: Observation) -> Decision:
        """Takes the work of the range, and decides."""
        self._measure(seen)
        self._seen = seen
        figures = self._figures(seen)
        self._figures_now = figures
        self._watch_story(seen, figures)
        event, reason = self._judge(seen.time_s, figures)
        if event is not None:
            self._move(event, seen.time_s, reason)
            if event == "burst" and self.prepared:
                self._move("ready", seen.time_s, "it was prepared ahead")
        prepare = self._prepare(seen.time_s, figures)
        if prepare and self._prepare_since is None:
            self._prepare_since = seen.time_s
        self._gathers_s = self._interval(figures, backlog=True)
        warning, self._failures.warning = self._failures.warning, None
        return Decision(
            wanted=WANTED[self.state],
            state=self.state,
            prepare=prepare,
            interval_s=self._gathers_s,
            reason=reason,
            warning=warning,
            figures=figures,
            note=self._notes.popleft() if self._notes else None,
        )

    def happened(self, event: Event, time_s: float, why: str = "") -> RangeState:
        """Notes that the host has carried out a decision, or could not. Returns the new state.

        When Spark is ready, a range that was waiting for it is judged once more before it switches: its trial in Spark
        may have measured what was only assumed when the burst was seen."""
        if event == "ready" and self.state == "PREPARING" and self._seen is not None:
            judged, reason = self._judge(time_s, self._figures(self._seen))
            if judged == "calm":
                self._move(judged, time_s, reason)
        self._move(event, time_s, why)
        return self.state

    # --- measuring -------------------------------------------------------------------------------------------------

    def _measure(self, seen: Observation) -> None:
        self._batches.add(seen.batches)
        self._ways.add(MicroBatch(one.records, one.way_s) for one in seen.batches if one.way_s is not None)
        if seen.way_s is not None:
            self._record_ways.append(seen.way_s)
        if not seen.full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = seen.time_s
        if self._pending is None:
            self._pending = _Pending(seen.time_s, seen.queue)
            self._phase_s = self.since_s = seen.time_s
        else:
            pending = self._pending
            passed = seen.time_s - pending.since
            if passed < 0:
                raise ValueError(f"an observation of {seen.time_s} s after one of {pending.since} s: time went back")
            pending.arrivals += seen.arrivals
            pending.processed += seen.processed
            if seen.processed > 0 and not self._worked:
                # The first records of a job load and compile what they need, which says nothing of the speed later.
                self._worked = True
                self._stay_until = seen.time_s + _WARM_S
            pending.busy_s += seen.busy_s
            if passed > 0:
                rate = pending.arrivals / passed
                old = rate if self._arrival_rate is None else self._arrival_rate
                self._arrival_rate = rate + (old - rate) * math.exp(-passed / _SMOOTHING_S)
                self._records.add(pending.processed, pending.busy_s, passed)
                if self.state in ("RECORD", "PREPARING"):  # elsewhere, records wait for Spark or for a switch
                    self._sustained.add(pending.processed, pending.queue, passed, pending.busy_s)
                    self._shown.add(pending.processed, passed)
                self._pending = _Pending(seen.time_s, seen.queue)
        if seen.batches or seen.answered:
            self._answered_at.append(seen.time_s)
        self._queues.append((seen.time_s, max(0.0, seen.queue - seen.held_up)))
        while self._queues[0][0] < seen.time_s - self.options.timing.interval_max_s:
            self._queues.popleft()

    def _figures(self, seen: Observation) -> Figures:
        arrival_rate = self._arrival_rate or 0.0
        self._guess_batches()
        alone, cost = self._records.rate, self._batches.cost
        record_transmit_s = median(self._record_ways) if self._record_ways else None
        record_rate = alone if self._sustained.rate is None else self._sustained.rate
        figures = Figures(
            seen.queue,
            arrival_rate,
            seen.held_up,
            record_rate,
            alone,
            self._shown.rate,
            record_transmit_s=record_transmit_s,
            growth=self._growth(),
            full=self._full_since is not None and seen.time_s - self._full_since >= _FULL_S,
        )
        if cost is None:
            return figures
        figures = figures.changed(
            operation_rate=cost.rate,
            operation_capacity=cost.capacity(self.options.timing.interval_max_s),
            fixed_s=cost.fixed_s,
            prepare_s=self._prepare_s,
            switch_s=self._switch_s,
            return_s=self._return_s,
        )
        if (way := self._ways.cost) is not None:
            transmit_s = min(way.fixed_s, cost.fixed_s)
            figures = figures.changed(
                schedule_s=cost.fixed_s - transmit_s, transmit_s=transmit_s, transmit_rate=way.rate
            )
        seconds = self._interval(figures)
        in_s = seen.time_s - self._phase_s  # in this paradigm
        if record_rate is None:
            return figures.changed(interval_s=seconds)
        length = switch_length(
            arrival_rate,
            record_rate,
            cost.rate,
            seconds,
            cost.fixed_s,
            k=self.options.k,
        )
        up, down = thresholds(length, self.options.delta)
        figures = figures.changed(interval_s=seconds, queue_switch=length, queue_up=up, queue_down=down)
        growth = min(arrival_rate - record_rate, figures.growth)
        # The speeds of the first moments in a paradigm are not known well enough to look ahead.
        if self.options.k is not None or growth <= 0 or in_s < max(_DWELL_MIN_S, self.options.timing.interval_max_s):
            return figures
        return figures.changed(queue_up=length, queue_soon=figures.own + growth * (self._switch_s + cost.fixed_s))

    def _growth(self) -> float:
        """Returns by how many records/s the range's own queue has grown in the last moments."""
        now, queue = self._queues[-1]
        then, before = next((at, own) for at, own in self._queues if at >= now - _GROWTH_S)
        return (queue - before) / (now - then) if now > then else 0.0

    def _guess_batches(self) -> None:
        """The cost of Spark's micro-batches by the present speed of the record tasks, if nothing better is known."""
        if self._guess is None or self._batches.measured:
            return
        guess, cores_a_task = self._guess
        if (alone := self._sustained.alone or self._records.rate) is not None:
            self._batches = BatchSpeed(BatchCost(guess.fixed_s, min(guess.rate, alone * cores_a_task)))

    def _interval(self, figures: Figures, *, backlog: bool = False) -> float:
        """Returns T for these arrivals. Once Spark is at work, they include what Spark has to catch up on."""
        cost = None
        if figures.operation_rate is not None and figures.fixed_s is not None:
            cost = BatchCost(figures.fixed_s, figures.operation_rate)
        late = 0.0
        if backlog and self.state == "OPERATION" and cost is not None and self._gathers_s is not None:
            # What gathers in the interval as it is, and what is under way, is not late.
            gathered = figures.arrival_rate * self._gathers_s
            late = max(0.0, figures.queue - gathered - figures.arrival_rate * cost.seconds(gathered))
        return interval(
            figures.arrival_rate,
            cost,
            backlog=late,
            shortest_s=self.options.timing.interval_min_s,
            longest_s=self.options.timing.interval_max_s,
            epoch_s=self.options.epoch_s,
        )

    # --- judging ---------------------------------------------------------------------------------------------------

    def _judge(self, time_s: float, f: Figures) -> tuple[Event | None, str]:
        """Returns the event that follows from the figures, if any, and the reason for it or against it."""
        assert self.since_s is not None
        if self.state in ("SWITCHING", "RETURNING"):
            doing = self.state.sentence
            return None, f"{doing[0].lower()}{doing[1:-1]}, for {time_s - self.since_s:.1f} s now"
        if self.mode == "off":
            return (None, "the bridge is off") if self.state == "RECORD" else ("calm", "the bridge was turned off")
        if self.state == "RECORD":
            self._probes.in_records(time_s)
            event, reason = self._wants_spark(time_s, f)
            if event is not None and time_s < self._failures.until:
                wait = self._failures.until - time_s
                return None, f"not switched: {self._failures.last}; next try in {wait:.0f} s"
            return event, reason
        return self._wants_records(time_s, f)

    def _wants_spark(self, time_s: float, f: Figures) -> tuple[Event | None, str]:
        if self.mode == "spark-only":
            return "burst", "asked for: Spark only"
        if self.mode == "toggle":
            in_phase = time_s - self._phase_s
            if in_phase < self.options.toggle_s:
                return None, f"asked for: to and fro every {self.options.toggle_s:g} s"
            return "burst", f"asked for: Spark's turn after {in_phase:.1f} s"
        if f.queue_up is None:
            return None, self._unknown(f)
        if f.soon <= f.queue_up and not f.full:
            if f.queue > f.queue_up:
                return None, (
                    f"not switched: of {f.queue:,.0f} waiting records {f.held_up:,.0f} wait because operators further "
                    "down take no more"
                )
            if f.outgrown:
                return None, (
                    f"not switched: {f.arrival_rate:,.0f} records come a second, and the record tasks process "
                    f"{f.record_rate:,.0f}, but {f.waiting}, and Spark answers sooner only above {f.queue_up:,.0f}"
                )
            return None, f"calm: {f.waiting}; Spark answers sooner above {f.queue_up:,.0f}"
        refused = self._slower(f, self.options.margin) or self._too_late(time_s, f)
        if refused is None and self.options.k is None:
            refused = self.refusals.refused(f.arrival_rate, f.record_rate or 0.0, time_s)
        if refused is not None:
            return None, f"not switched: {refused}"
        if time_s < self._stay_until:
            return (
                None,
                f"not switched yet: the range processes records only now, and stays {self._stay_until - time_s:.1f} s "
                "more",
            )
        return "burst", (
            f"burst: {f.waiting}, above {f.queue_up:,.0f}, and {f.arrival_rate:,.0f} come a second; "
            f"Spark processes {f.operation_capacity:,.0f} records/s, the record tasks {f.record_rate:,.0f}"
        )

    def _wants_records(self, time_s: float, f: Figures) -> tuple[Event | None, str]:
        """In PREPARING and OPERATION."""
        if self.mode == "spark-only":
            return None, "asked for: Spark only"
        preparing = self.state == "PREPARING"
        if self.mode == "toggle":
            in_phase = time_s - self._phase_s
            if preparing or in_phase < self.options.toggle_s:
                return None, f"asked for: to and fro every {self.options.toggle_s:g} s"
            return "calm", f"asked for: the record tasks' turn after {in_phase:.1f} s"
        if f.queue_down is None or f.record_rate is None:
            return "calm", self._unknown(f)  # only a mode that asks for no figures, left since, leads here
        slower = self._slower(f, 0.0)
        if preparing:
            if slower is not None:
                return "calm", f"not switched: {slower}"
            if f.soon < f.queue_down and not f.full:
                return "calm", f"over before Spark was ready: {f.waiting}, under {f.queue_down:,.0f}"
            return None, f"burst: {f.waiting}; Spark is being made ready"
        if time_s < self._stay_until:
            return None, f"in Spark only now, and stays {self._stay_until - time_s:.1f} s more"
        story = self._story
        if slower is not None and not self._too_early(story):
            return "calm", self._taken_back(time_s, f, f"Spark does not pay any more: {slower}")
        if story is not None and self._does_not_pay(story, f):
            story.taken_back = True
            return "calm", self._taken_back(time_s, f, f"taken back: {story.text}")
        most = max(queue for _, queue in self._queues)
        burst = None
        if most >= f.queue_down:
            burst = f"burst: up to {most:,.0f} records wait; the record tasks answer sooner under {f.queue_down:,.0f}"
        elif f.arrival_rate * (1 + self.options.margin) > f.record_rate:
            burst = (
                f"burst: {f.arrival_rate:,.0f} records come a second, which the record tasks, with "
                f"{f.record_rate:,.0f} records/s, would not bear with {self.options.margin:.0%} to spare"
            )
        if burst is not None:
            return self._wants_to_probe(time_s, f, most, burst)
        return "calm", (
            f"over: at most {most:,.0f} records wait, under {f.queue_down:,.0f}, and {f.arrival_rate:,.0f} come a "
            f"second, of the {f.record_rate:,.0f} that the record tasks process"
        )

    def _wants_to_probe(self, time_s: float, f: Figures, most: float, burst: str) -> tuple[Event | None, str]:
        """In OPERATION, when by the figures the range should stay there. `most`: records that waited lately."""
        in_spark_s = time_s - self._phase_s
        if self._probes.due_in(in_spark_s, f.arrival_rate, f.record_rate_shown) > 0:
            return None, burst
        # More waits only while Spark catches up, or because micro-batches take longer than the figures say.
        if most > _CAUGHT_UP * self._in_batches(f) and self._catches_up(time_s, most):
            return None, burst
        self._probes.begin()
        return "calm", f"a probe of the record tasks, after {in_spark_s:.1f} s in Spark; by the last figures: {burst}"

    def _catches_up(self, time_s: float, most: float) -> bool:
        """Whether the queue before Spark has become shorter in the last seconds, in which there were some answers, or
        is not known yet to stay. `most`: records that waited lately."""
        self._mosts.append((time_s, most))
        if len(self._answered_at) < _ANSWERS_SEEN:
            return True
        since = min(time_s - _CATCHES_UP_S, self._answered_at[0])
        while len(self._mosts) > 1 and self._mosts[1][0] <= since:
            self._mosts.popleft()
        then, before = self._mosts[0]
        return then > since or most < _SHORTER * before

    def _in_batches(self, f: Figures) -> float:
        """Returns how many records wait for Spark although nothing is late: one micro-batch gathers, and one is under
        way."""
        assert f.operation_rate is not None
        assert f.fixed_s is not None
        assert f.interval_s is not None
        return f.arrival_rate * (f.interval_s + f.fixed_s + f.arrival_rate * f.interval_s / f.operation_rate)

    def _too_early(self, story: SwitchStory | None) -> bool:
        """Whether too few micro-batches have been answered to say that Spark is slow: the first ones may have waited
        for something that the next ones will not."""
        return story is not None and story.answers < ANSWERS_MIN and story.lasted_s < JUDGED_AFTER_S

    def _taken_back(self, time_s: float, f: Figures, why: str) -> str:
        """Notes that Spark does not pay at this load, and returns why."""
        if self._story is not None:
            self._story.taken_back = True
        self.refusals.did_not_pay(f.arrival_rate, f.record_rate or 0.0, time_s, why)
        return why

    def _does_not_pay(self, story: SwitchStory, f: Figures) -> bool:
        return self.options.k is None and story.to == "operation" and story.does_not_pay(self._in_batches(f))

    def _unknown(self, f: Figures) -> str:
        missing = [
            what
            for what, known in (("the record tasks'", f.record_rate), ("Spark's", f.operation_rate))
            if known is None
        ]
        return f"calibrate first: {' and '.join(missing)} speed on this range is not known"

    def _slower(self, f: Figures, margin: float) -> str | None:
        """Returns why Spark is not quicker than the record tasks by the margin. Returns None if it is, or if the
        question does not count."""
        if self.options.k is not None:
            return None
        assert f.operation_capacity is not None
        assert f.record_rate is not None
        if f.operation_capacity > (1 + margin) * f.record_rate:
            return None
        more = f", and must be {margin:.0%} above them" if f.operation_capacity > f.record_rate else ""
        return f"Spark would process {f.operation_capacity:,.0f} records/s, the record tasks {f.record_rate:,.0f}{more}"

    def _too_late(self, time_s: float, f: Figures) -> str | None:
        """The reason why the record tasks are through with the queue before Spark would be, or None if they are not, or
        if the mode does not count this.

        The record tasks work off L at PD - V. Spark is ready after `prepare_s`, during which the record tasks continue;
        nobody works while the range switches; then the queue falls at Spark's capacity - V. As Spark is the quicker
        one, there is a queue length from which on it is sooner: more waiting never speaks for the record tasks.
        """
        if self.options.k is not None:
            return None
        assert f.operation_capacity is not None
        assert f.record_rate is not None
        assert f.fixed_s is not None
        assert f.interval_s is not None
        spare = f.record_rate - f.arrival_rate
        if spare <= 0 or f.full:
            return None  # they never are
        records_s = f.own / spare
        begun = time_s if self._prepare_since is None else self._prepare_since
        ready_s = 0.0 if self.prepared else max(0.0, self._prepare_s - (time_s - begun))
        left = max(0.0, f.own - spare * ready_s) + f.arrival_rate * self._switch_s
        working_s = left / (f.operation_capacity - f.arrival_rate) + f.interval_s + f.fixed_s
        spark_s = ready_s + self._switch_s + working_s
        if spark_s < records_s:
            return None
        return (
            f"the record tasks are through with {f.own:,.0f} waiting records in {records_s:.1f} s, "
            f"Spark would be in {spark_s:.1f} s, {ready_s + self._switch_s:.1f} s of them to prepare and to switch"
        )

    def _prepare(self, time_s: float, f: Figures) -> bool:
        if self.state != "RECORD":
            return self.state == "PREPARING"
        if self.mode == "off" or time_s < self._failures.until or self.prepared:
            return False
        if self.mode != "auto" or self.options.ahead:
            return True
        if f.record_rate is None:
            return False
        loaded = f.arrival_rate > _NEAR * f.record_rate
        if f.queue_up is None:
            return loaded  # to calibrate in time
        return (loaded or f.full or f.own > _NEAR * f.queue_up) and self._slower(f, self.options.margin) is None

    # --- switches and their outcomes -------------------------------------------------------------------------------

    def _begin_story(self, to: Paradigm, time_s: float, reason: str) -> None:
        """The range begins to switch."""
        self._end_story()
        f = self._figures_now
        self._story = SwitchStory(time_s, to, reason, f.arrival_rate, f.own, f.record_rate or 0.0, self.options.margin)
        self.switches.append(self._story)

    def _switch_reason(self, prepared_s: float) -> str:
        """Returns why the range goes to Spark. `prepared_s`: for how long Spark was made ready since the burst was
        seen, in which the load may have changed."""
        f = self._figures_now
        if prepared_s < _SOON_READY_S:
            return self._reason
        return (
            f"{self._reason}; Spark was ready {prepared_s:.0f} s later: {f.waiting}, and {f.arrival_rate:,.0f} come a "
            "second"
        )

    def _watch_story(self, seen: Observation, f: Figures) -> None:
        if self._story is not None:
            self._story.observe(seen.time_s, f.own, seen.arrivals, seen.batches, seen.answered)
            if self._story.to == "record" and self.state == "RECORD" and self._story.lasted_s >= JUDGED_AFTER_S:
                self._end_story()

    def _end_story(self) -> None:
        """Enough has been seen of the last switch."""
        story, self._story = self._story, None
        if story is None:
            return
        if story.to == "operation" and not story.taken_back and story.lasted_s >= JUDGED_AFTER_S:
            self.refusals.paid()
        self._notes.append(story.text)

    # --- moving ----------------------------------------------------------------------------------------------------

    def _move(self, event: Event, time_s: float, why: str) -> None:
        before = self.state
        self._life.move(event, f"{time_s:.3f} s" + (f": {why}" if why else ""))
        took = 0.0 if self.since_s is None else time_s - self.since_s
        if event == "burst":
            self._probes.burst()
            self._reason = why
        elif event == "ready":
            self.prepared = True
            if self._prepare_since is not None:
                self._prepare_s = time_s - self._prepare_since
            self._prepare_since = None
        elif event in FAILURES:
            self._failed(event, time_s, why)
        elif event == "switched":
            self._switch_s = took
        elif event == "returned":
            self._return_s = took
        elif event == "calm" and before == "OPERATION":
            self._failures = self._no_failures()  # Spark has served a burst to its end
        if self.state is not before:
            self.since_s = time_s
            if self.state == "SWITCHING":
                self._begin_story("operation", time_s, self._switch_reason(took))
            elif self.state == "RETURNING":
                self._begin_story("record", time_s, why)
            elif before == "SWITCHING" and self.state == "RECORD" and self._story is not None:
                self.switches.remove(self._story)  # it did not switch: a range before it took its operators along
                self._story = None
        if event in ("switched", "returned"):
            self._phase_s = time_s
            self._stay_until = time_s + self.dwell_s
            self._queues.clear()  # those of the other paradigm
            self._mosts.clear()
            self._answered_at.clear()
            if self._story is not None:
                self._story.switched_s = time_s - self._story.at_s
        if event == "returned" and self._guess is not None:
            # The range may have been slow everywhere, and not only in Spark. If it was Spark, the load is refused.
            self._batches = BatchSpeed(self._guess[0])
        if event == "returned" and self._probes.returned(time_s):
            self._stay_until = time_s  # it goes back as soon as it is seen that the record tasks are still too slow
            hoped = max(self._shown.rate, (1 + self.options.margin) * (self._arrival_rate or 0.0))
            self._records, self._sustained = RecordSpeed(hoped or None), SustainedSpeed()

    def _no_failures(self) -> _Failures:
        return _Failures(Backoff(self.options.timing.backoff_first_s, self.options.timing.backoff_max_s))

    def _failed(self, event: Event, time_s: float, why: str) -> None:
        failures = self._failures
        self.prepared = False
        self._prepare_since = None
        wait = failures.backoff.failed()
        failures.until = time_s + wait
        what = "Spark could not be made ready" if event == "prepare failed" else "the range does not use Spark for now"
        failures.last = what + (f" ({why})" if why else "")
        if not failures.told:
            failures.told = True
            failures.warning = f"{failures.last}; the range runs record by record, next try in {wait:.0f} s"
