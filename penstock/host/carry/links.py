"""The JobMaster's side of the workers' control. Commands go to each worker in order, and their answers come back as
events, so that the sender never waits for a worker. Questions and standing requests go to all workers at the same time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future, wait
from typing import Any

from penstock.host.decide.process_commands import Ping
from penstock.host.process.control import ControlClient, End, Gone, Refused
from penstock.runtime.errors import PenstockError
from penstock.runtime.records.pickling import Program


class Link:
    """The calls to one process of a worker. The process does them in order, the next one when the last one is done. For
    each call, the link's thread calls `answered(answer)` or `refused(error)`; neither when the link is closed before
    there is an answer, because the process has died."""

    def __init__(self, worker: int, end: End, program: Program | None = None) -> None:
        """`program`: see pickling.dumps."""
        self._line = ControlClient(end, f"penstock-line-{worker}", program)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"penstock-link-{worker}", daemon=True).start()

    def send(
        self,
        command: object,
        answered: Callable[[Any], None],
        refused: Callable[[Refused], None],
    ) -> None:
        """Send a command after all earlier ones. Waits for nothing."""
        self._calls.put((command, answered, refused))

    def close(self) -> None:
        """Send nothing more, and wait for no more answers."""
        self._line.close()
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            command, answered, refused = call
            try:
                answer = self._line.ask(command).result()
            except Gone:
                continue
            except Refused as error:
                refused(error)
            except Exception as error:  # the command or the answer cannot travel
                refused(Refused(f"{type(command).__name__}: {type(error).__name__}: {error}", error))
            else:
                answered(answer)


_Call = tuple[object, Callable[[Any], None], Callable[[Refused], None]]


class _Questions:
    """The questions to one process of a worker. There is one question of each kind at a time."""

    def __init__(self, worker: int, end: End, incarnation: int) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._line = ControlClient(end, f"penstock-questions-{worker}")
        self._open: dict[type, tuple[float, Future[Any]]] = {}
        self._lock = threading.Lock()

    def ask(self, question: object) -> Future[Any]:
        """The question of this kind that has no answer yet, or else a new one. So a silent worker does not get more and
        more questions, and when it answers again, it answers with its state of that time."""
        with self._lock:
            asked = self._open.get(type(question))
            if asked is None or asked[1].done():
                asked = self._open[type(question)] = (time.monotonic(), self._line.ask(question))
            return asked[1]

    def waiting(self, kind: type) -> bool:
        """Whether there is a question of this kind without an answer."""
        with self._lock:
            return kind in self._open and not self._open[kind][1].done()

    def silent_s(self) -> float:
        """The number of seconds for which the oldest question has had no answer; 0.0 when there is none."""
        with self._lock:
            since = [at for at, future in self._open.values() if not future.done()]
        return time.monotonic() - min(since) if since else 0.0

    def close(self) -> None:
        self._line.close()


class AllWorkers:
    """The JobMaster's questions to all workers at once. They do not wait for commands, which may take long. Safe to use
    from several threads.

    A *standing request* (`stop`, `cancel`) is kept: each worker is told until it has confirmed, and so is each worker
    that starts later.
    """

    def __init__(self) -> None:
        self._workers: dict[int, _Questions] = {}
        self._standing_requests: dict[type, object] = {}
        self._lock = threading.Lock()

    def connect(self, worker: int, end: End, incarnation: int) -> None:
        """Ask this process of a worker from now on, in place of an earlier process. Waits for nothing."""
        questions = _Questions(worker, end, incarnation)
        with self._lock:
            before, self._workers[worker] = self._workers.get(worker), questions
            standing_requests = list(self._standing_requests.values())
        for request in standing_requests:
            questions.ask(request)
        if before is not None:
            before.close()

    def disconnect(self, worker: int) -> None:
        """Ask this worker nothing more, because its process has died."""
        with self._lock:
            gone = self._workers.pop(worker, None)
        if gone is not None:
            gone.close()

    def ask(self, question: object, patience_s: float, of: Container[int] | None = None) -> dict[int, Any]:
        """The answers of the workers (`of` these only) that answer within `patience_s` seconds. Workers that have been
        silent for longer are asked too, but not waited for. Raises PenstockError when a worker could not answer."""
        wanted = [questions for questions in self._all() if of is None or questions.worker in of]
        asked = {questions.worker: (questions, questions.ask(question)) for questions in wanted}
        wait([future for questions, future in asked.values() if questions.silent_s() < patience_s], patience_s)
        answers: dict[int, Any] = {}
        failures: list[str] = []
        for worker, (_, future) in sorted(asked.items()):
            if not future.done():
                continue
            error = future.exception()
            if error is None:
                answers[worker] = future.result()
            elif not isinstance(error, Gone):
                failures.append(f"worker {worker} could not answer {error}")
        if failures:
            raise PenstockError("; ".join(failures))
        return answers

    def tell(self, notice: object) -> None:
        """Tells this to each worker that has confirmed the last message of this kind. Waits for nothing."""
        for questions in self._all():
            questions.ask(notice)

    def standing_request(self, request: object) -> None:
        """Tell this to each worker until it has confirmed, also to workers that start later. Waits for nothing."""
        with self._lock:
            self._standing_requests.setdefault(type(request), request)
        for questions in self._all():
            questions.ask(request)

    def silent(self) -> dict[int, float]:
        """The workers that owe an answer, with the number of seconds for which they have owed it."""
        found = {questions.worker: questions.silent_s() for questions in self._all()}
        return {worker: seconds for worker, seconds in found.items() if seconds > 0.0}

    def ping(self) -> list[tuple[int, int]]:
        """Ping all workers. Returns those that have not answered the ping before this one, as (worker, incarnation)."""
        silent = [(questions.worker, questions.incarnation) for questions in self._all() if questions.waiting(Ping)]
        for questions in self._all():
            questions.ask(Ping())
        return silent

    def close(self) -> None:
        """Ask no worker anything more."""
        for questions in self._all():
            self.disconnect(questions.worker)

    def _all(self) -> list[_Questions]:
        with self._lock:
            return list(self._workers.values())
