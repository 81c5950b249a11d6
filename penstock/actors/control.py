"""Control of a running Worker: the JobMaster asks for status, or says stop or cancel, over a local socket.

Why not by calls on the Ray actor: a Ray actor that can answer calls beside a pending one has its main thread look for
signals a hundred times a second, which costs half a percent of a core in every idle worker. A Worker instead runs its
loop in the main thread, where Ray leaves it alone, and answers here in a thread that sleeps in the kernel. The server
is an abstract Unix socket (no file is left, however the process ends); both sides prove that they know the job's key
before anything is unpickled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from penstock.runtime.errors import PenstockError

Handlers = dict[str, Callable[[], Any]]


class ControlServer:
    """Answers calls by name, one after the other, in a daemon thread."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self.key = os.urandom(32)
        self.address = f"\0penstock-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener = Listener(self.address, family="AF_UNIX", authkey=self.key)
        threading.Thread(target=self._serve, name="penstock-control", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                with self._listener.accept() as connection:
                    self._answer(connection)
            except (EOFError, ConnectionError, AuthenticationError):
                continue  # this client has gone; the next may come
            except OSError:
                return  # closed

    def _answer(self, connection: Connection[Any, Any]) -> None:
        while True:
            method = connection.recv()
            try:
                result = (True, self._handlers[method]())
            except Exception as error:
                result = (False, f"{type(error).__name__}: {error}")
            connection.send(result)

    def close(self) -> None:
        """Answer no more."""
        self._listener.close()


class ControlClients:
    """The JobMaster's connections to all Workers; safe to use from several threads."""

    def __init__(self, ends: Sequence[tuple[str, bytes]]) -> None:
        self._connections: list[Connection[Any, Any] | None] = []
        for address, key in ends:
            self._connections.append(Client(address, family="AF_UNIX", authkey=key))
        self._lock = threading.Lock()

    def call(self, method: str, timeout: float) -> list[Any]:
        """Ask all workers; their answers, None for one that has gone or does not answer within `timeout` seconds
        (it is not asked again: a late answer would be taken for another question's)."""
        with self._lock:
            asked: dict[Connection[Any, Any], int] = {}
            for index, connection in enumerate(self._connections):
                if connection is not None:
                    try:
                        connection.send(method)
                        asked[connection] = index
                    except OSError:
                        self._drop(index)
            answers: list[Any] = [None] * len(self._connections)
            failures: list[str] = []  # raised only when every answer is read: one left over would be the next call's
            while asked:
                ready = wait(list(asked), timeout)
                if not ready:
                    break
                for answering in ready:
                    assert isinstance(answering, Connection)
                    index = asked.pop(answering)
                    try:
                        ok, answer = answering.recv()
                    except (EOFError, OSError):
                        self._drop(index)
                        continue
                    if not ok:
                        failures.append(f"worker {index} could not answer {method!r}: {answer}")
                    else:
                        answers[index] = answer
            for late in asked.values():
                self._drop(late)
            if failures:
                raise PenstockError("; ".join(failures))
            return answers

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            for index in range(len(self._connections)):
                self._drop(index)

    def _drop(self, index: int) -> None:
        connection = self._connections[index]
        self._connections[index] = None
        if connection is not None:
            connection.close()
