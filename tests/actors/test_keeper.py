"""The JobMaster's keeper of the store: which epoch it goes back to."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.actors.collected import Collected
from penstock.actors.keeper import Keeper
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import SnapshotDamaged


def manifest(epoch: int) -> Manifest:
    return Manifest(job="job", epoch=epoch, created=1.5, final=False, key_groups=8, tasks=[], collected=[])


@pytest.fixture
def keeper(tmp_path: Path) -> Keeper:
    store = Store.open(str(tmp_path), "job")
    for epoch in (1, 2, 3):
        store.write_manifest(manifest(epoch))
    return Keeper(store, Collected(epochs=True), said=lambda reason: None)


def test_an_epoch_that_was_refused_is_not_chosen_again(keeper: Keeper) -> None:
    """Its bytes are as they were written, and yet no task could read them."""
    found = keeper.older(3, "no readable header")
    assert found is not None
    assert found.epoch == 2
    assert list(keeper.store.epochs()) == [2, 1]
    found = keeper.older(2, "no readable header")
    assert found is not None
    assert found.epoch == 1


def test_without_one_before_it_the_reason_is_told(keeper: Keeper) -> None:
    with pytest.raises(SnapshotDamaged, match="epoch 1: no readable header"):
        keeper.older(1, "no readable header")
