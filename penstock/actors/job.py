"""Job: the driver's handle of a running job."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from penstock.actors import cluster
from penstock.actors.job_master import JobEnd
from penstock.actors.progress import Progress
from penstock.actors.status import ENDED
from penstock.placement.groups import release
from penstock.runtime.errors import JobError, JobFailed, NotEnoughResources, PenstockError
from penstock.runtime.sinks.base import Sink

# How long the JobMaster may take to remove its epochs when the last driver has what it wants.
_RELEASE_S = 10.0


class Job:
    """A running (or ended) job. Made by `penstock.run` and `penstock.attach`; safe to use from several threads."""

    def __init__(self, name: str, master: Any, sinks: dict[str, Sink]) -> None:
        self.name = name
        self._master = master
        self._outcome = master.outcome.remote()
        self._end: JobEnd | None = None
        self._insisting: dict[str, Any] = {}  # calls that are pending until the end
        self._last_status: dict[str, Any] | None = None
        self._over = threading.Event()
        self._news = threading.Event()  # for wait(): it is over, or there is trouble
        self._trouble: PenstockError | None = None
        self._lock = threading.Lock()  # of the two above
        self._drained = threading.Event()  # nothing more is reported by the workers
        self._collected: dict[str, list[Any]] = {}  # by channel, once the job has ended
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

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.state})"

    @property
    def state(self) -> str:
        """STARTING, RUNNING, RECOVERING, MOVING, STOPPING, FINISHED, CANCELLED or FAILED."""
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        """What the job does now, as plain data (see actors/status.py for the fields); the last known once ended."""
        if self._last_status is None or self._last_status["state"] not in ENDED:
            try:
                self._last_status = ray.get(self._master.status.remote())
            except RayActorError:
                self._over.wait()
        assert self._last_status is not None
        if self._end is not None:
            self._last_status = {**self._last_status, "state": self._end.state, "error": self._end.error}
        return self._last_status

    def wait(self, timeout: float | None = None, *, progress: bool | None = None) -> dict[str, Any]:
        """Wait for the job's end; its last status.

        Shows live progress on stderr when it takes longer than a second (`progress=False`: never). Raises JobFailed
        when the job failed, NotEnoughResources when it could not start, TimeoutError after `timeout` seconds; a job
        that was cancelled or stopped ends without an error. Ctrl-C interrupts the waiting, not a detached job. What
        sinks do in this process (`to_spark`) is done when it returns; when that has failed it raises JobError at once,
        and the job goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with Progress(self.name, shown=progress is not False) as shown:
            while not self._over.is_set():
                if self._news.wait(shown.wait_s(deadline)):
                    if not self._over.is_set():
                        self._raise_trouble()
                    continue
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"job {self.name!r} still runs after {timeout:g} s")
                if shown.due():
                    shown.update(self.status())
            status = self.status()
            shown.finish(status)
        for sink in self._sinks.values():
            if not sink.ended(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"job {self.name!r} has ended, but not what its sinks do here, after {timeout:g} s")
        assert self._end is not None
        if self._end.state == "FAILED":
            message = f"job {self.name!r} failed: {self._end.error}"
            if self._end.kind == "resources":
                raise NotEnoughResources(message)
            raise JobFailed(message, self._end.operator)
        self._raise_trouble()
        return status

    def trouble(self, error: PenstockError) -> None:
        """What a sink does in this process has failed; for sinks."""
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

    def stop(self) -> None:
        """End the sources; the job finishes when all that they have read has gone through. Returns at once."""
        self._tell("stop")

    def cancel(self) -> None:
        """End the job at once, dropping what is under way. Returns at once; wait() returns when it has ended."""
        self._tell("cancel")

    def plan(self) -> list[dict[str, Any]]:
        """The tasks and where they run."""
        tasks: list[dict[str, Any]] = self.status()["tasks"]
        return tasks

    def savepoint(self, url: str | os.PathLike[str]) -> str:
        """Save the state of all tasks in a directory, or at a URL, of its own, where it stays whatever becomes of the
        job; `penstock.run(flow, savepoint=...)` starts a job from it. Waits until it is written; the job goes on."""
        place = os.fspath(url)
        if "://" not in place:
            place = os.path.abspath(os.path.expanduser(place))  # the job's processes may be in another directory
        self._ask("savepoint", place)
        return place

    def records(self, operator: str) -> list[Any]:
        """What the Collect sink of this operator has brought so far, of a job that this program has run or resumed."""
        channel = self._sinks[operator].channel if operator in self._sinks else None
        if channel is None:
            known = ", ".join(repr(name) for name, sink in self._sinks.items() if sink.channel is not None)
            raise JobError(f"job {self.name!r} has no Collect sink {operator!r} here; it has: {known or 'none'}")
        return self._fetcher(channel)()

    def rescale(self, operator: str, parallelism: int) -> None:
        """Give an operator, and those that run fused with it, another number of tasks. Waits until they run.

        Tasks before it go on; it and those behind it go back to an epoch that completes just then, and do again what
        they did since. As few keys as possible change their task.
        """
        self._ask("rescale", operator, parallelism)

    def migrate(self, tasks: Mapping[str, int]) -> None:
        """Let tasks, by name as `status()["tasks"]` has them, run on other workers. Waits until they do.

        They pause from the barrier of an epoch until it is complete and they are made where they are to be; the others
        go on. No record is lost or doubled.
        """
        self._ask("migrate", dict(tasks))

    def traffic(self) -> list[dict[str, Any]]:
        """What each task was last measured to use and send, in a job that is planned anew (`run(replan_s=)`): name,
        cores, records queued, and by task sent to, records and bytes a second; smoothed over half a period."""
        found: list[dict[str, Any]] = self._ask("traffic")
        return found

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._over.is_set():
            raise JobError(f"job {self.name!r} has ended: {method} needs a running job")
        try:
            return ray.get(getattr(self._master, method).options(max_task_retries=0).remote(*arguments))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise JobError(f"{method} was cut off by the death of the job's JobMaster; try again") from error

    def _tell(self, method: str) -> None:
        if self._over.is_set():
            return
        try:
            ray.get(getattr(self._master, method).remote())
            if method not in self._insisting:
                self._insisting[method] = self._master.insist.remote(method)
        except RayActorError:
            self._over.wait()

    def _fetcher(self, channel: str) -> Callable[[], list[Any]]:
        def fetch() -> list[Any]:
            if self._over.is_set():
                return self._collected[channel]
            return self._fetch(channel)

        return fetch

    def _fetch(self, channel: str) -> list[Any]:
        try:
            records: list[Any] = ray.get(self._master.collected.remote(channel, 0))
        except RayActorError:
            self._over.wait()
            records = self._collected[channel]
        return records

    def _finish(self) -> None:
        """Wait for the end, take what is wanted of the JobMaster, and let it go."""
        end: JobEnd
        try:
            end = ray.get(self._outcome)
            for channel in self._channels:
                self._collected[channel] = ray.get(self._master.collected.remote(channel, 0))
            self._last_status = ray.get(self._master.status.remote())
            self._drained.set()
            if self._console is not None:
                self._console.join()  # it asks the JobMaster too; and what it prints comes before wait() returns
            with suppress(RayError):  # it may end before its answer has left
                ray.get(self._master.release.options(max_task_retries=0).remote(), timeout=_RELEASE_S)
        except (Exception, SystemExit) as error:  # Ray exits threads that wait when this process disconnects
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            end = JobEnd("FAILED", f"its JobMaster died: {reason}")
            with suppress(Exception, SystemExit):  # Ray keeps it until this driver ends, or is there no more itself
                release(cluster.workers_group(self.name))
            self._drained.set()
            for channel in self._channels:
                self._collected.setdefault(channel, [])
        if self._last_status is None:
            self._last_status = {
                "name": self.name,
                "state": end.state,
                "error": end.error,
                "operators": {},
                "tasks": [],
            }
        self._end = end
        with self._lock:
            self._over.set()
            self._news.set()

    def _print_console(self) -> None:
        seen = 0
        while True:
            over = self._drained.is_set()
            try:
                total, lines = ray.get(self._master.console.remote(seen, 0.0 if over else 10.0), timeout=60)
            except (RayActorError, GetTimeoutError, SystemExit):
                return
            if total - seen > len(lines):
                print(f"... {total - seen - len(lines):,} lines left out ...")
            seen = total
            if lines:
                sys.stdout.write("\n".join(lines) + "\n")
                sys.stdout.flush()
            if over:
                return
