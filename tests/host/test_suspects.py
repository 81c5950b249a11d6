"""What the host makes of several deaths: tasks that run record by record, and records that are poison."""

from __future__ import annotations

from penstock.host.decide.suspects import PROVEN_EPOCHS, Suspects
from penstock.runtime.worker.blackbox import SOURCE, Crash, Note, RecordPlace
from penstock.runtime.worker.record_by_record import CALM_EPOCHS, RecordByRecordMode

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
