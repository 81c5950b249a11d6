"""The options of a job for the process that hosts it, as plain data, which `resume` finds in the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.host.carry.job_runner import RunnerOptions
from penstock.placement.options import PlacementOptions


@dataclass(frozen=True)
class CarrierOptions(RunnerOptions):
    """The options of `run()` that concern the carriers of a job."""

    cpus_per_worker: float = 1.0
    placement: PlacementOptions = field(default_factory=PlacementOptions)
