"""Starts workers as child processes of the program (see `Processes` in host/carry/processes.py).

A worker's process is a fresh interpreter, not a fork of the program, which has threads and whatever libraries the user
has loaded. It has a session of its own, so that Ctrl-C in the terminal reaches only the program, which then ends the
job in order.

No worker may outlive the program, however the program ends (host/process/starter.py).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.host.carry.processes import CannotStart, ProcessDied, Processes, WorkerHandle
from penstock.host.process.control import ControlServer
from penstock.host.process.reporting import Report
from penstock.host.process.starter import started
from penstock.host.process.watched_process import ProcessHere, WatchedProcess
from penstock.host.process.worker_process import Outcome, WorkerOptions
from penstock.local import start_worker
from penstock.local.worker import SPARE, StartMessage
from penstock.runtime.records.pickling import dumps, loads
from penstock.runtime.transport.handshake import receive_frame, send_frame
from penstock.runtime.worker.blackbox import is_stopped

# A process that has been killed is gone within this time, unless the kernel holds it.
_GONE_S = 5.0
# A new process reads what it is sent within this time, even if the machine is busy.
_SPARE_S = 60.0


class LocalProcesses(Processes):
    """Starts the workers of a local job; see the module's docstring."""

    def __init__(self, job: str, options: WorkerOptions, report: Callable[[int, int, int, Report], None]) -> None:
        """`report`: takes (worker, incarnation, number, report)."""
        self._job = job
        self._options = options
        self._server = ControlServer(lambda told: report(*told))
        self._lock = threading.Lock()
        self._closed = False
        self._handles: list[LocalWorker] = []
        self._spare: LocalWorker | None = None  # it is one of `_handles` too

    def start(self, worker: int, incarnation: int, ring_bytes: int, program: bytes, deadline: float) -> LocalWorker:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.is_stopped():  # it would not answer until somebody lets it go on
            spare.kill()
            spare = None
        handle = spare if spare is not None and spare.lives() else self._started(f"worker {worker}")
        message = StartMessage(worker, incarnation, self._options, ring_bytes, self._server.end)
        try:
            answer = handle.exchange(dumps(message), program, deadline)
        except TimeoutError:
            handle.kill()
            raise CannotStart(f"worker {worker} was not ready in time", "died") from None
        except (EOFError, OSError):
            handle.kill()
            raise CannotStart(f"worker {worker} ended while it started: {handle.why_it_ended()}", "died") from None
        if isinstance(answer, Outcome):
            handle.kill()
            assert answer.error is not None
            raise CannotStart(answer.error, "program", answer.operator)
        handle.info = answer
        handle.process = ProcessHere(answer["pid"], answer["blackbox"])
        return handle

    def keep_spares(self, program: bytes) -> None:
        """See Processes. Does not wait until the process has loaded the program."""
        with self._lock:
            if self._closed or (self._spare is not None and self._spare.lives()):
                return
        spare = self._started("a spare process")
        spare.warm(program)
        with self._lock:
            self._spare = spare

    def spares(self) -> int:
        return int(self._spare is not None)

    def close(self) -> None:
        """See Processes. Returns when the processes have ended."""
        with self._lock:
            self._closed = True
            handles, self._handles = self._handles, []
        for handle in handles:
            handle.kill()
        for handle in handles:
            handle.why_it_ended()
        self._server.close()

    def _started(self, name: str) -> LocalWorker:
        """Starts a process. Its command line shows the name of the job, and the name given here."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, os.path.abspath(start_worker.__file__), self._job, name]
        command += [str(theirs.fileno()), str(os.getpid())]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )

        with theirs, self._lock:
            if self._closed:
                ours.close()
                raise CannotStart("the job has ended", "died")
            try:
                handle = LocalWorker(started(start), ours)
            except OSError as error:
                ours.close()
                raise CannotStart(f"{name} cannot be started: {error}", "resources") from error
            self._handles.append(handle)
            return handle


class LocalWorker(WorkerHandle):
    """A child process."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._has_path = False
        self.info: dict[str, Any] = {}
        self.process: WatchedProcess  # from the time at which the process is ready

    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process (SIGSTOP, a debugger)."""
        return is_stopped(self._process.pid)

    def warm(self, program: bytes) -> None:
        """Lets the process load the program before it becomes a worker."""
        with suppress(OSError):  # it has died, and `lives` will tell
            self._channel.settimeout(_SPARE_S)
            self._send_path()
            send_frame(self._channel, SPARE)
            send_frame(self._channel, program)

    def _send_path(self) -> None:
        """Sends the program's module search path, once."""
        if not self._has_path:
            self._has_path = True
            send_frame(self._channel, b"\0".join(os.fsencode(entry) for entry in sys.path if isinstance(entry, str)))

    def exchange(self, message: bytes, program: bytes, deadline: float) -> Any:
        """Sends the process its start message, and returns its answer. Raises TimeoutError, EOFError or OSError."""
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        self._send_path()
        send_frame(self._channel, message)
        send_frame(self._channel, program)
        answer = loads(receive_frame(self._channel))
        self._channel.settimeout(None)
        return answer

    def run(self) -> Outcome:
        try:
            send_frame(self._channel, b"run")
            if self._has_said_something():
                outcome: Outcome = loads(receive_frame(self._channel))
                return outcome
        except (EOFError, OSError):
            pass
        raise ProcessDied(self.why_it_ended())

    def _has_said_something(self) -> bool:
        """Waits until there is something to read, or the process has ended. A child of the process may keep the other
        end of the socket open, so the socket alone does not always show that the process has ended."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        try:
            end = os.pidfd_open(self._process.pid)
        except OSError:  # it has ended, or the kernel is an old one
            return True
        try:
            poll.register(end, select.POLLIN)
            ready = dict(poll.poll())
        finally:
            os.close(end)
        return self._channel.fileno() in ready

    def kill(self) -> None:
        with suppress(OSError):
            self._process.kill()

    def why_it_ended(self) -> str:
        """Waits until the process has ended, and says how it ended."""
        try:
            code = self._process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            return "it cannot be reached any more"
        if code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
            return f"signal {-code}"
        return f"exit code {code}"
