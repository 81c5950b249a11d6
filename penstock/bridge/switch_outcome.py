"""The outcome of a switch between the paradigms, and the time for which a switch that did not pay is remembered
(docs/papers.md: D2).

- A `SwitchStory` takes the records that come and what is answered. It tells for how long they waited, and whether Spark
  carries less than the record tasks would: then the switch is taken back, whatever was known of Spark before. By
  Little's law, the mean wait over some time is the integral of the queue divided by the number of records.
- `Refusals` remembers a load at which a switch did not pay. At a lower load it would pay even less, because Spark's
  fixed cost weighs more, unless the record tasks have become slower. The memory decays: the load is refused for
  `FIRST_S`, for twice as long when a switch did not pay again, up to `MOST_S`, and is forgotten when it has not been
  refused for as long as it was.

Nothing here reads a clock. A verdict must never rest on less than a few micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.bridge.cost import MicroBatch
from penstock.runtime.backoff import Backoff
from penstock.runtime.status import Refusal, SwitchMeasured, SwitchPeak, SwitchStatus

# A switch is judged after this time at the earliest ...
JUDGED_AFTER_S = 10.0

# ... and after so many micro-batches: what is under way has left the queue only when it is answered.
ANSWERS_MIN = 3

# For how long a load is refused at which a switch did not pay: at first, and at most. A load is refused that is not
# higher by this factor, while the record tasks are not slower by it.
FIRST_S = 60.0
MOST_S = 3_600.0
SIMILAR = 1.5


@dataclass
class SwitchStory:
    """A switch, and its outcome so far. See the module's docstring."""

    at_s: float
    to: Literal["record", "operation"]
    reason: str
    arrival_rate: float
    queue: float
    record_rate: float  # 0: not known
    margin: float
    taken_back: bool = False  # it did not pay
    lasted_s: float = 0.0
    answers: int = 0  # micro-batches of Spark
    switched_s: float | None = None  # from the decision until the last task had changed over
    answer_s: float | None = None  # until Spark's first answer
    most: float = 0.0  # the most records that waited since
    above_s: float = 0.0  # for how long more waited than at the decision, by the last time that they did
    _longest_s: float = 0.0  # of these
    _largest: float = 0.0  # in records, of those since the last observation with any
    _number: float = 0.0  # of records
    _waited: float = 0.0
    _last: float = 0.0  # the queue now
    _last_else: float = 0.0  # the queue that there would be now as records

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
        """Takes the records that have come since the last time, the records that Spark has answered (`answered`:
        records), and what waits now."""
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
        self._last_else = max(0.0, self._last_else + arrivals - self.record_rate * passed)

    @property
    def measured_s(self) -> float:
        """Returns for how long a record has waited on average."""
        return self._waited / max(1.0, self._number)

    @property
    def peak_s(self) -> float:
        """Returns how much longer than at the decision a record waited at most because of the switch, as the queue
        says."""
        return (self.most - self.queue) / max(1.0, self.arrival_rate)

    def does_not_pay(self, in_batches: float) -> bool:
        """Returns whether it is certain that a switch to Spark does not pay: there is more waiting now than the record
        tasks would have left, by more than the records in micro-batches, and fewer have left by a margin. How many
        waited before the switch has no say."""
        if self.record_rate <= 0 or self.answers < ANSWERS_MIN:
            return False
        if self.lasted_s < max(JUDGED_AFTER_S, ANSWERS_MIN * self._longest_s):
            return False
        if self._last <= self._last_else + max(in_batches, self._largest):
            return False
        return (1 + self.margin) * (self._number - self._last) < self._number - self._last_else

    @property
    def text(self) -> str:
        """Returns the outcome in a sentence."""
        where = "Spark" if self.to == "operation" else "record tasks"
        return (
            f"switch to {where} at {self.arrival_rate:,.0f} records/s with {self.queue:,.0f} waiting: records waited "
            f"for {self.measured_s:.2f} s over {self.lasted_s:.1f} s{'; it did not pay' * self.taken_back}{self._steps}"
        )

    @property
    def _steps(self) -> str:
        """The duration of the switch itself, and the peak of the queue that it made."""
        steps = []
        if self.switched_s is not None:
            steps.append(f"the last task switched after {self.switched_s:.1f} s")
        if self.answer_s is not None:
            steps.append(f"Spark's first answer came after {self.answer_s:.1f} s")
        if self.above_s > 0:
            steps.append(f"up to {self.peak_s:.1f} s more were waiting, for {self.above_s:.1f} s")
        return "".join(f"; {step}" for step in steps)

    def status(self) -> SwitchStatus:
        """Returns the outcome, for the status."""
        return SwitchStatus(
            at_s=self.at_s,
            to=self.to,
            reason=self.reason,
            arrival_rate=self.arrival_rate,
            queue=self.queue,
            measured=SwitchMeasured(self.lasted_s, self.measured_s),
            switched_s=self.switched_s,
            answer_s=self.answer_s,
            peak=SwitchPeak(self.most, self.peak_s, self.above_s),
            taken_back=self.taken_back,
        )


class Refusals:
    """The load of a range at which a switch did not pay; see the module's docstring."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_S, MOST_S)
        self._load: Refusal | None = None

    def did_not_pay(self, arrival_rate: float, record_rate: float, time_s: float, why: str) -> None:
        """Notes that a switch did not pay at this load."""
        self._load = Refusal(arrival_rate, record_rate, time_s, self._backoff.failed(), why)

    def paid(self) -> None:
        """Notes that a switch has paid, so that none is refused."""
        self._load = None
        self._backoff.succeeded()

    def refused(self, arrival_rate: float, record_rate: float, time_s: float) -> str | None:
        """Returns why a switch is refused at this load now, or None."""
        one = self._load
        if one is None:
            return None
        passed_s, wait_s = time_s - one.since_s, one.refused_for_s
        if passed_s >= 2 * wait_s:
            self.paid()
        similar = arrival_rate <= SIMILAR * one.arrival_rate and SIMILAR * record_rate >= one.record_rate
        if passed_s >= wait_s or not similar:
            return None
        return (
            f"at {one.arrival_rate:,.0f} records/s a switch did not pay {passed_s:.0f} s ago; next try in "
            f"{wait_s - passed_s:.0f} s"
        )

    def remembered(self) -> list[Refusal]:
        """Returns the remembered refusals."""
        return [] if self._load is None else [self._load]
