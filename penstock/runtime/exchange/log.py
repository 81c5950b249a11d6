"""Logs: the numbered entries that a sender task sends, and how they reach the receivers of their channels.

An exchange whose records go to one receiver each (by key, in turn, to the first, ...) has a log for each receiver. An
exchange to all has one log for all its receivers, so that a batch is merged, divided and encoded once, however many
tasks, workers and nodes it goes to (docs/papers.md: W1, W2). In both cases a log has a *channel* for each of its
receivers, which is a cursor: it knows the number of the entry that comes next, the outstanding bytes, and the
generation (runtime/exchange/channel.py).

Everything begins in the queue: batches, watermarks, barriers and the end. An entry is made of the queue's head when all
channels that hold up the sender have sent every entry before, and have credit. So the siblings of an exchange to all
run at most a credit window ahead of the slowest one; then the sender stops. A channel that is disconnected or catches
up does not hold up the sender, and takes no memory besides what the cache keeps anyway. It sends alone, until its
cursor meets the others.

Channels to the same worker whose cursors are at the same entry send it in one message, which names all of them. Tasks
of the sender's own worker get the batch itself. In both cases several tasks have the same batch, which nobody may
change. `runtime/worker/shared_batches.py` finds functions that do.

In a job with epochs, a log keeps its entries until the next complete epoch, encoded (runtime/exchange/output_cache.py,
docs/papers.md: D5). Otherwise it drops an entry when all channels have sent it. Every receiver must get every entry
once in each generation, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from time import thread_time_ns
from typing import Protocol

from penstock.runtime.event_time.watermark import Watermark
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES, OutChannel
from penstock.runtime.exchange.channel_state import ChannelState
from penstock.runtime.exchange.message import (
    ADDRESS_BYTES,
    ADDRESS_OF_ONE,
    ANY_WAY,
    BARRIER,
    DATA,
    DESTINATION_BYTES,
    END,
    FIRST,
    MORE,
    NUMBERS_MASK,
    PIECES_MAX,
    WATERMARK,
    address,
    decode_body,
    encode_body,
    signal,
)
from penstock.runtime.exchange.output_cache import Entry, OutputCache
from penstock.runtime.records.batch import Batch, approximate_bytes, concat, split
from penstock.runtime.records.userfunc import DeadLetter, ErrorHandler
from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.hop_times import NOT_NOTED

# In some releases of Python, looking up the members of an Enum is slow.
_CONNECTED, _MEMBER, _IN_PIECES = ChannelState.CONNECTED, ChannelState.MEMBER, ChannelState.IN_PIECES
# In these, a channel sends by itself.
_SENDING = (ChannelState.CONNECTED, ChannelState.CATCHING_UP, ChannelState.IN_PIECES)


class LogStream(Protocol):
    """Takes the entries of a log through relays to the workers of several channels, its members. See
    runtime/relaying/root.py."""

    members: list[OutChannel]

    def join(self) -> None:
        """Lets channels join that have sent all entries of the log. Called before an entry is made."""

    def leave(self, channel: OutChannel) -> None:
        """Sends nothing more to a channel, because its receiver goes back."""

    def push(self, number: int) -> None:
        """Sends an entry of the log to all members."""

    def oldest(self) -> int:
        """Returns the number of the oldest entry of the log that may have to be sent again."""
        ...

    def channels_moved(self) -> None:
        """Must be called when channels were added, or lead to other workers."""


class OutLog:
    """See the module's docstring. `push`, `barrier`, `watermark` and `end` put something into the queue, and `flush`
    sends as much as credit and room allow."""

    def __init__(self, transport: Transport, errors: ErrorHandler, cache: OutputCache | None = None) -> None:
        self.errors = errors
        self.channels: list[OutChannel] = []
        self.queue: deque[tuple[Batch | Watermark | None, int]] = deque()  # None stands for a barrier, with its epoch
        self.cache = cache or OutputCache()
        self.ended = False  # the cache has the end
        # The last flush found no room in the transport, and no message will tell when there is room.
        self.stopped_by_room = False
        # How long `flush` has held up the task, by the task's clock, and since when it does; None: it does not.
        self.stopped_ns = 0
        self.stopped_since: int | None = None
        self.records = 0  # produced so far
        self.bytes = 0  # of these records: encoded size if they are kept or sent, else an estimate
        self.on_shared: Callable[[Batch], None] | None = None  # called with each batch that several tasks get
        # Called with the channels, the number and the batch of each entry.
        self.on_entry: Callable[[Iterable[int], int, Batch], None] | None = None
        self.stream: LogStream | None = None
        self.encoded = 0  # the encodings of a log with a stream, and the processor time that they took
        self.encoding_ns = 0
        self._transport = transport
        self._ending = False
        self._one: OutChannel | None = None  # the only channel
        # For each worker with receivers besides the sender's: the bytes of an address that names them all.
        self._workers: dict[int, int] = {}
        self._local: list[OutChannel] = []
        self._all_sent = 0  # all channels have sent the entries before this number
        self._record_bytes = 64.0  # a smoothed mean, which decides how many records go into a message
        # The last batch as it was produced, the number of its entry, and what it costs. It is for tasks of this worker.
        self._made: Batch | None = None
        self._made_number = -1
        self._made_cost = 0

    def channel(
        self, number: int, task: int, worker: int, *, local: bool, credit_window: int = CREDIT_WINDOW_BYTES
    ) -> OutChannel:
        """Adds a channel to a task. All channels are added before the first entry is made."""
        assert not self.cache.end
        channel = OutChannel(number, task, worker, local=local, credit_window=credit_window)
        self.channels.append(channel)
        self._one = channel if len(self.channels) == 1 else None
        self._channels_moved()
        return channel

    def _channels_moved(self) -> None:
        self._workers = {}
        self._local = [channel for channel in self.channels if channel.local]
        for channel in self.channels:
            if not channel.local:
                self._workers[channel.worker] = self._workers.get(channel.worker, ADDRESS_BYTES) + DESTINATION_BYTES
        if self.stream is not None:
            self.stream.channels_moved()

    def disconnect(self, channel: OutChannel) -> None:
        """Sends nothing more by a channel, because its receiver goes back."""
        if channel.life.state is _MEMBER:
            assert self.stream is not None
            self.stream.leave(channel)
        channel.disconnect()

    def move(self, channel: OutChannel, worker: int, *, local: bool) -> None:
        """Makes a channel, which is disconnected, lead to another worker, where its receiver is built again."""
        channel.move(worker, local=local)
        self._channels_moved()

    def connect(self, channel: OutChannel, generation: int) -> None:
        """Sends everything since the last complete epoch by a channel, whose receiver is back at this epoch."""
        channel.connect(generation, self.cache.first, self.cache.end)
        self._all_sent = -1

    def repeat(self, channel: OutChannel, number: int) -> None:
        """Sends the entries from this number on by a channel that has left the stream, because some of them may not
        have been delivered."""
        channel.repeat(max(number, self.cache.first))
        self._all_sent = -1

    @property
    def _ways(self) -> int:
        """The mark of messages between workers, which may go through relays as well."""
        return 0 if self.stream is None else ANY_WAY

    # --- the queue -----------------------------------------------------------------------------------------------

    def push(self, batch: Batch, stamp: int) -> None:
        """Adds a batch to the end of the queue. The caller then flushes, and runs no further while `flush` returns
        False."""
        self.queue.append((batch, stamp))

    def barrier(self, epoch: int) -> None:
        self.queue.append((None, epoch))

    def watermark(self, value: int) -> None:
        self.queue.append((Watermark(value), 0))

    def end(self) -> None:
        self._ending = True

    def queued(self) -> int:
        """Returns the number of records in the queue. Other threads may ask."""
        return sum(len(batch) for batch, _ in list(self.queue) if batch is not None)

    def unsent(self, channel: OutChannel) -> int:
        """Returns the number of records that wait for a channel's credit or room. Other threads may ask."""
        return self.queued() + self.cache.unsent_records(channel.next)

    def stop(self, now: int) -> None:
        """Notes that the task stands still from now on, until `flush` lets it run."""
        self.stopped_since = now

    def stop_over(self, now: int) -> None:
        """Notes that the task may run as far as this log is concerned."""
        since, self.stopped_since = self.stopped_since, None
        if since is not None:
            self.stopped_ns += now - since

    def stopped(self, now: int) -> int:
        """Returns for how many ns this log has held up the task so far. Other threads may ask."""
        since = self.stopped_since
        return self.stopped_ns + (0 if since is None else max(0, now - since))

    # --- sending -------------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Sends the queue. Returns True when the task may run, and False when `flush` must be called again
        before."""
        self.stopped_by_room = False
        one, cache, queue = self._one, self.cache, self.queue
        while True:
            if one is None:
                if not self._send_to_all():
                    return False
            elif one.next != cache.end and not self._send_to_one(one):
                return False
            if queue:
                if queue[0][0] and not self._has_credit():  # records
                    return False
            elif not self._ending:
                return True
            if self.stream is not None:
                self.stream.join()
            self._make_entry()

    def _has_credit(self) -> bool:
        """Whether all channels that hold up the sender may send records."""
        for channel in self.channels:
            if channel.outstanding >= channel.credit_limit and not channel.catching_up:
                return False
        return True

    def _send_to_one(self, channel: OutChannel) -> bool:
        """Sends the entries of the log to its only channel. Returns whether the channel does not hold up the sender."""
        cache, transport = self.cache, self._transport
        if channel.life.state is not _CONNECTED:
            if channel.connected:
                self._send_together([channel])
                if not cache.keeps:
                    cache.drop_before(channel.next)
            return channel.next == cache.end or channel.catching_up
        times = transport.times
        while channel.next != cache.end:
            number = channel.next
            entry = cache.entries[number - cache.first]
            size = entry[3]  # a signal has none
            if size and channel.outstanding >= channel.credit_window:
                return False
            begun_ns = 0 if times is None or number & NOT_NOTED else times.clock()
            if channel.local:
                if number == self._made_number:
                    batch, cost = self._made, self._made_cost
                    self._made, self._made_number = None, -1
                    channel.outstanding += cost
                    channel.receiver.receive(channel.number, batch, entry[1], cost)  # type: ignore[union-attr, arg-type]
                    if begun_ns and times is not None:
                        times.inside(begun_ns)
                else:
                    self._hand_over([channel], number, entry)
            else:
                marks = FIRST if number == channel.run_begins else 0
                head = ADDRESS_OF_ONE.pack(1, marks, number & NUMBERS_MASK, channel.number, channel.generation)
                if not transport.send(channel.worker, channel.task, (head, *cache.parts(entry))):
                    self.stopped_by_room = True
                    return False
                channel.outstanding += size
                if begun_ns and times is not None:
                    times.sent(channel.number, channel.generation, number & NUMBERS_MASK, begun_ns)
            channel.next = number + 1
            if not cache.keeps:
                cache.drop_before(number + 1)
        return True

    def _send_to_all(self) -> bool:
        """Sends the entries of the log to several channels. Returns whether none of them holds up the sender."""
        cache = self.cache
        end = cache.end
        if self._all_sent == end:
            return True
        behind: dict[tuple[object, ...], list[OutChannel]] = {}
        for channel in self.channels:
            number, state = channel.next, channel.life.state
            if number != end and (state is _CONNECTED or state in _SENDING):
                place = -1 if channel.local else channel.worker
                key = (place, number, number == channel.run_begins, channel.number if state is _IN_PIECES else -1)
                behind.setdefault(key, []).append(channel)
        for channels in behind.values():
            self._send_together(channels)
        stream = self.stream
        if stream is not None and stream.members:
            self._send_by_stream(stream)
        if not cache.keeps:
            first = min(channel.next for channel in self.channels)
            cache.drop_before(first if stream is None else min(first, stream.oldest()))
        waiting = [channel for channel in self.channels if channel.next != end]
        if not waiting:
            self._all_sent = end
        elif not all(channel.catching_up for channel in waiting):
            return False
        self._made, self._made_number = None, -1
        return True

    def _send_by_stream(self, stream: LogStream) -> None:
        """Sends the latest entries to the members of the stream. They had credit when the entries were made."""
        cache = self.cache
        number, end = stream.members[0].next, cache.end
        size = 0
        while number != end:
            size += cache.entries[number - cache.first][3]  # a signal has none
            stream.push(number)
            number += 1
        for channel in stream.members:
            channel.outstanding += size
            channel.next = end

    def _send_together(self, channels: list[OutChannel]) -> None:
        """Sends the entries of the log to channels of one worker whose cursors are at the same entry. A channel without
        credit is left behind."""
        cache, transport = self.cache, self._transport
        first = channels[0]
        while first.next != cache.end:
            number = first.next
            entry = cache.entries[number - cache.first]
            size = entry[3]  # a signal has none
            if size:
                channels = [
                    channel
                    for channel in channels
                    if channel.outstanding < channel.credit_window or number < channel.repeats_until
                ]
                if not channels:
                    return
                first = channels[0]
            if first.local:
                self._hand_over(channels, number, entry)
                size = 0
            elif first.life.state is _IN_PIECES:
                if not self._send_pieces(first, number, entry):
                    self.stopped_by_room = True
                    return
                size = 0
            else:
                destinations = [(channel.number, channel.generation) for channel in channels]
                marks = self._ways | (FIRST if number == first.run_begins else 0)
                head = address(destinations, number, marks)
                if not transport.send(first.worker, first.task, (head, *cache.parts(entry))):
                    self.stopped_by_room = True
                    return
            for channel in channels:
                if number >= channel.repeats_until:
                    channel.outstanding += size
                channel.next = number + 1
                if channel.life.state is not _CONNECTED:
                    channel.passed()

    def _hand_over(self, channels: list[OutChannel], number: int, entry: Entry) -> None:
        kind, stamp = entry[:2]
        if kind != DATA:
            for channel in channels:
                receiver = channel.receiver
                assert receiver is not None
                if kind == BARRIER:
                    receiver.receive_barrier(channel.number, stamp)
                elif kind == END:
                    receiver.receive_end(channel.number)
                else:
                    receiver.receive_watermark(channel.number, stamp)
            return
        if number == self._made_number:
            batch, cost = self._made, self._made_cost
            assert batch is not None
        else:
            batch = decode_body(b"".join(self.cache.parts(entry)))
            cost = max(approximate_bytes(batch), entry[3])
        if self.on_shared is not None and len(channels) > 1:
            self.on_shared(batch)
        for channel in channels:
            assert channel.receiver is not None
            channel.outstanding += cost
            channel.receiver.receive(channel.number, batch, stamp, cost)

    def _send_pieces(self, channel: OutChannel, number: int, entry: Entry) -> bool:
        """Sends an entry to a receiver that has moved, in pieces when it is too large for the receiver's new place.
        Returns False when there is no room."""
        pieces = channel.pieces
        if not pieces:
            parts = tuple(bytes(part) for part in self.cache.parts(entry))
            limit = self._transport.largest_message(channel.worker) - ADDRESS_BYTES - DESTINATION_BYTES
            if entry[0] != DATA or sum(map(len, parts)) <= limit:
                pieces.append(parts)
            else:
                pieces += self._pieces(decode_body(b"".join(parts)), entry[1], limit)
                # All records may have been too large. The receiver expects a message nevertheless.
                if not pieces:
                    pieces.append(encode_body([], entry[1], self.errors)[1])
        while pieces:
            begins = number == channel.run_begins and not channel.piece
            marks = self._ways | (FIRST if begins else 0) | (MORE if len(pieces) > 1 else 0)
            head = address([(channel.number, channel.generation)], number, marks, channel.piece % PIECES_MAX)
            if not self._transport.send(channel.worker, channel.task, (head, *pieces[0])):
                return False
            if entry[0] == DATA:
                channel.outstanding += sum(map(len, pieces[0]))
            channel.piece += 1
            pieces.popleft()
        channel.piece = 0
        return True

    def _pieces(self, batch: Batch, stamp: int, limit: int) -> Iterator[tuple[bytes, ...]]:
        batch, parts = encode_body(batch, stamp, self.errors)
        size = sum(map(len, parts))
        if not batch:
            return
        if size <= limit:
            yield parts
        elif len(batch) > 1:
            for half in split(batch, len(batch) // 2):
                yield from self._pieces(half, stamp, limit)
        else:
            self._refuse(batch, size, limit)

    # --- entries -------------------------------------------------------------------------------------------------

    def _make_entry(self) -> None:
        if not self.queue:
            self._ending, self.ended = False, True
            self.cache.append((END, 0, 0, 0, signal(END, 0)))
            return
        batch, stamp = self.queue.popleft()
        if batch is None:
            self.cache.append((BARRIER, stamp, 0, 0, signal(BARRIER, stamp)))
        elif isinstance(batch, Watermark):
            self.cache.append((WATERMARK, batch.value, 0, 0, signal(WATERMARK, batch.value)))
        elif self._workers:
            self._encode_next(batch, stamp)
        else:
            self._take_whole(batch, stamp)

    def _take_whole(self, batch: Batch, stamp: int) -> None:
        """Makes an entry of a batch that goes to tasks of this worker only."""
        parts: tuple[bytes, ...] = ()
        encoded = 0
        if self.cache.keeps:
            # The receivers get the records themselves, and may change them. So the cache keeps an encoded copy, even of
            # records that cannot change: the batch would keep all its objects in memory, and new objects would then lie
            # in memory that is not in the processor's caches, which costs WordCount a fifth of its throughput
            # (benchmarks/checkpoint_cost.py). Records that cannot be encoded are not sent, because they could not be
            # sent again.
            batch, parts = self._encode(batch, stamp)
            if not batch:
                return
            encoded = sum(map(len, parts))
        estimate = approximate_bytes(batch)
        # Nested records are larger than they look.
        self._append(batch, stamp, encoded or estimate, max(encoded, estimate), parts)

    def _encode(self, batch: Batch, stamp: int) -> tuple[Batch, tuple[bytes, ...]]:
        meter = self._transport.meter
        if meter is None or not meter.due("encode"):
            return encode_body(batch, stamp, self.errors)
        begun_ns = meter.clock()
        batch, parts = encode_body(batch, stamp, self.errors)
        meter.note("encode", 1, sum(map(len, parts)), begun_ns)
        return batch, parts

    def _append(self, batch: Batch, stamp: int, size: int, cost: int, parts: tuple[bytes, ...]) -> None:
        """Makes an entry of `size` bytes, which costs a task of this worker `cost` bytes of its credit window."""
        if self.on_entry is not None:
            self.on_entry([channel.number for channel in self.channels], self.cache.end, batch)
        records = len(batch)
        self.bytes += size
        self.records += records
        if self._local:
            one = self._one
            self._made, self._made_number, self._made_cost = batch, self.cache.end, cost
            if (one is None or one.life.state is not _CONNECTED) and all(each.catching_up for each in self._local):
                self._made, self._made_number = None, -1
        self.cache.append((DATA, stamp, records, size, *parts))

    def _encode_next(self, batch: Batch, stamp: int) -> None:
        """Makes an entry that fits into a message to each receiver. It contains the batch, and as much of what follows
        in the queue as fits."""
        transport, queue = self._transport, self.queue
        limit = int(transport.target_message / self._record_bytes) or 1
        if len(batch) < limit and queue and queue[0][0]:
            batches, count = [batch], len(batch)
            while (
                queue
                and (following := queue[0][0])
                and not isinstance(following, Watermark)
                and count + len(following) <= limit
            ):
                later = queue.popleft()[1]
                batches.append(following)
                count += len(following)
                stamp = min(stamp, later)
            batch = concat(batches)
        while True:
            if len(batch) > limit:
                batch, rest = split(batch, limit)
                queue.appendleft((rest, stamp))
            if self.stream is None:
                batch, parts = self._encode(batch, stamp)
            else:
                begun_ns = thread_time_ns()
                batch, parts = self._encode(batch, stamp)
                self.encoded += 1
                self.encoding_ns += thread_time_ns() - begun_ns
            if not batch:
                return
            size = sum(map(len, parts))
            one = self._one
            if size <= (
                self._room(transport.max_message)
                if one is None
                else transport.max_message(one.worker) - ADDRESS_BYTES - DESTINATION_BYTES
            ):
                break
            if len(batch) == 1:
                largest = self._room(transport.largest_message)
                if size <= largest:
                    break
                self._too_large(batch, size, stamp, largest)
                return
            limit = max(1, len(batch) // 2)
        self._record_bytes += 0.25 * (size / max(1, len(batch)) - self._record_bytes)
        self._append(batch, stamp, size, size, parts)

    def _room(self, limit: Callable[[int], int]) -> int:
        """Returns the size of the largest body that fits into a message to each receiver, where `limit` gives the size
        of a message to a worker."""
        return min(limit(worker) - size for worker, size in self._workers.items())

    def _too_large(self, batch: Batch, size: int, stamp: int, largest: int) -> None:
        record = batch[0] if isinstance(batch, list) else batch.values[0]
        if isinstance(record, DeadLetter) and record != (shortened := record.shortened()):
            self.queue.appendleft(([shortened], stamp))
        else:
            self._refuse(batch, size, largest)

    def _refuse(self, batch: Batch, size: int, largest: int) -> None:
        self.errors.handle(
            batch[0] if isinstance(batch, list) else batch.values[0],
            ValueError(
                f"the record takes {size:,} bytes encoded, and may take {largest:,} at most; "
                f"{self._transport.remedy(size + ADDRESS_BYTES + DESTINATION_BYTES)}"
            ),
        )

    def kept(self) -> Iterator[tuple[int, int, Batch | None]]:
        """Yields everything that was produced since the last complete epoch, in order, as (kind, stamp or epoch,
        batch). The log itself is given up."""
        while self.queue or self._ending:
            self._make_entry()
        for entry in self.cache.entries:
            kind, stamp = entry[:2]
            yield kind, stamp, decode_body(b"".join(self.cache.parts(entry))) if kind == DATA else None

    # --- epochs --------------------------------------------------------------------------------------------------

    def complete(self, epoch: int) -> None:
        """Drops the entries before the barrier of this epoch, because no receiver will go back further."""
        cache = self.cache
        first = cache.first
        mark = cache.complete(BARRIER, END, WATERMARK, epoch)
        if cache.first == first and mark is None:
            return
        for channel in self.channels:
            # The watermark that is kept has another number now, that of the first entry.
            at = max(channel.next, cache.first + 1) if mark is not None and channel.next > mark else cache.first
            if at > channel.next:
                # Its receiver had ended before the epoch, and was being sent again what it had received.
                channel.skip(at)
