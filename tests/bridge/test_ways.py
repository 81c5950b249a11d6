"""Which way of a range in Spark is kept, by what the trials of the ways have shown; without Spark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge import operation
from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeForm, as_columns, as_records, range_form
from penstock.bridge.operation import Disturbed, Operations, Sample, Trial, Way
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.program.flow import Flow
from penstock.runtime.records.codec import encode
from penstock.runtime.worker.sample import RecordSample


class Tried(Operations):
    """Ranges whose trials have a result that is given."""

    def __init__(
        self, form: RangeForm, results: dict[Way, BatchCost | Exception], later: Sequence[BatchCost] = ()
    ) -> None:
        """`later`: the results of further trials of the way that is kept."""
        session: Any = None
        super().__init__(session, [form])
        self._results = dict(results)
        self.later = list(later)
        self._tried: set[Way] = set()

    def ways(self, form: RangeForm, names: tuple[str, ...]) -> list[Way]:
        return list(self._results)

    def _run_small(self, form: RangeForm, sample: Sample, way: Way) -> None:
        pass

    def _try(self, form: RangeForm, sample: Sample, way: Way) -> BatchCost | None:
        result = self._results[way]
        if way in self._tried and self.later:
            result = self.later.pop(0)
        self._tried.add(way)
        if isinstance(result, Exception):
            raise result
        return result


@pytest.fixture
def form(tmp_path: Path) -> RangeForm:
    """A range of a source that has a sample."""
    file = tmp_path / "lines.txt"
    file.write_text("a\nb\n")
    flow = Flow("flow")
    flow.read(ps.sources.TextFiles(str(file))).map(str.upper).write(ps.sinks.Null())
    plan = flow.plan(1, check_sinks=False)
    found = range_form(plan, plan.chains[0])
    assert isinstance(found, RangeForm)
    return found


def test_the_way_that_carries_the_most_records_is_kept(form: RangeForm) -> None:
    quick_start = BatchCost(0.1, 100_000)
    high_rate = BatchCost(0.4, 900_000)
    trial = Tried(form, {"python": quick_start, "columns": high_rate, "parsed": BatchCost(0.4, 50_000)}).prepare(0)
    assert (trial.way, trial.cost) == ("columns", high_rate)
    assert "900,000 records/s" in trial.describe()
    assert Tried(form, {"columns": BatchCost(1.9, 900_000), "python": quick_start}).prepare(0).way == "python"


def test_of_ways_that_carry_nothing_the_quickest_is_kept(form: RangeForm) -> None:
    trial = Tried(form, {"columns": BatchCost(9.0, 900_000), "python": BatchCost(5.0, 100_000)}).prepare(0)
    assert trial.way == "python"


def test_a_way_that_fails_is_not_kept_and_does_not_fail_the_others(form: RangeForm) -> None:
    trial = Tried(form, {"columns": ValueError("no"), "python": BatchCost(1.0, 10.0)}).prepare(0)
    assert (trial.way, set(trial.costs)) == ("python", {"python"})
    with pytest.raises(ValueError, match="no"):
        Tried(form, {"columns": ValueError("no")}).prepare(0)


def test_the_way_that_is_kept_runs_until_it_gets_no_quicker(form: RangeForm) -> None:
    """Java compiles what runs often, and the cost that counts is that of later micro-batches."""
    cold, warmer, warm = BatchCost(0.6, 200_000), BatchCost(0.3, 400_000), BatchCost(0.29, 410_000)
    disturbed = BatchCost(0.9, 100_000)
    tried = Tried(form, {"columns": cold}, [warmer, disturbed, warm, disturbed, BatchCost(0.01, 1e9)])
    trial = tried.prepare(0)
    assert (trial.way, trial.cost, len(tried.later)) == ("columns", warm, 1)


def test_ways_that_are_quick_are_tried_twice_before_one_is_kept(form: RangeForm) -> None:
    """Of Spark's own code, the least is compiled when the first way is tried."""
    results: dict[Way, BatchCost | Exception] = {"columns": BatchCost(0.5, 100_000), "python": BatchCost(0.1, 300_000)}
    again = [BatchCost(0.05, 900_000), BatchCost(0.1, 310_000)]
    trial = Tried(form, results, again).prepare(0)
    assert (trial.way, trial.cost) == ("columns", again[0])
    slow: dict[Way, BatchCost | Exception] = {**results, "parsed": BatchCost(3.0, 100_000)}
    trial = Tried(form, slow, again).prepare(0)
    assert (trial.way, trial.cost) == ("python", again[0]), "the trials of a slow one would take too long"


def test_a_slow_way_is_not_run_longer_than_needed(form: RangeForm) -> None:
    slow = BatchCost(0.1, 1_000)  # 100 s for the sample
    tried = Tried(form, {"python": slow}, [BatchCost(0.1, 2_000)])
    assert (tried.prepare(0).cost, len(tried.later)) == (slow, 1)


# --- what a range is tried on --------------------------------------------------------------------------------------


class Cores:
    """As much of a session as a trial uses."""

    cores = 2


class Timed(Operations):
    """Ranges that run in one way, whose micro-batches take as long as they are said to."""

    def __init__(
        self,
        form: RangeForm,
        clock: Clock,
        cost: BatchCost,
        *,
        disturbed_after: int | None = None,
        cold_s: float = 0.0,
    ) -> None:
        """`disturbed_after`: a micro-batch of the job comes after so many of the trial. `cold_s`: how much longer the
        first micro-batch takes; for each later one, this is a tenth less."""
        session: Any = Cores()
        super().__init__(session, [form])
        self._clock, self._cost, self._disturbed_after = clock, cost, disturbed_after
        self._cold_s = cold_s
        self.batches: list[pa.RecordBatch] = []

    def ways(self, form: RangeForm, names: tuple[str, ...]) -> list[Way]:
        return ["python"]

    def _answer_any(self, chain: int, position: int, batch: pa.RecordBatch, way: Way | None) -> MicroBatchResult:
        self.batches.append(batch)
        self._clock.now += self._cost.seconds(len(as_records(batch))) + self._cold_s
        self._cold_s *= 0.9
        if len(self.batches) == self._disturbed_after:
            self.answer(chain, position, as_columns([]))
        return MicroBatchResult([])

    @property
    def sizes(self) -> list[int]:
        return [len(as_records(batch)) for batch in self.batches if batch.num_rows and len(as_records(batch))]


class Clock:
    """In place of the performance counter."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def inner() -> RangeForm:
    """A range behind an exchange."""
    flow = Flow("flow")
    flow.read(ps.sources.Memory([1])).rebalance().map(abs).write(ps.sinks.Null())
    plan = flow.plan(1, check_sinks=False)
    found = [form for chain in plan.chains if isinstance(form := range_form(plan, chain), RangeForm)]
    assert len(found) == 1
    assert found[0].source is None
    return found[0]


def taken(records: list[Any], each_s: float = 0.0) -> RecordSample:
    """Records that tasks have taken, for each of which they were busy for so long."""
    return RecordSample(len(records), (encode(records),), each_s)


def test_a_range_without_a_sample_is_tried_on_records_of_its_tasks(clock: Clock) -> None:
    form = inner()
    cost = BatchCost(0.2, 50_000)
    timed = Timed(form, clock, cost)
    assert timed.prepare(form.chain) == Trial("columns", {})
    timed.batches.clear()
    trial = timed.prepare(form.chain, taken([1, -2, 3]))
    assert trial.way == "python"
    assert trial.cost is not None
    assert (trial.cost.fixed_s, trial.cost.rate) == (pytest.approx(cost.fixed_s), pytest.approx(cost.rate))
    assert set(timed.sizes) == {2_000, 100_000}, "as many as of a source's sample"
    assert as_records(timed.batches[-1])[:5] == [1, -2, 3, 1, -2]


@pytest.mark.parametrize("each_s", [0.0003, 0.001, 0.02, 0.07])
def test_a_slow_function_is_tried_on_few_records(clock: Clock, each_s: float) -> None:
    """100,000 records would take up to minutes, while the job may need Spark."""
    form = inner()
    timed = Timed(form, clock, BatchCost(0.2, 2 / each_s))
    trial = timed.prepare(form.chain, taken([1], each_s))
    assert trial.cost is not None
    assert trial.cost.rate == pytest.approx(2 / each_s)
    assert 4 * 64 <= max(timed.sizes) <= max(4 * 64, 2 * 2 / each_s)
    assert clock.now < 60


def test_a_function_is_not_tried_for_which_that_takes_too_long(clock: Clock) -> None:
    form = inner()
    timed = Timed(form, clock, BatchCost(0.2, 10))
    assert timed.prepare(form.chain, taken([1], 0.2)).cost is None
    assert timed.sizes == []


def test_a_micro_batch_of_a_trial_is_work_for_all_cores(clock: Clock) -> None:
    """What fewer cores take for a small one would make the rows of a large one seem slow."""
    form = inner()
    timed = Timed(form, clock, BatchCost(0.2, 50_000))
    timed.session.cores = 8
    timed.prepare(form.chain, taken([1], 0.01))
    assert min(batch.num_rows for batch in timed.batches) == 8


def test_a_slow_way_runs_on_few_records_for_a_while(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what a micro-batch costs while Java has not compiled what it runs would stand against Spark for good."""
    form = inner()
    fixed_s = []
    for warm_s in (0.0, 3.0):
        monkeypatch.setattr(operation, "_WARM_OF_ONE_S", (warm_s, 10.0))
        timed = Timed(form, clock, BatchCost(0.1, 1_000), cold_s=1.0)
        trial = timed.prepare(form.chain, taken([1], 0.002))
        assert trial.cost is not None
        fixed_s.append(trial.cost.fixed_s)
    assert fixed_s[1] < 0.8 * fixed_s[0]


def test_a_micro_batch_of_the_job_ends_a_trial(clock: Clock) -> None:
    """Each would slow down the other."""
    form = inner()
    timed = Timed(form, clock, BatchCost(0.2, 50_000), disturbed_after=4)
    with pytest.raises(Disturbed):
        timed.prepare(form.chain, taken([1]))
    assert len(timed.batches) == 4 + 1, "with that of the job"
    assert timed.prepare(form.chain, taken([1])).cost is not None, "it can be tried again"


def test_records_of_a_source_of_columns_are_tried_as_columns(form: RangeForm) -> None:
    """As the micro-batches come."""
    assert form.source is not None
    texts = Sample.of_records(taken(["a", "b"]), form.source, 2)
    rows = Sample.of_records(taken([{"x": 1, "y": "z"}]), form.source, 2)
    others = Sample.of_records(taken(["a", "b"]), None, 2)
    assert texts is not None
    assert rows is not None
    assert others is not None
    assert (texts.names, rows.names) == (("value",), ("x", "y"))
    assert rows.first(2).to_pylist() == [{"x": 1, "y": "z"}] * 2
    assert as_records(others.first(3)) == ["a", "b", "a"]


def test_a_sample_of_the_source_that_cannot_tell_gives_way_to_records(form: RangeForm, clock: Clock) -> None:
    """A file of two lines is no sample."""
    timed = Timed(form, clock, BatchCost(0.2, 50_000))
    assert timed.prepare(0).costs == {}
    assert timed.prepare(0, taken(["a"])).cost is not None
