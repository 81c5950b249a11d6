"""SOL and the Throughput test spread over nodes and workers as in the TurboStream paper: latency by placement, and what
stays on its node; see README.md.

The nodes are those of a simulated Ray cluster on this machine, so what crosses them costs no more than what crosses
workers: the latencies show what the plan saves between workers, the shares what it would save between machines.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import penstock as ps
from benchmarks.common import Bench, median, stop_ray, wait_until
from penstock.apps import sol, throughput
from penstock.apps.app import Cycle
from penstock.jobs.run import run as start_job
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import Method, PlacementOptions

#: Nodes and workers of the paper's Table II.
DEPLOYMENTS = ((1, 1), (1, 2), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8))
METHODS: tuple[Method, ...] = ("round-robin", "jstorm", "turbostream", "traffic")
SOL_RATE = 5_000
THROUGHPUT_RATE = 20_000
_STORE_BYTES = 80 << 20
NEVER = AdoptionOptions(margin=2.0, busy=float("inf"))  # measured and planned by, but never moved
_number = itertools.count()


@contextmanager
def simulated(nodes: int, cpus: int) -> Iterator[None]:
    """A Ray cluster of so many nodes on this machine, joined by this process."""
    import ray
    from ray.cluster_utils import Cluster

    stop_ray()
    before = os.environ.pop("RAY_ADDRESS", None)
    options = {"num_cpus": cpus, "object_store_memory": _STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**options)
        ray.init(address=cluster.address, namespace="penstock", logging_level="warning", log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


def measured(
    bench: Bench, make: Callable[[int], ps.Flow], nodes: int, workers: int, method: Method, last: str
) -> dict[str, float]:
    """Latency at the last operator (ms), and the share of the traffic between workers that stays on its node."""
    seconds = bench.pick(6.0, 1.0)
    options = PlacementOptions(method, nodes, replan_s=seconds / 4, adoption=NEVER)
    job = start_job(make(workers), workers=workers, placement=options, epoch_interval_s=5.0)
    try:
        wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
        began = job.status()["running_s"]
        wait_until(lambda: job.status()["running_s"] > began + seconds, "time goes by")
        status: dict[str, Any] = job.status()
    finally:
        job.cancel()
        job.wait(60, progress=False)
    placement = status["placement"]
    return {**status["operators"][last]["latency_ms"], "share": placement["intra_node_share"] or 0.0}


def flows() -> dict[str, Any]:
    """By name: what makes a flow for so many workers, and its last operator."""

    def sol_flow(workers: int) -> ps.Flow:
        source = ps.sources.Generator(Cycle(sol.messages(100)), SOL_RATE)
        return sol.topology(source, levels=5, tasks=5, name=f"bench-sol-{next(_number)}")

    def throughput_flow(workers: int) -> ps.Flow:
        source = ps.sources.Generator(Cycle(throughput.records(100)), THROUGHPUT_RATE)
        flow = throughput.topology(source, name=f"bench-throughput-{next(_number)}")
        flow.parallelism = workers
        return flow

    return {"SOL": (sol_flow, "sink"), "Throughput": (throughput_flow, "sink")}


def run(bench: Bench) -> None:
    """See the module."""
    rounds = max(1, bench.runs // 2)
    for nodes, workers in bench.pick(DEPLOYMENTS, DEPLOYMENTS[:3:2]):
        # All methods place the tasks of a single worker alike.
        methods = METHODS if workers > 1 else METHODS[:1]
        arithmetic = (workers / nodes - 1) / (workers - 1) if workers > 1 else 1.0
        with simulated(nodes, -(-workers // nodes) + 1):
            for name, (make, last) in flows().items():
                results = bench.take_turns(
                    {method: partial(measured, bench, make, nodes, workers, method, last) for method in methods},
                    rounds,
                    f"{name} {nodes}N{workers}W",
                )
                for method in methods:
                    for what, unit in (("p50", "ms"), ("p99", "ms"), ("share", "")):
                        runs = [result[what] for result in results[method]]
                        beside = [result[what] for result in results["round-robin"]]
                        bench.case(
                            f"{name} {nodes}N{workers}W, {method}: {'intra-node share' if what == 'share' else what}",
                            median(runs),
                            unit,
                            peer="round-robin" if workers > 1 else None,
                            peer_figure=median(beside) if workers > 1 else None,
                            config=f"{SOL_RATE if name == 'SOL' else THROUGHPUT_RATE:,} records/s",
                            note=f"even all to all: {arithmetic:.2%}" if what == "share" else "",
                            runs=runs,
                            peer_runs=beside if workers > 1 else [],
                        )
