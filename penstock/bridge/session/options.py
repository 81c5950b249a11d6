"""The options of a Spark session."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

from penstock.runtime.errors import WrongValue, shorten
from penstock.runtime.units import Seconds, above_zero, choice, number, whole

Kind = Literal["auto", "raydp", "pyspark"]

# No machine has more cores.
_MOST_CORES = 4_096

# What Spark or RayDP reads as an amount of memory.
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:b|[kmgtp]b?)?\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """Says which Spark session a job uses. Defaults are in parentheses.

    Which session:

    `kind` ("auto"): what starts the session. "raydp" starts executors on the Ray cluster, "pyspark" starts plain
    PySpark, and "auto" uses RayDP, or plain PySpark where RayDP cannot be had.
    `master` (None): the address of the Spark master that plain PySpark uses in place of cores of this machine.
    `name` ("penstock"): the name of the application in Spark.

    Its size:

    `cores` (2): the number of cores of an executor, 1 to 4,096.
    `executors` (1): the number of executors, 1 or more.
    `memory` ("2g"): the memory of an executor, as a text with a number and a unit (k, m, g or t).
    `cpus` (None): the number of Ray's CPUs that an executor of RayDP takes up. With None, its cores are reserved for
    it. With a smaller number it uses the cores that idle record tasks leave free.
    `placement_group` (None): the placement group of Ray to whose bundles the executors of RayDP go.
    `bundle_indexes` (None): the indexes of these bundles. With None, all of them are used.

    How it runs:

    `conf` ({}): settings of Spark by name, which win over those of Penstock (SETTINGS).
    `python` (None): the interpreter with which executors run Python functions. With None, it is the one that runs now.
    `put` (None): `ray.put`, which RayDP needs, with Ray connected.
    `start_s` (60): the time limit for the start of the session, then again for the wait for executors, and then
    again for the test. It is in seconds, or a timedelta, above 0.
    `prepare_s` (None): the time limit for all that a job does before its first micro-batch: room on the cluster,
    the session, and a trial of the job's operators. It is in seconds, or a timedelta, above 0, and ends a start that
    takes longer, also where it is below `start_s`. With None, it is ten times `start_s`.

    For tests:

    `stand_in` (None): answers micro-batches in place of a Spark session, so that tests and benchmarks can have
    executors of any speed. It is called in the bridge's process with the forms of the job's ranges, and returns what a
    bridge needs of `penstock.bridge.operation.Operations`.
    """

    kind: Kind = "auto"
    cores: int = 2
    executors: int = 1
    memory: str = "2g"
    conf: Mapping[str, str] = field(default_factory=dict)
    put: Callable[[bytes], Any] | None = None
    placement_group: Any = None
    bundle_indexes: Sequence[int] | None = None
    cpus: float | None = None
    master: str | None = None
    name: str = "penstock"
    python: str | None = None
    start_s: Seconds = Seconds(60.0, above=True)
    prepare_s: float | timedelta | None = None
    stand_in: Callable[[Sequence[Any]], Any] | None = None

    @property
    def prepare_limit_s(self) -> float:
        """Returns after how many seconds a job gives up the Spark that it prepares."""
        given = self.prepare_s
        return 10 * self.start_s if given is None else above_zero(given, "prepare_s")

    def __post_init__(self) -> None:
        choice(self.kind, "kind", get_args(Kind))
        if whole(self.cores, "cores") > _MOST_CORES:
            raise WrongValue(f"cores={self.cores}; an executor has {_MOST_CORES:,} cores at most; give more executors")
        whole(self.executors, "executors")
        if self.cpus is not None:
            number(self.cpus, "cpus")
        _ = self.prepare_limit_s  # raises what is wrong with it
        memory = _MEMORY.fullmatch(self.memory) if isinstance(self.memory, str) else None
        if memory is None or not float(memory[1]) > 0:
            raise WrongValue(
                f"memory={shorten(self.memory)}; give a text with a number above 0 and a unit, such as '2g'"
            )
        self._check_conf()
        for name in ("master", "name", "python"):
            text = getattr(self, name)
            if (text is None and name != "name") or (isinstance(text, str) and text.strip()):
                continue
            raise WrongValue(f"{name}={shorten(text)}; it must be a text that is not empty; leave {name} out if unsure")
        for name in ("put", "stand_in"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise WrongValue(f"{name}={shorten(function)}; it must be a function, or None")

    def _check_conf(self) -> None:
        if not isinstance(self.conf, Mapping):
            raise WrongValue(
                f"conf={shorten(self.conf)}; it must be a dict of settings, as in "
                "conf={'spark.sql.ansi.enabled': 'true'}"
            )
        for key, value in self.conf.items():
            if not isinstance(key, str) or not key:
                raise WrongValue(f"conf has the key {shorten(key)}; it must be the name of a setting of Spark")
            if not isinstance(value, str | int | float):
                raise WrongValue(f"conf has {key}={shorten(value)}; it must be a text, such as 'true' or '200'")
