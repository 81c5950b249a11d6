"""Joins a Ray cluster, or starts one on this machine when there is none, and notices when the cluster has gone.

A cluster that a program has started for itself (by `ray.init`, as this module does) ends with that program, so no other
program may run its jobs there. `run` joins the cluster that Ray itself would join: the one of the address that was
given, or of RAY_ADDRESS, or the one to which `ray start` has added this machine. It never joins a cluster that was only
found among the running processes. Only `attach`, which starts nothing, looks at such clusters.

Ray's native code ends a whole process that has lost its cluster: after 60 s without the head (the GCS), and at once
when the process writes to a dead raylet and its parent is process 1. This module prevents both, and a thread tells the
jobs that the cluster has gone.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

# Ray takes a process whose parent is process 1 for a process whose raylet has died, unless it is told a raylet's
# process id. Ray reads this id once, when it is loaded, and uses it in a driver for nothing else. Process 1 never dies.
_PUT_OFF = {"RAY_RAYLET_PID": "1"} if "ray" not in sys.modules and "RAY_RAYLET_PID" not in os.environ else {}
os.environ.update(_PUT_OFF)
import psutil  # noqa: E402 - Ray loads it too
import ray  # noqa: E402

for _name in _PUT_OFF:
    del os.environ[_name]  # but not for the processes that this process starts

from ray._private import auto_init_hook  # noqa: E402, PLC2701 - no public name tells this
from ray.exceptions import GetTimeoutError, RayActorError  # noqa: E402

from penstock.actors import head_client  # noqa: E402
from penstock.host.carry.requests import Status  # noqa: E402
from penstock.host.decide.job_state import ENDED  # noqa: E402
from penstock.host.process import reaper  # noqa: E402
from penstock.host.process.hangs import SilenceDetector  # noqa: E402
from penstock.host.process.starter import started  # noqa: E402
from penstock.runtime import standard_streams  # noqa: E402
from penstock.runtime.errors import ClusterGone, JobNotFound, NoCluster, PenstockError  # noqa: E402

logger = logging.getLogger(__name__)

NAMESPACE = "penstock"


_leaving = False  # this process is about to end, and Ray to disconnect


@atexit.register  # registered after Ray's own function, and so called before Ray disconnects
def _stay_disconnected() -> None:
    """Prevents threads that still wait for a job when this process ends from connecting to Ray again, or starting a
    cluster."""
    global _leaving  # noqa: PLW0603
    _leaving = True
    auto_init_hook.enable_auto_connect = False


def stop_at_exit() -> None:
    """Stops the calling thread when this process is about to end. A thread of this package calls this before it calls
    Ray.

    Ray's native code ends the process at once, with exit code 1, when a thread calls Ray after it has disconnected.
    """
    if _leaving and threading.current_thread().daemon:
        threading.Event().wait()  # for good: the process does not wait for daemon threads


# Ray's object store carries control messages only here; its default of 30 % of memory would be reserved in /dev/shm.
OBJECT_STORE_BYTES = 128 * 1024 * 1024

_NO_CLUSTER = (
    "no Ray cluster runs here that outlives this program; start one (ray start --head), set RAY_ADDRESS, or give "
    "the address of one (address=..., or --address)"
)

_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_FOR_EVER_S = "31536000"
# A head that is started again elsewhere, as in a cluster with an external store, has this long to come back. It is
# Ray's own limit. When this node's raylet has gone too, nothing will come back.
_HEAD_BACK_S = 60.0
# A look at a silent head takes a second more. Of a longer time between two looks, no more counts than a part of the
# limit, three seconds.
_HEAD_LOOKS = 20
_LOOK_S = 1.0
# The processes of a cluster that is stopped end one after the other.
_GOING_S = 15.0
# A raylet that has been gone for so long is not the first process of a whole cluster that ends.
_ENDED_S = 3.0
_SLICE_S = 1.0

# A cluster that was only found among the processes may belong to another network. Its address may then lead nowhere, or
# to something else, and Ray itself would try for minutes.
_FOUND_ANSWERS_S = 3.0
# A head that is named, or to which this machine was added, may be busy, or just being started.
_NAMED_ANSWERS_S = 15.0
# The head of a cluster speaks HTTP/2: it answers a client's preface with its own, a frame of settings. Four bytes tell
# the kind of a frame.
_SETTINGS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

# How long a JobMaster may take to say whether its job has ended.
_ANSWER_S = 5.0

_lock = threading.Lock()
_look_again = threading.Event()  # never set


class _Connection:
    """A connection of this process to a cluster. A thread of its own watches it until the connection or the cluster
    ends."""

    def __init__(self, *, own: bool) -> None:
        self.own = own  # the cluster was started by this process and ends with it
        self.address = str(ray.get_runtime_context().gcs_address)
        self.gone: ClusterGone | None = None
        self._raylet = str(ray._private.worker._global_node.raylet_socket_name)
        self._head = ray._private.worker.global_worker.gcs_client
        self._node = ray.NodeID.from_hex(ray.get_runtime_context().get_node_id())
        self._worker_id = ray.get_runtime_context().get_worker_id()
        threading.Thread(target=self._watch, name="penstock-cluster", daemon=True).start()

    def lost(self) -> ClusterGone | None:
        """Returns the ClusterGone error when the cluster is going, else None. For callers who have noticed that an
        actor has died."""
        until = time.monotonic() + _GOING_S
        while time.monotonic() < until and self.gone is None:
            if answers_tcp(self.address) and _answers_unix(self._raylet):
                if not self._has_left():
                    return None
                self._goes("this machine is no part of it any more, because its raylet ends")
            else:
                _look_again.wait(0.2)
        return self.gone

    def _has_left(self) -> bool:
        """Returns whether this machine is no part of the cluster any more, as the head knows. A raylet that is told to
        end (SIGTERM) leaves the cluster first. Then its actors die, and its own process ends last."""
        try:
            return not self._head.check_alive([self._node], timeout=_FOUND_ANSWERS_S)[0]
        except Exception:  # the head does not answer, and is looked at again
            return False

    def _goes(self, why: str) -> None:
        """Notes that the cluster has gone for this program."""
        whose = "that this program had started " if self.own else ""
        self.gone = self.gone or ClusterGone(
            f"the Ray cluster at {self.address} {whose}has gone: {why}. Start a cluster again, and resume the job from "
            "its last complete epoch (penstock.resume(name))"
        )

    def current(self) -> bool:
        """Returns whether this process still has this connection. A program may call ray.shutdown() itself."""
        return bool(ray.is_initialized() and ray.get_runtime_context().get_worker_id() == self._worker_id)

    def _watch(self) -> None:
        silent_s = ended_s = 0.0
        raylet = _Line(self._raylet)
        while True:
            _look_again.wait(_LOOK_S)
            stop_at_exit()
            try:
                if not self.current():
                    return
            except Exception:  # Ray is disconnecting in another thread
                return
            silent_s = 0.0 if answers_tcp(self.address) else silent_s + _LOOK_S
            ended_s = ended_s + _LOOK_S if raylet.has_ended() else 0.0
            if silent_s >= _HEAD_BACK_S or ended_s >= _ENDED_S:
                break
        self._goes("its head does not answer any more" if silent_s else "its raylet on this machine has ended")


_connection: _Connection | None = None  # Ray's connection is a global of this process, and so is what is known of it


def workers_group(job: str) -> str:
    """Returns the name of the placement group of a job's workers."""
    return f"penstock-workers-{job}"


def master_name(job: str) -> str:
    """Returns the name of a job's JobMaster actor."""
    return f"penstock.job.{job}"


def connect(
    address: str | None, cpus: int = 1, *, lasting: bool = False, store_bytes: int = OBJECT_STORE_BYTES
) -> None:
    """Makes sure that this process is connected to Ray.

    If Ray is initialised, it is used as it is. Otherwise the process joins the cluster of `address` or RAY_ADDRESS;
    with neither, the cluster to which `ray start` has added this machine. When there is none, or `address` is "local",
    a new cluster is started. It belongs to this process alone and ends with it. It offers at least `cpus` CPUs, however
    many cores there are, and an object store of `store_bytes`. With `lasting`, only a cluster that outlives this
    process will do. Raises NoCluster when there is no such cluster, when no cluster answers at the address, and when
    Ray does not start.
    """
    global _connection  # noqa: PLW0603
    with _lock:
        if _connected():
            assert _connection is not None
            if lasting and _connection.own:
                raise NoCluster(_NO_CLUSTER)
            return
        address = address or os.environ.get("RAY_ADDRESS")
        if address != "local":
            place = address or _of_ray_start()
            if place:
                _check_head(place, of_ray_start=not address)
                try:
                    _init(place, local=not address or address in _on_this_machine())
                except ConnectionError as error:
                    if address:
                        raise NoCluster(
                            f"no Ray cluster answers at {address}: {error}. Correct the address, or start the cluster"
                        ) from error
                else:
                    _connection = _Connection(own=False)
                    logger.info("joined the Ray cluster at %s", _connection.address)
                    return
        if lasting:
            raise NoCluster(_NO_CLUSTER)
        cpus = max(cpus, os.cpu_count() or 1)
        logger.info("starting Ray on this machine, for this program alone, with %d CPUs", cpus)
        _init("local", num_cpus=cpus, include_dashboard=False, object_store_memory=store_bytes)
        _connection = _Connection(own=True)
        reaper.start([process.pid for process in psutil.Process().children(recursive=True)])


def _connected() -> bool:
    """Returns whether Ray is initialised, by this package or by the program. Ends a connection whose cluster has gone.
    To be called under the lock."""
    global _connection  # noqa: PLW0603
    if _connection is not None and _connection.gone is not None and ray.is_initialized():
        ray.shutdown()
    if not ray.is_initialized():
        return False
    if _connection is None or not _connection.current():
        _connection = _Connection(own=False)
    return True


def _init(address: str, *, local: bool = False, **options: Any) -> None:
    """Calls ray.init, in such a way that a cluster that goes away does not end this process. `local`: the cluster is
    one of this machine, and may be given the token by which Ray's local clusters know their users. Raises
    ConnectionError when no cluster answers, and NoCluster for any other error of Ray."""
    standard_streams.open_closed()  # Ray needs a standard error
    # Says at every start that Ray uses tokens, which is its default and needs nothing of the user.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    if local:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available  # noqa: PLC2701

        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    limit = os.environ.get(_LIMIT)
    os.environ[_LIMIT] = _FOR_EVER_S
    try:
        ray._raylet.Config.initialize("")  # Ray has read the environment when it was loaded; let it read that again
        joining = head_client.joining(lambda: answers_tcp(address)) if _is_host_and_port(address) else nullcontext()
        with joining, _lasting_processes():
            ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=True, **options)
    except (ConnectionError, PenstockError):
        raise
    except head_client.HeadGone as error:
        with contextlib.suppress(Exception):
            ray.shutdown()  # what had started
        raise NoCluster(f"the Ray cluster at {address} could not be joined: {error}. Start the cluster again") from None
    except Exception as error:  # Ray raises errors of many classes, also bare RuntimeErrors and ValueErrors
        with contextlib.suppress(Exception):  # the first error tells more
            ray.shutdown()  # what had started
        raise NoCluster(_told_of_init(address, error)) from error
    finally:
        del os.environ[_LIMIT]
        if limit is not None:
            os.environ[_LIMIT] = limit


@contextlib.contextmanager
def _lasting_processes() -> Iterator[None]:
    """While the context is active, Ray's processes start so that they end with the program, and not with the calling
    thread, to whose end Ray binds them."""
    services: Any = ray._private.services
    popen = services.ConsolePopen
    services.ConsolePopen = lambda *args, **options: started(lambda: popen(*args, **options))
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _told_of_init(address: str, error: Exception) -> str:
    """Returns the message about an error that Ray has raised while it started, or joined a cluster."""
    what = "Ray could not be started on this machine" if address == "local" else f"Ray could not join {address}"
    cause = " ".join(str(error).split()) or "no reason given"
    logs = os.path.join(ray._common.utils.get_default_ray_temp_dir(), "session_latest", "logs")
    return (
        f"{what}: {type(error).__name__}: {cause.rstrip('.')}. Ray's logs are in {logs}. On a machine that is busy or "
        "short of memory, Ray may take longer to start than it waits: try again when the machine is less busy, or "
        "start a cluster first (ray start --head)"
    )


def _of_ray_start() -> str | None:
    """Returns the address of the cluster to which `ray start` has added this machine, if that cluster runs."""
    # As `ray start` itself finds out: it writes the address down, and what it wrote may be older than the last boot.
    address = ray._private.utils.read_ray_address()
    return address if address and address in _on_this_machine() else None


def _on_this_machine() -> list[str]:
    """Returns the addresses of all Ray clusters that have a node on this machine."""
    ray._private.services.find_gcs_addresses.cache_clear()
    return sorted(ray._private.services.find_gcs_addresses())


def _is_host_and_port(address: str) -> bool:
    return "://" not in address and address.rpartition(":")[2].isdigit()


def answers_tcp(address: str) -> bool:
    """Returns whether somebody accepts a connection at this address within a second."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_S).close()
    except OSError:
        return False
    return True


def _check_head(address: str, *, of_ray_start: bool) -> None:
    """Raises NoCluster when no head answers at the address of a cluster, at which Ray itself would try for minutes.
    Addresses of other forms are left to Ray. `of_ray_start`: `ray start` has added this machine to the cluster."""
    if not _is_host_and_port(address):
        return
    until = time.monotonic() + _NAMED_ANSWERS_S
    while not _speaks(address):
        if time.monotonic() >= until:
            if of_ray_start:
                raise NoCluster(
                    f"the Ray cluster at {address}, to which ray start has added this machine, does not answer. If its "
                    "head has gone, end what is left of the cluster on this machine (ray stop) and start it again, or "
                    "give the address of another one (address=..., or --address; 'local': one for this program alone)"
                )
            raise NoCluster(
                f"no Ray cluster answers at {address} within {_NAMED_ANSWERS_S:g} s. Correct the address, or start the "
                "cluster"
            )
        _look_again.wait(0.2)


def _answering(addresses: Sequence[str]) -> list[str]:
    """Returns the addresses at which the head of a cluster may be. All addresses are asked at the same time."""
    if not addresses:
        return []
    with ThreadPoolExecutor(len(addresses)) as pool:
        return [one for one, answers in zip(addresses, pool.map(_speaks, addresses), strict=True) if answers]


def _speaks(address: str) -> bool:
    """Returns whether somebody at this address answers within seconds as the head of a cluster would."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_FOUND_ANSWERS_S) as head:
            if os.environ.get("RAY_USE_TLS", "0") != "0":  # a head that has certificates says nothing before it got one
                return True
            head.sendall(_PREFACE)
            until, said = time.monotonic() + _FOUND_ANSWERS_S, b""
            while len(said) < 4 and time.monotonic() < until and (more := head.recv(4 - len(said))):
                said += more
            return len(said) == 4 and said[3] == _SETTINGS
    except OSError:
        return False


def _answers_unix(path: str) -> bool:
    found = _connected_to(path)
    if found is not None:
        found.close()
    return found is not None


def _connected_to(path: str) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(_LOOK_S)
    try:
        made.connect(path)
    except OSError:
        made.close()
        return None
    return made


class _Line:
    """A connection to this machine's raylet, over which nothing is sent. The kernel closes it when the raylet ends. So
    looking at it again and again costs the raylet nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = _connected_to(path)

    def has_ended(self) -> bool:
        """Returns whether the raylet has ended."""
        if self._socket is not None:
            try:
                self._socket.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                pass  # as when it has ended; or it has only closed the connection
            self._socket.close()
        self._socket = _connected_to(self._path)
        return self._socket is None


def patience_s() -> float:
    """Returns for how long Ray itself bears with a node that refuses each of its checks. A node that just does not
    answer has longer, because each check then waits for its time limit."""
    limits = ray._raylet.Config
    return float(limits.health_check_failure_threshold() * limits.health_check_period_ms()) / 1000


def leave_without_head(before: Callable[[], None]) -> None:
    """In an actor that may outlive its cluster because it runs on another machine than the head: starts a thread that
    ends this process when the head has been silent for so long that nobody will start it again, after calling
    `before`. When the head's machine vanishes without a word, Ray's own processes notice only after minutes."""
    context = ray.get_runtime_context()
    address = str(context.gcs_address)
    own = str(ray.util.get_node_ip_address())
    if address.rpartition(":")[0].strip("[]") == own:
        return

    def watch() -> None:
        silence: SilenceDetector[str] = SilenceDetector(_HEAD_BACK_S, looks=_HEAD_LOOKS)
        while not silence.look([] if answers_tcp(address) else [address]):
            _look_again.wait(_LOOK_S)
        logger.error("the head of the Ray cluster at %s has gone, and this process ends", address)
        before()
        os._exit(1)

    threading.Thread(target=watch, name="penstock-head", daemon=True).start()


def where() -> str:
    """Describes the cluster that this process is connected to, for people."""
    if _connection is None:
        return ""
    whose = "a Ray cluster of this program's own, at" if _connection.own else "the Ray cluster at"
    return f"{whose} {_connection.address}"


def lost() -> ClusterGone | None:
    """Explains the death of an actor: the error, if that is because the cluster has gone."""
    return None if _connection is None else _connection.lost()


def check() -> None:
    """Raises ClusterGone when the cluster that this process is connected to has gone."""
    if _connection is not None and _connection.gone is not None:
        raise _connection.gone


def get(reference: Any, timeout: float | None = None) -> Any:
    """Calls ray.get, but raises ClusterGone instead of waiting without end when the cluster has gone."""
    connection = _connection
    if connection is None:
        return ray.get(reference, timeout=timeout)
    left = timeout
    while True:
        stop_at_exit()
        part = _SLICE_S if left is None else min(left, _SLICE_S)
        try:
            return ray.get(reference, timeout=part)
        except GetTimeoutError:
            if connection.gone is not None:
                raise connection.gone from None
            if left is not None:
                left -= part
                if left <= 0:
                    raise


def has_ended(job: str) -> bool:
    """Returns whether a job has ended, and at most its JobMaster is still there for the last drivers. A job whose
    JobMaster does not answer has not ended: the JobMaster is paused or hangs, and the job's name is taken."""
    try:
        master = find_master(job)
        state = ray.get(master.ask.options(max_task_retries=0).remote(Status()), timeout=_ANSWER_S).state
    except (JobNotFound, RayActorError):
        return True
    except GetTimeoutError:
        return False
    return state in ENDED


def program_has_ended(program: str) -> bool:
    """Returns whether a program that was connected to the cluster, on whichever node, has ended as far as Ray knows.
    `program`: its id, which Ray calls the id of a job."""
    return any(entry["JobID"] == program and entry["IsDead"] for entry in ray._private.state.jobs())


def is_ending(job: str) -> bool:
    """Returns the result of `has_ended`, after waiting a moment for the job's name to become free."""
    over = has_ended(job)
    if over:
        _look_again.wait(0.05)
    return over


def find(job: str | None, address: str | None) -> tuple[str, Any]:
    """Returns the name and the JobMaster of a running job; with None as its name, of the only running job. Afterwards
    this process is connected to the job's cluster.

    When Ray is not initialised, and neither an address nor RAY_ADDRESS is given, all clusters with a node on this
    machine are searched, including those that end with the program that has started them. Raises JobNotFound when there
    is no such job, for None also when there are several, and NoCluster when there is no cluster at all.
    """
    running: list[tuple[str, str]] = []
    for place, names in jobs(address):
        if job is not None and job in names:
            return job, find_master(job)
        running += [(name, place) for name in names if job is not None or not has_ended(name)]
    if job is not None:
        known = ", ".join(name for name, _ in running)
        raise JobNotFound(f"no job {job!r} runs here; running jobs: {known or 'none'}")
    if not running:
        raise JobNotFound("no job runs here; start one, or give the address of another cluster")
    if len(running) > 1:
        more = len({place for _, place in running}) > 1
        listed = ", ".join(f"{name} (on the cluster at {place})" if more else name for name, place in running)
        raise JobNotFound(f"several jobs run: {listed}; give the name of one")
    ((name, place),) = running
    with _lock:
        if _connection is None or _connection.address != place:  # clusters without jobs were looked at after it
            try:
                _join(place)
            except ConnectionError as error:
                raise NoCluster(f"the Ray cluster at {place} does not answer any more: {error}") from error
    return name, find_master(name)


def jobs(address: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yields the address of each cluster that `find` searches, and the names of the jobs that run there. While the
    caller handles a cluster, this process is connected to it. Afterwards it stays connected to the last one."""
    if ray.is_initialized() or address or os.environ.get("RAY_ADDRESS"):
        connect(address, lasting=not ray.is_initialized())
        assert _connection is not None
        yield _connection.address, _running()
        return
    first = _of_ray_start()
    found = _answering(sorted(_on_this_machine(), key=lambda one: one != first))
    reached = False
    for one in found:
        with _lock:
            try:
                joined = _join(one)
            except (ConnectionError, NoCluster):  # it belongs to another user, or is just ending
                continue
        reached = True
        yield joined.address, _running()
    if not reached:
        raise NoCluster(
            "no job was found, because no Ray cluster that this program can join has a node on this machine; give the "
            "address of a cluster, or set RAY_ADDRESS. A local job (local=True) can be found only in the program that "
            "runs it, and only while it runs"
        )


def _join(address: str) -> _Connection:
    """Connects to this cluster of this machine, in place of the present one. To be called under the lock."""
    global _connection  # noqa: PLW0603
    if ray.is_initialized():
        ray.shutdown()
    _init(address, local=True)
    _connection = _Connection(own=False)
    return _connection


def _running() -> list[str]:
    """Returns the names of the jobs of the cluster that this process is connected to."""
    prefix = master_name("")
    # Not get_actor: it answers from a cache, also for an actor that has died.
    entries = ray.util.list_named_actors(all_namespaces=True)
    names = {entry["name"] for entry in entries if entry["namespace"] == NAMESPACE}
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def find_master(job: str) -> Any:
    """Returns the handle of a running job's JobMaster on the cluster of this process. Raises JobNotFound when there is
    none."""
    names = _running()
    if job in names:
        with contextlib.suppress(ValueError):
            return ray.get_actor(master_name(job), namespace=NAMESPACE)
    raise JobNotFound(f"no job {job!r} runs on this cluster; running jobs: {', '.join(names) or 'none'}")
