"""Putting snapshots together beside the process that asks for it, which does not grow with them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.runtime.epochs import compaction
from penstock.runtime.epochs.compaction import compact_snapshots
from penstock.runtime.epochs.manifest import Blob
from penstock.runtime.epochs.snapshot import Merged, encode_snapshot
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import SnapshotDamaged, StoreError
from penstock.runtime.records.pickling import dumps
from penstock.runtime.state.keyed import KeyedDelta, KeyedWhole, StageState

GROUPS = 8


def chain(store: Store, entries: int, deltas: int) -> tuple[list[Blob], dict[str, tuple[int, str]]]:
    """A whole snapshot and deltas upon it, and what they say."""
    state = {f"key {i}": (i, "value") for i in range(entries)}
    first = StageState({"state": KeyedWhole(dict(state))})
    blobs = [store.put("snapshots/000001-1-1", encode_snapshot({"op": (first, (0, 0, 0, 0))}, GROUPS))]
    for n in range(deltas):
        changed = {f"key {i}": (i + n, "changed") for i in range(n, entries, deltas)}
        state |= changed
        delta = StageState({"state": KeyedDelta(list(changed), list(changed.values()), [])})
        parts = encode_snapshot({"op": (delta, (n, 0, 0, 0))}, GROUPS)
        blobs.append(store.put(f"snapshots/{n + 2:06d}-1-1", parts))
    return blobs, state


@pytest.mark.parametrize("where", ["here", "in a process of its own"])
def test_what_is_compacted_says_the_same(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SMALL_BYTES", 1 << 40 if where == "here" else 0)
    store, target = Store.open(tmp_path, "job"), Store.open(tmp_path, "savepoint")
    blobs, state = chain(store, 500, 4)
    one = compact_snapshots(store, blobs, GROUPS, target, "snapshots/000009-1")
    merged = Merged(GROUPS)
    merged.add_task([target.get(one)], None)
    assert merged.operators["op"].maps["state"] == state


def test_what_goes_wrong_there_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "SMALL_BYTES", 0)
    store = Store.open(tmp_path, "job")
    blobs, _ = chain(store, 500, 2)
    for folder in ("snapshots", "copies"):
        (tmp_path / "job" / folder / "000002-1-1").unlink()
    with pytest.raises(SnapshotDamaged, match="snapshots/000002-1-1 is missing"):
        compact_snapshots(store, blobs, GROUPS, store, "snapshots/000009-1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StoreError, match="compact 3 snapshots ended with exit code 1"):
        compact_snapshots(store, blobs, GROUPS, store, "snapshots/000009-1")


@pytest.mark.parametrize("where", ["here", "in a process of its own"])
def test_who_asks_for_it_does_not_grow_with_the_state(where: str, tmp_path: Path) -> None:
    """Measured in a process that does nothing else: the most memory that it ever had, before and after."""
    program = """
        import sys
        from penstock.runtime.epochs import compaction
        from penstock.runtime.epochs.store import Store
        from penstock.runtime.records.pickling import loads
        def most():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
        if sys.argv[3] == "here":
            compaction.SMALL_BYTES = 1 << 40
        store = Store.open(sys.argv[1], "job")
        blobs = loads(open(sys.argv[2], "rb").read())
        before = most()
        blob = compaction.compact_snapshots(store, blobs, 8, store, "snapshots/000009-1")
        print(most() - before, blob.size // 1024)
    """
    blobs, _ = chain(Store.open(tmp_path, "job"), 150_000, 2)
    (tmp_path / "blobs").write_bytes(dumps(blobs))
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(tmp_path / "blobs"), where]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, size = map(int, said.split())  # KiB
    assert size > 2000
    assert grown > 5 * size if where == "here" else grown < size, f"{grown} KiB more for a snapshot of {size} KiB"
