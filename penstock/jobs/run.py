"""`run(flow)`: a flow becomes a running job; `attach(name)`: a running job from another driver.

The options of a job are described in options.py, and everything that happens before its start is in prepare.py.
"""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from penstock.host.process.network import NODE_TIMEOUT_S, TransportName
from penstock.jobs import farewell
from penstock.jobs.job import Job, known_job, local_jobs, silent_status
from penstock.jobs.options import JobOptions, paragraphs
from penstock.jobs.prepare import Prepared, default_checkpoints, prepare, prepare_to_resume, tidying
from penstock.placement.options import Method, PlacementOptions
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import JobExists, JobNotFound
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.exchange.output_cache import MEMORY_BYTES
from penstock.runtime.mistakes import refusing
from penstock.runtime.operators.ends import Write
from penstock.runtime.program.flow import check_flow
from penstock.runtime.status import JobStatus

if TYPE_CHECKING:
    from penstock.bridge.burst import BurstOptions
    from penstock.bridge.session import SparkOptions
    from penstock.host.carry.job_link import JobLink
    from penstock.runtime.program.flow import Flow
    from penstock.runtime.transport.certificates import Tls


@refusing
def run(
    flow: Flow,
    *,
    workers: int | None = None,
    parallelism: int | None = None,
    local: bool = False,
    detached: bool = False,
    address: str | None = None,
    ring_bytes: int | None = None,
    window_bytes: int = CREDIT_WINDOW_BYTES,
    cache_bytes: int = MEMORY_BYTES,
    check_shared: bool = False,
    cpus_per_worker: float = 1.0,
    start_timeout_s: float | timedelta = 60.0,
    epoch_interval_s: float | timedelta | None = 1.0,
    epoch_timeout_s: float | timedelta = 60.0,
    checkpoints: str | os.PathLike[str] | None = None,
    max_restarts: int = 10,
    max_attempts: int = 3,
    hang_timeout_s: float | timedelta = 60.0,
    savepoint: str | os.PathLike[str] | None = None,
    dual: str | BurstOptions = "off",
    spark: SparkOptions | None = None,
    placement: Method | PlacementOptions = "auto",
    nodes: int | None = None,
    replan_s: float | timedelta | Literal["auto"] | None = None,
    spares: bool = True,
    transport: TransportName = "auto",
    ports: tuple[int, int] | None = None,
    tls: bool | Tls = False,
    node_timeout_s: float | timedelta = NODE_TIMEOUT_S,
    trees: int | str = "auto",
) -> Job:
    """Starts `flow` as a job, on Ray or in processes of this program, and returns at once.

    Durations (parameters whose names end in `_s`) are seconds or timedeltas. `help(penstock.run)` and docs/running.md
    describe each parameter.

    Errors: FlowError or SourceError for a flow that cannot run, StoreError when `checkpoints` cannot be used, JobExists
    while a job of this name runs, NoCluster for a detached job when no cluster outlives this process. `job.wait()`
    raises all later errors, among them StoreError when a machine of the job cannot use the store.
    """
    given = dict(locals())
    check_flow(given.pop("flow"), "run()")
    return start(prepare(flow, JobOptions(**given)))


run.__doc__ = f"{inspect.cleandoc(run.__doc__ or '')}\n\n{paragraphs()}"


@refusing
def resume(
    name: str,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    local: bool = False,
    detached: bool = False,
    address: str | None = None,
) -> Job:
    """Starts a job again from its last complete epoch, after it has failed or its cluster or program has gone.

    Only the store at `checkpoints` is needed: the flow and its options are saved there too. `workers`: a new number of
    workers (default: as before). `local`: as of `run`; the job may have run on Ray before, and the other way round. A
    local job runs without Spark and without a placement, whatever the job had on Ray.
    Raises JobNotFound when the store has no epoch of that job, and JobExists while the job runs.
    """
    given = dict(locals())
    return start(prepare_to_resume(given.pop("name"), JobOptions(**given)))


def start(prepared: Prepared) -> Job:
    """Starts a job that is prepared, and returns its handle."""
    flow, options = prepared.flow, prepared.options
    with tidying(prepared.carrier):
        link = _local_link(prepared) if options.local else _link_on_ray(prepared)
    sinks = {name: op.sink for name, op in flow.graph.operators.items() if isinstance(op, Write)}
    job = Job(flow.name, link, sinks, prepared.program)
    if not options.detached:
        farewell.remember(job)
    return job


def _link_on_ray(prepared: Prepared) -> JobLink:
    from penstock.actors import on_ray

    name, options, carrier = prepared.flow.name, prepared.options, prepared.carrier
    on_ray.connect(options.address, carrier.workers, carrier.cpus_per_worker, carrier.dual, options.detached)
    if carrier.resume:
        on_ray.wait_for_store(name, carrier.store)
        _check_not_ended(prepared)
    assert prepared.packed is not None
    return on_ray.start(name, prepared.packed, carrier, options.detached)


def _local_link(prepared: Prepared) -> JobLink:
    from penstock.local.local_job import LocalJob

    name, carrier = prepared.flow.name, prepared.carrier
    if carrier.resume:
        _check_not_ended(prepared)
    for job in local_jobs():
        if job.name == name:
            raise JobExists(
                f"a job named {name!r} is running in this program; stop that job (job.stop() or job.cancel(), "
                "then job.wait()) or give the flow another name"
            )
    if carrier.store is not None and carrier.store.is_locked():
        raise JobExists(carrier.store.locked_by_another())
    return LocalJob(prepared.plan, carrier, prepared.program)


def _check_not_ended(prepared: Prepared) -> None:
    """Raises JobNotFound when a job that is to be resumed has ended while it was prepared."""
    store = prepared.carrier.store
    if store is not None and (store.ended() is not None or store.latest() is None):
        raise JobNotFound(
            f"the job {prepared.flow.name!r} of {store.place} has ended just now, so there is nothing to resume"
        )


def attach(name: str | None = None, *, address: str | None = None) -> Job:
    """The handle of the running job of this name, which another program may have started; without a name, of the only
    running job.

    Within one program, a running job has one handle: a second call returns the handle of the first call, or of `run`.
    A local job (`run(local=True)`) can only be reached by its own program. Any other job is looked for on the cluster
    to which this program is connected, otherwise on the cluster of `address` or RAY_ADDRESS, otherwise on all clusters
    with a node on this machine. Raises JobNotFound when there is no such job, and without a name also when several jobs
    run.
    """
    here = [job for job in local_jobs() if name in (None, job.name)] if address is None else []
    if len(here) > 1:
        raise JobNotFound(f"several jobs run: {', '.join(job.name for job in here)}; give the name of one")
    if here:
        return here[0]
    from penstock.actors import on_ray

    try:
        name, host, link = on_ray.find(name, address)
        return known_job(name, host) or Job(name, link(), {})
    except JobNotFound as error:
        if name is not None and Store.open(default_checkpoints(), name).is_locked():
            raise JobNotFound(
                f"no job {name!r} runs on a cluster that this program can reach, but a job of this name is using its "
                f"checkpoint store. A local job (local=True, --local) belongs to the program that runs it, and only "
                "that program can reach it: use its Job there, or press Ctrl-C in its terminal"
            ) from error
        raise


def jobs(*, address: str | None = None) -> list[JobStatus]:
    """The status of each running job, on the clusters where `attach` looks; "cluster" is the address of its cluster.

    The list is empty when there is no cluster. When a JobMaster does not answer within seconds, the entry is what
    `Job.status()` knows in this program. If that is nothing, the entry has the state UNKNOWN, and zeros."""
    from penstock.actors import on_ray

    here = [job.status().changed(cluster="this program") for job in local_jobs()]
    return here + on_ray.jobs(address, silent_status)
