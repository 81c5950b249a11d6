"""A scheduler that sends chains to Spark and back by chance, at any instant, in a simulated job (tests/epochs/sim.py).

It stands where the ParadigmScheduler stands, in the JobHost. So its messages take the way of all calls of workers, in
one order with deaths, rescales and migrations. Its Spark never dies, but does not answer all micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from penstock.bridge.burst import BurstOptions
from penstock.bridge.commands import Command, DivertTasks, UndivertTasks
from penstock.bridge.forms import RangeForm, range_form
from penstock.bridge.paradigm_scheduler import DualOptions, ParadigmScheduler
from penstock.bridge.session import SparkOptions
from penstock.runtime.operators.micro_batch import DivertRequest
from penstock.runtime.program.plan import Plan
from penstock.runtime.status import DualStatus
from penstock.runtime.worker.load import TaskLoad


class ChanceScheduler(ParadigmScheduler):
    """See the module's docstring. Each look leads to one message at most."""

    def __init__(self, plan: Plan, rng: random.Random, failed: Callable[[str], None]) -> None:
        """`failed` is called when a message is answered twice, or refused."""
        super().__init__(plan, DualOptions(BurstOptions(), SparkOptions()), 1.0)
        self.plan = plan
        #: The messages without an answer, by number: the worker of each.
        self.open: dict[int, int] = {}
        self._number = 0
        self._rng = rng
        self._failed = failed

    def status(self) -> DualStatus:
        return DualStatus()

    def plan_changed(self, plan: Plan) -> list[Command]:
        self.plan = plan
        return []

    def looked(self, now: float, asked_s: float, reports: Mapping[int, Sequence[TaskLoad]]) -> list[Command]:
        rng = self._rng
        forms = {c.index: form for c in self.plan.chains if isinstance(form := range_form(self.plan, c), RangeForm)}
        places = [
            (worker, chain) for worker, tasks in reports.items() for chain in {t["chain"] for t in tasks} & forms.keys()
        ]
        if not places:
            return []
        worker, chain = rng.choice(sorted(places))
        self._number += 1
        self.open[self._number] = worker
        if rng.random() < 0.2:
            return [UndivertTasks(worker, self._number, chain)]
        form = forms[chain]
        inner = [n + (form.source is not None) for n in range(1, len(form.operators))]
        position = rng.choice([form.position, form.position, *inner])
        names = tuple(operator.name for operator in self.plan.chains[chain].operators)
        interval_s, rows = rng.choice((0.0, 0.0, 0.003)), rng.choice((1, 2, 4, 30))
        divert = DivertRequest(chain, position, interval_s, False, rows, names)
        return [DivertTasks(worker, self._number, divert, "a bridge", "here")]

    def done(self, now: float, number: int) -> list[Command]:
        if self.open.pop(number, None) is None:
            self._failed(f"message {number} is answered twice")
        return []

    def refused(self, now: float, number: int, why: str | None) -> list[Command]:
        if why is not None:
            self._failed(f"message {number} is refused: {why}")
        return self.done(now, number)
