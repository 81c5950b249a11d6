"""Records that cannot be processed: a broken time, a key that is missing or has no hash, a value of a type that does
not fit, a null. Every operator of event time and every join treats them by its policy, once each, and says which
operator, which record and which line; all other records count as if the bad ones had not been there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

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
