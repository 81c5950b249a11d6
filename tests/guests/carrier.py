"""Carries a job over guests: its host is in guest 0, and each guest has a worker and, where it receives, a relay.

In each guest `serve` starts processes for the host, which asks over TCP: workers, relays, and the agent that looks
after them. All are forks of one process that has loaded everything, because an emulated processor takes long to load a
program. A connection lives as long as its process, so its end tells of the process's death.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from penstock.host.carry.processes import CannotStart, ProcessDied
from penstock.host.process.control import ControlServer, End
from penstock.host.process.network import Network
from penstock.host.process.node_agent import Kill, NodeAgent, NodeLine
from penstock.host.process.relay_process import RelayProcess
from penstock.host.process.reporting import Report
from penstock.host.process.worker_process import Outcome, WorkerOptions, WorkerProcess
from penstock.local.local_job import LocalJob
from penstock.local.worker import _Reports
from penstock.runtime.records.pickling import dumps, loads
from penstock.runtime.transport import choose
from penstock.runtime.transport.handshake import receive_frame, send_frame
from penstock.runtime.transport.rdma import NoRdma, find_port

PORT = 7100
#: A watchdog for everything that may be late in a guest.
PATIENCE_S = 300.0

_OVER, _STACKS = b"over", b"stacks"


def addresses() -> list[str]:
    return os.environ["GUESTS"].split(",")


def connected(address: str) -> socket.socket:
    """Connects to what starts the processes of a guest, when it is there."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection((address, PORT), 10.0)
        except OSError:  # the guest still starts
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


# --- in each guest ----------------------------------------------------------------------------------------------------


def serve() -> None:
    """Starts what the host asks for, until it says that the job is over."""
    logging.basicConfig(level=logging.INFO, format="%(process)d %(relativeCreated)d %(message)s", stream=sys.stdout)
    children: set[int] = set()
    with suppress(NoRdma):
        find_port(_own()[1])  # loads what the forks need

    def ended(*_: object) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                children.discard(found[0])
                print(f"process {found[0]} has ended: {os.waitstatus_to_exitcode(found[1])}", flush=True)

    signal.signal(signal.SIGCHLD, ended)
    with socket.create_server(("", PORT)) as door:
        while True:
            host, _ = door.accept()
            with host:
                if (first := receive_frame(host)) == _OVER:
                    break
                if first == _STACKS:
                    _signal(children, signal.SIGUSR1)
                elif pid := os.fork():
                    children.add(pid)
                else:
                    door.close()
                    _become(host, *loads(first))
    _signal(children, signal.SIGKILL)


def _signal(children: set[int], number: int) -> None:
    for pid in list(children):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _become(host: socket.socket, kind: str, *about: Any) -> NoReturn:
    """Becomes a process of the job, until the host closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, sys.stdout)
    try:
        {"worker": _worker, "relay": _relay, "agent": _agent}[kind](host, *about)
        receive_frame(host)
    except EOFError:
        os._exit(0)
    except BaseException:
        logging.exception("a process for a %s", kind)
    os._exit(1)


def _own() -> tuple[str, str]:
    """Returns the name and the address of this guest."""
    return os.environ["GUEST"], os.environ["GUEST_ADDRESS"]


def _choose(tcp: bool) -> None:
    """Lets this process use TCP only, or RDMA, for whose device it waits as long as an emulated processor takes."""
    only = choose.Abilities("", "this part of the test uses TCP")
    choose.probe = (lambda host, limit_s=0.0: only) if tcp else partial(choose.probe, limit_s=PATIENCE_S)


def _worker(
    host: socket.socket, worker: int, incarnation: int, options: WorkerOptions, ring_bytes: int, reports: End, tcp: bool
) -> None:
    _choose(tcp)
    process = WorkerProcess()
    program = receive_frame(host)
    info = process.prepare(worker, options, ring_bytes, *_own())
    outcome = process.connect(program, _Reports(reports), incarnation, None)
    if outcome.error is not None:
        send_frame(host, dumps(outcome))
        return
    send_frame(host, dumps(info))
    receive_frame(host)  # the word to run
    send_frame(host, dumps(process.run()))


def _relay(host: socket.socket, number: int, job: str, network: Network, tcp: bool) -> None:
    _choose(tcp)
    process = RelayProcess(lambda: os._exit(0))
    node, address = _own()
    send_frame(host, dumps(process.prepare(number, job, network, None, address, node)))
    receive_frame(host)  # the word to run
    process.run()


def _agent(host: socket.socket, job: str, network: Network) -> None:
    agent = NodeAgent(job, network.ports(_own()[1]), network.node_timeout_s, lambda: os._exit(0))
    send_frame(host, dumps(agent.end))


# --- at the host ------------------------------------------------------------------------------------------------------


def end_all() -> None:
    """Lets all guests but this one end."""
    for address in addresses()[1:]:
        with suppress(OSError), connected(address) as guest:
            send_frame(guest, _OVER)


def print_stacks() -> None:
    """Lets all processes that the job has print what they do."""
    for address in addresses():
        with connected(address) as guest:
            send_frame(guest, _STACKS)


class GuestJob(LocalJob):
    """A job whose host is in this process. It has relays, because its workers share no memory."""

    where = "processes of guests"

    def relays(self) -> GuestProcesses:  # type: ignore[override]
        """See Carrier."""
        assert isinstance(self._processes, GuestProcesses)
        return self._processes


class GuestProcesses:
    """See Processes and RelayStarter. `tcp`: no process uses RDMA."""

    def __init__(
        self, tcp: bool, job: str, options: WorkerOptions, report: Callable[[int, int, int, Report], None]
    ) -> None:
        self._tcp = tcp
        self._job = job
        self._network = network = Network(node_timeout_s=PATIENCE_S).secured()
        self._options = replace(options, network=network)
        self._server = ControlServer(lambda told: report(*told), network.ports(_own()[1]))
        self._channels: list[socket.socket] = []
        self._lines: list[NodeLine] = []
        for node, address in enumerate(addresses()):
            channel = connected(address)
            self._channels.append(channel)
            send_frame(channel, dumps(("agent", job, network)))
            self._lines.append(NodeLine(f"guest {node}", loads(receive_frame(channel)), PATIENCE_S, logging.error))
        self._workers: dict[int, int] = {}  # the guest of each

    def start(self, worker: int, incarnation: int, ring_bytes: int, program: bytes, deadline: float) -> Started:
        """See Processes."""
        self._workers[worker] = guest = worker % len(self._lines)
        about = ("worker", worker, incarnation, self._options, ring_bytes, self._server.end, self._tcp)
        return self._started(guest, deadline, dumps(about), program)

    def start_relay(self, number: int, node_id: str, deadline: float) -> Started:
        """See RelayStarter."""
        about = ("relay", number, self._job, self._network, self._tcp)
        return self._started(int(node_id), deadline, dumps(about))

    def node_name(self, node_id: str) -> str:
        """See RelayStarter."""
        return f"guest {node_id}"

    def _started(self, guest: int, deadline: float, *told: bytes) -> Started:
        try:
            channel = connected(addresses()[guest])
            self._channels.append(channel)
            channel.settimeout(max(0.001, deadline - time.monotonic()))
            for frame in told:
                send_frame(channel, frame)
            info = loads(receive_frame(channel))
        except (EOFError, OSError) as error:
            raise CannotStart(f"a process of guest {guest} has not started: {error}", "died") from None
        if isinstance(info, Outcome):
            raise CannotStart(str(info.error), "program", info.operator)
        channel.settimeout(None)
        self._lines[guest].wait_for_clock(max(0.0, deadline - time.monotonic()))
        return Started(channel, info, self._lines[guest])

    def kill(self, guest: int, pid: int) -> None:
        """Kills a worker or a relay of a guest."""
        self._lines[guest].tell(Kill(pid))

    def clocks(self) -> dict[int, int]:
        """See Processes."""
        clocks = {worker: self._lines[guest].clock() for worker, guest in self._workers.items()}
        return {worker: offset.ahead_ns for worker, offset in clocks.items() if offset is not None}

    def keep_spares(self, program: bytes) -> None:
        """See Processes. There are none."""

    def spares(self) -> int:
        """See Processes."""
        return 0

    def close(self) -> None:
        """See Processes. A process that runs does not see that its connection ends, and the agent kills it."""
        for line in self._lines:
            line.close()
        for channel in self._channels:
            channel.close()
        self._server.close()


class Started:
    """See WorkerHandle and RelayHandle."""

    def __init__(self, channel: socket.socket, info: dict[str, Any], line: NodeLine) -> None:
        self.info = info
        self.process = line.process(info["pid"], info["blackbox"])
        self._channel = channel

    def run(self) -> Any:
        """See WorkerHandle."""
        try:
            send_frame(self._channel, b"run")
            return loads(receive_frame(self._channel))
        except (EOFError, OSError):
            raise ProcessDied("its connection has ended") from None

    def kill(self) -> None:
        """See WorkerHandle."""
        self.process.kill()
