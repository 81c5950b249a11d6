"""Holds what `run()` is told about where a job's tasks are to run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from penstock.placement.adoption import AdoptionOptions
from penstock.runtime.errors import FlowError, OptionError
from penstock.runtime.units import is_whole, seconds

#: How tasks are assigned to workers at the start.
Method = Literal["round-robin", "traffic", "turbostream", "t-storm", "jstorm", "metis"]
METHODS: tuple[Method, ...] = get_args(Method)

#: The time between two plans that "auto" means.
AUTO_REPLAN_S = 10.0


@dataclass(frozen=True)
class PlacementOptions:
    """Says where a job's tasks run.

    `method`: how tasks are assigned to workers at the start (docs/placement.md). `adoption`: when a new plan is worth
    the moves. `nodes`: the number of machines over which the workers are spread by free CPUs. With None, all workers
    are on the JobMaster's node if it has enough CPUs, else on the fewest nodes that have. `replan_s`: the time between
    two plans from what was measured (docs/papers.md: T12). With None, tasks stay where they are. "auto" means
    AUTO_REPLAN_S for a job that has epochs and several workers and does not use Spark, and otherwise None. `pin`: by
    operator, what a node must have for the operator's tasks to run there: labels with their text, and resources with
    their amount, as in {"score": {"GPU": 1}, "in": {"rack": "a"}}. `at_least`: the number of workers with which the job
    starts when the cluster has no room for all, or too few nodes. With None, the job needs all. `grow`: ask the cluster
    for missing nodes, and wait for them; for clusters that add nodes on demand.
    """

    method: Method = "round-robin"
    nodes: int | None = None
    replan_s: float | Literal["auto"] | None = None
    adoption: AdoptionOptions = field(default_factory=AdoptionOptions)
    pin: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    at_least: int | None = None
    grow: bool = False

    @property
    def period_s(self) -> float | None:
        """Returns the time between two plans, or None when there are none, after `checked` has said what "auto" is."""
        return None if self.replan_s == "auto" else self.replan_s

    def checked(
        self, workers: int, operators: Collection[str], epochs: bool, *, spark: bool = False
    ) -> PlacementOptions:
        """Returns the same options after checking them, with "auto" replaced. Raises FlowError for options that are
        impossible. `operators` has the names of the flow's operators, and `spark` says whether the job uses Spark."""
        if unknown := sorted(set(self.pin) - set(operators)):
            raise FlowError(f"pin names an operator {unknown[0]!r}; the flow has: {', '.join(operators)}")
        if self.at_least is not None and not (is_whole(self.at_least) and 1 <= self.at_least <= workers):
            bounds = "1 with one worker" if workers == 1 else f"1 to {workers}, the number of workers"
            raise FlowError(f"at_least={self.at_least!r}; it must be {bounds}")
        if self.method not in METHODS:
            raise FlowError(f"placement={self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.nodes is not None and not (is_whole(self.nodes) and 1 <= self.nodes <= workers):
            if workers == 1:
                raise OptionError(
                    "{nodes=}; it must be 1 with one worker, because each node gets at least one; give more {workers}",
                    {"nodes": self.nodes},
                )
            raise OptionError(
                "{nodes=}; it must be 1 to {most}, because each node gets at least one of the {most} workers; give "
                "fewer {nodes} or more {workers}",
                {"nodes": self.nodes},
                most=workers,
            )
        if self.replan_s == "auto":
            return replace(self, replan_s=AUTO_REPLAN_S if epochs and workers > 1 and not spark else None)
        if self.replan_s is not None and not seconds(self.replan_s, "replan_s") > 0:
            raise OptionError(
                "{replan_s=}; it must be above 0. Leave out {replan_s} for a job whose tasks stay where they are",
                {"replan_s": self.replan_s},
            )
        if self.replan_s is not None and not epochs:
            raise OptionError(
                "{replan_s} moves tasks, which takes epochs, and {epoch_interval_s=} turns epochs off; leave out "
                "{replan_s} or {epoch_interval_s}",
                {"epoch_interval_s": None},
            )
        return self
