"""The simplest placement: tasks to workers in turn (Storm's even scheduler); the baseline of later ones.

Tasks are dealt in the order of the plan without starting anew at each chain, so that chains of one task each spread
over the workers, and chains with as many tasks as there are workers get one task on each.
"""

from __future__ import annotations


def round_robin(tasks: int, workers: int) -> dict[int, int]:
    """Task number -> worker."""
    return {task: task % workers for task in range(tasks)}
