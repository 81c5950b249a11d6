"""Says in which worker each task runs that needs resources such as GPUs.

A worker is one process, and Ray gives resources to processes. So each task that needs resources belongs to one worker
from the job's start to its end, and this worker reserves what its tasks need. Neither placement nor a user may let such
a task run elsewhere.
"""

from __future__ import annotations

from penstock.runtime.errors import FlowError
from penstock.runtime.operators.resources import together, told_needs
from penstock.runtime.program.plan import Plan


def bound_tasks(plan: Plan, workers: int) -> dict[int, int]:
    """Returns the worker of each task that needs resources, by the number of the task: the workers in turn."""
    needing = [task.number for task in plan.tasks if plan.chains[task.chain].needs]
    return {number: place % workers for place, number in enumerate(needing)}


def needs_of_workers(plan: Plan, workers: int) -> list[dict[str, float]]:
    """Returns the resources beside CPUs that each worker reserves for its tasks."""
    tasks: list[list[int]] = [[] for _ in range(workers)]
    for number, worker in bound_tasks(plan, workers).items():
        tasks[worker].append(number)
    return [together(plan.chains[plan.by_number[number].chain].needs for number in own) for own in tasks]


def check_reserved(before: Plan, after: Plan, operator: str) -> None:
    """Raises FlowError when a running job with the plan `before` cannot have the plan `after`, because it would have
    other tasks that need resources. `operator`: the operator that gets another number of tasks."""
    if _needing(before) != _needing(after):
        needs = told_needs(after.chain_of(operator).needs) or "resources"
        raise FlowError(
            f"the number of tasks of {operator!r} cannot change while the job runs, because each task needs {needs}, "
            "which the workers have reserved at the start; stop the job with a savepoint, and run the flow from it "
            "with another parallelism"
        )


def _needing(plan: Plan) -> list[tuple[str, int, dict[str, float]]]:
    return [(chain.name, chain.parallelism, chain.needs) for chain in plan.chains if chain.needs]
