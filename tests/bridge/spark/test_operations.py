"""Ranges in Spark: what they answer is what the record tasks would have made of the same micro-batch."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge import python_range
from penstock.bridge.forms import RangeForm, RangeRun, as_columns, as_records, range_form
from penstock.bridge.native import NotTheSame, native
from penstock.bridge.operation import WAYS, Operations
from penstock.bridge.python_range import PythonRange
from penstock.bridge.reused_memory import ReusedMemory, shared_file
from penstock.bridge.session import Session
from penstock.runtime.operators.micro_batch import MicroBatchResult, Unprocessed
from penstock.runtime.operators.windowing import Windowed
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.records.pickling import Program

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")


def test_a_new_python_worker_has_everything_loaded(session: Session) -> None:
    """It would be loaded while a burst waits, in all cores at once."""
    loaded = "'penstock.bridge.python_range' in __import__('sys').modules"  # without a function of this module, which
    # would load it
    assert session.spark.sparkContext.parallelize([loaded], 1).map(eval).collect() == [True]


def form_of(build: Callable[[Stream], Any], records: list[Any]) -> RangeForm:
    """The range behind the source of a flow."""
    flow = Flow("flow", parallelism=2)
    build(flow.read(ps.sources.Memory(records)))
    plan = flow.plan(1, check_sinks=False)
    form = range_form(plan, plan.chains[0])
    assert isinstance(form, RangeForm), form
    return form


def here(form: RangeForm, records: list[Any]) -> MicroBatchResult:
    """The answer of the record form."""
    run = RangeRun(form)
    run.take(records)
    return run.answer()


def plain(answer: MicroBatchResult) -> Any:
    """An answer without the order of its groups: records as they are, partials by key."""
    out: list[Any] = []
    partials: dict[Any, list[Any]] = {}
    for batch in answer.batches:
        if isinstance(batch, KeyedBatch):
            for key, value in zip(batch.keys, batch.values, strict=True):
                partials.setdefault(key, []).append(value)
        else:
            out += batch.records if isinstance(batch, Unprocessed) else batch
    return out, {key: sorted(values, key=repr) for key, values in partials.items()}, answer.greatest


CAMPAIGNS = [{"ad": f"ad{i}", "campaign": f"c{i // 3}", "weight": i} for i in range(9)]


def text_lines(rng: random.Random, count: int) -> list[str]:
    """JSON texts, some of them broken or without a field."""
    lines = []
    for i in range(count):
        ad, kind, time = f"ad{rng.randrange(12)}", rng.choice(["view", "click"]), 1_000_000 + 37 * i
        line = f'{{"ad": "{ad}", "kind": "{kind}", "time": "{time}", "n": {rng.randrange(-5, 50)}}}'
        lines.append(rng.choice([line] * 20 + [line[:-1], '{"kind": "view"}', "", "é"]))
    return lines


def events(stream: Stream) -> Stream:
    """The Yahoo benchmark's steps on such lines."""
    value = ps.col("value")
    parsed = stream.select(
        ad=value.json("ad"),
        kind=value.json("kind"),
        time=value.json("time").cast("bigint"),
        n=value.json("n").cast("bigint"),
    )
    return parsed.filter((ps.col("kind") == "view") & ps.col("time").is_not_null()).select("ad", "time", "n")


def joined(stream: Stream) -> Stream:
    return events(stream).lookup(CAMPAIGNS, on="ad").watermark("time", out_of_orderness_s=1)


NATIVE: dict[str, Callable[[Stream], Any]] = {
    "count": lambda s: joined(s).key_by("campaign").count().write(ps.sinks.Null()),
    "sum": lambda s: joined(s).key_by("campaign").sum("n").write(ps.sinks.Null()),
    "min": lambda s: joined(s).key_by("campaign").min("n").write(ps.sinks.Null()),
    "max": lambda s: joined(s).key_by("campaign").max("ad").write(ps.sinks.Null()),
    "mean": lambda s: joined(s).key_by("campaign").mean("weight").write(ps.sinks.Null()),
    "computed key": lambda s: joined(s).key_by(ps.col("n") % 3).sum(ps.col("weight") * 2).write(ps.sinks.Null()),
    "tumbling": lambda s: (
        joined(s).key_by("campaign").window(ps.Tumbling(0.7, offset_s=0.1)).count().write(ps.sinks.Null())
    ),
    "sliding": lambda s: joined(s).key_by("campaign").window(ps.Sliding(1, 0.3)).sum("weight").write(ps.sinks.Null()),
    "left": lambda s: (
        events(s).lookup(CAMPAIGNS, on="ad", how="left").filter(ps.col("campaign").is_null()).key_by("ad").count()
    ).write(ps.sinks.Null()),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_ranges_answer_as_the_record_form_does(name: str, session: Session) -> None:
    form = form_of(NATIVE[name], ["x"])
    compiled = native(form, session, ["value"])
    assert compiled is not None
    assert compiled.rest is None, "not native to its end"
    operations = Operations(session, [form])
    for seed in range(3):
        lines = text_lines(random.Random(seed), 400)
        found = operations.answer(form.chain, form.position, pa.record_batch([pa.array(lines)], ["value"]))
        assert plain(found) == plain(here(form, lines)), seed


@pytest.mark.parametrize("name", NATIVE)
def test_every_way_of_a_range_gives_the_same_answer(name: str, session: Session) -> None:
    form = form_of(NATIVE[name], ["x"])
    operations = Operations(session, [form])
    for seed in range(2):
        lines = text_lines(random.Random(seed), 9_000 if name == "tumbling" else 300)
        batch = pa.record_batch([pa.array(lines)], ["value"])
        expected = merged(form, here(form, lines))
        for way in WAYS:
            found = operations.answer(form.chain, form.position, batch, way)
            assert merged(form, found) == expected, (seed, way)


def merged(form: RangeForm, answer: MicroBatchResult) -> Any:
    """The state that the partial results of an answer lead to, by key: each partition may have a part of it."""
    combiner = form.combiner
    assert combiner is not None
    inner = combiner.inner if isinstance(combiner, Windowed) else combiner
    state = inner.new_state()
    for batch in answer.batches:
        assert isinstance(batch, KeyedBatch)
        assert batch.partial
        keys, values = batch.keys, batch.values
        if isinstance(combiner, Windowed):
            keys = [(key, start) for key, (start, _) in zip(keys, values, strict=True)]
            values = [value for _, value in values]
        inner.merge(state, iter(keys), iter(values))
    return dict(state), answer.greatest


def short(record: dict[str, Any]) -> bool:
    return len(record["ad"] or "") < 4


def words(line: str) -> list[str]:
    return line.split('"')


MIXED: dict[str, tuple[Callable[[Stream], Any], bool]] = {
    "Python behind columns": (lambda s: events(s).filter(short).key_by("ad").count().write(ps.sinks.Null()), True),
    "records out": (lambda s: events(s).map(dict.items).map(sorted).write(ps.sinks.Null()), True),
    "texts out": (lambda s: s.filter(ps.col("value").str.contains("view")).write(ps.sinks.Null()), True),
    "a field called value": (
        lambda s: s.select(value=ps.col("value").json("ad")).map(str).write(ps.sinks.Null()),
        True,
    ),
    "Python alone": (lambda s: s.flat_map(words).key_by(str.lower).count().write(ps.sinks.Null()), False),
    "a function as the time": (
        lambda s: events(s).watermark(lambda r: r["time"]).key_by("ad").count().write(ps.sinks.Null()),
        True,
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_is_no_column_goes_on_in_python(name: str, session: Session) -> None:
    build, begins_native = MIXED[name]
    form = form_of(build, ["x"])
    compiled = native(form, session, ["value"])
    assert (compiled is not None) == begins_native
    assert compiled is None or compiled.rest is not None
    operations = Operations(session, [form])
    lines = text_lines(random.Random(1), 300)
    expected = plain(here(form, lines))
    found = plain(operations.answer(form.chain, form.position, pa.record_batch([pa.array(lines)], ["value"])))
    encoded = plain(operations.answer(form.chain, form.position, as_columns(lines)))
    for answer in (found, encoded):
        assert answer[0] == expected[0], "in their order"
        assert answer[2] == expected[2]
        assert {key: sum(values) for key, values in answer[1].items()} == {
            key: sum(values) for key, values in expected[1].items()
        }


def test_counts_of_words_of_many_lines(session: Session) -> None:
    form = form_of(lambda s: s.flat_map(str.split).key_by(str.lower).count().write(ps.sinks.Null()), ["x"])
    lines = ["To be or not to be"] * 20_000
    answer = Operations(session, [form]).answer(
        form.chain, form.position, pa.record_batch([pa.array(lines)], ["value"])
    )
    total: Counter[str] = Counter()
    for batch in answer.batches:
        assert isinstance(batch, KeyedBatch)
        for key, n in zip(batch.keys, batch.values, strict=True):
            total[key] += n
    assert total == {"to": 40_000, "be": 40_000, "or": 20_000, "not": 20_000}


def part_of(_: str) -> int:
    """The part of a micro-batch that this Python worker of Spark has."""
    from pyspark import TaskContext

    part = TaskContext.get()
    assert part is not None
    return part.partitionId()


@pytest.mark.parametrize("columns", [True, False])
def test_records_of_one_key_are_divided_among_all_cores_in_python_too(columns: bool, session: Session) -> None:
    form = form_of(lambda s: s.map(part_of).write(ps.sinks.Null()), ["x"])
    texts = ["hot"] * 8_000
    batch = pa.record_batch([pa.array(texts)], ["value"]) if columns else as_columns(texts)
    answer = Operations(session, [form]).answer(form.chain, form.position, batch)
    counts = Counter(part for batch in answer.batches for part in batch)
    assert counts == dict.fromkeys(range(session.cores), 8000 // session.cores)


@pytest.mark.parametrize(
    ("rows", "build"),
    [
        ([{"k": "a", "n": 1}, {"k": "a", "n": None}], lambda s: s.key_by("k").sum("n")),
        ([{"k": "a", "n": 1.0}, {"k": "a", "n": float("nan")}], lambda s: s.key_by("k").min("n")),
        ([{"k": "a", "n": 2**62}, {"k": "a", "n": 2**62}], lambda s: s.key_by("k").sum("n")),
        ([{"k": None, "n": 1}, {"k": "b", "n": 2}], lambda s: s.key_by("k").count()),
    ],
)
def test_what_python_would_do_otherwise_is_left_to_it(rows: list[Any], build: Any, session: Session) -> None:
    form = form_of(lambda s: build(s.filter(ps.col("k").is_null() | (ps.col("k") != "z"))).write(ps.sinks.Null()), rows)
    operations = Operations(session, [form])
    batch = pa.RecordBatch.from_pylist(rows)
    with pytest.raises(NotTheSame):
        operations.answer(form.chain, form.position, batch, "columns")
    answers = [operations.answer(form.chain, form.position, batch, way) for way in (None, "python")]
    assert repr(plain(answers[0])) == repr(plain(answers[1])), "Python in Spark does as Python elsewhere"


def broken(record: dict[str, Any]) -> Any:
    if record["n"] % 1000 == 7:
        raise ValueError(f"not {record['n']}")
    return record["n"]


def test_a_record_that_fails_comes_back_and_the_others_are_answered(session: Session) -> None:
    form = form_of(lambda s: s.map(broken, on_error="skip").write(ps.sinks.Null()), [{"n": 1}])
    rows = [{"n": n} for n in range(5_000)]
    answer = Operations(session, [form]).answer(form.chain, form.position, as_columns(rows))
    found: list[Any] = []
    for batch in answer.batches:
        found += [record["n"] for record in batch.records] if isinstance(batch, Unprocessed) else batch
    assert found == list(range(5_000)), "in their order"
    assert [(back.position, back.records) for back in answer.unprocessed] == [
        (1, [{"n": n}]) for n in range(7, 5_000, 1_000)
    ]
    assert "operator 'map' failed: ValueError: not 7" in answer.unprocessed[0].why


def test_a_record_that_fails_comes_back_as_the_columns_before_have_made_it(session: Session) -> None:
    """The part of a range that runs as columns of Spark is not run again."""
    form = form_of(
        lambda s: s.with_columns(n=ps.col("n") + 1).map(broken, on_error="skip").write(ps.sinks.Null()), [{"n": 1}]
    )
    answer = Operations(session, [form]).answer(
        form.chain, form.position, pa.RecordBatch.from_pylist([{"n": n} for n in range(100)]), "columns"
    )
    assert [(back.position, back.records) for back in answer.unprocessed] == [(2, [{"n": 7}])]
    assert [n for batch in answer.batches if isinstance(batch, list) for n in batch] == [
        n for n in range(1, 101) if n != 7
    ]


def doubled(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"n": record["n"]}, {"n": record["n"] + 1}]


def test_what_operators_in_python_have_made_of_a_record_that_fails_stays(session: Session) -> None:
    """Of two records that one became, only the one that failed comes back, as the operator that failed got it."""
    form = form_of(lambda s: s.map(dict).flat_map(doubled).map(broken, on_error="skip").write(ps.sinks.Null()), [{}])
    answer = Operations(session, [form]).answer(form.chain, form.position, as_columns([{"n": n} for n in range(100)]))
    back = [(each.position, record) for each in answer.unprocessed for record in each.records]
    assert back == [(3, {"n": 7})] * 2
    found: list[Any] = []
    for batch in answer.batches:
        found += [record["n"] for record in batch.records] if isinstance(batch, Unprocessed) else batch
    assert found == [m for n in range(100) for m in (n, n + 1)], "in their order"


def test_a_record_that_cannot_be_combined_comes_back_behind_the_operators(session: Session) -> None:
    form = form_of(lambda s: s.map(dict).key_by(lambda r: r["k"]).sum("n").write(ps.sinks.Null()), [{"k": 1, "n": 1}])
    rows = [{"k": n % 3, "n": "ten" if n == 10 else n} for n in range(100)]
    rows[20] = {"n": 20}
    answer = Operations(session, [form]).answer(form.chain, form.position, as_columns(rows))
    back = [(each.position, record) for each in answer.unprocessed for record in each.records]
    assert sorted(back, key=str) == [(2, {"k": 1, "n": "ten"}), (2, {"n": 20})]
    sums: Counter[int] = Counter()
    for batch in answer.batches:
        if isinstance(batch, KeyedBatch):
            for key, value in zip(batch.keys, batch.values, strict=True):
                sums[key] += value
    assert sums == {k: sum(n for n in range(100) if n % 3 == k and n not in (10, 20)) for k in range(3)}


@pytest.mark.parametrize("name", ["count", "tumbling"])
def test_a_range_without_a_sample_is_prepared_by_running_it_on_nothing(name: str, session: Session) -> None:
    assert Operations(session, [form_of(NATIVE[name], ["x"])]).prepare(0).cost is None


def test_a_range_is_prepared_by_running_it_on_a_sample_of_its_source(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "events.txt"
    file.write_text("".join(line + "\n" for line in text_lines(random.Random(0), 9_000)))
    flow = Flow("sampled", parallelism=2)
    NATIVE["tumbling"](flow.read(ps.sources.TextFiles(str(file))))
    plan = flow.plan(1, check_sinks=False)
    form = range_form(plan, plan.chains[0])
    assert isinstance(form, RangeForm)
    operations = Operations(session, [form])
    trial = operations.prepare(0)
    assert set(trial.costs) == {"columns", "parsed", "python"}
    assert trial.cost is not None
    assert trial.cost.rate > 0
    assert {key[:3] for key in operations._compiled} == {(0, form.position, ("value",))}
    before = set(operations._compiled)
    operations.answer(0, form.position, pa.record_batch([pa.array(["{}"])], ["value"]))
    assert set(operations._compiled) == before, "a micro-batch runs in a way that was tried"


def test_records_that_have_columns_are_read_as_dicts() -> None:
    rows = [{"k": "a", "n": 1}, {"k": None, "n": 2}]
    assert as_records(pa.RecordBatch.from_pylist(rows)) == rows


class _Elsewhere(PythonRange):
    """A range whose Python workers cannot open the files of this process, as if they ran on another machine."""

    def __init__(self, session: Session, form: bytes) -> None:
        super().__init__(session, form)
        self.given: list[bool] = []  # of each run: whether it was given places in shared memory

    def _from_memory(self, cells: Sequence[Any]) -> Any:
        shared = [bytes(memoryview(cell)).startswith(python_range._SHARED) for cell in cells]
        self.given.append(all(shared))
        hidden = [bytes(memoryview(cell)).replace(b"/proc/", b"/none/") for cell in cells] if all(shared) else cells
        return super()._from_memory(hidden)


def test_executors_on_other_machines_get_micro_batches_over_the_network(session: Session) -> None:
    """The first micro-batch shows that they cannot read shared memory."""
    form = form_of(lambda stream: stream.map(str).key_by(len).count().write(ps.sinks.Null()), [1])
    elsewhere = _Elsewhere(session, Program().dumps(form))
    records = list(range(5_000))
    for _ in range(2):
        assert plain(elsewhere.answer(as_columns(records)))[1].keys() == plain(here(form, records))[1].keys()
    assert elsewhere.given[0]
    assert elsewhere.given.count(True) == 1, "it is not tried again"
    shared = PythonRange(session, Program().dumps(form))
    for _ in range(2):
        found = plain(shared.answer(as_columns(records)))[1]
        assert {key: sum(values) for key, values in found.items()} == {1: 10, 2: 90, 3: 900, 4: 4_000}
    assert shared._shares


def test_shared_memory_is_written_again_and_not_after_a_failure(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python worker may still read a partition when another one has failed. Micro-batches of all sizes are right."""
    files = ReusedMemory(lambda: shared_file("penstock-test"), limit=100_000)
    monkeypatch.setattr(session, "files", files)
    form = form_of(lambda stream: stream.map(str).key_by(len).count().write(ps.sinks.Null()), [1])
    shared = PythonRange(session, Program().dumps(form))

    def count(records: list[int]) -> int:
        found = plain(shared.answer(as_columns(records)))[1]
        return sum(sum(values) for values in found.values())

    def kept() -> tuple[int, int]:
        file = files.take()
        status = os.fstat(file.fileno())
        file.seek(0, os.SEEK_END)
        files.give_back(file)
        return status.st_ino, status.st_size

    assert count([*range(5_000)]) == 5_000
    first = kept()
    for records in (1, 30_000, 3, 10_000):
        assert count([*range(records)]) == records
        inode, size = kept()
        assert (inode, size <= 100_000) == (first[0], True)

    def fails(data: Any) -> list[bytes]:
        raise python_range.RangeFailed("an executor is gone")

    monkeypatch.setattr(shared, "_run", fails)
    with pytest.raises(python_range.RangeFailed):
        count([1])
    assert kept()[0] != first[0]


def test_a_file_of_another_process_is_not_taken_for_a_micro_batch(tmp_path: Path) -> None:
    """On another machine, a process may have the same number, and a file open at the same place."""
    pack, magic = python_range._SHARED_AT.pack, python_range._SHARED
    path = tmp_path / "file"
    path.write_bytes(b"t" * 16 + bytes(100))
    assert python_range._in_shared_memory(pack(magic, 64, 10, b"t" * 16) + str(path).encode()) is not None
    assert python_range._in_shared_memory(pack(magic, 64, 10, b"u" * 16) + str(path).encode()) is None
    assert python_range._in_shared_memory(pack(magic, 64, 100, b"t" * 16) + str(path).encode()) is None
    assert python_range._in_shared_memory(pack(magic, 64, 10, b"t" * 16) + b"/nowhere") is None
