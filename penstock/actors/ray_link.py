"""The link of a Job to its JobMaster on Ray."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from penstock.actors import cluster
from penstock.host.carry import requests
from penstock.host.carry.job_link import HostGone, JobLink
from penstock.host.carry.requests import Request
from penstock.host.decide.commands import JobEnd
from penstock.host.process.hangs import SilenceDetector
from penstock.host.process.linger import Driver
from penstock.placement.groups import release
from penstock.runtime.errors import ClusterGone, JobError, first_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The Ray concurrency group of the JobMaster for requests that wait for the job's outcome. They have threads of their
# own, because any number of them may wait: Ray does not take back the calls of a driver that has died. Calls beyond the
# number of threads begin at the job's end, when the others return.
OUTCOMES = "outcomes"

# How long the driver waits while the JobMaster removes its epochs, when the last driver has what it wants.
_RELEASE_S = 10.0

# How long a call of the driver waits for the JobMaster's answer before it continues without; and how long the next call
# waits while the JobMaster still has not answered.
_PATIENCE_S = 5.0
_SILENT_PATIENCE_S = 0.2

# How long a JobMaster may take to say that it has given up a request, after the request's time limit.
_ANSWER_S = 15.0

# How long the driver waits for the last lines to print.
_LAST_LINES_S = 60.0

# The time between two pings of the JobMaster. Ray reports its death, but nobody reports that it is stopped, or hangs.
_PING_S = 2.0

# When a JobMaster dies after a longer silence than this, the message says how long it was silent.
_SILENT_S = 2 * _PING_S


class RayLink(JobLink):
    """The link of a Job to its JobMaster."""

    is_local = False

    def __init__(self, name: str, handle: Any, hang_timeout_s: float | None = None) -> None:
        """`handle`: of the JobMaster's actor; `hang_timeout_s`: None for a job that another program has started."""
        self.handle = handle
        self.host = handle._actor_id
        self.where = cluster.where()
        self._name = name
        self._hang_timeout_s = hang_timeout_s
        context = ray.get_runtime_context()
        self.driver = Driver.here(context.get_node_id(), context.get_job_id())
        self._outcome = handle.ask.options(concurrency_group=OUTCOMES).remote(requests.Outcome(self.driver))
        self._answered = time.monotonic()
        self._asking: Any = None  # a call for a status that has not been answered yet

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._answered

    def is_connected(self) -> bool:
        """See JobLink. A program that has disconnected from Ray has ended the job. A call would make Ray start a
        cluster."""
        return bool(ray.is_initialized())

    def ask(self, request: Request[T]) -> T:
        answer: T = self._answer(request)
        return answer

    def _answer(self, request: Request[Any]) -> Any:
        match request:
            case requests.Outcome():
                return self._watched(self._outcome, known=False)
            case requests.LastStatus() | requests.Records(last=True):
                return self._watched(self._call(request))
            case requests.Status():
                return self._status()
            case requests.Stop() | requests.Cancel():
                return self._get(self._call(request), _PATIENCE_S)
            case requests.Records():
                return self._get(self._call(request))
            case requests.Lines(timeout_s=waits_s):
                # A JobMaster that hangs is killed, and the next one has more to print. So only the last request, after
                # the job's end, has a time limit.
                cluster.stop_at_exit()
                return self._get(self._call(request), None if waits_s else _LAST_LINES_S)
            case requests.Release():
                return self._release(request)
        return self._of_running_job(request)

    def _call(self, request: Request[Any]) -> Any:
        return (self.handle.ask if request.again else self.handle.ask.options(max_task_retries=0)).remote(request)

    def _status(self) -> Any:
        cluster.stop_at_exit()
        asked, self._asking = self._asking, None
        if asked is not None and ray.wait([asked], timeout=0)[0]:
            asked = None  # its answer has come meanwhile, and is old by now
        patience_s = _PATIENCE_S if asked is None else _SILENT_PATIENCE_S
        asked = asked or self._call(requests.Status())
        try:
            status = self._get(asked, patience_s)
        except TimeoutError:
            self._asking = asked
            raise
        self._answered = time.monotonic()
        return status

    def _of_running_job(self, request: Request[Any]) -> Any:
        """Returns the answer to a request that only a running job can fulfil, however long that takes. Where the host
        gives the request up after a time, a host that does not answer is not waited for either."""
        limit_s = request.timeout_s if isinstance(request, requests.Savepoint) else None
        try:
            return cluster.get(self._call(request), timeout=None if limit_s is None else limit_s + _ANSWER_S)
        except GetTimeoutError:
            raise TimeoutError(
                f"job {self._name!r}: its JobMaster has not answered {request.verb} within {limit_s:g} s, nor "
                f"{_ANSWER_S:g} s later; it gives the request up when it runs again, and the job goes on then"
            ) from None
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            end = self._end_if_known()
            if end is not None:
                raise JobError(f"{end.words(self._name)}; {request.verb} needs a running job") from error
            raise JobError(f"{request.verb} was interrupted, because the job's JobMaster died; try again") from error

    def _end_if_known(self) -> JobEnd | None:
        """Returns the job's end after a call has found no JobMaster, or None when Ray starts the JobMaster again. A
        JobMaster tells the end before it goes."""
        if not ray.wait([self._outcome], timeout=_PATIENCE_S)[0]:
            return None
        try:
            end: JobEnd = ray.get(self._outcome)
        except RayError:  # it has died, and Ray does not start it again
            return JobEnd("FAILED")
        return end

    def _release(self, request: requests.Release) -> None:
        """Waits a moment for the JobMaster to remove its epochs. A JobMaster that does not answer is watched until it
        does, so that it is killed if it hangs. One that dies meanwhile comes to the end of the job again before its
        next life answers."""
        call = self._call(request)
        if not ray.wait([call], timeout=_RELEASE_S)[0]:
            threading.Thread(target=self._watch_release, args=(call,), name="penstock-release", daemon=True).start()

    def _watch_release(self, call: Any) -> None:
        with suppress(Exception, SystemExit):  # the JobMaster, or Ray, has ended; nobody waits for the answer
            self._watched(call)

    def cause(self, error: BaseException) -> BaseException:
        cluster.stop_at_exit()
        return error if isinstance(error, ClusterGone) else cluster.lost() or error.__cause__ or error

    def end_without_host(self, error: BaseException) -> JobEnd:
        gone = self.cause(error)
        if isinstance(gone, ClusterGone):
            return JobEnd("FAILED", str(gone), kind="cluster")
        self._release_room()
        why = why_it_died(first_line(error), isinstance(error, RayActorError), self.silent_s, self._hang_timeout_s)
        return JobEnd("FAILED", f"its JobMaster died: {why}")

    def _get(self, call: Any, timeout: float | None = None) -> Any:
        try:
            return cluster.get(call, timeout=timeout)
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from error
        except RayActorError as error:
            raise HostGone(str(error)) from error

    def _release_room(self) -> None:
        """Gives back the name of a job whose JobMaster has died, and the room that was reserved. Ray would keep both
        until this driver ends."""

        def give_back() -> None:
            with suppress(Exception, SystemExit):  # the reservation, or Ray, may have gone already
                cluster.stop_at_exit()
                # This driver knows the name of an actor that has died for as long as it has a handle of the actor. Then
                # Ray refuses another actor of this name. Only a kill makes the driver forget the name.
                ray.kill(self.handle)
                release(cluster.workers_group(self._name))

        giving = threading.Thread(target=give_back, name="penstock-release", daemon=True)
        giving.start()
        giving.join(_RELEASE_S)  # without a head, Ray would wait for ever

    def _watched(self, call: Any, known: bool = True) -> Any:
        """Returns the JobMaster's answer to a call, however long it takes, and finds out meanwhile whether the
        JobMaster answers at all. `known`: whether it has answered before. A JobMaster that has never answered may not
        have started yet.

        The workers kill a JobMaster that hangs. When there are no workers, as after the job's end, or they hang too,
        this method kills it, if the job was started by this program. Ray then repeats the call in the next JobMaster.
        """
        silence: SilenceDetector[str] = SilenceDetector(2 * (self._hang_timeout_s or math.inf))
        ping = self._ping()
        while not ray.wait([call], timeout=_PING_S)[0]:
            cluster.stop_at_exit()
            cluster.check()
            answered = bool(ray.wait([ping], timeout=0)[0])
            if answered:
                with suppress(RayError):  # an error says that the JobMaster has died, and is no answer
                    ray.get(ping)
                    self._answered = time.monotonic()
                    known = True
                ping = self._ping()
            if silence.look([self._name] if known and not answered else []):
                logger.warning(
                    "job %s: its JobMaster has not answered for %g s, and is killed; Ray starts it again if the job "
                    "has epochs",
                    self._name,
                    2 * (self._hang_timeout_s or math.inf),
                )
                ray.kill(self.handle, no_restart=False)
                known = False
        return ray.get(call)

    def _ping(self) -> Any:
        return self._call(requests.Ping(self.driver))


def why_it_died(reason: str, died: bool, silent_s: float, hang_timeout_s: float | None) -> str:
    """Returns the known facts of a JobMaster's death, from Ray's reason and from how long the JobMaster had been
    silent. `died`: whether Ray says that the JobMaster has died."""
    if not died or silent_s <= _SILENT_S:
        return reason
    silent = f"it had not answered for {silent_s:.0f} s"
    # Silence is noticed up to one ping late.
    if hang_timeout_s is not None and silent_s >= hang_timeout_s - _SILENT_S:
        silent += f", as it was stopped or hung, and was killed (hang_timeout_s={hang_timeout_s:g})"
    return f"{silent}: {reason}"
