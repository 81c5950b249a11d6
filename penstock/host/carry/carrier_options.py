"""The options of a job for the process that hosts it, as plain data, which `resume` finds in the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.host.process.network import Network
from penstock.host.process.worker_process import WorkerOptions
from penstock.placement.options import PlacementOptions
from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.epochs.store import Store

if TYPE_CHECKING:
    from penstock.bridge.paradigm_scheduler import DualOptions
    from penstock.runtime.program.flow import Flow


@dataclass(frozen=True)
class CarrierOptions:
    """See the module's docstring."""

    workers: int
    start_timeout_s: float
    worker: WorkerOptions
    epochs: EpochOptions = field(default_factory=lambda: EpochOptions(interval_s=None))
    store: Store | None = None  # where epochs are saved; None: the job has no epochs
    flow: Flow | None = None  # of a job with epochs, so that it can be planned anew
    attempts: int = 3  # how often a record may kill its worker
    hang_timeout_s: float = 60.0  # the silence after which a process is killed
    resume: bool = False  # whether to continue from the store's last complete epoch
    savepoint: Store | None = None  # the store of the savepoint from which the job starts
    network: Network = field(default_factory=Network)  # used where processes do not share memory, or are not to
    spares: bool = True  # whether to keep a spare process on each node
    program: bytes | None = None  # the encoded flow and options, which `resume` reads from the store
    dual: DualOptions | None = None  # how the job uses Spark, or None when it does not
    cpus_per_worker: float = 1.0
    placement: PlacementOptions = field(default_factory=PlacementOptions)
