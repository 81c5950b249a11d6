"""The note that outlives a worker, and what its watcher makes of several deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.worker.blackbox import (
    CALM_EPOCHS,
    PROVEN_EPOCHS,
    SOURCE,
    BlackBox,
    Crash,
    Note,
    Poison,
    RecordByRecord,
    RecordByRecordMode,
    RecordPlace,
    Suspects,
    Watcher,
    digest_of,
    is_stopped,
)

_DIES_IN_A_STEP = """
import sys
from penstock.runtime.worker.blackbox import BlackBox, RecordByRecord, RecordByRecordMode
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


def test_equal_records_have_equal_digests_that_tell_them_from_others() -> None:
    assert digest_of([{"a": [1, 2]}]) == digest_of([{"a": [1, 2]}])
    assert digest_of(["a"]) != digest_of(["b"])
    assert digest_of([""]) != 0
    assert digest_of(KeyedBatch(["k"], [1])) == digest_of(KeyedBatch(["k"], [1]))
    assert digest_of(KeyedBatch(["k"], [1])) != digest_of(KeyedBatch(["l"], [1]))


# --- what the watcher makes of deaths --------------------------------------------------------------------------

CRASH = Crash("Segmentation fault, at parse.py:7 in parse", True)


def at(sequence: int, *, epoch: int = 5, digest: int = 99, later: RecordPlace | None = None) -> Note:
    place = RecordPlace(epoch, SOURCE, sequence, 0)
    return Note(4, 1, digest, place, later or place)


def suspected(attempts: int = 3) -> Suspects:
    """Task 4 has died twice."""
    suspects = Suspects(attempts)
    suspects.died(None)
    suspects.died(Note(4), CRASH)
    assert suspects.modes() == {}
    suspects.died(Note(4), CRASH)
    assert suspects.modes() == {4: RecordByRecordMode(CALM_EPOCHS)}
    return suspects


def places(suspects: Suspects) -> list[RecordPlace]:
    return [place for mode in suspects.modes().values() for _, _, place in mode.places]


def test_a_record_is_poison_at_its_place_after_so_many_crashes() -> None:
    suspects = suspected()
    for _ in range(2):
        suspects.died(at(7), CRASH)
        suspects.died(at(8, digest=98), CRASH)
    assert places(suspects) == []
    suspects.died(at(7), CRASH)
    assert places(suspects) == [at(7).place]
    (why,) = suspects.modes()[4].places.values()
    assert why == (
        "this record has killed the worker's process 3 times while this operator had it; the last time: "
        "Segmentation fault, at parse.py:7 in parse"
    )


def test_deaths_from_outside_count_half_and_only_until_an_epoch_completes() -> None:
    suspects = suspected()
    for crash in (None, Crash("Segmentation fault", False)):
        for _ in range(5):
            suspects.died(at(7), crash)
        assert places(suspects) == []
        suspects.completed()
    for _ in range(6):
        suspects.died(at(7))
    assert places(suspects) == [at(7).place]
    (why,) = suspects.modes()[4].places.values()
    assert "6 times while this operator had it, 6 times of these by a signal from outside or for want of memory" in why
    suspects.completed()
    assert places(suspects) == []


def test_equal_records_at_other_places_are_others() -> None:
    suspects = suspected()
    for sequence in range(100):
        suspects.died(at(sequence))
    assert places(suspects) == []
    assert not suspects.modes()[4].values


def test_equals_of_a_record_that_was_found_out_cost_two_crashes_and_then_none() -> None:
    suspects = suspected()
    for _ in range(3):
        suspects.died(at(7), CRASH)
    suspects.died(at(8))
    suspects.died(at(9, digest=98), CRASH)
    assert places(suspects) == [at(7).place]
    suspects.died(at(20), CRASH)
    assert places(suspects) == [at(7).place]
    assert not suspects.modes()[4].values
    suspects.died(at(30), CRASH)
    assert list(suspects.modes()[4].values) == [(1, 99)]


def test_a_record_whose_place_is_never_the_same_is_found_out_all_the_same() -> None:
    suspects = suspected()
    for sequence in range(5):
        assert not suspects.modes()[4].values
        suspects.died(at(sequence), CRASH)
    assert list(suspects.modes()[4].values) == [(1, 99)]


def test_places_go_along_when_an_epoch_completes_before_them() -> None:
    suspects = suspected()
    suspects.died(at(7), CRASH)
    suspects.died(at(107), CRASH)
    suspects.died(at(107, later=RecordPlace(6, SOURCE, 100, 0)), CRASH)  # 7 came before the barrier
    assert places(suspects) == []
    suspects.died(at(100, epoch=6), CRASH)
    assert places(suspects) == [RecordPlace(6, SOURCE, 100, 0)]
    suspects.died(at(200, epoch=6, digest=1, later=RecordPlace(9, SOURCE, 150, 0)), CRASH)
    assert places(suspects) == [RecordPlace(9, SOURCE, 50, 0)]
    suspects.died(at(60, epoch=9, digest=2, later=RecordPlace(12, SOURCE, 5, 0)), CRASH)  # 50 came before the barrier
    assert places(suspects) == []


def test_suspicion_ends() -> None:
    suspects = suspected()
    suspects.died(at(7), CRASH)
    for _ in range(CALM_EPOCHS - 1):
        suspects.completed()
    assert suspects.modes() == {4: RecordByRecordMode(1)}
    suspects.died(Note(4))
    for _ in range(CALM_EPOCHS):
        assert suspects.modes().keys() == {4}
        suspects.completed()
    assert suspects.modes() == {}
    for _ in range(3):
        suspects.died(at(7), CRASH)
    assert suspects.modes()[4].epochs == PROVEN_EPOCHS
    suspects.died(Note(4))
    assert suspects.modes()[4].epochs == PROVEN_EPOCHS
    suspects.forget()
    assert suspects.modes() == {}


# --- a task that runs record by record -------------------------------------------------------------------------------


def test_care_counts_from_the_last_complete_epoch() -> None:
    box = BlackBox()
    watcher = Watcher(box.address)
    record_by_record = RecordByRecord(box, 3, RecordByRecordMode(2), 5)

    def noted(origin: int) -> tuple[RecordPlace, RecordPlace]:
        record_by_record.next(origin)
        record_by_record.check(0, ["word"])
        note = watcher.read()
        assert note is not None
        assert note[:3] == (3, 0, digest_of(["word"]))
        return note.place, note.later

    assert noted(1) == (RecordPlace(5, 1, 0, 0), RecordPlace(5, 1, 0, 0))
    assert noted(2) == (RecordPlace(5, 2, 0, 0), RecordPlace(5, 2, 0, 0))
    assert noted(1) == (RecordPlace(5, 1, 1, 0), RecordPlace(5, 1, 1, 0))
    record_by_record.passed(6)
    assert noted(1) == (RecordPlace(5, 1, 2, 0), RecordPlace(5, 1, 2, 0))
    record_by_record.passed(7)
    assert record_by_record.completed(5)  # it is known already
    assert record_by_record.completed(6)
    assert noted(1) == (RecordPlace(5, 1, 3, 0), RecordPlace(6, 1, 1, 0))
    assert noted(2) == (RecordPlace(5, 2, 1, 0), RecordPlace(6, 2, 0, 0))
    assert not record_by_record.completed(7)
    record_by_record.check(0, ["word"])
    note = watcher.read()
    assert note is not None
    assert note.place == RecordPlace(5, 2, 1, 1)


def test_care_refuses_poison_where_it_is() -> None:
    place = RecordPlace(5, 1, 1, 0)
    word, bad = digest_of(["word"]), digest_of(["bad"])
    record_by_record = RecordByRecord(
        BlackBox(), 3, RecordByRecordMode(2, {(0, word, place): "it killed"}, {(1, bad): "they kill"}), 5
    )
    record_by_record.next(1)
    record_by_record.check(0, ["word"])
    record_by_record.check(1, ["word"])
    with pytest.raises(Poison, match="they kill"):
        record_by_record.check(1, ["bad"])
    record_by_record.next(1)
    with pytest.raises(Poison, match="it killed"):
        record_by_record.check(0, ["word"])
    record_by_record.check(0, ["word"])  # the next that the operators before it made of the same
    record_by_record.next(1)
    record_by_record.check(0, ["word"])


def test_care_takes_records_that_cannot_be_encoded() -> None:
    box = BlackBox()
    record_by_record = RecordByRecord(box, 3, RecordByRecordMode(1, {(0, 0, RecordPlace(5, 1, 0, 0)): "no"}), 5)
    record_by_record.next(1)
    record_by_record.check(1, [threading.Lock()])
    assert Watcher(box.address).read() == Note(3)
