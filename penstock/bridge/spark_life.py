"""The life of a job's Spark, as the paradigm scheduler knows it: from the request to start Spark until its loss.

Each start of Spark is a *life* with a number of its own. Late messages about an earlier life have no effect.

Spark is given up only for a reason: its start has failed, it has reported that it does not work, its process has died,
the ranges that it has compiled are no longer those of the job, or it has exceeded a limit that the options name. The
limits are `SparkOptions.prepare_s` for the start, and `hang_timeout_s` of `run()` for the answer to the question
whether it lives. Waiting counts only while the asking process itself runs: the time between two looks counts up to a
few seconds, so that a JobMaster that was paused does not take its own pause for Spark's silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.bridge.cost import BatchCost
from penstock.runtime.lifecycle import State, StateMachine, Table

# The most that one look adds to the time for which something has been waited for.
_COUNTED_MAX_S = 5.0


class SparkState(State):
    """The states of a job's Spark."""

    ABSENT = "ABSENT", "There is no Spark that could answer, and none is being started."
    PREPARING = "PREPARING", "Spark is being started, and the ranges of the job are tried in it."
    READY = "READY", "Spark answers micro-batches."
    DOUBTED = "DOUBTED", "Spark has been asked whether it lives, and has not answered yet."


SparkEvent = Literal["prepare", "ready", "doubt", "answered", "failed", "too late", "replaced"]

_THERE = (SparkState.PREPARING, SparkState.READY, SparkState.DOUBTED)

SPARK_LIFE: Table[SparkState, SparkEvent] = Table(
    SparkState,
    SparkState.ABSENT,
    {
        (SparkState.ABSENT, "prepare"): SparkState.PREPARING,
        (SparkState.PREPARING, "ready"): SparkState.READY,
        (SparkState.READY, "doubt"): SparkState.DOUBTED,
        (SparkState.DOUBTED, "answered"): SparkState.READY,
        **{(state, "failed"): SparkState.ABSENT for state in _THERE},
        **{(state, "too late"): SparkState.ABSENT for state in (SparkState.PREPARING, SparkState.DOUBTED)},
        **{(state, "replaced"): SparkState.ABSENT for state in _THERE},
    },
    [("replaced", [SparkState.ABSENT], "no Spark has compiled ranges")],
)


@dataclass(frozen=True)
class SparkFacts:
    """The report of a Spark that is ready about itself."""

    session: str  # one line for people
    costs: Mapping[int, BatchCost | None]  # by chain: what a micro-batch costs, as far as a trial could tell
    bridge: int  # the process that holds the session
    log: str  # the file of what Spark writes
    executors: Mapping[str, int | None]  # id -> process, where it is known
    name: str  # of the bridge, by which workers find it
    node: str  # on which the bridge runs
    ways: Mapping[int, str] = field(default_factory=dict)  # by chain: how its range runs there, for people
    cores: int | None = None  # of all its executors, where it is known
    untried: frozenset[int] = frozenset()  # the chains of ranges for which there were no records to try them on


@dataclass(frozen=True)
class RangeTrial:
    """The result of trying a range on a sample of its records, when Spark was ready already: what a micro-batch costs,
    and how the range runs, as far as the trial could tell. `again`: the trial was given up, as the job needed Spark."""

    cost: BatchCost | None = None
    way: str | None = None
    again: bool = False


class SparkLife:
    """The state of a job's Spark; see the module's docstring. `prepare_s`, `silence_s`: the limits."""

    def __init__(self, prepare_s: float, silence_s: float) -> None:
        self._limits = {
            SparkState.PREPARING: (prepare_s, "Spark was not ready within prepare_s={:g} seconds"),
            SparkState.DOUBTED: (silence_s, "Spark has not answered for hang_timeout_s={:g} seconds"),
        }
        self._machine = StateMachine(SPARK_LIFE, "the job's Spark")
        self._waited_s = 0.0  # in this state
        self._number = 0
        self._why = ""  # it is doubted
        self.facts: SparkFacts | None = None  # while it is there
        self.absence: str | None = None  # why it is not there, if that is to be said

    @property
    def state(self) -> SparkState:
        """The present state."""
        return self._machine.state

    @property
    def number(self) -> int | None:
        """The number of the present life, or None while there is none."""
        return self._number if self.state in _THERE else None

    @property
    def waited_s(self) -> float:
        """For how long the start of Spark, or its answer, has been waited for."""
        return self._waited_s

    @property
    def doubt_reason(self) -> str | None:
        """Why Spark is doubted, or None while it is not."""
        return self._why if self.state is SparkState.DOUBTED else None

    def prepare(self) -> int:
        """Notes that Spark is to be started. Returns the number of the new life."""
        self._move("prepare")
        self._number += 1
        return self._number

    def ready(self, facts: SparkFacts) -> None:
        """Notes that Spark can answer."""
        self._move("ready")
        self.facts, self.absence = facts, None

    def doubt(self, why: str) -> None:
        """Notes that Spark is asked whether it lives."""
        self._move("doubt", why)
        self._why = why

    def answered(self) -> None:
        """Notes that Spark has answered that it lives."""
        self._move("answered")

    def fail(self, why: str) -> str:
        """Notes that Spark could not be started, or has reported that it does not work, or that its process has died.
        Returns the reason, with what else is known."""
        return self._lose("failed", f"{self._why}; {why}" if self.state is SparkState.DOUBTED else why)

    def pass_time(self, seconds: float) -> str | None:
        """Adds the time since the last look. When Spark has exceeded a limit, gives it up and returns the reason."""
        if self.state not in self._limits:
            return None
        limit_s, text = self._limits[self.state]
        self._waited_s += min(seconds, _COUNTED_MAX_S)
        if self._waited_s < limit_s:
            return None
        why = text.format(limit_s)
        return self._lose("too late", f"{why}, after: {self._why}" if self.state is SparkState.DOUBTED else why)

    def replace(self) -> int | None:
        """Gives up the present life, because the ranges have changed. Returns its number if there was one."""
        number = self.number
        self._move("replaced")
        self.facts = self.absence = None
        return number

    def with_log(self, why: str) -> str:
        """Returns the text of a failure, with the file in which Spark may have written more about it."""
        return why if self.facts is None else f"{why}; what Spark wrote is in {self.facts.log}"

    def _lose(self, event: SparkEvent, why: str) -> str:
        was_ready = self.state is not SparkState.PREPARING
        why = self.with_log(why)
        self._move(event, why)
        self.facts, self.absence = None, f"lost: {why}" if was_ready else f"not to be had: {why}"
        return why

    def _move(self, event: SparkEvent, why: str = "") -> None:
        if self._machine.move(event, why):
            self._waited_s = 0.0
