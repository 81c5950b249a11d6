"""The replay-able part of a channel: what its sender has made since the last complete epoch (docs/papers.md: D5, RUD).

Each channel has an `OutputCache`: its messages in order, with the barriers between them. Messages are dropped when an
epoch is complete, which says that no receiver will ever go back before it. When a receiver fails, or goes back because
a task before it failed, the cache is sent again from its start: the sender computes nothing again.

The paper gives every operator an input cache and an output cache. Here the two ends of a channel share one, kept where
it survives the receiver's death: at the sender. The input cache of a source is its input, and the offsets saved with
each epoch.

Messages of some size are copied into *slabs*, which are used again and again: what was encoded is let go at once, and
lies where the next message will be encoded, instead of all over the heap until an epoch completes.

`OutputCaches` limits the memory of all caches of a worker together. Past the limit, the largest cache is written to a
file that has no name, so nothing is left of the file however the process ends. A cache must never hold an object that a
receiver may change: it holds encoded messages only.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from penstock.runtime.errors import PenstockError
from penstock.runtime.transport.base import Buffer

# What the caches of a worker may hold in memory. A second of 100,000 records of 500 bytes is 50 MB.
MEMORY_BYTES = 64 * 1024 * 1024

# When this much waits on disk, the sources of the worker read no more until an epoch completes: something is wrong
# with the epochs, and going on would only fill the disk.
DISK_BYTES = 4 * 1024 * 1024 * 1024


# The same for their number: what stands for a message that is on disk stays in memory.
DISK_MESSAGES = 1_000_000

# What an entry takes in memory besides its bytes.
ENTRY_BYTES = 300

# Messages from this size on are copied into slabs. A cache's slabs grow with what it holds, between these sizes.
SLAB_MESSAGE = 2048
_SLAB_LEAST = 16 * 1024
_SLAB_MOST = 1024 * 1024


class OnDisk(NamedTuple):
    """Where the bytes of a message are."""

    file: Any
    offset: int
    size: int


#: One message of a channel: (kind, stamp or a barrier's epoch, records, bytes, then its parts or where they are, which
#: is OnDisk or slab, beginning, end).
#: One flat tuple: a tuple of nothing but bytes and numbers cannot be garbage, and the garbage collector lets go of it
#: when it comes to it first; it would look through a hundred thousand objects or nested tuples again, in pauses of
#: milliseconds.
Entry = tuple[Any, ...]

# How many new messages come before twice as many dropped ones are let go of. All at once would stop the task for
# milliseconds; with each message, the garbage collector, which counts what was made less what went, would not run
# until there is much for it to look through.
_LET_GO = 512


class OutputCaches:
    """The caches of one worker together: bounds what they hold in memory."""

    def __init__(
        self, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES, directory: str | None = None
    ) -> None:
        self.memory_bytes = memory_bytes
        self.disk_bytes = disk_bytes
        self.directory = directory or tempfile.gettempdir()
        self.used = 0  # bytes in memory, with ENTRY_BYTES for each message there
        self.spilled = 0  # bytes on disk
        self.spilled_messages = 0
        self._caches: weakref.WeakSet[OutputCache] = weakref.WeakSet()
        self._slabs: dict[int, list[bytearray]] = {}  # by size, those that nothing is in
        self._slab_bytes = 0  # of those
        self._file: Callable[[], Any] = lambda: None  # a weak reference: entries keep the file that they are in
        self._file_bytes = 0

    @property
    def full(self) -> bool:
        """Sources should read no more before an epoch completes."""
        return self.spilled >= self.disk_bytes or self.spilled_messages >= DISK_MESSAGES

    def cache(self) -> OutputCache:
        """A cache of this worker."""
        cache = OutputCache(self)
        self._caches.add(cache)
        return cache

    def make_room(self) -> None:
        """Send the largest cache to disk."""
        max(self._caches, key=lambda cache: cache.in_memory).spill()

    def slab(self, size: int) -> bytearray:
        """Room for messages."""
        if free := self._slabs.get(size):
            self._slab_bytes -= size
            return free.pop()
        return bytearray(size)

    def free(self, slab: bytearray) -> None:
        """Nothing in a slab will be read again."""
        size = len(slab)
        if 2 * (self._slab_bytes + size) <= self.memory_bytes:
            self._slab_bytes += size
            self._slabs.setdefault(size, []).append(slab)

    def write(self, messages: Iterable[Sequence[Buffer]]) -> list[OnDisk]:
        """Write messages to a file; where each of them is. The caches share files: one for each time that some cache
        is sent to disk would, with many channels, use up the descriptors of the process."""
        file = self._file()
        if file is None or self._file_bytes >= self.memory_bytes:
            file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 - its entries keep it
            self._file, self._file_bytes = weakref.ref(file), 0
        places = []
        end = self._file_bytes
        for parts in messages:
            start = end
            view = memoryview(b"".join(parts))
            while view:
                written = os.pwrite(file.fileno(), view, end)
                view, end = view[written:], end + written
            places.append(OnDisk(file, start, end - start))
        self._file_bytes = end  # what failed half-way is written over
        return places


class OutputCache:
    """See the module's docstring. The entries before `next` have been sent. Without `output_caches` (in a job without
    epochs) an entry is dropped when it is sent."""

    def __init__(self, output_caches: OutputCaches | None = None) -> None:
        self.entries: list[Entry] = []
        self.next = 0
        self.in_memory = 0
        self.completed = 0  # the last epoch that was dropped
        self.first = 0  # the number of the first entry; each has one
        self._signals: list[tuple[int, int]] = []  # of each barrier and end: its number, `_total` before it
        self._total = 0  # what all entries so far counted for in memory
        self._on_disk = 0  # entries
        self._dropped: list[Entry] = []  # to be let go of by and by
        self._slabs: deque[tuple[int, bytearray]] = deque()  # and the number of the first entry behind those in it
        self._slab_used = 0  # bytes of the last one
        self._output_caches = output_caches

    @property
    def keeps(self) -> bool:
        """Entries stay after they are sent."""
        return self._output_caches is not None

    @property
    def unsent(self) -> bool:
        """There is an entry to send."""
        return self.next < len(self.entries)

    def unsent_records(self) -> int:
        """Records in the entries that are still to be sent."""
        return sum(entry[2] for entry in self.entries[self.next :])

    def append(self, entry: Entry) -> None:
        """Add an entry behind all others."""
        output_caches = self._output_caches
        if output_caches is None:
            self.entries.append(entry)
            return
        size = entry[3]
        self.entries.append(self._in_slab(entry, output_caches) if size >= SLAB_MESSAGE else entry)
        if self._dropped and not len(self.entries) % _LET_GO:
            del self._dropped[-2 * _LET_GO :]
        if not size:
            self._signals.append((self.first + len(self.entries) - 1, self._total))
        else:
            size += ENTRY_BYTES
            self._total += size
            self.in_memory += size
            output_caches.used += size
            if output_caches.used > output_caches.memory_bytes:
                output_caches.make_room()

    def _in_slab(self, entry: Entry, output_caches: OutputCaches) -> Entry:
        """The entry, its bytes copied into a slab."""
        parts = entry[4:]
        start = self._slab_used
        end = start + sum(map(len, parts))
        number = self.first + len(self.entries) + 1
        if not self._slabs or end > len(self._slabs[-1][1]):
            size = end - start
            if 2 * size > _SLAB_MOST:
                return entry
            room = min(_SLAB_MOST, max(_SLAB_LEAST, 2 * size, self.in_memory // 8))
            slab, start, end = output_caches.slab(1 << (room - 1).bit_length()), 0, size
            self._slabs.append((number, slab))
        else:
            slab = self._slabs[-1][1]
            self._slabs[-1] = number, slab
        at = start
        for part in parts:
            slab[at : at + len(part)] = part
            at += len(part)
        self._slab_used = end
        return (*entry[:4], slab, start, end)

    def _free_slabs(self, first: int) -> None:
        """No entry before this one is in memory any more."""
        slabs, output_caches = self._slabs, self._output_caches
        while slabs and slabs[0][0] <= first:
            assert output_caches is not None
            output_caches.free(slabs.popleft()[1])

    def sent(self) -> None:
        """The next entry has been sent."""
        self.next += 1
        if self._output_caches is None:
            del self.entries[: self.next]
            self.first += self.next
            self.next = 0

    def complete(self, barrier: int, end: int, watermark: int, epoch: int) -> None:
        """Drop what came before the barrier of `epoch`, and that barrier, but for the last watermark: a receiver that
        goes back must learn it. `barrier`, `end` and `watermark` are the kinds of such entries. A sender that ended
        before the epoch has no such barrier: only its end is kept."""
        if epoch <= self.completed:
            return
        self.completed = epoch
        entries = self.entries
        last: Entry | None = None
        was_sent = False
        for number, total in self._signals:
            entry = entries[number - self.first]
            if entry[0] == watermark:
                last, was_sent = entry, number - self.first < self.next
            elif entry[0] == end or (entry[0] == barrier and entry[1] == epoch):
                self._drop(number - self.first + (entry[0] == barrier), total)
                break
        else:
            return
        if last is not None:
            self.entries.insert(0, last)
            self.first -= 1
            self.next += was_sent
            self._signals.insert(0, (self.first, total))

    def rewind(self) -> None:
        """Send everything again."""
        self.next = 0

    def clear(self) -> None:
        """Drop everything."""
        self._drop(len(self.entries), self._total)

    def parts(self, entry: Entry) -> tuple[Buffer, ...]:
        """The bytes of an entry's message."""
        place = entry[4]
        if isinstance(place, bytearray):
            return (memoryview(place)[entry[5] : entry[6]],)
        if isinstance(place, OnDisk):
            return (os.pread(place.file.fileno(), place.size, place.offset),)
        return entry[4:]

    def spill(self) -> None:
        """Move what is in memory to disk."""
        assert self._output_caches is not None
        output_caches = self._output_caches
        entries = self.entries
        moving = [at for at, entry in enumerate(entries) if entry[3] and not isinstance(entry[4], OnDisk)]
        try:
            places = output_caches.write(self.parts(entries[at]) for at in moving)
        except OSError as error:
            raise PenstockError(
                "the messages since the last complete epoch take more than the "
                f"{output_caches.memory_bytes:,} bytes of memory allowed for them, and {output_caches.directory!r} "
                f"cannot take them: {error.strerror or error}. Free space there, "
                "set TMPDIR to another disk, or look why epochs do not complete (job.status()['epochs'])"
            ) from error
        for at, place in zip(moving, places, strict=True):
            entry = entries[at]
            size = entry[3]
            entries[at] = (*entry[:4], place)
            self._leave_memory(size + ENTRY_BYTES)
            self._on_disk += 1
            output_caches.spilled += size
            output_caches.spilled_messages += 1
        self._free_slabs(self.first + len(entries))

    def _drop(self, some: int, total: int) -> None:
        """Drop the first entries; `total` is what the last of them left behind in `_total`. Their sizes are not looked
        up one by one where it can be helped: that takes a millisecond."""
        output_caches, old = self._output_caches, self.entries
        in_memory = not self._on_disk
        if output_caches is not None and in_memory:
            self._leave_memory(self.in_memory - (self._total - total))
        elif output_caches is not None:
            for entry in old[:some]:
                if isinstance(entry[4], OnDisk):
                    self._on_disk -= 1
                    output_caches.spilled -= entry[3]
                    output_caches.spilled_messages -= 1
                elif entry[3]:
                    self._leave_memory(entry[3] + ENTRY_BYTES)
        # Not a list of what is dropped: the garbage collector would look through a long list that is new.
        self.entries = old[some:]
        self.next = max(0, self.next - some)
        self.first += some
        self._free_slabs(self.first)
        self._signals = [signal for signal in self._signals if signal[0] >= self.first]
        self._dropped = old if output_caches is not None and in_memory else []  # a file goes with its last entry

    def _leave_memory(self, counted: int) -> None:
        assert self._output_caches is not None
        self.in_memory -= counted
        self._output_caches.used -= counted
