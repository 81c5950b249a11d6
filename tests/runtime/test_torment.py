"""`penstock.testing.torment`: it finds mistakes in users' operators, says in which run, and accepts what is right."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

import penstock as ps
from penstock.runtime.errors import FlowError, RecordError
from penstock.runtime.operators.process import (
    BroadcastProcessFunction,
    CoProcessFunction,
    ProcessContext,
    ProcessFunction,
)
from penstock.runtime.program.flow import KeyedStream, Stream
from penstock.runtime.state.keyed import KeyedMap
from penstock.runtime.state.timers import Timers
from penstock.runtime.testing import Pause, _GivenReader
from penstock.runtime.torment import torment

USERS = ["ann", "bob", "ann", "cy", "ann", "bob"]
CLICKS = [{"user": user, "n": n, "ms": 1000 * n} for n, user in enumerate(USERS * 3)]
RULES = [{"user": "ann", "limit": 2}, {"user": "bob", "limit": 4}, {"user": "cy", "limit": 9}]


# --- what is right ---------------------------------------------------------------------------------------------------


class Counts(ProcessFunction):
    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.set(ctx.get(0) + 1)
        return [(key, ctx.get())]


class Named(ProcessFunction):
    """Uses all kinds of state, and says at the end of the input what there is."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.value_state("last").set(record["n"])
        ctx.list_state("all").append(record["n"])
        by_rest = ctx.map_state("by rest")
        by_rest[record["n"] % 2] = by_rest.get(record["n"] % 2, 0) + 1
        ctx.set_timer(after_s=3600)

    def on_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> Iterator[Any]:
        if not ctx.get(False):
            ctx.set(True)
            yield key, ctx.value_state("last").get(), list(ctx.list_state("all")), dict(ctx.map_state("by rest"))


class Silent(ProcessFunction):
    """Says how many clicks a user has made before each silence of ten minutes."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(ctx.get(0) + 1)
        ctx.cancel_timer()
        ctx.set_timer(after_s=600)

    def on_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> list[Any]:
        found = ctx.get()
        ctx.clear()
        return [(key, found)]


class Later(ProcessFunction):
    """Gives each record back when the watermark has reached ten seconds after it."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        at = ctx.set_event_timer(record["ms"] + 10_000)
        ctx.map_state("waiting")[at] = record

    def on_event_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> list[Any]:
        return [ctx.map_state("waiting").pop(at_ms)]


class Joins(CoProcessFunction):
    """Joins each click with the limit of its user, whichever comes first."""

    def process1(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        limit = ctx.get()
        if limit is None:
            ctx.list_state("waiting").append(record)
            return []
        return [(key, record["n"], limit)]

    def process2(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.set(record["limit"])
        waiting = list(ctx.list_state("waiting"))
        ctx.list_state("waiting").clear()
        return [(key, click["n"], record["limit"]) for click in waiting]


class Limits(BroadcastProcessFunction):
    """Says at the end of the input how many clicks of a user are above the limit."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(ctx.get(0) + 1)
        ctx.cancel_timer()
        ctx.set_timer(after_s=3600)

    def process_broadcast(self, ctx: ProcessContext, record: Any) -> None:
        ctx.broadcast[record["user"]] = record["limit"]

    def on_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> list[Any]:
        return [(key, ctx.get() - ctx.broadcast[key])]


class Prepared:
    """Has what it needs from open() on."""

    def open(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, record: Any) -> Any:
        with self.lock:
            return record["n"] + 1

    def close(self) -> None:
        del self.lock


def invert(record: Any) -> float:
    return float(1 / (record["n"] % 3))


def with_letters(stream: Stream) -> Stream:
    good = stream.map(invert, name="invert", on_error="dead_letter")
    return good.union(good.dead_letters().map(lambda letter: (letter.record["n"], letter.error)))


def timed(stream: Stream) -> KeyedStream:
    return stream.watermark("ms", out_of_orderness_s=1).key_by("user")


RIGHT: dict[str, Callable[[Stream], Stream]] = {
    "map": lambda s: s.map(lambda record: record["n"] + 1),
    "map with open": lambda s: s.map(Prepared()),
    "flat_map": lambda s: s.flat_map(lambda record: range(record["n"])),
    "filter": lambda s: s.filter(lambda record: record["n"] % 2),
    "expressions": lambda s: s.filter(ps.col("n") > 3).select("user", twice=ps.col("n") * 2),
    "map_batches": lambda s: s.map_batches(lambda records: [record["n"] for record in records], batch_size=4),
    "map_batches that waits": lambda s: s.map_batches(lambda rs: [r["n"] for r in rs], min_batch=3, linger_s=1),
    "count": lambda s: s.key_by("user").count(emit="final"),
    "every count": lambda s: s.key_by("user").count(emit="every"),
    "sum": lambda s: s.key_by("user").sum("n", emit="final"),
    "sum of floats": lambda s: s.key_by("user").sum(lambda record: record["n"] / 10, emit="final"),
    "mean": lambda s: s.key_by("user").mean("n", emit="final"),
    "reduce": lambda s: (
        s.map(lambda r: (r["user"], [r["n"]])).key_by(0).reduce(lambda a, b: (a[0], a[1] + b[1]), emit="final")
    ),
    "agg": lambda s: s.key_by("user").agg(n=ps.count(), top=ps.max("n"), emit="final"),
    "tumbling": lambda s: timed(s).window(ps.Tumbling(5)).count(),
    "sliding": lambda s: timed(s).window(ps.Sliding(6, 2)).sum("n"),
    "process": lambda s: s.key_by("user").process(Counts()),
    "named states": lambda s: s.key_by("user").process(Named()),
    "event timers": lambda s: timed(s).process(Later()),
    "dead letters": with_letters,
    "side output": lambda s: s.key_by("user").process(Sides(), outputs=("even",)).side_output("even"),
    "spread and united": lambda s: s.map(lambda r: r["n"]).rebalance().map(str).union(s.map(lambda r: -r["n"])),
}


class Sides(ProcessFunction):
    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(ctx.get(0) + record["n"])
        if not record["n"] % 2:
            ctx.output("even", (key, ctx.get()))


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_passes(what: str) -> None:
    results = torment(RIGHT[what], CLICKS, runs=24)
    assert results
    assert torment(RIGHT[what], CLICKS, runs=3, seed=100, expect=reversed(results)) == results


def test_timers_between_pauses() -> None:
    clicks = [CLICKS[0], CLICKS[2], Pause(601), CLICKS[1], Pause(300), CLICKS[4], Pause(1200), CLICKS[0]]
    results = torment(lambda s: s.key_by("user").process(Silent()), clicks)
    assert sorted(results) == [("ann", 1), ("ann", 1), ("ann", 2), ("bob", 1)]


def test_two_inputs_with_keys() -> None:
    results = torment(lambda a, b: a.key_by("user").connect(b.key_by("user")).process(Joins()), CLICKS, RULES)
    assert len(results) == len(CLICKS)


def test_an_input_for_all_tasks() -> None:
    results = torment(lambda a, b: a.key_by("user").connect(b.broadcast()).process(Limits()), CLICKS, RULES)
    assert dict(results) == {"ann": 7, "bob": 2, "cy": -6}


def test_many_outputs_of_one_record_with_little_room() -> None:
    """The operator is stopped in the middle of a record."""
    results = torment(lambda s: s.flat_map(range).map(lambda n: n % 10), [9000, 3, 5000], runs=12)
    assert len(results) == 14_003


def test_aggregates_that_emit_again_and_again_are_compared_by_their_last_results() -> None:
    torment(lambda s: s.key_by("user").count(), CLICKS, last_by=0)
    late = [CLICKS[n] for n in (5, 0, 9, 3, 17, 16, 2)]
    windows = torment(
        lambda s: timed(s).window(ps.Tumbling(5), lateness_s=60).count(), late, last_by=lambda window: window[:3]
    )
    assert windows


def test_the_order_of_the_results_of_a_key() -> None:
    torment(lambda s: s.key_by("user").process(Counts()), CLICKS, by=0)
    torment(lambda s: s.map(lambda r: r), CLICKS, by="user")


class Frozen:
    """Equal only to itself."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.rest = [{n}, float("nan")]


def test_results_without_hashes_and_without_equality() -> None:
    torment(lambda s: s.map(lambda r: Frozen(r["n"])), CLICKS, runs=9)
    with pytest.raises(AssertionError, match="lost: 18 results"):
        torment(lambda s: s.map(lambda r: Frozen(random.randrange(10**9))), CLICKS, runs=1)


# --- mistakes --------------------------------------------------------------------------------------------------------


class KeptInAttribute(ProcessFunction):
    def __init__(self) -> None:
        self.seen: dict[Any, int] = {}

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        self.seen[key] = self.seen.get(key, 0) + 1
        return [(key, self.seen[key])]


class KeptInClass(ProcessFunction):
    """What an object of the class has counted, the next one counts again."""

    seen: ClassVar[dict[Any, int]] = {}

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        self.seen[key] = self.seen.get(key, 0) + 1
        return [(key, self.seen[key])]


class KeptInModule(ProcessFunction):
    """Begins anew with the first record of a run, so that only going back shows that records count twice."""

    total = 0

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        cls = type(self)
        cls.total = 0 if record["n"] == 0 else cls.total + record["n"]
        return [(key, record["n"], cls.total)]


class KeptInFunction:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, record: Any) -> int:
        self.seen += 1
        return self.seen


class OfAllKeys(ProcessFunction):
    """Counts all records of a task."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.set(ctx.get(0) + 1)
        return [sum(ctx.state.values())]


class OneObject:
    """Gives the same object for each record, and changes it for the next."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}

    def __call__(self, record: Any) -> dict[str, Any]:
        self.row.update(record)
        return self.row


class ReadLater:
    """Returns a generator that uses what the next record has changed when it is read."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}

    def __call__(self, record: Any) -> Iterator[Any]:
        self.record = record
        return (self.record[name] for name in ("user", "n"))


class Interrupted:
    """Uses what the record of another task changes, when its outputs have no room."""

    def __init__(self) -> None:
        self.record: Any = None

    def __call__(self, record: Any) -> Iterator[Any]:
        self.record = record
        for _ in range(9000):
            yield self.record["n"]


def doubled(record: dict[str, Any]) -> dict[str, Any]:
    record["n"] *= 2
    return record


def changing(stream: Stream) -> Stream:
    """Both users of the stream get each record, and the first one changes it."""
    return (
        stream.rebalance().map(doubled, name="changing").union(stream.rebalance().map(lambda r: -r["n"], name="other"))
    )


def changing_for_all(stream: Stream) -> Stream:
    return stream.broadcast().map(doubled, name="changing")


def test_a_generator_that_is_interrupted() -> None:
    """It takes several tasks, records that meet, and outputs without room."""
    with pytest.raises(AssertionError, match=r"has: [23] tasks for each operator, .*little room for outputs"):
        torment(lambda s: s.rebalance().flat_map(Interrupted()), CLICKS[:3])


class FirstWins(CoProcessFunction):
    def process1(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        return [(key, record["n"], ctx.get())]

    def process2(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(record["limit"])


MISTAKES: dict[str, Callable[..., Stream]] = {
    "an attribute of a ProcessFunction": lambda s: s.key_by("user").process(KeptInAttribute()),
    "an attribute of a class": lambda s: s.key_by("user").process(KeptInClass()),
    "a variable that counts twice": lambda s: s.key_by(lambda r: 0).process(KeptInModule()),
    "an attribute of a function": lambda s: s.map(KeptInFunction()),
    "a sum of a batch": lambda s: s.map_batches(lambda records: [sum(record["n"] for record in records)]),
    "an object that is changed for the next record": lambda s: s.map(OneObject()).map(lambda row: row["n"]),
    "a generator that is read later": lambda s: s.map(ReadLater()).map(list),
    "a number of all keys": lambda s: s.key_by("user").process(OfAllKeys()),
    "chance": lambda s: s.filter(lambda r: random.random() < 0.5),
    "latest results": lambda s: s.key_by("user").count(name="clicks"),
    "late windows": lambda s: (
        timed(s.map(lambda r: {**r, "ms": 1000 * (r["n"] * 7 % 18)})).window(ps.Tumbling(3), time="ms").count()
    ),
    "late sessions": lambda s: (
        timed(s.map(lambda r: {**r, "ms": 1000 * (r["n"] * 7 % 18)})).window(ps.Session(3), time="ms").collect()
    ),
}
NOT_REPEATED = ("an attribute of a class", "chance")  # what the results depend on outlives a run


_ADDRESS = re.compile(r"0x[0-9a-f]+")


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_found(what: str) -> None:
    build = MISTAKES[what]
    with pytest.raises(AssertionError) as caught:
        torment(build, CLICKS)
    said = " ".join(str(caught.value).split())
    assert re.search(r"(lost: |has failed: ).* The run with seed \d+ has: [123] tasks? for each", said), said
    seed = int(re.search(r"Repeat this run with torment\(\.\.\., runs=1, seed=(\d+)\)", said)[1])  # type: ignore[index]
    if what not in NOT_REPEATED:
        with pytest.raises(AssertionError) as again:
            torment(build, CLICKS, runs=1, seed=seed)
        assert _ADDRESS.sub("", str(again.value)) == _ADDRESS.sub("", str(caught.value))


def test_the_order_of_two_inputs() -> None:
    def build(clicks: Stream, rules: Stream) -> Stream:
        return clicks.key_by("user").connect(rules.key_by("user")).process(FirstWins())

    with pytest.raises(AssertionError, match="the inputs in another order"):
        torment(build, CLICKS, RULES)

    def rules_first(rules: Stream, clicks: Stream) -> Stream:
        return build(clicks, rules)

    results = torment(rules_first, RULES, CLICKS, interleave=False)
    assert ("cy", 3, 9) in results


OF_ORDER: dict[str, Callable[[Any], Stream]] = {
    "the last of a window": lambda s: s.window(ps.Tumbling(5), time="ms").reduce(lambda a, b: b),
    "the last of all": lambda s: s.reduce(lambda a, b: b, emit="final", name="last"),
    "a list": lambda s: s.window(ps.Session(5), time="ms").collect(),
    "the best of a window": lambda s: s.window(ps.GlobalWindow()).top(1, by="ms"),
    "count windows": lambda s: s.window(ps.CountWindow(3)).collect(),
    "early results": lambda s: s.window(ps.Tumbling(5), time="ms", early_count=2).sum("n"),
}


@pytest.mark.parametrize("what", OF_ORDER)
def test_results_that_depend_on_the_order_of_records(what: str) -> None:
    build = OF_ORDER[what]
    inputs = [[{"ms": 1000 * n, "n": n + more} for n in range(12)] for more in (0, 100)]
    with pytest.raises(AssertionError, match="the inputs in another order"):
        torment(
            lambda a, b: build(
                a.watermark("ms", out_of_orderness_s=99)
                .union(b.watermark("ms", out_of_orderness_s=99, name="other"))
                .key_by(lambda r: 0)
            ),
            *inputs,
        )


def test_an_error_that_the_plain_run_does_not_have() -> None:
    with pytest.raises(
        AssertionError, match=r"this one has failed: .*changed a record that other tasks have"
    ) as caught:
        torment(changing_for_all, CLICKS, parallelism=(1, 2), expect=lambda results: True)
    assert isinstance(caught.value.__cause__, RecordError)


def test_a_record_that_another_branch_has_and_that_is_changed() -> None:
    with pytest.raises(RecordError, match=r"'changing' failed: .*changed a record that other tasks have"):
        torment(changing, CLICKS)


class Unsaved(ProcessFunction):
    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(threading.Lock())


def test_state_that_cannot_be_saved() -> None:
    with pytest.raises(RecordError, match=r"'unsaved'.*cannot be saved with an epoch.* Keep plain data in state"):
        torment(lambda s: s.key_by("user").process(Unsaved(), name="unsaved"), CLICKS)


def _no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timers, "restore", lambda self, saved: None)


def _no_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedMap, "note", lambda self, keys: None)


def _an_offset_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_GivenReader, "offsets", lambda self: {"given": self._next + 1})


@pytest.mark.parametrize(
    ("fault", "what"), [(_no_timers, "named states"), (_no_changes, "process"), (_an_offset_too_far, "map")]
)
def test_it_really_goes_back(
    fault: Callable[[pytest.MonkeyPatch], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in what is saved and restored shows."""
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="tasks that went back to an epoch"):
        torment(RIGHT[what], CLICKS)


def test_expected_results() -> None:
    def build(stream: Stream) -> Stream:
        return stream.map(lambda n: n + 1)

    assert torment(build, [1, 2], expect=[3, 2]) == [2, 3]
    with pytest.raises(AssertionError, match=r"not those of `expect`:\s+lost: 1 result: 4\s+too much: 1 result: 3\s"):
        torment(build, [1, 2], expect=[4, 2])
    assert torment(build, [1, 2], expect=lambda results: sum(results) == 5) == [2, 3]
    with pytest.raises(AssertionError, match=r"`expect` refuses the results, \[2, 3\]\sThis is the plain run"):
        torment(build, [1, 2], expect=lambda results: len(results) == 5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((lambda s: s.map(str),), {}, "there is no input; give a list of records for each stream"),
        ((lambda s: s.map(str), "text"), {}, "input 1 must be a list of records, got 'text'"),
        ((lambda s: s.map(str), [threading.Lock()]), {}, "the records of input 1: .* cannot be pickled"),
        ((lambda s: s.key_by(0), [(1,)]), {}, "`build` must return the stream of results, and it has returned"),
        ((lambda s: ps.Flow("f").read(ps.sources.Memory([])), [1]), {}, "a stream of another flow"),
        ((lambda s: s.map(str), [1]), {"runs": -1}, "runs=-1; it must be a whole number, 0 or more"),
        ((lambda s: s.map(str), [1]), {"seed": "x"}, "seed='x'; it must be a whole number"),
        ((lambda s: s.map(str), [1]), {"parallelism": ()}, r"parallelism=\(\); give numbers of tasks"),
        ((lambda s: s.map(str), [1]), {"by": 1.5}, "by=1.5; give a function, or the name or the index of a field"),
        ((lambda s: s.map(str), [1]), {"by": 0, "last_by": 0}, "give `by` or `last_by`"),
        ((lambda s: s.map(str), [1]), {"run": 3}, "no option 'run'; did you mean 'runs'"),
    ],
)
def test_what_cannot_be_tormented_is_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        torment(*arguments, **options)


def test_it_has_a_short_name() -> None:
    assert ps.testing.torment is torment
    assert "torment" in dir(ps.testing)


class Visits(ps.ProcessFunction):
    """Counts the visits of a user until half an hour has passed without one."""

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(ctx.get(0) + 1)
        ctx.cancel_timer()
        ctx.set_timer(after_s=1_800)

    def on_timer(self, ctx: ProcessContext, key: Any, at_ms: int) -> None:
        ctx.emit((key, ctx.get()))
        ctx.clear()


def test_a_pause_that_is_saved_in_an_epoch_is_not_longer_when_the_tasks_go_back() -> None:
    """Timers would fire in it that are due only after it."""
    pause = ps.testing.Pause(1_000)
    records = [("ann", 1), pause, ("ann", 2), pause, ("ann", 3)]
    found = ps.testing.torment(lambda clicks: clicks.key_by(0).process(Visits()), records, runs=60)
    assert found == [("ann", 3)]
