"""Outputs: every grouping deals every record to the channels it must, keeping order, and combining changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.errors import RecordError
from penstock.runtime.exchange.grouping import All, Custom, Forward, Global, Grouping, Key, Rebalance, Shuffle
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.output import COMBINED_KEYS_MAX, Output, make_output
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.key_groups import KeyGroups, key_groups
from penstock.runtime.records.userfunc import ErrorHandler, OnError
from penstock.runtime.state.aggregate import Aggregate, Count, Max, Mean, Min, Sum
from penstock.runtime.transport.memory import MemoryNetwork

GROUPS = KeyGroups(32)


class Kept(OutLog):
    """A log that only queues."""

    def flush(self) -> bool:
        return False

    def got(self) -> list[Any]:
        out: list[Any] = []
        for batch, _ in self.queue:
            assert batch is not None
            assert len(batch)
            out += batch if isinstance(batch, list) else zip(batch.keys, batch.values, strict=True)
        return out


def output(
    grouping: Grouping, n: int, *, combiner: Aggregate | None = None, policy: OnError = "fail", sender: int = 0
) -> tuple[Output, list[Kept], ErrorHandler]:
    errors = ErrorHandler("step", policy, None, [] if policy == "dead_letter" else None)
    network = MemoryNetwork(1)
    channels = [Kept(network.transport(0), errors) for _ in range(n)]
    table = GROUPS.table(len(channels))
    made = make_output(grouping, list(channels), sender=sender, combiner=combiner, errors=errors, table=table)
    return made, channels, errors


batches = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=12), max_size=6)
tasks = st.integers(1, 5)


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def emit(out: Output, parts: list[list[Any]]) -> None:
    for stamp, batch in enumerate(parts):
        out.emit(list(batch), stamp)
    out.flush()


def is_subsequence(part: list[Any], whole: list[Any]) -> bool:
    rest = iter(whole)
    return all(any(record == other for other in rest) for record in part)


@given(batches, tasks, st.integers(0, 7), st.sampled_from((Rebalance(), Shuffle())))
def test_dealing_gives_every_record_to_one_task_in_order(
    parts: list[list[int]], n: int, sender: int, grouping: Grouping
) -> None:
    numbered = [[(i, j, x) for j, x in enumerate(batch)] for i, batch in enumerate(parts)]
    out, channels, _ = output(grouping, n, sender=sender)
    emit(out, numbered)
    whole = flat(numbered)
    assert sorted(flat(channel.got() for channel in channels)) == whole
    assert all(is_subsequence(channel.got(), whole) for channel in channels)
    if isinstance(grouping, Rebalance):
        counts = [len(channel.got()) for channel in channels]
        assert max(counts) - min(counts) <= 1
        if whole:
            assert channels[sender % n].got()[0] == whole[0]


@given(batches, tasks)
def test_broadcast_has_one_log_and_global_gives_one(parts: list[list[int]], n: int) -> None:
    whole = flat(parts)
    out, channels, _ = output(All(), 1)
    emit(out, parts)
    assert channels[0].got() == whole
    out, channels, _ = output(Global(), n)
    emit(out, parts)
    assert [channel.got() for channel in channels] == [whole] + [[]] * (n - 1)
    out, channels, _ = output(Forward(), 1)
    emit(out, parts)
    assert channels[0].got() == whole


@given(batches, tasks)
def test_a_chooser_chooses(parts: list[list[int]], n: int) -> None:
    out, channels, errors = output(Custom(lambda record, tasks: record % 7), n, policy="dead_letter")
    emit(out, parts)
    whole = flat(parts)
    for task, channel in enumerate(channels):
        assert channel.got() == [record for record in whole if record % 7 == task]
    assert errors.dead_letters is not None
    assert [letter.record for letter in errors.dead_letters] == [record for record in whole if record % 7 >= n]


@pytest.mark.parametrize("choice", [2, -1, None, "0", 0.0])
def test_a_choice_that_is_no_task_is_an_error(choice: Any) -> None:
    out, _, _ = output(Custom(lambda record, tasks: choice), 2)
    with pytest.raises(RecordError, match=r"partition_by chose task .* of 2; it must return 0 to 1"):
        emit(out, [[1]])


@given(batches, tasks)
def test_equal_keys_meet_in_the_task_of_their_group(parts: list[list[int]], n: int) -> None:
    out, channels, _ = output(Key(lambda record: record % 10), n)
    emit(out, parts)
    whole = [(record % 10, record) for record in flat(parts)]
    table = memoryview(GROUPS.table(n)).cast("H")
    owner = {key: table[memoryview(key_groups([key], 32)).cast("H")[0]] for key in range(10)}
    for task, channel in enumerate(channels):
        assert channel.got() == [(key, record) for key, record in whole if owner[key] == task]


@pytest.mark.parametrize("aggregate", [Count(), Sum(), Sum(lambda n: -n), Mean()], ids=lambda made: type(made).__name__)
@given(parts=batches, n=tasks)
def test_combining_sends_one_partial_a_key_and_changes_nothing(
    aggregate: Aggregate, parts: list[list[int]], n: int
) -> None:
    out, channels, _ = output(Key(lambda record: record % 5), n, combiner=aggregate)
    emit(out, parts)
    whole = flat(parts)
    merged = aggregate.new_state()
    for channel in channels:
        for batch, stamp in channel.queue:
            assert isinstance(batch, KeyedBatch)
            assert batch.partial
            assert stamp == 0, "the oldest"
            assert len(set(batch.keys)) == len(batch.keys)
            aggregate.merge(merged, iter(batch.keys), iter(batch.values))
    direct = aggregate.new_state()
    select = aggregate.selector or (lambda record: record)
    aggregate.add(direct, iter([r % 5 for r in whole]), iter([select(r) for r in whole]))
    assert dict(merged) == dict(direct)
    before = [list(channel.queue) for channel in channels]
    out.flush()
    assert [list(channel.queue) for channel in channels] == before, "nothing is sent twice"


def test_a_combiner_holds_a_bounded_number_of_keys() -> None:
    out, channels, _ = output(Key(lambda record: record), 2, combiner=Count())
    out.emit(list(range(COMBINED_KEYS_MAX)), 0)
    assert sum(channel.queued() for channel in channels) == COMBINED_KEYS_MAX


KINDS = ("good", "key fails", "no hash", "no stable hash", "value fails")


def _key(record: tuple[int, str]) -> Any:
    number, kind = record
    if kind == "key fails":
        raise StopIteration
    return {"no hash": [number], "no stable hash": object()}.get(kind, number % 3)


def _number_of(record: Any) -> Any:
    return record[1]


def _value(record: tuple[int, str]) -> int:
    if record[1] == "value fails":
        raise ValueError(record)
    return record[0]


@given(st.lists(st.sampled_from(KINDS), max_size=10), st.integers(1, 3), st.booleans())
def test_records_whose_keys_fail_are_let_go_alone(kinds: list[str], n: int, combine: bool) -> None:
    out, channels, errors = output(Key(_key), n, combiner=Sum(_value) if combine else None, policy="dead_letter")
    records = list(enumerate(kinds))
    emit(out, [records] if records else [])
    good = [r for r in records if r[1] == "good" or (r[1] == "value fails" and not combine)]
    sent = flat(channel.got() for channel in channels)
    if combine:
        totals: Counter[int] = Counter()
        for number, _ in good:
            totals[number % 3] += number
        assert dict(sent) == {number % 3: totals[number % 3] for number, _ in good}
    else:
        assert sorted(sent) == sorted((number % 3, (number, kind)) for number, kind in good)
    assert errors.skipped == len(records) - len(good)
    assert errors.dead_letters is not None
    assert len(errors.dead_letters) == errors.skipped


def test_the_list_that_was_emitted_is_not_changed() -> None:
    batch: Batch = [3, 1, 2]
    for grouping in (Rebalance(), All(), Custom(lambda r, n: 0), Key(lambda r: r)):
        out, _, _ = output(grouping, 2)
        out.emit(batch, 0)
        assert batch == [3, 1, 2]


@pytest.mark.parametrize("combiner", [None, Count(), Sum(_number_of)])
@pytest.mark.parametrize("policy", ["skip", "dead_letter"])
def test_each_record_of_a_bad_key_fails(combiner: Aggregate | None, policy: OnError) -> None:
    """Also where a combiner would make one partial of them, and in one pass however many there are."""
    keys: list[Any] = ["a", float("nan"), "b", range(3), ["no hash"], ("c", range(2))]
    bad = [range(3), ("c", range(2))]
    records = [(key, i) for i, key in enumerate(keys * 500) if key != ["no hash"]]
    out, channels, errors = output(Key(_first), 3, combiner=combiner, policy=policy)
    out.emit(records[:1200], 1)
    out.emit(records[1200:], 1)
    out.flush()
    refused = [record for record in records if record[0] not in ("a", "b")]
    assert len(refused) == 1500
    assert errors.skipped == 1500
    if policy == "dead_letter":
        assert errors.dead_letters is not None
        assert [letter.record for letter in errors.dead_letters] == refused
        assert sum(letter.record[0] in bad for letter in errors.dead_letters) == 1000
    got = [pair for channel in channels for pair in channel.got()]
    assert {key for key, _ in got} == {"a", "b"}
    assert len(got) == (1000 if combiner is None else 2)


def _first(record: Any) -> Any:
    return record[0]


@pytest.mark.parametrize("aggregate", [Sum, Min, Max, Mean])
@pytest.mark.parametrize("policy", ["skip", "dead_letter"])
def test_records_that_may_be_let_go_are_not_combined(aggregate: type[Aggregate], policy: OnError) -> None:
    """A null that comes first in a task must not take the good records of its key along."""
    flow = ps.Flow("nulls", parallelism=2)
    records = [{"k": f"k{i % 3}", "v": None if i % 50 < 2 else i} for i in range(3000)]
    stream = getattr(flow.read(ps.sources.Memory(records)).rebalance().map(dict).key_by("k"), aggregate.name)(
        "v", emit="final", on_error=policy, name="totals"
    )
    stream.write(ps.sinks.Collect(), name="out")
    if policy == "dead_letter":
        stream.dead_letters().write(ps.sinks.Collect(), name="letters")
    expected: dict[str, list[int]] = {}
    for record in records:
        if record["v"] is not None:
            expected.setdefault(record["k"], []).append(record["v"])
    of = {"sum": sum, "min": min, "max": max, "mean": lambda values: sum(values) / len(values)}[aggregate.name]
    for batch_size in (1, 7, 1000):
        out = ps.testing.run(flow, batch_size=batch_size, parallelism=None)
        assert dict(out["out"]) == {key: of(values) for key, values in expected.items()}
        if policy == "dead_letter":
            assert len(out["letters"]) == 120
            assert all(letter.record[1] in records and letter.record[1]["v"] is None for letter in out["letters"])


def test_an_error_of_a_combined_key_names_the_key_and_no_partial() -> None:
    out, _, _ = output(Key(_first), 2, combiner=Count())
    out.emit([(range(3), i) for i in range(64)], 1)
    with pytest.raises(RecordError, match=r"record: range\(0, 3\)\n"):
        out.flush()
