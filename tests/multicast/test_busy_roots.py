"""Some stories of roots with other work, on a scripted clock; `make campaign-busy-roots` plays the whole grid."""

from __future__ import annotations

import pytest

from tests.multicast.busy_roots import CHANGES, WORST, Cell, carried, outcome, played, told


@pytest.mark.parametrize("cell", [Cell(100, 50, 8, 0.95), Cell(100, 10, 8, 1.2)], ids=str)
def test_a_tree_that_adjusts_itself_carries_what_the_best_fixed_one_does(cell: Cell) -> None:
    """Before, it stayed binomial, because the queue model left out the thread's other work."""
    found = outcome(cell)
    assert not found.failed, told(found)
    assert found.part >= WORST


def test_a_pause_of_the_source_does_not_change_the_tree_for_good() -> None:
    """Before, the tree that was wide enough got more children after a pause, and carried less from then on."""
    cell = Cell(100, 50, 8, 1.0)
    rate = 0.8 * carried(cell)[2]
    before, after = (played(cell, None, rate, pause_at_s=pause_at_s) for pause_at_s in (None, 2.0))
    assert after.sent >= 0.99 * before.sent
    assert len(after.limits) <= CHANGES
    assert carried(cell)[after.limits[-1][1] if after.limits else 4] > rate
