"""The table of planted faults: its entries fit the code, and the campaign tells a fault that is not found."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import planted_campaign
from tests.planting import PlantedFault, Seeds, Test, table

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("fault", table().values(), ids=table())
def test_an_entry_fits_the_code(fault: PlantedFault) -> None:
    assert (ROOT / fault.file).is_file()
    if isinstance(fault.finder, Test):
        file, _, name = fault.finder.node.partition("::")
        text = (ROOT / file).read_text()
        assert not name or f"\ndef {name}(" in text, "the finder is a test of the file, or all of them"
    with fault.plant():
        pass


@pytest.mark.parametrize("name", ["early-commit", "later-parts-stay"])
def test_a_fault_is_found(name: str) -> None:
    outcome = planted_campaign.look_for(table()[name])
    assert outcome.found, outcome.told
    assert not outcome.stale, outcome.told


def test_a_fault_that_changes_nothing_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_campaign, "SEEDS", 1)
    outcome = planted_campaign.look_for(PlantedFault("", "Nothing.", "", Seeds(1), contextlib.nullcontext))
    assert outcome == planted_campaign.Outcome(False, "not found in 1 seeds")


def test_the_campaign_fails_when_another_seed_finds_a_fault_than_that_of_its_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: Sequence[str], plant: str = "") -> subprocess.CompletedProcess[str]:
        found = "--plant" in command and command[command.index("--seeds") + 1] != "1"
        return subprocess.CompletedProcess(command, int(found), "FAILED seed 3: AssertionError: lost\n" * found, "")

    fault = PlantedFault("moved", "Nothing.", "", Seeds(7), contextlib.nullcontext)
    monkeypatch.setattr(planted_campaign, "_run", run)
    monkeypatch.setattr(planted_campaign, "table", lambda: {"moved": fault})
    monkeypatch.setattr("sys.argv", ["planted_campaign", "--jobs", "1"])
    assert planted_campaign.main() == 1
    assert "STALE moved: found by seed 3 (no longer by seed 7: write 3 into its entry)" in capsys.readouterr().out
