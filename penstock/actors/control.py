"""Control of a running Worker: the JobMaster asks for status, says stop or cancel, or commands what epochs ask for,
over local sockets.

Why not by calls on the Ray actor: a Ray actor that can answer calls beside a pending one has its main thread look for
signals a hundred times a second, which costs half a percent of a core in every idle worker. A Worker instead runs its
loop in the main thread, where Ray leaves it alone, and answers here in threads that sleep in the kernel. The server
is an abstract Unix socket (no file is left, however the process ends); both sides prove that they know the job's key
before anything is unpickled.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from penstock.runtime.codec import pickled
from penstock.runtime.errors import PenstockError

Handlers = dict[str, Callable[..., Any]]

#: Where a worker answers: address and key.
End = tuple[str, bytes]


class Refused(PenstockError):
    """The worker could not do what it was asked; `error` is what its handler raised, if that could travel."""

    def __init__(self, message: str, error: Exception | None = None) -> None:
        super().__init__(message)
        self.error = error


class ControlServer:
    """Answers calls by name; each connection in a daemon thread of its own, its calls one after the other."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self.key = os.urandom(32)
        self.address = f"\0penstock-{os.getpid()}-{os.urandom(8).hex()}"
        self._listener = Listener(self.address, family="AF_UNIX", authkey=self.key)
        threading.Thread(target=self._serve, name="penstock-control", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (EOFError, ConnectionError, AuthenticationError):
                continue  # this client has gone; the next may come
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), name="penstock-control", daemon=True).start()

    def _answer(self, connection: Connection[Any, Any]) -> None:
        try:
            with connection:
                while True:
                    method, arguments = connection.recv()
                    try:
                        result: tuple[bool, Any] = (True, self._handlers[method](*arguments))
                    except Exception as error:
                        result = (False, _portable(error))
                    connection.send(result)
        except (EOFError, OSError):
            return  # the client has gone

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


def _portable(error: Exception) -> Exception:
    """The error, or one that says the same, if it would not come through."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class ControlLink:
    """One connection to a worker, for calls one after the other; safe to use from several threads."""

    def __init__(self, end: End) -> None:
        self._connection: Connection[Any, Any] = Client(end[0], family="AF_UNIX", authkey=end[1])
        self._lock = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        """The worker's answer; OSError or EOFError when it has gone, Refused when its handler raised."""
        question = pickled((method, arguments))  # a plan holds functions of the user's main script
        with self._lock:
            self._connection.send_bytes(question)
            ok, answer = self._connection.recv()
        if not ok:
            raise Refused(f"{method}: {type(answer).__name__}: {answer}", answer)
        return answer

    def close(self) -> None:
        """End the connection; a call under way fails."""
        self._connection.close()


class ControlClients:
    """The JobMaster's connections to all Workers for what all are asked at once; safe to use from several threads."""

    def __init__(self, ends: dict[int, End]) -> None:
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._lock = threading.Lock()
        for worker, end in ends.items():
            self.connect(worker, end)

    def connect(self, worker: int, end: End) -> None:
        """Connect to a worker, in place of an earlier one of that number; one that has gone already answers nothing."""
        try:
            connection: Connection[Any, Any] = Client(end[0], family="AF_UNIX", authkey=end[1])
        except (OSError, EOFError):
            return
        with self._lock:
            self._drop(worker)
            self._connections[worker] = connection

    def call(self, method: str, timeout: float) -> list[Any]:
        """Ask all workers; the answers of those that have not gone and answer within `timeout` seconds (one that does
        not is not asked again: a late answer would be taken for another question's)."""
        answers, _ = self.ask(method, timeout)
        return [answers[worker] for worker in sorted(answers)]

    def ask(self, method: str, timeout: float) -> tuple[dict[int, Any], list[int]]:
        """As `call`: the answers by worker, and the workers that have not gone and are silent."""
        with self._lock:
            asked: dict[Connection[Any, Any], int] = {}
            for worker, connection in list(self._connections.items()):
                try:
                    connection.send((method, ()))
                    asked[connection] = worker
                except OSError:
                    self._drop(worker)
            answers: dict[int, Any] = {}
            failures: list[str] = []  # raised only when every answer is read: one left over would be the next call's
            while asked:
                ready = wait(list(asked), timeout)
                if not ready:
                    break
                for answering in ready:
                    assert isinstance(answering, Connection)
                    worker = asked.pop(answering)
                    try:
                        ok, answer = answering.recv()
                    except (EOFError, OSError):
                        self._drop(worker)
                        continue
                    if not ok:
                        failures.append(
                            f"worker {worker} could not answer {method!r}: {type(answer).__name__}: {answer}"
                        )
                    else:
                        answers[worker] = answer
            for late in asked.values():
                self._drop(late)
            if failures:
                raise PenstockError("; ".join(failures))
            return answers, list(asked.values())

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            for worker in list(self._connections):
                self._drop(worker)

    def _drop(self, worker: int) -> None:
        connection = self._connections.pop(worker, None)
        if connection is not None:
            connection.close()
