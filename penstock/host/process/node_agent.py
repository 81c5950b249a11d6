"""The agent of a node: looks after a job's processes on one machine, for a JobMaster on another one.

What the JobMaster does itself on its own machine, the agent does for its node: it opens the black boxes of workers
while they live, tells what they say after a death, and kills a worker by its process id. It also answers the heartbeats
of the JobMaster with the time of its machine's clock. So the JobMaster tells a machine that is gone or cut off from one
that is slow, and knows how far the clocks of its machines are apart.

A node that is cut off from the JobMaster is lost for the job, which continues elsewhere. So an agent that has heard
nothing for the limit ends the workers of its node, and itself: nothing of a job may be left where nobody looks for it.
Only a pause of the agent's own machine does not count as silence.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.host.process.clock_offset import ClockOffset, Offset
from penstock.host.process.control import ControlClient, ControlServer, End, Gone, Refused
from penstock.host.process.hangs import SilenceDetector, on_silence
from penstock.host.process.watched_process import LastWords, ProcessHere
from penstock.runtime.status import MachineStatus
from penstock.runtime.transport.certificates import BadCertificate
from penstock.runtime.transport.endpoint import Ports

logger = logging.getLogger(__name__)

# The time between two heartbeats.
BEAT_S = 0.25
# An answer to a heartbeat that takes longer than this shows that the machine, or the way to it, is slow.
_SLOW_S = 0.25
# How often an agent looks within its limit whether the JobMaster is silent. A JobMaster looks at each heartbeat.
_LOOKS = 20
# How long the JobMaster waits for what an agent says of a process. Afterwards it continues as if it did not know.
_ANSWER_S = 2.0
# The time between two looks whether an agent that has not answered yet refuses the JobMaster.
_LOOK_S = 0.1


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GetClock:
    """Answer with the time of the machine's monotonic clock, in ns."""


@dataclass(frozen=True)
class Watch:
    """Look after a worker's process, which lives, from now on."""

    pid: int
    blackbox: str


@dataclass(frozen=True)
class Forget:
    """Look after a process no longer, because it has died."""

    pid: int


@dataclass(frozen=True)
class Kill:
    """Kill a process."""

    pid: int


@dataclass(frozen=True)
class IsStopped:
    """Answer whether a process is stopped."""

    pid: int


@dataclass(frozen=True)
class GetLastWords:
    """Answer with the last words of a process that has died."""

    pid: int


@dataclass(frozen=True)
class Sees:
    """Answer whether the file at this path, seen from this machine, contains this text."""

    path: str
    text: str


AgentCommand = GetClock | Watch | Forget | Kill | IsStopped | GetLastWords | Sees


# --- on the node ------------------------------------------------------------------------------------------------------


class NodeAgent:
    """See the module's docstring. `left` is called once when the JobMaster has been silent for `limit_s` seconds, after
    the workers of this node have been killed."""

    def __init__(self, job: str, ports: Ports, limit_s: float, left: Callable[[], None]) -> None:
        self._job = job
        self._left = left
        self._processes: dict[int, ProcessHere] = {}
        self._closed = threading.Event()
        self._control = ControlServer(self.obey, ports)
        self._limit_s = limit_s
        on_silence(lambda: self._control.heard, limit_s, self._leave, self._closed, looks=_LOOKS)

    @property
    def end(self) -> End:
        """Where the JobMaster asks this agent."""
        return self._control.end

    def obey(self, command: AgentCommand) -> Any:
        """Carries out a command of the JobMaster."""
        match command:
            case GetClock():
                return time.monotonic_ns()
            case Watch(pid, blackbox):
                self._processes[pid] = ProcessHere(pid, blackbox)
            case Forget(pid):
                self._processes.pop(pid, None)
            case Kill(pid):
                self._processes[pid].kill()
            case IsStopped(pid):
                return self._processes[pid].is_stopped()
            case GetLastWords(pid):
                return self._processes[pid].last_words()
            case Sees(path, text):
                return sees(path, text)
        return None

    def close(self) -> None:
        """Answers nothing more."""
        self._closed.set()
        self._control.close()

    def _leave(self) -> None:
        self._closed.set()
        logger.warning(
            "job %s: nothing was heard of its JobMaster for %g s, so the %d workers of this node are ended",
            self._job,
            self._limit_s,
            len(self._processes),
        )
        for process in list(self._processes.values()):
            process.kill()
        self._left()


def sees(path: str, text: str) -> bool:
    """Whether the file at this path, seen from this machine, contains this text."""
    try:
        with open(path) as file:
            return file.read(len(text) + 1) == text
    except OSError:
        return False


# --- at the JobMaster -------------------------------------------------------------------------------------------------


class NodeLine:
    """The JobMaster's line to the agent of a node. `lost` is called once, with the reason, when the agent has been
    silent for `limit_s` seconds."""

    def __init__(self, name: str, end: End, limit_s: float, lost: Callable[[str], None]) -> None:
        """`name`: of the node, for people."""
        self.name = name
        self._client = ControlClient(end, "penstock-node")
        self._watched: dict[int, str] = {}  # by process id: the address of the black box
        self._limit_s = limit_s
        self._lost = lost
        self._offset = ClockOffset()
        self._lock = threading.Lock()  # of what is known of the last beats
        self._asked_at: float | None = None  # when the heartbeat that has no answer yet was sent
        self._slow = False
        self._rtt_ns = 0
        self._answered = threading.Event()  # set by the first answer
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="penstock-beat", daemon=True).start()

    def connect(self, end: End) -> None:
        """Asks another process from now on, because the node's agent has been started again."""
        before, self._client = self._client, ControlClient(end, "penstock-node")
        before.close()
        with self._lock:
            self._asked_at = None
            watched = dict(self._watched)
        for pid, blackbox in watched.items():
            self.tell(Watch(pid, blackbox))

    def ask(self, command: AgentCommand) -> Any:
        """Returns the agent's answer, or None when it does not answer within seconds. Raises Refused."""
        try:
            return self._client.ask(command).result(_ANSWER_S)
        except (NoAnswer, Gone):
            return None

    def tell(self, command: AgentCommand) -> None:
        """Asks the agent to do something, and does not wait until it has."""
        self._client.ask(command)

    def process(self, pid: int, blackbox: str) -> ProcessElsewhere:
        """Lets the agent look after a worker's process, which lives."""
        with self._lock:
            self._watched[pid] = blackbox
        self.ask(Watch(pid, blackbox))
        return ProcessElsewhere(self, pid)

    def forget(self, pid: int) -> None:
        """Lets the agent look after a process no longer, because the process has died."""
        with self._lock:
            self._watched.pop(pid, None)
        self.tell(Forget(pid))

    def clock(self) -> Offset | None:
        """How far the clock of the node is ahead of the JobMaster's; None while nothing is known."""
        with self._lock:
            return self._offset.now(time.monotonic_ns())

    def wait_for_clock(self, timeout_s: float) -> Offset | None:
        """The same, after waiting for a first measurement. Raises BadCertificate when there will be none, because the
        agent and the JobMaster refuse each other."""
        until = time.monotonic() + timeout_s
        while not self._answered.wait(min(_LOOK_S, max(0.0, until - time.monotonic()))):
            if refusal := self.refusal():
                raise BadCertificate(refusal)
            if self._closed.is_set() or time.monotonic() >= until:
                break
        return self.clock()

    def refusal(self) -> str | None:
        """Returns why the agent and the JobMaster refuse each other, or None when they do not, as far as is known."""
        if self._client.refused is None:
            return None
        return (
            f"node {self.name} cannot be asked for anything, because the certificates do not fit together "
            f"({self._client.refused}): the authority of each machine must have signed the certificates of all others. "
            "Correct the files of tls=penstock.Tls(...) there"
        )

    def status(self) -> MachineStatus:
        """The content of the heartbeats: the state is "ok", "slow" or "silent"."""
        offset = self.clock()
        with self._lock:
            silent_s = 0.0 if self._asked_at is None else time.monotonic() - self._asked_at
            silent = silent_s > 4 * BEAT_S
            return MachineStatus(
                name=self.name,
                state="silent" if silent else "slow" if self._slow else "ok",
                silent_s=silent_s if silent else 0.0,
                round_trip_ms=self._rtt_ns / 1e6,
                clock_ahead_ms=None if offset is None else offset.ahead_ns / 1e6,
                clock_uncertainty_ms=None if offset is None else offset.uncertainty_ns / 1e6,
            )

    def close(self) -> None:
        """Asks nothing more."""
        self._closed.set()
        self._client.close()

    def _beat(self) -> None:
        # The detector must expect a look at each heartbeat: it counts no more than it expects for a look that is late.
        looks = max(1, round(self._limit_s / BEAT_S))
        silence: SilenceDetector[str] = SilenceDetector(self._limit_s, time.monotonic, looks=looks)
        while not self._closed.is_set():
            with self._lock:
                waits = self._asked_at is not None
                if not waits:
                    self._asked_at = time.monotonic()
            if not waits:
                self._ask_for_time()
            self._closed.wait(BEAT_S)
            with self._lock:
                late = self._asked_at is not None and time.monotonic() - self._asked_at > BEAT_S
                silent = [self.name] if late else []
            if silence.look(silent):
                self._lost(self.refusal() or f"its node {self.name} has not answered for {self._limit_s:g} s")
                return

    def _ask_for_time(self) -> None:
        asked_ns = time.monotonic_ns()

        def answered(future: Future[int]) -> None:
            answered_ns = time.monotonic_ns()
            if future.exception() is not None:
                return
            with self._lock:
                self._offset.add(asked_ns, future.result(), answered_ns)
                self._rtt_ns = answered_ns - asked_ns
                self._slow = self._rtt_ns > _SLOW_S * 1e9
                self._asked_at = None
            self._answered.set()

        self._client.ask(GetClock()).add_done_callback(answered)


class ProcessElsewhere:
    """A process of another machine, which the agent of its node looks after; see WatchedProcess."""

    def __init__(self, line: NodeLine, pid: int) -> None:
        self._line = line
        self.pid = pid

    def kill(self) -> None:
        """See WatchedProcess, also for the methods that follow."""
        self._line.tell(Kill(self.pid))

    def is_stopped(self) -> bool:
        with suppress(Refused):  # an agent that was started anew does not know the process
            return bool(self._line.ask(IsStopped(self.pid)))
        return False

    def last_words(self) -> LastWords | None:
        found: LastWords | None = None
        with suppress(Refused):
            found = self._line.ask(GetLastWords(self.pid))
        self._line.forget(self.pid)
        return found


def leave_process() -> None:
    """Ends this process, which is an agent's, at once."""
    os._exit(0)
