"""Which way of a range in Spark is kept, by what the trials of the ways have shown; without Spark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeForm, as_columns, as_records, range_form
from penstock.bridge.operation import Disturbed, Operations, Sample, Trial, Way
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.program.flow import Flow


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
    tried = Tried(form, {"columns": cold, "python": BatchCost(1.9, 900)}, [warmer, warm, BatchCost(0.01, 1e9)])
    trial = tried.prepare(0)
    assert (trial.way, trial.cost, len(tried.later)) == ("columns", warm, 1)


def test_a_slow_way_is_not_run_longer_than_needed(form: RangeForm) -> None:
    slow = BatchCost(0.1, 1_000)  # 40 s for the sample
    tried = Tried(form, {"python": slow}, [BatchCost(0.1, 2_000)])
    assert (tried.prepare(0).cost, len(tried.later)) == (slow, 1)


# --- what a range is tried on --------------------------------------------------------------------------------------


class Timed(Operations):
    """Ranges that run in one way, whose micro-batches take as long as they are said to."""

    def __init__(self, form: RangeForm, clock: Clock, cost: BatchCost, *, disturbed_after: int | None = None) -> None:
        """`disturbed_after`: a micro-batch of the job comes after so many of the trial."""
        session: Any = None
        super().__init__(session, [form])
        self._clock, self._cost, self._disturbed_after = clock, cost, disturbed_after
        self.batches: list[pa.RecordBatch] = []

    def ways(self, form: RangeForm, names: tuple[str, ...]) -> list[Way]:
        return ["python"]

    def _answer_any(self, chain: int, position: int, batch: pa.RecordBatch, way: Way | None) -> MicroBatchResult:
        self.batches.append(batch)
        self._clock.now += self._cost.seconds(len(as_records(batch)))
        if len(self.batches) == self._disturbed_after:
            self.answer(chain, position, as_columns([]))
        return MicroBatchResult([])

    @property
    def sizes(self) -> list[int]:
        return [len(as_records(batch)) for batch in self.batches]


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


def test_a_range_without_a_sample_is_tried_on_records_of_its_tasks(clock: Clock) -> None:
    form = inner()
    cost = BatchCost(0.2, 50_000)
    timed = Timed(form, clock, cost)
    untried = Trial("columns", {})
    timed.session = Cores()  # type: ignore[assignment]
    assert timed.prepare(form.chain) == untried
    timed.batches.clear()
    trial = timed.prepare(form.chain, [1, -2, 3])
    assert trial.way == "python"
    assert trial.cost is not None
    assert (trial.cost.fixed_s, trial.cost.rate) == (pytest.approx(cost.fixed_s), pytest.approx(cost.rate))
    assert max(timed.sizes) == 40_000, "as many as of a source's sample"
    assert as_records(timed.batches[-1])[:5] == [1, -2, 3, 1, -2]


class Cores:
    cores = 2


@pytest.mark.parametrize("rate", [100, 1_000, 10_000])
def test_a_slow_function_is_tried_on_few_records(clock: Clock, rate: float) -> None:
    """40,000 records would take up to minutes, while the job may need Spark."""
    form = inner()
    cost = BatchCost(0.2, rate)
    timed = Timed(form, clock, cost)
    trial = timed.prepare(form.chain, [1])
    assert trial.cost is not None
    assert trial.cost.rate == pytest.approx(rate)
    assert max(timed.sizes) < 5 * rate
    assert clock.now < 40


def test_a_micro_batch_of_the_job_ends_a_trial(clock: Clock) -> None:
    """Each would slow down the other."""
    form = inner()
    timed = Timed(form, clock, BatchCost(0.2, 50_000), disturbed_after=4)
    with pytest.raises(Disturbed):
        timed.prepare(form.chain, [1])
    assert len(timed.batches) == 4 + 1, "with that of the job"
    assert timed.prepare(form.chain, [1]).cost is not None, "it can be tried again"


def test_records_of_a_source_of_columns_are_tried_as_columns(form: RangeForm) -> None:
    """As the micro-batches come."""
    assert form.source is not None
    assert Sample.of_records(["a", "b"], form.source).names == ("value",)
    rows = Sample.of_records([{"x": 1, "y": "z"}], form.source)
    assert rows.names == ("x", "y")
    assert rows.first(2).to_pylist() == [{"x": 1, "y": "z"}] * 2
    assert as_records(Sample.of_records(["a", "b"], None).first(3)) == ["a", "b", "a"]


def test_a_sample_of_the_source_that_cannot_tell_gives_way_to_records(form: RangeForm, clock: Clock) -> None:
    """A file of two lines is no sample."""
    timed = Timed(form, clock, BatchCost(0.2, 50_000))
    assert timed.prepare(0).costs == {}
    assert timed.prepare(0, ["a"]).cost is not None
