"""What a worker was doing when it died: a few bytes of shared memory that outlive its process.

The worker notes the task whose step it runs. When that kills the process (a native library that crashes, memory that
runs out), whoever watches the worker reads the note. A task that was at it twice is made *careful*: it takes records
one by one and notes each before the operator sees it; a record that has killed the process several times is *poison*,
and from then on a failed record like others, by its operator's policy, instead of the end of the job. A task that
has lived through several epochs since, without a record that is poison to it, need be careful no more.

The memory has no name: the watcher opens it through /proc while the worker lives, and the kernel frees it with the
last of the two. It must cost next to nothing in a step: one store into a mapping, no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import NamedTuple

from penstock.runtime.codec import encode
from penstock.runtime.errors import PenstockError

# Task + 1 (0: none), position of the operator in its chain, digest of the record (0: none).
_FORM = struct.Struct("<qqq")


class Note(NamedTuple):
    """A task's step, and in a careful task the record that an operator was given."""

    task: int
    operator: int
    digest: int


class BlackBox:
    """The worker's end."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("penstock-blackbox", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self._fd, mmap.PAGESIZE)

    @property
    def address(self) -> str:
        """Where a watcher finds it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def note(self, task: int, operator: int = 0, digest: int = 0) -> None:
        """A step of this task begins, or an operator of it gets a record."""
        _FORM.pack_into(self._map, 0, task + 1, operator, digest)

    def rest(self) -> None:
        """No step is running."""
        _FORM.pack_into(self._map, 0, 0, 0, 0)


class Watcher:
    """The end of whoever watches a worker; made while it lives. Made too late it knows nothing."""

    def __init__(self, address: str) -> None:
        self._map: mmap.mmap | None = None
        try:
            fd = os.open(address, os.O_RDONLY)
        except OSError:
            return
        try:
            self._map = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def read(self) -> Note | None:
        """What the worker was doing, if it was running a step."""
        if self._map is None:
            return None
        task, operator, digest = _FORM.unpack_from(self._map, 0)
        return Note(task - 1, operator, digest) if task else None


#: After so many epochs without a death a task is no longer suspect. One is not enough: the record may be yet to come.
CALM_EPOCHS = 10


class Poison(PenstockError):
    """A record that has killed its worker's process as often as is borne."""


class Care:
    """How a careful task runs: it notes each record, and knows those that are poison, by (operator, digest)."""

    def __init__(self, box: BlackBox, task: int, poison: frozenset[tuple[int, int]], attempts: int) -> None:
        self._box = box
        self._task = task
        self.poison = poison
        self.epochs_left = CALM_EPOCHS
        self._attempts = attempts

    def check(self, operator: int, record: object) -> None:
        """An operator is about to get a record; raises Poison when it must not."""
        try:
            digest = digest_of(record)
        except Exception:  # within a chain records may be of any kind; one that has no digest is never poison
            digest = 0
        if (operator, digest) in self.poison:
            raise Poison(
                f"this record has killed the worker's process {self._attempts} times while this operator had it"
            )
        self._box.note(self._task, operator, digest)


def digest_of(record: object) -> int:
    """The same for equal records in every process, and never 0."""
    return zlib.crc32(encode([record])[1]) + 1


class Suspects:
    """The watcher's memory of deaths: which tasks must be careful, and what is poison to them."""

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._deaths: dict[int, int] = {}
        self._epochs_left: dict[int, int] = {}  # until a task is no longer suspect
        self._records: dict[Note, int] = {}
        self.careful: dict[int, frozenset[tuple[int, int]]] = {}

    def completed(self) -> None:
        """An epoch is complete."""
        for task in list(self._epochs_left):
            self._epochs_left[task] -= 1
            if self._epochs_left[task]:
                continue
            del self._epochs_left[task], self._deaths[task]
            # Equal records may be common: deaths that have nothing to do with them must not add up over a job's life.
            self._records = {
                note: deaths for note, deaths in self._records.items() if note.task != task or deaths >= self._attempts
            }
            if not self.careful.get(task):
                self.careful.pop(task, None)

    def died(self, note: Note | None) -> None:
        """A worker has died, doing this."""
        if note is None:
            return
        self._epochs_left[note.task] = CALM_EPOCHS
        self._deaths[note.task] = self._deaths.get(note.task, 0) + 1
        if self._deaths[note.task] >= 2:
            self.careful.setdefault(note.task, frozenset())
        if note.digest:
            self._records[note] = self._records.get(note, 0) + 1
            if self._records[note] >= self._attempts:
                known = self.careful.get(note.task, frozenset())
                self.careful[note.task] = known | {(note.operator, note.digest)}
