"""Decides which workers need a request to divert their tasks, or to stop diverting them (docs/papers.md: D4, D6).

A worker is told only when its tasks, by its own last report, do not do what they should. So a worker that was started
again, or whose tasks were built anew, needs no special message. A worker has at most one unanswered request for each
chain, so a worker that was paused does not find many requests when it continues. Its report is compared again only when
the report was asked for after the worker's answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.runtime.operators.micro_batch import DivertRequest
from penstock.runtime.worker.load import TaskLoad, divert_load

# A worker that has refused a request is not told again before.
_AGAIN_S = 2.0

_Place = tuple[int, int]  # (worker, chain)


def is_diverted(task: TaskLoad) -> bool:
    """Returns whether a task's input goes to Spark, or went there and is not answered yet."""
    return task.diverted is not None


def is_diverted_to(task: TaskLoad, life: int) -> bool:
    """Whether a task's input goes to the Spark of this life."""
    return task.divert is not None and task.divert.life == life


class DivertRequests:
    """The requests to workers. The methods `begin_...` return a request's number, or None when nothing is to be told
    now."""

    def __init__(self) -> None:
        self._number = 0
        self._open: dict[int, _Place] = {}
        self._not_before: dict[_Place, float] = {}  # monotonic: reports that were asked for earlier count no more

    def begin_divert(self, worker: int, divert: DivertRequest, tasks: Iterable[TaskLoad], asked_s: float) -> int | None:
        """Asks for the tasks of a chain of this worker to follow `divert`, if a report that was asked for at `asked_s`
        shows that they do not."""
        told = divert_load(divert)
        if all(not _can_follow(task) or task.divert == told for task in tasks):
            return None
        return self._begin((worker, divert.chain), asked_s)

    def begin_undivert(self, worker: int, chain: int, tasks: Iterable[TaskLoad], asked_s: float) -> int | None:
        """Asks for the tasks to take up their input as records."""
        if all(task.divert is None for task in tasks):  # those that still wait for answers will do so by themselves
            return None
        return self._begin((worker, chain), asked_s)

    def end(self, number: int, now: float, *, refused: bool) -> None:
        """Notes that the worker has carried out its request, or has refused it, or that its process has died."""
        self._not_before[self._open.pop(number)] = now + _AGAIN_S if refused else now

    def _begin(self, place: _Place, asked_s: float) -> int | None:
        if asked_s <= self._not_before.get(place, float("-inf")) or place in self._open.values():
            return None
        self._number += 1
        self._open[self._number] = place
        return self._number


def _can_follow(task: TaskLoad) -> bool:
    is_leaving = task.diverted is not None and task.divert is None
    return not (task.finished or task.record_by_record or is_leaving)
