"""The input of a task that receives from channels: an inbox, and the watermarks of the channels (docs/papers.md: A1).

The ends of the channels give it messages, and the task takes a part of the inbox for a step: batches of one input of
its first operator, up to a watermark. When the first stage is pending, its collected answers come before the inbox. A
watermark must never be taken before the records that came before it in its channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock.runtime.event_time.watermark import END_OF_TIME, Watermark
from penstock.runtime.exchange.channel import InChannel
from penstock.runtime.exchange.inbox import Inbox
from penstock.runtime.records.batch import Batch, concat, split
from penstock.runtime.worker.blackbox import SOURCE
from penstock.runtime.worker.passage import Passage
from penstock.runtime.worker.task_input import TaskInput


class ChannelInput(TaskInput):
    """The input of a task that receives from channels; see the module's docstring. It is the Receiver of its channels.
    With `event_time`, the end of a channel is also its last watermark."""

    def __init__(
        self, passage: Passage, clock: Callable[[], int], *, event_time: bool = False, waits_for_more: bool = True
    ) -> None:
        super().__init__(passage, clock, waits_for_more=waits_for_more)
        self.inbox = Inbox()
        self._pending = passage.pending
        self._event_time = event_time
        self._several = passage.stages[0].context.operator.inputs > 1

    def add(self, channel: InChannel) -> None:
        """Adds a channel to receive from. It replaces a channel of the same number."""
        self.channels[channel.number] = channel

    def connect(self) -> None:
        self.inbox.open = {number for number, channel in self.channels.items() if not channel.ended}

    # --- called by channels --------------------------------------------------------------------------------------

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        self.queued += len(batch)
        self.inbox.put(channel, batch, stamp, cost)

    def receive_barrier(self, channel: int, epoch: int) -> None:
        self.inbox.put_barrier(channel, epoch)

    def receive_watermark(self, channel: int, value: int) -> None:
        if not self.had_ended:
            self.inbox.put(channel, Watermark(value), 0, 0)

    def receive_end(self, channel: int) -> None:
        self.channels[channel].ended = True
        if self._event_time and not self.had_ended:
            self.inbox.put(channel, Watermark(END_OF_TIME), 0, 0)
        self.inbox.put_end(channel)

    # --- called by the task --------------------------------------------------------------------------------------

    def has_input(self) -> bool:
        inbox, pending = self.inbox.ready, self._pending
        if pending is None:
            return bool(inbox)
        if pending.room > 0:
            return pending.returned > 0 or bool(inbox)
        # A watermark needs no room, but it follows the records that an epoch has saved.
        return not pending.returned and bool(inbox) and isinstance(inbox[0][1], Watermark)

    def has_more(self) -> bool:
        if self._pending is not None and self._pending.ready():
            return True
        inbox = self.inbox.ready
        return bool(inbox) and not isinstance(inbox[0][1], Watermark) and self.has_input()

    def has_barrier(self) -> bool:
        return self.inbox.aligned

    def take_barrier(self) -> int:
        epoch = self.inbox.epoch
        self.inbox.release()
        return epoch

    def at_end(self) -> bool:
        return self.inbox.at_end and (self._pending is None or not self._pending.under_way)

    def take(self) -> Iterator[Batch] | None:
        passage, pending = self.passage, self._pending
        if pending is not None and pending.ready():
            return passage.collect(pending)
        if pending is not None and pending.returned:  # records that an epoch has saved
            if not pending.room:
                return None
            batch = pending.take_returned(self.step_limit())
            if passage.record_by_record is not None:
                passage.record_by_record.origin = SOURCE  # no channel has this number
            self.more = pending.returned > 0
            passage.stamped(self.clock())
        elif self._event_time and self._take_marks():
            return passage.advance_to(self.marks.current)
        elif self.inbox.ready and (pending is None or pending.room):
            batch, stamp = self._take_records(self.step_limit())
            if (sample := self.sample) is not None:  # read once, because another thread may take it
                sample.add(batch, self.clock())
            passage.stamped(stamp)
        else:
            return None
        self.taken = len(batch)
        return passage.through(batch)

    def _take_records(self, limit: int) -> tuple[Batch, int]:
        """Takes up to this many records from the inbox. Returns them, and the stamp of the oldest."""
        inbox, channels, first_stage = self.inbox.ready, self.channels, self.passage.stages[0]
        channel, first, oldest, cost = inbox.popleft()
        stamp = oldest
        most = limit
        if (noting := self.passage.record_by_record) is not None:
            noting.origin, most = channel, 0  # only records of one channel at a time
        assert not isinstance(first, Watermark)
        if several := self._several:
            first_stage.port = channels[channel].port
        count = len(first)
        batches = [first]
        channels[channel].take(cost)
        while inbox and count < most and not isinstance(following := inbox[0][1], Watermark):
            if count + len(following) > most and not self.passage.gathering:
                break  # splitting a batch costs more than a step that is not full
            if several and channels[inbox[0][0]].port != first_stage.port:
                break
            channel, _, stamp, cost = inbox.popleft()
            channels[channel].take(cost)
            batches.append(following)
            count += len(following)
            oldest = min(oldest, stamp)
        batch = concat(batches)
        if count > limit:
            # The rest goes back without cost. Its credit is granted, which is at most one message more than the credit
            # window.
            batch, rest = split(batch, limit)
            inbox.appendleft((channel, rest, stamp, 0))
            count = limit
        self.queued -= count
        self.more = bool(inbox)
        return batch, oldest

    def _take_marks(self) -> bool:
        """Takes the watermarks that come next in the inbox. Returns True when the task's own watermark has changed."""
        inbox = self.inbox.ready
        changed = False
        while inbox and isinstance(mark := inbox[0][1], Watermark):
            changed |= self.marks.take(inbox[0][0], mark.value, self.channels)
            if self.marks.again:
                break
            inbox.popleft()
        return changed

    def has_input_to_divert(self) -> bool:
        return bool(self.inbox.ready)

    def take_to_divert(self, most: int, *, columns: bool) -> tuple[Any, int, int]:
        inbox = self.inbox.ready
        if isinstance(inbox[0][1], Watermark):
            self._take_marks()
            current = self.marks.current
            return (Watermark(current), 0, 0) if current is not None else ([], 0, 0)
        batch, stamp = self._take_records(most)
        assert isinstance(batch, list), "a range never begins after a key grouping"
        return batch, len(batch), stamp
