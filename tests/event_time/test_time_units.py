"""Numbers that are most likely times in seconds or microseconds: wherever a flow takes times, it fails and says so."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import RecordError
from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE
from penstock.runtime.operators.base import Stage, StageContext
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.operators.windowing import WindowAggregated, WindowEmit
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.records.userfunc import OnError
from penstock.runtime.state.aggregate import Count
from penstock.runtime.state.keyed import SavedState

NOW = 1_700_000_000  # in seconds
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
Record = tuple[str, Any, Any]  # key, time of the watermark, time of the window


# --- watermarks ----------------------------------------------------------------------------------------------------


def marking(policy: OnError) -> Stage:
    """A stage that makes watermarks of records that are times."""
    operator = MakeWatermarks(lambda time: time, on_error=policy)
    context = StageContext(operator)
    context.time_grain = 1
    stage = operator.stage(context)
    stage.open()
    return stage


@pytest.mark.parametrize("bad", [None, "late", float("nan"), datetime(2024, 1, 1)], ids=repr)
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("policy", ["skip", "dead_letter"])
def test_the_first_time_that_is_one_counts(bad: Any, before: int, policy: OnError) -> None:
    """The records before it fail, and the policy passes over them."""
    stage = marking(policy)
    for _ in range(2):  # also in a batch after one in which no record had a time
        with pytest.raises(RecordError, match=f"the time {NOW} is most likely in seconds since 1970") as failed:
            stage.run([bad] * before + [NOW, NOW + 1])
        assert failed.value.record == str(NOW)
        assert stage.run([bad]) == []
    assert stage.watermark(None) is None


@pytest.mark.parametrize(
    "times",
    [
        [None, 0, NOW, NOW + 1],  # the first one says that times of any size are meant
        [None, EPOCH + timedelta(seconds=NOW // 1000), NOW],
        [0.5, 999, 1000],
        [-5, NOW],
        [],
        [None],
    ],
    ids=repr,
)
def test_times_that_are_taken_as_they_are(times: list[Any]) -> None:
    for batches in ([times], [[time] for time in times]):
        stage = marking("skip")
        taken = [time for batch in batches for time in stage.run(batch)]
        assert taken == [time for time in times if time is not None]


# --- windows with a time of their own ------------------------------------------------------------------------------


def windows_of(
    records: list[Record], parallelism: int, *, side: bool, emit: WindowEmit = "final", own: Any = 2
) -> dict[str, list[Any]]:
    """The results of windows; without `side`, the senders combine the records."""
    flow = ps.Flow("units", parallelism=parallelism, chaining=parallelism > 1)
    windows = flow.read(ps.sources.Memory([0])).watermark(1).key_by(0).window(ps.Tumbling(10), time=own)
    counts = windows.count(name="counts", emit=emit)
    counts.write(ps.sinks.Null(), name="out")
    if side:
        counts.side_output("late").write(ps.sinks.Null(), name="late")
    return ps.testing.run(flow, records, parallelism=parallelism)


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("side", [False, True], ids=["combined before", "record by record"])
@pytest.mark.parametrize("emit", ["final", "latest"])
@pytest.mark.parametrize(("unit", "a_second"), [("seconds", 1), ("microseconds", 10**6)])
def test_windows_in_another_unit_than_the_watermark(
    parallelism: int, side: bool, emit: WindowEmit, unit: str, a_second: int
) -> None:
    for times in ([NOW * 1000 + i for i in range(50)], [EPOCH + timedelta(seconds=NOW + i) for i in range(50)]):
        records = [("ab"[i % 2], time, (NOW + i) * a_second) for i, time in enumerate(times)]
        with pytest.raises(
            RecordError, match=rf"most likely in {unit} since 1970.*let time= of window\(\) give"
        ) as failed:
            windows_of(records, parallelism, side=side, emit=emit)
        assert failed.value.operator == "counts"


@pytest.mark.parametrize("side", [False, True], ids=["combined before", "record by record"])
@pytest.mark.parametrize(
    ("first", "own"),
    [
        (NOW * 1000, NOW * 1000 - 5_000),
        (0, 500),
        (NOW, NOW),  # the watermark operator fails
        (EPOCH + timedelta(days=20), EPOCH + timedelta(days=20)),
        (0, NOW),  # whatever a simulation means by it
        (NOW * 1000, 100),  # a clock that begins at 1970
        (NOW * 1000, EPOCH),
    ],
    ids=repr,
)
def test_windows_of_other_times_are_as_before(first: Any, own: Any, side: bool) -> None:
    if first == NOW:
        with pytest.raises(
            RecordError, match=rf"operator 'watermark' failed: .*the time {NOW} is most likely in seconds"
        ):
            windows_of([("a", first, own)], 1, side=side)
        return
    assert [n for *_, n in windows_of([("a", first, own)], 1, side=side)["out"]] == [1]


def test_windows_by_the_time_of_the_watermark_are_not_compared_with_it() -> None:
    """A clock that says January 1970 may be the first that a task hears of; its records are late."""
    stage = stage_of(own_time=False)
    list(stage.advance(NOW * 1000))
    stage.run(partials(NOW - NOW % 10_000))
    assert stage.late == 1
    flow = ps.Flow("units")
    windows = flow.read(ps.sources.Memory([0])).watermark(1).filter(bool).key_by(0).window(ps.Tumbling(10))
    windows.count(name="plain").write(ps.sinks.Null())
    windows = flow.read(ps.sources.Memory([0])).watermark(1).key_by(0).window(ps.Tumbling(10), time=1)
    windows.count(name="again").write(ps.sinks.Null())
    found = {name: one.own_time for name, one in flow.graph.operators.items() if isinstance(one, WindowAggregated)}
    assert found == {"plain": False, "again": True}


def stage_of(*, own_time: bool = True) -> Stage:
    operator = WindowAggregated(Count(), ps.Tumbling(10), lambda record: record, own_time=own_time)
    stage = operator.stage(StageContext(operator, epochs=True))
    stage.open()
    return stage


def partials(*starts: int) -> KeyedBatch:
    return KeyedBatch(["a"] * len(starts), [(start, 1) for start in starts], True)


def test_it_is_said_before_anything_is_dropped_as_late_or_leaves() -> None:
    late = stage_of()
    list(late.advance(NOW * 1000))
    with pytest.raises(RecordError, match="most likely in seconds"):
        late.run(partials(NOW - NOW % 10_000))
    early = stage_of()
    early.run(partials(NOW - NOW % 10_000))
    for unknown in (None, IDLE):
        assert list(early.advance(unknown)) == []
    with pytest.raises(RecordError, match="most likely in seconds"):
        next(early.advance(NOW * 1000))


def test_one_time_in_milliseconds_is_enough() -> None:
    stage = stage_of()
    stage.run(partials(NOW - NOW % 10_000, NOW * 1000))
    list(stage.advance(NOW * 1000))
    stage.run(partials(NOW - NOW % 10_000))
    assert stage.late == 1


def test_a_stage_that_goes_back_has_compared_its_times_before() -> None:
    before = stage_of()
    before.run(partials(NOW * 1000))
    list(before.advance(NOW * 1000))
    saved = before.snapshot(1, True)
    assert saved is not None
    again = stage_of()
    again.restore(1, SavedState(own=[saved.own]))
    again.run(partials(NOW - NOW % 10_000))
    assert again.late == 1


def test_without_a_watermark_the_end_lets_all_windows_leave() -> None:
    stage = stage_of()
    stage.run(partials(NOW - NOW % 10_000))
    assert [len(piece) for piece in stage.advance(END_OF_TIME)] == [1]
