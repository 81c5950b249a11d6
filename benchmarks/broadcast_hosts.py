"""Broadcast to tasks on four hosts: what the source's host sends, how often a batch is encoded, and how much of the
time that takes (docs/papers.md: W1, W2). The hosts are network namespaces of this machine (tests/namespaces).

What the source's worker sends is counted by its transport, with the heads of its frames and of the relays' messages.
The counters of the host's interface also have the heads of TCP/IP and Ethernet, acknowledgements, and what the
JobMaster and Ray say meanwhile. The same job without relays sends each batch to every worker.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Bench, Skipped, WrongResult, median
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Hosts
from tests.namespaces.ray_cluster import RayCluster

HOSTS = 4
TASKS = (4, 16, 64)
SIZES = (150, 16 * 1024)
#: What the heads of a message may take besides its body: for each host, and for each task on it.
HEADS, TASK_HEADS = 64, 8
# Ethernet, IP, and TCP with time stamps. An acknowledgement has nothing else.
_FRAME_HEADS = 14 + 20 + 32


def allowed(entries: int, record_bytes: int, tasks: list[int]) -> int:
    """The bytes that the source's host may send for entries whose records have so many bytes in all, to hosts with so
    many tasks each."""
    return sum(record_bytes + entries * (HEADS + TASK_HEADS * on_host) for on_host in tasks)


class _Cluster:
    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts = hosts
        self._folder = folder
        self._env = RayCluster(hosts, cpus=8).environment

    def job(self, **settings: Any) -> dict[str, Any]:
        """What the job has counted."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            given = json.dumps({"folder": folder, "hosts": HOSTS, **settings})
            ran = self._hosts[0].run([sys.executable, "-m", "benchmarks.broadcast_peer", given], self._env, ROOT)
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        if not found["right"]:
            raise WrongResult(f"{settings}: a task has not seen every record once, in order")
        return found


def _measure(bench: Bench, cluster: _Cluster, size: int, tasks: int) -> None:
    count = bench.pick({150: 20_000}.get(size, 4_000), 500)
    workers = HOSTS if tasks == HOSTS else 2 * HOSTS
    settings = {"count": count, "size": size, "tasks": tasks, "workers": workers}
    with_relays, without = "relays", "no relays"
    found = bench.take_turns(
        {
            with_relays: lambda: cluster.job(**settings, relays=True),
            without: lambda: cluster.job(**settings, relays=False),
        }
    )
    what = f"{size:,} B to {tasks} tasks by {workers} workers"

    def sent(one: dict[str, Any]) -> float:
        return float(one["transports"]) / allowed(one["stream"]["entries"], count * size, one["elsewhere"])

    def of(name: str, figure: Callable[[dict[str, Any]], float]) -> list[float]:
        return [figure(one) for one in found[name]]

    last = found[with_relays][-1]
    stream, host = last["stream"], last["host"]
    encodings = of(with_relays, lambda one: one["stream"]["encodings"] / one["stream"]["entries"])
    bench.case(
        f"{what}: encodings of a batch",
        max(encodings),
        "",
        goal="<= 1",
        note=f"{stream['entries']:,} batches of {count:,} records",
        runs=encodings,
    )
    heads = _FRAME_HEADS * host["frames"]
    bench.case(
        f"{what}: bytes that the source's host sends, of those allowed",
        max(of(with_relays, sent)),
        "",
        goal="<= 1",
        note=f"{last['transports'] / stream['entries']:,.1f} bytes a batch; the interface has sent "
        f"{(host['bytes'] - heads) / last['transports']:.3f} times that, and {heads / host['bytes']:.1%} of its bytes "
        f"are heads of TCP/IP; without relays {median(of(without, sent)):.2f}",
        runs=of(with_relays, sent),
    )
    share = of(with_relays, lambda one: one["stream"]["encoding_ms"] / 10 / one["host"]["thread_s"])
    bench.case(
        f"{what}: encoding's share of the source thread's processor time",
        median(share),
        "%",
        note=f"{stream['encoding_ms'] * 1000 / stream['encodings']:.1f} us a batch",
        runs=share,
    )
    measures: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "processor time of the source's thread": ("us a record", lambda one: one["host"]["thread_s"] / count * 1e6),
        "until all tasks have all": ("records/s", lambda one: count / one["host"]["wall_s"]),
    }
    for name, (unit, figure) in measures.items():
        ours, theirs = of(with_relays, figure), of(without, figure)
        bench.case(
            f"{what}: {name}",
            median(ours),
            unit,
            peer=without,
            peer_figure=median(theirs),
            runs=ours,
            peer_runs=theirs,
        )
    joined = of(with_relays, lambda one: one["joined_s"])
    bench.case(f"{what}: the job runs -> all channels have joined", median(joined), "s", runs=joined)


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        raise Skipped(reason)
    # Not in /dev/shm, of which each host has its own.
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Hosts(HOSTS, one_clock=True) as hosts:
        cluster = _Cluster(hosts, Path(folder))
        for size in bench.pick(SIZES, SIZES[:1]):
            for tasks in bench.pick(TASKS, TASKS[:2]):
                _measure(bench, cluster, size, tasks)
            # The same on one host: `job` compares the answers.
            cluster.job(count=500, size=size, tasks=HOSTS, workers=2, hosts=1, relays=True)
