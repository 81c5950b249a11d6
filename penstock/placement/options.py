"""Holds what `run()` is told about where a job's tasks are to run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from penstock.placement.adoption import AdoptionOptions
from penstock.runtime.errors import FlowError
from penstock.runtime.units import is_whole, seconds

#: How tasks are dealt to workers at the start.
Method = Literal["round-robin", "traffic", "turbostream", "t-storm", "jstorm", "metis"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class PlacementOptions:
    """Says where a job's tasks run.

    `nodes`: over how many machines its workers are spread, evenly; None: where the JobMaster is. `replan_s`: how often
    it is planned anew from what was measured (docs/papers.md: T12); None: never. `pin`: by operator, what a node must
    have for its tasks to run there: a label as text, so much of a resource as a number, {"score": {"GPU": 1}, "in":
    {"rack": "a"}}. `at_least`: where there is no room for all workers, or not so many nodes, start with fewer workers,
    but so many; None: with all. `grow`: the cluster adds nodes by demand: ask it for those that are missing, and wait.
    """

    method: Method = "round-robin"
    nodes: int | None = None
    replan_s: float | None = None
    adoption: AdoptionOptions = field(default_factory=AdoptionOptions)
    pin: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    at_least: int | None = None
    grow: bool = False

    def checked(self, workers: int, operators: Collection[str], epochs: bool) -> PlacementOptions:
        """Returns the same options after checking them. Raises FlowError for options that are impossible. `operators`
        has the names of the flow's operators."""
        if unknown := sorted(set(self.pin) - set(operators)):
            raise FlowError(f"pin names an operator {unknown[0]!r}; the flow has: {', '.join(operators)}")
        if self.at_least is not None and not (is_whole(self.at_least) and 1 <= self.at_least <= workers):
            raise FlowError(f"at_least={self.at_least!r}; it must be 1 to {workers}, the workers that are asked for")
        if self.method not in METHODS:
            raise FlowError(f"placement={self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.nodes is not None and not (is_whole(self.nodes) and 1 <= self.nodes <= workers):
            raise FlowError(
                f"nodes={self.nodes!r}; it must be 1 to {workers}, as each has one of the {workers} workers"
            )
        if self.replan_s is not None and not seconds(self.replan_s, "replan_s") > 0:
            raise FlowError(f"replan_s={self.replan_s}; it must be above 0, or None for a job that stays as it is")
        if self.replan_s is not None and not epochs:
            raise FlowError("replan_s moves tasks, which takes epochs: give run(epoch_interval_s=...)")
        return self
