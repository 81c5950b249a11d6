"""`run(flow)`: a flow becomes a running job; `attach(name)`: a running job from another driver."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import ray

from penstock.actors import cluster
from penstock.actors.job import Job
from penstock.actors.job_master import REPORTS, JobMaster, JobOptions
from penstock.actors.worker import WorkerOptions
from penstock.runtime.channel import WINDOW_BYTES
from penstock.runtime.errors import FlowError, JobExists
from penstock.runtime.operators import Write

if TYPE_CHECKING:
    from penstock.runtime.flow import Flow


def run(
    flow: Flow,
    *,
    workers: int | None = None,
    parallelism: int | None = None,
    detached: bool = False,
    address: str | None = None,
    ring_bytes: int | None = None,
    window_bytes: int = WINDOW_BYTES,
    cpus_per_worker: float = 1.0,
    start_timeout_s: float = 60.0,
) -> Job:
    """Start `flow` as a job on Ray and return at once.

    `workers` is the number of worker processes (default: 1). `parallelism` replaces the flow's own default. A
    `detached` job outlives this process; any other ends with it. `address` is a Ray cluster's; by default the one
    that runs here is joined, or one is started for this process. `ring_bytes` is the size of each worker's inbox, a
    power of two: no record may be larger than about half of it. By default it is 2 MiB, and grows with the records
    that come. `window_bytes` bounds what is under way from one task to another.

    Raises FlowError or SourceError for a flow that cannot run, JobExists while a job of this name runs, NoCluster for
    a detached job where no cluster outlives this process; what goes wrong later is raised by `job.wait()`.
    """
    workers = 1 if workers is None else workers
    if workers < 1:
        raise FlowError(f"workers={workers}; it must be 1 or more")
    flow = copy.copy(flow)
    if parallelism is not None:
        flow.parallelism = parallelism
    plan = flow.plan(workers)
    cluster.connect(address, cpus=workers + 1, lasting=detached)
    options = JobOptions(workers, cpus_per_worker, start_timeout_s, WorkerOptions(ring_bytes, window_bytes))
    actor = ray.remote(concurrency_groups={REPORTS: 1})(JobMaster).options(
        name=cluster.master_name(flow.name),
        namespace=cluster.NAMESPACE,
        lifetime="detached" if detached else None,
        num_cpus=0,
        max_concurrency=64,
    )
    try:
        master = actor.remote(plan, options)
    except ValueError as error:
        raise JobExists(
            f"a job named {flow.name!r} is running; stop it (penstock.attach({flow.name!r}).stop()) or give the "
            "flow another name"
        ) from error
    sinks = [op.sink for op in flow.graph.operators.values() if isinstance(op, Write)]
    return Job(flow.name, master, sinks)


def attach(name: str, *, address: str | None = None) -> Job:
    """The running job of this name, started by another driver; raises JobNotFound when there is none."""
    cluster.connect(address, lasting=not ray.is_initialized())
    return Job(name, cluster.find_master(name), [])
