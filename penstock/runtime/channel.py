"""Channels between tasks, and the credit that bounds what is under way in them (invariants 1 to 3).

A channel goes from one sender task to one receiver task and keeps order. The receiver grants a *window* of bytes; the
sender may send while less than a window is outstanding, that is sent but not yet taken up by the receiver task. So a
worker can always take in everything that reaches it: its inboxes are bounded by the windows, and one slow task holds
up only those who send to it. The sender counts by what it sent, the receiver grants back what its task has taken up,
in lots of half a window.

Why no deadlock: a sender is stopped only while at least a window is outstanding, of which the receiver, once it has
taken up all of it, owes more than half a window and therefore grants. Grants never wait for credit. A task that may
not send is not run, but its worker goes on.

On the wire a message is a head, then the payload:

    kind u8 | flags u8 | codec u16 | channel u32 | stamp i64 | count u32 | (keyed: key codec u16 | key bytes u32)

`stamp` is when the oldest record of the batch entered the job, time.monotonic_ns() of this machine.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from penstock.runtime.batch import Batch, KeyedBatch, approximate_bytes, concat, split
from penstock.runtime.codec import decode, encode
from penstock.runtime.transport.base import Buffer, Transport
from penstock.runtime.userfunc import DeadLetter, ErrorHandler

if TYPE_CHECKING:
    from penstock.runtime.task import Task

DATA, END, CREDIT = 1, 2, 3
_KEYED, _PARTIAL = 1, 2
HEAD = struct.Struct("<BBHIqI")
KEY_HEAD = struct.Struct("<HI")

# Bytes that may be outstanding in one channel. Below some 64 KiB a fast sender waits for grants between messages; far
# above, a slow receiver lets much pile up, which is latency. The credit of a channel inside a worker is the same.
WINDOW_BYTES = 256 * 1024


class OutChannel(ABC):
    """The sender's end. `push` queues, `flush` sends what credit and room allow."""

    def __init__(self, number: int, window: int = WINDOW_BYTES) -> None:
        self.number = number
        self.window = window
        self.outstanding = 0
        self.queue: deque[tuple[Batch, int]] = deque()
        self._ending = False
        self.ended = False

    def push(self, batch: Batch, stamp: int) -> None:
        """Queue a batch behind what is queued; the caller flushes, and runs no further while flush says False."""
        self.queue.append((batch, stamp))

    def end(self) -> None:
        """Queue the end of the stream."""
        self._ending = True

    @abstractmethod
    def flush(self) -> bool:
        """Send what is queued; True when nothing is left, False when it must be called again."""

    @property
    def stopped_by_room(self) -> bool:
        """The last flush found no room in the transport, of which no message will tell the end."""
        return False

    def queued(self) -> int:
        """Records that wait for credit or room."""
        return sum(len(batch) for batch, _ in list(self.queue))  # a copy: another thread may ask


class LocalChannel(OutChannel):
    """To a task of the same worker: a batch is handed over as it is."""

    def __init__(self, number: int, target: Task, window: int = WINDOW_BYTES) -> None:
        super().__init__(number, window)
        self._target = target

    def flush(self) -> bool:
        while self.queue:
            if self.outstanding >= self.window:
                return False
            batch, stamp = self.queue.popleft()
            cost = approximate_bytes(batch)
            self.outstanding += cost
            self._target.receive(self.number, batch, stamp, cost)
        if self._ending and not self.ended:
            self.ended = True
            self._target.receive_end(self.number)
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
        window: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(number, window)
        self.worker = worker
        self.task = task
        self._transport = transport
        self._errors = errors
        self._unsent: list[bytes] | None = None
        self._unsent_size = 0
        self._unsent_records = 0
        self._record_bytes = 64.0  # smoothed; decides how many records go into a message
        self.bytes = 0

    def flush(self) -> bool:
        while True:
            if self._unsent is not None:
                if not self._transport.send(self.worker, self.task, self._unsent):
                    return False
                self.outstanding += self._unsent_size
                self.bytes += self._unsent_size
                self._unsent = None
            if not self.queue:
                break
            if self.outstanding >= self.window:
                return False
            self._prepare()
        if self._ending and not self.ended:
            head = HEAD.pack(END, 0, 0, self.number, 0, 0)
            if not self._transport.send(self.worker, self.task, (head,)):
                return False
            self.ended = True
        return True

    @property
    def stopped_by_room(self) -> bool:
        return self._unsent is not None or (self._ending and not self.ended and not self.queue)

    def _prepare(self) -> None:
        """Encode the next message from the queue."""
        limit = max(1, int(self._transport.target_message / self._record_bytes))
        batch, stamp = self.queue.popleft()
        if len(batch) < limit and self.queue:
            batches, count = [batch], len(batch)
            while self.queue and count + len(self.queue[0][0]) <= limit:
                batch, later = self.queue.popleft()
                batches.append(batch)
                count += len(batch)
                stamp = min(stamp, later)
            batch = concat(batches)
        while True:
            if len(batch) > limit:
                batch, rest = split(batch, limit)
                self.queue.appendleft((rest, stamp))
            try:
                message = _encode(self.number, batch, stamp)
            except Exception:
                batch = _encodable(batch, self._errors)
                if not batch:
                    return
                message = _encode(self.number, batch, stamp)
            size = sum(map(len, message))
            if size <= self._transport.max_message:
                break
            if len(batch) == 1:
                self._too_large(batch, size, stamp)
                return
            limit = max(1, len(batch) // 2)
        self._record_bytes += 0.25 * (size / max(1, len(batch)) - self._record_bytes)
        self._unsent = message
        self._unsent_size = size
        self._unsent_records = len(batch)

    def _too_large(self, batch: Batch, size: int, stamp: int) -> None:
        record = batch[0] if isinstance(batch, list) else batch.values[0]
        if isinstance(record, DeadLetter) and record != (shortened := record.shortened()):
            self.queue.appendleft(([shortened], stamp))
            return
        self._errors.handle(
            record,
            ValueError(
                f"the record takes {size:,} bytes encoded, a message of this channel at most "
                f"{self._transport.max_message:,}; run with a larger ring: run(flow, ring_bytes={_ring_for(size)})"
            ),
        )

    def queued(self) -> int:
        return super().queued() + (self._unsent_records if self._unsent is not None else 0)


def _ring_for(size: int) -> int:
    """A ring size, a power of two, in which a message of `size` bytes fits several times."""
    return 1 << (4 * size - 1).bit_length()


class InChannel:
    """The receiver's end: counts what its task takes up, and what of it is still to be granted back."""

    def __init__(self, number: int, window: int = WINDOW_BYTES) -> None:
        self.number = number
        self.ended = False
        self._window = window
        self._owed = 0

    def take(self, cost: int) -> None:
        """The task has taken up a batch of this cost."""
        self._owed += cost
        if 2 * self._owed >= self._window:
            self.grant()

    def grant(self) -> None:
        """Give the owed credit back to the sender."""
        raise NotImplementedError


class LocalInChannel(InChannel):
    """From a task of the same worker."""

    def __init__(self, sender: OutChannel) -> None:
        super().__init__(sender.number, sender.window)
        self._sender = sender

    def grant(self) -> None:
        self._sender.outstanding -= self._owed
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
        window: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(number, window)
        self._worker = worker
        self._task = task
        self._transport = transport
        self._due = due

    def grant(self) -> None:
        if self.ended:
            self._due.pop(self.number, None)
            return
        head = HEAD.pack(CREDIT, 0, 0, self.number, self._owed, 0)
        if self._transport.send(self._worker, self._task, (head,)):
            self._owed = 0
            self._due.pop(self.number, None)
        else:
            self._due[self.number] = self


def encode_batch(channel: int, batch: Batch, stamp: int, errors: ErrorHandler) -> list[bytes]:
    """The parts of a data message; records that cannot be encoded go to `errors` and are left out."""
    try:
        return _encode(channel, batch, stamp)
    except Exception:
        return _encode(channel, _encodable(batch, errors), stamp)


def _encode(channel: int, batch: Batch, stamp: int) -> list[bytes]:
    if isinstance(batch, KeyedBatch):
        flags = _KEYED | (_PARTIAL if batch.partial else 0)
        key_codec, keys = encode(batch.keys)
        codec, values = encode(batch.values)
        head = HEAD.pack(DATA, flags, codec, channel, stamp, len(batch)) + KEY_HEAD.pack(key_codec, len(keys))
        return [head, keys, values]
    codec, payload = encode(batch)
    return [HEAD.pack(DATA, 0, codec, channel, stamp, len(batch)), payload]


def _encodable(batch: Batch, errors: ErrorHandler) -> Batch:
    """The records that can be encoded one by one; a dead letter whose record cannot, with a description of it."""
    kept: list[int] = []
    values = list(batch.values if isinstance(batch, KeyedBatch) else batch)
    for i, value in enumerate(values):
        if isinstance(value, DeadLetter):
            values[i] = _travelling(value)
        try:
            encode([values[i]])
            if isinstance(batch, KeyedBatch):
                encode([batch.keys[i]])
        except Exception as error:
            errors.handle(value, error)
        else:
            kept.append(i)
    if isinstance(batch, KeyedBatch):
        return KeyedBatch([batch.keys[i] for i in kept], [values[i] for i in kept], batch.partial)
    return [values[i] for i in kept]


def _travelling(letter: DeadLetter) -> DeadLetter:
    try:
        encode([letter])
    except Exception:
        return letter.shortened()
    return letter


def decode_batch(message: Buffer) -> tuple[int, int, int, Batch | None]:
    """(kind, channel, stamp or granted bytes, batch of a data message); nothing returned refers to the message."""
    kind, flags, codec, channel, stamp, count = HEAD.unpack_from(message)
    if kind != DATA:
        return kind, channel, stamp, None
    view = memoryview(message)
    batch: Batch
    if flags & _KEYED:
        key_codec, key_bytes = KEY_HEAD.unpack_from(message, HEAD.size)
        start = HEAD.size + KEY_HEAD.size
        keys = decode(key_codec, view[start : start + key_bytes])
        batch = KeyedBatch(keys, decode(codec, view[start + key_bytes :]), bool(flags & _PARTIAL))
    else:
        batch = decode(codec, view[HEAD.size :])
    if len(batch) != count:
        raise AssertionError(f"channel {channel}: a message of {count} records decoded to {len(batch)}")
    return kind, channel, stamp, batch
