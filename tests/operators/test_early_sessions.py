"""Early results of sessions against a model: the bounds of each are those of the records that it holds, signs add up to
what holds at the end, and no record waits longer for an early result than it may."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.records.userfunc import OnError

Click = tuple[str, int, int]  # key, time in ms, value: 0 for one that cannot be added

GAP_S = 3
GAP = GAP_S * 1000
EARLY_S = 5
FOR_EVER_S = 1000  # so far out of order that nothing is late
BEGIN = 1_700_000_000_000  # of the simulated clock


class Clicks(ps.AggregateFunction):
    """The records themselves, so that a result says which it holds."""

    def create(self) -> list[Click]:
        return []

    def add(self, accumulator: list[Click], record: Click) -> list[Click]:
        if not record[2]:
            raise ValueError("a record that cannot be added")
        accumulator.append(record)
        return accumulator

    def merge(self, a: list[Click], b: list[Click]) -> list[Click]:
        a.extend(b)
        return a


@dataclass(frozen=True)
class How:
    count: int | None = None  # early_count
    timed: bool = False  # early_s
    retracts: bool = True
    lateness_s: int = 0
    out_of_orderness_s: int = FOR_EVER_S
    collects: bool = False  # collect() in place of an aggregate
    batch_size: int = 1
    fail_at: int | None = None


def results_of(how: How, inputs: list[Click | ps.testing.Pause]) -> tuple[list[tuple[int, Any]], list[Click]]:
    """What a flow emits, each result with the time at which it leaves; and the late records."""
    flow = ps.Flow("sessions", parallelism=1)
    times = flow.read(ps.sources.Memory([]), name="in").watermark(1, out_of_orderness_s=how.out_of_orderness_s)
    windows: Any = times.key_by(0).window(
        ps.Session(GAP_S),
        lateness_s=how.lateness_s,
        early_count=how.count,
        early_s=EARLY_S if how.timed else None,
        updates="retract" if how.retracts else "replace",
    )
    on_error: OnError = "skip"
    made = windows.collect(name="made") if how.collects else windows.aggregate(Clicks(), on_error=on_error, name="made")
    made.side_output("late").write(ps.sinks.Collect(), name="late")
    stamped = made.key_by(0).process(lambda ctx, key, result: [(ctx.now_ms(), result)], name="stamped")
    stamped.write(ps.sinks.Collect(), name="out")
    entered = sum(isinstance(one, tuple) for one in inputs)
    fail_at = how.fail_at if how.fail_at is not None and how.fail_at <= entered else None
    found = ps.testing.run(flow, inputs, batch_size=how.batch_size, fail_at=fail_at, begin=BEGIN)
    return found["out"], found["late"]


def bounds_of(clicks: list[Click]) -> tuple[int, int]:
    """The session of these records, which must be one."""
    times = sorted(time for _, time, _ in clicks)
    assert all(b - a < GAP for a, b in pairwise(times)), f"{clicks} are no session"
    return times[0], times[-1] + GAP


def sessions_of(clicks: list[Click]) -> Counter[tuple[str, int, int, tuple[Click, ...]]]:
    found: list[list[Click]] = []
    for click in sorted(clicks):
        if found and found[-1][-1][0] == click[0] and click[1] - found[-1][-1][1] < GAP:
            found[-1].append(click)
        else:
            found.append([click])
    return Counter((some[0][0], *bounds_of(some), tuple(some)) for some in found)


def check(how: How, inputs: list[Click | ps.testing.Pause]) -> None:
    """The claims of this module for one run."""
    out, late = results_of(how, inputs)
    good = [one for one in inputs if isinstance(one, tuple) and (one[2] or how.collects)]
    sums: Counter[Any] = Counter()
    for _, (key, start, end, clicks, *sign) in out:
        assert (start, end) == bounds_of(clicks), (start, end, clicks)
        assert {name for name, _, _ in clicks} == {key}
        held = (key, start, end, tuple(sorted(clicks)))
        sums[held] += sign[0] if sign else 1
        assert not sign or sums[held] in (0, 1), "each result is taken back before it is said again, and once"
    counted = list((Counter(good) - Counter(late)).elements())
    if how.retracts:
        left = +sums
        assert Counter(click for *_, clicks in left for click in clicks) == Counter(counted)
        if how.out_of_orderness_s == FOR_EVER_S:  # otherwise a record may be late for one session, and begin another
            assert left == sessions_of(counted)
    elif how.out_of_orderness_s == FOR_EVER_S:
        assert sessions_of(counted).keys() <= sums.keys()
    if how.timed and how.fail_at is None and not late:
        check_waits(inputs, out, good)


def check_waits(inputs: list[Click | ps.testing.Pause], out: list[tuple[int, Any]], good: list[Click]) -> None:
    """No record waits longer than `early_s` for a result that holds it, while the input goes on."""
    waited = 0
    came: dict[Click, int] = {}
    for one in inputs:
        if isinstance(one, tuple):
            came.setdefault(one, waited)
        else:
            waited += int(one.duration_s * 1000)
    for click in good:
        shown = min(at for at, (_, _, _, clicks, *_) in out if click in clicks) - BEGIN
        assert shown <= came[click] + EARLY_S * 1000 + 1, (click, shown, came[click])


clicks = st.tuples(
    st.sampled_from("ab"), st.integers(0, 20).map(lambda half: 500 * half), st.sampled_from([0, 1, 1, 1, 1])
)
pauses = st.sampled_from([1, 2, 3, 7]).map(ps.testing.Pause)
hows = st.builds(
    How,
    count=st.sampled_from([None, 1, 2, 3, 4]),
    timed=st.booleans(),
    retracts=st.booleans(),
    lateness_s=st.sampled_from([0, 4]),
    out_of_orderness_s=st.sampled_from([0, 2, FOR_EVER_S]),
    collects=st.booleans(),
    batch_size=st.sampled_from([1, 2, 3, 10]),
    fail_at=st.sampled_from([None, None, 3, 6]),
)


@given(hows, st.lists(clicks | pauses, max_size=14))
@example(How(count=1, batch_size=3), [("a", 0, 1), ("a", 2000, 2), ("a", 4000, 3)])  # they come at once
@example(How(count=3), [("a", 0, 1), ("a", 0, 2), ("a", 5000, 3), ("a", 5000, 4), ("a", 2500, 5)])  # two become one
@example(How(count=1), [("a", 0, 1), ("a", 2000, 0)])  # what cannot be added does not extend it
@example(How(), [("a", 0, 1), ("a", 2500, 0), ("a", 5000, 2)])  # nor connect it
@example(How(batch_size=3), [("a", 0, 1), ("a", 2500, 0), ("a", 5000, 2)])
@example(  # each extends it before the early result is due
    How(timed=True), [("a", 0, 1), ps.testing.Pause(3), ("a", 1000, 2), ps.testing.Pause(3), ("a", 2000, 3)]
)
def test_the_bounds_of_a_result_are_those_of_its_records(how: How, inputs: list[Click | ps.testing.Pause]) -> None:
    # The values number the records, so that each is another one. 0 stays: it cannot be added.
    check(how, [(*one[:2], one[2] and n) if isinstance(one, tuple) else one for n, one in enumerate(inputs, 1)])


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_early_results_do_not_depend_on_how_records_come_together(batch_size: int) -> None:
    inputs: list[Any] = [("a", 1000 * (7 * n % 20), n + 1) for n in range(20)]
    expected, _ = results_of(How(count=3), inputs)
    found, _ = results_of(How(count=3, batch_size=batch_size), inputs)
    assert [result for _, result in found] == [result for _, result in expected]
