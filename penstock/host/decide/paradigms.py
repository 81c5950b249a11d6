"""The paradigm scheduler of a job that uses Spark (docs/papers.md: D2) as a part of its JobHost: events go in, commands
come out, and calls to workers are made for it.

A fault of the scheduler never ends the job, which can do without Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.bridge import commands as spark
from penstock.host.decide.commands import HostCommand
from penstock.host.decide.worker_calls import Handler, WorkerCalls, nothing
from penstock.host.decide.worker_lives import WorkerLives
from penstock.runtime.errors import PenstockError
from penstock.runtime.worker.run_loop import LoopEnded

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import ParadigmScheduler  # loads Arrow

logger = logging.getLogger(__name__)

#: An event of the paradigm scheduler, which gets the time.
SparkEvent: TypeAlias = "Callable[[ParadigmScheduler, float], list[spark.Command]]"


class Paradigms:
    """See the module's docstring."""

    def __init__(
        self,
        job: str,
        scheduler: ParadigmScheduler,
        calls: WorkerCalls,
        lives: WorkerLives,
        out: list[HostCommand],
        note: Callable[[float, object], None],
    ) -> None:
        """`note` keeps a command for the story of the job."""
        self._job = job
        self._scheduler = scheduler
        self._calls = calls
        self._lives = lives
        self._out = out
        self._note = note
        self.status = scheduler.status()  # as of the last event

    def take(self, event: SparkEvent, now: float) -> None:
        """Gives the scheduler an event, and passes on its commands."""
        try:
            commands = event(self._scheduler, now)
            self.status = self._scheduler.status()
        except Exception:  # a fault of ours must not end the job
            logger.exception("job %s: the paradigm scheduler has met an error; it tries again", self._job)
            return
        for command in commands:
            self._note(now, command)
            if isinstance(command, spark.WorkerCommand):
                self._call(command, now)
            elif isinstance(command, spark.GreetBridge):
                for worker in sorted(self._lives.running):
                    self._calls.call(worker, command, Handler(nothing, nothing))
            elif isinstance(command, spark.Note):
                logger.info("job %s: %s", self._job, command.text)
            elif isinstance(command, spark.Warn):
                logger.warning("job %s: %s", self._job, command.text)
            else:
                self._out.append(command)

    def _call(self, command: spark.WorkerCommand, now: float) -> None:
        """Calls a worker for the scheduler, which hears of the answer, or that there will be none."""
        worker, number = command.worker, command.number

        def answered(answer: Any, now: float) -> None:
            if isinstance(command, spark.TakeSample):
                self.take(lambda scheduler, now: scheduler.sampled(now, number, answer), now)
            else:
                self.take(lambda scheduler, now: scheduler.done(now, number), now)

        def refused(error: PenstockError, now: float) -> None:
            ended = isinstance(getattr(error, "error", None), LoopEnded)
            self._not_done(command, None if ended else f"worker {worker}: {error}", now)

        if worker in self._lives.running:
            self._calls.call(worker, command, Handler(answered, refused, partial(self._not_done, command, None)))
        else:
            self._not_done(command, None, now)

    def _not_done(self, command: spark.WorkerCommand, why: str | None, now: float) -> None:
        """Tells the scheduler why a worker has refused its command; None: the process or the run loop has ended."""
        number = command.number
        if not isinstance(command, spark.TakeSample):
            self.take(lambda scheduler, now: scheduler.refused(now, number, why), now)
            return
        if why is not None:
            logger.info("job %s: a range cannot be tried in Spark on the records of its tasks: %s", self._job, why)
        self.take(lambda scheduler, now: scheduler.not_sampled(now, number, why), now)
