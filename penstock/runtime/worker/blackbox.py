"""The black box of a worker: a little shared memory that says, after the worker's death, what it was doing and how it
died.

The worker notes the task whose step it runs. When a step kills the process (a native library crashes, memory runs out),
the watcher of the worker reads the note. Another note says in words which operator's open(), close() or finish() the
worker is in, or whose saved state it reads, for the error of a job that dies there each time. A task that was running
at two deaths runs *record by record*: it takes one record at a time, and notes each record before the operator sees it.
A record that kills the process again and again is *poison*. From then on it is a failed record, about which its
operator's policy decides.

A record is known by its *place*: how many records had come through one channel (or from the source) since the epoch
from which the task continued. Equal records at other places have nothing to do with it. As long as the sender of a
channel lives, it sends the same records in the same order again. A sender that goes back too may produce them in
another order, so the digest of the record must agree too. At worst, a poison record is not recognised, which costs
further deaths. Another record must never be taken for it.

Not every death is the fault of the record. A process that crashes, by os._exit or by a signal such as SIGSEGV for what
a thread did, writes into the black box which thread it was. A process that leaves no such note was killed from outside,
or by the kernel because memory ran out, and these two look the same. Such a death counts half, and only until an epoch
completes.

The memory has no name. The watcher opens it through /proc while the worker lives, and the kernel frees it when both are
gone. A step must cost next to nothing: one store into a mapping, and no system call.
"""

from __future__ import annotations

import faulthandler
import hashlib
import mmap
import os
import posix
import re
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from penstock.runtime.errors import PenstockError
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import encode
from penstock.runtime.records.userfunc import is_users

# Task + 1 (0: none), digest of the record (0: none). This is all that a step writes.
_STEP = struct.Struct("<qq")
# The same for a record, and then: operator, origin, nth, and twice epoch and sequence.
_RECORD = struct.Struct("<9q")
_THREAD = struct.Struct("<Q")  # the thread that runs the loop
_THREAD_AT = 128
# What the process was doing beside records, in words: each a length and a text. One is for the thread that runs the
# loop, the other for one that reads saved state.
_LENGTH = struct.Struct("<H")
_DOING_AT = (256, 768)
_DOING_BYTES = 512
_STORY_AT = mmap.PAGESIZE  # how the process ended, as faulthandler writes it
_BYTES = 1024 * 1024  # room for the stacks of a hundred threads; the kernel gives pages only for what is written

#: The origin of a record that did not come through a channel: the task's source, or a stage of the task (by a timer, at
#: a watermark, at the end).
SOURCE, MADE = -1, -2


class RecordPlace(NamedTuple):
    """The place of a record: since the task continued from `epoch`, `sequence` records had come from `origin` before
    the record at hand, and the operators before this one had made `nth` records of it."""

    epoch: int
    origin: int
    sequence: int
    nth: int


_NOWHERE = RecordPlace(0, 0, 0, 0)


class Note(NamedTuple):
    """A task's step, and in record-by-record mode the record that an operator was given. `place` is counted from the
    epoch from which the task continued, `later` from the last complete epoch, from which the task continues when its
    process dies now."""

    task: int
    operator: int = 0
    digest: int = 0
    place: RecordPlace = _NOWHERE
    later: RecordPlace = _NOWHERE


class Crash(NamedTuple):
    """How a process crashed. `what` says it in words, with the line; `in_loop`, that it was the thread that runs the
    operators; `stack`, where it was, the innermost call first."""

    what: str
    in_loop: bool
    stack: str = ""


class BlackBox:
    """The worker's end of the black box."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("penstock-blackbox", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _BYTES)
        self._map = mmap.mmap(self._fd, _BYTES)
        self._told = False

    @property
    def address(self) -> str:
        """The address by which a watcher finds the black box while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def note(self, task: int) -> None:
        """Notes that a step of this task begins."""
        _STEP.pack_into(self._map, 0, task + 1, 0)

    def record(self, note: Note) -> None:
        """Notes that an operator gets a record."""
        task, operator, digest, place, later = note
        _RECORD.pack_into(
            self._map,
            0,
            task + 1,
            digest,
            operator,
            place.origin,
            place.nth,
            place.epoch,
            place.sequence,
            later.epoch,
            later.sequence,
        )

    def rest(self) -> None:
        """Notes that no step is running."""
        _STEP.pack_into(self._map, 0, 0, 0)

    def doing(self, what: str, *, reads: bool = False) -> None:
        """Notes the action of this process from now on, as words that follow "died", such as "in open() of operator
        'x'"; "" when it is over. `reads`: a thread that reads saved state says so, and not the thread that runs the
        loop."""
        said = what.encode("utf-8", "replace")[: _DOING_BYTES - _LENGTH.size]
        at = _DOING_AT[reads]
        begin = at + _LENGTH.size
        self._map[begin : begin + len(said)] = said
        _LENGTH.pack_into(self._map, at, len(said))

    def watch_this_process(self) -> None:
        """Lets crashes of this process be noted from now on. The thread that runs the operators calls it once."""
        _THREAD.pack_into(self._map, _THREAD_AT, threading.get_ident())
        os.lseek(self._fd, _STORY_AT, os.SEEK_SET)
        faulthandler.enable(self._fd)
        os.register_at_fork(after_in_child=faulthandler.disable)  # the end of a child is not the end of this process
        os._exit = posix._exit = self._noting(os._exit)  # type: ignore[assignment]

    def leaves(self, why: str) -> None:
        """Notes why this process ends itself, before it does."""
        os.lseek(self._fd, _STORY_AT, os.SEEK_SET)
        os.write(self._fd, f"{why}\n".encode("utf-8", "replace"))
        self._told = True

    def _noting(self, leave: Callable[[int], Any]) -> Callable[[int], Any]:
        pid = os.getpid()

        def _exit(status: int) -> Any:
            """Replaces os._exit, and notes that it was called."""
            if os.getpid() == pid and not self._told:
                code = sys._getframe(1)
                story = (
                    f"Fatal Python error: called os._exit({status!r})\n\n"
                    f"Current thread 0x{threading.get_ident():016x} (most recent call first):\n"
                    f'  File "{code.f_code.co_filename}", line {code.f_lineno} in {code.f_code.co_name}\n'
                )
                os.write(self._fd, story.encode("utf-8", "replace"))
            leave(status)

        return _exit


class Watcher:
    """The watcher's end of the black box. It must be opened while the worker lives, or it knows nothing."""

    def __init__(self, address: str) -> None:
        self._map: mmap.mmap | None = None
        try:
            fd = os.open(address, os.O_RDONLY)
        except OSError:
            return
        try:
            self._map = mmap.mmap(fd, _BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)

    def read(self) -> Note | None:
        """Returns the step that the worker was running, if any."""
        if self._map is None:
            return None
        task, digest, operator, origin, nth, epoch, sequence, later, left = _RECORD.unpack_from(self._map, 0)
        if not task:
            return None
        if not digest:
            return Note(task - 1)
        return Note(
            task - 1, operator, digest, RecordPlace(epoch, origin, sequence, nth), RecordPlace(later, origin, left, nth)
        )

    def doing(self) -> str:
        """Returns the action of the worker beside records, as words that follow "died", or ""."""
        said: list[str] = []
        for at in _DOING_AT if self._map is not None else ():
            assert self._map is not None
            (length,) = _LENGTH.unpack_from(self._map, at)
            begin = at + _LENGTH.size
            said.append(self._map[begin : begin + length].decode("utf-8", "ignore"))
        return " and ".join(filter(None, said))

    def crash(self) -> Crash | None:
        """Returns how the worker's process ended, if the process crashed."""
        if self._map is None:
            return None
        story = self._map[_STORY_AT:].rstrip(b"\0").decode("utf-8", "replace")
        (loop,) = _THREAD.unpack_from(self._map, _THREAD_AT)
        return _crash_of(story, loop)


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process of this machine (SIGSTOP, a debugger)."""
    import psutil  # rarely needed, and loading it takes 20 ms

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _crash_of(story: str, loop: int) -> Crash | None:
    """Returns the text of faulthandler, in one line."""
    said = re.match(r"(?:Fatal Python error: )?(.+)", story)
    if said is None:
        return None
    # The thread that crashed, or none when no Python thread did.
    thread = re.search(r"^Current thread 0x([0-9a-f]+) .*\n((?:  File .*\n)*)", story, re.MULTILINE)
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.+)$', thread[2] if thread else "", re.MULTILINE)
    own = next((frame for frame in frames if is_users(frame[0])), frames[0] if frames else None)
    line = "" if own is None else f", at {own[0]}:{own[1]} in {own[2]}"
    in_loop = thread is not None and int(thread[1], 16) == loop
    return Crash(said[1].strip() + line, in_loop, thread[2] if thread else "")


#: An operator, the digest of a record, and its place.
_Spot = tuple[int, int, RecordPlace]
_Fact = TypeVar("_Fact")

#: After this many epochs without a death, a task is no longer suspect. One epoch is not enough, because the record may
#: not have come yet.
CALM_EPOCHS = 10

#: The same for a task in which crashes have proved that a record is poison, because equal records may be rare.
PROVEN_EPOCHS = 10_000


class Poison(PenstockError):
    """The record has killed its worker's process as often as the job allows."""


class RecordByRecordMode(NamedTuple):
    """How a task runs record by record: until `epochs` more epochs have completed. It refuses poison records, and says
    why: at one place, by (operator, digest, place), or wherever they come, by (operator, digest)."""

    epochs: int = CALM_EPOCHS
    places: dict[_Spot, str] = {}  # noqa: RUF012 - never written to
    values: dict[tuple[int, int], str] = {}  # noqa: RUF012


class RecordByRecord:
    """Runs a task record by record: counts records by their origins, notes each one, and refuses poison records. It is
    made when the task has gone back to `epoch`, before the task gets its first record."""

    def __init__(self, box: BlackBox, task: int, mode: RecordByRecordMode, epoch: int) -> None:
        self.origin = SOURCE  # the origin of the input that the task has taken up last
        self._box = box
        self._task = task
        self._mode = mode
        self._epochs_left = mode.epochs
        self._epoch = epoch
        self._counts: dict[int, int] = {}
        self._at: dict[int, dict[int, int]] = {}  # by epoch that is not complete: the counts at its barrier
        self._complete = epoch
        self._complete_at: dict[int, int] = {}
        self._place = self._later = _NOWHERE
        self._nth: dict[int, int] = {}

    def next(self, origin: int) -> None:
        """Notes that the next record from this origin is at hand."""
        sequence = self._counts.get(origin, 0)
        self._counts[origin] = sequence + 1
        self._place = RecordPlace(self._epoch, origin, sequence, 0)
        self._later = RecordPlace(self._complete, origin, sequence - self._complete_at.get(origin, 0), 0)
        self._nth.clear()

    def check(self, operator: int, batch: Batch) -> None:
        """Notes that an operator is about to get a batch of one record. Raises Poison when it must not get it."""
        nth = self._nth.get(operator, 0)
        self._nth[operator] = nth + 1
        place = self._place._replace(nth=nth)
        try:
            digest = digest_of(batch)
        except Exception:  # within a chain records may be of any kind, and a record without a digest is never poison
            digest = 0
        mode = self._mode
        why = mode.places.get((operator, digest, place)) or mode.values.get((operator, digest))
        if why is not None:
            raise Poison(why)
        self._box.record(Note(self._task, operator, digest, place, self._later._replace(nth=nth)))

    def passed(self, epoch: int) -> None:
        """Notes that the task has saved its state at the barrier of an epoch, and that later records belong to the next
        epoch."""
        self._at[epoch] = dict(self._counts)

    def completed(self, epoch: int) -> bool:
        """Notes that an epoch is complete. Returns False when the task leaves record-by-record mode."""
        if epoch > self._complete:
            if epoch in self._at:
                self._complete, self._complete_at = epoch, self._at[epoch]
                self._at = {later: counts for later, counts in self._at.items() if later > epoch}
            self._epochs_left -= 1
        return self._epochs_left > 0


def digest_of(batch: Batch) -> int:
    """Returns the digest of a batch of one record. Equal records have the same digest in every process, and it is never
    0."""
    record: Any = (batch.keys[0], batch.values[0]) if isinstance(batch, KeyedBatch) else batch[0]
    digest = hashlib.blake2b(encode([record])[1], digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


@dataclass
class _Doubt:
    """The facts from the deaths of a worker while one task was running."""

    deaths: int = 0
    epochs_left: int = CALM_EPOCHS
    crashes: Counter[_Spot] = field(default_factory=Counter)
    outside: Counter[_Spot] = field(default_factory=Counter)  # since an epoch was completed
    equals: Counter[tuple[int, int]] = field(default_factory=Counter)  # crashes by (operator, digest), at all places
    places: dict[_Spot, str] = field(default_factory=dict)  # poison at one place, and why
    values: dict[tuple[int, int], str] = field(default_factory=dict)  # poison at every place, and why

    def went_back(self, note: Note) -> None:
        """Renumbers the places of records from the same origin, because the task continues from the epoch from which
        `note.later` is counted. Other places are forgotten."""
        place, later = note.place, note.later
        if place.epoch == later.epoch:
            return
        fewer = place.sequence - later.sequence

        def moved(counts: Mapping[_Spot, _Fact]) -> dict[_Spot, _Fact]:
            return {
                (operator, digest, RecordPlace(later.epoch, at.origin, at.sequence - fewer, at.nth)): fact
                for (operator, digest, at), fact in counts.items()
                if at.epoch == place.epoch and at.origin == place.origin and at.sequence >= fewer
            }

        self.crashes, self.outside = Counter(moved(self.crashes)), Counter(moved(self.outside))
        self.places = moved(self.places)


class Suspects:
    """The facts that the watcher takes from deaths: which tasks must run record by record, and which records are poison
    to them.

    A record is poison at its place when it was at hand at `attempts` crashes. Two deaths from outside, without a
    complete epoch since, count as much as one crash. When records of one value were at hand at two crashes more than
    `attempts`, at whatever places, they are poison at every place: there may be many equal records, and their places
    may change. So records of one value can cause at most `attempts` + 2 crashes, after the two deaths that put their
    task into record-by-record mode.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._doubts: dict[int, _Doubt] = {}

    def modes(self) -> dict[int, RecordByRecordMode]:
        """Returns the tasks that must run record by record, and how each of them does."""
        return {
            task: RecordByRecordMode(doubt.epochs_left, dict(doubt.places), dict(doubt.values))
            for task, doubt in self._doubts.items()
            if doubt.deaths >= 2
        }

    def completed(self) -> None:
        """Notes that an epoch is complete."""
        for task, doubt in list(self._doubts.items()):
            doubt.epochs_left -= 1
            if not doubt.epochs_left:
                del self._doubts[task]
            # The job makes progress, so deaths from outside do not add up over its life. Crashes may still come.
            doubt.outside.clear()
            doubt.places = {spot: why for spot, why in doubt.places.items() if doubt.crashes[spot]}

    def died(self, note: Note | None, crash: Crash | None = None) -> None:
        """Notes that a worker has died while it was doing this. Without a crash, a signal from outside or the lack of
        memory has killed it."""
        if note is None:
            return
        doubt = self._doubts.setdefault(note.task, _Doubt())
        doubt.deaths += 1
        if note.digest:
            value = note.operator, note.digest
            doubt.went_back(note)
            spot = (*value, note.later)
            if crash is None or not crash.in_loop:
                doubt.outside[spot] += 1
            else:
                doubt.crashes[spot] += 1
                doubt.equals[value] += 1
            crashes, outside = doubt.crashes[spot], doubt.outside[spot]
            last = "" if crash is None else f"; the last time: {crash.what}"
            if 2 * crashes + outside >= 2 * self._attempts:
                doubt.places[spot] = (
                    f"this record has killed the worker's process {_times(crashes + outside)} while this operator had "
                    f"it, {_times(outside)} of these by a signal from outside or for want of memory{last}"
                    if outside
                    else _CRASHED.format(_times(crashes)) + last
                )
            if doubt.equals[value] >= self._attempts + 2:
                doubt.values[value] = _CRASHED.format(_times(doubt.equals[value])) + last
        doubt.epochs_left = PROVEN_EPOCHS if doubt.values or doubt.places else CALM_EPOCHS

    def forget(self) -> None:
        """Forgets everything, because the plan has changed and tasks have other numbers."""
        self._doubts.clear()


_CRASHED = "this record has killed the worker's process {} while this operator had it"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
