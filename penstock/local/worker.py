"""Runs a worker in a child process of the program.

The program and the process share a socket pair, which nobody else can reach. It carries four messages: the start
message, the result of WorkerProcess.prepare, the word to run, and how the run has ended. A spare process gets the word
SPARE and the job's program before the start message, and loads the program meanwhile. Everything else goes by the
control sockets: commands to the worker, and in the other direction the worker's reports.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.host.process.control import ControlClient, End
from penstock.host.process.reporting import Report
from penstock.host.process.worker_process import Outcome, WorkerOptions, WorkerProcess
from penstock.runtime import standard_streams
from penstock.runtime.errors import describe
from penstock.runtime.records.pickling import dumps, loads
from penstock.runtime.transport.handshake import receive_frame, send_frame

#: The node of all processes of a local job, as the status shows it.
NODE = "local"

#: What a process gets in place of its start message when it is no worker yet.
SPARE = b"spare"


@dataclass(frozen=True)
class StartMessage:
    """The message with which a worker's process starts, besides the job's program. `reports`: the address for its
    reports."""

    worker: int
    incarnation: int
    options: WorkerOptions
    ring_bytes: int
    reports: End


def serve(fd: int) -> None:
    """Runs the worker at the other end of this socket. Returns when the program has closed its end."""
    standard_streams.open_closed()  # the program may have closed its own, which this process has inherited
    standard_streams.outlive_readers()
    with socket.socket(fileno=fd) as program:
        try:
            _serve(program)
        except (EOFError, ConnectionError):  # the program has gone
            os._exit(1)


def _serve(program: socket.socket) -> None:
    process = WorkerProcess()
    first = receive_frame(program)
    if first == SPARE:
        with suppress(Exception):  # when the process becomes a worker, `connect` raises the same error
            process.warm(receive_frame(program))
        first = receive_frame(program)
    message: StartMessage = loads(first)
    plan = receive_frame(program)
    try:
        info = process.prepare(message.worker, message.options, message.ring_bytes, NODE, "127.0.0.1")
        outcome = process.connect(plan, _Reports(message.reports), message.incarnation, None)
    except Exception as error:
        outcome = Outcome(message.worker, f"worker {message.worker} cannot start: {describe(error)}")
    if outcome.error is not None:
        send_frame(program, dumps(outcome))
        return
    send_frame(program, dumps(info))
    receive_frame(program)  # the word to run
    send_frame(program, dumps(process.run()))
    receive_frame(program)  # other workers, and the status, may still need this process


class _Reports:
    """Carries reports to the program's control server."""

    def __init__(self, end: End) -> None:
        self._client = ControlClient(end, "penstock-reports")

    def report(self, worker: int, incarnation: int, number: int, item: Report) -> Any:
        return self._client.ask((worker, incarnation, number, item))

    def wait(self, reports: list[Future[Any]]) -> None:
        for report in reports:
            report.result()
