"""A job is checked, planned and pickled once before its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.apps import cli
from penstock.jobs import prepare as prepare_module
from penstock.jobs.options import JobOptions
from penstock.jobs.prepare import prepare
from penstock.runtime.program import plan as plan_module
from penstock.runtime.records.pickling import Program

FLOW = """
import penstock as ps

flow = ps.Flow("prepared")
flow.read(ps.sources.Memory([1, 2])).write(ps.sinks.Null())
"""


def simple(name: str = "prepared") -> ps.Flow:
    flow = ps.Flow(name)
    flow.read(ps.sources.Memory([1, 2])).write(ps.sinks.Null())
    return flow


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each plan and each pickling of a job in this process."""
    done: list[str] = []

    def noting(word: str, function: Any) -> Any:
        def note(*args: Any, **options: Any) -> Any:
            done.append(word)
            return function(*args, **options)

        return note

    monkeypatch.setattr(plan_module, "make_plan", noting("plan", plan_module.make_plan))
    monkeypatch.setattr(prepare_module, "packed_with_plan", noting("pickle", prepare_module.packed_with_plan))
    return done


def test_run_plans_and_pickles_once(tmp_path: Path, counted: list[str]) -> None:
    ps.run(simple(), local=True, checkpoints=tmp_path).wait(progress=False)
    assert counted == ["plan", "pickle"]


def test_the_command_plans_and_pickles_once(tmp_path: Path, counted: list[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(FLOW)
    assert cli.main(["run", str(file), "--local", "--no-progress", "--checkpoints", str(tmp_path / "epochs")]) == 0
    assert counted == ["plan", "pickle"]


@pytest.mark.parametrize("command", ["run", "explain"])
def test_a_plan_that_is_shown_has_the_options_and_checks_of_run(
    command: str, tmp_path: Path, counted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(FLOW)
    assert cli.main([command, str(file), "--workers", "3", "--nodes", "9"]) == 2
    assert "--nodes 9; it must be 1 to 3" in capsys.readouterr().err
    assert not counted


@pytest.mark.parametrize("arguments", [["explain", "--local"], ["plan", "--slots", "2"]], ids=["explain", "plan"])
def test_a_plan_that_is_shown_is_planned_once(arguments: list[str], tmp_path: Path, counted: list[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(FLOW)
    assert cli.main([arguments[0], str(file), *arguments[1:]]) == 0
    assert counted == ["plan"]


def test_the_saved_program_is_what_the_processes_get(tmp_path: Path) -> None:
    prepared = prepare(simple(), JobOptions(workers=2, checkpoints=tmp_path))
    assert prepared.packed is not None
    assert prepared.carrier.program == prepared.packed
    _, (plan, carrier) = Program.loads(prepared.packed)
    assert [chain.name for chain in plan.chains] == [chain.name for chain in prepared.plan.chains]
    assert (carrier.workers, carrier.flow.name) == (2, "prepared")


def test_a_local_job_without_epochs_is_not_pickled() -> None:
    assert prepare(simple(), JobOptions(local=True, epoch_interval_s=None)).packed is None


def test_the_options_are_checked_before_the_flow_is_planned(counted: list[str]) -> None:
    with pytest.raises(ps.FlowError, match="nodes=5; it must be 1 to 2"):
        prepare(simple(), JobOptions(workers=2, nodes=5))
    assert not counted


def test_a_flow_keeps_its_own_parallelism() -> None:
    flow = simple()
    assert prepare(flow, JobOptions(parallelism=3, local=True, epoch_interval_s=None)).flow.parallelism == 3
    assert flow.parallelism is None
