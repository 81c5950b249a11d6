"""The replay-able part of a channel: what its sender has made since the last complete epoch (PAPERS row D5, RUD).

Each channel has an `OutputCache`: its messages in order, with the barriers between them. Messages are dropped when an
epoch is complete, which says that no receiver will ever go back before it. When a receiver fails, or goes back because
a task before it failed, the cache is sent again from its start: the sender computes nothing again.

The paper gives every operator an input cache and an output cache. Here the two ends of a channel share one, kept where
it survives the receiver's death: at the sender. The input cache of a source is its input, and the offsets saved with
each epoch.

Memory is bounded for all caches of a worker together by `Rud`; past the limit the largest cache goes to a file that has
no name, so nothing is left of it however the process ends. A cache must never hold an object that a receiver may
change: what it keeps is encoded.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

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


class Entry:
    """One message of a channel. `parts` are its bytes, or None while they are on disk or `batch` stands for them."""

    __slots__ = ("batch", "kind", "parts", "place", "records", "size", "stamp")

    def __init__(
        self, kind: int, stamp: int, records: int, size: int, parts: Sequence[Buffer] | None = None, batch: Any = None
    ) -> None:
        self.kind = kind
        self.stamp = stamp  # of a barrier: its epoch
        self.records = records
        self.size = size
        self.parts = parts
        self.batch = batch
        self.place: tuple[Any, int, int] | None = None  # on disk: file, offset, bytes


_size = attrgetter("size")

# How many new messages come before twice as many dropped ones are let go of. All at once would stop the task for
# milliseconds; with each message, the garbage collector, which counts what was made less what went, would not run
# until there is much for it to look through.
_LET_GO = 512


class Rud:
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

    def write(self, messages: Iterable[Sequence[Buffer]]) -> list[tuple[Any, int, int]]:
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
            places.append((file, start, end - start))
        self._file_bytes = end  # what failed half-way is written over
        return places


class OutputCache:
    """See the module's docstring. The entries before `next` have been sent. Without a `rud` (a job without epochs)
    an entry is dropped when it is sent."""

    def __init__(self, rud: Rud | None = None) -> None:
        self.entries: list[Entry] = []
        self.next = 0
        self.in_memory = 0
        self.completed = 0  # the last epoch that was dropped
        self._first = 0  # the number of the first entry; each has one
        self._signals: list[int] = []  # the numbers of barriers and ends, which have no size
        self._on_disk = 0  # entries
        self._dropped: list[Entry] = []  # to be let go of by and by
        self.encode: Callable[[Entry], Sequence[Buffer]] | None = None  # of entries that hold a batch
        self._rud = rud

    @property
    def keeps(self) -> bool:
        """Entries stay after they are sent."""
        return self._rud is not None

    @property
    def unsent(self) -> bool:
        """There is an entry to send."""
        return self.next < len(self.entries)

    def unsent_records(self) -> int:
        """Records in the entries that are still to be sent."""
        return sum(entry.records for entry in self.entries[self.next :])

    def append(self, entry: Entry) -> None:
        """Add an entry behind all others."""
        self.entries.append(entry)
        rud = self._rud
        if rud is None:
            return
        if self._dropped and not len(self.entries) % _LET_GO:
            del self._dropped[-2 * _LET_GO :]
        if not entry.size:
            self._signals.append(self._first + len(self.entries) - 1)
        else:
            self.in_memory += entry.size + ENTRY_BYTES
            rud.used += entry.size + ENTRY_BYTES
            if rud.used > rud.memory_bytes:
                rud.make_room()

    def sent(self) -> None:
        """The next entry has been sent."""
        self.next += 1
        if self._rud is None:
            del self.entries[: self.next]
            self.next = 0

    def complete(self, barrier: int, end: int, epoch: int) -> None:
        """Drop what came before the barrier of `epoch`, and that barrier; `barrier` and `end` are the kinds of such
        entries. A sender that ended before the epoch has no such barrier: only its end is kept."""
        if epoch <= self.completed:
            return
        self.completed = epoch
        entries = self.entries
        for at in self._signals:
            entry = entries[at - self._first]
            if entry.kind == barrier and entry.stamp == epoch:
                self._drop(at - self._first + 1)
                return
        if entries and entries[-1].kind == end:
            self._drop(len(entries) - 1)

    def rewind(self) -> None:
        """Send everything again."""
        self.next = 0

    def clear(self) -> None:
        """Drop everything."""
        self._drop(len(self.entries))

    def parts(self, entry: Entry) -> Sequence[Buffer]:
        """The bytes of an entry's message."""
        if entry.place is not None:
            file, offset, size = entry.place
            return [os.pread(file.fileno(), size, offset)]
        if entry.parts is None:
            assert self.encode is not None
            return self.encode(entry)
        return entry.parts

    def spill(self) -> None:
        """Move what is in memory to disk."""
        assert self._rud is not None
        rud = self._rud
        moving = [entry for entry in self.entries if entry.place is None and entry.size]
        try:
            places = rud.write(self.parts(entry) for entry in moving)
        except OSError as error:
            raise PenstockError(
                f"the messages since the last complete epoch take more than the {rud.memory_bytes:,} bytes of memory "
                f"allowed for them, and {rud.directory!r} cannot take them: {error.strerror or error}. Free space "
                "there, set TMPDIR to another disk, or look why epochs do not complete (job.status()['epochs'])"
            ) from error
        for entry, place in zip(moving, places, strict=True):
            entry.parts, entry.batch, entry.place = None, None, place
            self._leave_memory(entry.size, 1)
            self._on_disk += 1
            rud.spilled += entry.size
            rud.spilled_messages += 1

    def _drop(self, some: int) -> None:
        rud, old = self._rud, self.entries
        signals = [at for at in self._signals if at >= self._first + some]
        in_memory = not self._on_disk
        if rud is not None and in_memory:
            self._leave_memory(sum(map(_size, islice(old, some))), some - len(self._signals) + len(signals))
        elif rud is not None:
            for entry in old[:some]:
                if entry.place is not None:
                    self._on_disk -= 1
                    rud.spilled -= entry.size
                    rud.spilled_messages -= 1
                elif entry.size:
                    self._leave_memory(entry.size, 1)
        # Not a list of what is dropped: the garbage collector would look through a long list that is new.
        self.entries = old[some:]
        self.next = max(0, self.next - some)
        self._first += some
        self._signals = signals
        self._dropped = old if rud is not None and in_memory else []  # a file goes with its last entry

    def _leave_memory(self, size: int, messages: int) -> None:
        assert self._rud is not None
        self.in_memory -= size + messages * ENTRY_BYTES
        self._rud.used -= size + messages * ENTRY_BYTES
