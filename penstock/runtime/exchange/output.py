"""A task's outputs: divide lists of records among the channels of an exchange (docs/papers.md: A2, W1).

`emit` takes a batch from the chain, and `flush` sends it. Between the two calls an output may combine records by key
(two-phase aggregation). The task flushes at the end of each step, so no record waits for a timer. An output must never
send records of one key to two tasks.
"""

from __future__ import annotations

import random
from typing import Any

from penstock.runtime.errors import KeyTypeError
from penstock.runtime.exchange.channel import OutChannel
from penstock.runtime.exchange.grouping import All, Custom, Global, Grouping, Key, Rebalance, Shuffle
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import partition, without_bad_keys
from penstock.runtime.records.userfunc import ErrorHandler, select
from penstock.runtime.state.aggregate import Aggregate, add_all

# A combiner sends its partial results when it has this many keys, which bounds the memory of a step with many keys.
COMBINED_KEYS_MAX = 32_768


class Output:
    """Sends everything to the first channel: for forward, global, and every grouping except by key when there is one
    receiver."""

    def __init__(self, channels: list[OutChannel]) -> None:
        self.channels = channels

    def emit(self, batch: Batch, stamp: int) -> None:
        """Divides a batch, which is not empty and which the output may keep, among the queues of the channels."""
        self.channels[0].push(batch, stamp)

    def flush(self) -> None:
        """Sends what a combiner still holds."""

    def repartition(self, batch: Batch, stamp: int) -> None:
        """Divides a batch of cached messages once more. An output of the same exchange had divided it among other
        channels."""
        self.emit(batch, stamp)


class _Broadcast(Output):
    def emit(self, batch: Batch, stamp: int) -> None:
        for channel in self.channels:
            channel.push(batch, stamp)


class _InTurn(Output):
    """In turn over the channels. With a `chance`, each batch starts at a random channel."""

    def __init__(self, channels: list[OutChannel], start: int, chance: random.Random | None) -> None:
        super().__init__(channels)
        self._next = start % len(channels)
        self._chance = chance

    def emit(self, batch: Batch, stamp: int) -> None:
        assert isinstance(batch, list)
        n = len(self.channels)
        first = self._chance.randrange(n) if self._chance else self._next
        for i in range(min(n, len(batch))):
            self.channels[(first + i) % n].push(batch[i::n], stamp)
        self._next = (first + len(batch)) % n


class _Chosen(Output):
    def __init__(self, channels: list[OutChannel], grouping: Custom, errors: ErrorHandler) -> None:
        super().__init__(channels)
        self._chooser = grouping.chooser
        self._errors = errors

    def emit(self, batch: Batch, stamp: int) -> None:
        assert isinstance(batch, list)
        n = len(self.channels)
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
        for channel, records in zip(self.channels, shares, strict=True):
            if records:
                channel.push(records, stamp)


class _Keyed(Output):
    """By key: the key function gives the key, a combiner (if any) makes one partial result for each key, and the key
    group chooses the task."""

    def __init__(
        self,
        channels: list[OutChannel],
        grouping: Key,
        combiner: Aggregate | None,
        table: bytes,
        errors: ErrorHandler,
    ) -> None:
        super().__init__(channels)
        self._selector = grouping.selector
        self._combiner = combiner
        self._errors = errors
        self._table = table
        self._partials: dict[Any, Any] = {} if combiner is None else combiner.new_state()
        self._stamp = 0

    def emit(self, batch: Batch, stamp: int) -> None:
        if isinstance(batch, KeyedBatch):  # partial results of the operation stream
            self._divide(batch, stamp)
            return
        records, keys = select(self._selector, batch, self._errors)
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
        n = len(self.channels)
        try:
            # Keys must have a hash even when there is only one receiver, or a later rescale could not assign them.
            shares = partition(batch.keys, (batch.values,), self._table, n)
        except KeyTypeError:
            # A user has never seen the partial result, so the message names its key.
            named = batch.keys if batch.partial else batch.values
            keys, values = without_bad_keys(batch.keys, batch.values, self._errors, named)
            shares = partition(keys, (values,), self._table, n)
        for channel, (keys, values) in zip(self.channels, shares, strict=True):
            if keys:
                channel.push(KeyedBatch(keys, values, batch.partial), stamp)


def make_output(
    grouping: Grouping,
    channels: list[OutChannel],
    *,
    sender: int,
    combiner: Aggregate | None,
    errors: ErrorHandler,
    table: bytes | None,
) -> Output:
    """Creates the output of a sender task over its channels of an exchange. `sender` makes the tasks start their turns
    at different channels. `table` says which receiver owns each key group, and only a grouping by key needs it."""
    if isinstance(grouping, Key):
        assert table is not None
        return _Keyed(channels, grouping, combiner, table, errors)
    if isinstance(grouping, Custom):
        return _Chosen(channels, grouping, errors)
    if len(channels) == 1 or isinstance(grouping, Global):
        return Output(channels)
    if isinstance(grouping, All):
        return _Broadcast(channels)
    if isinstance(grouping, Shuffle):
        return _InTurn(channels, sender, random.Random(sender))
    assert isinstance(grouping, Rebalance), grouping
    return _InTurn(channels, sender, None)
