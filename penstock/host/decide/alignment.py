"""Keeps the sources of a job within a bounded drift of event time (Flink: watermark alignment).

The tasks of sources that were given `watermark(max_drift_s=)` tell their watermarks. The least one is told to all of
them, and a task whose own watermark is further ahead than its drift reads nothing until the others have come nearer.
So a join or a window need not keep what a quick source brings while a slow one is behind. The drift is a bound for how
much is kept, and changes no result. An alignment must never stop a source for one that has ended, or says that it is
idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from penstock.runtime.event_time.watermark import END_OF_TIME, IDLE
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.program.plan import Plan

#: Watermarks are asked for at this interval.
ALIGN_S = 0.1

#: The watermarks of aligned source tasks, by task number. None: the task has none yet.
Marks = Mapping[int, int | None]


def aligned_tasks(plan: Plan) -> set[int]:
    """Returns the numbers of the tasks whose sources are to be aligned."""
    chains = {
        chain.index
        for chain in plan.chains
        for operator in chain.operators
        if isinstance(operator, MakeWatermarks) and operator.max_drift_ms is not None
    }
    return {task.number for task in plan.tasks if task.chain in chains}


class Alignment:
    """The watermarks of all tasks, as far as they are known. Of a task of which no worker speaks, the last word
    counts."""

    def __init__(self) -> None:
        self._marks: dict[int, int | None] = {}

    def least(self, tasks: Set[int], answers: Iterable[Marks]) -> tuple[bool, int | None]:
        """Takes the answers of workers. Returns whether all of these tasks have a watermark, and the least watermark of
        those that count. None: none counts, so nobody need wait."""
        for answer in answers:
            self._marks.update(answer)
        self._marks = {number: mark for number, mark in self._marks.items() if number in tasks}
        marks = self._marks.values()
        known = len(self._marks) == len(tasks) and None not in marks
        return known, min((mark for mark in marks if mark not in (None, IDLE, END_OF_TIME)), default=None)
