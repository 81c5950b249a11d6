"""Starts jobs on Ray, and finds jobs that run there. `run` loads this module only when it needs Ray."""

from __future__ import annotations

import math
import threading
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import cluster
from penstock.actors.job_master import CONCURRENCY_GROUPS, JobMaster, in_parts
from penstock.actors.ray_link import RayLink
from penstock.host.carry.requests import Status
from penstock.host.decide.job_state import ENDED
from penstock.placement.groups import machines
from penstock.runtime.errors import JobExists, JobNotFound, NoCluster, OptionError
from penstock.runtime.status import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.bridge.paradigm_scheduler import DualOptions
    from penstock.host.carry.carrier_options import CarrierOptions
    from penstock.runtime.epochs.store import Store

# RayDP's executors read micro-batches from Ray's object store: several of some hundred megabytes at a time.
_DUAL_STORE_BYTES = 1 << 30

_ANSWER_S = 5.0

# For how long a job that has ended, or was killed with its cluster, may still hold its store.
_HELD_S = 15.0
_look_again = threading.Event()  # never set


def connect(
    address: str | None, workers: int, cpus_per_worker: float, dual: DualOptions | None, detached: bool
) -> None:
    """Connects to Ray. A cluster that is started for this program has room for the job, and for Spark's executors and
    micro-batches."""
    cpus, store_bytes = math.ceil(workers * cpus_per_worker) + 1, cluster.OBJECT_STORE_BYTES
    if dual is not None:
        cpus, store_bytes = cpus + dual.spark.executors * dual.spark.cores, _DUAL_STORE_BYTES
    cluster.connect(address, cpus=cpus, lasting=detached, store_bytes=store_bytes)


def start(name: str, packed: bytes, options: CarrierOptions, detached: bool) -> RayLink:
    """Starts a job on the cluster to which this program is connected. Returns the link to its JobMaster. `packed`: the
    job's plan and `options`, for the JobMaster."""
    _check_node_timeout(options.network.node_timeout_s)
    restarts = -1 if options.store is not None and options.epochs.max_restarts else 0
    actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(JobMaster).options(
        name=cluster.master_name(name),
        namespace=cluster.NAMESPACE,
        lifetime="detached" if detached else None,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(_masters_node(detached), soft=False),
        max_concurrency=64,
        max_restarts=restarts,
        max_task_retries=-1 if restarts else 0,
    )
    parts = in_parts(packed)
    wait_for_store(name, options.store)
    while True:
        try:
            master = actor.remote(name, *parts)
            break
        except ValueError as error:  # the name is taken
            if not cluster.is_ending(name):
                raise JobExists(
                    f"a job named {name!r} is running; stop that job (penstock.attach({name!r}).stop(), or "
                    f"penstock stop {name}), or give the flow another name"
                ) from error
    return RayLink(name, master, options.hang_timeout_s)


def _check_node_timeout(node_timeout_s: float) -> None:
    """Raises OptionError when Ray would declare a node dead that the job still waits for."""
    limit_s = cluster.patience_s()
    if node_timeout_s > limit_s:
        raise OptionError(
            "{node_timeout_s=} is longer than Ray itself waits for a node that it cannot reach, which is {limit} s; "
            "give {limit} or less, or make Ray wait longer: set RAY_health_check_failure_threshold (now {threshold}) "
            "in the environment of ray start on all nodes, and of this program",
            {"node_timeout_s": node_timeout_s},
            limit=f"{limit_s:g}",
            threshold=ray._raylet.Config.health_check_failure_threshold(),
        )


def _masters_node(detached: bool) -> str:
    """Returns the node for the JobMaster: where its driver is, or for a job that outlives its driver, the head. The job
    ends with each of the two in any case, so its JobMaster is on no third machine that may fail."""
    node: str = machines()[0].node_id if detached else ray.get_runtime_context().get_node_id()
    return node


def wait_for_store(name: str, store: Store | None) -> None:
    """Raises JobExists while a running job uses the store. A job that has just ended or was killed, perhaps with its
    cluster, has a moment to release the store. Afterwards the JobMaster itself checks again."""
    until = time.monotonic() + _HELD_S
    while store is not None and store.is_locked():
        if not cluster.is_ending(name) or time.monotonic() > until:
            raise JobExists(store.locked_by_another())
        _look_again.wait(0.1)


def find(name: str | None, address: str | None) -> tuple[str, object, Callable[[], RayLink]]:
    """Finds a running job; see run.attach. Returns its name, its host (`JobLink.host`), and what makes a link to it."""
    name, master = cluster.find(name, address)
    return name, master._actor_id, lambda: RayLink(name, master)


def jobs(address: str | None, silent_status: Callable[[str], JobStatus]) -> list[JobStatus]:
    """Returns the status of each running job; see run.jobs. `silent_status` gives the status of a job whose JobMaster
    does not answer."""
    found = []
    with suppress(NoCluster) if address is None else nullcontext():
        for place, names in cluster.jobs(address):
            for name in names:
                try:
                    status = cluster.get(cluster.find_master(name).ask.remote(Status()), timeout=_ANSWER_S)
                except (JobNotFound, RayActorError):  # it has ended meanwhile
                    continue
                except GetTimeoutError:
                    status = silent_status(name)
                if status.state not in ENDED:  # else its JobMaster only waits for drivers to fetch what they want
                    found.append(status.changed(cluster=place))
    return found
