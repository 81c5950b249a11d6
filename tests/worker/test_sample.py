"""Samples of what tasks process: as it came, bounded, and not kept for long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import CodecError
from penstock.runtime.worker.sample import KEPT_NS, SAMPLE_BYTES, SAMPLE_RECORDS, RecordSample, Sample, SampleRequest
from tests.runtime.timed_job import Job, S


def test_a_sample_is_bounded_by_records() -> None:
    sample = Sample()
    for start in range(0, 3 * SAMPLE_RECORDS, 500):
        sample.add(list(range(start, start + 500)), 0)
    assert sample.full
    found = sample.taken(1)
    assert found is not None
    assert found.records() == list(range(found.count))
    assert found.count == SAMPLE_RECORDS


@pytest.mark.parametrize("size", [100, 10_000, 1_000_000])
def test_a_sample_is_bounded_by_bytes(size: int) -> None:
    sample = Sample()
    for _ in range(100):
        sample.add(["x" * size] * 100, 0)
    found = sample.taken(SAMPLE_RECORDS)
    assert found is not None, "it is full"
    assert 0 < sum(len(payload) for _, payload in found.pieces) <= SAMPLE_BYTES
    assert found.records() == ["x" * size] * found.count


@pytest.mark.parametrize("record", [(number for number in ()), "x" * (SAMPLE_BYTES + 1)], ids=["generator", "large"])
def test_records_that_cannot_travel_are_no_sample(record: Any) -> None:
    sample = Sample()
    sample.add([record], 0)
    sample.add([1], 0)
    assert sample.taken(1) is None
    assert isinstance(sample.failure, CodecError)


def test_a_sample_has_enough_records_or_is_none() -> None:
    sample = Sample()
    assert sample.taken(0) is None
    sample.add([1, 2], 0)
    assert sample.taken(3) is None
    found = sample.taken(2)
    assert found is not None
    assert found.records() == [1, 2]
    sample.add("no list", 0)
    assert sample.taken(2) == found


# --- in tasks ------------------------------------------------------------------------------------------------------


EACH_NS = 50_000  # that the function behind the exchange takes


def changes(record: dict[str, int]) -> dict[str, int]:
    """A function that keeps its input and changes it."""
    record["changed"] = 1
    return record


def made(limit: int | None = None) -> Callable[[Callable[[int], None]], ps.Flow]:
    def make(takes: Callable[[int], None]) -> ps.Flow:
        flow = ps.Flow("flow")

        def slow(record: dict[str, int]) -> dict[str, int]:
            takes(EACH_NS)
            return changes(record)

        numbers = flow.read(ps.sources.Generator(lambda i: {"i": i}, rate=1_000, limit=limit), name="read")
        numbers.map(changes, name="first").rebalance().map(slow, name="second").write(ps.sinks.Null(), name="out")
        return flow

    return make


def request(job: Job, operator: str, least: int = 1) -> tuple[int, SampleRequest]:
    """The worker with the chain of an operator, and a request for a sample of its input."""
    chain = job.plan.chain_of(operator)
    names = tuple(one.name for one in chain.operators)
    return chain.index % len(job.loops), SampleRequest(chain.index, names, least)


def run(job: Job, seconds: float) -> None:
    for _ in job.looks(seconds):
        pass


def kept(job: Job) -> list[Sample]:
    return [task.input.sample for loop in job.loops for task in loop.tasks if task.input.sample is not None]


@pytest.mark.parametrize("operator", ["read", "second"])
def test_a_worker_gives_what_its_tasks_have_taken_since_it_was_asked_first(operator: str) -> None:
    """Of a source, and behind an exchange; as it was before the functions of the flow changed it."""
    job = Job(made(), workers=2)
    worker, asked = request(job, operator, least=300)
    loop = job.loops[worker]
    run(job, 1)
    assert kept(job) == [], "nobody has asked"
    assert loop.take_sample(asked) is None
    run(job, 0.25)
    assert loop.take_sample(asked) is None, "it has too few"
    run(job, 1)
    found = loop.take_sample(asked)
    assert isinstance(found, RecordSample)
    records = found.records()
    assert 300 <= len(records) == found.count
    first = records[0]["i"]
    changed = {} if operator == "read" else {"changed": 1}
    assert records == [{"i": i, **changed} for i in range(first, first + len(records))]
    assert found.each_s == pytest.approx(0 if operator == "read" else EACH_NS / 1e9)
    assert kept(job) == [], "it was taken"


def test_a_sample_that_nobody_takes_is_dropped() -> None:
    job = Job(made(limit=100), workers=1)
    worker, asked = request(job, "second")
    assert job.loops[worker].take_sample(asked) is None
    job.loops[worker].load()
    assert kept(job), "it waits for its first record"
    run(job, 1)
    job.loops[worker].load()
    (sample,) = kept(job)
    assert sample.first_ns is not None
    job.now += KEPT_NS + S
    job.loops[worker].load()
    assert kept(job) == []


def test_a_request_for_a_chain_of_another_plan_is_not_for_these_tasks() -> None:
    job = Job(made(), workers=1)
    _, asked = request(job, "second")
    other = SampleRequest(asked.chain, ("third",), 1)
    assert job.loops[0].take_sample(other) is None
    assert kept(job) == []


def test_the_worker_is_told_when_the_records_cannot_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(made(), workers=1)
    _, asked = request(job, "second")
    assert job.loops[0].take_sample(asked) is None

    def refuses(records: list[Any]) -> Any:
        raise CodecError("a record cannot be pickled")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.runtime.worker.sample.encode", refuses)
        run(job, 0.5)
    with pytest.raises(CodecError, match="cannot be pickled"):
        job.loops[0].take_sample(asked)
    assert kept(job) == []
