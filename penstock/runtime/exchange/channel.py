"""Channels between tasks, and the credit that bounds what is under way in them (invariants 1 to 3).

A channel goes from one sender task to one receiver task and keeps order. The receiver grants a *window* of bytes; the
sender may send while less than a window is outstanding, that is sent but not yet taken up by the receiver task. So a
worker can always take in everything that reaches it: its inboxes are bounded by the windows, and one slow task holds
up only those who send to it. The sender counts by what it sent, the receiver grants back what its task has taken up,
in lots of half a window.

Why no deadlock: a sender is stopped only while at least a window is outstanding, of which the receiver, once it has
taken up all of it, owes more than half a window and therefore grants. Grants never wait for credit, nor do barriers
and ends, but for the data before them. A task that may not send is not run, but its worker goes on.

In a job with epochs a channel keeps what it has sent since the last complete epoch
(runtime/exchange/output_cache.py). When its receiver is taken back, the channel is *cut*: what the sender makes goes
into the cache only, and its task is not held up. When the receiver is there again the channel is *joined* to it under
a new *generation* and sends all that the cache holds; until it has sent what was there when it was joined its task is
still not held up. Messages of an older generation are dropped wherever they arrive.

On the wire a message is a head, then the payload:

    kind u8 | flags u8 | codec u16 | channel u32 | stamp i64 | count u32 | generation u32
    (keyed: key codec u16 | key bytes u32)

`stamp` is when the oldest record of the batch entered the job, time.monotonic_ns() of this machine; of a barrier its
epoch; of a watermark its time; of a grant the bytes granted.
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

# Bytes that may be outstanding in one channel. Below some 64 KiB a fast sender waits for grants between messages; far
# above, a slow receiver lets much pile up, which is latency. The credit of a channel inside a worker is the same.
CREDIT_WINDOW_BYTES = 256 * 1024


class Receiver(Protocol):
    """The task at the end of a channel, as the channel sees it."""

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        """Take a batch; `cost` bytes of the channel's window are used until it is taken up."""

    def receive_barrier(self, channel: int, epoch: int) -> None:
        """What comes after this by the channel belongs to the next epoch."""

    def receive_watermark(self, channel: int, value: int) -> None:
        """What comes after this by the channel is of this time or late."""

    def receive_end(self, channel: int) -> None:
        """Nothing more comes by this channel."""


class OutChannel(ABC):
    """The sender's end. `push`, `barrier` and `end` queue, `flush` sends what credit and room allow."""

    def __init__(self, number: int, errors: ErrorHandler, credit_window: int, cache: OutputCache | None) -> None:
        self.number = number
        self.credit_window = credit_window
        self.generation = 0
        self.outstanding = 0
        self.queue: deque[tuple[Batch | Watermark | None, int]] = deque()  # None: a barrier, with its epoch
        self.cache = cache or OutputCache()
        self.ended = False  # the end is in the cache
        self.connected = True
        self.catching_up = False  # what the cache holds is still to be sent: the task is not held up
        self.stopped_by_room = False  # the last flush found no room in the transport: no message will tell its end
        self.records = 0  # made so far
        self.bytes = 0  # of these; encoded where they are kept or sent, else about
        self.errors = errors
        self._ending = False
        self._until = 0  # the number of the first entry behind those to be sent before the task is held up again

    def push(self, batch: Batch, stamp: int) -> None:
        """Queue a batch behind what is queued; the caller flushes, and runs no further while flush says False."""
        self.queue.append((batch, stamp))

    def barrier(self, epoch: int) -> None:
        """Queue a barrier."""
        self.queue.append((None, epoch))

    def watermark(self, value: int) -> None:
        """Queue a watermark."""
        self.queue.append((Watermark(value), 0))

    def end(self) -> None:
        """Queue the end of the stream."""
        self._ending = True

    def flush(self) -> bool:
        """Send what is queued; True when the task may go on, False when it must be called again before."""
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
        """Move something from the queue into the cache; False when there is nothing."""
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
        """Put a batch that was taken from the queue into the cache, in the form in which it is sent."""

    @abstractmethod
    def _send(self, entry: Entry) -> bool:
        """Send an entry; False when there is no room."""

    def granted(self, credit: int) -> None:
        """The receiver has taken up so many bytes."""
        self.outstanding -= credit

    def queued(self) -> int:
        """Records that wait for credit or room."""
        waiting = sum(len(batch) for batch, _ in list(self.queue) if batch is not None)  # a copy: other threads may ask
        return waiting + (self.cache.unsent_records() if self.cache.unsent else 0)

    def kept(self) -> Iterator[tuple[int, int, Batch | None]]:
        """All that has been made since the last complete epoch, in order, for a channel that is given up: (kind, stamp
        or epoch, batch)."""
        self._cache_all()
        for entry in self.cache.entries:
            kind, stamp, *_ = entry
            yield kind, stamp, decode_batch(b"".join(self.cache.parts(entry))).batch if kind == DATA else None

    # --- epochs --------------------------------------------------------------------------------------------------

    def complete(self, epoch: int) -> None:
        """No receiver goes back before this epoch any more."""
        self.cache.complete(BARRIER, END, WATERMARK, epoch)

    def disconnect(self) -> None:
        """The receiver is being taken back: send nothing."""
        self.connected = False
        self.catching_up = True

    def connect(self, generation: int) -> None:
        """The receiver is back at the last complete epoch: send all since then."""
        self._cache_all()
        self.connected = True
        self.generation = generation
        self.outstanding = 0
        self.cache.rewind()
        # Not until everything is sent: a sender quicker than its receiver would never again be held up.
        self._until = self.cache.first + len(self.cache.entries)
        self.catching_up = self.cache.unsent


class LocalChannel(OutChannel):
    """To a task of the same worker: a batch is handed over as it is."""

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
        self._made: deque[tuple[int, Batch]] = deque()  # unsent batches as they were made, with their entries' numbers

    def deliver_to(self, receiver: Receiver) -> None:
        """Hand everything to this task from now on: it has just been made."""
        self._receiver = receiver

    def disconnect(self) -> None:
        """See OutChannel."""
        super().disconnect()
        self._made.clear()

    def _cache_batch(self, batch: Batch, stamp: int) -> None:
        cache = self.cache
        if cache.keeps:
            # The receiver gets the records themselves, and may change them: what is kept is a copy. Encoded also where
            # they cannot change: the batch would keep all its objects in memory, so that new ones come to lie in cold
            # memory, which costs WordCount a fifth of its throughput (benchmarks/checkpoint_cost.py).
            # Only those that can be encoded: what could not be sent again must not be sent at all.
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
    """To a task of another worker: batches are encoded, a list at a time, and cut to the transport's message size."""

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
        self._record_bytes = 64.0  # smoothed; decides how many records go into a message

    def _send(self, entry: Entry) -> bool:
        parts = self.cache.parts(entry)
        if self.generation and self.catching_up:
            # It may have been made under an older generation.
            head = parts[0]
            stamped = bytes(head[:GENERATION_AT]) + GENERATION.pack(self.generation) + bytes(head[HEAD.size :])
            parts = (stamped, *parts[1:])
        return self._transport.send(self.worker, self.task, parts)

    def _cache_batch(self, batch: Batch, stamp: int) -> None:
        """Encode the next message, of the batch and what is queued behind it as far as it fits."""
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
            if size <= self._transport.max_message:
                break
            if len(batch) == 1 and size <= self._transport.largest_message:
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
                f"{self._transport.largest_message:,}; {self._transport.remedy(size)}"
            ),
        )


class InChannel:
    """The receiver's end: counts what its task takes up, and what of it is still to be granted back."""

    def __init__(self, number: int, credit_window: int = CREDIT_WINDOW_BYTES, generation: int = 0) -> None:
        self.number = number
        self.generation = generation
        self.ended = False
        self._credit_window = credit_window
        self._owed = 0

    def take(self, cost: int) -> None:
        """The task has taken up a batch of this cost."""
        self._owed += cost
        if 2 * self._owed >= self._credit_window:
            self.grant()

    def grant(self) -> None:
        """Give the owed credit back to the sender."""
        raise NotImplementedError


class LocalInChannel(InChannel):
    """From a task of the same worker."""

    def __init__(self, sender: OutChannel, generation: int = 0) -> None:
        super().__init__(sender.number, sender.credit_window, generation)
        self._sender = sender

    def grant(self) -> None:
        self._sender.granted(self._owed)
        self._owed = 0


class RemoteInChannel(InChannel):
    """From a task of another worker. Grants that find no room wait in `due`, which the run loop retries."""

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
