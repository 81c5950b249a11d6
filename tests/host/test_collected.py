"""What the JobMaster keeps of Collect sinks: what is committed is there once, what was undone is not."""

from __future__ import annotations

from penstock.host.process.collected import Collected, EncodedSinkRecords
from penstock.runtime.records.codec import decode, encode


def sent(records: list[str], task: int, generation: int, epoch: int) -> EncodedSinkRecords:
    return EncodedSinkRecords("out", encode(records), task, generation, epoch)


def records(collected: Collected) -> list[str]:
    return [record for encoded in collected.get("out") for record in decode(*encoded)]


def started() -> Collected:
    collected = Collected(epochs=True)
    collected.back(frozenset({1, 2}), 1, {1, 2})
    return collected


def test_records_show_with_their_epoch() -> None:
    collected = started()
    collected.take(sent(["a"], 1, 1, 1))
    collected.take(sent(["b"], 2, 1, 2))
    assert records(collected) == []
    collected.commit(1)
    assert records(collected) == ["a"]
    collected.commit(2)
    assert records(collected) == ["a", "b"]


def test_what_a_task_sent_before_it_was_made_again_is_void() -> None:
    collected = started()
    collected.take(sent(["undone"], 1, 1, 1))
    collected.take(sent(["stays"], 2, 1, 1))
    collected.back(frozenset({1}), 2, {1, 2})
    collected.take(sent(["late"], 1, 1, 1))
    collected.take(sent(["again"], 1, 2, 1))
    collected.commit(1)
    assert records(collected) == ["again", "stays"]


def test_what_a_task_sent_that_a_rescale_took_away_is_void() -> None:
    collected = started()
    collected.take(sent(["undone"], 2, 1, 1))
    collected.back(frozenset({1}), 2, {1})
    collected.take(sent(["late"], 2, 1, 1))
    collected.take(sent(["again"], 1, 2, 1))
    collected.commit(1)
    assert records(collected) == ["again"]


def test_what_is_saved_is_the_same_in_another_life() -> None:
    collected = started()
    collected.take(sent(["a"], 1, 1, 1))
    due = collected.due(1)
    assert due is not None
    collected.commit(1)
    assert collected.due(1) is None
    collected.take(sent(["b"], 1, 1, 2))
    more = collected.due(2)
    assert more is not None
    again = Collected(epochs=True)
    again.restore([due, more])
    assert records(again) == ["a", "b"]
    collected.commit(2)
    again.restore([collected.everything()])
    assert records(again) == ["a", "b"]
