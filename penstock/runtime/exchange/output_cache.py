"""Output caches: keep the entries of each log since the last complete epoch, so that they can be sent again.

Each log (runtime/exchange/log.py) has an `OutputCache` with its messages in order, and the barriers between them. A
message is there once, however many channels the log has. When an epoch is complete, no receiver will go back to a time
before it, and the older messages are dropped for all channels. When a receiver fails, or goes back because a task
upstream of it failed, its channel sends from the start of the cache again, and the sender computes nothing again.

This is the replay-able up- and downstream of docs/papers.md: D5. The paper gives every operator an input cache and an
output cache. Here the two ends of a channel share one cache. It is at the sender, where it survives the receiver's
death. For a source, its input and the offsets that each epoch saves serve as the input cache.

Larger messages are copied into *slabs*, which are reused. So the memory of an encoded message is free at once for the
next one; otherwise messages would lie all over the heap until an epoch completes.

`OutputCaches` limits the memory of all caches of a worker together. Past the limit, the largest cache is written to a
file that has no name, so nothing is left of the file however the process ends. When the disk takes no more, the sources
of the worker stop reading, and what is still under way stays in memory. A cache must never hold an object that a
receiver may change: it holds encoded messages only.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from penstock.runtime.errors import PenstockError
from penstock.runtime.transport.base import Buffer

logger = logging.getLogger(__name__)

# The bytes of memory that the caches of a worker may use. One second of 100,000 records of 500 bytes is 50 MB.
MEMORY_BYTES = 64 * 1024 * 1024

# When the caches have this many bytes on disk, the sources of the worker stop reading until an epoch completes.
# Something is wrong with the epochs, and further messages would only fill the disk.
DISK_BYTES = 4 * 1024 * 1024 * 1024


# The same limit for the number of messages on disk, because the entry of each message stays in memory.
DISK_MESSAGES = 1_000_000

# The memory that an entry uses in addition to its bytes.
ENTRY_BYTES = 300

# Messages of at least this size are copied into slabs. The slabs of a cache grow with its contents, between these two
# sizes.
SLAB_MESSAGE = 2048
_SLAB_LEAST = 16 * 1024
_SLAB_MOST = 1024 * 1024

# When the disk takes nothing, the memory may grow to this many times the limit. The disk is tried again each time that
# another part of the limit is used.
_REFUSED_MOST = 2
_REFUSED_TRIES = 4

# A file takes at least this many bytes, however little memory the caches may use, so that few files are open.
_FILE_LEAST = 16 * 1024 * 1024


class OnDisk(NamedTuple):
    """The place of a message's bytes in a file."""

    file: Any
    offset: int
    size: int


#: One entry of a log: (kind, stamp or the epoch of a barrier, number of records, number of bytes), and then either the
#: parts of the message's body, or OnDisk, or slab, start, end. A body that nobody needs as bytes has no parts. An entry
#: is one flat tuple, because a tuple of bytes and numbers cannot be part of a cycle, and the garbage collector stops
#: tracking it at its first visit. Objects or nested tuples, of which there are a hundred thousand, would be visited
#: again and again, in pauses of milliseconds.
Entry = tuple[Any, ...]

# After this many new messages, twice as many dropped ones are freed. Freeing all of them at once would stop the task
# for milliseconds. Freeing some with each message would balance the garbage collector's counter, which would then not
# run until there is much to visit.
_LET_GO = 512


class OutputCaches:
    """All output caches of a worker: limits the memory that they use together."""

    def __init__(
        self, memory_bytes: int = MEMORY_BYTES, disk_bytes: int = DISK_BYTES, directory: str | None = None
    ) -> None:
        self.memory_bytes = memory_bytes
        self.disk_bytes = disk_bytes
        self.directory = directory or tempfile.gettempdir()
        self.used = 0  # bytes in memory, and ENTRY_BYTES for each message in memory
        self.spilled = 0  # bytes on disk
        self.spilled_messages = 0
        self._caches: weakref.WeakSet[OutputCache] = weakref.WeakSet()
        self._slabs: dict[int, list[bytearray]] = {}  # free slabs, by size
        self._slab_bytes = 0  # bytes of the free slabs
        # A weak reference: the entries keep the file alive that they are in.
        self._file: Callable[[], Any] = lambda: None
        self._file_bytes = 0
        self._refused = False  # whether the disk took nothing the last time
        self._try_at = 0  # the use of memory at which it is tried again

    @property
    def full(self) -> bool:
        """Whether sources should stop reading until an epoch completes."""
        return self._refused or self.spilled >= self.disk_bytes or self.spilled_messages >= DISK_MESSAGES

    def cache(self) -> OutputCache:
        """Creates a cache for a log of this worker."""
        cache = OutputCache(self)
        self._caches.add(cache)
        return cache

    def make_room(self) -> None:
        """Writes the largest cache to disk. Raises PenstockError when the disk takes nothing, and what is under way has
        used up the memory that there is for this case."""
        if self.used < self._try_at:
            return
        try:
            max(self._caches, key=lambda cache: cache.in_memory).spill()
        except PenstockError as error:
            if self.used > _REFUSED_MOST * self.memory_bytes:
                raise
            if not self._refused:
                logger.warning("the sources of this worker stop reading until an epoch completes: %s", str(error))
            self._refused, self._try_at = True, self.used + self.memory_bytes // _REFUSED_TRIES
        else:
            self._refused, self._try_at = False, 0

    def has_dropped(self) -> None:
        """Called when a cache has dropped entries."""
        if self.used <= self.memory_bytes:
            self._refused, self._try_at = False, 0

    def slab(self, size: int) -> bytearray:
        """Returns memory for messages."""
        if free := self._slabs.get(size):
            self._slab_bytes -= size
            return free.pop()
        return bytearray(size)

    def free(self, slab: bytearray) -> None:
        """Takes back a slab that has no readers any more."""
        size = len(slab)
        if 2 * (self._slab_bytes + size) <= self.memory_bytes:
            self._slab_bytes += size
            self._slabs.setdefault(size, []).append(slab)

    def write(self, messages: Iterable[Sequence[Buffer]]) -> list[OnDisk]:
        """Writes messages to a file, and returns the place of each of them. All caches share files: with many channels,
        a file for each spill would use up the descriptors of the process."""
        file = self._file()
        if file is None or self._file_bytes >= max(self.memory_bytes, _FILE_LEAST):
            file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 - its entries keep it
            self._file, self._file_bytes = weakref.ref(file), 0
        places = []
        end = self._file_bytes
        for parts in messages:
            start = end
            view = memoryview(b"".join(parts))
            while view:
                try:
                    written = os.pwrite(file.fileno(), view, end)
                except OSError:
                    os.ftruncate(file.fileno(), self._file_bytes)  # others may need the room
                    raise
                view, end = view[written:], end + written
            places.append(OnDisk(file, start, end - start))
        self._file_bytes = end
        return places


class OutputCache:
    """See the module's docstring. All entries are numbered: those in the cache from `first` to before `end`. Without
    `output_caches` (in a job without epochs) the log drops an entry when all its channels have sent it."""

    def __init__(self, output_caches: OutputCaches | None = None) -> None:
        self.entries: list[Entry] = []
        self.first = 0
        self.end = 0
        self.in_memory = 0
        self.completed = 0  # the last epoch whose messages were dropped
        self._signals: list[tuple[int, int]] = []  # for each barrier and end: its number, and `_total` before it
        self._total = 0  # the memory of all entries so far, dropped ones included
        self._on_disk = 0  # the number of entries on disk
        self._dropped: list[Entry] = []  # entries to be freed a few at a time
        # With the number of the first entry after those in the slab.
        self._slabs: deque[tuple[int, bytearray]] = deque()
        self._slab_used = 0  # the used bytes of the last slab
        self._output_caches = output_caches
        self.keeps = output_caches is not None  # whether entries stay after they were sent

    def unsent_records(self, number: int) -> int:
        """Returns the number of records in the entries from this number on. Other threads may ask."""
        return sum(entry[2] for entry in self.entries[max(0, number - self.first) :])

    def append(self, entry: Entry) -> None:
        """Adds an entry after all others."""
        output_caches = self._output_caches
        self.end += 1
        if output_caches is None:
            self.entries.append(entry)
            return
        size = entry[3]
        self.entries.append(self._in_slab(entry, output_caches) if size >= SLAB_MESSAGE else entry)
        if self._dropped and not len(self.entries) % _LET_GO:
            del self._dropped[-2 * _LET_GO :]
        if not size:
            self._signals.append((self.end - 1, self._total))
        else:
            size += ENTRY_BYTES
            self._total += size
            self.in_memory += size
            output_caches.used += size
            if output_caches.used > output_caches.memory_bytes:
                output_caches.make_room()

    def _in_slab(self, entry: Entry, output_caches: OutputCaches) -> Entry:
        """Copies the bytes of an entry into a slab, and returns the entry that refers to them."""
        parts = entry[4:]
        start = self._slab_used
        end = start + sum(map(len, parts))
        number = self.end
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
        """Frees the slabs that have only entries before this one, because none of these is in memory any more."""
        slabs, output_caches = self._slabs, self._output_caches
        while slabs and slabs[0][0] <= first:
            assert output_caches is not None
            output_caches.free(slabs.popleft()[1])

    def drop_before(self, number: int) -> None:
        """Drops the entries before this number. Only without epochs."""
        del self.entries[: number - self.first]
        self.first = number

    def complete(self, barrier: int, end: int, watermark: int, epoch: int) -> int | None:
        """Drops the entries before the barrier of `epoch`, and the barrier itself. It keeps the last watermark before
        it, because a receiver that goes back must learn it. `barrier`, `end` and `watermark` are the kinds of these
        entries. When the sender ended before the epoch, there is no such barrier, and only the end is kept.

        A watermark that it keeps becomes the first entry. Returns the number that this watermark had before, or None
        when it keeps none.
        """
        if epoch <= self.completed:
            return None
        self.completed = epoch
        entries = self.entries
        last: Entry | None = None
        before = 0
        for number, total in self._signals:
            entry = entries[number - self.first]
            if entry[0] == watermark:
                last, before = entry, number
            elif entry[0] == end or (entry[0] == barrier and entry[1] == epoch):
                self._drop(number - self.first + (entry[0] == barrier), total)
                break
        else:
            return None
        if last is None:
            return None
        self.entries.insert(0, last)
        self.first -= 1
        self._signals.insert(0, (self.first, total))
        return before

    def clear(self) -> None:
        """Drops all entries."""
        self._drop(len(self.entries), self._total)

    def parts(self, entry: Entry) -> tuple[Buffer, ...]:
        """Returns the bytes of an entry's body."""
        place = entry[4]
        if isinstance(place, bytearray):
            return (memoryview(place)[entry[5] : entry[6]],)
        if isinstance(place, OnDisk):
            return (os.pread(place.file.fileno(), place.size, place.offset),)
        return entry[4:]

    def spill(self) -> None:
        """Writes the entries that are in memory to disk."""
        assert self._output_caches is not None
        output_caches = self._output_caches
        entries = self.entries
        in_memory_at = [at for at, entry in enumerate(entries) if entry[3] and not isinstance(entry[4], OnDisk)]
        try:
            places = output_caches.write(self.parts(entries[at]) for at in in_memory_at)
        except OSError as error:
            raise PenstockError(
                "the messages since the last complete epoch take more than the "
                f"{output_caches.memory_bytes:,} bytes of memory allowed for them, and {output_caches.directory!r} "
                f"cannot take them: {error.strerror or error}. Free space there, set TMPDIR to another disk, or find "
                "out why epochs do not complete (job.status()['epochs'])"
            ) from error
        for at, place in zip(in_memory_at, places, strict=True):
            entry = entries[at]
            size = entry[3]
            entries[at] = (*entry[:4], place)
            self._leave_memory(size + ENTRY_BYTES)
            self._on_disk += 1
            output_caches.spilled += size
            output_caches.spilled_messages += 1
        self._free_slabs(self.end)

    def _drop(self, some: int, total: int) -> None:
        """Drops the first entries. `total` is the value of `_total` after the last of them, so that their sizes need
        not be added up one by one, which would take a millisecond."""
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
        if output_caches is not None:
            output_caches.has_dropped()
        # No list of the dropped entries is created, because the garbage collector would visit every entry of a long new
        # list.
        self.entries = old[some:]
        self.first += some
        self._free_slabs(self.first)
        self._signals = [signal for signal in self._signals if signal[0] >= self.first]
        self._dropped = old if output_caches is not None and in_memory else []  # a file is deleted with its last entry

    def _leave_memory(self, counted: int) -> None:
        assert self._output_caches is not None
        self.in_memory -= counted
        self._output_caches.used -= counted
