"""A task's outputs: how a list of records is dealt to the channels of one exchange (docs/papers.md: A2, W1).

`emit` takes what the chain made, `flush` lets it leave. Between the two an output may combine (two-phase
aggregation); the task flushes at the end of each step, so nothing waits for a timer.
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

# A combiner's keys leave at the latest when there are this many: bounds the memory of a step over many keys.
COMBINED_KEYS_MAX = 32_768


class Output:
    """All to the first channel: forward, global, and every grouping towards a single task but key."""

    def __init__(self, channels: list[OutChannel]) -> None:
        self.channels = channels

    def emit(self, batch: Batch, stamp: int) -> None:
        """Deal a non-empty batch, which the output may keep, to the channels' queues."""
        self.channels[0].push(batch, stamp)

    def flush(self) -> None:
        """Nothing is held back any longer."""

    def repartition(self, batch: Batch, stamp: int) -> None:
        """Deal a batch that was dealt before, by an output of the same exchange when it had other channels."""
        self.emit(batch, stamp)


class _Broadcast(Output):
    def emit(self, batch: Batch, stamp: int) -> None:
        for channel in self.channels:
            channel.push(batch, stamp)


class _Deal(Output):
    """Round-robin over the channels; with a `chance`, from a random start for every batch."""

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
    """By key: key function, then (with a combiner) one partial a key, then key group -> task."""

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
        if isinstance(batch, KeyedBatch):  # partials that the operation stream has made
            self._deal(batch, stamp)
            return
        records, keys = select(self._selector, batch, self._errors)
        combiner = self._combiner
        if combiner is None:
            if keys:
                self._deal(KeyedBatch(keys, records), stamp)
            return
        if self._errors.policy != "fail":
            # A partial stands for many records: each record of a bad key must be found before they become one.
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
            self._deal(KeyedBatch(*self._combiner.shipped(partials), True), self._stamp)

    def repartition(self, batch: Batch, stamp: int) -> None:
        assert isinstance(batch, KeyedBatch)
        self._deal(batch, stamp)

    def _deal(self, batch: KeyedBatch, stamp: int) -> None:
        n = len(self.channels)
        try:
            # One receiver still needs keys that hash, or a later rescale could not place them.
            shares = partition(batch.keys, (batch.values,), self._table, n)
        except KeyTypeError:
            # A partial is nothing that a user has seen: its key is named.
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
    """The output of one sender task over its channels of an exchange; `sender` staggers the tasks' round-robins.
    `table` says which receiver owns each key group; only a key grouping needs one."""
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
        return _Deal(channels, sender, random.Random(sender))
    assert isinstance(grouping, Rebalance), grouping
    return _Deal(channels, sender, None)
