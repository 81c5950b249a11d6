"""The memory of a job's processes beside the size of its state, and what a key costs; see README.md.

The job runs in a program of its own (state_memory_peer.py), which checks its results. What is measured is the memory of
the JobMaster, of the processes that compact snapshots, and of workers that restore their state.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from typing import Any

import psutil

from benchmarks.common import Bench, run_script
from benchmarks.state_memory_peer import KINDS, LIMIT_S, WORKERS

MB = 1_000_000
VALUE_BYTES = 1000  # in the state of a key
#: The JobMaster has less than this, whatever the state.
MASTER_MB = 300
_TIMES_MEMORY = 5  # of the state: what all processes of a job, and the kernel's pages of its files, may need
_TIMES_DISK = 10  # of the state: snapshots and their copies of several epochs, a savepoint, a compaction under way


def run(bench: Bench) -> None:
    """See the module."""
    for kind in KINDS:
        _a_key(bench, kind, bench.pick(1_000_000, 20_000))
    for carrier in bench.pick(("local", "ray"), ("local",)):
        for keys in bench.pick([1_000_000, 2_000_000], [20_000]):
            _large(bench, carrier, keys)


def _a_key(bench: Bench, kind: str, keys: int) -> None:
    """What a key of a kind of state takes."""
    found = _measured({"what": kind, "keys": keys})
    config = f"{keys:,} keys, 1 worker"
    bench.case(f"a key of {kind}, in memory", found["memory"], "bytes", config=config)
    bench.case(f"a key of {kind}, in a whole snapshot", found["snapshot"], "bytes", config=config)


def _large(bench: Bench, carrier: str, keys: int) -> None:
    """The memory of the processes of a job with so many keys."""
    size = keys * VALUE_BYTES
    if (reason := _no_room(size)) is not None:
        bench.say(f"without the state of {size / MB:,.0f} MB: {reason}")
        return
    settings = {"local": carrier == "local", "keys": keys, "size": VALUE_BYTES}
    settings |= bench.pick({"rate": 5000, "interval_s": 2.0}, {"rate": 4000, "interval_s": 0.5})
    found = _measured({"what": "large", **settings})
    bench.say(f"state_memory {carrier}: {found}")
    state = found["state"] / MB
    name = f"{size / MB:,.0f} MB, {carrier}"
    share = f"{state / WORKERS:,.0f} MB of the state"
    more: dict[str, Any] = {
        "config": f"{keys:,} keys of {VALUE_BYTES} bytes, {WORKERS} workers, epochs of {settings['interval_s']:g} s",
    }
    grown = (found["master"] - found["master_at_first"]) / MB
    bench.case(
        f"JobMaster, {name}",
        found["master"] / MB,
        "MB",
        goal=f"< {MASTER_MB}",
        note=f"the most; {grown:,.0f} MB more than before the first record",
        **more,
    )
    for what, which, note in (
        ("a process that compacts", "compaction", f"the most of {found['compactions']}; it is given {share}"),
        ("a worker with all keys", "worker", f"it has {share}"),
        ("a worker while it saves", "running", "the most until the kill"),
        ("a new worker that restores", "restoring", f"the most until the job runs again, {found['restored_s']:.1f} s"),
        ("a worker that goes back", "going_back", "the most until the job runs again"),
    ):
        figure = found[which] / MB
        bench.case(f"{what}, {name}", figure, "MB", peer="its state", peer_figure=state / WORKERS, note=note, **more)
    a_key = (found["worker"] - found["worker_at_first"]) * WORKERS / keys
    bench.case(f"a key in memory, {name}", a_key, "bytes", note=f"{found['state'] / keys:,.0f} in a snapshot", **more)


def _measured(settings: dict[str, Any]) -> dict[str, Any]:
    """What a program of its own has found. It waits for conditions, so this limit is for what hangs."""
    printed = run_script("benchmarks.state_memory_peer", settings, timeout=4 * LIMIT_S)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])  # Ray prints what its processes log before it
    return found


def _no_room(size: int) -> str | None:
    """Why this machine cannot have a job with so much state, if so."""
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(tempfile.gettempdir()).free
    for what, there, wanted in (("memory", memory, _TIMES_MEMORY * size), ("disk", disk, _TIMES_DISK * size)):
        if there < wanted:
            return f"it takes up to {wanted / MB:,.0f} MB of {what}, and {there / MB:,.0f} MB are free"
    return None
