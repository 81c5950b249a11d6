"""A task that runs record by record: where its records are, and which of them it refuses."""

from __future__ import annotations

import threading

import pytest

from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.worker.blackbox import BlackBox, Note, RecordPlace, Watcher
from penstock.runtime.worker.record_by_record import Poison, RecordByRecord, RecordByRecordMode, digest_of


def test_equal_records_have_equal_digests_that_tell_them_from_others() -> None:
    assert digest_of([{"a": [1, 2]}]) == digest_of([{"a": [1, 2]}])
    assert digest_of(["a"]) != digest_of(["b"])
    assert digest_of([""]) != 0
    assert digest_of(KeyedBatch(["k"], [1])) == digest_of(KeyedBatch(["k"], [1]))
    assert digest_of(KeyedBatch(["k"], [1])) != digest_of(KeyedBatch(["l"], [1]))


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
