"""The generator: every index once, at the time it is due, whatever the clock, the tasks and the restarts."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import FlowError
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sources import Generator, parse_rate
from penstock.runtime.sources.base import Reader, SourceContext, share

S = 1_000_000_000


class Clock:
    def __init__(self, now: int = 17 * S) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def context(policy: Any = "fail") -> SourceContext:
    return SourceContext("gen", 0, 1, ErrorHandler("gen", policy=policy))


def readers(source: Generator, parallelism: int = 1) -> list[Reader]:
    return [source.reader(mine, context()) for mine in share(source.splits(parallelism), parallelism)]


def run(source: Generator, clock: Clock, parallelism: int = 1, limit: int = 1000) -> list[tuple[float, Any]]:
    """(seconds, record) of all records, with a clock that moves on to what is due next and no further."""
    out: list[tuple[float, Any]] = []
    tasks = readers(source, parallelism)
    start = clock.now
    while not all(reader.finished for reader in tasks):
        waits = []
        for reader in tasks:
            if not reader.finished:
                records = reader.read(limit)
                out += [((clock.now - start) / S, record) for record in records]
                if not records and not reader.finished:
                    waits.append(reader.ready_in() or 0.0)
        if len(waits) == sum(not reader.finished for reader in tasks) and waits:
            assert min(waits) > 0, "a reader that has nothing must say when it will"
            clock.now += max(1, round(min(waits) * S))
    return out


@given(
    st.integers(0, 300),
    st.integers(1, 5),
    st.none() | st.integers(1, 7),
    st.integers(1, 50),
    st.sampled_from([None, 1000, [(100, 0.1), (5000, 0.01)]]),
    st.sampled_from(["constant", "poisson"]),
)
def test_every_index_once(count: int, tasks: int, splits: int | None, limit: int, rate: Any, arrivals: Any) -> None:
    clock = Clock()
    source = Generator(lambda i: i, rate, limit=count, splits=splits, arrivals=arrivals, clock=clock)
    assert sorted(record for _, record in run(source, clock, tasks, limit)) == list(range(count))


def test_constant_arrivals_come_when_due() -> None:
    clock = Clock()
    got = run(Generator(str, 100, limit=250, clock=clock), clock)
    assert [record for _, record in got] == [str(i) for i in range(250)]
    assert [at for at, _ in got] == pytest.approx([i / 100 for i in range(250)])


def test_several_tasks_keep_the_rate_together() -> None:
    clock = Clock()
    got = run(Generator(lambda i: i, 100, duration_s=2.0, clock=clock), clock, parallelism=3)
    assert sorted(got) == [(pytest.approx(i / 100), i) for i in range(200)]


def test_one_reader_of_several_splits() -> None:
    clock = Clock()
    source = Generator(lambda i: i, 100, limit=100, splits=4, clock=clock)
    got = run(source, clock, parallelism=1)
    assert [record for _, record in got] == list(range(100))
    assert [at for at, _ in got] == pytest.approx([i / 100 for i in range(100)])


@pytest.mark.parametrize("rate", [None, 1_000])
@pytest.mark.parametrize("limit", [1, 3, 7, 1_000])
def test_splits_of_several_former_tasks_come_in_order(rate: float | None, limit: int) -> None:
    """A watermark after the source is that of all splits. Records of the split that is behind would be late."""
    clock = Clock()
    source = Generator(lambda i: i, rate, limit=400, clock=clock)
    offsets = [90, 20, 51]
    splits = [replace(split, offset=made) for split, made in zip(source.splits(3), offsets, strict=True)]
    (reader,) = [source.reader(splits, context())]
    got: list[int] = []
    ends: list[int] = []
    while not reader.finished:
        records = reader.read(limit)
        assert len(records) <= limit
        if records:
            assert got == [] or min(records) > max(ends), "a greater index was given before"
            ends.append(max(records))
            got += records
        elif not reader.finished:
            wait = reader.ready_in()
            assert wait
            clock.now += max(1, round(wait * S))
    assert sorted(got) == [i for i in range(400) if i // 3 >= offsets[i % 3]]
    if rate is not None:
        # What the others are behind is due at once; the rest of the 400 takes its time.
        assert (clock.now - 17 * S) / S == pytest.approx((399 - 90 * 3) / rate, abs=0.002)


def test_steps_repeat_or_hold() -> None:
    clock = Clock()
    got = run(Generator(lambda i: i, [(10, 1), (100, 1)], duration_s=4, clock=clock), clock)
    per_second = [sum(second <= at < second + 1 for at, _ in got) for second in range(4)]
    assert per_second == [10, 100, 10, 100]
    got = run(Generator(lambda i: i, "10:1s,100", duration_s=3, clock=clock), clock)
    assert [sum(second <= at < second + 1 for at, _ in got) for second in range(3)] == [10, 100, 100]
    got = run(Generator(lambda i: i, [(10, 1), (0, 2)], duration_s=4, clock=clock), clock)
    assert [round(at, 6) for at, _ in got] == [i / 10 for i in range(10)] + [3 + i / 10 for i in range(10)]


def test_poisson_arrivals_have_the_mean_and_the_spread() -> None:
    clock = Clock()
    source = Generator(lambda i: i, 1000, duration_s=10, arrivals="poisson", seed=3, clock=clock)
    got = run(source, clock)
    times = [at for at, _ in got]
    gaps = [b - a for a, b in pairwise(times)]
    assert len(got) == pytest.approx(10_000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.001, rel=0.1)
    again = run(Generator(lambda i: i, 1000, duration_s=10, arrivals="poisson", seed=3, clock=clock), clock)
    other = run(Generator(lambda i: i, 1000, duration_s=10, arrivals="poisson", seed=4, clock=clock), clock)
    assert [at for at, _ in again] == pytest.approx(times)
    assert len(other) != len(got) or [at for at, _ in other] != pytest.approx(times)


def test_poisson_tasks_have_the_rate_together() -> None:
    clock = Clock()
    got = run(Generator(lambda i: i, 1000, duration_s=5, arrivals="poisson", clock=clock), clock, parallelism=4)
    assert len(got) == pytest.approx(5000, rel=0.06)


def test_late_readers_catch_up_and_stamp_the_due_time() -> None:
    clock = Clock()
    (reader,) = readers(Generator(lambda i: i, 1000, clock=clock))
    start = clock.now
    assert reader.read(10) == [0]
    assert reader.stamp_ns == start
    assert reader.ready_in() == pytest.approx(0.001)
    clock.now += S
    assert reader.read(400) == list(range(1, 401))
    assert reader.stamp_ns == start + S // 1000
    assert reader.ready_in() == 0
    assert reader.read(10_000) == list(range(401, 1001))
    assert reader.stamp_ns == start + 401 * S // 1000
    assert reader.read(10) == []
    assert reader.stamp_ns is None


def test_without_catching_up_a_late_schedule_moves() -> None:
    clock = Clock()
    (reader,) = readers(Generator(lambda i: i, 1000, catch_up=False, clock=clock))
    assert reader.read(10) == [0]
    clock.now += S // 20
    assert len(reader.read(1000)) == 50  # a little late is not moved
    clock.now += 5 * S
    assert reader.read(1000) == [51]
    clock.now += S // 100
    assert len(reader.read(1000)) == 10


def test_as_fast_as_possible() -> None:
    clock = Clock()
    source = Generator(lambda i: i * i, limit=10, clock=clock)
    (reader,) = readers(source)
    assert reader.read(4) == [0, 1, 4, 9]
    assert reader.ready_in() == 0
    assert reader.stamp_ns is None
    assert reader.read(100) == [16, 25, 36, 49, 64, 81]
    assert reader.finished


def test_a_duration_without_a_rate() -> None:
    clock = Clock()
    (reader,) = readers(Generator(lambda i: i, duration_s=2, clock=clock))
    assert len(reader.read(100)) == 100
    clock.now += 2 * S - 1
    assert len(reader.read(100)) == 100
    clock.now += 1
    assert reader.read(100) == []
    assert reader.finished


@given(
    st.sampled_from([None, 777, [(100, 0.05), (0, 0.01), (900, 0.1)]]),
    st.sampled_from(["constant", "poisson"]),
    st.integers(1, 3),
    st.integers(0, 80),
)
def test_a_new_reader_continues_with_the_same_sequence(rate: Any, arrivals: Any, splits: int, steps: int) -> None:
    clock = Clock()
    source = Generator(lambda i: i, rate, limit=200, arrivals=arrivals, splits=splits, clock=clock)
    parts = source.splits(1)
    reader = source.reader(parts, context())
    got: list[Any] = []
    stamps: list[Any] = []

    def step(reader: Reader) -> None:
        records = reader.read(7)
        got.extend(records)
        if not records:
            clock.now += round((reader.ready_in() or 0) * S)
        else:
            stamps.append(reader.stamp_ns)

    for _ in range(steps):
        if not reader.finished:
            step(reader)
    offsets = reader.offsets()
    reader.close()
    assert sum(offsets.values()) == len(got)
    reader = source.reader([part.at(offsets[part.name]) for part in parts], context())
    while not reader.finished:
        step(reader)
    assert sorted(got) == list(range(200))


@pytest.mark.parametrize("catch_up", [True, False])
@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_after_a_restart_the_distances_stay(arrivals: Any, catch_up: bool) -> None:
    def source(clock: Clock) -> Generator:
        return Generator(
            lambda i: i, [(100, 1), (1000, 1)], limit=9000, arrivals=arrivals, catch_up=catch_up, clock=clock
        )

    clock = Clock()
    whole = [at for at, _ in run(source(clock), clock)]
    clock = Clock()
    restarted = source(clock)
    (part,) = restarted.splits(1)
    reader = restarted.reader([part.at(5000)], context())
    times = []
    while not reader.finished:
        times += [clock.now / S] * len(reader.read(1))
        clock.now += round((reader.ready_in() or 0) * S)
    assert [t - times[0] for t in times] == pytest.approx([t - whole[5000] for t in whole[5000:]], abs=1e-6)


def test_a_record_that_fails_goes_to_the_policy_and_is_not_made_again() -> None:
    def fn(i: int) -> int:
        if i % 3 == 1:
            raise ValueError(f"no {i}")
        return i

    source = Generator(fn, limit=7)
    where = context("skip")
    reader = source.reader(source.splits(1), where)
    assert reader.read(100) == [0, 2, 3, 5, 6]
    assert where.errors.skipped == 2
    assert list(reader.offsets().values()) == [7]


def test_bounded_or_not() -> None:
    assert Generator(str, limit=3).bounded
    assert Generator(str, duration_s=3).bounded
    assert not Generator(str, [(1, 1)]).bounded


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("100", [(100, None)]),
        ("5000:10s,60000:10s", [(5000, 10), (60000, 10)]),
        (" 1.5 : 500ms , 1e6:2m", [(1.5, 0.5), (1e6, 120)]),
        ("10:3,0:1h,5", [(10, 3), (0, 3600), (5, None)]),
    ],
)
def test_parse_rate(text: str, steps: Any) -> None:
    assert parse_rate(text) == steps


@pytest.mark.parametrize("text", ["", "x", "5:", "5:x", "5,6:1s", ":1s", "5:10 parsecs", "5:1s,"])
def test_parse_rate_says_what_is_wrong(text: str) -> None:
    with pytest.raises(FlowError, match="rate:time"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0}, "above 0|rate 0"),
        ({"rate": -1}, "not a rate"),
        ({"rate": float("nan")}, "not a rate"),
        ({"rate": float("inf")}, "not a rate"),
        ({"rate": []}, "above 0"),
        ({"rate": [(1, 0)]}, "seconds is not possible"),
        ({"rate": [(0, 5)]}, "above 0"),
        ({"rate": [(5, 5), (0, None)]}, "holds for ever"),
        ({"rate": [(5, None), (5, 1)]}, "only the last"),
        ({"rate": object()}, "records a second"),
        ({"limit": -1}, "limit"),
        ({"duration": 0}, "duration"),
        ({"splits": 0}, "splits must be a whole number, 1 or more"),
        ({"arrivals": "sometimes"}, "arrivals"),
        ({"fn": 5}, "needs a function"),
    ],
)
def test_refuses_what_makes_no_sense(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        Generator(**{"fn": str, **change})


def test_travels_with_its_function() -> None:
    source = cloudpickle.loads(cloudpickle.dumps(Generator(lambda i: i + 1, 10, limit=3)))
    assert source.describe() == "Generator(<lambda>, 10/s, limit=3)"
    assert "10/s for 1 s, 20/s, poisson" in Generator(str, "10:1s,20", arrivals="poisson").describe()
