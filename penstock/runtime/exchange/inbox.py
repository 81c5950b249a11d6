"""A task's inbox: what has come by its channels, aligned on barriers.

When a barrier comes by a channel, what follows it by that channel belongs to the next epoch and is *held*; when every
channel that is still open has brought the barrier, and all that came before is taken up, the inbox is *aligned*: the
task saves its state, passes the barrier on and lets the inbox go on. Held records are within their channel's window,
so alignment takes no more memory than a slow task does.

Watermarks stand among the records, with the cost 0.

It must never let a record pass a barrier, nor change the order within a channel.
"""

from __future__ import annotations

from collections import deque

from penstock.runtime.event_time.watermark import Watermark
from penstock.runtime.records.batch import Batch

#: What was held: a batch with stamp and cost, a barrier (None, epoch, 0) or an end (None, None, 0).
_Held = tuple[Batch | Watermark | None, int | None, int]


class Inbox:
    """See the module's docstring. `open` are the channels that have not ended."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.ready: deque[tuple[int, Batch | Watermark, int, int]] = deque()  # (channel, batch, stamp, cost)
        self.epoch = 0  # of the barrier that is being aligned
        self._held: dict[int, deque[_Held]] = {}

    def put(self, channel: int, batch: Batch | Watermark, stamp: int, cost: int) -> None:
        """Take a batch or a watermark that came by a channel."""
        held = self._held
        if held and channel in held:
            held[channel].append((batch, stamp, cost))
        else:
            self.ready.append((channel, batch, stamp, cost))

    def put_barrier(self, channel: int, epoch: int) -> None:
        """Take a barrier."""
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
        """Nothing more comes by this channel."""
        if channel in self._held:
            self._held[channel].append((None, None, 0))
            return
        assert channel in self.open, f"channel {channel} ended twice"
        self.open.remove(channel)

    @property
    def aligned(self) -> bool:
        """The barrier of `epoch` is next."""
        return bool(self._held) and not self.ready and len(self._held) == len(self.open)

    @property
    def at_end(self) -> bool:
        """Nothing is left and nothing will come."""
        return not self.open and not self.ready

    def go_on(self) -> None:
        """The barrier has been dealt with: what was held behind it is next."""
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
