"""Which way of a range in Spark is kept, by what the trials of the ways have shown; without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock as ps
from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeForm, range_form
from penstock.bridge.operation import Operations, Way
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

    def _try(self, form: RangeForm, sample: pa.RecordBatch, way: Way) -> BatchCost | None:
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
