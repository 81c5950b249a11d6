"""The plan of a range that is made once: what it answers for later micro-batches, and how much work it leaves."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge.arrow import micro_batch, to_dataframe
from penstock.bridge.kept_plan import KeptPlan
from penstock.bridge.native import NativeRange, native
from penstock.bridge.operation import Operations
from penstock.bridge.session import Session
from tests.bridge.spark.test_operations import NATIVE, form_of, here, plain, text_lines

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")


def compiled_range(name: str, session: Session) -> tuple[Any, NativeRange]:
    """A range of the tests of operations, and its native form."""
    form = form_of(NATIVE[name], ["x"])
    compiled = native(form, session, ["value"])
    assert compiled is not None
    return form, compiled


def stages_of(session: Session, group: str) -> list[int]:
    """The number of tasks of each stage that Spark has run for the jobs of a group."""
    tracker: Any = session.spark.sparkContext._jsc.statusTracker()
    stages: list[int] = []
    for job in tracker.getJobIdsForGroup(group):
        stages += [tracker.getStageInfo(stage).numTasks() for stage in tracker.getJobInfo(job).stageIds()]
    return stages


def test_the_plan_of_a_schema_is_made_once(session: Session) -> None:
    """The plan answers for the records of each micro-batch, and a batch of another schema has a plan of its own."""
    form, compiled = compiled_range("tumbling", session)
    made: dict[pa.Schema, KeptPlan] = {}
    for seed in range(3):
        for type_ in (pa.string(), pa.large_string()):
            lines = text_lines(random.Random(seed), 200)
            batch = pa.record_batch([pa.array(lines, type_)], ["value"])
            with micro_batch(session, batch) as frame:
                answer = compiled.answer(frame, batch.schema)
            assert plain(answer) == plain(here(form, lines)), (seed, type_)
            assert made.setdefault(batch.schema, compiled.plans[batch.schema]) is compiled.plans[batch.schema]
    assert set(made) == {pa.schema([("value", pa.string())]), pa.schema([("value", pa.large_string())])}


@pytest.mark.parametrize("name", NATIVE)
def test_a_micro_batch_is_one_stage(name: str, session: Session) -> None:
    """Nothing is shuffled, and the table of a lookup is sent to the executors once, however many micro-batches come."""
    _, compiled = compiled_range(name, session)
    context = session.spark.sparkContext
    batch = pa.record_batch([pa.array(text_lines(random.Random(1), 300))], ["value"])
    for number in range(3):
        group = f"test-kept-plan-{name}-{number}"
        context.setJobGroup(group, "a micro-batch of a test")
        try:
            with micro_batch(session, batch, parts=3) as frame:
                compiled.answer(frame, batch.schema)
        finally:
            context.setLocalProperty("spark.jobGroup.id", None)
        if number > 0:
            assert stages_of(session, group) == [3]


def test_the_records_of_one_key_are_divided_among_all_parts(session: Session) -> None:
    """A key that becomes hot is counted in each part, and no part has to wait for another."""
    form = form_of(lambda s: s.select(k=ps.col("value")).key_by("k").count().write(ps.sinks.Null()), ["x"])
    compiled = native(form, session, ["value"])
    assert compiled is not None
    batch = pa.record_batch([pa.array(["hot"] * 8_000 + ["cold"])], ["value"])
    for _ in range(2):
        with micro_batch(session, batch, parts=4) as frame:
            rows = compiled.run(frame, batch.schema)
        hot = [row["penstock:part0"] for row in rows.to_pylist() if row["penstock:key"] == "hot"]
        assert hot == [2001, 2001, 2001, 1997]
    with micro_batch(session, batch, parts=4) as frame:
        (partials,) = compiled.answer(frame, batch.schema).batches
    assert dict(zip(partials.keys, partials.values, strict=True)) == {"hot": 8_000, "cold": 1}  # combined once more


def test_the_plan_of_a_range_that_goes_on_in_python_is_kept(session: Session) -> None:
    form = form_of(
        lambda s: (
            s.filter(ps.col("value").str.length() > 3).flat_map(str.split).key_by(str).count().write(ps.sinks.Null())
        ),
        ["x"],
    )
    operations = Operations(session, [form])
    for seed in range(3):
        lines = [" ".join(random.Random(seed).choices("abc", k=n)) for n in range(1, 60)]
        batch = pa.record_batch([pa.array(lines)], ["value"])
        found: Counter[str] = Counter()
        for partials in operations.answer(form.chain, form.position, batch, "columns").batches:
            for key, count in zip(partials.keys, partials.values, strict=True):
                found[key] += count
        assert found == Counter(word for line in lines if len(line) > 3 for word in line.split())
    (known,) = operations._compiled.values()
    assert isinstance(known, NativeRange)
    assert len(known.plans) == 1


def test_a_plan_that_has_failed_is_made_again(session: Session) -> None:
    form, compiled = compiled_range("count", session)
    lines = text_lines(random.Random(1), 50)
    batch = pa.record_batch([pa.array(lines)], ["value"])
    with micro_batch(session, batch) as frame:
        compiled.answer(frame, batch.schema)
    kept = compiled.plans[batch.schema]
    compiled.plans[batch.schema] = Failing.instead_of(kept)
    with micro_batch(session, batch) as frame, pytest.raises(OSError, match="lost"):
        compiled.answer(frame, batch.schema)
    with micro_batch(session, batch) as frame:
        assert plain(compiled.answer(frame, batch.schema)) == plain(here(form, lines))


class Failing(KeptPlan):
    """A plan whose executors have lost something."""

    @classmethod
    def instead_of(cls, plan: KeptPlan) -> Failing:
        made = cls.__new__(cls)
        made.__dict__.update(plan.__dict__)
        return made

    def run(self, frame: Any) -> pa.Table:
        raise OSError("lost")


def test_a_plan_of_several_inputs_is_not_kept(session: Session) -> None:
    """A frame that Spark has planned in another way than a range's is planned anew each time."""
    one, two = (to_dataframe(session, pa.table({"n": [1, 2], "k": ["a", "b"]})) for _ in range(2))
    assert KeptPlan.of(one.union(two)) is None
    assert KeptPlan.of(session.spark.range(5)) is None
    assert KeptPlan.of(one) is not None
