"""`penstock.testing.run`: a flow in this process, with the same answer every time."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from penstock.runtime import testing
from penstock.runtime.errors import CodecError, FlowError, RecordError
from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.operators.process import ProcessContext, ProcessFunction
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.call import Call, Null
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.sources.generator import Generator
from penstock.runtime.sources.memory import Memory
from penstock.runtime.worker import task as task_module
from tests.program.random_flows import random_flow


def counting(**options: Any) -> Flow:
    flow = Flow("f", **options)
    flow.read(Memory(["unused"])).flat_map(str.split).key_by(str.lower).count().write(Null())
    return flow


def test_every_update_shows_with_one_record_at_a_time() -> None:
    assert testing.run(counting(), ["to be", "To"])["write"] == [("to", 1), ("be", 1), ("to", 2)]


def test_larger_batches_show_the_latest() -> None:
    assert testing.run(counting(), ["a a", "a"], batch_size=2)["write"] == [("a", 3)]


def test_inputs_by_name_or_by_themselves_or_none() -> None:
    flow = counting()
    assert testing.run(flow, {"read": ["x"]}) == testing.run(flow, ["x"]) == {"write": [("x", 1)]}
    assert testing.run(flow, iter(["x"])) == {"write": [("x", 1)]}
    assert testing.run(flow) == {"write": [("unused", 1)]}


def two_sources() -> Flow:
    flow = Flow("f")
    one = flow.read(Memory([1]), name="one")
    one.union(flow.read(Memory([2]), name="two")).write(Null())
    return flow


def test_several_sources_need_names() -> None:
    with pytest.raises(FlowError, match="has 2 sources; give inputs by name: one, two"):
        testing.run(two_sources(), [1])
    with pytest.raises(FlowError, match="no source 'three'; its sources: one, two"):
        testing.run(two_sources(), {"three": [1]})
    assert sorted(testing.run(two_sources(), {"two": [7, 8]})["write"]) == [1, 7, 8]


def test_an_endless_source_is_refused_unless_it_is_replaced() -> None:
    flow = Flow("f")
    flow.read(Generator(int)).write(Null())
    with pytest.raises(FlowError, match="source 'read' never ends; give its records in `inputs`"):
        testing.run(flow)
    assert testing.run(flow, [4]) == {"write": [4]}


def test_sinks_are_replaced_and_told_apart() -> None:
    flow = Flow("f")
    stream = flow.read(Memory([1, 2]))
    stream.write(Call(lambda record: 1 / 0), name="a")
    stream.filter(lambda n: n > 1).write(Null(), name="b")
    assert testing.run(flow) == {"a": [1, 2], "b": [2]}


def test_errors_are_the_users() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map(lambda n: 1 // n, name="invert").write(Null())
    with pytest.raises(RecordError) as caught:
        testing.run(flow, [1, 0])
    assert caught.value.operator == "invert"
    assert caught.value.record == "0"
    assert caught.value.location is not None
    assert caught.value.location.startswith(__file__)


@pytest.mark.parametrize("parallelism", [1, 3, None])
def test_parallelism_does_not_change_what_comes(parallelism: int | None) -> None:
    out = testing.run(counting(), ["a b", "b c", "c b"], parallelism=parallelism)
    assert dict(sorted(out["write"])) == {"a": 1, "b": 3, "c": 2}


@pytest.mark.parametrize("seed", range(30))
def test_two_runs_are_equal(seed: int) -> None:
    flow = random_flow(seed).flow
    assert testing.run(flow, batch_size=5, parallelism=2) == testing.run(flow, batch_size=5, parallelism=2)


def _stopwatch(seed: int) -> Iterator[int]:
    chance = random.Random(seed)
    return itertools.accumulate(iter(lambda: chance.choice((10, 10_000_000)), None))


def test_the_time_that_steps_take_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's size follows the time that it takes, but a test must not."""

    def build() -> Flow:
        flow = Flow("f", chaining=False)
        many = flow.read(Memory([]), name="a").flat_map(lambda n: range(n, n + 200))
        other = flow.read(Memory([]), name="b").flat_map(lambda n: range(n, n + 300))
        many.union(other).key_by(lambda n: n % 3).count().write(Null())
        return flow

    outputs = []
    for seed in range(4):
        ticks = _stopwatch(seed)
        monkeypatch.setattr(task_module, "perf_counter_ns", lambda ticks=ticks: next(ticks))
        outputs.append(testing.run(build(), {"a": range(9), "b": range(7)}))
    assert all(output == outputs[0] for output in outputs)


class Numbering(ProcessFunction):
    """Keeps state in itself, which it should not."""

    def __init__(self) -> None:
        self.seen = 0

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[int]:
        self.seen += 1
        return [self.seen]


def test_a_flow_can_be_run_again_and_is_not_changed() -> None:
    flow = Flow("f")
    flow.read(Memory(["x", "y"])).key_by(str).process(Numbering()).write(Null())
    before = flow.explain()
    assert testing.run(flow) == testing.run(flow) == {"write": [1, 2]}
    assert flow.explain() == before


def test_what_cannot_run_is_refused() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map(str)
    with pytest.raises(FlowError, match="nothing uses"):
        testing.run(flow)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ("to be", {}, "source 'read' needs a list of records, got 'to be' of type str"),
        ({"read": "to be"}, {}, "source 'read' needs a list of records, got 'to be'"),
        (5, {}, "source 'read' needs a list of records, got 5"),
        ([1], {"batch_size": 0}, "batch_size=0; it must be a whole number, 1 or more"),
        ([1], {"batch_size": 1.5}, "batch_size=1.5; it must be"),
        ([1], {"parallelism": 0}, "parallelism=0; it must be a whole number, 1 or more, or None"),
    ],
)
def test_what_is_no_input_and_no_number_is_refused(inputs: Any, options: Any, message: str) -> None:
    flow = Flow("f")
    flow.read(Memory([])).write(Null())
    with pytest.raises(FlowError, match=message):
        testing.run(flow, inputs, **options)


# --- time ------------------------------------------------------------------------------------------------------------


class Ticking(Source):
    """One record each quarter of a second, by its own account or by a clock of its own."""

    def __init__(self, clock: Any = None) -> None:
        self.clock = clock

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("ticks")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return TickingReader(self.clock or context.clock)


class TickingReader(Reader):
    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.next = clock()
        self.made = 0

    def read(self, limit: int) -> list[Any]:
        if self.clock() < self.next:
            return []
        self.next += 250_000_000
        self.made += 1
        self.finished = self.made == 4
        return [self.made]

    def ready_in(self) -> float:
        return max(0, self.next - self.clock()) / 1e9

    def offsets(self) -> dict[str, Any]:
        return {"ticks": self.made}


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seconds: float) -> None:
        raise AssertionError(f"it waits for {seconds} s")

    monkeypatch.setattr(time, "sleep", refuse)


@pytest.mark.usefixtures("no_sleep")
@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_a_paced_source_takes_no_time(arrivals: Any) -> None:
    flow = Flow("f")
    flow.read(Generator(str, rate=2, duration_s=3600, arrivals=arrivals)).write(Null())
    found = testing.run(flow)["write"]
    assert found == [str(i) for i in range(len(found))]
    assert 6500 < len(found) < 7900
    assert found == testing.run(flow)["write"]


def test_a_source_that_ends_by_the_speed_of_the_machine_is_refused() -> None:
    flow = Flow("f")
    flow.read(Generator(str, duration_s=5)).write(Null())
    with pytest.raises(FlowError, match=r"source 'read' makes as many records as it can .* give it a rate or a limit"):
        testing.run(flow)
    assert testing.run(flow, ["1"])["write"] == ["1"]


@pytest.mark.usefixtures("no_sleep")
def test_a_reader_that_is_ready_in_a_fraction_of_a_second() -> None:
    flow = Flow("f")
    flow.read(Ticking()).write(Null())
    assert testing.run(flow)["write"] == [1, 2, 3, 4]


def test_a_reader_with_a_clock_of_its_own_is_waited_for() -> None:
    flow = Flow("f")
    flow.read(Ticking(functools.partial(next, itertools.count(step=1_000_000)))).write(Null())
    assert testing.run(flow)["write"] == [1, 2, 3, 4]


class Silence(ProcessFunction):
    """Says when a key has been silent for 2.5 seconds."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.cancel_timer()
        ctx.set_timer(after_s=2.5)

    def on_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> list[Any]:
        return [("silent", at_ms / 1000)]


@pytest.mark.usefixtures("no_sleep")
@pytest.mark.parametrize("parallelism", [1, 2])
def test_timers_come_between_the_records_of_a_paced_source(parallelism: int) -> None:
    """A record each second for three seconds, then one after ten."""
    flow = Flow("f")
    records = flow.read(Generator(lambda i: i, rate=[(1.0, 3.0), (0.1, 20.0)], limit=5))
    found = records.key_by(lambda i: "key").process(Silence())
    found.union(records.map(lambda i: (i, 0.0))).write(Null())
    out = testing.run(flow, parallelism=parallelism)["write"]
    assert [name for name, _ in out] == [0, 1, 2, 3, "silent", 4, "silent"]
    first, last = (at for name, at in out if name == "silent")
    assert first == pytest.approx(testing._BEGIN_S + 5.5, abs=0.01)
    assert last - first == pytest.approx(10, abs=0.01)
    assert out == testing.run(flow, parallelism=parallelism)["write"]


@pytest.mark.usefixtures("no_sleep")
def test_an_idle_source_holds_no_watermark_up() -> None:
    flow = Flow("f")
    slow = flow.read(Generator(lambda i: i * 1000, rate=[(1.0, 1.0), (0.001, 3000.0)], limit=2), name="slow")
    quick = flow.read(Generator(lambda i: i * 1000, rate=1.0, limit=20), name="quick")
    streams = [each.watermark(lambda ms: ms, idle_s=5.0) for each in (slow, quick)]
    streams[0].union(streams[1]).key_by(lambda ms: "all").window(Tumbling(10), time=lambda ms: ms).count().write(Null())
    windows = testing.run(flow)["write"]
    assert windows[-1] == ("all", 10_000, 20_000, 10)
    assert ("all", 0, 10_000, 12) in windows


# --- as strict as a job ----------------------------------------------------------------------------------------------


class Keyless:
    """Hashes by its address."""


class Locked:
    """Cannot be pickled."""

    def __init__(self, *_: Any) -> None:
        self.lock = threading.Lock()


class OneWay:
    """Can be pickled, and not be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def refused(flow: Flow, records: list[Any]) -> RecordError:
    with pytest.raises(RecordError) as caught:
        testing.run(flow, records)
    return caught.value


def test_keys_that_work_in_one_task_only() -> None:
    flow = Flow("f")
    flow.read(Memory([])).key_by(lambda n: Keyless()).count().write(Null())
    error = refused(flow, [1])
    assert error.operator == "count"
    assert "operator 'count' failed (on the way from 'read'): KeyTypeError" in str(error)
    assert "Keyless" in str(error)


def test_records_that_cannot_be_pickled() -> None:
    flow = Flow("f", chaining=False)
    flow.read(Memory([])).map(Locked).write(Null())
    assert "cannot be sent to another task" in str(refused(flow, [1]))
    fine = Flow("f")  # one chain: they stay in one task
    fine.read(Memory([])).map(Locked).map(lambda locked: 1).write(Null())
    assert testing.run(fine, [1])["write"] == [1]


def test_records_that_cannot_be_unpickled() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map(lambda n: OneWay()).key_by(lambda one: 1).count().rebalance().map(str).write(Null())
    assert testing.run(flow, [1])["write"] == ["(1, 1)"]  # a key's count is all that is sent downstream
    flow = Flow("f", chaining=False)
    flow.read(Memory([])).map(lambda n: OneWay()).write(Null())
    with pytest.raises(
        CodecError,
        match=r"task write\[0\] cannot read what map\[0\] has sent: .*cannot be unpickled here: ",
    ):
        testing.run(flow, [1])


def test_a_branch_that_changes_the_records_of_another_is_named() -> None:
    """A job of one worker shares them, so that the result of the other branch would be wrong there."""

    def spoil(record: list[int]) -> int:
        record.append(99)
        return len(record)

    flow = Flow("f", chaining=False)
    records = flow.read(Memory([]))
    records.map(spoil, name="spoils").write(Null(), name="a")
    records.map(len).write(Null(), name="b")
    error = refused(flow, [[1]])
    assert error.operator == "spoils"
    assert "Change a copy" in str(error)


@pytest.mark.parametrize("passing", [False, True], ids=["kept", "at the end"])
def test_state_that_cannot_be_saved(passing: bool) -> None:
    def keep(ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(record if passing and record < 2 else Locked())

    flow = Flow("f")
    flow.read(Memory([])).key_by(lambda n: 1).process(keep, name="keep").write(Null())
    error = refused(flow, [0, 1, 2])
    assert error.operator == "keep"
    assert "cannot be saved with an epoch" in str(error)


def test_a_flow_that_cannot_travel() -> None:
    flow = Flow("f")
    source = Ticking()
    flow.read(source, name="ticks").write(Null())
    source.clock = threading.Lock()
    with pytest.raises(FlowError, match=r"operator 'ticks'.*cannot be pickled"):
        testing.run(flow)


def test_functions_are_copies_as_in_a_worker() -> None:
    seen: list[int] = []
    flow = Flow("f")
    flow.read(Memory([])).filter(lambda n: seen.append(n) is None).write(Null())
    assert testing.run(flow, [1, 2]) == {"write": [1, 2]}
    assert seen == []


def test_keys_that_are_equal_are_one_key_whatever_their_types() -> None:
    flow = Flow("equal-keys")
    flow.read(Memory([1, 0.0, True, -0.0, 1.0, False, 2])).key_by(lambda key: key).count(emit="final").write(
        Null(), name="out"
    )
    for parallelism in (1, 3):
        assert sorted(testing.run(flow, parallelism=parallelism)["out"]) == [(0, 3), (1, 3), (2, 1)]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_nan_is_no_key(parallelism: int) -> None:
    flow = Flow("nan")
    read = flow.read(Memory([1.0, float("nan"), float("inf") - float("inf")]))
    read.key_by(lambda key: key).count(emit="final", on_error="skip").write(Null(), name="out")
    assert testing.run(flow, parallelism=parallelism)["out"] == [(1.0, 1)]


# --- order and pauses ------------------------------------------------------------------------------------------------


def two_inputs() -> Flow:
    flow = Flow("two")
    both = [flow.read(Memory([]), name=name) for name in ("orders", "rules")]
    both[0].union(both[1]).map(str).write(Null(), name="out")
    return flow


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 10])
def test_records_of_several_sources_enter_in_an_order(batch_size: int, parallelism: int) -> None:
    inputs = {"orders": [1, 2, 3, 4], "rules": [10, 20]}
    order = ["orders", "orders", "rules", "orders", "rules"]
    out = testing.run(two_inputs(), inputs, order=order, batch_size=batch_size, parallelism=parallelism)
    assert out["out"] == ["1", "2", "10", "3", "20", "4"]
    out = testing.run(two_inputs(), inputs, order=["rules"], batch_size=batch_size, fail_at=[1, 3, 6])
    assert out["out"][0] == "10"
    assert sorted(out["out"]) == sorted(map(str, [1, 2, 3, 4, 10, 20]))


@pytest.mark.parametrize("chaining", [True, False])
def test_a_record_has_passed_all_tasks_before_the_next_one_enters(chaining: bool) -> None:
    """So the order of two inputs of different lengths holds, too."""
    flow = Flow("two", chaining=chaining)
    long = flow.read(Memory([]), name="long").map(str, name="a").rebalance().map(str, name="b")
    long.union(flow.read(Memory([]), name="short")).write(Null(), name="out")
    order = ["long", "short"] * 3
    out = testing.run(flow, {"long": list("abc"), "short": list("xyz")}, order=order)
    assert "".join(out["out"]) == "axbycz"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "orders"}, r"order='orders'; give a list with the name of a source for each record"),
        ({"order": 3}, "order=3; give a list"),
        ({"order": ["order"]}, "order has 'order', which is no source; the sources are: orders, rules"),
        ({"order": ["orders"] * 3}, "order has source 'orders' 3 times, which has 2 records"),
        ({"order": ["rules"]}, "order has source 'rules', whose records are not in `inputs`; give them there"),
        ({"fail_at": 0}, "fail_at=0; it must be a whole number of records, 1 or more, or several"),
        ({"fail_at": [1, "2"]}, r"fail_at=\[1, '2'\]; it must be a whole number"),
        ({"fail_at": {"order": 1}}, "flow 'two' has no source 'order'; its sources: orders, rules"),
        ({"fail_at": 3}, "only 2 records have entered the flow, so nothing has failed after record 3; give a number"),
        ({"fail_at": {"rules": [1]}}, "only 0 records have entered source 'rules'"),
        ({"begin": datetime(2024, 5, 1)}, "has no time zone; use an aware datetime"),
        ({"begin": 1_704_067_200}, "begin=1704067200: the time is most likely in seconds since 1970"),
        ({"begin": "today"}, "begin='today': a record's time must be"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        testing.run(two_inputs(), {"orders": [1, testing.Pause(1), 2]}, **options)


@pytest.mark.usefixtures("no_sleep")
@pytest.mark.parametrize("fail_at", [None, 1, 2, [3, 4, 4]])
def test_timers_fire_in_a_pause(fail_at: Any) -> None:
    flow = Flow("f")
    records = flow.read(Memory([]))
    found = records.key_by(lambda record: "key").process(Silence())
    found.union(records.map(lambda record: (record, 0.0))).write(Null())
    begin = datetime(2030, 1, 1, tzinfo=timezone.utc)
    items = [testing.Pause(60), "a", "b", testing.Pause(timedelta(seconds=3)), "c", testing.Pause(2), "d"]
    out = testing.run(flow, [*items, testing.Pause(1)], begin=begin, fail_at=fail_at)["write"]
    assert [name for name, _ in out] == ["a", "b", "silent", "c", "d", "silent"]
    assert out[2][1] == pytest.approx(begin.timestamp() + 62.5, abs=0.01)
    assert out[5][1] == pytest.approx(begin.timestamp() + 67.5, abs=0.01)
    assert (
        out == testing.run(flow, [*items, testing.Pause(1)], begin=begin.timestamp() * 1000, fail_at=fail_at)["write"]
    )


@pytest.mark.usefixtures("no_sleep")
def test_many_timers_in_a_pause() -> None:
    flow = Flow("f")
    records = flow.read(Memory([])).key_by(lambda n: n)
    records.process(lambda ctx, n, r: ctx.set_timer(after_s=n) and None, on_timer=lambda ctx, n, at: [n]).write(Null())
    assert testing.run(flow, [*range(300, 0, -1), testing.Pause(1000), 0])["write"] == [*range(1, 301), 0]


def test_a_pause_is_no_negative_time() -> None:
    assert repr(testing.Pause(2)) == "Pause(2)"
    with pytest.raises(ValueError, match="duration_s=-1; it must be 0 seconds or more"):
        testing.Pause(-1)


# --- failures --------------------------------------------------------------------------------------------------------


class Kept(ProcessFunction):
    """Keeps what it should."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.set(ctx.get(0) + 1)
        ctx.list_state("all").append(record)
        return [(key, ctx.get(), list(ctx.list_state("all")))]


WORDS = ["to", "be", "or", "not", "to", "be", "that", "is", "the", "question", "to", "be"]


def processing(process: ProcessFunction) -> Flow:
    flow = Flow("f")
    flow.read(Memory([])).key_by(str).process(process).write(Null())
    return flow


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_failure_does_not_show(batch_size: int, parallelism: int) -> None:
    options: Any = {"batch_size": batch_size, "parallelism": parallelism}
    whole = testing.run(processing(Kept()), WORDS, **options)
    for place in range(1, len(WORDS) + 1):
        assert testing.run(processing(Kept()), WORDS, fail_at=place, **options) == whole
    assert testing.run(processing(Kept()), WORDS, fail_at=[2, 2, 5, 12], **options) == whole
    assert testing.run(processing(Kept()), WORDS, fail_at={"read": [3, 9]}, **options) == whole


def test_a_failure_finds_what_no_epoch_saves() -> None:
    """Numbering begins anew, in all places but the first: there is nothing to lose before the first record."""
    whole = testing.run(processing(Numbering()), WORDS)
    same = [place for place in range(1, 13) if testing.run(processing(Numbering()), WORDS, fail_at=place) == whole]
    assert same == [1]


class Counting:
    """A function that counts the records of all its copies, which is not undone."""

    seen = 0

    def __call__(self, record: Any) -> Any:
        Counting.seen += 1
        return record


def test_a_failure_reads_records_again() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map(Counting()).write(Null())
    Counting.seen = 0
    assert testing.run(flow, list(range(20)), fail_at=[1, 20])["write"] == list(range(20))
    assert 22 <= Counting.seen <= 24


def test_after_a_failure_records_are_as_they_were_read_first() -> None:
    def double(record: list[int]) -> int:
        record[0] *= 2
        return record[0]

    flow = Flow("f")
    flow.read(Memory([])).map(double).write(Null())
    records = [[1], [2], [3]]
    assert testing.run(flow, records, fail_at=[1, 2, 3])["write"] == [2, 4, 6]
    assert records == [[1], [2], [3]]


@pytest.mark.parametrize("where", [1, 7, {"a": 3}, {"b": 4}, [2, 5, 9, 13]])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_failure_with_two_sources(where: Any, parallelism: int) -> None:
    flow = Flow("f")
    both = [flow.read(Memory([]), name=name) for name in ("a", "b")]
    both[0].union(both[1]).key_by(lambda n: n % 3).count().write(Null())
    inputs = {"a": range(6), "b": range(20, 29)}
    whole = testing.run(flow, inputs, parallelism=parallelism)
    assert testing.run(flow, inputs, parallelism=parallelism, fail_at=where) == whole


@pytest.mark.usefixtures("no_sleep")
def test_a_failure_of_a_paced_source_with_windows() -> None:
    flow = Flow("f")
    slow = flow.read(Generator(lambda i: i * 1000, rate=1.0, limit=40)).watermark(lambda ms: ms)
    slow.key_by(lambda ms: ms % 3).window(Tumbling(10), time=lambda ms: ms).count().write(Null())
    whole = testing.run(flow)
    assert len(whole["write"]) == 12
    assert testing.run(flow, fail_at=[5, 23, 40]) == whole


def test_a_failure_when_records_have_been_gathered() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map_batches(lambda records: records, min_batch=5, linger_s=100).write(Null())
    assert testing.run(flow, range(12), fail_at=[3, 8, 12])["write"] == list(range(12))


def test_a_failure_needs_records_that_travel() -> None:
    flow = Flow("f")
    flow.read(Memory([])).map(lambda locked: 1).write(Null())
    assert len(testing.run(flow, [Locked()])["write"]) == 1
    with pytest.raises(FlowError, match=r"the records of source 'read': .* cannot be pickled"):
        testing.run(flow, [Locked()], fail_at=1)


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_failures_of_random_flows(seed: int) -> None:
    """All results are there, once."""
    flow = random_flow(seed).flow
    whole = testing.run(flow, parallelism=2)
    for place in (1, 4):
        try:
            found = testing.run(flow, parallelism=2, fail_at=place)
        except FlowError as error:
            assert "records have entered" in str(error)  # noqa: PT017  some of these flows read less
            continue
        assert {name: sorted(map(repr, records)) for name, records in found.items()} == {
            name: sorted(map(repr, records)) for name, records in whole.items()
        }


@pytest.mark.parametrize("rates", [(1000, 1), (1000, 5), (5, 5)])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_paced_sources_of_different_rates_wait_in_no_real_time(
    rates: tuple[int, int], parallelism: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    flow = Flow("two-rates", parallelism=parallelism)
    quick, slow = (
        flow.read(Generator(lambda i: i, rate=rate, limit=limit), name=f"source {n}")
        for n, (rate, limit) in enumerate(zip(rates, (600, 3), strict=True))
    )
    quick.union(slow).map(lambda n: n).write(Null(), name="out")
    assert len(testing.run(flow)["out"]) == 603
    assert waits == []
