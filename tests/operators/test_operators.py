"""Every operator's stage against plain Python, with records that fail and outputs that never end."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.runtime.errors import FlowError, PenstockError, RecordError
from penstock.runtime.operators.aggregated import Aggregated, Emit, Reduce
from penstock.runtime.operators.base import EXPAND_RECORDS_MAX, Operator, Stage, StageContext
from penstock.runtime.operators.batches import MapBatches
from penstock.runtime.operators.process import ProcessContext, ProcessFunction
from penstock.runtime.operators.processing import Processing
from penstock.runtime.operators.stateless import Filter, FlatMap, KeyBy, Map
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.userfunc import DEAD_LETTERS
from penstock.runtime.state.aggregate import Count, Mean, Sum

MANY = 200_000


def start(operator: Operator) -> Stage:
    stage = operator.stage(StageContext(operator))
    stage.open()
    return stage


def run(stage: Stage, batch: Batch) -> list[Any]:
    """All outputs of a batch; pieces are bounded, and never empty."""
    if not stage.expands:
        out = stage.run(batch)
        return list(out) if isinstance(out, list) else list(zip(out.keys, out.values, strict=True))
    records: list[Any] = []
    for piece in stage.expand(batch):
        assert 0 < len(piece) <= EXPAND_RECORDS_MAX
        assert isinstance(piece, list)
        records += piece
    return records


def letters(stage: Stage) -> list[Any]:
    return [letter.record for letter in stage.context.side[DEAD_LETTERS]]


def keyed(records: Iterable[tuple[Any, Any]]) -> KeyedBatch:
    pairs = list(records)
    return KeyedBatch([key for key, _ in pairs], [value for _, value in pairs])


# --- flat_map: how an expansion can go wrong --------------------------------------------------------------------


def unfold(record: tuple[int, str, int]) -> Any:
    """What the record says: `n` outputs as a list or from a generator, which may fail after them."""
    number, how, n = record
    if how == "list":
        return [number] * n
    if how == "generator":
        return (number for _ in range(n))
    if how == "fails midway":
        return _fails(number, n)
    if how == "none":
        return None
    if how == "stop":
        raise StopIteration
    raise ValueError(number)


def _fails(number: int, n: int) -> Iterator[int]:
    for _ in range(n):
        yield number
    raise ValueError(number)


_HOW = ("list", "generator", "fails midway", "none", "stop", "raises")
unfoldings = st.lists(
    st.tuples(st.integers(0, 99), st.sampled_from(_HOW), st.sampled_from((0, 1, 3, EXPAND_RECORDS_MAX, 5000))),
    max_size=6,
)


@given(unfoldings)
@example([(1, "stop", 0)])
@example([(1, "list", EXPAND_RECORDS_MAX), (2, "stop", 0)])
@example([(1, "none", 0), (2, "list", 1)])
def test_flat_map_loses_nothing_but_what_fails(records: list[tuple[int, str, int]]) -> None:
    stage = start(FlatMap(unfold, on_error="dead_letter"))
    out = run(stage, records)
    made = {"list", "generator", "fails midway"}
    assert out == [number for number, how, n in records if how in made for _ in range(n)]
    assert letters(stage) == [record for record in records if record[1] not in ("list", "generator")]


@given(unfoldings)
def test_flat_map_that_fails_names_the_record(records: list[tuple[int, str, int]]) -> None:
    bad = [record for record in records if record[1] not in ("list", "generator")]
    stage = start(FlatMap(unfold))
    if bad:
        with pytest.raises(RecordError) as caught:
            run(stage, records)
        assert caught.value.record == repr(bad[0])
    else:
        run(stage, records)


def test_flat_map_is_read_lazily() -> None:
    asked = 0

    def count(record: int) -> Iterator[int]:
        nonlocal asked
        for i in range(MANY):
            asked += 1
            yield i

    pieces = start(FlatMap(count)).expand([0])
    next(pieces)
    assert asked <= EXPAND_RECORDS_MAX + 1


@pytest.mark.parametrize(
    "operator",
    [
        FlatMap(lambda n: range(10**9, 10**9 + n)),
        MapBatches(lambda batch: iter(range(10**9, 10**9 + batch[0]))),
        Processing(lambda ctx, key, n: range(10**9, 10**9 + n)),
    ],
    ids=lambda operator: operator.kind,
)
def test_a_record_that_becomes_many_never_takes_memory_for_many(operator: Operator) -> None:
    stage = start(operator)
    batch: Batch = keyed([(0, MANY)]) if operator.keyed else [MANY]
    tracemalloc.start()
    try:
        assert sum(map(len, stage.expand(batch))) == MANY
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * EXPAND_RECORDS_MAX * 40  # all of them would take some 8 MB


# --- map, filter, key_by, map_batches ---------------------------------------------------------------------------


@given(st.lists(st.integers(-3, 3)))
def test_map_filter_and_key_by_are_python_s_own(records: list[int]) -> None:
    def invert(n: int) -> float:
        return 6 / n

    whole = [n for n in records if n]
    for operator, expected in (
        (Map(invert, on_error="dead_letter"), [6 / n for n in whole]),
        (Filter(lambda n: 6 / n > 2, on_error="dead_letter"), [n for n in whole if 6 / n > 2]),
        (KeyBy(invert, on_error="dead_letter"), [(6 / n, n) for n in whole]),
    ):
        stage = start(operator)
        assert run(stage, records) == expected
        assert len(letters(stage)) == len(records) - len(whole) == stage.errors.skipped


@given(st.lists(st.sampled_from([1, 2.5, "a", None, float("nan"), ("a", float("nan")), [1]])))
def test_fused_keys_are_those_that_an_exchange_would_take(records: list[Any]) -> None:
    def is_key(record: Any) -> bool:
        return not isinstance(record, (list, tuple)) and record == record

    stage = start(KeyBy(lambda record: record, on_error="dead_letter"))
    assert [value for _, value in run(stage, records)] == [record for record in records if is_key(record)]
    assert letters(stage) == [record for record in records if not is_key(record)]
    with pytest.raises(RecordError, match=r"(?s)'key_by'.*KeyTypeError: a key is NaN, or has NaN in it.*record: nan"):
        run(start(KeyBy(lambda record: record, name="key_by")), [1.0, float("nan")])


@given(st.lists(st.integers(0, 5)), st.integers(1, 7))
def test_map_batches_sees_every_record_once_in_calls_of_bounded_size(records: list[int], size: int) -> None:
    calls: list[list[int]] = []

    def double(batch: list[int]) -> list[int]:
        calls.append(batch)
        return [2 * n for n in batch]

    assert run(start(MapBatches(double, size)), records) == [2 * n for n in records]
    assert list(chain.from_iterable(calls)) == records
    assert all(1 <= len(call) <= size for call in calls)


def test_map_batches_counts_all_records_of_a_call_that_failed() -> None:
    stage = start(MapBatches(lambda batch: [1 // n for n in batch], 3, on_error="dead_letter"))
    assert run(stage, [1, 1, 1, 1, 0, 1, 1]) == [1, 1, 1, 1]
    assert letters(stage) == [[1, 0, 1]]
    assert stage.errors.skipped == 3  # `skipped` counts records


@pytest.mark.parametrize("batch_format", ["list", "arrow"])
def test_map_batches_that_returns_none_says_so(batch_format: Any) -> None:
    with pytest.raises(RecordError, match="returned None"):
        run(start(MapBatches(lambda batch: None, batch_format=batch_format)), [{"a": 1}])


def test_map_batches_as_arrow_keeps_all_fields_of_all_records() -> None:
    records = [{"a": 1}, {"a": 2, "b": "x"}, {"b": "y"}]
    out = run(start(MapBatches(lambda table: table, batch_format="arrow")), records)
    assert out == [{"a": 1, "b": None}, {"a": 2, "b": "x"}, {"a": None, "b": "y"}]


# --- keyed operators --------------------------------------------------------------------------------------------

pairs = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-4, 4)), max_size=30)


def cut(records: list[Any], at: list[int]) -> list[list[Any]]:
    edges = [0, *sorted(min(i, len(records)) for i in at), len(records)]
    return [records[a:b] for a, b in pairwise(edges)]


@given(pairs, st.lists(st.integers(0, 30), max_size=4))
def test_when_an_aggregate_emits(records: list[tuple[str, int]], at: list[int]) -> None:
    every, latest, final = (start(Aggregated(Sum(), emit)) for emit in ("every", "latest", "final"))
    totals: dict[str, int] = {}
    for batch in cut(records, at):
        updates = []
        for key, value in batch:
            totals[key] = totals.get(key, 0) + value
            updates.append((key, totals[key]))
        assert run(every, keyed(batch)) == updates
        assert run(latest, keyed(batch)) == [(key, totals[key]) for key in dict.fromkeys(key for key, _ in batch)]
        assert run(final, keyed(batch)) == []
    assert list(every.finish()) == list(latest.finish()) == []
    assert [pair for piece in final.finish() for pair in piece] == list(totals.items())


@given(pairs, st.sampled_from(("latest", "every", "final")))
def test_records_that_an_aggregate_cannot_take_are_let_go_alone(records: list[tuple[str, int]], emit: Emit) -> None:
    stage = start(Aggregated(Sum(lambda n: 12 // n), emit, on_error="dead_letter"))
    out = run(stage, keyed(records)) + [pair for piece in stage.finish() for pair in piece]
    totals: dict[str, int] = {}
    for key, n in records:
        if n:
            totals[key] = totals.get(key, 0) + 12 // n
    assert dict(out) == totals
    assert letters(stage) == [(key, n) for key, n in records if not n]


@given(pairs, st.sampled_from(("latest", "every", "final")))
def test_reduce_folds_in_order(records: list[tuple[str, int]], emit: Emit) -> None:
    def fold(state: Any, n: int) -> Any:
        if n == 0:
            raise StopIteration
        return (state, n)

    stage = start(Reduce(fold, emit, on_error="skip"))
    out = run(stage, keyed(records)) + [pair for piece in stage.finish() for pair in piece]
    state: dict[str, Any] = {}
    failed = 0
    for key, n in records:
        if key not in state:
            state[key] = n
        elif n == 0:
            failed += 1
        else:
            state[key] = (state[key], n)
    assert dict(out) == state
    assert stage.errors.skipped == failed


@pytest.mark.parametrize("emit", ["latest", "every", "final"])
def test_a_key_that_cannot_be_hashed_is_a_failed_record(emit: Emit) -> None:
    stage = start(Aggregated(Count(), emit, on_error="skip"))
    out = run(stage, keyed([("a", 1), (["b"], 2), ("a", 3)])) + [pair for piece in stage.finish() for pair in piece]
    assert dict(out) == {"a": 2}
    assert stage.errors.skipped == 1


def test_a_result_that_cannot_be_made_names_the_operator() -> None:
    """The mean of whole numbers that no float can hold."""
    stage = start(Aggregated(Mean(), "latest", name="average"))
    with pytest.raises(RecordError, match="average"):
        run(stage, keyed([("a", 10**400)]))


@given(pairs)
def test_results_that_were_emitted_never_change(records: list[tuple[str, int]]) -> None:
    """A sum of lists: what was emitted is not the state that grows further, nor the user's own record."""
    values = [[n] for _, n in records]
    stage = start(Aggregated(Sum(), "every"))
    out = run(stage, keyed([(key, value) for (key, _), value in zip(records, values, strict=True)]))
    totals: dict[str, list[int]] = {}
    expected = []
    for key, n in records:
        totals[key] = [*totals.get(key, []), n]
        expected.append((key, totals[key]))
    assert out == expected
    assert values == [[n] for _, n in records]


# --- process ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 9)), max_size=20))
def test_process_with_state_side_output_and_failures(records: list[tuple[str, int]]) -> None:
    def work(ctx: ProcessContext, key: str, n: int) -> Iterable[Any] | None:
        if n < 0:
            raise StopIteration if n == -1 else ValueError
        seen = ctx.get(0) + 1
        ctx.set(seen)
        if n == 9:
            ctx.clear()
        if n % 2:
            ctx.output("odd", (key, n))
            return None
        ctx.emit((key, "emitted", n))
        return iter([(key, seen)])

    stage = start(Processing(work, outputs=("odd",), on_error="dead_letter"))
    out = run(stage, keyed(records))
    seen: dict[str, int] = {}
    expected: list[Any] = []
    for key, n in records:
        if n >= 0:
            seen[key] = seen.get(key, 0) + 1
            expected += [] if n % 2 else [(key, "emitted", n), (key, seen[key])]
            if n == 9:
                del seen[key]
    assert out == expected
    assert stage.context.side["odd"] == [(key, n) for key, n in records if n >= 0 and n % 2]
    assert letters(stage) == [n for _, n in records if n < 0]


def test_what_emit_was_given_leaves_in_bounded_pieces() -> None:
    stage = start(Processing(lambda ctx, key, n: ctx.emit(*range(n))))
    assert run(stage, keyed([(0, 3 * EXPAND_RECORDS_MAX), (0, 5)])) == [*range(3 * EXPAND_RECORDS_MAX), *range(5)]


def test_pieces_are_bounded_when_outputs_come_both_ways() -> None:
    def work(ctx: ProcessContext, key: int, n: int) -> Iterable[int]:
        ctx.emit(*range(n))
        return range(EXPAND_RECORDS_MAX)

    stage = start(Processing(work))
    assert len(run(stage, keyed([(0, EXPAND_RECORDS_MAX - 1)]))) == 2 * EXPAND_RECORDS_MAX - 1


def test_an_unknown_side_output_says_what_there_is() -> None:
    stage = start(Processing(lambda ctx, key, n: ctx.output("late", n), outputs=("odd",)))
    with pytest.raises(RecordError, match=r"no side output 'late' \(it has: 'odd'\)") as caught:
        run(stage, keyed([(0, 1)]))
    assert isinstance(caught.value.__cause__, PenstockError)


class Summary(ProcessFunction):
    """Emits its state at the end, by whichever way `how` says."""

    def __init__(self, how: str) -> None:
        self.how = how

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> None:
        ctx.set(ctx.get(0) + record)

    def finish(self, ctx: ProcessContext) -> Iterable[Any] | None:
        if self.how == "fails":
            raise ValueError("at the end")
        if self.how == "emits and yields":
            return self._both(ctx)
        if self.how == "emits":
            ctx.emit(*ctx.state.items())
            return None
        return iter(ctx.state.items())

    def _both(self, ctx: ProcessContext) -> Iterator[Any]:
        for i, item in enumerate(ctx.state.items()):
            if i % 2:
                yield item
            else:
                ctx.emit(item)


@pytest.mark.parametrize("how", ["returns", "emits", "emits and yields"])
def test_the_last_outputs_of_a_process_come_whichever_way_it_makes_them(how: str) -> None:
    stage = start(Processing(Summary(how)))
    run(stage, keyed([(i, i) for i in range(EXPAND_RECORDS_MAX + 10)]))
    pieces = list(stage.finish())
    assert all(len(piece) <= EXPAND_RECORDS_MAX for piece in pieces)
    assert sorted(pair for piece in pieces for pair in piece) == [(i, i) for i in range(EXPAND_RECORDS_MAX + 10)]


def test_an_error_of_a_process_at_its_end_names_the_operator() -> None:
    stage = start(Processing(Summary("fails"), name="summary"))
    with pytest.raises(RecordError, match="operator 'summary' failed"):
        list(stage.finish())


class Bound(ProcessFunction):
    """Knows which task it was opened for."""

    def open(self, ctx: ProcessContext) -> None:
        self.task = ctx.index

    def process(self, ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        return [(self.task, ctx.index)]


def test_every_task_has_a_process_of_its_own() -> None:
    operator = Processing(Bound())
    stages = [operator.stage(StageContext(operator, index, 2)) for index in range(2)]
    for stage in stages:
        stage.open()
    assert [run(stage, keyed([(0, 0)])) for stage in stages] == [[(0, 0)], [(1, 1)]]
    assert not hasattr(operator.process, "task"), "the flow's own object must not change"


# --- what is refused at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Map(3), "map 'map' needs a function"),
        (lambda: Map(str, on_error="ignore"), "'fail', 'skip' or 'dead_letter'"),
        (lambda: Map(str, parallelism=0), "whole number, 1 or more"),
        (lambda: Map(str, parallelism=1.5), "whole number, 1 or more"),
        (lambda: MapBatches(list, batch_size=0), "batch_size=0"),
        (lambda: MapBatches(list, batch_format="polars"), "it must be 'list', 'numpy'"),
        (lambda: Aggregated(Count(), "sometimes"), "it must be 'latest', 'every' or 'final'"),
        (lambda: Aggregated(Sum(3), "every"), "needs a function"),
        (lambda: Reduce(None), "needs a function"),
        (lambda: Reduce(max, "sometimes"), "it must be 'latest', 'every' or 'final'"),
        (lambda: Processing(3), "needs a function"),
        (lambda: Processing(print, outputs=("a", "a")), "each name must appear once"),
        (lambda: Processing(print, outputs=(DEAD_LETTERS,)), "an output 'dead_letters' of its own"),
        (lambda: Processing(print, outputs="late"), r"give a tuple of names: \('late',\)"),
        (lambda: Processing(print, outputs=(3,)), "which are texts"),
        (lambda: Processing(print, outputs=3), "which are texts"),
    ],
)
def test_an_operator_that_cannot_run_is_refused(make: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        make()
