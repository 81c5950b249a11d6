"""The note that outlives a worker, and what its watcher makes of several deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from penstock.runtime.blackbox import CALM_EPOCHS, BlackBox, Care, Note, Poison, Suspects, Watcher, digest_of

_DIES_IN_A_STEP = """
import sys
from penstock.runtime.blackbox import CALM_EPOCHS, BlackBox, Care
box = BlackBox()
box.note(1)
box.rest()
print(box.address, flush=True)
sys.stdin.readline()
box.note(7)
Care(box, 7, frozenset(), 3).check(2, ("the", "record"))
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
        assert watcher.read() == Note(7, 2, digest_of(("the", "record")))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_equal_records_have_equal_digests_that_tell_them_from_others() -> None:
    assert digest_of({"a": [1, 2]}) == digest_of({"a": [1, 2]})
    assert digest_of("a") != digest_of("b")
    assert digest_of("") != 0


def test_a_task_is_careful_from_its_second_death_on_and_a_record_poison_from_its_third() -> None:
    suspects = Suspects(attempts=3)
    suspects.died(None)
    suspects.died(Note(4, 0, 0))
    assert suspects.careful == {}
    suspects.died(Note(4, 0, 0))
    assert suspects.careful == {4: frozenset()}
    for _ in range(2):
        suspects.died(Note(4, 1, 99))
    assert suspects.careful == {4: frozenset()}
    suspects.died(Note(4, 1, 99))
    assert suspects.careful == {4: frozenset({(1, 99)})}


def test_epochs_end_suspicion_but_not_poison() -> None:
    suspects = Suspects(attempts=1)
    for _ in range(2):
        suspects.died(Note(1, 0, 0))
    suspects.died(Note(2, 0, 0))
    suspects.died(Note(2, 0, 5))
    for _ in range(CALM_EPOCHS - 1):
        suspects.completed()
    assert suspects.careful.keys() == {1, 2}
    suspects.completed()
    assert suspects.careful == {2: frozenset({(0, 5)})}
    suspects.died(Note(1, 0, 0))
    assert 1 not in suspects.careful


def test_care_notes_records_and_refuses_poison() -> None:
    box = BlackBox()
    watcher = Watcher(box.address)
    care = Care(box, 3, frozenset({(0, digest_of("bad"))}), 3)
    care.check(0, "good")
    assert watcher.read() == Note(3, 0, digest_of("good"))
    care.check(1, "bad")  # poison to another operator
    with pytest.raises(Poison, match="3 times"):
        care.check(0, "bad")
