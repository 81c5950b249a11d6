"""A task's inbox: what has arrived in its channels and is not processed yet, aligned at barriers.

When a barrier has arrived in a channel, whatever follows it there belongs to the next epoch, and is *held back*. When
every open channel has brought the barrier, and the task has taken up everything before it, the inbox is *aligned*: the
task saves its state, passes the barrier on, and lets the inbox continue. Records that are held back still count in
their channel's credit window, so alignment takes no more memory than a slow task does.

Watermarks stand among the records, with the cost 0. The inbox must never let a record pass a barrier, nor change the
order within a channel.
"""

from __future__ import annotations

from collections import deque

from penstock.runtime.event_time.watermark import Watermark
from penstock.runtime.records.batch import Batch

#: What is held back: a batch with its stamp and cost, a barrier (None, epoch, 0), or an end (None, None, 0).
_Held = tuple[Batch | Watermark | None, int | None, int]


class Inbox:
    """See the module's docstring. `open` contains the channels that have not ended."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.ready: deque[tuple[int, Batch | Watermark, int, int]] = deque()  # (channel, batch, stamp, cost)
        self.epoch = 0  # the epoch of the barrier that is being aligned
        self._held: dict[int, deque[_Held]] = {}

    def put(self, channel: int, batch: Batch | Watermark, stamp: int, cost: int) -> None:
        held = self._held
        if held and channel in held:
            held[channel].append((batch, stamp, cost))
        else:
            self.ready.append((channel, batch, stamp, cost))

    def put_barrier(self, channel: int, epoch: int) -> None:
        held = self._held
        if channel in held:
            held[channel].append((None, epoch, 0))
            return
        assert channel in self.open, f"channel {channel}: the barrier of epoch {epoch} came after its end"
        if held:
            assert epoch == self.epoch, f"channel {channel}: barrier {epoch} came while {self.epoch} is aligned"
        self.epoch = epoch
        held[channel] = deque()

    def put_end(self, channel: int) -> None:
        if channel in self._held:
            self._held[channel].append((None, None, 0))
            return
        assert channel in self.open, f"channel {channel} ended twice"
        self.open.remove(channel)

    @property
    def aligned(self) -> bool:
        """Whether the task has taken up everything before the barrier of `epoch`, and the barrier has arrived in every
        channel."""
        return bool(self._held) and not self.ready and len(self._held) == len(self.open)

    @property
    def at_end(self) -> bool:
        return not self.open and not self.ready

    def release(self) -> None:
        """Continues after the barrier: releases what was held back."""
        held, self._held = self._held, {}
        for channel, entries in held.items():
            for batch, stamp, cost in entries:
                if batch is not None:
                    assert stamp is not None
                    self.put(channel, batch, stamp, cost)
                elif stamp is not None:
                    self.put_barrier(channel, stamp)
                else:
                    self.put_end(channel)
