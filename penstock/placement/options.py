"""Holds the options of `run()` for the places of a job's tasks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from penstock.placement.adoption import AdoptionOptions
from penstock.runtime.errors import FlowError, OptionError, WrongValue, shorten
from penstock.runtime.units import any_seconds, flag, is_whole, number

#: How tasks are assigned to workers at the start.
Method = Literal["auto", "round-robin", "traffic", "turbostream", "t-storm", "jstorm", "metis"]
METHODS: tuple[Method, ...] = get_args(Method)

#: The time between two plans that "auto" means.
AUTO_REPLAN_S = 10.0

#: The least time between two plans. What a job does in less time says nothing about its load.
LEAST_REPLAN_S = 0.01


@dataclass(frozen=True)
class PlacementOptions:
    """Says where a job's tasks run. Defaults are in parentheses.

    `method` ("auto"): how tasks are assigned to workers at the start: "auto", "round-robin", "traffic", "turbostream",
    "t-storm", "jstorm" or "metis". docs/placement.md compares them.
    `nodes` (None): the number of machines over which the workers are spread by free CPUs, from 1 to the number of
    workers. With None, all workers are on the JobMaster's node if it has enough CPUs, else on the fewest nodes that
    have.
    `replan_s` (None): the time between two plans from what was measured (docs/papers.md: T12), in seconds, 0.01 or
    more. With None, tasks stay where they are. "auto" means 10 seconds (AUTO_REPLAN_S) for a job that has epochs and
    several workers and does not use Spark, and otherwise None.
    `adoption` (AdoptionOptions()): when a new plan is worth moving tasks.
    `pin` ({}): by operator, what a node must have for the operator's tasks to run there: labels with their text, and
    resources with their amount, as in {"score": {"GPU": 1}, "in": {"rack": "a"}}.
    `at_least` (None): the number of workers with which the job starts when the cluster has no room for all, or too few
    nodes. With None, the job needs all.
    `grow` (False): True asks the cluster for missing nodes, and waits for them. It is for clusters that add nodes on
    demand.

    `run` checks the fields.
    """

    method: Method = "auto"
    nodes: int | None = None
    replan_s: float | Literal["auto"] | None = None
    adoption: AdoptionOptions = field(default_factory=AdoptionOptions)
    pin: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    at_least: int | None = None
    grow: bool = False

    @property
    def period_s(self) -> float | None:
        """Returns the time between two plans, or None when there are none, after `checked` has resolved "auto"."""
        return None if self.replan_s == "auto" else self.replan_s

    def checked(
        self, workers: int, operators: Collection[str], epochs: bool, *, spark: bool = False
    ) -> PlacementOptions:
        """Returns the same options after checking them, with "auto" replaced. Raises FlowError for options that are
        impossible. `operators` has the names of the flow's operators, and `spark` says whether the job uses Spark."""
        self._check_pin(operators)
        if not isinstance(self.adoption, AdoptionOptions):
            raise WrongValue(
                f"adoption={shorten(self.adoption)}; it must be penstock.placement.adoption.AdoptionOptions(...)"
            )
        flag(self.grow, "grow")
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
        if self.replan_s is None:
            return self
        replan_s = any_seconds(self.replan_s, "replan_s")
        if not LEAST_REPLAN_S <= replan_s < math.inf:
            if replan_s > 0:
                problem = "endless" if replan_s == math.inf else f"below {LEAST_REPLAN_S:g} seconds, the least"
                problem = f"it is {problem}"
            else:
                problem = "it must be above 0"
            raise OptionError(
                "{replan_s=}; {problem}. Leave out {replan_s} for a job whose tasks stay where they are",
                {"replan_s": self.replan_s},
                problem=problem,
            )
        if not epochs:
            raise OptionError(
                "{replan_s} moves tasks, which takes epochs, and {epoch_interval_s=} turns epochs off; leave out "
                "{replan_s} or {epoch_interval_s}",
                {"epoch_interval_s": None},
            )
        return replace(self, replan_s=replan_s)  # a timedelta becomes seconds

    def _check_pin(self, operators: Collection[str]) -> None:
        example = 'give what a node must have by operator, as in pin={"score": {"GPU": 1}, "in": {"rack": "a"}}'
        if not isinstance(self.pin, Mapping):
            raise WrongValue(f"pin={shorten(self.pin)}; it must be a dict: {example}")
        for operator, wanted in self.pin.items():
            if operator not in operators:
                raise FlowError(f"pin names an operator {shorten(operator)}; the flow has: {', '.join(operators)}")
            if not isinstance(wanted, Mapping):
                raise WrongValue(f"pin: {operator!r} has {shorten(wanted)}, which is no dict; {example}")
            for name, value in wanted.items():
                if not isinstance(name, str):
                    raise WrongValue(f"pin: {operator!r} has {shorten(name)}, which is no name; {example}")
                if not isinstance(value, str):
                    try:
                        number(value, name)
                    except WrongValue:
                        raise WrongValue(
                            f"pin: {operator!r} has {name}={shorten(value)}; a label has a text, and a resource an "
                            f"amount of 0 or more; {example}"
                        ) from None
