"""What a worker was doing when it died, and how: a little shared memory that outlives its process.

The worker notes the task whose step it runs. When that kills the process (a native library that crashes, memory that
runs out), whoever watches the worker reads the note. A task that was running at two deaths runs *record by record*: it
takes one record at a time, and notes each record before the operator sees it. A record that kills the process again and
again is *poison*. From then on it is a failed record, about which its operator's policy decides.

A record is known by its *place*: it is the so-manieth that came by one channel (or from the source) since the epoch
from which the task went on, and equal records at other places have nothing to do with it. What comes by a channel comes
again in the same order as long as its sender lives. A sender that goes back too may make it in another order, so the
record's digest must agree as well: at worst a record that kills is not known again, which costs further deaths, and
never is another one taken for it.

Nor is each death the record's doing. A process that crashes (by a signal such as SIGSEGV that the system sends for what
a thread did, or by os._exit) writes down in which thread that was. One that leaves no such word was killed from
outside, or by the kernel because memory had run out, which look the same: those deaths count half, and only as long as
no epoch completes.

The memory has no name: the watcher opens it through /proc while the worker lives, and the kernel frees it with the
last of the two. It must cost next to nothing in a step: one store into a mapping, no system call.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.runtime.errors import PenstockError
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.codec import encode
from penstock.runtime.records.userfunc import is_users

# Task + 1 (0: none), digest of the record (0: none): all that a step stores.
_STEP = struct.Struct("<qq")
# The same of a record, and then: operator, origin, nth; epoch and sequence, twice.
_RECORD = struct.Struct("<9q")
_THREAD = struct.Struct("<Q")  # the one that runs the loop
_THREAD_AT = 128
_STORY_AT = mmap.PAGESIZE  # how the process ended, as faulthandler writes it
_BYTES = 1024 * 1024  # the stacks of a hundred threads; the kernel gives pages only for what is written

#: Where a record came from, beside the numbers of channels: its task's source; a stage of its task (by a timer, at a
#: watermark, at the end).
SOURCE, MADE = -1, -2


class Place(NamedTuple):
    """Which record: since the task went on from `epoch`, `sequence` records had come from `origin` before the one that
    was at hand; of what the operators before made of it, `nth` records had come before."""

    epoch: int
    origin: int
    sequence: int
    nth: int


_NOWHERE = Place(0, 0, 0, 0)


class Note(NamedTuple):
    """A task's step, and in record-by-record mode the record that an operator was given. `place` is counted from the
    epoch from which the task went on, `later` from the last complete epoch, from which the task continues when its
    process dies now."""

    task: int
    operator: int = 0
    digest: int = 0
    place: Place = _NOWHERE
    later: Place = _NOWHERE


class Crash(NamedTuple):
    """How a process ended by its own doing: `what` says it with the line, `in_loop` that the thread which runs the
    operators did it, `stack` where it was, the innermost call first."""

    what: str
    in_loop: bool
    stack: str = ""


class BlackBox:
    """The worker's end."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("penstock-blackbox", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _BYTES)
        self._map = mmap.mmap(self._fd, _BYTES)

    @property
    def address(self) -> str:
        """Where a watcher finds it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def note(self, task: int) -> None:
        """A step of this task begins."""
        _STEP.pack_into(self._map, 0, task + 1, 0)

    def record(self, note: Note) -> None:
        """An operator gets a record."""
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
        """No step is running."""
        _STEP.pack_into(self._map, 0, 0, 0)

    def watch_this_process(self) -> None:
        """From now on note crashes of this process; to be called once, by the thread that runs the operators."""
        _THREAD.pack_into(self._map, _THREAD_AT, threading.get_ident())
        os.lseek(self._fd, _STORY_AT, os.SEEK_SET)
        faulthandler.enable(self._fd)
        os.register_at_fork(after_in_child=faulthandler.disable)  # what a child does is not this process's end
        os._exit = posix._exit = self._noting(os._exit)  # type: ignore[assignment]

    def _noting(self, leave: Callable[[int], Any]) -> Callable[[int], Any]:
        pid = os.getpid()

        def _exit(status: int) -> Any:
            """os._exit, which notes that it was called."""
            if os.getpid() == pid:
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
    """The end of whoever watches a worker; made while it lives. Made too late it knows nothing."""

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
        """What the worker was doing, if it was running a step."""
        if self._map is None:
            return None
        task, digest, operator, origin, nth, epoch, sequence, later, left = _RECORD.unpack_from(self._map, 0)
        if not task:
            return None
        if not digest:
            return Note(task - 1)
        return Note(task - 1, operator, digest, Place(epoch, origin, sequence, nth), Place(later, origin, left, nth))

    def crash(self) -> Crash | None:
        """How the worker's process ended, if that was its own doing."""
        if self._map is None:
            return None
        story = self._map[_STORY_AT:].rstrip(b"\0").decode("utf-8", "replace")
        (loop,) = _THREAD.unpack_from(self._map, _THREAD_AT)
        return _crash_of(story, loop)


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process of this machine (SIGSTOP, a debugger)."""
    import psutil  # loading it takes 20 ms, which each worker would pay for what is seldom needed

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _crash_of(story: str, loop: int) -> Crash | None:
    """What faulthandler has written, in one line."""
    said = re.match(r"(?:Fatal Python error: )?(.+)", story)
    if said is None:
        return None
    # Of all threads, the one that did it; none where no Python thread did.
    thread = re.search(r"^Current thread 0x([0-9a-f]+) .*\n((?:  File .*\n)*)", story, re.MULTILINE)
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.+)$', thread[2] if thread else "", re.MULTILINE)
    own = next((frame for frame in frames if is_users(frame[0])), frames[0] if frames else None)
    line = "" if own is None else f", at {own[0]}:{own[1]} in {own[2]}"
    in_loop = thread is not None and int(thread[1], 16) == loop
    return Crash(said[1].strip() + line, in_loop, thread[2] if thread else "")


#: After so many epochs without a death a task is no longer suspect. One is not enough: the record may be yet to come.
CALM_EPOCHS = 10

#: The same for a task of which some record was found to be poison by crashes: its like may come seldom.
PROVEN_EPOCHS = 10_000


class Poison(PenstockError):
    """A record that has killed its worker's process as often as is borne."""


class RecordByRecordMode(NamedTuple):
    """How a task runs record by record: until `epochs` more epochs have completed. It refuses poison records, and says
    why: at one place, by (operator, digest, place), or wherever they come, by (operator, digest)."""

    epochs: int = CALM_EPOCHS
    places: dict[tuple[int, int, Place], str] = {}  # noqa: RUF012 - never written to
    values: dict[tuple[int, int], str] = {}  # noqa: RUF012


class RecordByRecord:
    """Runs a task record by record: counts records by their origins, notes each, and refuses poison records.

    Made when the task has gone back to `epoch`, before it gets its first record."""

    def __init__(self, box: BlackBox, task: int, mode: RecordByRecordMode, epoch: int) -> None:
        self.origin = SOURCE  # of the input that the task has taken up last
        self._box = box
        self._task = task
        self._mode = mode
        self._epochs_left = mode.epochs
        self._epoch = epoch
        self._counts: dict[int, int] = {}
        self._at: dict[int, dict[int, int]] = {}  # the counts at barriers of epochs that are not complete
        self._complete = epoch
        self._complete_at: dict[int, int] = {}
        self._place = self._later = _NOWHERE
        self._nth: dict[int, int] = {}

    def next(self, origin: int) -> None:
        """The next record from this origin is at hand."""
        sequence = self._counts.get(origin, 0)
        self._counts[origin] = sequence + 1
        self._place = Place(self._epoch, origin, sequence, 0)
        self._later = Place(self._complete, origin, sequence - self._complete_at.get(origin, 0), 0)
        self._nth.clear()

    def check(self, operator: int, batch: Batch) -> None:
        """An operator is about to get a batch of one record; raises Poison when it must not."""
        nth = self._nth.get(operator, 0)
        self._nth[operator] = nth + 1
        place = self._place._replace(nth=nth)
        try:
            digest = digest_of(batch)
        except Exception:  # within a chain records may be of any kind; one that has no digest is never poison
            digest = 0
        mode = self._mode
        why = mode.places.get((operator, digest, place)) or mode.values.get((operator, digest))
        if why is not None:
            raise Poison(why)
        self._box.record(Note(self._task, operator, digest, place, self._later._replace(nth=nth)))

    def passed(self, epoch: int) -> None:
        """The task has saved its state at an epoch's barrier: what follows belongs to the next."""
        self._at[epoch] = dict(self._counts)

    def completed(self, epoch: int) -> bool:
        """An epoch is complete; False when the task leaves record-by-record mode."""
        if epoch > self._complete:
            if epoch in self._at:
                self._complete, self._complete_at = epoch, self._at[epoch]
                self._at = {later: counts for later, counts in self._at.items() if later > epoch}
            self._epochs_left -= 1
        return self._epochs_left > 0


def digest_of(batch: Batch) -> int:
    """Of a batch of one record: the same for equal records in every process, and never 0."""
    record: Any = (batch.keys[0], batch.values[0]) if isinstance(batch, KeyedBatch) else batch[0]
    digest = hashlib.blake2b(encode([record])[1], digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


@dataclass
class _Guilt:
    """Deaths while one record was at hand."""

    crashes: int = 0
    outside: int = 0  # since an epoch completed
    why: str | None = None  # it is poison


@dataclass
class _Doubt:
    """What the deaths of one task say."""

    deaths: int = 0
    epochs_left: int = CALM_EPOCHS
    places: dict[tuple[int, int, Place], _Guilt] = field(default_factory=dict)
    crashes: dict[tuple[int, int], int] = field(default_factory=dict)  # by (operator, digest), at whatever places
    proven: set[tuple[int, int]] = field(default_factory=set)  # poison at some place, by crashes alone
    values: dict[tuple[int, int], str] = field(default_factory=dict)  # poison wherever they come

    def went_back(self, note: Note) -> None:
        """The task goes on from where `note.later` is counted from: places are renumbered, or forgotten where it is not
        known how."""
        place, later = note.place, note.later
        if place.epoch == later.epoch:
            return
        fewer = place.sequence - later.sequence
        places = {}
        for (operator, digest, at), guilt in self.places.items():
            if at.epoch == place.epoch and at.origin == place.origin and at.sequence >= fewer:
                moved = Place(later.epoch, at.origin, at.sequence - fewer, at.nth)
                places[operator, digest, moved] = guilt
            elif at.epoch == later.epoch:
                places[operator, digest, at] = guilt
        self.places = places


class Suspects:
    """The watcher's memory of deaths: which tasks must run record by record, and what is poison to them.

    A record is poison at its place when it was at hand at `attempts` crashes; two deaths from outside, with no epoch
    complete since, count as much as one crash. Where a record was found out by crashes alone, its equals are poison
    at theirs after one crash. A record that was at hand at two crashes more than `attempts`, wherever, is poison
    wherever it comes: there may be many of it, and its places may not be the same each time. So the deaths that records
    of one value can cause are bounded by `attempts` + 2, after the two that put their task into record-by-record mode.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._doubts: dict[int, _Doubt] = {}

    def modes(self) -> dict[int, RecordByRecordMode]:
        """The tasks that must run record by record, and how."""
        return {
            task: RecordByRecordMode(
                doubt.epochs_left,
                {key: guilt.why for key, guilt in doubt.places.items() if guilt.why is not None},
                dict(doubt.values),
            )
            for task, doubt in self._doubts.items()
            if doubt.deaths >= 2
        }

    def completed(self) -> None:
        """An epoch is complete."""
        for task, doubt in list(self._doubts.items()):
            doubt.epochs_left -= 1
            if not doubt.epochs_left:
                del self._doubts[task]
                continue
            # The job gets on: what comes from outside does not add up over its life. What crashes may be yet to come.
            doubt.places = {key: guilt for key, guilt in doubt.places.items() if guilt.crashes}
            for guilt in doubt.places.values():
                guilt.outside = 0

    def died(self, note: Note | None, crash: Crash | None = None) -> None:
        """A worker has died, doing this; without a crash: by a signal from outside, or for want of memory."""
        if note is None:
            return
        doubt = self._doubts.setdefault(note.task, _Doubt())
        doubt.deaths += 1
        doubt.epochs_left = PROVEN_EPOCHS if doubt.proven or doubt.values else CALM_EPOCHS
        if not note.digest:
            return
        value = (note.operator, note.digest)
        guilt = doubt.places.setdefault((*value, note.place), _Guilt())
        doubt.went_back(note)
        if crash is None or not crash.in_loop:
            guilt.outside += 1
        else:
            guilt.crashes += 1
            doubt.crashes[value] = doubt.crashes.get(value, 0) + 1
        if guilt.crashes >= self._attempts:
            doubt.proven.add(value)
            doubt.epochs_left = PROVEN_EPOCHS
        if 2 * guilt.crashes + guilt.outside >= 2 * self._attempts or (guilt.crashes and value in doubt.proven):
            guilt.why = _reason(guilt.crashes, guilt.outside, crash)
        if doubt.crashes.get(value, 0) >= self._attempts + 2:
            doubt.values[value] = _reason(doubt.crashes[value], 0, crash)
            doubt.epochs_left = PROVEN_EPOCHS

    def forget(self) -> None:
        """The plan has changed: tasks have other numbers now."""
        self._doubts.clear()


def _reason(crashes: int, outside: int, crash: Crash | None) -> str:
    last = "" if crash is None else f"; the last time: {crash.what}"
    if not outside:
        return f"this record has killed the worker's process {_times(crashes)} while this operator had it{last}"
    others = f"{_times(outside)} by a signal from outside or for want of memory, with no epoch complete between"
    own = f", and {_times(crashes)} by a crash" if crashes else ""
    return f"the worker's process has died while this operator had this record: {others}{own}{last}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
