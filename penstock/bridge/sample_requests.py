"""Which worker is asked for a sample of the records of a range, and when (docs/papers.md: D4).

Spark can only tell what a range costs there when it has records to try it on. The source of a range may have a sample.
For all other ranges, as those behind an exchange, one worker is asked for records that its tasks have taken lately. It
begins to collect them when it is asked first, so it is asked again.

What must never happen:

- A question without need. Nobody is asked while no records come, and one worker at a time. A worker that was paused
  does not find many questions when it continues.
- A sample taken for one of another plan. The answers to questions that were asked before `forget` count no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.bridge.divert_requests import is_diverted
from penstock.runtime.worker.load import TaskLoad

# How many records make a good sample, and how often a worker is asked for so many before fewer do too.
_GOOD = 2_000
_PATIENCE = 4

# How often a worker is asked that gives none.
_TRIES = 8

# The time between two questions about a range, also to another worker, and after a refusal.
_AGAIN_S = 1.0
_REFUSED_S = 60.0


@dataclass(eq=False)
class _Wanted:
    """A range without a sample."""

    chain: int
    worker: int | None = None  # that collects records, or will when it is asked
    asked: int = 0  # how often this worker was
    not_before_s: float = float("-inf")
    taken: dict[int, int] = field(default_factory=dict)  # of each worker: the records that its tasks had taken


@dataclass(frozen=True)
class Question:
    """A request for a sample, which a worker is to be asked for."""

    number: int
    worker: int
    least: int  # how many records it has to have


class SampleRequests:
    """The requests for samples of a job's ranges, by their chains; see the module's docstring."""

    def __init__(self) -> None:
        self._number = 0
        self._wanted: dict[int, _Wanted] = {}
        self._open: dict[int, tuple[int, _Wanted]] = {}  # by number, with the worker

    def forget(self) -> None:
        """Notes that the chains belong to another plan from now on."""
        self._wanted.clear()

    def wait(self, chain: int, until_s: float) -> None:
        """Asks no worker for a sample of this chain before a time."""
        wanted = self._wanted.setdefault(chain, _Wanted(chain))
        wanted.not_before_s = max(wanted.not_before_s, until_s)

    def begin(self, chain: int, tasks: Mapping[int, Sequence[TaskLoad]], now: float) -> Question | None:
        """Returns the worker to ask for a sample of the records of a chain, or None when no worker is to be asked now.
        `tasks`: what the workers have reported of the chain's tasks. To be called at each look while a sample is
        wanted."""
        wanted = self._wanted.setdefault(chain, _Wanted(chain))
        taken = {
            worker: sum(task.operators[0].records_in for task in of_worker)
            for worker, of_worker in tasks.items()
            if any(_can_give(task) for task in of_worker)
        }
        more = {worker: count - wanted.taken.get(worker, count) for worker, count in taken.items()}
        wanted.taken = taken
        asked = {(worker, of.chain) for worker, of in self._open.values()}
        if now < wanted.not_before_s or any(of is wanted for _, of in self._open.values()):
            return None
        if wanted.worker not in taken or wanted.asked >= _TRIES:
            wanted.worker, wanted.asked = None, 0
        if wanted.worker is None:
            free = [worker for worker, count in more.items() if count > 0 and (worker, chain) not in asked]
            if not free:
                return None
            wanted.worker = max(free, key=lambda worker: more[worker])
        wanted.asked += 1
        self._number += 1
        self._open[self._number] = wanted.worker, wanted
        return Question(self._number, wanted.worker, _GOOD if wanted.asked <= _PATIENCE else 1)

    def answered(self, number: int, now: float) -> int | None:
        """Notes that a worker has answered. Returns the chain that it was asked about, or None when the answer is about
        an earlier plan."""
        _, wanted = self._open.pop(number)
        wanted.not_before_s = max(wanted.not_before_s, now + _AGAIN_S)
        return wanted.chain if self._wanted.get(wanted.chain) is wanted else None

    def refused(self, number: int, now: float, *, died: bool) -> None:
        """Notes that a worker cannot give a sample, or that its process has died."""
        _, wanted = self._open.pop(number)
        wanted.worker, wanted.asked = None, 0
        wanted.not_before_s = max(wanted.not_before_s, now + (_AGAIN_S if died else _REFUSED_S))


def _can_give(task: TaskLoad) -> bool:
    """Whether a task takes records as records, and not one by one."""
    return not (task.finished or task.record_by_record or is_diverted(task))
