"""Assigns the tasks of a local job to its workers, which are all on one machine."""

from __future__ import annotations

from collections import Counter

from penstock.host.decide.placing import Placing
from penstock.placement.even import in_turn, over_workers
from penstock.placement.shape import shape_of
from penstock.runtime.program.plan import Plan


class LocalPlacing(Placing):
    """See Placing."""

    def __init__(self, workers: int, *, in_turn: bool) -> None:
        """`in_turn`: tasks are assigned in turn, whatever they exchange."""
        self._workers = workers
        self._in_turn = in_turn

    def first(self, plan: Plan) -> dict[int, int]:
        workers = self._workers
        found = in_turn(len(plan.tasks), workers) if self._in_turn else over_workers(shape_of(plan), workers)
        return {task.number: worker for task, worker in zip(plan.tasks, found, strict=True)}

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        """See Placing. Tasks that run stay where they are; each new task goes to the worker with the fewest tasks."""
        placed = {task.number: before[task.number] for task in plan.tasks if task.number in before}
        load = Counter(placed.values())
        for task in plan.tasks:
            if task.number not in placed:
                worker = min(range(self._workers), key=lambda worker: load[worker])
                placed[task.number] = worker
                load[worker] += 1
        return placed
