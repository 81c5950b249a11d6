"""What a switch between the paradigms is predicted to do, what it did, and for how long one that did not pay is
remembered (docs/papers.md: D2).

The model is that of Eq. 1 to 3 of the paper (DO, ICPP 2018, section 2.1), in which a record takes

    t_D = t_out + t_proc + t_trans                         in the data stream (Eq. 1)
    t_O = t_out + t_wait + t_schedule + t_proc + t_trans   in the operation stream (Eq. 2 and 3)

Results go to the next tasks by the same channels in both paradigms, and a record on this way has left the range. So
t_trans is here what is measured as such, the way to Spark and back, and 0 in the data stream.

The paper compares states that have lasted for ever. Here t_out, the time before the range, follows a queue that exists:
as records it changes by V - PD each second; in Spark by V, while the range switches, and then by V less what Spark can
carry. The other terms are what waits in the range without being late: V * t in either case. By Little's law, the mean
latency over some time is the integral of the queue divided by the number of records.

- A `Forecast` has both latencies for the time after a switch, and says from when on the switch has paid.
- A `SwitchStory` takes the records that come, measures how long they wait, and computes with the same model how long
  they would have waited in the other paradigm. So it compares the paradigms under the load that really came.
- `Refusals` remembers the loads at which a switch did not pay. At a lower load it would pay even less, because Spark's
  fixed cost weighs more, unless the record tasks have become slower. The memory decays: a load is refused for
  `FIRST_S`, for twice as long when a switch did not pay there again, up to `MOST_S`, and is forgotten when it has not
  been refused for as long as it was.

Nothing here reads a clock. A verdict must never rest on less than the time after which the forecast says that the
switch has paid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from penstock.bridge.cost import BatchCost, MicroBatch
from penstock.runtime.backoff import Backoff

# How far a forecast looks ahead, in steps of STEP_S.
HORIZON_S = 60.0
STEP_S = 0.25

# A switch is judged after this time, and not before the forecast says that it has paid, by a factor.
JUDGED_AFTER_S = 10.0
PATIENCE = 1.5

# ... and after so many micro-batches: what is under way has left the queue only when it is answered.
ANSWERS_MIN = 3

# Nobody cares for less than a twentieth of a second that a record waits.
NOTHING_S = 0.05

# For how long a load is refused at which a switch did not pay: at first, and at most. A load is refused that is not
# higher by this factor, while the record tasks are not slower by it.
FIRST_S = 60.0
MOST_S = 3_600.0
SIMILAR = 1.5

# Loads that are remembered: a load that varies from nothing to a million in steps of SIMILAR has about as many.
_LOADS_MAX = 32


class Model(Protocol):
    """How the records before a range become fewer in a paradigm."""

    def step(self, queue: float, arrivals: float, passed_s: float) -> float:
        """Returns the records that wait after some time in which some arrived."""


@dataclass(frozen=True)
class RecordModel:
    """Eq. 1: t_out and t_proc are the queue's, at `rate` (PD)."""

    rate: float

    def step(self, queue: float, arrivals: float, passed_s: float) -> float:
        """See Model."""
        return max(0.0, queue + arrivals - self.rate * passed_s)


@dataclass(frozen=True)
class OperationModel:
    """Eq. 2 and 3: a record waits for its micro-batch (t_wait: half an interval), for the fixed cost (t_schedule and
    t_trans), and for all records of the micro-batch (t_proc)."""

    cost: BatchCost
    interval_s: float
    longest_s: float  # the interval at which Spark carries most

    def step(self, queue: float, arrivals: float, passed_s: float) -> float:
        """See Model."""
        rate = arrivals / passed_s
        in_batches = rate * (self.interval_s / 2 + self.cost.seconds(rate * self.interval_s))
        return max(in_batches, queue + arrivals - self.cost.capacity(self.longest_s) * passed_s)


@dataclass(frozen=True)
class Forecast:
    """The mean latencies in the first seconds after a switch. `pays_after_s`: from when on the records that went to
    the other paradigm have waited less, all together; None: not within HORIZON_S."""

    record_s: float
    operation_s: float
    pays_after_s: float | None

    @property
    def judged_after_s(self) -> float | None:
        """Returns after how many seconds the switch can be judged, or None when the model cannot say."""
        return None if self.pays_after_s is None else max(JUDGED_AFTER_S, PATIENCE * self.pays_after_s)


def forecast(
    queue: float, arrival_rate: float, record: RecordModel, operation: OperationModel, pause_s: float
) -> Forecast:
    """Returns what a switch to Spark would do, by which nobody works for `pause_s`. The latencies are those until the
    switch has paid, but not of less than JUDGED_AFTER_S."""
    arrivals = arrival_rate * STEP_S
    as_records = as_operation = queue
    waited_records = waited_operation = 0.0
    pays_after_s = None
    number = 0.0
    for step in range(1, round(HORIZON_S / STEP_S) + 1):
        at_s = step * STEP_S
        as_records = record.step(as_records, arrivals, STEP_S)
        paused = at_s <= pause_s
        as_operation = as_operation + arrivals if paused else operation.step(as_operation, arrivals, STEP_S)
        waited_records += as_records * STEP_S
        waited_operation += as_operation * STEP_S
        if waited_operation > waited_records:
            pays_after_s = None
        elif pays_after_s is None:
            pays_after_s = at_s
        number = queue + arrival_rate * at_s
        if pays_after_s is not None and at_s >= max(JUDGED_AFTER_S, pays_after_s + pause_s):
            break
    number = max(1.0, number)
    return Forecast(waited_records / number, waited_operation / number, pays_after_s)


@dataclass
class SwitchStory:
    """A switch, what was predicted of it, and what it did so far. See the module's docstring."""

    at_s: float
    to: Literal["record", "operation"]
    reason: str
    arrival_rate: float
    queue: float
    record_rate: float  # 0: not known
    predicted: Forecast | None
    other: Model | None  # of the paradigm that was left
    margin: float
    paid: bool | None = None  # None: it is not judged yet, or cannot be
    lasted_s: float = 0.0
    answers: int = 0  # micro-batches of Spark
    switched_s: float | None = None  # from the decision until the last task had changed over
    answer_s: float | None = None  # until Spark's first answer
    most: float = 0.0  # the most records that waited since
    above_s: float = 0.0  # for how long more waited than at the decision, by the last time that they did
    _longest_s: float = 0.0  # of these
    _largest: float = 0.0  # in records, of those since the last observation with any
    _number: float = field(default=0.0)  # of records
    _waited: float = 0.0
    _waited_else: float = 0.0
    _last: float = 0.0  # the queue now
    _last_else: float = 0.0

    def __post_init__(self) -> None:
        self._number = self._last = self._last_else = self.most = self.queue

    def observe(
        self,
        time_s: float,
        queue: float,
        arrivals: float,
        batches: Sequence[MicroBatch] = (),
        answered: float = 0.0,
    ) -> None:
        """Takes what has come since the last time, what Spark has answered (`answered`: records), and what waits
        now."""
        if self.answer_s is None and answered > 0 and self.to == "operation" and time_s > self.at_s:
            self.answer_s = time_s - self.at_s
        self.most = max(self.most, queue)
        if queue > self.queue:
            self.above_s = time_s - self.at_s
        if batches:
            self.answers += len(batches)
            self._longest_s = max(self._longest_s, *(batch.seconds for batch in batches))
            self._largest = max(batch.records for batch in batches)
        passed = time_s - self.at_s - self.lasted_s
        if passed <= 0:
            self._number += arrivals
            self._last_else += arrivals
            return
        self.lasted_s += passed
        self._number += arrivals
        self._last = queue
        self._waited += queue * passed
        if self.other is not None:
            self._last_else = self.other.step(self._last_else, arrivals, passed)
            self._waited_else += self._last_else * passed

    @property
    def measured_s(self) -> float:
        """Returns for how long a record has waited on average."""
        return self._waited / max(1.0, self._number)

    @property
    def peak_s(self) -> float:
        """Returns how much longer than at the decision a record waited at most because of the switch, as the queue
        says."""
        return (self.most - self.queue) / max(1.0, self.arrival_rate)

    @property
    def else_s(self) -> float | None:
        """Returns for how long it would have waited in the paradigm that was left, or None when nobody can say."""
        return None if self.other is None else self._waited_else / max(1.0, self._number)

    @property
    def waited_less(self) -> bool | None:
        """Returns whether records have waited less than they would have, but for the margin."""
        else_s = self.else_s
        return None if else_s is None else self.measured_s <= (1 + self.margin) * else_s + NOTHING_S

    def does_not_pay(self, in_batches: float) -> bool:
        """Returns whether it is certain that a switch to Spark does not pay: records have waited longer, there is more
        waiting now by more than the records in micro-batches, and fewer have left by a margin. How many waited before
        the switch has no say."""
        if self.predicted is None or (after_s := self.predicted.judged_after_s) is None:
            return False
        if self.answers < ANSWERS_MIN or self.lasted_s < max(after_s, ANSWERS_MIN * self._longest_s):
            return False
        if self._waited <= self._waited_else or self._last <= self._last_else + max(in_batches, self._largest):
            return False
        return (1 + self.margin) * (self._number - self._last) < self._number - self._last_else

    def judge(self) -> None:
        """Notes that the switch is over, or that enough has been seen of it."""
        if self.lasted_s > 0 and self.paid is None:
            self.paid = self.waited_less

    @property
    def text(self) -> str:
        """Returns prediction and outcome in a sentence."""
        where, elsewhere = ("Spark", "as records") if self.to == "operation" else ("record tasks", "in Spark")
        predicted = "nothing was predicted"
        if self.predicted is not None:
            one, other = self.predicted.operation_s, self.predicted.record_s
            if self.to == "record":
                one, other = other, one
            predicted = f"predicted was a latency of {one:.2f} s ({elsewhere} {other:.2f} s)"
        else_s = self.else_s
        compared = "" if else_s is None else f" ({elsewhere} it would have been {else_s:.2f} s)"
        verdict = {None: "", True: "; it paid", False: "; it did not pay"}[self.paid]
        return (
            f"switch to {where} at {self.arrival_rate:,.0f} records/s with {self.queue:,.0f} waiting: {predicted}, "
            f"measured was {self.measured_s:.2f} s{compared} over {self.lasted_s:.1f} s{verdict}{self._steps}"
        )

    @property
    def _steps(self) -> str:
        """What the switch itself took, and the peak of the queue that it made."""
        steps = []
        if self.switched_s is not None:
            steps.append(f"the last task switched after {self.switched_s:.1f} s")
        if self.answer_s is not None:
            steps.append(f"Spark's first answer came after {self.answer_s:.1f} s")
        if self.above_s > 0:
            steps.append(f"up to {self.peak_s:.1f} s more were waiting, for {self.above_s:.1f} s")
        return "".join(f"; {step}" for step in steps)

    def plain(self) -> dict[str, Any]:
        """Returns prediction and outcome as plain data."""
        predicted = self.predicted
        return {
            "at_s": self.at_s,
            "to": self.to,
            "reason": self.reason,
            "arrival_rate": self.arrival_rate,
            "queue": self.queue,
            "predicted": None
            if predicted is None
            else {
                "record_s": predicted.record_s,
                "operation_s": predicted.operation_s,
                "pays_after_s": predicted.pays_after_s,
            },
            "measured": {"seconds": self.lasted_s, "latency_s": self.measured_s, "else_s": self.else_s},
            "switched_s": self.switched_s,
            "answer_s": self.answer_s,
            "peak": {"queue": self.most, "height_s": self.peak_s, "seconds": self.above_s},
            "paid": self.paid,
        }


@dataclass
class _Refused:
    """A load at which a switch did not pay, with the speed of the record tasks then."""

    arrival_rate: float
    record_rate: float
    backoff: Backoff
    since_s: float
    wait_s: float
    why: str


class Refusals:
    """The loads of one range at which a switch did not pay; see the module's docstring."""

    def __init__(self) -> None:
        self._loads: list[_Refused] = []

    def _of(self, arrival_rate: float, record_rate: float) -> Iterator[_Refused]:
        for one in self._loads:
            if arrival_rate <= SIMILAR * one.arrival_rate and SIMILAR * record_rate >= one.record_rate:
                yield one

    def did_not_pay(self, arrival_rate: float, record_rate: float, time_s: float, why: str) -> None:
        """Notes that a switch did not pay at this load."""
        one = next(self._of(arrival_rate, record_rate), None)
        if one is None:
            one = _Refused(arrival_rate, record_rate, Backoff(FIRST_S, MOST_S), time_s, 0.0, why)
            self._loads = [*self._loads[1 - _LOADS_MAX :], one]
        one.since_s, one.wait_s, one.why = time_s, one.backoff.failed(), why

    def paid(self, arrival_rate: float, record_rate: float) -> None:
        """Notes that a switch paid at this load."""
        wrong = list(self._of(arrival_rate, record_rate))
        self._loads = [one for one in self._loads if one not in wrong]

    def refused(self, arrival_rate: float, record_rate: float, time_s: float) -> str | None:
        """Returns why a switch is refused at this load now, or None."""
        self._loads = [one for one in self._loads if time_s < one.since_s + 2 * one.wait_s]
        for one in self._of(arrival_rate, record_rate):
            if (left_s := one.since_s + one.wait_s - time_s) > 0:
                return (
                    f"at {one.arrival_rate:,.0f} records/s a switch did not pay "
                    f"{time_s - one.since_s:.0f} s ago; next try in {left_s:.0f} s"
                )
        return None

    def plain(self) -> list[dict[str, Any]]:
        """Returns what is remembered, as plain data."""
        return [
            {
                "arrival_rate": one.arrival_rate,
                "record_rate": one.record_rate,
                "since_s": one.since_s,
                "refused_for_s": one.wait_s,
                "why": one.why,
            }
            for one in self._loads
        ]
