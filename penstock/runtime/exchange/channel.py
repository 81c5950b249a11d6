"""Channels between tasks, and the credit that limits how many bytes are outstanding in each channel.

A channel leads from one sender task to one receiver task, and keeps the order of records. Bytes are outstanding from
the time they are sent until the receiver's task has taken them up. The sender may send while less than a *credit
window* is outstanding. So a worker can always receive what reaches it: the credit windows limit its inboxes, and a slow
task holds up only the tasks that send to it. The sender counts the bytes that it has sent. The receiver grants credit
for the bytes that its task has taken up, in lots of half a credit window.

Why nothing deadlocks: a sender stops only while at least a credit window is outstanding. When the receiver has taken up
all of it, the receiver owes more than half a credit window, and therefore grants. Grants never wait for credit, and
barriers and ends wait only for the records before them. When a task may not send, its worker skips the task and runs
the others.

In a job with epochs, a channel keeps what it has sent since the last complete epoch (runtime/exchange/output_cache.py).
When its receiver goes back, the channel is *disconnected*: the sender's records only fill the cache, and the sender is
not held up. When the receiver has been built again, the channel is *connected* to it under a new *generation*, and
sends everything that the cache holds. Until it has sent what was in the cache at that moment, its sender is still not
held up. A message of an older generation is dropped wherever it arrives. The caches are docs/papers.md: D5.

A channel must never change the order of records, and must never let a record pass a barrier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from penstock.runtime.event_time.watermark import Watermark
from penstock.runtime.exchange.message import (
    BARRIER,
    CREDIT,
    DATA,
    END,
    GENERATION,
    GENERATION_AT,
    HEAD,
    WATERMARK,
    decode_batch,
    encode_batch,
)
from penstock.runtime.exchange.output_cache import Entry, OutputCache
from penstock.runtime.records.batch import Batch, approximate_bytes, concat, split
from penstock.runtime.records.userfunc import DeadLetter, ErrorHandler
from penstock.runtime.transport.base import Transport

# The credit window: the number of bytes that may be outstanding in one channel. Below some 64 KiB, a fast sender waits
# for grants between messages. With a much larger window, much waits for a slow receiver, which is latency. A channel
# inside a worker has the same credit window.
CREDIT_WINDOW_BYTES = 256 * 1024


class Receiver(Protocol):
    """The task at the end of a channel, as far as the channel knows it."""

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        """Takes a batch into the inbox. It uses `cost` bytes of the channel's credit window until the task takes it
        up."""

    def receive_barrier(self, channel: int, epoch: int) -> None:
        """Takes a barrier. What follows it in this channel belongs to the next epoch."""

    def receive_watermark(self, channel: int, value: int) -> None:
        """Takes a watermark. What follows it in this channel is not earlier than this time, or late."""

    def receive_end(self, channel: int) -> None:
        """Takes the end of this channel. Nothing follows it."""


class OutChannel(ABC):
    """The sender's end of a channel. `push`, `barrier`, `watermark` and `end` put something into the queue, and `flush`
    sends as much of the queue as credit and room allow."""

    def __init__(self, number: int, errors: ErrorHandler, credit_window: int, cache: OutputCache | None) -> None:
        self.number = number
        self.credit_window = credit_window
        self.generation = 0
        self.outstanding = 0
        self.queue: deque[tuple[Batch | Watermark | None, int]] = deque()  # None stands for a barrier, with its epoch
        self.cache = cache or OutputCache()
        self.ended = False  # the cache has the end
        self.connected = True
        self.catching_up = False  # the cache has messages that the receiver missed, so the task is not held up
        # The last flush found no room in the transport, and no message will tell when there is room.
        self.stopped_by_room = False
        self.records = 0  # produced so far
        self.bytes = 0  # of these records: encoded size if they are kept or sent, else an estimate
        self.errors = errors
        self._ending = False
        self._until = 0  # the number of the first entry after which the task may be held up again

    def push(self, batch: Batch, stamp: int) -> None:
        """Adds a batch to the end of the queue. The caller then flushes, and runs no further while `flush` returns
        False."""
        self.queue.append((batch, stamp))

    def barrier(self, epoch: int) -> None:
        """Adds a barrier to the queue."""
        self.queue.append((None, epoch))

    def watermark(self, value: int) -> None:
        """Adds a watermark to the queue."""
        self.queue.append((Watermark(value), 0))

    def end(self) -> None:
        """Adds the end of the stream to the queue."""
        self._ending = True

    def flush(self) -> bool:
        """Sends what is queued. Returns True when the task may run, and False when `flush` must be called again
        before."""
        self.stopped_by_room = False
        if self.connected and self._send_all():
            return True
        if not self.catching_up:
            return False
        self._cache_all()
        return True

    def _send_all(self) -> bool:
        cache = self.cache
        while True:
            while cache.unsent:
                entry = cache.entries[cache.next]
                is_data = entry[0] == DATA
                if is_data and self.outstanding >= self.credit_window:
                    return False
                if not self._send(entry):
                    self.stopped_by_room = True
                    return False
                if is_data:
                    self.outstanding += entry[3]
                cache.sent()
                if self.catching_up and cache.first + cache.next >= self._until:
                    self.catching_up = False
            if self.queue and self.queue[0][0] and self.outstanding >= self.credit_window:  # records
                return False
            if not self._cache_next():
                return True

    def _cache_all(self) -> None:
        while self._cache_next():
            pass

    def _cache_next(self) -> bool:
        """Moves something from the queue into the cache. Returns False when the queue is empty."""
        if self.queue:
            batch, stamp = self.queue.popleft()
            if batch is None:
                self.cache.append((BARRIER, stamp, 0, 0, self._signal(BARRIER, stamp)))
            elif isinstance(batch, Watermark):
                self.cache.append((WATERMARK, batch.value, 0, 0, self._signal(WATERMARK, batch.value)))
            else:
                self._cache_batch(batch, stamp)
            return True
        if self._ending and not self.ended:
            self.ended = True
            self.cache.append((END, 0, 0, 0, self._signal(END, 0)))
            return True
        return False

    def _signal(self, kind: int, stamp: int) -> bytes:
        return HEAD.pack(kind, 0, 0, self.number, stamp, 0, self.generation)

    @abstractmethod
    def _cache_batch(self, batch: Batch, stamp: int) -> None:
        """Puts a batch that was taken from the queue into the cache, in the form in which it is sent."""

    @abstractmethod
    def _send(self, entry: Entry) -> bool:
        """Sends an entry of the cache. Returns False when there is no room."""

    def granted(self, credit: int) -> None:
        """Takes credit for this many bytes, which the receiver has taken up."""
        self.outstanding -= credit

    def queued(self) -> int:
        """Returns the number of records that wait for credit or room."""
        # A copy, because other threads may call this.
        waiting = sum(len(batch) for batch, _ in list(self.queue) if batch is not None)
        return waiting + (self.cache.unsent_records() if self.cache.unsent else 0)

    def kept(self) -> Iterator[tuple[int, int, Batch | None]]:
        """Yields everything that was produced since the last complete epoch, in order, as (kind, stamp or epoch,
        batch). The channel itself is given up."""
        self._cache_all()
        for entry in self.cache.entries:
            kind, stamp, *_ = entry
            yield kind, stamp, decode_batch(b"".join(self.cache.parts(entry))).batch if kind == DATA else None

    # --- epochs --------------------------------------------------------------------------------------------------

    def complete(self, epoch: int) -> None:
        """Drops what the cache keeps for epochs before this one, because no receiver will go back further."""
        self.cache.complete(BARRIER, END, WATERMARK, epoch)

    def disconnect(self) -> None:
        """Sends nothing any more, because the receiver goes back."""
        self.connected = False
        self.catching_up = True

    def connect(self, generation: int) -> None:
        """Sends everything since the last complete epoch, because the receiver is back at this epoch."""
        self._cache_all()
        self.connected = True
        self.generation = generation
        self.outstanding = 0
        self.cache.rewind()
        # The task is held up again before everything is sent. A sender that is faster than its receiver would otherwise
        # never be held up again.
        self._until = self.cache.first + len(self.cache.entries)
        self.catching_up = self.cache.unsent


class LocalChannel(OutChannel):
    """A channel to a task of the same worker. It hands each batch over without encoding it."""

    def __init__(
        self,
        number: int,
        receiver: Receiver | None,
        errors: ErrorHandler,
        credit_window: int = CREDIT_WINDOW_BYTES,
        cache: OutputCache | None = None,
    ) -> None:
        super().__init__(number, errors, credit_window, cache)
        self._receiver = receiver
        # Unsent batches as they were produced, with the numbers of their entries.
        self._made: deque[tuple[int, Batch]] = deque()

    def deliver_to(self, receiver: Receiver) -> None:
        """Sends everything to this task from now on, which has just been built."""
        self._receiver = receiver

    def disconnect(self) -> None:
        """See OutChannel."""
        super().disconnect()
        self._made.clear()

    def _cache_batch(self, batch: Batch, stamp: int) -> None:
        cache = self.cache
        if cache.keeps:
            # The receiver gets the records themselves, and may change them. So the cache keeps an encoded copy, even of
            # records that cannot change: the batch would keep all its objects in memory, and new objects would then lie
            # in memory that is not in the processor's caches, which costs WordCount a fifth of its throughput
            # (benchmarks/checkpoint_cost.py). Records that cannot be encoded are not sent, because they could not be
            # sent again.
            batch, parts = encode_batch(self.number, batch, stamp, self.errors, self.generation)
            if not batch:
                return
            size = max(approximate_bytes(batch), sum(map(len, parts)))  # nested records are larger than they look
        else:
            parts, size = (), approximate_bytes(batch)
        self.bytes += size
        self.records += len(batch)
        if self.connected and not self.catching_up:
            self._made.append((cache.first + len(cache.entries), batch))
        cache.append((DATA, stamp, len(batch), size, *parts))

    def _send(self, entry: Entry) -> bool:
        assert self._receiver is not None
        kind, stamp, _, size = entry[:4]
        if kind == BARRIER:
            self._receiver.receive_barrier(self.number, stamp)
        elif kind == END:
            self._receiver.receive_end(self.number)
        elif kind == WATERMARK:
            self._receiver.receive_watermark(self.number, stamp)
        elif self._made and self._made[0][0] == self.cache.first + self.cache.next:
            self._receiver.receive(self.number, self._made.popleft()[1], stamp, size)
        else:
            batch = decode_batch(b"".join(self.cache.parts(entry))).batch
            assert batch is not None
            self._receiver.receive(self.number, batch, stamp, size)
        return True


class RemoteChannel(OutChannel):
    """A channel to a task of another worker. It encodes batches, a list at a time, into messages that fit the
    transport."""

    def __init__(
        self,
        number: int,
        worker: int,
        task: int,
        transport: Transport,
        errors: ErrorHandler,
        credit_window: int = CREDIT_WINDOW_BYTES,
        cache: OutputCache | None = None,
    ) -> None:
        super().__init__(number, errors, credit_window, cache)
        self.worker = worker
        self.task = task
        self._transport = transport
        self._record_bytes = 64.0  # a smoothed mean, which decides how many records go into a message

    def _send(self, entry: Entry) -> bool:
        parts = self.cache.parts(entry)
        if self.generation and self.catching_up:
            # The end may have been encoded under an older generation.
            head = parts[0]
            stamped = bytes(head[:GENERATION_AT]) + GENERATION.pack(self.generation) + bytes(head[HEAD.size :])
            parts = (stamped, *parts[1:])
        return self._transport.send(self.worker, self.task, parts)

    def _cache_batch(self, batch: Batch, stamp: int) -> None:
        """Encodes the next message. It contains the batch, and as much of what follows in the queue as fits."""
        limit = max(1, int(self._transport.target_message / self._record_bytes))
        queue = self.queue
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
            batch, message = encode_batch(self.number, batch, stamp, self.errors, self.generation)
            if not batch:
                return
            size = sum(map(len, message))
            if size <= self._transport.max_message(self.worker):
                break
            if len(batch) == 1 and size <= self._transport.largest_message(self.worker):
                break
            if len(batch) == 1:
                self._too_large(batch, size, stamp)
                return
            limit = max(1, len(batch) // 2)
        self._record_bytes += 0.25 * (size / max(1, len(batch)) - self._record_bytes)
        self.bytes += size
        self.records += len(batch)
        self.cache.append((DATA, stamp, len(batch), size, *message))

    def _too_large(self, batch: Batch, size: int, stamp: int) -> None:
        record = batch[0] if isinstance(batch, list) else batch.values[0]
        if isinstance(record, DeadLetter) and record != (shortened := record.shortened()):
            self.queue.appendleft(([shortened], stamp))
            return
        self.errors.handle(
            record,
            ValueError(
                f"the record takes {size:,} bytes encoded, a message of this channel at most "
                f"{self._transport.largest_message(self.worker):,}; {self._transport.remedy(size)}"
            ),
        )


class InChannel:
    """The receiver's end of a channel: counts the bytes that its task has taken up, and how many of them are not
    granted yet."""

    def __init__(self, number: int, credit_window: int = CREDIT_WINDOW_BYTES, generation: int = 0) -> None:
        self.number = number
        self.generation = generation
        self.ended = False
        self._credit_window = credit_window
        self._owed = 0

    def take(self, cost: int) -> None:
        """Notes that the task has taken up a batch of this cost."""
        self._owed += cost
        if 2 * self._owed >= self._credit_window:
            self.grant()

    def grant(self) -> None:
        """Grants the owed credit to the sender."""
        raise NotImplementedError


class LocalInChannel(InChannel):
    """The receiver's end of a channel from a task of the same worker."""

    def __init__(self, sender: OutChannel, generation: int = 0) -> None:
        super().__init__(sender.number, sender.credit_window, generation)
        self._sender = sender

    def grant(self) -> None:
        self._sender.granted(self._owed)
        self._owed = 0


class RemoteInChannel(InChannel):
    """The receiver's end of a channel from a task of another worker. A grant that finds no room is noted in `due`, and
    the run loop sends it again."""

    def __init__(
        self,
        number: int,
        worker: int,
        task: int,
        transport: Transport,
        due: dict[int, RemoteInChannel],
        credit_window: int = CREDIT_WINDOW_BYTES,
        generation: int = 0,
    ) -> None:
        super().__init__(number, credit_window, generation)
        self._worker = worker
        self._task = task
        self._transport = transport
        self._due = due

    def grant(self) -> None:
        if self.ended:
            self._due.pop(self.number, None)
            return
        head = HEAD.pack(CREDIT, 0, 0, self.number, self._owed, 0, self.generation)
        if self._transport.send(self._worker, self._task, (head,)):
            self._owed = 0
            self._due.pop(self.number, None)
        else:
            self._due[self.number] = self
