"""The options of a Spark session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from penstock.runtime.units import Seconds, above_zero

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """What session is wanted.

    `kind` "auto" is RayDP, and plain PySpark where that cannot be had. `existing` is a session to adopt; it wins over
    `kind`. There are `executors` executors with `cores` cores each; plain PySpark uses as many cores of this machine,
    or with `master` that instead. `memory` is an executor's. `name` is the session's name. `conf` wins over SETTINGS;
    an adopted session takes of both what Spark SQL can change. `put` is `ray.put`, which RayDP needs, with Ray
    connected; the executors go to the bundles of `placement_group` that `bundle_indexes` names, or to all. `cpus`: what
    of Ray's CPUs an executor of RayDP takes up; None: its cores, reserved for it; less, and it uses those that idle
    record tasks leave free. `python` is the interpreter for executors that run Python functions, this one unless named.
    `start_seconds` (or a timedelta) bounds the start, then the wait for executors, then the test. `prepare_seconds`
    bounds all that a job does before its first micro-batch: room on the cluster, the session, and a trial of the job's
    operators; ten times `start_seconds` unless given.

    `stand_in` answers micro-batches in place of a Spark session, so that tests and benchmarks can have executors of any
    speed. It is called in the bridge's process with the forms of the job's ranges, and returns what a bridge needs of
    `penstock.bridge.operation.Operations`.
    """

    kind: Literal["auto", "raydp", "pyspark"] = "auto"
    cores: int = 2
    executors: int = 1
    memory: str = "2g"
    conf: Mapping[str, str] = field(default_factory=dict)
    put: Callable[[bytes], Any] | None = None
    placement_group: Any = None
    bundle_indexes: Sequence[int] | None = None
    cpus: float | None = None
    existing: SparkSession | None = None
    master: str | None = None
    name: str = "penstock"
    python: str | None = None
    start_seconds: Seconds = Seconds(60.0)
    prepare_seconds: float | timedelta | None = None
    stand_in: Callable[[Sequence[Any]], Any] | None = None

    @property
    def prepare_limit_s(self) -> float:
        """After so many seconds a job gives up the Spark that it prepares."""
        given = self.prepare_seconds
        return 10 * self.start_seconds if given is None else above_zero(given, "prepare_seconds")

    def __post_init__(self) -> None:
        if self.cores < 1 or self.executors < 1:
            raise ValueError(f"a Spark session needs executors and cores, got {self.executors} of {self.cores}")
        if self.cpus is not None and self.cpus < 0:
            raise ValueError(f"cpus={self.cpus}; an executor takes up 0 of Ray's CPUs or more")
        _ = self.prepare_limit_s  # raises what is wrong with it
