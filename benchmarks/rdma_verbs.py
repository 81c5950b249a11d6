"""READ, WRITE and send/recv, and RDMA beside TCP, between two guests with software RoCE; see README.md."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.common import Bench, Skipped, median
from tests.guests import packages
from tests.guests.guest import Guests

FILES = ("penstock/**/*.py", "tests/guests/*.py", "benchmarks/__init__.py", "benchmarks/rdma_guest.py")
LIMIT_S = 1800.0
CONFIG = "2 guests in QEMU, emulated processors, software RoCE over virtio"
NOTE = "software RoCE does the device's work in both kernels, with a system call for each post"


def run(bench: Bench) -> None:
    """See the module."""
    try:
        packages.fetch()
    except packages.Missing as missing:
        raise Skipped(str(missing)) from missing
    numbers = bench.pick((200, 500, 20_000), (5, 10, 200))
    command = ["python3", "-m", "benchmarks.rdma_guest", *map(str, numbers)]
    ended = Guests([command, command], files=FILES).run(LIMIT_S)
    if any(one.status != 0 for one in ended):
        raise RuntimeError(f"the guests have failed: {ended[0].output[-1000:]} {ended[1].output[-1000:]}")
    lines = [line.removeprefix("figure ") for line in ended[1].output.splitlines() if line.startswith("figure ")]
    figures = [json.loads(line) for line in lines]
    for figure in (one for one in figures if one["what"] == "verb"):
        name = f"{figure['name']} of {figure['size']:,} B"
        bench.case(f"{name}: time of one", figure["us"], "us", config=CONFIG, note=NOTE)
        bench.case(
            f"{name}: 16 under way", figure["per_s"], "1/s", config=CONFIG, note=f"{figure['mb_per_s']:.1f} MB/s"
        )
    of: dict[str, list[dict[str, Any]]] = {"RDMA": [], "TCP": []}
    for figure in (one for one in figures if one["what"] == "transport"):
        of[figure["name"]].append(figure)

    def beside(name: str, unit: str, runs: dict[str, list[float]], note: str | None = None) -> None:
        rdma, tcp = runs["RDMA"], runs["TCP"]
        more: dict[str, Any] = {"peer": "TCP in the same guests", "peer_figure": median(tcp), "config": CONFIG}
        bench.case(name, median(rdma), unit, note=note, runs=rdma, peer_runs=tcp, **more)

    beside("one way, 100 B, p50", "us", {kind: [one["us"] for one in runs] for kind, runs in of.items()}, NOTE)
    beside("100 B messages", "1/s", {kind: [one["per_s"] for one in runs] for kind, runs in of.items()})
    for end in ("sender", "receiver"):
        for key, what, unit in (
            ("cpu_us", "CPU of the process", "us a message"),
            ("guest_us", "CPU of the guest, its kernel included", "us a message"),
            ("calls", "system calls", "a message"),
        ):
            beside(f"{end}: {what}", unit, {kind: [one[end][key] for one in runs] for kind, runs in of.items()})
