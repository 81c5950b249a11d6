"""Some of the simulated trees of tests/multicast/sim.py; `make campaign-trees` runs ten thousand."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.multicast.sim import run_seed

CHUNK = 50


@pytest.mark.parametrize("first", range(0, 400, CHUNK))
def test_every_node_gets_every_entry_once_and_in_order(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += run_seed(seed)
    assert all(counts[what] for what in ("entries", "switches", "handovers", "join", "leave", "deaths", "broken"))
