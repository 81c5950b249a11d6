"""What the JobMaster makes of what it is told, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.host.decide.generations import why_not_built
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import PenstockError, SnapshotDamaged, StoreError, StoreUnreachable
from penstock.runtime.records.pickling import dumps, loads
from penstock.runtime.transport.base import PeerGone


def travelled(error: Exception) -> Exception:
    """An error as the JobMaster gets it of a worker."""
    again: Exception = loads(dumps(error))
    return again


def test_a_store_that_cannot_be_read_for_now_is_tried_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "job")
    blob = store.put("snapshots/00000001-1-1", [bytes(10_000)])
    for folder in ("snapshots", "copies"):
        (tmp_path / "job" / folder).rename(tmp_path / folder)
        (tmp_path / "job" / folder).write_text("in the way")
    with pytest.raises(StoreError) as refused:
        store.get(blob)
    for error in (refused.value, StoreUnreachable("no answer")):
        why = why_not_built(1, travelled(error))
        assert why == (f"their snapshots could not be read: {error}", False)


def test_tasks_that_can_never_be_built_are_not_tried_again() -> None:
    """Saved in a format of another release, say: nothing but somebody who changes something can help."""
    for error in (StoreError("this release cannot"), PenstockError("no"), RuntimeError("no"), None):
        assert why_not_built(1, error and travelled(error)) is None


def test_what_else_keeps_tasks_from_being_built() -> None:
    assert why_not_built(1, travelled(SnapshotDamaged("rot"))) == ("rot", True)
    assert why_not_built(1, travelled(PeerGone("worker 2"))) == (
        "worker 1 cannot reach another worker: worker 2",
        False,
    )
