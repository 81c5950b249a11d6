"""A Spark that is modelled: executors with cores of their own, which this machine does not have.

A function of a flow that is `Costly` uses the processor for a time in a record task. Its result is cheap: the modelled
Spark computes it without that time, and then waits for as long as its executors would take. So the answers are those of
the record tasks, the clock and the product are real, and the executors cost nothing of what the record tasks have.

A micro-batch of n records takes fixed_s + n / rate seconds, one after the other, as a Spark does whose cores are all
busy with one micro-batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeForm, RangeRun, as_records
from penstock.bridge.operation import Trial
from penstock.bridge.python_range import take_in_pieces
from penstock.bridge.session.session import Executor
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.worker.sample import RecordSample

_MIX = 2_654_435_761
_VALUES = 1 << 20
_PAUSE_S = 0.02  # pauses up to this length are caught up on, by records that come
_NEXT_S = 0.001  # ... within this time


def value_of(number: int) -> int:
    """Returns the result for a number."""
    return number * _MIX % _VALUES


class Costly:
    """Computes `value_of`, and takes some time for it: by keeping the processor busy, or with `waits` by waiting, as
    for a service. It goes by the clock, and catches up on short pauses: so its speed is that which is asked for,
    whatever else the machine does. Returns (key, value)."""

    elsewhere: ClassVar[bool] = False  # in this process the work is done by processors that are only modelled

    def __init__(self, seconds: float, keys: int, one: int = 0, *, waits: bool = False) -> None:
        """`one` is added to each value, so that sums count too."""
        self.seconds = seconds
        self.keys = keys
        self.one = one
        self.waits = waits
        self._ended = self._late = 0.0  # when the last one was ready, and by how much too late

    def __call__(self, number: int) -> tuple[int, int]:
        if not Costly.elsewhere:
            now = time.perf_counter()
            until = now + self.seconds - (self._late if now - self._ended < _NEXT_S else 0.0)
            if self.waits and now < until:
                time.sleep(until - now)
            while (now := time.perf_counter()) < until:
                pass
            self._ended, self._late = now, min(now - until, _PAUSE_S)
        return number % self.keys, self.one + value_of(number)


class _Session:
    """What a job is told of its Spark session."""

    cores = 1

    def __init__(self, cost: BatchCost) -> None:
        self._cost = cost

    def describe(self) -> str:
        return f"modelled: a micro-batch takes {self._cost.fixed_s:g} s, and {self._cost.rate:,.0f} records/s"

    def executors(self) -> list[Executor]:
        return []

    def stop(self) -> None:
        pass


@dataclass(frozen=True)
class ModelledSpark:
    """Makes the modelled Spark of a job (`SparkOptions.stand_in`). `folder`: where it notes its micro-batches."""

    cost: BatchCost
    prepare_s: float
    folder: str

    def __call__(self, forms: Sequence[RangeForm]) -> ModelledOperations:
        Costly.elsewhere = True
        time.sleep(self.prepare_s)
        return ModelledOperations(self, forms)


class ModelledOperations:
    """Answers the micro-batches of a job; see the module's docstring."""

    def __init__(self, options: ModelledSpark, forms: Sequence[RangeForm]) -> None:
        self.session = _Session(options.cost)
        self._cost = options.cost
        self._forms = {form.chain: form for form in forms}
        self._file = Path(options.folder, "micro-batches")
        self._free_at = 0.0
        self._lock = threading.Lock()

    def prepare(self, chain: int, taken: RecordSample | None = None) -> Trial:
        """Returns what a trial would have measured."""
        return Trial("python", {"python": self._cost})

    def answer(self, chain: int, position: int, batch: pa.RecordBatch) -> MicroBatchResult:
        """Returns the results of a micro-batch when the executors would have them."""
        came = time.time()
        number = 0

        def records(columns: pa.RecordBatch) -> list[Any]:
            nonlocal number
            found = as_records(columns)
            number += len(found)
            return found

        run = RangeRun(self._forms[chain].before(position))
        take_in_pieces(run, batch, records)
        answer = run.answer()
        with self._lock:
            done = self._free_at = max(came, self._free_at) + self._cost.seconds(number)
            with self._file.open("a") as file:
                file.write(f"{came} {done} {number}\n")
        time.sleep(max(0.0, done - time.time()))
        return answer
