"""A task's outputs: divide lists of records among the logs of an exchange (docs/papers.md: A2, W1).

An exchange to all has one log for all receivers, and every other exchange has a log for each receiver.

`emit` takes a batch from the chain, and `flush` sends it. Between the two calls an output may combine records by key
(two-phase aggregation). The task flushes at the end of each step, so no record waits for a timer. An output must never
send records of one key to two tasks.
"""

from __future__ import annotations

import random
from typing import Any

from penstock.runtime.errors import KeyTypeError
from penstock.runtime.exchange.grouping import All, Custom, Global, Grouping, Key, Rebalance, Shuffle
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import partition, without_bad_keys
from penstock.runtime.records.userfunc import ErrorHandler, select
from penstock.runtime.scalars import python_keys
from penstock.runtime.state.aggregate import Aggregate, add_all

# A combiner sends its partial results when it has this many keys, which bounds the memory of a step with many keys.
COMBINED_KEYS_MAX = 32_768


class Output:
    """Sends everything to the first log: for all, forward, global, and every grouping except by key when there is one
    receiver."""

    target = -1  # the number of the receiving chain
    # Decides about records that fail on the way, where a function of the user's is called for each of them.
    errors: ErrorHandler | None = None

    def __init__(self, logs: list[OutLog]) -> None:
        self.logs = logs

    def emit(self, batch: Batch, stamp: int) -> None:
        """Divides a batch, which is not empty and which the output may keep, among the queues of the logs."""
        self.logs[0].push(batch, stamp)

    def flush(self) -> None:
        """Sends the partial results that a combiner still holds."""

    def repartition(self, batch: Batch, stamp: int) -> None:
        """Divides a batch of cached messages once more. An output of the same exchange had divided it among other
        logs."""
        self.emit(batch, stamp)


class _InTurn(Output):
    """In turn over the logs. With a `chance`, each batch starts at a random log."""

    def __init__(self, logs: list[OutLog], start: int, chance: random.Random | None) -> None:
        super().__init__(logs)
        self._next = start % len(logs)
        self._chance = chance

    def emit(self, batch: Batch, stamp: int) -> None:
        assert isinstance(batch, list)
        n = len(self.logs)
        first = self._chance.randrange(n) if self._chance else self._next
        for i in range(min(n, len(batch))):
            self.logs[(first + i) % n].push(batch[i::n], stamp)
        self._next = (first + len(batch)) % n


class _Chosen(Output):
    def __init__(self, logs: list[OutLog], grouping: Custom, errors: ErrorHandler) -> None:
        super().__init__(logs)
        self._chooser = grouping.chooser
        self.errors = self._errors = errors

    def emit(self, batch: Batch, stamp: int) -> None:
        assert isinstance(batch, list)
        n = len(self.logs)
        chooser = self._chooser

        def choose(record: Any) -> int:
            index = chooser(record, n)
            if not (isinstance(index, int) and 0 <= index < n):
                raise ValueError(f"partition_by chose task {index!r} of {n}; it must return 0 to {n - 1}")
            return index

        batch, indices = select(choose, batch, self._errors)
        shares: list[list[Any]] = [[] for _ in range(n)]
        for record, index in zip(batch, indices, strict=True):
            shares[index].append(record)
        for log, records in zip(self.logs, shares, strict=True):
            if records:
                log.push(records, stamp)


class _Keyed(Output):
    """By key: the key function gives the key, a combiner (if any) makes one partial result for each key, and the key
    group chooses the task."""

    def __init__(
        self,
        logs: list[OutLog],
        grouping: Key,
        combiner: Aggregate | None,
        table: bytes,
        errors: ErrorHandler,
    ) -> None:
        super().__init__(logs)
        self._selector = grouping.selector
        self._combiner = combiner
        self.errors = self._errors = errors
        self._table = table
        self._partials: dict[Any, Any] = {} if combiner is None else combiner.new_state()
        self._stamp = 0

    def emit(self, batch: Batch, stamp: int) -> None:
        if isinstance(batch, KeyedBatch):  # partial results of the operation stream
            self._divide(batch, stamp)
            return
        records, keys = select(self._selector, batch, self._errors)
        keys = python_keys(keys)
        combiner = self._combiner
        if combiner is None:
            if keys:
                self._divide(KeyedBatch(keys, records), stamp)
            return
        if self._errors.policy != "fail":
            # A partial result stands for many records. So a record with a bad key must be found before it is combined.
            keys, records = without_bad_keys(keys, records, self._errors)
        keys, values = combiner.prepare(keys, records, self._errors)
        if not self._partials:
            self._stamp = stamp
        add_all(combiner.add, self._partials, keys, values, self._errors, records)
        if len(self._partials) >= COMBINED_KEYS_MAX:
            self.flush()

    def flush(self) -> None:
        if self._partials:
            assert self._combiner is not None
            partials, self._partials = self._partials, self._combiner.new_state()
            self._divide(KeyedBatch(*self._combiner.shipped(partials), True), self._stamp)

    def repartition(self, batch: Batch, stamp: int) -> None:
        assert isinstance(batch, KeyedBatch)
        self._divide(batch, stamp)

    def _divide(self, batch: KeyedBatch, stamp: int) -> None:
        n = len(self.logs)
        try:
            # Keys must have a hash even when there is only one receiver, or a later rescale could not assign them.
            shares = partition(batch.keys, (batch.values,), self._table, n)
        except KeyTypeError:
            # A user has never seen the partial result, so the message names its key.
            named = batch.keys if batch.partial else batch.values
            keys, values = without_bad_keys(batch.keys, batch.values, self._errors, named)
            shares = partition(keys, (values,), self._table, n)
        for log, (keys, values) in zip(self.logs, shares, strict=True):
            if keys:
                log.push(KeyedBatch(keys, values, batch.partial), stamp)


def make_output(
    grouping: Grouping,
    logs: list[OutLog],
    *,
    sender: int,
    combiner: Aggregate | None,
    errors: ErrorHandler,
    table: bytes | None,
) -> Output:
    """Creates the output of a sender task over its logs of an exchange. `sender` makes the tasks start their turns
    at different logs. `table` says which receiver owns each key group, and only a grouping by key needs it."""
    if isinstance(grouping, Key):
        assert table is not None
        return _Keyed(logs, grouping, combiner, table, errors)
    if isinstance(grouping, Custom):
        return _Chosen(logs, grouping, errors)
    if len(logs) == 1 or isinstance(grouping, All | Global):
        return Output(logs)
    if isinstance(grouping, Shuffle):
        return _InTurn(logs, sender, random.Random(sender))
    assert isinstance(grouping, Rebalance), grouping
    return _InTurn(logs, sender, None)
