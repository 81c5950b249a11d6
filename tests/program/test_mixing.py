"""Where watermarks are assigned: each task of the operator sees one task's records, or the user is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.program.mixing import mixing
from penstock.runtime.program.plan import replanned

RECORDS = 40


class Behind(ps.sources.Source):
    """Two splits with the same times, 0.1 s apart. The second one begins half a second after the first one."""

    def splits(self, parallelism: int) -> list[ps.sources.Split]:
        return [ps.sources.Split("early"), ps.sources.Split("behind")]

    def reader(self, splits: list[ps.sources.Split], context: ps.sources.SourceContext) -> ps.sources.Reader:
        return BehindReader(splits, context)


class BehindReader(ps.sources.Reader):
    def __init__(self, splits: list[ps.sources.Split], context: ps.sources.SourceContext) -> None:
        self._context, self._position = context, {split.name: split.offset or 0 for split in splits}
        self._begin = context.clock()

    def _left_s(self) -> float:
        begin_s = 0.5 if "behind" in self._position else 0.0
        return begin_s - (self._context.clock() - self._begin) / 1e9

    def read(self, limit: int) -> list[Any]:
        if self._left_s() > 0:
            return []
        found = []
        for name, at in self._position.items():
            upto = min(RECORDS, at + limit)
            found += [{"who": name, "ms": 100 * i} for i in range(at, upto)]
            self._position[name] = upto
        self.finished = all(at == RECORDS for at in self._position.values())
        return found

    def ready_in(self) -> float:
        return max(0.0, self._left_s())

    def offsets(self) -> dict[str, Any]:
        return dict(self._position)


def windows(flow: Flow, marked: Stream) -> Flow:
    marked.key_by("who").window(ps.Tumbling(1)).count(name="counts").write(ps.sinks.Collect(), name="out")
    return flow


def chains(flow: Flow, workers: int) -> list[str]:
    return [f"{chain.name} x{chain.parallelism}" for chain in flow.plan(workers).chains]


def in_the_chain() -> Flow:
    flow = Flow("job")
    read = flow.read(Behind(), parallelism=2).map(dict, parallelism=2)
    return windows(flow, read.watermark("ms", out_of_orderness_s=2))


def rebalanced(**options: Any) -> Flow:
    flow = Flow("job")
    read = flow.read(Behind(), name="tills", parallelism=2).rebalance()
    return windows(flow, read.watermark("ms", out_of_orderness_s=2, name="marks", **options))


def test_a_source_task_that_is_behind_makes_no_record_late(caplog: pytest.LogCaptureFixture) -> None:
    assert "read > map > watermark x2" in chains(in_the_chain(), 4)
    out = ps.testing.run(in_the_chain(), parallelism=4)["out"]
    assert sum(n for *_, n in out) == 2 * RECORDS
    assert not caplog.messages
    assert "warning" not in in_the_chain().explain(4)


def test_where_the_user_mixes_the_records_before_watermarks_the_late_ones_are_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = ps.testing.run(rebalanced(), parallelism=4)["out"]
    assert sum(n for *_, n in out) < 2 * RECORDS
    (said,) = caplog.messages
    assert "before 'marks' by rebalance from 'tills' (x2) to 'marks' (x4)" in said
    assert "put .watermark(...) directly after .read(...)" in said
    text = " ".join(rebalanced().explain(4).split())
    assert (
        "warning: records of several tasks or splits meet before they get watermarks: before 'marks' by rebalance"
        in text
    )


def test_the_number_of_tasks_of_watermarks_is_that_of_their_input_unless_it_is_given() -> None:
    flow = Flow("job", parallelism=3)
    one, two = flow.read(Behind(), parallelism=1), flow.read(Behind(), parallelism=2)
    one.watermark("ms", name="a").union(two.watermark("ms", name="b", parallelism=5)).write(ps.sinks.Null())
    two.forward().watermark("ms", name="c").write(ps.sinks.Null())
    two.shuffle().watermark("ms", name="d").write(ps.sinks.Null())
    one.union(two).watermark("ms", name="e").write(ps.sinks.Null())
    plan = flow.plan(4)
    tasks = {name: plan.chain_of(name).parallelism for name in "abcde"}
    assert tasks == {"a": 1, "b": 5, "c": 2, "d": 3, "e": 2}
    # Source "one" has several splits and two watermark operators, of which neither can be in its task.
    assert sorted(mixing(plan)) == ["a", "b", "d", "e"]


@pytest.mark.parametrize(
    ("before", "found"),
    [
        (lambda flow: flow.read(Behind(), parallelism=2).map(dict), ["rebalance from 'read' (x2) to 'map' (x4)"]),
        (lambda flow: flow.read(Behind(), parallelism=2).to_first(), ["global from 'read' (x2) to 'marks' (x4)"]),
        (lambda flow: flow.read(Behind(), parallelism=2), None),
        # The task of the source reads several splits.
        (lambda flow: flow.read(Behind(), parallelism=1).rebalance(), ["rebalance from 'read' (x1) to 'marks' (x4)"]),
        # Its other three tasks have nothing to read.
        (lambda flow: flow.read(ps.sources.Memory([1])).rebalance(), None),
        (
            lambda flow: flow.read(Behind(), parallelism=1).union(flow.read(Behind(), parallelism=1, name="b")),
            ["forward from 'read' (x1) to 'marks' (x1)", "forward from 'b' (x1) to 'marks' (x1)"],
        ),
    ],
)
def test_an_exchange_mixes_where_a_task_gets_records_of_several_tasks(before: Any, found: list[str] | None) -> None:
    flow = Flow("job")
    windows(flow, before(flow).watermark("ms", name="marks"))
    assert mixing(flow.plan(4)) == ({} if found is None else {"marks": found})


def test_separate_tasks_of_all_operators_mix_nothing() -> None:
    flow = Flow("job", chaining=False)
    windows(flow, flow.read(Behind(), parallelism=2).watermark("ms"))
    assert mixing(flow.plan(4)) == {}


def test_watermarks_follow_their_source_when_it_is_rescaled() -> None:
    flow = Flow("job")
    windows(flow, flow.read(Behind(), parallelism=1).watermark("ms", parallelism=None))
    plan = flow.plan(1)
    assert len(plan.chains) == 1
    again = replanned(flow.graph, plan, "read", 2, chaining=True)
    assert again.chain_of("watermark") is again.chain_of("read")
    assert again.chain_of("read").parallelism == 2
    assert mixing(again) == {}


def test_a_job_tells_of_mixing_when_it_starts_and_after_late_records(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job = ps.run(rebalanced(), workers=1, parallelism=2, local=True, spares=False, checkpoints=tmp_path)
    (said,) = caplog.messages
    assert "before 'marks' by rebalance from 'tills' (x2) to 'marks' (x2)" in said
    assert job.wait(60)["mixing"] == {"marks": ["rebalance from 'tills' (x2) to 'marks' (x2)"]}
    assert "The likely cause: records of several tasks or splits meet" in caplog.messages[-1]


@settings(max_examples=30, deadline=None)
@given(
    splits=st.integers(1, 5),
    tasks=st.integers(1, 3),
    chaining=st.booleans(),
    way=st.lists(st.sampled_from(("map", "filter", "map_batches")), max_size=2),
    readers=st.sets(st.integers(0, 2)),
    on_error=st.sampled_from(("fail", "skip")),
    batch_size=st.sampled_from((7, 100, 1000)),
    one_after_the_other=st.booleans(),
)
def test_no_plan_makes_a_record_late_that_was_not_late_in_its_split(
    splits: int,
    tasks: int,
    chaining: bool,
    way: list[str],
    readers: set[int],
    on_error: Any,
    batch_size: int,
    one_after_the_other: bool,
) -> None:
    """A watermark is in the tasks of its source, whoever else reads the source, or what comes between the two."""
    flow = Flow("splits", parallelism=tasks, chaining=chaining)
    source: Any = ps.sources.Generator(_of_time, limit=600, splits=splits)
    if one_after_the_other:  # each split begins in the past of the one before
        source = ps.sources.Memory([_of_time(i) for first in range(splits) for i in range(first, 600, splits)], splits)
    stream = made = flow.read(source, name="made")
    forks = [made]
    for step in way:
        stream = (
            stream.map(dict)
            if step == "map"
            else stream.filter(bool)
            if step == "filter"
            else stream.map_batches(list, min_batch=50, batch_size=50, linger_s=60)
        )
        forks.append(stream)
    counts = stream.watermark("ms", on_error=on_error).key_by("k").window(ps.Tumbling(1)).count(name="counts")
    counts.write(ps.sinks.Null(), name="out")
    for reader in readers:
        forks[reader % len(forks)].map(str, name=f"text {reader}").write(ps.sinks.Null(), name=f"other {reader}")
    plan = flow.plan(tasks)
    assert mixing(plan) == {}
    assert plan.chain_of("watermark").source is not None
    found = ps.testing.run(flow, parallelism=tasks, batch_size=batch_size)
    assert sum(count for *_, count in found["out"]) == 600
    for reader in readers:
        assert sorted(found[f"other {reader}"]) == sorted(str(_of_time(i)) for i in range(600))


def _of_time(i: int) -> dict[str, int]:
    return {"ms": 10 * i, "k": i % 3}


def test_the_other_readers_of_a_source_get_what_a_watermark_leaves_out() -> None:
    flow = Flow("job")
    made = flow.read(ps.sources.Memory([{"ms": 1}, {"ms": None}], splits=1), name="made")
    made.watermark("ms", on_error="skip").write(ps.sinks.Null(), name="marked")
    made.write(ps.sinks.Null(), name="all")
    found = ps.testing.run(flow)
    assert found["marked"] == [{"ms": 1}]
    assert found["all"] == [{"ms": 1}, {"ms": None}]


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("first", ["early", "late"])
def test_each_watermark_holds_for_its_own_readers(between: bool, first: str) -> None:
    """Two watermarks in a row: only the second one's readers may get what it says."""
    flow = Flow("job", parallelism=1)
    read = flow.read(ps.sources.Memory([{"early": 10 * i, "late": 10 * i + 5000} for i in range(200)]), name="read")
    one = read.watermark(first, name="one")
    second = "late" if first == "early" else "early"
    two = (one.map(dict) if between else one).watermark(second, name="two")
    for stream, time in ((one, first), (two, second)):
        counts = stream.key_by(lambda _: 0).window(ps.Tumbling(0.1), time=time).count()
        counts.write(ps.sinks.Null(), name=time)
    found = ps.testing.run(flow, batch_size=20)
    assert [sum(count for *_, count in found[name]) for name in ("early", "late")] == [200, 200]
    assert flow.plan(1).chain_of("one").operators[-1].name == "one"


def test_a_change_in_place_before_a_watermark_is_found_beside_another_reader() -> None:
    """What comes before the watermark runs in the task that gives the other reader its records."""

    def change(record: dict[str, int]) -> dict[str, int]:
        record["ms"] += 1
        return record

    flow = Flow("job")
    made = flow.read(ps.sources.Memory([{"ms": 1}]), name="made")
    made.map(change, name="changing").watermark("ms").write(ps.sinks.Null(), name="marked")
    made.write(ps.sinks.Null(), name="all")
    with pytest.raises(ps.RecordError, match=r"'changing'.*has changed a record that other tasks have too"):
        ps.testing.run(flow)


def test_a_reader_that_does_not_name_its_splits_is_named(caplog: pytest.LogCaptureFixture) -> None:
    flow = Flow("job")
    windows(flow, flow.read(Behind(), name="tills", parallelism=1).watermark("ms"))
    ps.testing.run(flow)
    assert "source 'tills': the reader of task 0 has 2 splits and does not say" in caplog.messages[0]
    assert "parallelism=2" in caplog.messages[0]


def test_files_that_one_task_reads_one_after_the_other_lose_no_record(tmp_path: Any) -> None:
    """Each begins in the past of the one before."""
    for number in range(4):
        lines = [json.dumps({"ms": 100 * i + number, "k": number}) for i in range(1000)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))

    flow = Flow("files", parallelism=1)
    read = flow.read(ps.sources.JsonLines(str(tmp_path / "*.jsonl"), parallel=False), name="files")
    read.watermark("ms").key_by("k").window(ps.Tumbling(1)).count(name="counts").write(ps.sinks.Null(), name="out")
    found = ps.testing.run(flow)
    assert sum(count for *_, count in found["out"]) == 4000


def test_a_local_job_counts_all_records_of_splits_that_two_operators_read(tmp_path: Any) -> None:
    flow = Flow("forked-splits", parallelism=2)
    counts, sink = ps.sinks.Collect(), ps.sinks.Null()
    made = flow.read(ps.sources.Generator(_of_time, limit=20_000, splits=4), name="made")
    made.watermark("ms").key_by("k").window(ps.Tumbling(3)).count(name="counts").write(counts, name="out")
    made.write(sink, name="other")
    status = ps.run(flow, workers=2, local=True, spares=False, checkpoints=tmp_path).wait(60, progress=False)
    assert sum(count for *_, count in counts.records()) == 20_000
    assert status["late_dropped"] == {}
