"""The table of planted faults: its entries fit the code, and the campaign tells a fault that is not found."""

from __future__ import annotations

import contextlib
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


def test_a_fault_that_changes_nothing_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_campaign, "SEEDS", 1)
    outcome = planted_campaign.look_for(PlantedFault("", "Nothing.", "", Seeds(1), contextlib.nullcontext))
    assert outcome == planted_campaign.Outcome(False, "not found in 1 seeds")
