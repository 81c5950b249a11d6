"""The plan that a job runs by now, and the worker of each of its tasks.

Both change here and nowhere else. The parallelism that drivers have asked for is part of the manifests of epochs, so
that a job that starts again has it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from penstock.host.decide.placing import Placing
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.operators.resources import told_needs
from penstock.runtime.program.bound_tasks import check_reserved
from penstock.runtime.program.flow import Flow
from penstock.runtime.program.plan import Plan, fused_by_key, replanned, rescaled

logger = logging.getLogger(__name__)


class PresentPlan:
    """See the module's docstring."""

    def __init__(self, plan: Plan, placing: Placing, flow: Flow | None, manifest: Manifest | None) -> None:
        """`flow`: that of a job with epochs. `manifest`: that of the epoch with which this job continues."""
        self._placing = placing
        self._flow = flow
        self.plan = plan
        self.parallelism: dict[str, int] = {}  # of operators that were rescaled
        if manifest is not None:
            for operator, parallelism in json.loads(str(manifest.extra.get("parallelism", "{}"))).items():
                self.parallelism[operator] = parallelism
                self.plan = self.rescaled(operator, parallelism)
        self.placed = placing.first(self.plan)

    def rescaled(self, operator: str, parallelism: int) -> Plan:
        """Returns the plan with another number of tasks for an operator."""
        self.plan.chain_of(operator)
        if parallelism > 1 and fused_by_key(self.plan, operator):
            assert self._flow is not None
            plan = replanned(self._flow.graph, self.plan, operator, parallelism, self._flow.chaining)
        else:
            plan = rescaled(self.plan, operator, parallelism)
        if self._placing.stays(self.plan):
            check_reserved(self.plan, plan, operator)
        return plan

    def grown(self, plan: Plan) -> dict[int, int]:
        """Returns the worker of each task of another plan; tasks of this one stay where they are."""
        return self._placing.grown(plan, self.placed)

    def adopt(self, plan: Plan, placed: dict[int, int]) -> None:
        """Continues with another plan."""
        self.plan, self.placed = plan, placed
        self._placing.forget()

    def move(self, placed: Mapping[int, int]) -> None:
        """Notes that tasks run on other workers."""
        before, self.placed = self.placed, dict(placed)
        moves = sum(before.get(task, worker) != worker for task, worker in placed.items())
        if moves:
            self._placing.moved(moves)
            logger.info("job %s: %d tasks migrate to other workers", self.plan.name, moves)

    def stuck(self, wanted: Mapping[int, int]) -> str | None:
        """Returns why tasks cannot all run in these workers: the first of them needs resources that another worker has
        reserved for it."""
        for task, worker in self._placing.stays(self.plan).items():
            if wanted.get(task, worker) != worker:
                place = self.plan.by_number[task]
                needs = told_needs(self.plan.chains[place.chain].needs)
                return (
                    f"task {self.plan.task_name(place)!r} stays in worker {worker}, because it needs {needs}, which "
                    "only this worker has reserved for the task"
                )
        return None

    def known_load(self) -> str:
        """Returns the measured load of tasks, as text, for the next start of the job; may be empty."""
        return self._placing.known()
