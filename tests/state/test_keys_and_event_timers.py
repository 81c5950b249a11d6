"""Process functions where there is no current key, and event timers where no watermark comes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.state.timers import Timers


class Reminding(ps.ProcessFunction):
    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
        ctx.set_event_timer(record[1])

    def on_event_timer(self, ctx: ps.ProcessContext, key: Any, at_ms: int) -> list[Any]:
        return [(key, at_ms)]


@pytest.mark.parametrize("watermarks", [False, True])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_event_timers_fire_at_the_end_also_where_no_watermark_comes(watermarks: bool, parallelism: int) -> None:
    flow = ps.Flow("reminding", parallelism=parallelism)
    records = flow.read(ps.sources.Memory([]), name="in")
    if watermarks:
        records = records.watermark(1, out_of_orderness_s=1_000)
    records.key_by(0).process(Reminding(), name="remind").write(ps.sinks.Collect(), name="out")
    found = ps.testing.run(flow, [("b", 3_000), ("a", 1_000), ("c", 2_000)])["out"]
    assert sorted(found) == [("a", 1_000), ("b", 3_000), ("c", 2_000)]
    if parallelism == 1:
        assert [at for _, at in found] == [1_000, 2_000, 3_000]


class Ruled(ps.BroadcastProcessFunction):
    def __init__(self, does: Callable[[ps.ProcessContext], object]) -> None:
        self.does = does

    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.set(ctx.get(0) + 1)
        return [(key, ctx.get())]

    def process_broadcast(self, ctx: ps.ProcessContext, record: Any) -> None:
        ctx.broadcast["rule"] = record
        self.does(ctx)

    def on_timer(self, ctx: ps.ProcessContext, key: Any, at_ms: int) -> None:
        pass

    def on_event_timer(self, ctx: ps.ProcessContext, key: Any, at_ms: int) -> None:
        pass


@pytest.mark.parametrize(
    "does",
    [
        lambda ctx: ctx.set(1),
        lambda ctx: ctx.get(),
        lambda ctx: ctx.clear(),
        lambda ctx: ctx.value_state("v").set(1),
        lambda ctx: ctx.list_state("l").append(1),
        lambda ctx: ctx.map_state("m").__setitem__("a", 1),
        lambda ctx: ctx.set_timer(at_ms=1),
        lambda ctx: ctx.set_event_timer(1),
    ],
)
def test_a_broadcast_record_has_no_current_key(does: Callable[[ps.ProcessContext], object]) -> None:
    """Its state would be that of the key None, which records may have too."""
    flow = ps.Flow("ruled", parallelism=1)
    keyed = flow.read(ps.sources.Memory([]), name="in").key_by(0)
    rules = flow.read(ps.sources.Memory([]), name="rules")
    ruled = keyed.connect(rules.broadcast()).process(Ruled(does), name="ruled")
    ruled.write(ps.sinks.Collect(), name="out")
    with pytest.raises(ps.RecordError, match="there is no current key here: state and timers belong to keys") as caught:
        ps.testing.run(flow, {"in": [(None, 1)], "rules": ["r"]})
    page = (Path(__file__).resolve().parents[2] / "docs" / "flows.md").read_text()
    for recommended in ("ctx.broadcast", "ctx.state"):
        assert recommended in str(caught.value)
        assert recommended in page


def test_the_states_of_all_keys_may_be_read_at_the_end() -> None:
    class Counting(ps.ProcessFunction):
        def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
            ctx.set(ctx.get(0) + 1)

        def finish(self, ctx: ps.ProcessContext) -> Any:
            return ctx.state.items()

    flow = ps.Flow("counting", parallelism=2)
    counted = flow.read(ps.sources.Memory([]), name="in").key_by(0).process(Counting(), name="count")
    counted.write(ps.sinks.Collect(), name="out")
    assert sorted(ps.testing.run(flow, [("a", 1), ("b", 1), ("a", 2)])["out"]) == [("a", 2), ("b", 1)]


def test_the_states_of_all_keys_may_be_read_for_a_broadcast_record() -> None:
    seen: list[Any] = []
    flow = ps.Flow("reading", parallelism=1)
    keyed = flow.read(ps.sources.Memory([]), name="in").key_by(0)
    rules = flow.read(ps.sources.Memory([]), name="rules")
    ruled = keyed.connect(rules.broadcast()).process(Ruled(lambda ctx: seen.append(dict(ctx.state))), name="ruled")
    ruled.write(ps.sinks.Collect(), name="out")
    found = ps.testing.run(flow, {"in": [(None, 1), ("a", 1), (None, 2)], "rules": ["r"]})
    assert found["out"] == [(None, 1), ("a", 1), (None, 2)]


def test_event_timers_without_watermarks_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    flow = ps.Flow("reminding")
    bare = flow.read(ps.sources.Memory([]), name="in")
    timed = bare.watermark(1)
    rules = flow.read(ps.sources.Memory([]), name="rules")
    timed.key_by(0).process(Reminding(), name="marked").write(ps.sinks.Null())
    timed.key_by(0).process(lambda ctx, key, record: None, name="no timers").write(ps.sinks.Null())
    assert not caplog.records
    bare.key_by(0).process(Reminding(), name="remind").write(ps.sinks.Null())
    timed.key_by(0).connect(rules.broadcast()).process(Ruled(lambda ctx: None), name="ruled").write(ps.sinks.Null())
    (alone, second) = (record.getMessage() for record in caplog.records)
    assert "the event timers of process 'remind' fire only at the end of the input" in alone
    assert "the event timers of connect 'ruled' fire only" in second
    assert "no watermarks come from 'rules'" in second


class Chained(ps.ProcessFunction):
    """Each record sets a timer. A timer sets those that `next_ms` has for its time."""

    def __init__(self, next_ms: dict[int, list[int]], kind: str) -> None:
        self.next_ms = next_ms
        self.kind = kind

    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
        for at_ms in record[2]:
            self._set(ctx, at_ms)

    def _set(self, ctx: ps.ProcessContext, at_ms: int) -> None:
        if self.kind == "event":
            ctx.set_event_timer(at_ms)
        else:
            ctx.set_timer(at_ms=at_ms)

    def on_event_timer(self, ctx: ps.ProcessContext, key: Any, at_ms: int) -> list[Any]:
        for after_ms in self.next_ms.get(at_ms, ()):
            self._set(ctx, after_ms)
        return [at_ms]

    on_timer = on_event_timer


def fired(chained: Chained, records: list[Any]) -> list[int]:
    flow = ps.Flow("chained", parallelism=1)
    stream = flow.read(ps.sources.Memory([]), name="in").watermark(1)
    stream.key_by(0).process(chained, name="chain").write(ps.sinks.Collect(), name="out")
    return ps.testing.run(flow, records)["out"]


def in_order(next_ms: dict[int, list[int]], waiting: list[int]) -> list[int]:
    """The oracle: all timers of one key, each of which is due."""
    out = []
    while waiting:
        at = min(waiting)
        waiting = [*(set(waiting) - {at} | set(next_ms.get(at, ())))]
        out.append(at)
    return out


@st.composite
def chains(draw: st.DrawFn) -> dict[int, list[int]]:
    """Which timers a timer sets: later ones, so that it ends, and some that are earlier and set none."""
    later = draw(st.dictionaries(st.integers(0, 19), st.lists(st.integers(1, 20), max_size=3), max_size=12))
    early = draw(st.dictionaries(st.sampled_from(list(later) or [0]), st.integers(-5, -1), max_size=3))
    return {at: [*(at + more for more in steps), *([early[at]] if at in early else [])] for at, steps in later.items()}


@pytest.mark.parametrize("end", [False, True])
@given(next_ms=chains(), first=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_timers_that_timers_set_fire_in_order(end: bool, next_ms: dict[int, list[int]], first: list[int]) -> None:
    """At a watermark that has reached them all, and at the end of the input."""
    records = [("a", -100, first)] + ([] if end else [("b", 100, []), ("b", 101, [101])])
    out = fired(Chained(next_ms, "event"), records)
    assert out == in_order(next_ms, first) + ([] if end else [101])


@given(next_ms=chains(), first=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_timers_for_the_past_that_timers_set_fire_in_order(next_ms: dict[int, list[int]], first: list[int]) -> None:
    assert fired(Chained(next_ms, "clock"), [("a", 0, first)]) == in_order(next_ms, first)


def test_each_minute_of_an_hour_has_its_timer() -> None:
    minute = 60_000
    next_ms = {at: [at + minute] for at in range(minute, 64 * minute, minute)}
    records = [("meter", 0, [minute]), *(("meter", at * minute + 1, []) for at in (60, 61, 62, 63, 64))]
    assert fired(Chained(next_ms, "event"), records) == [at * minute for at in range(1, 65)]


class ForEver(ps.ProcessFunction):
    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
        ctx.set_event_timer(0)

    def on_event_timer(self, ctx: ps.ProcessContext, key: Any, at_ms: int) -> None:
        ctx.set_event_timer(at_ms + 1)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_timer_that_sets_itself_for_ever_ends_the_job(on_error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.operators.processing._CHAINED_MOST", 100)
    flow = ps.Flow("for-ever", parallelism=1)
    stream = flow.read(ps.sources.Memory([]), name="in").watermark(1)
    stream.key_by(0).process(ForEver(), name="chain", on_error=on_error).write(ps.sinks.Null())
    with pytest.raises(ps.RecordError, match="timers of key 'a' have set 100 timers in a row") as caught:
        ps.testing.run(flow, [("a", 0)])
    assert "all input has ended" in str(caught.value)


def test_a_timer_that_sets_itself_again_by_the_clock_ends_with_the_input(caplog: pytest.LogCaptureFixture) -> None:
    class EachMinute(ps.ProcessFunction):
        def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
            ctx.set_timer(after_s=60)

        def on_timer(self, ctx: ps.ProcessContext, key: Any, at_ms: int) -> list[Any]:
            ctx.set_timer(after_s=60)
            return [key]

    flow = ps.Flow("each-minute", parallelism=1)
    flow.read(ps.sources.Memory([]), name="in").key_by(0).process(EachMinute()).write(ps.sinks.Collect(), name="out")
    assert ps.testing.run(flow, [("a", 0)])["out"] == ["a"]
    assert "on_timer has set 1 timers after the end of the input" in caplog.text


def test_cancelled_timers_take_no_memory() -> None:
    timers = Timers(tracked=False)
    timers.set("idle", 0.0)  # all others stand after it
    for at in range(10_000):
        timers.cancel("busy", None)
        timers.set("busy", 1.0 + at)
    assert len(timers) == 2
    assert len(timers._agenda) < 100
    assert timers.next() == 0.0
    assert [at for at, _, _ in timers.due(math.inf, math.inf)] == [0.0, 10_000.0]


@given(st.lists(st.tuples(st.sampled_from("sscd"), st.sampled_from("ab"), st.integers(0, 30)), max_size=300))
def test_timers_are_those_that_were_set_and_not_cancelled(does: list[tuple[str, str, int]]) -> None:
    timers, expected = Timers(tracked=True), set()
    for what, key, at in does:
        if what == "s":
            timers.set(key, at)
            expected.add((at, key))
        elif what == "c":
            timers.cancel(key, at if at < 28 else None)
            expected -= {(time, of) for time, of in expected if of == key and (time == at or at >= 28)}
        else:
            due = [(time, of) for time, of, _ in timers.due(at - 20, math.inf)]
            assert [time for time, _ in due] == sorted(time for time, _ in due)
            assert sorted(due) == sorted(timer for timer in expected if timer[0] <= at - 20)
            expected -= set(due)
        assert timers.next() == min((time for time, _ in expected), default=None)
        assert len(timers) == len(expected)
    restored = Timers(tracked=True)
    restored.restore(timers._times)
    assert set(restored.in_order()) == expected


def test_many_timers_of_a_key_do_not_make_one_slower() -> None:
    """They are found without comparing each of them."""
    timers = Timers(tracked=False)
    for at in range(20_000):
        timers.set("a", Counted(at))
    Counted.compared = 0
    timers.set("a", Counted(20_000))
    timers.cancel("a", Counted(10_000))
    assert Counted.compared < 100


class Counted(float):
    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return float(self) == other

    __hash__ = float.__hash__


class Weighing(ps.BroadcastProcessFunction):
    """Gives each record the newest weight, and how many records the call had."""

    def process_batch(self, ctx: ps.ProcessContext, records: list[Any]) -> Any:
        if any(record < 0 for _, record in records):
            raise ValueError("below 0")
        ctx.output("sizes", len(records))
        return [(key, record * ctx.broadcast.get("weight", 1)) for key, record in records]

    def process_broadcast(self, ctx: ps.ProcessContext, weight: int) -> None:
        ctx.broadcast["weight"] = weight


def weighing(batch_size: int = 3, **options: Any) -> ps.Flow:
    flow = ps.Flow("weighing")
    keyed = flow.read(ps.sources.Memory([]), name="in").key_by(0)
    weights = flow.read(ps.sources.Memory([]), name="weights", parallelism=1)
    made = keyed.connect(weights.broadcast()).process_batches(
        Weighing(), batch_size=batch_size, outputs=("sizes",), name="weigh", **options
    )
    made.write(ps.sinks.Null(), name="out")
    made.side_output("sizes").write(ps.sinks.Null(), name="sizes")
    return flow


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("fail_at", [None, 5, (3, 6, 9)])
def test_lists_of_records_have_what_a_broadcast_has_brought_also_after_a_failure(
    parallelism: int, fail_at: Any
) -> None:
    records = [(key, n) for n in range(1, 5) for key in "ab"]
    order = ["in"] * 2 + ["weights"] + ["in"] * 3 + ["weights"] + ["in"] * 3
    out = ps.testing.run(
        weighing(), {"in": records, "weights": [10, 100]}, parallelism=parallelism, order=order, fail_at=fail_at
    )["out"]
    weights = [1] * 2 + [10] * 3 + [100] * 3
    assert sorted(out) == sorted((key, n * weight) for (key, n), weight in zip(records, weights, strict=True))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_lists_have_what_is_ready_and_fail_together(batch_size: int) -> None:
    records = [("a", n) for n in range(8)] + [("a", -1)]
    out = ps.testing.run(weighing(batch_size, on_error="skip"), {"in": records, "weights": []}, batch_size=100)
    lists = [records[at : at + batch_size] for at in range(0, 9, batch_size)]
    good = [some for some in lists if ("a", -1) not in some]
    assert out["out"] == [record for some in good for record in some]
    assert out["sizes"] == [len(some) for some in good]


def test_two_functions_may_stand_for_both_inputs_of_lists() -> None:
    flow = ps.Flow("lists")
    keyed = flow.read(ps.sources.Memory([]), name="in").key_by(str)
    weights = flow.read(ps.sources.Memory([]), name="weights", parallelism=1)

    def weigh(ctx: ps.ProcessContext, records: list[int]) -> Any:
        return [record * ctx.broadcast["weight"] for record in records]

    def renew(ctx: ps.ProcessContext, weight: int) -> None:
        ctx.broadcast["weight"] = weight

    keyed.connect(weights.broadcast()).process_batches(weigh, renew).write(ps.sinks.Null(), name="out")
    assert ps.testing.run(flow, {"in": [1, 2], "weights": [10]}, order=["weights", "in", "in"])["out"] == [10, 20]


@pytest.mark.parametrize("does", ["state", "map"])
def test_lists_have_no_key_and_may_not_change_the_map(does: str) -> None:
    def wrong(ctx: ps.ProcessContext, records: list[int]) -> None:
        if does == "state":
            ctx.set(1)
        else:
            ctx.broadcast["a"] = 1

    flow = ps.Flow("lists")
    keyed = flow.read(ps.sources.Memory([1]), name="in").key_by(str)
    rules = flow.read(ps.sources.Memory([]), name="rules")
    made = keyed.connect(rules.broadcast()).process_batches(wrong, lambda ctx, rule: None)
    made.write(ps.sinks.Null(), name="out")
    words = "there is no current key here" if does == "state" else "only process_broadcast may change it"
    with pytest.raises(ps.RecordError, match=words):
        ps.testing.run(flow)
