"""Assigns the tasks of a local job to its workers in turn. There is only one machine, so there is no traffic to
save."""

from __future__ import annotations

from collections import Counter

from penstock.runtime.program.plan import Plan


class InTurn:
    """See Placing."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def first(self, plan: Plan) -> dict[int, int]:
        """See Placing."""
        return {task.number: place % self._workers for place, task in enumerate(plan.tasks)}

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

    def stays(self, plan: Plan) -> dict[int, int]:
        """See Placing. Nothing is reserved for tasks, so all of them may run everywhere."""
        return {}

    def known(self) -> str:
        """See Placing. Nothing was measured."""
        return ""

    def moved(self, tasks: int) -> None:
        """See Placing. Nothing depends on it."""

    def forget(self) -> None:
        """See Placing. Nothing was measured."""
