"""Carries out a JobHost's commands about Spark (docs/papers.md: D6): starts, asks and ends its bridges. It also asks
the workers for their load, again and again, because the paradigm scheduler decides by it. It decides nothing.

What happens to Spark becomes an event of the JobHost. The commands come from the supervising thread of the JobRunner,
and everything that waits is a future, or is done in threads. So neither a silent worker nor a silent Spark holds up the
job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import TYPE_CHECKING, Any, Protocol

from penstock.bridge.commands import CheckSpark, Command, EndSpark, KillSpark, PrepareSpark, SparkCommand, TryRange

if TYPE_CHECKING:
    from penstock.bridge.forms import RangeForm
    from penstock.bridge.paradigm_scheduler import ParadigmScheduler
    from penstock.bridge.session import SparkOptions
    from penstock.bridge.spark_life import RangeTrial, SparkFacts
    from penstock.host.decide.commands import HostCommand
    from penstock.host.decide.job_host import JobHost
    from penstock.host.decide.paradigms import SparkEvent
    from penstock.runtime.worker.load import TaskLoad
    from penstock.runtime.worker.sample import RecordSample

logger = logging.getLogger(__name__)

# The time between two looks at the load of the workers.
_LOOK_S = 0.25

# How long the bridge may take to end Spark when the job ends, or has another plan.
_STOP_S = 20.0


class BridgeHandle(Protocol):
    """The process that holds a session. Its calls return at once; their errors say in a few words what is wrong."""

    def prepare(self) -> Future[SparkFacts]: ...

    def try_range(self, chain: int, sample: RecordSample) -> Future[RangeTrial]: ...

    def check(self) -> Future[Any]: ...

    def stop(self) -> Future[Any]: ...

    def kill(self) -> None: ...


#: Starts a bridge under this name, which is to try these ranges.
StartBridge = Callable[[str, "SparkOptions", "list[RangeForm]"], BridgeHandle]


class SparkRunner:
    """See the module's docstring. `ask` returns the load of the workers that answer within a few seconds. `put` takes
    an event of the JobHost."""

    def __init__(
        self,
        job: str,
        options: SparkOptions,
        start: StartBridge,
        ask: Callable[[], Mapping[int, Sequence[TaskLoad]]],
        put: Callable[[Callable[[JobHost], list[HostCommand]]], None],
    ) -> None:
        self._job = job
        self._options = options
        self._start = start
        self._ask = ask
        self._put = put
        self._bridges: dict[int, BridgeHandle] = {}  # by life; those that are given up are taken out
        self._enders: list[threading.Thread] = []
        self._over = threading.Event()

    def look(self) -> None:
        """Asks the workers for their load from now on."""
        threading.Thread(target=self._look, name="penstock-loads", daemon=True).start()

    def carry_out(self, command: SparkCommand) -> None:
        """Carries out a command. Waits for nothing. When it fails, the JobHost hears of it."""
        life = command.life
        match command:
            case PrepareSpark():
                self._ask_bridge(
                    lambda: self._started(command).prepare(),
                    lambda scheduler, facts, now: scheduler.spark_ready(now, life, facts),
                    lambda scheduler, why, now: scheduler.spark_failed(now, life, why),
                )
            case CheckSpark():
                self._ask_bridge(
                    lambda: self._bridges[life].check(),  # noqa: PLW0108 - what it raises is an answer too
                    lambda scheduler, _, now: scheduler.spark_answered(life),
                    lambda scheduler, why, now: scheduler.spark_failed(now, life, why),
                )
            case TryRange(_, chain, sample):
                self._ask_bridge(
                    lambda: self._bridges[life].try_range(chain, sample),
                    lambda scheduler, trial, now: scheduler.range_tried(now, life, chain, trial),
                    lambda scheduler, why, now: scheduler.trial_failed(now, life, chain, why),
                )
            case EndSpark():
                self._end(life)
            case KillSpark():
                if (bridge := self._bridges.pop(life, None)) is not None:
                    logger.info("job %s: Spark's process is killed: %s", self._job, command.reason)
                    self._kill(bridge)

    def close(self) -> None:
        """Ends Spark. Returns when it has ended or was killed."""
        self._over.set()
        for life in list(self._bridges):
            self._end(life)
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
            self._tell_host(
                lambda scheduler, now, asked_s=asked_s, loads=loads: scheduler.looked(now, asked_s, loads)  # type: ignore[misc]
            )

    def _tell_host(self, event: SparkEvent) -> None:
        self._put(lambda host: host.of_scheduler(event, time.monotonic()))

    def _started(self, command: PrepareSpark) -> BridgeHandle:
        name = f"penstock.bridge.{self._job}.{command.life}.{time.time_ns():x}"  # none of a dead actor is used again
        bridge = self._bridges[command.life] = self._start(name, self._options, list(command.forms))
        return bridge

    def _ask_bridge(
        self,
        ask: Callable[[], Future[Any]],
        answered: Callable[[ParadigmScheduler, Any, float], list[Command]],
        failed: Callable[[ParadigmScheduler, str, float], list[Command]],
    ) -> None:
        """Asks a bridge for something. Its answer, or why there is none, becomes an event."""

        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is not None:
                fail(error)
            else:
                self._tell_host(lambda scheduler, now: answered(scheduler, answer.result(), now))

        def fail(error: BaseException) -> None:
            why = str(error)
            self._tell_host(lambda scheduler, now: failed(scheduler, why, now))

        try:
            ask().add_done_callback(done)
        except Exception as error:  # of Ray, of Spark, or of the actor: the JobHost must hear of it, whatever it is
            fail(error)

    def _end(self, life: int) -> None:
        """Ends the bridge of a life in a thread of its own."""
        if (bridge := self._bridges.pop(life, None)) is not None:
            ender = threading.Thread(target=self._stop, args=(bridge,), name="penstock-end-spark", daemon=True)
            self._enders.append(ender)
            ender.start()

    def _stop(self, bridge: BridgeHandle) -> None:
        try:
            bridge.stop().result(_STOP_S)
        except Exception as error:  # whatever keeps it from ending in order, it is killed next
            why = "it did not answer in time" if isinstance(error, TimeoutError | NoAnswer) else error
            logger.warning("job %s: Spark did not end by itself, and is killed: %s", self._job, why)
        self._kill(bridge)

    def _kill(self, bridge: BridgeHandle) -> None:
        try:
            bridge.kill()
        except Exception as error:  # of Ray: the process ends with the JobMaster at the latest
            logger.warning("job %s: Spark's process could not be killed: %s", self._job, error)
