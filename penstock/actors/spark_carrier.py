"""Carries out what the paradigm scheduler decides (docs/papers.md: D6): asks the workers for their load, starts and
ends Spark, and tells the workers which tasks are to be diverted.

The scheduler (bridge/paradigm_scheduler.py) has one thread here, which takes events one after the other; nothing else
touches its state. Whatever has to wait is a future, or happens in another thread, and comes back as an event. So
neither a silent worker nor a silent Spark holds up the scheduler, and nothing of this holds up the job.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from penstock.actors import spark_bridge
from penstock.bridge.forms import RangeForm
from penstock.bridge.paradigm_scheduler import (
    CheckSpark,
    Command,
    DivertTasks,
    DualOptions,
    EndSpark,
    KillSpark,
    Note,
    ParadigmScheduler,
    PrepareSpark,
    TakeSample,
    TryRange,
    UndivertTasks,
    Warn,
)
from penstock.bridge.session import SparkOptions
from penstock.bridge.spark_life import RangeTrial, SparkFacts
from penstock.runtime.program.plan import Plan
from penstock.runtime.worker.load import TaskLoad
from penstock.runtime.worker.sample import RecordSample

logger = logging.getLogger(__name__)

_LOOK_S = 0.25

# How long the bridge may take to end Spark when the job ends, or has another plan.
_STOP_S = 20.0


class Bridge(Protocol):
    """The process that holds a session, as `spark_bridge.start` returns it."""

    name: str

    def prepare(self) -> Future[SparkFacts]: ...

    def try_range(self, chain: int, sample: RecordSample) -> Future[RangeTrial]: ...

    def check(self) -> Future[Any]: ...

    def stop(self) -> Future[Any]: ...

    def kill(self) -> None: ...


class Tell(Protocol):
    """Sends a worker a message. Afterwards it calls `done` with the worker's answer, or `refused` with the reason, or
    `refused` with None when the worker's process has died or does not run."""

    def __call__(
        self,
        worker: int,
        method: str,
        arguments: tuple[Any, ...],
        done: Callable[[Any], None],
        refused: Callable[[str | None], None],
    ) -> None: ...


_Event = Callable[[ParadigmScheduler], list[Command]]


class SparkCarrier:
    """Carries a paradigm scheduler; see the module's docstring. `ask` returns the load of the workers that answer
    within a few seconds. The carrier works until `close`."""

    def __init__(
        self,
        plan: Plan,
        options: DualOptions,
        hang_timeout_s: float,
        *,
        ask: Callable[[], Mapping[int, Sequence[TaskLoad]]],
        tell: Tell,
        start: Callable[[str, SparkOptions, list[RangeForm]], Bridge] = spark_bridge.start,
    ) -> None:
        self._scheduler = ParadigmScheduler(plan, options, hang_timeout_s)
        self._job = plan.name
        self._options = options
        self._ask = ask
        self._tell = tell
        self._start = start
        self._there: tuple[str, str] | None = None  # the bridge that was ready last, and its node
        self._greeted: set[tuple[str, int]] = set()  # (bridge, worker)
        self._bridges: dict[int, Bridge] = {}  # by life; those that are given up are taken out
        self._enders: list[threading.Thread] = []
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._status = self._scheduler.status()  # as of the last event, for other threads
        self._thread = threading.Thread(target=self._run, name="penstock-paradigms", daemon=True)
        self._thread.start()
        threading.Thread(target=self._look, name="penstock-loads", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """Returns the paradigm in which each range of operators is, and why."""
        return self._status

    def plan_changed(self, plan: Plan) -> None:
        """Notes that the job has this plan from now on."""
        self._events.put(lambda scheduler: scheduler.plan_changed(plan))

    def close(self) -> None:
        """Makes no more decisions, and ends Spark. Returns when Spark has ended or was killed."""
        if not self._over.is_set():
            self._over.set()
            self._events.put(lambda scheduler: scheduler.stop())
            self._events.put(None)
        self._thread.join()
        for ender in self._enders:
            ender.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            asked_s = time.monotonic()
            loads: Mapping[int, Sequence[TaskLoad]] = {}
            try:
                loads = self._ask()
            except Exception as error:  # a worker could not tell: the next look asks it again
                logger.warning(
                    "job %s: its workers could not be asked for their load, so no range switches now: %s",
                    self._job,
                    error,
                )
            self._events.put(partial(_looked, asked_s=asked_s, loads=loads))
            self._greet(loads)

    def _greet(self, workers: Iterable[int]) -> None:
        """Has each worker connect to a bridge that is ready, so that the first micro-batch need not wait for it. A
        worker that was started again connects when it is diverted."""
        if (there := self._there) is None:
            return
        for worker in workers:
            if (there[0], worker) in self._greeted:
                continue
            self._greeted.add((there[0], worker))
            with contextlib.suppress(Exception):  # it connects when it is diverted, or whoever diverts it hears why not
                self._tell(worker, "greet_bridge", there, lambda _: None, lambda _: None)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                commands = event(self._scheduler)
                self._status = self._scheduler.status()
            except Exception:  # a fault of ours must not end the job, which can do without Spark
                logger.exception("job %s: the paradigm scheduler has met an error; it tries again", self._job)
                continue
            for command in commands:
                self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        """Carries out a command. When this fails, the scheduler hears of it, and the commands that follow are carried
        out all the same."""
        try:
            self._do(command)
        except Exception as error:  # see above
            logger.exception("job %s: what the paradigm scheduler wants could not be done", self._job)
            why = spark_bridge.why(error)
            if isinstance(command, DivertTasks | UndivertTasks):
                self._events.put(partial(_refused, number=command.number, why=why))
            elif isinstance(command, TakeSample):
                self._events.put(partial(_not_sampled, number=command.number, why=why))
            elif isinstance(command, TryRange):
                self._events.put(partial(_trial_failed, life=command.life, chain=command.chain, why=why))

    def _do(self, command: Command) -> None:
        if isinstance(command, PrepareSpark):
            self._prepare(command)
        elif isinstance(command, CheckSpark):
            life = command.life
            self._when_done(self._bridges[life].check(), life, lambda scheduler, _: scheduler.spark_answered(life))
        elif isinstance(command, KillSpark):
            if (bridge := self._bridges.pop(command.life, None)) is not None:
                logger.info("job %s: Spark's process is killed: %s", self._job, command.reason)
                bridge.kill()
        elif isinstance(command, EndSpark):
            if (bridge := self._bridges.pop(command.life, None)) is not None:
                ender = threading.Thread(target=self._end, args=(bridge,), name="penstock-end-spark", daemon=True)
                self._enders.append(ender)
                ender.start()
        elif isinstance(command, DivertTasks):
            arguments = (command.divert, self._bridges[command.divert.life].name, command.node)
            self._send(command.worker, command.number, "divert", arguments)
        elif isinstance(command, UndivertTasks):
            self._send(command.worker, command.number, "undivert", (command.chain,))
        elif isinstance(command, TakeSample):
            self._take_sample(command)
        elif isinstance(command, TryRange):
            self._try_range(command)
        elif isinstance(command, Note):
            logger.info("job %s: %s", self._job, command.text)
        else:
            assert isinstance(command, Warn)
            logger.warning("job %s: %s", self._job, command.text)

    def _send(self, worker: int, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        def done(_: Any) -> None:
            self._events.put(lambda scheduler: scheduler.done(time.monotonic(), number))

        def refused(why: str | None) -> None:
            self._events.put(partial(_refused, number=number, why=why))

        self._tell(worker, method, arguments, done, refused)

    def _take_sample(self, command: TakeSample) -> None:
        number = command.number

        def done(sample: RecordSample | None) -> None:
            self._events.put(lambda scheduler: scheduler.sampled(time.monotonic(), number, sample))

        def refused(why: str | None) -> None:
            self._events.put(partial(_not_sampled, number=number, why=why))

        self._tell(command.worker, "take_sample", (command.request,), done, refused)

    def _try_range(self, command: TryRange) -> None:
        life, chain = command.life, command.chain

        def done(answer: Future[RangeTrial]) -> None:
            error = answer.exception()
            if error is None:
                trial = answer.result()
                self._events.put(lambda scheduler: scheduler.range_tried(time.monotonic(), life, chain, trial))
            else:
                self._events.put(partial(_trial_failed, life=life, chain=chain, why=spark_bridge.why(error)))

        self._bridges[life].try_range(chain, command.sample).add_done_callback(done)

    def _prepare(self, command: PrepareSpark) -> None:
        life = command.life
        try:
            name = f"penstock.bridge.{self._job}.{life}.{time.time_ns():x}"  # none of a dead actor is used again
            bridge = self._bridges[life] = self._start(name, self._options.spark, list(command.forms))
            ready = bridge.prepare()
        except Exception as error:  # of Ray, of Spark, or of the actor: the scheduler must hear of it, whatever it is
            why = spark_bridge.why(error)
            self._events.put(lambda scheduler: scheduler.spark_failed(time.monotonic(), life, why))
            return

        def is_ready(scheduler: ParadigmScheduler, facts: SparkFacts) -> list[Command]:
            self._there = (name, facts.node)
            return scheduler.spark_ready(time.monotonic(), life, facts)

        self._when_done(ready, life, is_ready)

    def _when_done(
        self, answer: Future[Any], life: int, then: Callable[[ParadigmScheduler, Any], list[Command]]
    ) -> None:
        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is None:
                self._events.put(lambda scheduler: then(scheduler, answer.result()))
                return
            why = spark_bridge.why(error)
            self._events.put(lambda scheduler: scheduler.spark_failed(time.monotonic(), life, why))

        answer.add_done_callback(done)

    def _end(self, bridge: Bridge) -> None:
        try:
            bridge.stop().result(_STOP_S)
        except Exception as error:  # whatever keeps it from ending in order, it is killed next
            logger.warning("job %s: Spark did not end by itself, and is killed: %s", self._job, spark_bridge.why(error))
        bridge.kill()


def _looked(scheduler: ParadigmScheduler, *, asked_s: float, loads: Mapping[int, Sequence[TaskLoad]]) -> list[Command]:
    return scheduler.looked(time.monotonic(), asked_s, loads)


def _refused(scheduler: ParadigmScheduler, *, number: int, why: str | None) -> list[Command]:
    return scheduler.refused(time.monotonic(), number, why)


def _not_sampled(scheduler: ParadigmScheduler, *, number: int, why: str | None) -> list[Command]:
    if why is not None:
        logger.info("a range cannot be tried in Spark on the records of its tasks: %s", why)
    return scheduler.not_sampled(time.monotonic(), number, why)


def _trial_failed(scheduler: ParadigmScheduler, *, life: int, chain: int, why: str) -> list[Command]:
    return scheduler.trial_failed(time.monotonic(), life, chain, why)
