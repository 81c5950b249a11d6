"""Diverted tasks: whatever the bridge does, and whenever it is switched, each record counts once and in order."""

from __future__ import annotations

import dataclasses
import io
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import datetime, timezone
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge import forms
from penstock.bridge.forms import RangeForm, RangeRun, answer_of, answer_rows, as_columns, as_records, range_form
from penstock.bridge.python_range import take_in_pieces
from penstock.runtime.errors import RecordError
from penstock.runtime.event_time.watermark import IDLE, Watermark
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.operators import step_size
from penstock.runtime.operators.micro_batch import (
    ROWS_MAX,
    UNDER_WAY_MAX,
    Bridge,
    DivertRequest,
    MicroBatchResult,
    Unprocessed,
)
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.program.plan import Plan
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.sources.base import rows_of
from penstock.runtime.testing import _replace, _travelled
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker import diversion
from penstock.runtime.worker.load import task_load
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Snapshot, Steps, Task
from penstock.runtime.worker.wiring import build

WORDS = ["a", "be", "see", "Dee", "a", "A"]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that much happens between the first record and the last."""
    monkeypatch.setattr(step_size, "LIMIT_MAX", 16)
    monkeypatch.setattr(step_size, "LIMIT_FIRST", 4)


# Not empty while a range runs as it would in Spark.
IN_SPARK: list[bool] = []


class Lost(Exception):
    """What a bridge says that has died."""


class Here(Bridge):
    """Answers with the form's own run, as Spark's partitions do, in an order of its own; some are lost."""

    def __init__(self, forms: dict[int, RangeForm], rng: random.Random, lost: float, parts: int) -> None:
        self.forms = forms
        self.rng = rng
        self.lost = lost
        self.parts = parts
        self.waiting: list[tuple[int, int, Any, Future[MicroBatchResult]]] = []
        self.answered = 0
        self.unprocessed = 0
        self.tasks: list[Task] = []  # of the job

    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        future: Future[MicroBatchResult] = Future()
        self.waiting.append((chain, position, as_columns(input_), future))
        return future

    def answer_some(self) -> None:
        """Answer one that waits, not the first of them always."""
        if not self.waiting:
            return
        chain, position, columns, future = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        if self.rng.random() < self.lost:
            future.set_exception(Lost("gone"))
            return
        self.answered += 1
        IN_SPARK.append(True)
        try:
            rows = []
            step = max(1, -(-columns.num_rows // self.parts))
            for start in range(0, columns.num_rows, step):
                run = RangeRun(self.forms[chain].before(position))
                run.take(as_records(columns.slice(start, step)))
                rows.append(answer_rows(run.answer()))
            answer = answer_of(pa.Table.from_batches(rows))
            self.unprocessed += sum(map(len, answer.unprocessed))
            future.set_result(answer)
        except Exception as error:
            future.set_exception(error)
        finally:
            IN_SPARK.clear()


def forms_of(plan: Plan) -> dict[int, RangeForm]:
    """The ranges of a plan."""
    return {form.chain: form for chain in plan.chains if isinstance(form := range_form(plan, chain), RangeForm)}


def run_diverted(
    flow: Flow,
    seed: int,
    *,
    lost: float = 0.0,
    toggle: bool = True,
    inputs: Any = None,
    at: Callable[[int], None] | None = None,
) -> tuple[dict[str, list[Any]], Here]:
    """All that the sinks get while tasks are diverted and taken back between steps, and the bridge."""
    rng = random.Random(seed)
    now = [0]

    def clock() -> int:
        now[0] += rng.randrange(1, 50_000_000)
        return now[0]

    flow.graph.operators = _replace(flow, _travelled(flow.graph), inputs)
    plan = flow.plan(1)
    bridge = Here(forms_of(plan), rng, lost, rng.randint(1, 4))
    assert bridge.forms
    outputs: dict[str, list[Any]] = {}
    wiring = build(
        plan,
        {task.number: 0 for task in plan.tasks},
        0,
        MemoryNetwork(1).transport(0),
        clock=clock,
        report=lambda reported: outputs.setdefault(reported.channel, []).extend(reported.records),
        steps=Steps(stopwatch=lambda: 0),
    )
    loop = RunLoop(wiring, MemoryNetwork(1).transport(0), clock)
    bridge.tasks = list(loop.tasks)
    receive = loop.transport.receive
    passes = [0]

    def received(wait: float | None) -> Any:
        passes[0] += 1
        assert passes[0] < 200_000, "the job does not end"
        if at is not None:
            at(passes[0])
        for form in bridge.forms.values():
            if rng.random() < (0.2 if toggle else 1.0):
                rows = rng.choice((1, 7, 100, 10_000))
                inner = [n + (form.source is not None) for n in range(1, len(form.operators))]
                position = rng.choice([form.position, form.position, *inner])
                loop.divert(
                    DivertRequest(form.chain, position, rng.choice((0.0, 0.05)), rng.random() < 0.5, rows), bridge
                )
            elif rng.random() < 0.1:
                loop.undivert(form.chain)
        if rng.random() < 0.5:
            bridge.answer_some()
        return receive(0)

    loop.transport.receive = received  # type: ignore[method-assign]
    loop.run()
    return outputs, bridge


def lines(seed: int, count: int = 1500) -> list[str]:
    """Some lines of words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(6))) for _ in range(count)]


def counted(parallelism: int, split: Callable[[str], list[str]] = str.split) -> Flow:
    flow = Flow("counted", parallelism=parallelism)
    words = flow.read(ps.sources.Memory(["x"]), name="lines").flat_map(split, name="words")
    words.key_by(str.lower).count(emit="final", name="count").write(ps.sinks.Collect(), name="out")
    return flow


@pytest.mark.parametrize("lost", [0.0, 0.3])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_counts_are_those_of_the_records_whenever_tasks_are_diverted(parallelism: int, lost: float) -> None:
    answered = 0
    for seed in range(25):
        flow = counted(parallelism)
        outputs, bridge = run_diverted(flow, seed, lost=lost, inputs=lines(seed))
        assert dict(outputs["out"]) == Counter(word.lower() for line in lines(seed) for word in line.split()), seed
        answered += bridge.answered
    assert answered > 50


def upper(line: str) -> str:
    return line.upper()


def is_short(line: str) -> bool:
    return len(line) < 12


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_records_come_out_in_their_order(lost: float) -> None:
    for seed in range(25):
        flow = Flow("grep", parallelism=1)
        found = flow.read(ps.sources.Memory(["x"])).filter(is_short, name="short").map(upper, name="upper")
        found.write(ps.sinks.Collect(), name="out")
        outputs, _ = run_diverted(flow, seed, lost=lost, inputs=lines(seed))
        assert outputs.get("out", []) == [line.upper() for line in lines(seed) if len(line) < 12], seed


def is_even(n: int) -> bool:
    return 10 // (n % 5) > 0 and n % 2 == 0


def test_records_that_fail_go_where_the_operator_says_once() -> None:
    for seed in range(20):
        flow = Flow("failing", parallelism=1)
        even = flow.read(ps.sources.Memory([0])).filter(is_even, name="even", on_error="dead_letter")
        even.write(ps.sinks.Collect(), name="out")
        even.dead_letters().write(ps.sinks.Collect(), name="bad")
        outputs, _ = run_diverted(flow, seed, inputs=list(range(100)))
        assert outputs["out"] == [n for n in range(100) if n % 5 and n % 2 == 0]
        assert [letter.record for letter in outputs["bad"]] == [n for n in range(100) if n % 5 == 0]


def not_there(line: str) -> str:
    if IN_SPARK and len(line) % 7 == 0:
        raise OSError(f"no such file: {line!r}")
    return line + "!"


def first_words(line: str) -> list[str]:
    if IN_SPARK and len(line) % 5 == 0:
        raise OSError(f"no such file: {line!r}")
    return line.split()[:2]


def split_there(fails: int, line: str) -> list[str]:
    if IN_SPARK and int(line) < fails:
        raise OSError(f"no such file: {line!r}")
    return line.split()


@pytest.mark.parametrize("parallelism", [1, 2])
def test_records_that_fail_only_in_spark_keep_their_order_and_the_range_stays_there(parallelism: int) -> None:
    """They are processed by the task, from where they failed on. The others keep what Spark has made of them."""
    for seed in range(8):
        flow = Flow("places", parallelism=parallelism)
        found = flow.read(ps.sources.Memory(["x"])).map(not_there, name="place").flat_map(first_words, name="words")
        found.map(upper, name="upper").write(ps.sinks.Collect(), name="out")
        outputs, bridge = run_diverted(flow, seed, inputs=lines(seed))
        expected = [word.upper() for line in lines(seed) for word in (line + "!").split()[:2]]
        if parallelism == 1:
            assert outputs["out"] == expected, seed
        assert Counter(outputs["out"]) == Counter(expected), seed
        assert bridge.unprocessed > 50
        assert all(task.diversions.failed is None for task in bridge.tasks), "a few failures do not end a diversion"
        counts = [0, 0]
        for task in bridge.tasks:
            counts[0] += task.stages[0].records_in
            counts[1] += task.stages[-2].records_out
        assert counts == [len(lines(seed)), len(expected)]


def test_records_that_come_back_to_the_first_stage_of_a_chain_count_once() -> None:
    """That stage counts the records of a micro-batch when it is answered, and those that come back when it processes
    them."""
    unprocessed = 0
    for seed in range(8):
        flow = Flow("apart", parallelism=1)
        found = flow.read(ps.sources.Memory(["x"])).rebalance().map(not_there, name="place").map(upper, name="upper")
        found.write(ps.sinks.Collect(), name="out")
        outputs, bridge = run_diverted(flow, seed, inputs=lines(seed))
        assert outputs["out"] == [line.upper() + "!" for line in lines(seed)], seed
        (task,) = (task for task in bridge.tasks if task.stages[0].context.operator.name == "place")
        number = len(lines(seed))
        assert (task.stages[0].records_in, task.stages[0].records_out) == (number, number), seed
        assert task.stages[1].records_out == number, seed
        unprocessed += bridge.unprocessed
    assert unprocessed > 50


def fields_of(record: dict[str, Any]) -> dict[str, Any]:
    return {"k": record["k"], "n": record["n"]}


def test_what_comes_back_says_from_which_stage_on_it_is_to_be_processed() -> None:
    """The first stage of the source's chain is the source itself."""
    flow = Flow("positions", parallelism=1)
    records = flow.read(ps.sources.Memory([{"k": 0, "n": 0}])).map(fields_of, name="fields")
    records.key_by("k").sum("n").write(ps.sinks.Null())
    (form,) = forms_of(flow.plan(1, check_sinks=False)).values()
    run = RangeRun(form)
    run.take([{"k": 1, "n": 1}, {"k": 2}, {"k": 1, "n": "ten"}, {"k": 1, "n": 5}])
    back = [(each.position, each.records) for each in run.answer().unprocessed]
    assert sorted(back) == [(1, [{"k": 2}]), (2, [{"k": 1, "n": "ten"}])]


NAN = float("nan")


def test_a_key_without_a_hash_comes_back_with_each_of_its_records() -> None:
    """A partial result of such a key would be skipped as one record, however many records it stands for."""
    flow = Flow("bad-keys", parallelism=1)
    records = flow.read(ps.sources.Memory([{"k": 0, "n": 0}])).map(fields_of, name="fields")
    records.key_by("k").count(on_error="skip").write(ps.sinks.Null())
    (form,) = forms_of(flow.plan(1, check_sinks=False)).values()
    run = RangeRun(form)
    good = [{"k": 1, "n": n} for n in range(10)]
    bad = [{"k": key, "n": n} for n, key in enumerate([NAN, (NAN, 1), [1]] * 5)]
    run.take([*good[:5], *bad, *good[5:]])
    answer = run.answer()
    assert sorted(record["n"] for each in answer.unprocessed for record in each.records) == list(range(15))
    assert {each.position for each in answer.unprocessed} == {2}
    (partials,) = (batch for batch in answer.batches if isinstance(batch, KeyedBatch))
    assert (partials.keys, partials.values) == ([1], [10])


def half_a_character(n: int) -> int:
    if n == 1:
        raise ValueError("name \ud800")
    return n


def test_a_message_with_half_a_character_travels() -> None:
    flow = Flow("surrogates", parallelism=1)
    flow.read(ps.sources.Memory([0])).map(half_a_character, on_error="skip").write(ps.sinks.Null())
    (form,) = forms_of(flow.plan(1, check_sinks=False)).values()
    run = RangeRun(form)
    run.take([0, 1, 2])
    answer = answer_of(pa.Table.from_batches([answer_rows(run.answer())]))
    (back,) = answer.unprocessed
    assert back.records == [1]
    assert r"name \ud800" in back.why


# How often an operator got a record in Spark.
CALLS: Counter[tuple[str, Any]] = Counter()


def first_step(n: int) -> int:
    CALLS["first", n] += 1
    return n


def tens(n: int) -> int:
    CALLS["second", n] += 1
    return 10 * n


def numbers_from(n: int) -> list[int]:
    """Several of one, or none."""
    CALLS["second", n] += 1
    return [10 * n + i for i in range(n % 4)]


def third_step(fails: Callable[[int], bool], n: int) -> int:
    CALLS["third", n] += 1
    if fails(n):
        raise OSError(f"no such file: {n}")
    return n


def one_in_ninety(n: int) -> bool:
    return n % 90 == 10


def every_other(n: int) -> bool:
    return n % 20 < 10


def run_of_three(second: Callable[[Stream], Stream], fails: Callable[[int], bool], key: bool) -> RangeRun:
    """A range of three operators, of which the third fails, and perhaps the partial results of a count."""
    flow = Flow("three", parallelism=1)
    found = second(flow.read(ps.sources.Memory([0])).map(first_step, name="first"))
    found = found.map(partial(third_step, fails), name="third")
    (found.key_by(int).count() if key else found).write(ps.sinks.Null())
    (form,) = forms_of(flow.plan(1, check_sinks=False)).values()
    return RangeRun(form)


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("fails", [one_in_ninety, every_other])
@pytest.mark.parametrize("several", [False, True])
def test_operators_that_have_succeeded_are_not_run_again(
    several: bool, fails: Callable[[int], bool], key: bool
) -> None:
    """Neither in Spark nor in the task, which begins with the operator that has failed."""
    CALLS.clear()

    def second(stream: Stream) -> Stream:
        return stream.flat_map(numbers_from, name="second") if several else stream.map(tens, name="second")

    run = run_of_three(second, fails, key)
    numbers = list(range(3_000))
    for start in range(0, 3_000, run.piece):
        run.take(numbers[start : start + run.piece])
    assert all(CALLS[step, n] == 1 for step in ("first", "second") for n in numbers)
    made = [10 * n + i for n in numbers for i in (range(n % 4) if several else (0,))]
    answer = run.answer()
    back = [n for each in answer.unprocessed for n in each.records]
    assert {each.position for each in answer.unprocessed} == {3}
    assert back == [n for n in made if fails(n)]
    assert all("operator 'third' failed: OSError" in each.why for each in answer.unprocessed)
    if key:
        (partials,) = (each for each in answer.batches if isinstance(each, KeyedBatch))
        assert dict(zip(partials.keys, partials.values, strict=True)) == {n: 1 for n in made if not fails(n)}
    else:
        everything = [n for each in answer.batches for n in (each.records if isinstance(each, Unprocessed) else each)]
        assert everything == made, "in their order"
    assert answer.counts == {1: (3_000, 3_000), 2: (3_000, len(made)), 3: (len(made) - len(back),) * 2}


@pytest.mark.parametrize("policy", ["skip", "dead_letter"])
def test_a_record_that_fails_behind_others_goes_where_its_own_operator_says(policy: Any) -> None:
    """By the name of the operator that has failed, and as this operator got it."""
    fails = every_other
    unprocessed = 0
    for seed in range(8):
        flow = Flow("policies", parallelism=1)
        found = flow.read(ps.sources.Memory([0])).map(first_step, name="first")
        found = found.flat_map(numbers_from, name="second", on_error="skip")
        found = found.map(partial(third_step, fails), name="third", on_error=policy)
        found.write(ps.sinks.Collect(), name="out")
        if policy == "dead_letter":
            found.dead_letters().write(ps.sinks.Collect(), name="bad")
        outputs, bridge = run_diverted(flow, seed, inputs=list(range(400)))
        made = [10 * n + i for n in range(400) for i in range(n % 4)]
        assert outputs["out"] == [n for n in made if not fails(n)], seed
        failed = [n for n in made if fails(n)]
        unprocessed += bridge.unprocessed
        if policy == "dead_letter":
            assert [(letter.operator, letter.record) for letter in outputs["bad"]] == [("third", n) for n in failed]
        else:
            skipped = [stage.errors.skipped for task in bridge.tasks for stage in task.stages]
            assert sum(skipped) == len(failed)
    assert unprocessed > 100


def test_a_record_that_ends_the_job_is_named_as_the_operator_got_it() -> None:
    flow = Flow("failing", parallelism=1)
    found = flow.read(ps.sources.Memory([0])).map(tens, name="second")
    found.map(partial(third_step, one_in_ninety), name="third").write(ps.sinks.Collect(), name="out")
    with pytest.raises(RecordError, match=r"operator 'third' failed: OSError: no such file: 100\n +record: 100\n"):
        run_diverted(flow, 1, inputs=list(range(2, 400)))


def pieces_of(line: str) -> Iterator[str]:
    """What can be read once."""
    return iter(line.split())


def taken_from(pieces: Iterator[str]) -> list[str]:
    found = []
    for piece in pieces:
        if IN_SPARK and piece == "Dee":
            raise OSError("no such file")
        found.append(piece)
    return found


def test_what_an_operator_can_read_only_once_is_made_anew_when_another_record_fails() -> None:
    """A list's iterator can be sent, but an operator that has failed, or runs again, finds it read already."""
    unprocessed = 0
    for seed in range(8):
        flow = Flow("iterators", parallelism=1)
        pieces = flow.read(ps.sources.Memory(["x"])).map(pieces_of, name="pieces")
        pieces.flat_map(taken_from, name="taken").write(ps.sinks.Collect(), name="out")
        outputs, bridge = run_diverted(flow, seed, inputs=lines(seed))
        assert outputs["out"] == [word for line in lines(seed) for word in line.split()], seed
        unprocessed += bridge.unprocessed
    assert unprocessed > 100


@dataclasses.dataclass
class Boxed:
    inside: Any


class Named(NamedTuple):
    inside: Any


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"k": x}, lambda x: (1, x), Boxed, Named])
def test_whether_a_record_can_be_used_again(wrap: Callable[[Any], Any]) -> None:
    for value in (None, 1, 2.5, "a", b"b", datetime.now(timezone.utc), Decimal(1)):
        assert forms._can_be_used_again(wrap(value))
    for once in (iter([1]), (n for n in [1]), io.StringIO("a"), object()):
        assert not forms._can_be_used_again(wrap(once))
    box = Boxed(None)
    box.inside = box
    assert not forms._can_be_used_again(wrap(box))


def many(n: int) -> list[int]:
    CALLS["many", n] += 1
    return [n] * 5_000


def test_what_an_operator_makes_of_one_record_is_not_kept_for_many() -> None:
    """A range holds back what an operator makes until it has come to its end: for few records at a time."""
    flow = Flow("many", parallelism=1)
    found = flow.read(ps.sources.Memory([0])).flat_map(many, name="many").filter(is_first_of_its_kind, name="first")
    found.write(ps.sinks.Null())
    (form,) = forms_of(flow.plan(1, check_sinks=False)).values()
    run = RangeRun(form)
    CALLS.clear()
    SEEN.clear()
    run.take(list(range(300)))
    assert [n for batch in run.answer().batches for n in batch] == list(range(300))
    # How many records were made when one of them came to the next operator.
    assert max(made - n for n, made in SEEN.items()) <= 32


SEEN: dict[int, int] = {}


def is_first_of_its_kind(n: int) -> bool:
    if n in SEEN:
        return False
    SEEN[n] = sum(count for (step, _), count in CALLS.items() if step == "many")
    return True


@pytest.mark.parametrize(
    ("batches", "counts", "share"),
    [
        ([["x"] * 90, Unprocessed(1, ["y"] * 10, "")], {1: (90, 90)}, 0.1),
        # Of 1,000 words of 100 lines a tenth came back.
        ([Unprocessed(2, ["y"] * 100, "")], {1: (100, 1_000), 2: (900, 900)}, 0.1),
        # The selector of the key is no stage that counts.
        ([Unprocessed(3, ["y"] * 90, "")], {1: (100, 1_000), 2: (1_000, 900)}, 0.1),
        # Half of the lines, and half of the words of the other half.
        ([Unprocessed(1, ["y"] * 50, ""), Unprocessed(2, ["y"] * 10, "")], {1: (50, 20), 2: (10, 10)}, 0.75),
        ([Unprocessed(1, ["y"] * 100, "")], {}, 1.0),
        ([["x"] * 100], {}, 0.0),
    ],
)
def test_what_could_not_be_processed_in_spark_counts_by_its_share(batches: Any, counts: Any, share: float) -> None:
    assert diversion.lost_share(MicroBatchResult(batches, counts=counts), 100) == pytest.approx(share)


def test_a_task_stays_in_spark_although_more_comes_back_than_it_has_given() -> None:
    """Here one word in ten comes back, of lines of twenty."""

    def build(flow: Flow, inputs: list[str]) -> Stream:
        words = flow.read(ps.sources.Memory(inputs), name="lines").flat_map(str.split, name="words")
        return words.map(partial(third_there, 10), name="third")

    flow = Flow("stays", parallelism=1)
    build(flow, ["x"]).write(ps.sinks.Collect(), name="out")
    inputs = [" ".join(str(20 * i + j) for j in range(20)) for i in range(600)]
    outputs, bridge = run_diverted(flow, 1, toggle=False, inputs=inputs)
    assert outputs["out"] == [str(n) for n in range(12_000)]
    assert bridge.unprocessed > 600
    assert all(task.diversions.failed is None for task in bridge.tasks)


def third_there(one_in: int, word: str) -> str:
    if IN_SPARK and int(word) % one_in == 0:
        raise OSError(f"no such file: {word}")
    return word


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("from_source", [True, False])
def test_every_operator_counts_what_it_has_done_in_spark(seed: int, from_source: bool) -> None:
    """Also those inside of a range, those beside records that come back, and those before partial results."""
    flow = Flow("counts", parallelism=1)
    found = flow.read(ps.sources.Memory(["x"]), name="in")
    found = found if from_source else found.rebalance()
    found = found.map(not_there, name="place").flat_map(first_words, name="words")
    found = found.filter(lambda word: len(word) > 1, name="longer").map(upper, name="upper")
    found.key_by(lambda word: word).count(name="count", emit="final").write(ps.sinks.Collect(), name="out")
    _, bridge = run_diverted(flow, seed, inputs=lines(seed))
    assert bridge.unprocessed > 0
    words = [word for line in lines(seed) for word in (line + "!").split()[:2]]
    longer = sum(len(word) > 1 for word in words)
    number = len(lines(seed))
    expected = {"in": (number, number), "place": (number, number), "words": (number, len(words))}
    expected |= {"longer": (len(words), longer), "upper": (longer, longer)}
    counts: dict[str, tuple[int, int]] = {}
    for task in bridge.tasks:
        for stage in task.stages:
            counts[stage.context.operator.name] = stage.records_in, stage.records_out
    assert {name: counts[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("one_to_one", "known", "batches", "expected"),
    [
        # A map, a flat_map and a map as columns: what is counted at the ends reaches to the middle.
        ([True, True, False, True], {}, [["x"] * 30], [(10, 10), (10, 10), (10, 30), (30, 30)]),
        # Nobody knows what goes from one filter to the next.
        ([True, False, False], {}, [["x"] * 3], [(10, 10), (10, 0), (0, 3)]),
        # Columns, and then stages that count: two records come back from there, which these stages count later.
        (
            [True, False, True],
            {2: (18, 18)},
            [["x"] * 18, Unprocessed(2, ["y", "z"], "")],
            [(10, 10), (10, 20), (18, 18)],
        ),
        # Partial results say how many records there were only where every stage makes one of one.
        ([True, True], {}, [KeyedBatch(["k"], [10], True)], [(10, 10), (10, 10)]),
        ([True, False], {}, [KeyedBatch(["k"], [3], True)], [(10, 10), (10, 1)]),
        ([True, True], {}, [["x"] * 8, Unprocessed(0, ["y", "z"], "")], [(8, 8), (8, 8)]),
    ],
)
def test_counts_in_spark_follow_from_what_is_known(
    one_to_one: list[bool], known: dict[int, tuple[int, int]], batches: list[Any], expected: list[tuple[int, int]]
) -> None:
    answer = MicroBatchResult(batches, counts=known)
    assert pickle.loads(pickle.dumps(answer)).counts == known
    assert answer.counted(one_to_one, 10) == expected


@pytest.mark.parametrize("fails", [20, 1_000])
def test_a_task_returns_to_records_when_most_of_them_fail_in_spark(fails: int) -> None:
    task, bridge, divert = source_task([f"{n}" for n in range(1_000)], words=partial(split_there, fails))
    divert(0.0, 50)
    while task.runnable() or bridge.waiting:
        while task.runnable():
            task.step()
        bridge.answer_some()
    assert task.stages[0].records_in == 1_000
    if fails == 20:
        assert task.diversions.failed is None
        assert bridge.unprocessed == 20
    else:
        assert task.diversions.failed is not None
        (_, why) = task.diversions.failed
        assert "records failed in Spark, the last ones by: operator 'words' failed: OSError" in why
        assert bridge.unprocessed < 300, "the rest of the records is not tried there"


def lengths_of(text: str) -> int:
    """Opens the file that a text names."""
    with open(text, encoding="utf-8") as file:
        return len(file.read())


@pytest.mark.parametrize("function", [int, lengths_of])
def test_the_reason_of_a_record_that_comes_back_advises_nothing_that_the_operator_has(function: Any) -> None:
    """The operator has a policy already, and a record that fails in Spark may well pass in its task."""
    flow = Flow("reasons", parallelism=1)
    numbers = flow.read(ps.sources.Memory(["1"])).map(function, name="number", on_error="dead_letter")
    numbers.write(ps.sinks.Null())
    numbers.key_by(lambda number: 1 // number).count().write(ps.sinks.Null())
    (form,) = forms_of(flow.plan(1, check_sinks=False)).values()
    run = RangeRun(form)
    run.take(["/no/such", "0"])
    unprocessed = run.answer().unprocessed
    assert unprocessed
    for each in unprocessed:
        assert "give the operator" not in each.why
        assert "can then be resumed" not in each.why
        assert each.why.endswith("to its task, where the operator's on_error decides if it fails again")


def event_time(record: dict[str, Any]) -> int:
    return int(record["t"])


@pytest.mark.parametrize("parallelism", [1, 2])
def test_windows_get_their_watermarks_from_the_answers(parallelism: int) -> None:
    for seed in range(25):
        rng = random.Random(seed)
        records = [{"k": rng.randrange(4), "t": 10 * i + rng.randrange(-30, 30), "n": i} for i in range(400)]
        flow = Flow("windows", parallelism=parallelism)
        times = flow.read(ps.sources.Memory([{"k": 0, "t": 0}])).watermark(event_time, out_of_orderness_s=0.1)
        windows = times.key_by("k").window(ps.Tumbling(0.5)).sum("n", name="sums")
        windows.write(ps.sinks.Collect(), name="out")
        outputs, _ = run_diverted(flow, seed, lost=0.1, inputs=records)
        expected: Counter[tuple[int, int]] = Counter()
        for record in records:
            expected[record["k"], record["t"] // 500 * 500] += record["n"]
        assert sorted((key, start, total) for key, start, _, total in outputs["out"]) == sorted(
            (key, start, total) for (key, start), total in expected.items()
        ), seed


def keep(record: dict[str, Any]) -> bool:
    return bool(record["n"] % 7)


@pytest.mark.parametrize("lost", [0.0, 0.2])
def test_watermarks_that_come_by_channels_keep_their_place_among_micro_batches(lost: float) -> None:
    """One that overtook a micro-batch would make its records late, and with lateness 0 they would be lost."""
    answered = 0
    for seed in range(25):
        records = [{"k": i % 3, "t": 10 * i, "n": i} for i in range(1200)]
        flow = Flow("marks", parallelism=2)
        times = flow.read(ps.sources.Memory([{"k": 0, "t": 0, "n": 0}]), parallelism=1).watermark("t", parallelism=1)
        windows = times.rebalance().filter(keep, name="keep").key_by("k").window(ps.Tumbling(0.5), time="t").count()
        windows.write(ps.sinks.Collect(), name="out")
        outputs, bridge = run_diverted(flow, seed, lost=lost, inputs=records)
        expected = Counter((r["k"], r["t"] // 500 * 500) for r in records if keep(r))
        assert sorted((key, start, n) for key, start, _, n in outputs["out"]) == sorted(
            (key, start, n) for (key, start), n in expected.items()
        ), seed
        answered += bridge.answered
    assert answered > 50


def source_task(
    inputs: list[str],
    *,
    lost: float = 0.0,
    clock: Callable[[], int] | None = None,
    words: Callable[[str], list[str]] = str.split,
    **settings: Any,
) -> tuple[Task, Here, Callable[..., None]]:
    """The open source task of `counted(1)`, a bridge for its range, and a function that diverts it. By default a second
    passes from one look at the clock to the next."""
    flow = counted(1, words)
    flow.graph.operators = _replace(flow, _travelled(flow.graph), inputs)
    plan = flow.plan(1)
    (form,) = forms_of(plan).values()
    bridge = Here({form.chain: form}, random.Random(1), lost, 1)
    seconds = itertools.count(step=10**9)
    network = MemoryNetwork(1).transport(0)
    now = clock or (lambda: next(seconds))
    wiring = build(plan, {0: 0}, 0, network, clock=now, report=lambda _: None, **settings)
    (task,) = wiring.tasks.values()
    assert task.input.is_read
    task.open()

    def divert(interval_s: float, rows_max: int = ROWS_MAX, *, columns: bool = False) -> None:
        task.divert(DivertRequest(form.chain, form.position, interval_s, columns, rows_max), bridge, network.wake)

    return task, bridge, divert


def test_a_failed_micro_batch_ends_the_diversion_and_says_why() -> None:
    task, bridge, divert = source_task(lines(1), lost=1.0)
    divert(0.1, columns=True)
    while task.diversion is not None:
        if task.runnable():
            task.step()
        bridge.answer_some()
    assert task.diversions.failed is not None
    assert task.diversions.failed[1] == "Lost: gone"
    assert task.stages[0].records_out > 0, "what was under way has been run here"


def test_an_epoch_passes_when_what_was_read_before_its_barrier_is_answered_and_saves_no_more() -> None:
    saved: list[Snapshot] = []
    task, bridge, divert = source_task(lines(1, 100), output_caches=OutputCaches(), on_snapshot=saved.append)
    divert(0.0, 10)
    assert task.state == "DIVERTED", "a switch waits for no barrier"
    task.trigger(1)
    task.step()
    assert [snapshot.epoch for snapshot in saved] == [1], "nothing is under way before this barrier"
    task.step()
    task.trigger(2)
    while task.runnable():
        task.step()
    assert len(bridge.waiting) == UNDER_WAY_MAX, "behind the barrier too, as far as may be under way"
    assert len(saved) == 1
    while len(saved) == 1:
        bridge.answer_some()
        while task.runnable():
            task.step()
    state = saved[1].states["lines"][0]
    assert state is not None
    (split,) = state.own
    assert split.offset == saved[1].states["lines"][1][0], "what is saved as read is what has been answered"
    assert split.offset < task.input.reader.offsets()[split.name], "it has read on behind the barrier"


def test_a_barrier_passes_what_a_source_has_gathered_and_saves_the_offsets_before_it() -> None:
    """Else a micro-batch could not gather for longer than an epoch."""
    saved: list[Snapshot] = []
    task, bridge, divert = source_task(
        lines(1, 3000), clock=lambda: 0, output_caches=OutputCaches(), on_snapshot=saved.append
    )

    def steps() -> None:
        while task.runnable():
            task.step()

    divert(10.0, 1000)
    steps()
    assert task.diversion is not None
    assert (task.diversion.records, task.diversion.gathered) == (1125, 1000)
    task.trigger(1)
    steps()
    assert not saved, "what left before the barrier is not answered"
    while not saved:
        bridge.answer_some()
        steps()
    state = saved[0].states["lines"][0]
    assert state is not None
    assert [split.offset for split in state.own] == [1125] == [saved[0].states["lines"][1][0]]


def test_a_diverted_task_that_is_to_stop_takes_and_sends_nothing_after_the_barrier_until_it_continues() -> None:
    saved: list[Snapshot] = []
    task, bridge, divert = source_task(lines(1, 300), output_caches=OutputCaches(), on_snapshot=saved.append)

    def answer_all() -> None:
        while task.runnable() or bridge.waiting:
            if task.runnable():
                task.step()
            bridge.answer_some()

    divert(0.0, 10)
    task.step()
    task.park(1)
    task.trigger(1)
    answer_all()
    (snapshot,) = saved
    assert snapshot.parked
    state = snapshot.states["lines"][0]
    assert state is not None
    assert [split.offset for split in state.own] == [task.stages[0].records_in], "nothing more was sent"
    assert task.ready_in() is None
    task.undivert()
    assert not task.runnable(), "it does not return to records either"
    task.unpark()
    answer_all()
    assert task.stages[0].records_in == 300


def test_the_first_micro_batch_is_small_and_the_next_ones_follow_at_once() -> None:
    task, bridge, divert = source_task(lines(1, 500), clock=lambda: 0)
    divert(10.0, 80)
    while task.runnable():
        task.step()
    assert [len(as_records(columns)) for _, _, columns, _ in bridge.waiting] == [10, *[80] * (UNDER_WAY_MAX - 1)]


class Inside:
    """The open task of a flow that is not a source's, which a test gives its input."""

    def __init__(
        self,
        function: Callable[[str], str] = upper,
        marked: bool = False,
        batches: Callable[[list[str]], list[str]] | None = None,
    ) -> None:
        """`function`: what the task does, and then `batches`. `marked`: the source's chain makes watermarks."""
        flow = Flow("inside", parallelism=1)
        read = flow.read(ps.sources.Memory([0]), name="numbers")
        numbers = (read.watermark(int, name="times") if marked else read).rebalance()
        found = numbers.map(function, name="upper")
        if batches is not None:
            found = found.map_batches(batches, batch_size=64, name="batches")
        found.write(ps.sinks.Collect(), name="out")
        plan = flow.plan(1)
        self.form = forms_of(plan)[1]
        self.bridge = Here({1: self.form}, random.Random(1), 0.0, 1)
        self.now = 0
        self.out: list[Any] = []
        self.saved: list[Snapshot] = []
        self.network = MemoryNetwork(1).transport(0)
        wiring = build(
            plan,
            {0: 0, 1: 0},
            0,
            self.network,
            clock=lambda: self.now,
            report=lambda reported: self.out.extend(reported.records),
            output_caches=OutputCaches(),
            on_snapshot=self.saved.append,
            steps=Steps(stopwatch=lambda: CLOCK[0]),
        )
        self.task = wiring.tasks[1]
        self.task.open()
        (self.channel,) = self.task.input.channels

    def divert(self, interval_s: float, rows_max: int, position: int | None = None) -> None:
        """Diverts the task. `position`: where the range ends, if not as late as it can."""
        divert = DivertRequest(1, position or self.form.position, interval_s, True, rows_max)
        self.task.divert(divert, self.bridge, self.network.wake)

    def receive(self, count: int) -> None:
        """Gives the task so many records, and lets it do all that it can."""
        self.task.input.receive(self.channel, ["a"] * count, 0, 0)
        self.run()

    def run(self) -> None:
        """Lets the task do all that it can."""
        while self.task.runnable():
            self.task.step()

    def answer(self) -> None:
        """Answers one micro-batch."""
        self.bridge.answer_some()
        self.run()

    @property
    def sizes(self) -> list[int]:
        """The records of each micro-batch that waits for an answer."""
        return [len(as_records(columns)) for _, _, columns, _ in self.bridge.waiting]

    @property
    def counts(self) -> tuple[int, int]:
        """The records that wait for the task, and those that are under way, as the load says."""
        load = task_load(self.task, lambda channel: None)
        return load["queued"], load["under_way"]


def test_a_task_inside_a_flow_gathers_until_its_time_has_come() -> None:
    """However little its inbox may hold: an inbox has some thousand records, and a burst a hundred times as many."""
    inside = Inside()
    inside.divert(1.0, 100)
    inside.receive(5)
    assert inside.sizes == [5], "the first one leaves at once"
    for _ in range(3):
        inside.receive(20)
    assert inside.sizes == [5]
    assert inside.task.input.queued == 0, "the inbox is free for more"
    assert inside.counts == (60, 5), "each record counts once"
    ready_in = inside.task.ready_in()
    assert ready_in == 1.0
    inside.now = 1_000_000_000
    inside.run()
    assert inside.sizes == [5, 60]
    assert inside.counts == (0, 65)


def test_a_full_micro_batch_leaves_at_once_and_no_more_is_gathered_than_fits_into_one() -> None:
    inside = Inside()
    inside.divert(1.0, 100)
    inside.receive(5)
    inside.receive(130)
    assert inside.sizes == [5, 100]
    inside.receive(200)
    assert inside.counts == (230, 105)
    assert inside.task.diversion is not None
    assert inside.task.diversion.gathered == 100, "the rest stays in the inbox, whose senders it holds up"
    inside.bridge.rng.randrange = lambda *_: 0  # type: ignore[method-assign, assignment]
    inside.answer()
    assert inside.sizes == [100, 100]
    assert inside.counts == (130, 200)
    assert inside.out == ["A"] * 5


def test_few_large_records_fill_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diversion, "BYTES_MAX", 10_000)
    inside = Inside()
    inside.divert(1.0, 1_000)
    inside.receive(1)
    for _ in range(4):
        inside.task.input.receive(inside.channel, ["x" * 6_000], 0, 0)
        inside.run()
    assert inside.sizes == [1, 2]
    assert inside.counts == (2, 3)


def test_what_was_gathered_before_a_barrier_leaves_before_it() -> None:
    inside = Inside()
    inside.divert(1.0, 100)
    inside.receive(5)
    inside.receive(20)
    inside.task.input.receive_barrier(inside.channel, 1)
    inside.receive(7)
    assert inside.sizes == [5, 20], "it does not wait for its time"
    assert inside.counts == (7, 25)
    assert inside.saved == []
    inside.answer()
    inside.answer()
    (snapshot,) = inside.saved
    assert snapshot.states["upper"][1][:2] == (25, 25), "what came after the barrier is not in the epoch"


def test_a_watermark_that_comes_while_records_gather_follows_them() -> None:
    inside = Inside(marked=True)
    inside.divert(1.0, 100)
    inside.receive(5)
    inside.receive(20)
    for mark in (1_000, 2_000):
        inside.task.input.receive_watermark(inside.channel, mark)
    inside.receive(7)
    inside.now = 1_000_000_000
    inside.run()
    assert inside.sizes == [5, 27]
    assert inside.task.passage.mark_in is None
    inside.answer()
    inside.answer()
    assert inside.task.passage.mark_in == 2_000
    assert len(inside.out) == 32


def test_a_barrier_waits_while_what_was_gathered_before_it_may_not_leave() -> None:
    inside = Inside()
    inside.divert(0.0, 80)
    for _ in range(UNDER_WAY_MAX):
        inside.receive(10)
    inside.receive(20)
    inside.task.input.receive_barrier(inside.channel, 1)
    inside.receive(7)
    assert inside.sizes == [10] * UNDER_WAY_MAX
    assert inside.counts == (27, 20), "what follows the barrier is held back in the inbox until then"
    while inside.bridge.waiting:
        inside.answer()
    assert len(inside.saved) == 1
    assert inside.out == ["A"] * 47


def test_a_task_that_returns_processes_what_it_has_gathered() -> None:
    """A last micro-batch would only make it return later."""
    inside = Inside()
    inside.divert(1.0, 100)
    inside.receive(5)
    inside.receive(20)
    inside.task.undivert()
    inside.run()
    assert inside.sizes == [5]
    assert inside.out == []
    assert inside.counts == (0, 25)
    inside.answer()
    assert inside.task.diversion is None
    assert inside.out == ["A"] * 25
    assert inside.task.diversions.answered == 5


def slowly(line: str) -> str:
    if not IN_SPARK:
        CLOCK[0] += 50_000_000
    return line


CLOCK = [0]  # in ns, of the stopwatch of steps


@pytest.mark.parametrize("lost", [True, False])
def test_other_tasks_have_their_turn_while_a_slow_task_works_off_what_it_was_given_back(lost: bool) -> None:
    """The records of a lost micro-batch, and those that were gathered, are processed in steps of the usual size.
    Before, Spark has answered many records within one step, which says nothing about how long a record takes here."""
    inside = Inside(slowly)
    inside.divert(0.0, 2000)
    for count in (10, 1000, 1000, 1000):
        inside.receive(count)
        while inside.bridge.waiting:
            inside.answer()
    inside.divert(1.0, 2000)
    inside.receive(300)
    inside.bridge.lost = float(lost)
    inside.receive(200)
    assert inside.counts == (200, 300)
    if not lost:
        inside.task.undivert()
    inside.bridge.answer_some()
    longest = 0
    while inside.task.runnable():
        before = CLOCK[0]
        inside.task.step()
        assert sum(inside.counts) + len(inside.out) == 3510, "all that is not done waits"
        longest = max(longest, CLOCK[0] - before)
    while inside.bridge.waiting:
        inside.answer()
    assert inside.out == ["a"] * 3510
    assert 50_000_000 <= longest <= 5 * 50_000_000


def all_of(records: list[str]) -> list[str]:
    return records


def test_an_answer_passes_operators_that_gather_in_growing_parts() -> None:
    """They follow the part of the range that is in Spark. What they can do in a step is learned part by part."""
    inside = Inside(batches=all_of)
    inside.divert(0.0, 5000, position=1)
    parts: list[int] = []
    run = inside.task.passage.run

    def noted(batch: Any, first: int) -> Any:
        if first == 1:
            parts.append(len(batch))
        return run(batch, first)

    inside.task.passage.run = noted  # type: ignore[method-assign]
    for count in (10, 2000):
        inside.receive(count)
        while inside.bridge.waiting:
            inside.answer()
    inside.run()
    assert inside.out == ["A"] * 2010
    assert sum(parts) == 2010
    assert max(parts) >= 8
    assert parts[0] == 1


def test_what_was_gathered_leaves_when_the_input_has_ended() -> None:
    inside = Inside()
    inside.divert(1.0, 100)
    inside.receive(5)
    inside.receive(20)
    inside.task.input.receive_end(inside.channel)
    inside.run()
    assert inside.sizes == [5, 20]
    while inside.bridge.waiting:
        inside.answer()
    assert inside.out == ["A"] * 25
    assert inside.task.finished


def test_a_source_is_read_while_its_micro_batch_gathers() -> None:
    """What its buffers hold is not all that comes in an interval."""
    now = [0]
    task, bridge, divert = source_task(lines(1, 500), clock=lambda: now[0])
    given = iter([10, 20, 30, 0])
    read = task.input.reader.read
    task.input.reader.read = lambda limit: read(min(limit, next(given, 0)))  # type: ignore[method-assign]
    task.input.reader.ready_in = lambda: 1.0  # type: ignore[method-assign]
    divert(1.0, 400)
    for _ in range(4):
        while task.runnable():
            task.step()
        assert task.ready_in() is not None
        now[0] += 125_000_000
    assert [len(as_records(columns)) for _, _, columns, _ in bridge.waiting] == [10]
    assert task.gathered == 50
    now[0] = 1_000_000_000
    task.step()
    assert [len(as_records(columns)) for _, _, columns, _ in bridge.waiting] == [10, 50]


def test_the_last_of_several_watermarks_follows_what_was_gathered() -> None:
    """But the idleness of all channels does not take back what they have said before."""
    gathered = diversion._Gathered()
    for value in (1, 2, IDLE, IDLE):
        gathered.mark(Watermark(value))
    assert [mark.value for mark in gathered.marks] == [2, IDLE]
    gathered.mark(Watermark(3))
    assert [mark.value for mark in gathered.marks] == [3]


def test_columns_and_records_are_gathered_together() -> None:
    import pyarrow as pa

    columns = pa.record_batch([pa.array(["a", "b"])], ["value"])
    for parts in ([columns, ["c"]], [["c"], columns], [columns, columns, ["c"]]):
        gathered = diversion._Gathered()
        for part in parts:
            gathered.add(part, len(part), 0)
        expected = [record for part in parts for record in (part if isinstance(part, list) else rows_of(part))]
        assert gathered.input() == expected
        assert gathered.records == len(expected)
    assert parts[-1] == ["c"], "it may be somebody else's list too"


def test_what_a_micro_batch_is_made_of_comes_back_from_arrow() -> None:
    for records in ([], ["a", "é"], [("k", 1), ("l", None)], list(range(5000)), [{"a": 1}, {"b": [1, {"c": 2}]}]):
        assert as_records(as_columns(records)) == records


def test_each_core_of_spark_gets_some_of_a_micro_batch() -> None:
    """Of a function that takes a millisecond, two thousand records are much work for one core."""
    assert as_columns(list(range(2_000))).num_rows > 60
    assert as_columns(list(range(300))).num_rows == 10


def test_the_range_of_a_chain_and_why_there_is_none() -> None:
    flow = Flow("ranges", parallelism=2)
    words = flow.read(ps.sources.Memory(["x"]), name="lines").flat_map(str.split, name="words")
    words.key_by(str.lower).process(lambda ctx, key, record: None, name="own").write(ps.sinks.Null(), name="out")
    plan = flow.plan(1)
    first, second = (range_form(plan, chain) for chain in plan.chains)
    assert isinstance(first, RangeForm)
    assert (first.names, first.position, first.combiner) == (["words"], 2, None)
    assert second == "own: its state and timers are the function's own"
    fused = counted(1).plan(1)
    form = range_form(fused, fused.chains[0])
    assert isinstance(form, RangeForm)
    assert (form.names, form.position, type(form.combiner).__name__) == (["words"], 3, "Count")
    plain = Flow("plain", parallelism=1)
    plain.read(ps.sources.Memory([1]), name="numbers").write(ps.sinks.Null(), name="out")
    plan = plain.plan(1)
    assert range_form(plan, plan.chains[0]) == "out: it writes, by epochs"


@pytest.mark.parametrize("encoded", [False, True])
def test_a_function_of_batches_gets_as_many_records_in_spark_as_it_takes(encoded: bool) -> None:
    calls: list[int] = []

    def call(numbers: list[Any]) -> list[Any]:
        calls.append(len(numbers))
        return numbers

    flow = Flow("batches", parallelism=1)
    flow.read(ps.sources.Memory([0])).map_batches(call, batch_size=4096, batch_format="list").write(ps.sinks.Null())
    (form,) = forms_of(flow.plan(1, check_sinks=False)).values()
    run = RangeRun(form)
    records: list[Any] = [{"n": n} for n in range(10_000)]
    take_in_pieces(run, as_columns(records) if encoded else pa.RecordBatch.from_pylist(records), as_records)
    assert [record for batch in run.answer().batches for record in batch] == records  # type: ignore[union-attr]
    assert calls == [4096, 4096, 10_000 - 2 * 4096]


@pytest.mark.parametrize("records", [1, 500, 9_000, 60_000, 400_000])
@pytest.mark.parametrize("cores", [2, 8, 20])
def test_cores_get_about_as_many_records_of_a_micro_batch(records: int, cores: int) -> None:
    columns = as_columns(list(range(records)))
    rows = -(-columns.num_rows // cores)
    shares = [len(as_records(columns.slice(start, rows))) for start in range(0, columns.num_rows, rows)]
    assert sum(shares) == records
    assert max(shares) <= max(256, 1.3 * records / cores)
