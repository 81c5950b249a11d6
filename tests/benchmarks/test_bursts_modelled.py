"""The bursts beside a modelled Spark: what is measured, and that wrong results are found."""

from __future__ import annotations

from array import array
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from benchmarks import bursts_modelled
from benchmarks.bursts_modelled import KEYS, Model, Run, Setting
from benchmarks.common import WrongResult
from benchmarks.modelled_spark import Costly, ModelledOperations, ModelledSpark, value_of
from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeForm, as_columns, range_form
from penstock.runtime.records.batch import KeyedBatch

SETTING = Setting(3.0, 1.5, calm_s=0.0, burst_s=2.0, after_s=1.0, record_rate=1_000.0)


def updates(setting: Setting, late_s: float = 0.5) -> list[tuple[int, int, int]]:
    """An update for every record, so much after the record was due, as (key, sum, ns since 1970) of a start at 0."""
    due = bursts_modelled.due_times(setting)
    sums = [0] * KEYS
    found = []
    for number, at in enumerate(due):
        sums[number % KEYS] += bursts_modelled.ONE + value_of(number)
        found.append((number % KEYS, sums[number % KEYS], round((at + late_s) * 1e9)))
    return found


def columns(rows: list[tuple[int, int, int]]) -> tuple[array[int], ...]:
    return tuple(array("q", [row[i] for row in rows]) for i in range(3))


def test_the_delay_of_each_record_is_that_of_the_first_update_that_counts_it() -> None:
    due, delay = bursts_modelled.delays_of(SETTING, columns(updates(SETTING)), 0.0)
    assert len(due) == SETTING.number
    assert delay == pytest.approx(np.full(SETTING.number, 0.5))
    last = {row[0]: row for row in updates(SETTING)}
    _, delay = bursts_modelled.delays_of(SETTING, columns(list(last.values())), 0.0)
    assert delay.max() > SETTING.bursts[-1][2] - 1, "the first records have waited for the end"


@pytest.mark.parametrize("fault", ["lost", "doubled", "wrong", "back"])
def test_a_wrong_result_is_found(fault: str) -> None:
    rows = updates(SETTING)
    at = len(rows) // 2
    key, total, when = rows[at]
    if fault == "lost":
        rows = [row for i, row in enumerate(rows) if i < at or row[0] != key]
    elif fault == "doubled":
        rows = [(k, t + bursts_modelled.ONE + 7 if k == key and i >= at else t, w) for i, (k, t, w) in enumerate(rows)]
    elif fault == "wrong":
        rows[at] = key, total + 1, when
    else:
        rows.insert(at + 1, rows[at - KEYS])
    with pytest.raises(WrongResult):
        bursts_modelled.delays_of(SETTING, columns(rows), 0.0)


def test_waiting_and_the_peak_of_a_burst() -> None:
    begin, end, following = SETTING.bursts[0]
    due = bursts_modelled.due_times(SETTING)
    delay = np.where((due >= begin) & (due < begin + 0.5), 0.4, 0.1)
    run = Run(SETTING, due, delay, [], np.array([(begin + 0.1, begin + 0.3, 10.0)]))
    assert run.peak(begin, end) == pytest.approx((0.4, 0.5, 0.1))
    assert run.first_answer(begin, end) == pytest.approx(0.3)
    assert run.first_answer(*SETTING.bursts[1][:2]) is None
    rate = SETTING.burst * SETTING.record_rate
    assert max(n for _, n in run.waiting(begin, following)) == pytest.approx(0.4 * rate, rel=0.02)


def test_the_model_is_that_of_the_equations() -> None:
    model = Model.of(Setting(3.0, 1.5, record_rate=4_000.0))
    assert model.interval_s == 1.0
    assert model.most_s == pytest.approx(1.0 + 0.25 + 0.5)
    assert model.mean_s == pytest.approx(0.5 + 0.25 + 0.5)
    assert model.switch == pytest.approx(6_000 / 3 + (0.5 + 0.25) * 4_000)
    assert model.records_s == pytest.approx(0.5 * 20)


def test_the_modelled_spark_answers_what_record_tasks_do_and_takes_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Costly, "elsewhere", False)
    flow = ps.Flow("modelled", parallelism=1)
    source = ps.sources.Memory(range(100))
    flow.read(source).map(Costly(10.0, 7), name="work").key_by(itemgetter(0)).sum(itemgetter(1)).write(ps.sinks.Null())
    plan = flow.plan(1)
    form = range_form(plan, plan.chains[0])
    assert isinstance(form, RangeForm)
    spark = ModelledSpark(BatchCost(0.02, 10_000.0), 0.0, str(tmp_path))([form])
    assert isinstance(spark, ModelledOperations)
    (batch,) = spark.answer(form.chain, form.position, as_columns(list(range(100)))).batches
    assert isinstance(batch, KeyedBatch)
    sums = {key: sum(value_of(i) for i in range(key, 100, 7)) for key in range(7)}
    assert dict(zip(batch.keys, batch.values, strict=True)) == sums
    came, done, records = map(float, (tmp_path / "micro-batches").read_text().split())
    assert records == 100
    assert done - came == pytest.approx(0.03, abs=1e-5)
