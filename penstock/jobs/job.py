"""Job: the driver's handle of a running job."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from penstock.host.carry import requests
from penstock.host.carry.job_link import HostGone, JobLink
from penstock.host.carry.requests import Request
from penstock.host.decide.commands import JobEnd
from penstock.host.decide.job_state import ENDED
from penstock.host.process.collected import Encoded
from penstock.jobs.progress import Progress
from penstock.runtime.errors import (
    ClusterGone,
    FlowError,
    JobError,
    JobFailed,
    NotEnoughResources,
    PenstockError,
    StoreError,
    first_line,
    shorten,
)
from penstock.runtime.operators.late import late_words
from penstock.runtime.program.mixing import mixing_words
from penstock.runtime.records.codec import decode
from penstock.runtime.records.pickling import Program
from penstock.runtime.sinks.base import Sink
from penstock.runtime.status import JobStatus, TaskStatus
from penstock.runtime.storage import filesystems
from penstock.runtime.units import seconds, whole

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_S = 0.1  # between two looks at the status in wait_for()
_LINES_S = 10.0  # how long the job's host waits for new lines to print


def summary(status: JobStatus) -> str:
    """Returns a job's status in one line."""
    said = status.state
    if status.uptime_s:
        said += f" {'after' if status.state in ENDED else 'for'} {status.uptime_s:,.0f} s"
    if workers := len(status.workers):
        said += f" on {workers} worker{'s' * (workers != 1)}"
    if status.uptime_s:  # otherwise nothing is known of records yet
        said += f", {status.records_read:,} records read, {status.records_written:,} written"
    if status.master_silent_s:
        said += f", JobMaster silent for {status.master_silent_s:,.0f} s"
    if status.error:
        said += f": {shorten(status.error.splitlines()[0])[1:-1]}"
    return said


#: The latest job of each name that this program has started or attached to.
_known: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()


def known_job(name: str, host: object) -> Job | None:
    """Returns the handle that this program has of a running job with this host (`JobLink.host`). Until the job ends,
    each handle costs a thread here and calls to the host, so a program that attaches again and again gets the same
    handle."""
    job = _known.get(name)
    return job if job is not None and not job._over.is_set() and job._link.host == host else None


def local_jobs() -> list[Job]:
    """Returns the handles of the running local jobs of this program."""
    return [job for job in list(_known.values()) if job._link.is_local and not job._over.is_set()]


def silent_status(name: str) -> JobStatus:
    """Returns the status of a running job whose JobMaster does not answer: its last answer to this program."""
    job = _known.get(name)
    if job is None or job._over.is_set():
        return JobStatus(name=name, state="UNKNOWN")
    return job.status()


class Job:
    """A running (or ended) job, made by `penstock.run` and `penstock.attach`. Every method may be called from any
    thread."""

    def __init__(
        self,
        name: str,
        link: JobLink,
        sinks: dict[str, Sink],
        program: Program | None = None,
    ) -> None:
        """`program`: the program whose classes the records of the sinks may have; None for a job that another program
        has started."""
        self.name = name
        self._program = program
        self._link = link
        self._end: JobEnd | None = None
        self._cancelled = False
        self._told_of_late = self._told_of_spark = False
        self._last_status: JobStatus | None = None
        self._over = threading.Event()
        self._news = threading.Event()  # for wait(): the job is over, or a sink in this process has failed
        self._trouble: PenstockError | None = None
        self._lock = threading.Lock()  # of the two above, and of the last status
        self._asks = threading.Lock()  # one thread at a time asks for a status
        self._drained = threading.Event()  # the workers report nothing more
        # By channel, once the job has ended. The records are decoded when the user asks for them, because records that
        # cannot be decoded are no failure of the job.
        self._collected: dict[str, list[Encoded]] = {}
        self._records: dict[str, list[Any]] = {}
        self._sinks = sinks
        self._channels = [sink.channel for sink in sinks.values() if sink.channel is not None]
        for sink in sinks.values():
            if sink.channel is not None:
                sink.bind(self._fetcher(sink.channel))
        self._console: threading.Thread | None = None
        if any(sink.prints for sink in sinks.values()):
            self._console = threading.Thread(target=self._print_console, name="penstock-console", daemon=True)
            self._console.start()
        threading.Thread(target=self._finish, name="penstock-job", daemon=True).start()
        for sink in sinks.values():
            sink.started(self)
        _known[name] = self

    def __repr__(self) -> str:
        return f"<Job {self.name!r}: {summary(self.status())}>"

    def ends_unasked(self) -> bool:
        """Whether the job runs, and has not been cancelled by this program."""
        return self._link.is_connected() and not self._over.is_set() and not self._cancelled

    @property
    def state(self) -> str:
        """STARTING, RUNNING, RECOVERING, MOVING, STOPPING, FINISHED, CANCELLED or FAILED; UNKNOWN of a job that another
        program has started, as long as its JobMaster has not answered this one."""
        return self.status().state

    def status(self) -> JobStatus:
        """The present state of the job (docs/status.md has its fields); after its end, the last status. It can also be
        read by keys, as in `job.status()["records_read"]`, and `plain()` makes dicts of it.

        `master_silent_s` is 0.0, or the number of seconds for which the JobMaster has not answered; the rest is then
        its last answer, or zeros when it has not answered yet. Every status has the same keys. The call waits for the
        JobMaster for a few seconds at most.
        """
        if self._last_status is None or self._last_status.state not in ENDED:
            try:
                self._keep_status(self._ask_status())
            except (HostGone, ClusterGone):
                self._over.wait()
        assert self._last_status is not None
        if self._end is not None:
            self._last_status = self._last_status.changed(state=self._end.state, error=self._end.error)
        return self._last_status

    def _keep_status(self, status: JobStatus) -> None:
        """Keeps the newest status. After the status of the end, no later answer counts."""
        with self._lock:
            if self._last_status is None or self._last_status.state not in ENDED:
                self._last_status = status

    def _ask_status(self) -> JobStatus:
        with self._asks:
            try:
                return self._link.ask(requests.Status())
            except TimeoutError:
                state = "UNKNOWN" if self._program is None else "STARTING"
                last = self._last_status or JobStatus(name=self.name, state=state)
                return last.changed(master_silent_s=self._link.silent_s)

    def wait(self, timeout_s: float | timedelta | None = None, *, progress: bool | None = None) -> JobStatus:
        """Wait for the end of the job, and return its last status.

        It warns on stderr, by the logger of this module, when records were dropped because they came too late for their
        windows.

        After a second it shows live progress on stderr (`progress=False`: never). Raises JobFailed when the job failed,
        NotEnoughResources when there is no room for it, StoreError when its store was refused, and TimeoutError after
        `timeout_s` seconds (or a timedelta). A job that was cancelled or stopped ends without an error. Ctrl-C
        interrupts the wait, not a detached job. It also waits until sinks have finished their work in this process
        (`to_spark`). When that work fails, it raises JobError at once, and the job continues.
        """
        limit_s, deadline = _limits(timeout_s, "wait: timeout_s")
        with Progress(self.name, shown=progress is not False, where=self._link.where) as shown:
            while not self._over.is_set():
                if self._news.wait(shown.wait_s(deadline)):
                    if not self._over.is_set():
                        self._raise_trouble()
                    continue
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"job {self.name!r} still runs after {limit_s:g} s")
                if shown.due():
                    shown.update(self.status())
            status = self.status()
            shown.finish(status)
        for sink in self._sinks.values():
            if not sink.ended(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(
                    f"job {self.name!r} has ended, but its sinks still work in this program after {limit_s:g} s"
                )
        self._raise_failure()
        self._raise_trouble()
        self._tell_of_late(status)
        self._tell_of_spark(status)
        return status

    def wait_for(
        self, condition: Callable[[JobStatus], object], timeout_s: float | timedelta | None = None
    ) -> JobStatus:
        """Wait until `condition(job.status())` is true, and return that status. It looks ten times a second.

            job.wait_for(lambda status: status["records_written"] >= 100)

        Raises what `wait()` raises when the job fails before, JobError when it ends otherwise before, and TimeoutError
        after `timeout_s` seconds (or a timedelta)."""
        if not callable(condition):
            raise FlowError(
                f"wait_for: {shorten(condition)} is no function; give one that gets a status, as in "
                'job.wait_for(lambda status: status["records_written"] >= 100)'
            )
        limit_s, deadline = _limits(timeout_s, "wait_for: timeout_s")
        while True:
            over = self._over.is_set()  # asked before the status, which is then the last one
            status = self.status()
            if condition(status):
                return status
            if over:
                self._raise_failure()
                assert self._end is not None
                raise JobError(f"{self._end.words(self.name)}; the condition of wait_for() was not true before")
            self._raise_trouble()
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.name!r}: the condition of wait_for() is not true after {limit_s:g} s")
            self._over.wait(_LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic())))

    def _raise_failure(self) -> None:
        """Raises the error of an ended job if it has failed."""
        assert self._end is not None
        if self._end.state == "FAILED":
            message = f"job {self.name!r} failed: {self._end.error}"
            kinds = {"resources": NotEnoughResources, "store": StoreError, "cluster": ClusterGone}
            kind = kinds.get(self._end.kind)
            raise JobFailed(message, self._end.operator) if kind is None else kind(message)

    def _tell_of_late(self, status: JobStatus) -> None:
        """Warns once when records were dropped as late, because nothing else but a counter shows it."""
        mixed = mixing_words(status.mixing)
        if (said := late_words(status.late_dropped, mixed)) and not self._told_of_late:
            self._told_of_late = True
            logger.warning("job %r: %s", self.name, said)

    def _tell_of_spark(self, status: JobStatus) -> None:
        """Warns once when the job's input was to go to Spark at any load, and none of it went there, because a test
        that means to use Spark would then test something else."""
        known = status.dual
        if self._told_of_spark or known.mode not in ("spark-only", "toggle"):
            return
        if not any(one.records_in_spark for one in known.ranges):
            self._told_of_spark = True
            why = next((f" ({one.reason})" for one in known.ranges if one.reason), "")
            logger.warning("job %r: no record was processed in Spark%s", self.name, why)

    def trouble(self, error: PenstockError) -> None:
        """Called by a sink whose work in this process has failed."""
        with self._lock:
            self._trouble = error
            self._news.set()

    def _raise_trouble(self) -> None:
        with self._lock:
            error, self._trouble = self._trouble, None
            if not self._over.is_set():
                self._news.clear()
        if error is not None:
            raise error

    def stop(self, *, savepoint: str | os.PathLike[str] | None = None) -> str | None:
        """End the sources. The job finishes when all records that were read have come through. Returns at once.

        When a process dies meanwhile, the job goes back to its last complete epoch and ends there: records that were
        read after this epoch then count as not read, also in `records_read`.

        With `savepoint`, a directory or a URL, the job ends between two records instead, and nothing is emitted for its
        end: windows that are not full, timers and calls under way are kept in a savepoint there. All tasks stop at the
        same epoch, and none runs on when the savepoint is written, so `penstock.run(flow, savepoint=...)` continues
        exactly. Waits until the savepoint is written and the job has ended, and returns the place. When the savepoint
        cannot be written, raises why, and the job goes on. When a process dies meanwhile, the stop is tried again."""
        if savepoint is None:
            self._tell(requests.Stop())
            return None
        place = _place_of(savepoint, "stop: savepoint=")
        self._ask(requests.StopWithSavepoint(place))
        self.wait(progress=False)  # the reply comes before the processes have ended
        return place

    def cancel(self) -> None:
        """End the job; records on their way are dropped. Returns at once; wait() returns when the job has ended."""
        self._cancelled = True
        self._tell(requests.Cancel())

    def plan(self) -> list[TaskStatus]:
        """Returns the tasks and the workers on which they run."""
        return self.status().tasks

    def savepoint(self, url: str | os.PathLike[str], timeout_s: float | timedelta | None = None) -> str:
        """Save the state of all tasks in a directory or at a URL, and wait until it is written. The job continues.

        The savepoint stays there whatever happens to the job. `penstock.run(flow, savepoint=...)` starts a job from
        it. After `timeout_s` seconds (or a timedelta) the savepoint is given up: raises TimeoutError, which says what
        the savepoint has waited for, such as a task that hangs or a store that does not answer. The job goes on."""
        limit_s, _ = _limits(timeout_s, "savepoint: timeout_s")
        place = _place_of(url, "savepoint: ")
        self._ask(requests.Savepoint(place, limit_s))
        return place

    def records(self, operator: str) -> list[Any]:
        """Returns the records of this operator's Collect sink so far, of a job that this program has run or resumed."""
        channel = self._sinks[operator].channel if operator in self._sinks else None
        if channel is None:
            known = ", ".join(repr(name) for name, sink in self._sinks.items() if sink.channel is not None)
            raise JobError(f"job {self.name!r} has no Collect sink {operator!r} here; it has: {known or 'none'}")
        return self._fetcher(channel)()

    def rescale(self, operator: str, parallelism: int) -> None:
        """Give an operator, and the operators fused with it, another number of tasks, and wait until these run.

        An epoch is completed first. The operator's tasks and the tasks downstream go back to it, and repeat what they
        have done since; the upstream tasks continue. As few keys as possible are reassigned to another task.
        """
        self._ask(requests.Rescale(operator, whole(parallelism, f"rescale {operator!r}: parallelism")))

    def migrate(self, tasks: Mapping[str, int]) -> None:
        """Move tasks (by their names in `status()["tasks"]`) to other workers, and wait until they run there.

        The tasks stop after the barrier of an epoch, and continue in their new place when that epoch is complete. The
        other tasks continue meanwhile. No record is lost or doubled.
        """
        if not isinstance(tasks, Mapping):
            raise FlowError(f"migrate: {shorten(tasks)} is no mapping; give the worker of each task, {{'count[0]': 1}}")
        wanted = {name: whole(worker, f"migrate: the worker of {name!r}", least=0) for name, worker in tasks.items()}
        self._ask(requests.Migrate(wanted))

    def traffic(self) -> list[dict[str, Any]]:
        """The measured load and traffic of each task, in a job that moves tasks by itself (`run(replan_s=)`): its name,
        the cores that it uses, its queued records, and the records and bytes a second that it sends to each other task.
        Figures are smoothed over half a period."""
        return self._ask(requests.Traffic())

    def _ask(self, request: Request[T]) -> T:
        if self._over.is_set():
            assert self._end is not None, "it is set before the job is over"
            raise JobError(f"{self._end.words(self.name)}; {request.verb} needs a running job")
        return self._link.ask(request)

    def _tell(self, request: requests.Stop | requests.Cancel) -> None:
        if self._over.is_set():
            return
        try:
            self._link.ask(request)
        except (HostGone, ClusterGone):
            self._over.wait()
        except TimeoutError:
            logger.warning(
                "job %s: its JobMaster does not answer. It will carry out %s() when it answers again, if this program "
                "still runs then",
                self.name,
                request.verb,
            )

    def _fetcher(self, channel: str) -> Callable[[], list[Any]]:
        def fetch() -> list[Any]:
            if not self._over.is_set():
                with suppress(HostGone, ClusterGone):
                    return _decoded(self._link.ask(requests.Records(channel)))
                self._over.wait()
            if channel not in self._records:
                self._records[channel] = _decoded(self._collected[channel])
            return self._records[channel]

        return fetch

    def _finish(self) -> None:
        """Waits for the job's end, fetches the results from the job's host, and releases the host."""
        end: JobEnd | None = None
        try:
            end = self._link.ask(requests.Outcome(self._link.driver))
            for channel in self._channels:
                self._collected[channel] = self._link.ask(requests.Records(channel, last=True))
            self._keep_status(self._link.ask(requests.LastStatus()))
            self._drained.set()
            if self._console is not None:
                self._console.join()  # it calls the host too, and it is to print before wait() returns
            self._link.ask(requests.Release(self._link.driver))
        except (Exception, SystemExit) as error:  # Ray exits threads that wait when this process disconnects
            if end is not None:
                missing = [channel for channel in self._channels if channel not in self._collected]
                end = end_without_records(end, bool(missing), self._link.cause(error))
            else:
                end = self._link.end_without_host(error)
            self._drained.set()
            for channel in self._channels:
                self._collected.setdefault(channel, [])
        if self._last_status is None:
            self._last_status = JobStatus(name=self.name, state=end.state, error=end.error)
        self._end = end
        with self._lock:
            self._over.set()
            self._news.set()

    def _print_console(self) -> None:
        try:
            self._print_lines()
        finally:
            with suppress(Exception, SystemExit):  # the host has gone, or goes
                self._link.ask(requests.Lines(self._link.driver, None))  # sinks wait for this program no more

    def _print_lines(self) -> None:
        seen = 0
        while True:
            over = self._drained.is_set()
            try:
                total, lines = self._link.ask(requests.Lines(self._link.driver, seen, 0.0 if over else _LINES_S))
            except (HostGone, TimeoutError, ClusterGone, SystemExit):
                return
            if total - seen > len(lines):
                print(f"... {total - seen - len(lines):,} lines left out ...")
            seen = total
            if lines:
                try:
                    sys.stdout.write("\n".join(lines) + "\n")
                    sys.stdout.flush()
                except BrokenPipeError:  # the reader of this program's output has gone
                    return
                except OSError as error:
                    logger.warning(
                        "job %s: the records of Console sinks cannot be printed any more, as standard output fails: %s",
                        self.name,
                        error.strerror,
                    )
                    return
            if over:
                return


def _limits(timeout_s: float | timedelta | None, name: str) -> tuple[float | None, float | None]:
    """Returns a time limit in seconds, and when it is over (of time.monotonic)."""
    limit_s = None if timeout_s is None else seconds(timeout_s, name)
    return limit_s, None if limit_s is None else time.monotonic() + limit_s


def _place_of(url: Any, what: str) -> str:
    """Returns where a savepoint is to be, for the processes of the job, which may be in another directory."""
    if not isinstance(url, str | os.PathLike) or not os.fspath(url):
        raise FlowError(f"{what}{shorten(url)} is no place; give a directory or a URL")
    place = os.fspath(url)
    try:
        path = filesystems.local_path(place)
    except filesystems.BadPlace as error:
        raise StoreError(f"savepoint {error}") from None
    return place if path is None else os.path.abspath(os.path.expanduser(path))


def end_without_records(end: JobEnd, missing: bool, error: BaseException) -> JobEnd:
    """Returns the end to report when the JobMaster or the cluster has gone after the job's end was known. `missing`:
    whether records of Collect sinks had not been fetched."""
    if not missing or end.state == "FAILED":
        return end
    whose = "the Ray cluster" if isinstance(error, ClusterGone) else "its JobMaster"
    return JobEnd(
        "FAILED",
        f"{whose} has gone after the job had ended as {end.state}, before this program had fetched the records of the "
        f"job's Collect sinks, which are lost: {first_line(error)}",
        kind="cluster" if isinstance(error, ClusterGone) else "failed",
    )


def _decoded(lists: list[Encoded]) -> list[Any]:
    return [record for encoded in lists for record in decode(*encoded)]
