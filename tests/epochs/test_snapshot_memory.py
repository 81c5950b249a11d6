"""Snapshots are read and put together frame by frame, and need little memory beside what comes out."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.runtime.epochs.manifest import Blob, TaskEntry
from penstock.runtime.epochs.snapshot import encode_snapshot
from penstock.runtime.epochs.store import Store
from penstock.runtime.records.pickling import dumps
from penstock.runtime.state.keyed import KeyedDelta, KeyedValues, KeyedWhole, StageState

GROUPS = 8
ENTRIES = 300_000


def saved(folder: Path, how: str) -> list[Blob]:
    """The snapshots of a task with a large map."""
    store = Store.open(folder, "job")
    state = {f"key {i}": "x" * 100 + str(i) for i in range(ENTRIES)}
    changed = list(state)[::1000]
    deltas = {
        "whole": [KeyedWhole(state)],
        "changes": [KeyedWhole(state), KeyedDelta(changed, [state[key] + "!" for key in changed], [])],
        "changes alone": [KeyedDelta(list(state), list(state.values()), []), KeyedDelta(changed, changed, [])],
        "values": [KeyedWhole(state), KeyedValues(ENTRIES, [], dict.fromkeys(state, 1))],
    }[how]
    blobs = []
    for n, delta in enumerate(deltas, 1):
        parts = encode_snapshot({"op": (StageState({"state": delta}), (0, 0, 0, 0))}, GROUPS)
        blobs.append(store.put(f"snapshots/{n:06d}-1-1", parts))
    return blobs


def measured(program: str, folder: Path, blobs: list[Blob]) -> tuple[int, ...]:
    """What a program says in a process of its own."""
    task = TaskEntry(
        number=1, name="op[0]", index=0, parallelism=1, operators=["op"], finished=False, groups=None, blobs=blobs
    )
    (folder / "task").write_bytes(dumps(task))
    begin = """
        import sys
        from penstock.runtime.records.codec import FRAME_BYTES
        from penstock.runtime.epochs.snapshot import Merged, compact, encode_snapshot
        from penstock.runtime.epochs.store import Store
        from penstock.runtime.epochs import compaction
        from penstock.runtime.records.pickling import loads
        def memory(which):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(which))
        store = Store.open(sys.argv[1] , "job")
        blobs = loads(open(sys.argv[1] + "/task", "rb").read()).blobs
        merged = Merged(8)
        before = memory("VmRSS")
    """
    command = [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(program), str(folder)]
    return tuple(map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


@pytest.mark.parametrize("how", ["whole", "changes", "values"])
def test_restoring_needs_little_beside_the_state(how: str, tmp_path: Path) -> None:
    blobs = saved(tmp_path, how)
    program = """
        merged.add_task(map(store.pieces, blobs), None)
        most = memory("VmHWM")
        assert len(merged.operators["op"].maps["state"]) == 300_000
        print(most - before, memory("VmRSS") - before)
    """
    most, left = measured(program, tmp_path, blobs)  # KiB
    whole = blobs[0].size // 1024
    assert whole > 32_000
    if how != "values":  # of which small ones are left
        assert left > 1.5 * whole
        assert most < left + 20_000, f"{most} KiB at most, and {left} KiB in the end"
    else:
        assert most < 2.2 * whole + 30_000, f"{most} KiB at most, for a base of {whole} KiB"


@pytest.mark.parametrize("how", ["whole", "changes"])
def test_a_base_of_any_size_is_compacted_in_little_memory(how: str, tmp_path: Path) -> None:
    blobs = saved(tmp_path, how)
    program = """
        blob = store.put_pieces("snapshots/000009-1-1", compact([lambda b=b: store.pieces(b) for b in blobs], 8))
        most = memory("VmHWM")
        merged.add_task([store.pieces(blob)], None)
        assert sum(value.endswith("!") for value in merged.operators["op"].maps["state"].values()) in (0, 300)
        print(most - before, blob.size // 1024)
    """
    most, size = measured(program, tmp_path, blobs)  # KiB
    assert size > 32_000
    assert most < size, f"{most} KiB at most, for a base of {size} KiB"


def test_compacting_changes_needs_little_beside_the_changed_entries(tmp_path: Path) -> None:
    blobs = saved(tmp_path, "changes alone")
    taking = """
        from penstock.runtime.epochs.snapshot import Chain
        chain = Chain(8)
        for blob in blobs:
            chain.add(store.pieces(blob))
        print(memory("VmRSS") - before)
    """
    compacting = """
        blob = store.put_pieces("snapshots/000009-1-1", compact([lambda b=b: store.pieces(b) for b in blobs], 8))
        print(memory("VmHWM") - before, blob.size // 1024)
    """
    (entries,) = measured(taking, tmp_path, blobs)  # KiB
    most, size = measured(compacting, tmp_path, blobs)
    assert size > 32_000
    assert most < entries + size, f"{most} KiB at most, for {entries} KiB of entries and {size} KiB in the store"
