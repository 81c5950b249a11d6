"""The note that outlives a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from penstock.runtime.worker.blackbox import Crash, Note, RecordPlace, Watcher, is_stopped
from penstock.runtime.worker.record_by_record import digest_of

_DIES_IN_A_STEP = """
import sys
from penstock.runtime.worker.blackbox import BlackBox
from penstock.runtime.worker.record_by_record import RecordByRecord, RecordByRecordMode
box = BlackBox()
box.note(1)
box.rest()
print(box.address, flush=True)
sys.stdin.readline()
box.note(7)
mode = RecordByRecord(box, 7, RecordByRecordMode(), 4)
mode.next(11)
mode.next(11)
mode.check(2, [("the", "record")])
print("noted", flush=True)
sys.stdin.readline()
"""


def test_the_note_outlives_its_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _DIES_IN_A_STEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        watcher = Watcher(process.stdout.readline().strip())
        assert watcher.read() is None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "noted\n"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        place = RecordPlace(epoch=4, origin=11, sequence=1, nth=0)
        assert watcher.read() == Note(7, 2, digest_of([("the", "record")]), place, place)
        assert watcher.crash() is None
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


_ENDS = """
import ctypes, os, signal, sys, threading
from penstock.runtime.worker.blackbox import BlackBox
box = BlackBox()
box.watch_this_process()
print(box.address, flush=True)
sys.stdin.readline()

def in_a_child(end):
    pid = os.fork()
    if not pid:
        end()
    os.waitpid(pid, 0)

def in_a_thread(end):
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()

def crash():
    ctypes.string_at(0)

def leave():
    os._exit(3)

"""


def ending(code: str) -> tuple[int, Crash | None]:
    """How a process that watches itself ends by this code: its exit status, and what its watcher says."""
    process = subprocess.Popen(
        [sys.executable, "-c", _ENDS + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    watcher = Watcher(process.stdout.readline().strip())
    process.communicate("\n")
    return process.returncode, watcher.crash()


def test_a_process_that_ends_itself_says_why() -> None:
    ended, crash = ending("box.leaves('it had heard nothing'); leave()")
    assert ended == 3
    assert crash == Crash("it had heard nothing", in_loop=False)


@pytest.mark.parametrize(
    ("code", "status", "what"),
    [
        ("crash()", -signal.SIGSEGV, "Segmentation fault, at <string>:"),
        ("os.abort()", -signal.SIGABRT, "Aborted, at <string>:"),
        ("leave()", 3, "called os._exit(3), at <string>:"),
        ("import posix; posix._exit(4)", 4, "called os._exit(4), at <string>:"),
    ],
)
def test_a_process_that_crashes_says_so(code: str, status: int, what: str) -> None:
    ended, crash = ending(code)
    assert ended == status
    assert crash is not None
    assert crash.what.startswith(what)
    assert crash.in_loop
    assert crash.stack.startswith("  File ")


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_process_that_is_killed_says_nothing(end: str) -> None:
    ended, crash = ending(f"signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), signal.{end})")
    assert ended == -signal.Signals[end]
    assert crash is None


_DIES_IN_A_HOOK = """
import os
from penstock.runtime.worker.blackbox import BlackBox
box = BlackBox()
print(box.address, flush=True)
input()
box.doing("in open() of operator 'a long name'")
box.doing("")
box.doing("in finish() of operator 'x'")
box.doing("while it read the saved state of task '\u00e4' " + "\u00e4" * 1000, reads=True)
print("noted", flush=True)
input()
box.doing("", reads=True)
os._exit(1)
"""


def test_what_was_done_beside_records_outlives_its_process() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _DIES_IN_A_HOOK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        watcher = Watcher(process.stdout.readline().strip())
        assert watcher.doing() == ""
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "noted\n"
        first, _, second = watcher.doing().partition(" and ")
        assert first == "in finish() of operator 'x'"
        assert second.startswith("while it read the saved state of task '\u00e4' \u00e4\u00e4")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(30) == 1
        assert watcher.doing() == "in finish() of operator 'x'"
        assert watcher.read() is None, "it is no step"
    finally:
        process.kill()
        process.wait()
    assert Watcher("/proc/self/fd/no such").doing() == ""


def test_who_crashed() -> None:
    """What another thread does need not be the record's doing; what a child does is not this process's end at all."""
    assert ending("in_a_child(leave); in_a_child(crash); os.kill(os.getpid(), 9)") == (-9, None)
    ended, crash = ending("in_a_thread(crash)")
    assert ended == -signal.SIGSEGV
    assert crash is not None
    assert crash.what.startswith("Segmentation fault, at <string>:")
    assert not crash.in_loop


def test_a_stopped_process_is_told_from_one_that_hangs() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process.pid)
