"""Process functions where there is no current key, and event timers where no watermark comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps


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
