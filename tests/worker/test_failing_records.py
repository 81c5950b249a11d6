"""Records that cannot be processed: a broken time, a key that is missing or has no hash, a value of a type that does
not fit, a null. Every operator of event time and every join treats them by its policy, once each, and says which
operator, which record and which line; all other records count as if the bad ones had not been there."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import penstock as ps
from penstock.runtime.errors import RecordError
from penstock.runtime.records.userfunc import OnError

Record = dict[str, Any]
Streams = Callable[[Any, Any, dict[str, Any]], ps.Stream[Any]]


class Largest(ps.AggregateFunction):
    def create(self) -> int:
        return 0

    def add(self, accumulator: int, record: Record) -> int:
        return max(accumulator, record["value"])

    def merge(self, a: int, b: int) -> int:
        return max(a, b)


def total(ctx: Any, key: Any, window: Any, records: list[Record]) -> list[Any]:
    return [(key, window, sum(record["value"] for record in records))]


def both(left: Record, right: Record) -> tuple[int, int]:
    return left["value"] + 0, right["value"] + 0


TUMBLING = ps.Tumbling(10)
OF_WINDOWS: dict[str, Streams] = {
    "sum": lambda a, _, o: a.window(TUMBLING, time="at").sum("value", **o),
    "session sum": lambda a, _, o: a.window(ps.Session(5), time="at").sum("value", **o),
    "early sum": lambda a, _, o: a.window(TUMBLING, time="at", early_count=2).sum("value", **o),
    "reduce": lambda a, _, o: a.window(TUMBLING, time="at").reduce(
        lambda x, y: {**x, "value": x["value"] + y["value"]}, **o
    ),
    "aggregate": lambda a, _, o: a.window(TUMBLING, time="at").aggregate(Largest(), **o),
    "top": lambda a, _, o: a.window(TUMBLING, time="at").top(2, by="value", **o),
    "collect": lambda a, _, o: a.window(TUMBLING, time="at").collect(**o),
    "sliding process": lambda a, _, o: a.window(ps.Sliding(10, 5), time="at").process(total, **o),
}
OF_TWO: dict[str, Streams] = {
    "join": lambda a, b, o: a.join(b, TUMBLING, time="at", other_time="at", fn=both, **o),
    "full join": lambda a, b, o: a.join(b, TUMBLING, how="full", time="at", other_time="at", **o),
    "session join": lambda a, b, o: a.join(b, ps.Session(3), time="at", other_time="at", fn=both, **o),
    "interval_join": lambda a, b, o: a.interval_join(
        b, lower_s=-2, upper_s=2, time="at", other_time="at", fn=both, **o
    ),
    "temporal_join": lambda a, b, o: a.temporal_join(b, time="at", other_time="at", fn=both, **o),
}
EVERY = {**OF_WINDOWS, **OF_TWO}


def flow_of(make: Streams, on_error: OnError, parallelism: int) -> ps.Flow:
    """The watermark does not depend on what the records hold."""
    flow = ps.Flow("bad", parallelism=parallelism)
    left, right = (
        flow.read(ps.sources.Memory([]), name=name, parallelism=1).watermark(lambda record: 0).key_by("key")
        for name in ("left", "right")
    )
    results = make(left, right, {"on_error": on_error, "name": "tested"})
    results.write(ps.sinks.Null(), name="out", parallelism=1)
    if on_error == "dead_letter":
        results.dead_letters().write(ps.sinks.Null(), name="letters", parallelism=1)
    if make in OF_WINDOWS.values():
        right.count().write(ps.sinks.Null(), name="unused", parallelism=1)
    return flow


GOOD = [{"key": i % 3, "at": 1000 * i, "value": i} for i in range(20)]


def run(make: Streams, on_error: OnError, parallelism: int, left: list[Record], right: list[Record]) -> Any:
    flow = flow_of(make, on_error, parallelism)
    return ps.testing.run(flow, {"left": left, "right": right}, parallelism=parallelism, batch_size=4)


def shown(results: list[Any]) -> Counter[str]:
    """Results that do not depend on the order in which records of the same time come."""
    return Counter(map(repr, results))


LOOKS = [name for name in OF_TWO if name != "full join"]  # at the values
BAD_TIMES: list[Any] = [None, "noon", True, math.nan, 10**30]


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize(("name", "side"), [*((name, 0) for name in EVERY), *((name, 1) for name in OF_TWO)])
def test_a_record_with_a_broken_time_or_key_fails_once(name: str, parallelism: int, side: int) -> None:
    make = EVERY[name]
    bad: list[Record] = [{"key": 1, "at": time, "value": 5} for time in BAD_TIMES]
    bad += [{"at": 3000, "value": 5}, {"key": [1], "at": 3000, "value": 5}, {"key": 1, "value": 5}]
    # The first one fails twice over: its time and its value are both missing.
    bad += [{"key": 1}]
    mixed = [*GOOD[:7], *bad[:5], *GOOD[7:15], *bad[5:], *GOOD[15:]]
    inputs = (mixed, GOOD) if side == 0 else (GOOD, mixed)
    expected = shown(run(make, "fail", parallelism, GOOD, GOOD)["out"])
    assert expected

    assert shown(run(make, "skip", parallelism, *inputs)["out"]) == expected

    found = run(make, "dead_letter", parallelism, *inputs)
    assert shown(found["out"]) == expected
    records = [letter.record[1] if isinstance(letter.record, tuple) else letter.record for letter in found["letters"]]
    assert shown(records) == shown(bad)

    for one in bad:
        some = [*GOOD[:7], one]
        with pytest.raises(RecordError) as caught:
            run(make, "fail", parallelism, *((some, GOOD) if side == 0 else (GOOD, some)))
        told = str(caught.value)
        assert "tested" in told
        assert "test_failing_records.py" in told
        assert repr(one.get("value", one)) in told


@pytest.mark.parametrize("bad", [None, "five"], ids=repr)
@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("name", ["sum", "session sum", "reduce", "aggregate", "top", "sliding process", *LOOKS])
def test_a_value_of_a_type_that_does_not_fit_is_told(name: str, parallelism: int, bad: Any) -> None:
    make = EVERY[name]
    some = [*GOOD[:7], {"key": 1, "at": 7000, "value": bad}]
    with pytest.raises(RecordError) as caught:
        run(make, "fail", parallelism, some, GOOD)
    told = str(caught.value)
    assert "tested" in told
    assert "test_failing_records.py" in told


class Priced(NamedTuple):
    price: float
    id: int


def top_of(records: list[Any], on_error: OnError, window: Any, largest: bool, parallelism: int) -> Any:
    flow = ps.Flow("best", parallelism=parallelism)
    timed = flow.read(ps.sources.Memory([]), name="in", parallelism=1).watermark(lambda record: 0)
    best = timed.key_by(0).window(window, time=1).top(2, by=2, largest=largest, on_error=on_error, name="best")
    best.write(ps.sinks.Null(), name="out", parallelism=1)
    if on_error == "dead_letter":
        best.dead_letters().write(ps.sinks.Null(), name="letters", parallelism=1)
    return ps.testing.run(flow, records, batch_size=3)


OF_TOP: dict[str, tuple[Callable[[int], Any], Any]] = {
    "float": (float, math.nan),
    "Decimal": (Decimal, Decimal("NaN")),
    "tuple": (lambda i: (i // 2, i), (1, math.nan)),
    "named tuple": (lambda i: Priced(i, i), Priced(math.nan, 5)),
}


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("window", [TUMBLING, ps.Session(20)], ids=repr)
@pytest.mark.parametrize("kind", OF_TOP)
def test_top_refuses_a_nan_wherever_it_comes(kind: str, window: Any, largest: bool, parallelism: int) -> None:
    """A NaN is neither above nor below anything, so the best records would depend on where one of them has it."""
    value_of, nan = OF_TOP[kind]
    good = [("k", 1000 * i, value_of(i)) for i in (3, 0, 4, 1, 2)]
    expected = [[value_of(i) for i in ((4, 3) if largest else (0, 1))]]
    bad = ("k", 2500, nan)
    for at in range(len(good) + 1):
        records = [*good[:at], bad, *good[at:]]
        skipped = top_of(records, "skip", window, largest, parallelism)["out"]
        assert [[value for *_, value in best] for *_, best in skipped] == expected, at
        found = top_of(records, "dead_letter", window, largest, parallelism)
        assert found["out"] == skipped, at
        (letter,) = found["letters"]
        assert repr(letter.record) == repr(("k", bad)), at
        assert "NaN" in letter.error
        with pytest.raises(
            RecordError, match=r"operator 'best' failed.*: ValueError: top: the value .* has a NaN"
        ) as caught:
            top_of(records, "fail", window, largest, parallelism)
        assert repr(nan) in str(caught.value)


# --- records that cannot travel to the program ----------------------------------------------------------------------


class Exits:
    def __reduce__(self) -> Any:
        sys.exit(5)


def test_a_record_that_exits_when_it_is_pickled_fails_alone(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow = ps.Flow(fresh_name(), parallelism=1)
    collected = ps.sinks.Collect()
    records = flow.read(ps.sources.Memory(range(10))).map(lambda n: Exits() if n % 3 == 0 else n)
    records.write(collected, name="collected", on_error="skip")
    status = ps.run(flow, local=True, workers=1, checkpoints=tmp_path).wait(60, progress=False)
    assert collected.records() == [1, 2, 4, 5, 7, 8]
    assert status["operators"]["collected"]["skipped"] == 4


def locked(number: int) -> Any:
    return threading.Lock() if number % 3 == 0 else number


def collecting(name: str, on_error: OnError) -> tuple[ps.Flow, ps.sinks.Collect, ps.sinks.Collect]:
    """A flow whose sink is in one chain with its source, so that no other operator sends the records anywhere."""
    flow = ps.Flow(name, parallelism=1)
    good, bad = ps.sinks.Collect(), ps.sinks.Collect()
    written = flow.read(ps.sources.Memory(range(10))).map(locked).write(good, name="collected", on_error=on_error)
    if on_error == "dead_letter":
        written.dead_letters().write(bad, name="letters")
    assert any(len(chain.operators) == 3 for chain in flow.plan(1).chains)
    return flow, good, bad


@pytest.mark.parametrize("epochs", [False, True])
@pytest.mark.parametrize("on_error", ["skip", "dead_letter"])
def test_records_that_cannot_travel_to_the_program_fail_in_the_sink(
    on_error: OnError, epochs: bool, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow, good, bad = collecting(fresh_name(), on_error)
    job = ps.run(flow, local=True, workers=1, epoch_interval_s=1.0 if epochs else None, checkpoints=tmp_path)
    status = job.wait(60, progress=False)
    assert good.records() == [1, 2, 4, 5, 7, 8]
    if on_error == "dead_letter":
        assert [letter.operator for letter in bad.records()] == ["collected"] * 4
        for letter in bad.records():
            assert "cannot be pickled" in letter.error
            assert re.match("<unlocked _thread.lock object at", letter.record)
    assert status["operators"]["collected"]["skipped"] == 4


def test_a_record_that_cannot_travel_to_the_program_names_the_sink(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow, _, _ = collecting(fresh_name(), "fail")
    with pytest.raises(ps.JobFailed, match="operator 'collected' failed: CodecError: a record of type lock") as caught:
        ps.run(flow, local=True, workers=1, checkpoints=tmp_path).wait(60, progress=False)
    assert caught.value.operator == "collected"
    told = str(caught.value)
    assert re.search(r"record: <unlocked _thread\.lock object at \w+>\n", told), "the record, and not the whole batch"
    assert "on_error='skip'" in told


# --- results that fail ----------------------------------------------------------------------------------------------


class FailsFor(ps.AggregateFunction):
    """The sum, of which 4 is no result."""

    def __init__(self, how: str) -> None:
        self.how = how

    def create(self) -> int:
        return 0

    def add(self, accumulator: int, record: int) -> int:
        return accumulator + record

    def merge(self, a: int, b: int) -> int:
        return a + b

    def result(self, accumulator: int) -> Any:
        if accumulator != 4:
            return [accumulator]
        if self.how == "raises":
            raise TypeError("no result")
        return [threading.Lock()]  # nothing that can be copied


@pytest.mark.parametrize("how", ["raises", "cannot be copied"])
@pytest.mark.parametrize("emit", ["latest", "every", "final"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_result_of_a_running_aggregate_that_fails_obeys_on_error(how: str, emit: Any, parallelism: int) -> None:
    def run(on_error: OnError) -> dict[str, list[Any]]:
        flow = ps.Flow("results", parallelism=parallelism)
        keyed = flow.read(ps.sources.Memory([1, 2, 3, 4])).key_by(lambda n: n % 2)
        sums = keyed.aggregate(FailsFor(how), emit=emit, name="sums", on_error=on_error)
        sums.write(ps.sinks.Collect(), name="out")
        if on_error == "dead_letter":
            sums.dead_letters().write(ps.sinks.Collect(), name="letters")
        return ps.testing.run(flow, batch_size=1)

    with pytest.raises(RecordError, match="operator 'sums' failed"):
        run("fail")
    right = [(0, [6])] if emit == "final" else [(0, [2]), (0, [6]), (1, [1])]
    assert sorted(run("skip")["out"]) == right
    found = run("dead_letter")
    assert sorted(found["out"]) == right
    assert [letter.record[0] for letter in found["letters"]] == [1]


# --- errors of which nothing can be shown -----------------------------------------------------------------------------


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


class NoTextAtAll(BaseException):
    __str__ = __repr__ = NoText.__str__


class NoTimeout(TimeoutError):
    __str__ = __repr__ = NoText.__str__


RAISED: dict[str, Callable[[], BaseException]] = {
    "no text": NoText,
    "no text of a timeout": NoTimeout,
    "no Exception": NoTextAtAll,
    "exit": lambda: SystemExit(NoText()),
    "end of a generator": GeneratorExit,
    "end of an iteration": StopIteration,
    "cancelled": asyncio.CancelledError,
}


def raising(how: str) -> Callable[[int], int]:
    def fail_for_two(n: int) -> int:
        if n == 2:
            raise RAISED[how]()
        return n

    return fail_for_two


def raising_async(how: str) -> Callable[[int], Any]:
    async def fail_for_two(n: int) -> int:
        return raising(how)(n)

    return fail_for_two


class CannotTravel:
    """A record that cannot be pickled, and the error says nothing."""

    def __reduce__(self) -> Any:
        raise NoText


FAILING: dict[str, Callable[[ps.Stream[int], str, dict[str, Any]], ps.Stream[Any]]] = {
    "map": lambda s, how, o: s.map(raising(how), **o),
    "filter": lambda s, how, o: s.filter(lambda n: raising(how)(n) > 0, **o),
    "flat_map": lambda s, how, o: s.flat_map(lambda n: [raising(how)(n)], **o),
    "flat_map of a generator": lambda s, how, o: s.flat_map(lambda n: (raising(how)(i) for i in [n]), **o),
    "map_batches": lambda s, how, o: s.map_batches(lambda some: [raising(how)(n) for n in some], batch_size=1, **o),
    "key_by": lambda s, how, o: s.key_by(raising(how)).count(emit="final", **o),
    "process": lambda s, how, o: s.key_by(lambda n: 0).process(lambda ctx, key, n: [raising(how)(n)], **o),
    "sum": lambda s, how, o: s.key_by(lambda n: n).sum(raising(how), emit="final", **o),
    "window": lambda s, how, o: (
        s.key_by(lambda n: n)
        .window(ps.GlobalWindow())
        .process(lambda ctx, key, window, some: [raising(how)(some[0])], **o)
    ),
    "map_async in threads": lambda s, how, o: s.map_async(raising(how), **o),
    "map_async of coroutines": lambda s, how, o: s.map_async(raising_async(how), **o),
    "map_async again": lambda s, how, o: s.map_async(raising_async(how), retries=1, timeout_s=60, **o),
}


@pytest.mark.parametrize("how", RAISED)
@pytest.mark.parametrize("name", FAILING)
def test_an_error_of_any_kind_obeys_on_error(name: str, how: str) -> None:
    def run(on_error: OnError) -> dict[str, list[Any]]:
        flow = ps.Flow("raises", parallelism=1)
        stream = FAILING[name](flow.read(ps.sources.Memory([1, 2, 3])), how, {"on_error": on_error, "name": "tested"})
        stream.map(lambda one: one[0] if isinstance(one, tuple) else one).write(ps.sinks.Collect(), name="out")
        if on_error == "dead_letter":
            stream.dead_letters().write(ps.sinks.Collect(), name="letters")
        return ps.testing.run(flow)

    assert sorted(run("skip")["out"]) == [1, 3]
    found = run("dead_letter")
    assert sorted(found["out"]) == [1, 3]
    assert len(found["letters"]) == 1
    with pytest.raises(RecordError, match="operator 'tested' failed") as caught:
        run("fail")
    for told in (str(caught.value), found["letters"][0].error):
        assert ("its text cannot be shown" in told) == how.startswith("no")


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_record_that_cannot_travel_and_whose_error_says_nothing_obeys_on_error(on_error: OnError) -> None:
    flow = ps.Flow("travels", parallelism=2)
    numbers = flow.read(ps.sources.Memory([1, 2, 3]), parallelism=1)
    made = numbers.map(lambda n: CannotTravel() if n == 2 else n, name="made", parallelism=1)
    made.rebalance().map(lambda n: n, name="got", on_error=on_error).write(ps.sinks.Collect(), name="out")
    if on_error == "skip":
        assert sorted(ps.testing.run(flow, parallelism=2)["out"]) == [1, 3]
        return
    with pytest.raises(RecordError, match=r"'got' failed.*NoText \(its text cannot be shown"):
        ps.testing.run(flow, parallelism=2)
