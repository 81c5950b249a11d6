"""Alignment: no record passes a barrier, channels keep their order, every barrier is aligned once, nothing is lost."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.exchange.inbox import Inbox
from penstock.runtime.records.batch import KeyedBatch, split

#: What one channel brings: the number of batches before its first barrier, its second, ..., and before its end. A
#: channel with fewer barriers than others ends between two of theirs.
Script = list[int]
scripts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=5)
gaps = st.lists(st.integers(1, 3), min_size=4, max_size=4)
randoms = st.randoms(use_true_random=False)


class Model:
    """An inbox between channels that follow their scripts and a task that takes what it gets. A record is (channel,
    barriers before it, place in its channel); `epochs[k]` is the epoch of the barrier with k others before it."""

    def __init__(self, plans: list[Script], epochs: list[int]) -> None:
        self.epochs = epochs
        self.inbox = Inbox()
        self.inbox.open = set(range(len(plans)))
        self.coming: list[list[tuple[str, int]]] = []
        for plan in plans:
            events: list[tuple[str, int]] = []
            for k, batches in enumerate(plan):
                events += [("batch", k)] * batches + [("barrier", k)]
            self.coming.append([*events[:-1], ("end", len(plan) - 1)])
        self.barriers = [0] * len(plans)  # brought so far, by channel
        self.over = [False] * len(plans)  # the end was brought
        self.put: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.got: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.aligned = 0
        self.queued = 0  # brought and not taken, of the epoch that is not aligned yet
        self.costs = 0

    def bring(self, channel: int, rng: Random) -> None:
        """The next event of a channel."""
        kind, k = self.coming[channel].pop(0)
        if kind == "batch":
            records = [(channel, k, len(self.put[channel]) + i) for i in range(rng.randint(1, 3))]
            self.put[channel] += records
            keyed = KeyedBatch([record[2] for record in records], records)
            self.inbox.put(channel, keyed if channel % 2 else records, len(self.put[channel]), 10 * len(records))
            self.costs += 10 * len(records)
        elif kind == "barrier":
            self.barriers[channel] += 1
            self.inbox.put_barrier(channel, self.epochs[k])
        else:
            self.over[channel] = True
            self.inbox.put_end(channel)
        self.check()

    def take(self, rng: Random) -> None:
        """What a task does: take a batch, some of it put back, or pass the barrier on."""
        if self.inbox.aligned:
            assert self.inbox.epoch == self.epochs[self.aligned]
            self.aligned += 1
            self.inbox.release()
        elif self.inbox.ready:
            channel, batch, stamp, cost = self.inbox.ready.popleft()
            self.costs -= cost
            if len(batch) > 1 and rng.random() < 0.5:
                batch, rest = split(batch, 1)
                self.inbox.ready.appendleft((channel, rest, stamp, 0))
            records = batch if isinstance(batch, list) else batch.values
            for record in records:
                assert record[0] == channel
                assert record[1] == self.aligned, f"{record} passed a barrier: {self.aligned} are aligned"
            self.got[channel] += records
        self.check()

    def check(self) -> None:
        """What the inbox says of itself follows from what was brought and taken."""
        inbox, k = self.inbox, self.aligned
        brought = [barriers > k for barriers in self.barriers]
        gone = [over and barriers <= k for over, barriers in zip(self.over, self.barriers, strict=True)]
        taken = all(
            record in self.got[channel] for channel, records in self.put.items() for record in records if record[1] <= k
        )
        assert set(inbox._held) == {channel for channel, early in enumerate(brought) if early}
        assert inbox.aligned == (any(brought) and taken and all(map(max, zip(brought, gone, strict=True))))
        assert inbox.at_end == (all(gone) and taken)
        assert inbox.open == {channel for channel, over in enumerate(gone) if not over}
        held = inbox._held.values()
        waiting = sum(entry[3] for entry in inbox.ready) + sum(entry[2] for entries in held for entry in entries)
        assert waiting == self.costs, "the window that a batch takes up must be neither lost nor doubled"

    def finish(self, rng: Random) -> None:
        """Until all is brought and taken."""
        while any(self.coming) or self.inbox.ready or self.inbox.aligned:
            channels = [channel for channel, events in enumerate(self.coming) if events]
            if channels and rng.random() < 0.5:
                self.bring(rng.choice(channels), rng)
            else:
                self.take(rng)
        assert self.inbox.at_end, "stuck"
        assert self.got == self.put
        assert self.costs == 0


@given(scripts, gaps, st.integers(1, 10**6), randoms)
def test_any_interleaving(plans: list[Script], steps: list[int], first: int, rng: Random) -> None:
    """Also when epochs were passed over, the same for all, and when the task is as slow or quick as can be."""
    epochs = [first + sum(steps[:k]) for k in range(5)]
    model = Model(plans, epochs)
    model.finish(rng)
    assert model.aligned == max(len(plan) - 1 for plan in plans), "every barrier of some channel is aligned once"


@given(scripts, st.booleans(), randoms)
def test_one_channel_after_the_other(plans: list[Script], backwards: bool, rng: Random) -> None:
    """As far apart as channels can be: all but the last are held over many barriers."""
    model = Model(plans, [1, 2, 3, 4, 5])
    for channel in sorted(range(len(plans)), reverse=backwards):
        while model.coming[channel]:
            model.bring(channel, rng)
            model.take(rng)
    model.finish(rng)
    assert model.aligned == max(len(plan) - 1 for plan in plans)


def test_what_stands_between_two_barriers_is_held_until_both_are_there() -> None:
    inbox = Inbox()
    inbox.open = {1, 2}
    inbox.put(1, ["a"], 0, 1)
    inbox.put_barrier(1, 7)
    inbox.put(1, ["late"], 0, 1)
    inbox.put(2, ["b"], 0, 1)
    assert [entry[1] for entry in inbox.ready] == [["a"], ["b"]]
    inbox.put_barrier(2, 7)
    assert not inbox.aligned, "what came before is still to be taken up"
    inbox.ready.clear()
    assert inbox.aligned
    assert inbox.epoch == 7
    inbox.release()
    assert [entry[1] for entry in inbox.ready] == [["late"]]
    assert not inbox._held


def test_an_end_that_is_held_counts_from_the_next_epoch_on() -> None:
    inbox = Inbox()
    inbox.open = {1, 2}
    inbox.put_barrier(1, 1)
    inbox.put_end(1)
    inbox.put_barrier(2, 1)
    inbox.put_barrier(2, 2)
    assert inbox.aligned
    assert inbox.epoch == 1
    inbox.release()
    assert inbox.open == {2}
    assert inbox.aligned
    assert inbox.epoch == 2
    inbox.release()
    assert not inbox.aligned
    assert not inbox.at_end
    inbox.put_end(2)
    assert inbox.at_end


def test_the_last_end_before_a_barrier_lets_it_be_aligned() -> None:
    inbox = Inbox()
    inbox.open = {1, 2}
    inbox.put_barrier(1, 1)
    assert not inbox.aligned
    inbox.put_end(2)
    assert inbox.aligned
    assert not inbox.at_end, "the first channel is open"


def test_what_cannot_be_is_noticed() -> None:
    inbox = Inbox()
    inbox.open = {1, 2, 3}
    inbox.put_barrier(1, 5)
    with pytest.raises(AssertionError, match="channel 2: barrier 6 came while 5 is aligned"):
        inbox.put_barrier(2, 6)
    inbox.put_end(3)
    with pytest.raises(AssertionError, match="channel 3 ended twice"):
        inbox.put_end(3)
    with pytest.raises(AssertionError, match="channel 3: the barrier of epoch 5 came after its end"):
        inbox.put_barrier(3, 5)
