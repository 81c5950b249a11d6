"""Joining a Ray cluster, or starting one on this machine when there is none."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import ray
from ray.exceptions import RayActorError

from penstock.actors import reaper
from penstock.actors.status import ENDED
from penstock.runtime.errors import JobNotFound, NoCluster

NAMESPACE = "penstock"

# Ray's object store carries control messages only here; its default of 30 % of memory would be reserved in /dev/shm.
_OBJECT_STORE_BYTES = 128 * 1024 * 1024

_NO_CLUSTER = (
    "no Ray cluster runs here that outlives this program; start one (ray start --head), set RAY_ADDRESS, or give "
    "its address"
)

_lock = threading.Lock()
_look_again = threading.Event()  # never set
_own = False  # the cluster that this process is connected to was started by it and ends with it


def workers_group(job: str) -> str:
    """The name of the placement group of a job's workers."""
    return f"penstock-workers-{job}"


def master_name(job: str) -> str:
    """The name of a job's JobMaster actor."""
    return f"penstock.job.{job}"


def connect(
    address: str | None, cpus: int = 1, *, lasting: bool = False, store_bytes: int = _OBJECT_STORE_BYTES
) -> None:
    """Make sure that this process is connected to Ray.

    An initialised Ray is used as it is. Otherwise `address` (or RAY_ADDRESS) is joined; with neither, a cluster that
    runs on this machine is joined, and when there is none, or `address` is "local", one is started that ends with this
    process and offers at least `cpus` CPUs, however many cores there are, and an object store of `store_bytes`.
    `lasting`: only a cluster that outlives this process will do; NoCluster is raised where there is none.
    """
    global _own  # noqa: PLW0603 - Ray's connection is a global of this process, and so is who started its cluster
    with _lock:
        if ray.is_initialized():
            if lasting and _own:
                raise NoCluster(_NO_CLUSTER)
            return
        # Says at every start that Ray uses tokens, which is its default and needs nothing of the user.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        common: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.WARNING, "log_to_driver": True}
        address = address or os.environ.get("RAY_ADDRESS")
        if address != "local":
            try:
                ray.init(address=address or "auto", **common)
                _own = False
                return
            except ConnectionError as error:
                if address:
                    raise NoCluster(f"no Ray cluster answers at {address}: {error}") from error
        if lasting:
            raise NoCluster(_NO_CLUSTER)
        ray.init(
            address="local",
            num_cpus=max(cpus, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=store_bytes,
            **common,
        )
        _own = True
        reaper.start(reaper.descendants(os.getpid()))


def is_ending(job: str) -> bool:
    """Whether a job has ended and only its JobMaster is still there, for the last drivers that ask; waits a moment for
    its name to come free."""
    try:
        master = find_master(job)
        state = ray.get(master.status.options(max_task_retries=0).remote())["state"]
    except (JobNotFound, RayActorError):
        return True
    over = state in ENDED
    if over:
        _look_again.wait(0.05)
    return over


def find_master(job: str) -> Any:
    """The handle of a running job's JobMaster; JobNotFound when there is none."""
    # Not get_actor alone: it answers from a cache, also for an actor that has died.
    entries = ray.util.list_named_actors(all_namespaces=True)
    names = {entry["name"] for entry in entries if entry["namespace"] == NAMESPACE}
    if master_name(job) in names:
        with contextlib.suppress(ValueError):
            return ray.get_actor(master_name(job), namespace=NAMESPACE)
    prefix = master_name("")
    jobs = ", ".join(sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix)))
    raise JobNotFound(f"no job {job!r} runs on this cluster; running jobs: {jobs or 'none'}")
