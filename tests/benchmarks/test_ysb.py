"""What the Yahoo benchmarks conclude from what they see: delays, checks, queues, and the model of when a burst pays."""

from __future__ import annotations

import json
import pickle
from array import array
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bridge_pays, ysb_bursts
from benchmarks.__main__ import main
from benchmarks.bridge_pays import Costs
from benchmarks.common import WrongResult
from benchmarks.ysb_load import NS, Expected, Load, Results, write_lines

LOAD = Load("2000:2s")
MS = 1_000_000

Update = tuple[tuple[str, int], int, int]


def leave(folder: Path, updates: list[Update]) -> None:
    """What a sink leaves: (campaign and window, views, ns)."""
    keys = list(dict.fromkeys(key for key, _, _ in updates))
    columns = zip(*((keys.index(key), views, at) for key, views, at in updates), strict=True)
    content = (keys, *(array("q", column) for column in columns))
    folder.joinpath("updates-1").write_bytes(pickle.dumps(content))


def each_after(ns: int) -> list[Update]:
    """An update for each view, so long after it was due."""
    return [
        (key, n, int(due) + ns) for key, dues in Expected.of(LOAD).due.items() for n, due in enumerate(dues.tolist(), 1)
    ]


def test_a_delay_is_from_due_to_the_first_update_that_has_the_view(tmp_path: Path) -> None:
    began = 7 * NS
    leave(tmp_path, [(key, n, at + began) for key, n, at in each_after(5 * MS)])
    due, delays = Results(LOAD, tmp_path, began, "test").delays()
    assert len(due) == Expected.of(LOAD).views
    assert np.all(np.diff(due) >= 0)
    assert delays == pytest.approx(5.0)


def test_an_update_of_a_micro_batch_answers_all_its_views(tmp_path: Path) -> None:
    leave(tmp_path, [(key, len(due), 3 * NS) for key, due in Expected.of(LOAD).due.items()])
    due, delays = Results(LOAD, tmp_path, 0, "test").delays()
    assert due * 1e3 + delays == pytest.approx(3_000.0)


def test_a_count_that_is_missing_or_wrong_ends_the_benchmark(tmp_path: Path) -> None:
    updates = each_after(0)
    last = updates[-1][0]
    for wrong in ([one for one in updates if one[0] != last], [*updates, (last, 99_999, NS)]):
        leave(tmp_path, wrong)
        with pytest.raises(WrongResult, match=r"test: 1 of \d+ counts are wrong"):
            Results(LOAD, tmp_path, 0, "test")


def test_lines_in_files_are_those_of_the_source(tmp_path: Path) -> None:
    write_lines(LOAD.events, 100, 300, tmp_path / "lines")
    assert tmp_path.joinpath("lines").read_text().splitlines() == LOAD.events.events(100, 300)


def test_a_burst_is_chosen_so_that_its_queue_passes_the_threshold_in_its_middle() -> None:
    rate = ysb_bursts.burst_rate(450_000, 15)
    assert 500_000 < rate < 800_000
    bursts = ysb_bursts.bursts_of(Load(f"5000:2s,{rate}:3s,5000:2s,{rate}:3s,5000:2s"))
    assert bursts == [(2.0, 5.0, 7.0), (7.0, 10.0, float("inf"))]


def test_the_peak_of_a_switch_is_what_is_above_the_delay_at_its_decision() -> None:
    delays = [0.0, 2.0, 5.0, 400.0, 900.0, 300.0, 4.0, 800.0]
    p99 = [(n / 4, delay) for n, delay in enumerate(delays)]
    assert ysb_bursts.peak_of(p99, 0.75) == (895.0, 0.75), "what comes after it is another one"
    assert ysb_bursts.peak_of(p99, 1.5) == (0.0, 0.0)


def test_the_model_switches_only_where_spark_is_quicker() -> None:
    costs = Costs(records=450_000, spark=180_000, fixed_s=0.1, handed_over=3_000_000)
    load = 1.5 * 2 * costs.records
    assert bridge_pays.switched_after(costs, 2, 2, load) is None
    cores = bridge_pays.pays_from(costs, 2, load)
    assert cores is not None
    assert cores * costs.spark > 2 * costs.records
    assert bridge_pays.switched_after(costs, 2, cores, load) is not None
    assert bridge_pays.switched_after(costs, 2, cores - 1, load) is None
    bears = bridge_pays.bears_from(costs, 2, load)
    assert bears is not None
    assert bears > cores
    assert bridge_pays.pays_from(Costs(450_000, 180_000, 0.1, handed_over=400_000), 2, load) is None


@pytest.mark.ray
def test_bursts_of_records_are_counted_right_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="what plots comes with `make bench`")
    assert main(["--quick", "--out", str(tmp_path), "ysb_bursts"]) == 0
    names = {json.loads(line)["name"] for line in tmp_path.joinpath("ysb_bursts.jsonl").read_text().splitlines()}
    assert {"bridge off: most that wait", "bridge off: p99 delay in the bursts"} <= names
    assert tmp_path.joinpath("ysb_bursts.png").stat().st_size > 10_000
    samples = tmp_path.joinpath("ysb_bursts-samples.jsonl").read_text().splitlines()
    assert json.loads(samples[0])["operators"].keys() >= {"receive", "join", "count", "store"}
