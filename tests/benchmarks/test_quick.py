"""The benchmarks run, and what they write has the fields that readers of the results count on."""

from __future__ import annotations

import ast
import json
import random
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks import placement_plans, stamps
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.common import Bench, Case
from penstock.placement.shape import TrafficEdge

FIELDS = {"benchmark", "name", "figure", "unit", "peer", "peer_figure", "ratio", "machine", "versions", "runs"}


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_record_path_runs_and_writes_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--out", str(tmp_path), "record_path"]) == 0
    written = lines(tmp_path / "record_path.jsonl")
    names = {str(line["name"]) for line in written}
    for step in ("encode", "partition", "write", "read", "decode"):
        for n in (1, 10, 100, 1000):
            assert {f"{step}, words, {n} a list", f"{step}, 5-field tuples, {n} a list"} <= names
    for line in written:
        assert line.keys() >= FIELDS
        assert isinstance(line["figure"], float)
        assert line["figure"] > 0
        assert isinstance(line["machine"], dict)
        assert line["machine"].keys() == {"cpu", "cores", "memory_gib", "kernel", "congestion_control"}
        assert isinstance(line["versions"], dict)
        assert {"python", "penstock", "ray"} <= line["versions"].keys()
    assert "record_path" in capsys.readouterr().out


def test_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)


def test_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["nothing-of-this-name"])


def test_a_failing_benchmark_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> None:
        bench.case("before", 1, "s")
        raise RuntimeError("on purpose")

    monkeypatch.setattr("benchmarks.idle.run", broken)
    assert main(["--quick", "--out", str(tmp_path), "idle"]) == 1
    assert len(lines(tmp_path / "idle.jsonl")) == 1


def test_goals_can_be_judged() -> None:
    """A goal that cannot be read would end a benchmark that has run for a quarter of an hour."""
    goals = set()
    for file in Path(benchmarks.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "goal":
                branches = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
                goals |= {(file.name, one.value) for one in branches if isinstance(one, ast.Constant)}
    assert len(goals) > 10
    for name, goal in goals:
        try:
            assert Case("", "", 1.0, "", goal=goal).met in (True, False, None)
        except (KeyError, ValueError) as error:
            pytest.fail(f"{name} has the goal {goal!r}: {error}")


@pytest.mark.parametrize(
    ("figure", "peer", "goal", "met"),
    [
        (8.0, 2.0, ">= 4", True),
        (7.9, 2.0, ">= 4", False),
        (0.7, 1.0, "<= 0.7", True),
        (4.9, None, "< 5", True),
        (5.0, None, "< 5", False),
        (5.0, None, None, None),
    ],
)
def test_goals_judge_the_ratio_or_the_figure(
    figure: float, peer: float | None, goal: str | None, met: bool | None
) -> None:
    case = Case("b", "c", figure, "s", peer="p" if peer else None, peer_figure=peer, goal=goal)
    assert case.met is met


def test_plans_of_graphs_that_need_no_hop_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_pair(_: random.Random, tasks: int) -> list[TrafficEdge]:
        return [(0, tasks - 1, 1.0)]

    monkeypatch.setattr(placement_plans, "FAMILIES", {"one pair": one_pair})
    bench = Bench("placement_plans", quick=True, runs=1, out=tmp_path, about={})
    placement_plans._over_nodes(bench)
    assert {case.figure for case in bench.cases} == {1.0}
    assert all("traffic between nodes 1.00x" in (case.note or "") for case in bench.cases)


def test_figures_are_kept_where_plots_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plots(bench: Bench) -> None:
        bench.plot("curve.png", "a curve", {"one": [(1, 1)]}, "x", "y")
        bench.case("behind the plot", 1, "s")

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    monkeypatch.setattr("benchmarks.idle.run", plots)
    assert main(["--quick", "--out", str(tmp_path), "idle"]) == 0
    assert [line["name"] for line in lines(tmp_path / "idle.jsonl")] == ["behind the plot"]
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "curve.png is left out, because matplotlib is not installed" in printed


def test_what_stamped_sinks_leave_is_read_by_one_function(tmp_path: Path) -> None:
    for counts in ({"a": 1}, {"b": 2}):
        sink = stamps.Counts(str(tmp_path))
        sink.write(list(counts.items()))
        sink.save()
    found = stamps.arrivals(tmp_path)
    assert sorted(map(str, (counts for _, counts, _ in found))) == ["{'a': 1}", "{'b': 2}"]
    assert all(at > 0 and received == 1 for at, _, received in found)
    assert list(tmp_path.iterdir()) == []
