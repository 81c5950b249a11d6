"""The black box of a worker: a little shared memory that says, after the worker's death, what it was doing and how it
died.

The worker notes the task whose step it runs. When a step kills the process (a native library crashes, memory runs out),
the watcher of the worker reads the note. Another note says in words which operator's open(), close() or finish() the
worker is in, or whose saved state it reads, for the error of a job that dies there each time. A task that runs record
by record (record_by_record.py) also notes each record, and the host decides which records are to blame
(host/decide/suspects.py).

A process that crashes, by os._exit or by a signal such as SIGSEGV for what a thread did, writes into the black box
which thread it was. A process that leaves no such note was killed from outside, or by the kernel because memory ran
out, and these two look the same.

The memory has no name. The watcher opens it through /proc while the worker lives, and the kernel frees it when both are
gone. A step must cost next to nothing: one store into a mapping, and no system call.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import posix
import re
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

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


NOWHERE = RecordPlace(0, 0, 0, 0)


class Note(NamedTuple):
    """A task's step, and in record-by-record mode the record that an operator was given. `place` is counted from the
    epoch from which the task continued, `later` from the last complete epoch, from which the task continues when its
    process dies now."""

    task: int
    operator: int = 0
    digest: int = 0
    place: RecordPlace = NOWHERE
    later: RecordPlace = NOWHERE


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
