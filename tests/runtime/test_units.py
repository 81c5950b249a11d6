"""One rule for times and durations: seconds or timedeltas in, milliseconds or aware datetimes for points in time."""

from __future__ import annotations

import inspect
import math
import pickle
import pydoc
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import penstock as ps
from penstock import testing
from penstock.bridge.burst import BurstOptions
from penstock.bridge.session import SparkOptions
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import PlacementOptions
from penstock.runtime.errors import FlowError
from penstock.runtime.units import Seconds, seconds

AT = datetime(2001, 2, 3, 4, 5, 6, 789_000, timezone(timedelta(hours=2)))
AT_MS = 981_165_906_789


def test_durations_are_seconds_or_timedeltas() -> None:
    assert seconds(2, "x") == seconds(2.0, "x") == seconds(timedelta(seconds=2), "x") == 2.0
    assert seconds(math.inf, "x") == seconds(10**400, "x") == math.inf
    for wrong in ("2", None, True, math.nan, -1, timedelta(seconds=-1)):
        with pytest.raises(ps.FlowError, match="x="):
            seconds(wrong, "x")  # type: ignore[arg-type]


def test_windows_take_both() -> None:
    minute = timedelta(minutes=1)
    assert ps.Tumbling(60).size == ps.Tumbling(minute).size == ps.Tumbling(size_s=60.0).size == 60_000
    sliding = ps.Sliding(size_s=minute, slide_s=30, offset_s=timedelta(seconds=1))
    assert (sliding.size, sliding.slide, sliding.offset) == (60_000, 30_000, 1_000)


def test_generators_take_both() -> None:
    one, other = (ps.sources.Generator(str, 10, duration_s=d) for d in (90, timedelta(seconds=90)))
    assert one.duration_ns == other.duration_ns == 90_000_000_000


def test_every_bare_number_of_run_has_its_unit_in_its_name() -> None:
    """A float parameter is a duration unless it is known to be something else."""
    others = {"cpus_per_worker"}
    for function in (ps.run, ps.resume, ps.Job.wait):
        for name, parameter in inspect.signature(function).parameters.items():
            if "float" in str(parameter.annotation) and name not in others:
                assert name.endswith("_s"), name
                assert "timedelta" in str(parameter.annotation), name


# What a number of an option is, if it is no duration.
RATIOS = {"delta", "k", "margin", "range_below", "factor", "node_cost", "busy"}
AMOUNTS = {"cpus", "core_bytes_per_s", "pin"}


@pytest.mark.parametrize("options", [AdoptionOptions, BurstOptions, PlacementOptions, SparkOptions])
def test_every_bare_number_of_an_option_class_has_its_unit_in_its_name(options: type[Any]) -> None:
    """A field is a duration unless it is known to be something else, and each name has one end for each unit."""
    for field in fields(options):
        if any(kind in str(field.type) for kind in ("float", "Seconds", "timedelta")):
            assert field.name.endswith("_s") or field.name in RATIOS | AMOUNTS, field.name
        assert not re.search("second|millis|minute|_ms", field.name), field.name


class Timed(ps.ProcessFunction):
    """Does what the record, a function of the context, says; says when timers fire."""

    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> list[Any]:
        result = record(ctx)
        return [] if result is None else [result]

    def on_timer(self, ctx: ps.ProcessContext, key: Any, at_ms: int) -> list[Any]:
        assert type(at_ms) is int
        return [("due", at_ms)]


def timed(*records: Callable[[ps.ProcessContext], Any]) -> list[Any]:
    flow = ps.Flow("timed")
    (
        flow.read(ps.sources.Generator(lambda i: records[i], limit=len(records)))
        .key_by(lambda record: 0)
        .process(Timed())
        .write(ps.sinks.Null(), name="out")
    )
    return list(testing.run(flow)["out"])


def test_a_timer_s_time_is_the_same_in_and_out() -> None:
    later = AT + timedelta(days=36_500)
    later_ms = AT_MS + 36_500 * 86_400_000
    assert timed(lambda ctx: ctx.set_timer(at_ms=later), lambda ctx: ctx.set_timer(at_ms=later_ms)) == [
        later_ms,
        later_ms,
        ("due", later_ms),
    ]
    assert timed(lambda ctx: ctx.set_timer(at_ms=later_ms), lambda ctx: ctx.cancel_timer(at_ms=later)) == [later_ms]


def test_the_error_of_a_timer_has_its_time_in_milliseconds() -> None:
    def fail(ctx: ps.ProcessContext, key: Any, at_ms: int) -> None:
        raise ValueError(at_ms)

    flow = ps.Flow("timed")
    ticks = flow.read(ps.sources.Memory([AT_MS])).key_by(lambda at_ms: "a")
    ticks.process(lambda ctx, key, at_ms: ctx.set_timer(at_ms=at_ms) and None, on_timer=fail).write(ps.sinks.Null())
    with pytest.raises(ps.RecordError) as failed:
        testing.run(flow)
    assert failed.value.record == repr(("timer", "a", AT_MS))


def test_help_shows_what_a_context_takes_and_no_old_names() -> None:
    shown = pydoc.render_doc(ps.ProcessContext, renderer=pydoc.plaintext)
    assert "NoReturn" not in shown
    assert "unnamed" not in shown
    assert "now_ms(self)" in shown
    assert "now(self)" not in shown
    assert not hasattr(ps.ProcessContext("op", 0, 1, {}), "now")


def test_a_timer_a_while_from_now() -> None:
    def set_two(ctx: ps.ProcessContext) -> tuple[int, int]:
        now = ctx.now_ms()
        assert type(now) is int
        return ctx.set_timer(after_s=10_000) - now, ctx.set_timer(after_s=timedelta(hours=10)) - now

    (first, second), *due = timed(set_two)
    assert 10_000_000 <= first <= 10_001_000
    assert 36_000_000 <= second <= 36_001_000
    assert [name for name, _ in due] == ["due", "due"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda ctx: ctx.set_timer(1e9), r"set_timer\(after_s=...\), .* it was given \(1000000000.0,\)"),
        (lambda ctx: ctx.set_timer(), "set_timer takes one time, by its name"),
        (lambda ctx: ctx.set_timer(at_ms=1, after_s=1), "set_timer takes one time, by its name"),
        (lambda ctx: ctx.set_timer(at_ms=datetime(2001, 1, 1)), "no time zone"),
        (lambda ctx: ctx.set_timer(at_ms="soon"), r"set_timer\(at_ms='soon'\)"),
        (lambda ctx: ctx.set_timer(after_s=-1), "after_s=-1; it must be 0 seconds or more"),
        (lambda ctx: ctx.set_timer(after_s=math.inf), r"set_timer\(after_s=inf\): that is too far away"),
        (lambda ctx: ctx.set_timer(at_ms=1_700_000_000), "most likely in seconds since 1970; give milliseconds"),
        (lambda ctx: ctx.cancel_timer(1e9), r"cancel_timer\(at_ms=...\)"),
    ],
)
def test_what_is_no_time_of_a_timer(record: Callable[[ps.ProcessContext], Any], message: str) -> None:
    with pytest.raises(ps.PenstockError, match=message):
        timed(record)


@dataclass(frozen=True)
class _Timed:
    name: str = "a"
    wait_s: Seconds = Seconds(2.5)


def test_a_field_that_is_a_duration() -> None:
    assert (_Timed().wait_s, _Timed(wait_s=3).wait_s, _Timed("b", timedelta(minutes=1)).wait_s) == (2.5, 3.0, 60.0)
    made = _Timed("b", timedelta(minutes=1))
    assert pickle.loads(pickle.dumps(made)) == made == replace(_Timed("b"), wait_s=60)
    assert asdict(made) == {"name": "b", "wait_s": 60.0}
    with pytest.raises(FlowError, match="wait_s=-1"):
        _Timed(wait_s=-1)


def test_options_of_bursts_of_spark_and_of_placement_take_timedeltas() -> None:
    minute = timedelta(minutes=1)
    assert BurstOptions(toggle_s=minute).toggle_s == 60
    assert SparkOptions(start_s=minute).start_s == 60
    assert AdoptionOptions(rest_s=minute).rest_s == 60
