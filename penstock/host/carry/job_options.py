"""The options of `run()` as plain data, which `resume` finds in the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.host.carry.job_runner import RunnerOptions
from penstock.placement.options import PlacementOptions

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import DualOptions


@dataclass(frozen=True)
class JobOptions(RunnerOptions):
    """The options of `run()`, as plain data."""

    cpus_per_worker: float = 1.0
    dual: DualOptions | None = None  # how the job uses Spark, or None when it does not
    placement: PlacementOptions = field(default_factory=PlacementOptions)
