"""Exchanges tasks between workers so that less traffic crosses, while each operator stays as even as it was.

Before a job runs, nobody knows what its operators cost, and one of them may cost more than all others together. A plan
that takes all tasks for equally heavy (`placement/planner.py`) may put all tasks of that operator on one worker. So
this search begins with tasks in turn, by which each worker has as many tasks of each operator as any other, or one
more, and makes only changes that keep this true of every operator and of all tasks together.

It plans for the program of a local job too. So this module must never load numpy, which takes longer than such a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.placement.shape import Shape

#: The most pairs of tasks that exchange records, and the most tasks, of a job that is planned before its start. A plan
#: takes a second of processor time at most.
PAIRS_MOST, TASKS_MOST = 2_000, 300

# How often all tasks are gone through at most. The search mostly ends by itself in two or three times.
_PASSES = 10
# The relative error that sums of floats may have.
_EPSILON = 1e-9


def small(shape: Shape) -> bool:
    """Returns whether a job is small enough to be planned before its start."""
    pairs = len(shape.edges) + sum(len(one.tasks) - 1 for one in shape.shared)
    return pairs <= PAIRS_MOST and len(shape.components) <= TASKS_MOST


def in_turn(tasks: int, workers: int) -> list[int]:
    """Returns the worker of each task when tasks are assigned in turn to the workers of one node."""
    return [task % workers for task in range(tasks)]


def over_workers(shape: Shape, workers: int) -> list[int]:
    """Returns the worker of each task, for workers of one node."""
    hops = [[float(a != b) for b in range(workers)] for a in range(workers)]
    return improved(shape, in_turn(len(shape.components), workers), hops)


def improved(shape: Shape, start: Sequence[int], hops: Sequence[Sequence[float]]) -> list[int]:
    """Returns the worker of each task. `start` is that of tasks in turn, and `hops[a][b]` says what a hop from worker a
    to worker b costs. Returns `start` for a job that is not small."""
    if len(hops) < 2 or not small(shape):
        return list(start)
    search = _Search(shape, start, hops)
    for _ in range(_PASSES):
        if not search.goes_through_all():
            break
    return search.at


class _Search:
    """Holds a placement, and changes it for the better."""

    def __init__(self, shape: Shape, start: Sequence[int], hops: Sequence[Sequence[float]]) -> None:
        self.at = list(start)
        self._operator = shape.components
        self._hops = hops
        self._workers = range(len(hops))
        self._near = _near(shape, len(hops))
        # What the hops of a task cost, by the worker that the task would be on.
        self._costs = [
            [sum(traffic * hops[worker][self.at[other]] for other, traffic in near.items()) for worker in self._workers]
            for near in self._near
        ]
        self._least = _EPSILON * (1.0 + sum(sum(near.values()) for near in self._near))
        self._tasks = [0] * len(hops)
        self._of = {operator: [0] * len(hops) for operator in self._operator}
        for operator, worker in zip(self._operator, self.at, strict=True):
            self._tasks[worker] += 1
            self._of[operator][worker] += 1

    def goes_through_all(self) -> bool:
        """Makes the best change for each task in turn, and returns whether there was any."""
        changed = False
        for task in range(len(self.at)):
            best, with_, to = self._least, -1, -1
            costs, here = self._costs[task], self.at[task]
            for worker in self._workers:
                gain = costs[here] - costs[worker]
                if gain > best and self._may_move(task, worker):
                    best, with_, to = gain, -1, worker
            for other, there in enumerate(self.at):
                if there == here:
                    continue
                between = 2 * self._near[task].get(other, 0.0) * self._hops[here][there]
                gain = costs[here] - costs[there] + self._costs[other][there] - self._costs[other][here] - between
                if gain > best and self._may_change_places(task, other):
                    best, with_, to = gain, other, there
            if to < 0:
                continue
            changed = True
            self._move(task, to)
            if with_ >= 0:
                self._move(with_, here)
        return changed

    def _may_move(self, task: int, to: int) -> bool:
        """Returns whether all stays even when a task moves."""
        here = self.at[task]
        return self._tasks[here] > self._tasks[to] and self._may_leave(self._operator[task], here, to)

    def _may_change_places(self, task: int, other: int) -> bool:
        """Returns whether all stays even when two tasks change places."""
        one, two = self._operator[task], self._operator[other]
        here, there = self.at[task], self.at[other]
        return one == two or (self._may_leave(one, here, there) and self._may_leave(two, there, here))

    def _may_leave(self, operator: int, here: int, to: int) -> bool:
        """Returns whether an operator stays even when one of its tasks moves."""
        of = self._of[operator]
        return of[here] > of[to]

    def _move(self, task: int, to: int) -> None:
        here, of = self.at[task], self._of[self._operator[task]]
        self.at[task] = to
        for counts in (self._tasks, of):
            counts[here] -= 1
            counts[to] += 1
        for other, traffic in self._near[task].items():
            costs = self._costs[other]
            for worker in self._workers:
                costs[worker] += traffic * (self._hops[worker][to] - self._hops[worker][here])


def _near(shape: Shape, workers: int) -> list[dict[int, float]]:
    """Returns the traffic of each task with each other one. What goes to all tasks of an operator counts for each
    receiver where no two of them share a worker, and not at all where every worker has one in any case."""
    near: list[dict[int, float]] = [{} for _ in shape.components]
    copies = (
        (one.tasks[0], task, one.traffic) for one in shape.shared if len(one.tasks) <= workers for task in one.tasks[1:]
    )
    for pairs in (shape.edges, copies):
        for one, other, traffic in pairs:
            for a, b in ((one, other), (other, one)):
                if one != other:
                    near[a][b] = near[a].get(b, 0.0) + traffic
    return near
