"""Some of the simulated streams of tests/relaying/model.py; `make campaign-relays` runs ten thousand."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.relaying.model import run_seed

CHUNK = 50


@pytest.mark.parametrize("first", range(0, 400, CHUNK))
def test_every_task_gets_every_batch_once_and_in_order(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += run_seed(seed)
    assert all(
        counts[what] for what in ("batches", "forwarded", "handed over", "deaths", "back", "epochs", "stale", "crowds")
    )
    assert counts["OLD"] + counts["EARLY"], "nothing has come by two ways"


@pytest.mark.parametrize("seed", [24, 27, 158, 210, 694, 1545, 2200, 2548, 584, 816, 903])
def test_seeds_that_have_failed(seed: int) -> None:
    # The last three fail when a relay tells that an entry is delivered before its workers have the entry.
    run_seed(seed, calm=True)
