"""The options of a job: their defaults, their meanings and their checks.

The class JobOptions is the one definition of them: its fields have the types and the defaults, and its docstring says
what each of them means. `run` takes the options as keywords, the `penstock` command makes its options from them, and
`make options` writes the table of docs/running.md; tests compare the three with the class. This module never loads Ray
or Spark, because `penstock run --help` needs it.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from penstock.host.process.network import (
    NODE_TIMEOUT_S,
    TRANSPORTS,
    Network,
    TransportName,
    checked_node_timeout,
    checked_ports,
    checked_tls,
)
from penstock.placement.options import Method, PlacementOptions
from penstock.runtime.errors import FlowError, OptionError, shorten
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.exchange.output_cache import MEMORY_BYTES
from penstock.runtime.relaying.tree_options import TreeOptions
from penstock.runtime.transport.ring import MAX_CAPACITY, MIN_CAPACITY
from penstock.runtime.units import above_zero, any_seconds, flag, number, whole

if TYPE_CHECKING:
    from penstock.bridge.burst import BurstOptions, Mode
    from penstock.bridge.paradigm_scheduler import DualOptions
    from penstock.bridge.session import SparkOptions
    from penstock.runtime.transport.certificates import Tls

# Below it every message would wait for the credit of the one before.
_LEAST_WINDOW_BYTES = 1024

#: The fields of BurstOptions that a text can set.
_DUAL_SETTINGS = ("delta", "k", "margin", "range_below")

# --- checks of one value -----------------------------------------------------------------------------------------


def _optional(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, name: None if value is None else check(value, name)


def _ring_bytes(given: Any, name: str) -> int:
    size = whole(given, name)
    if size & (size - 1) or not MIN_CAPACITY <= size <= MAX_CAPACITY:
        near = min(max(1 << size.bit_length(), MIN_CAPACITY), MAX_CAPACITY)
        raise OptionError(
            f"{{ring_bytes=}}; it must be a power of two, {MIN_CAPACITY:,} to {MAX_CAPACITY:,}, such as {near}",
            {name: size},
        )
    return size


def _replan(given: Any, name: str) -> Any:
    if given == "auto":
        return given
    found = any_seconds(given, name)
    return found if isinstance(given, timedelta) else given  # errors show it as it was given


def _place(given: Any, name: str) -> Any:
    if not isinstance(given, str | os.PathLike):
        raise FlowError(f"{name}={shorten(given)}; it must be a directory, or a URL such as s3://bucket/prefix")
    return given


def _address(given: Any, name: str) -> str:
    if not isinstance(given, str):
        raise FlowError(f"{name}={shorten(given)}; it must be the text of a Ray cluster's address, or 'local'")
    return given


def _transport(given: Any, name: str) -> Any:
    if given not in TRANSPORTS:
        raise OptionError("{transport=}; it must be one of {names}", {name: given}, names=", ".join(TRANSPORTS))
    return given


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "workers": _optional(whole),
    "parallelism": _optional(whole),
    "local": flag,
    "detached": flag,
    "address": _optional(_address),
    "ring_bytes": _optional(_ring_bytes),
    "window_bytes": partial(whole, least=_LEAST_WINDOW_BYTES),
    "cache_bytes": whole,
    "check_shared": flag,
    "cpus_per_worker": number,
    "start_timeout_s": above_zero,
    "epoch_interval_s": _optional(partial(above_zero, otherwise=", or None for a job without epochs")),
    "epoch_timeout_s": above_zero,
    "checkpoints": _optional(_place),
    "max_restarts": partial(whole, least=0),
    "max_attempts": whole,
    "hang_timeout_s": above_zero,
    "savepoint": _optional(_place),
    "replan_s": _optional(_replan),
    "spares": flag,
    "transport": _transport,
    "ports": lambda given, _: None if given is None else checked_ports(given),
    "node_timeout_s": lambda given, _: checked_node_timeout(given),
}

# The options that local jobs refuse.
_NEED_RAY = (
    *("detached", "address", "cpus_per_worker", "dual", "spark", "placement", "nodes", "replan_s", "ports"),
    *("node_timeout_s", "trees"),
)


# --- the options -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobOptions:
    """The options of one job, each of them checked by itself. Defaults are in parentheses.

    The methods return what several options mean together, and raise FlowError when they do not fit.

    Processes and memory:

    `workers` (1): the number of worker processes.
    `parallelism` (one task for each worker): the number of tasks of each operator that does not set its own. It
    replaces the flow's own default.
    `local` (False): run the workers as child processes of this program, without Ray. They end with it, other programs
    do not see the job, and options that need Ray are refused.
    `detached` (False): let the job outlive this process. Otherwise the job ends with this process.
    `address` (the one on this machine, else a new one): the address of a Ray cluster, or 'local' for a new one. By
    default the job joins the cluster of this machine, or starts one for this process.
    `ring_bytes` (2 MiB): the size of each worker's inbox, a power of two. No record may be larger than about half of
    it. By default it grows for larger records.
    `window_bytes` (256 KiB): the credit window: the bytes that may be on their way from one task to another.
    `cache_bytes` (64 MiB): the memory in which a worker keeps records that it has sent since the last complete epoch,
    to send them again after a failure. The rest goes to a file in TMPDIR.
    `check_shared` (False): fail the job when a function changes a record which other tasks have too, for debugging. The
    other tasks are in another branch of the stream, or behind broadcast(). It makes such jobs much slower.
    `cpus_per_worker` (1): the CPUs that Ray reserves for each worker.
    `start_timeout_s` (60 s): the time within which all workers must be placed and started, and then again for loading
    the program. The start of Ray itself comes before, and has time limits of its own.

    Recovery:

    `epoch_interval_s` (1 s): the time between epochs, longer while no record moves. In each epoch the state of all
    tasks is saved as one consistent epoch. When a process dies, the job goes back to the last complete epoch, without
    losing or doubling a record. With None (0 on the command line) the job saves nothing, and any death of a process
    ends it.
    `epoch_timeout_s` (60 s): the time after which the next epoch begins although the last one has not completed.
    `checkpoints` (penstock/ below XDG_STATE_HOME or ~/.local/state): the checkpoint store, where epochs are saved: a
    directory or a URL such as s3://bucket/prefix. Saved epochs are deleted when the job has finished or was cancelled.
    They stay when it failed, for `resume`.
    `max_restarts` (10): the number of deaths of workers within ten minutes that the job survives. Workers that die
    before the job runs again count once.
    `max_attempts` (3): the number of crashes of a worker by a suspected record before it counts as a failed record. Its
    operator's `on_error` decides then. (Two further deaths are needed to find out which record it is. A death by a
    signal from outside, or for lack of memory, counts half, and only until an epoch completes.)
    `hang_timeout_s` (60 s): the time after which a worker or JobMaster whose process does not answer is killed, and
    counts as dead. It must be longer than any call into native code that keeps the interpreter.
    `savepoint` (none): the savepoint from which the job starts, a directory or a URL. It is the place where
    `job.savepoint` has saved the state. The flow may have other parallelism and other operators, but it must have all
    operators with state, under the same names.
    `spares` (True): keep a spare process on each node, which takes the place of a worker that has died. It starts when
    the job has run for ten seconds, and has some 80 MiB. Without it a worker takes half a second longer to come back.

    Spark:

    `dual` (off): how bursts go through Spark: 'off', 'on', 'spark-only' or 'toggle:SECONDS', and settings after a
    comma, as in 'on,delta=0.3'. 'off' processes all records in the job's own tasks. 'on' sends the input of operators
    with growing queues to Spark in micro-batches until the burst is over; Spark starts with the job and is kept ready.
    'spark-only' sends all input as soon as Spark is ready. 'toggle:3' changes the side every 3 seconds.
    penstock.bridge.burst.BurstOptions describes the settings and may replace the text. Without Java or Spark the job
    processes all records itself, and says so once.
    `spark` (one executor): the Spark session to start (penstock.bridge.session.SparkOptions).

    Placement:

    `placement` (auto): how tasks are assigned to workers: auto, round-robin, traffic, turbostream, t-storm, jstorm,
    metis. 'auto' is the plan that `penstock plan` shows. 'round-robin' takes turns. 'traffic' keeps traffic between
    nodes and between workers low, as if all tasks cost the same. The others do as other systems do.
    penstock.placement.options.PlacementOptions has further settings and may replace the text.
    `nodes` (the JobMaster's node if it has enough CPUs, else the fewest nodes that have): the number of cluster nodes
    over which the workers are spread, with room reserved on each.
    `replan_s` (never): the time between two measurements of load and traffic, after which tasks move when that is worth
    it. 'auto' is every 10 seconds in a job that has epochs and several workers and does not use Spark.

    Several machines:

    `transport` (auto): the way of records between machines: auto, tcp, rdma. 'auto' is the best that both machines
    have. The others are also used between the workers of one machine.
    `ports` (any): the first and the last port at which the job's processes may listen for other machines.
    `tls` (False): encrypt what the job's processes send to other machines, by a certificate that the job makes.
    penstock.Tls names files of your own instead. docs/cluster.md says what Ray itself sends.
    `node_timeout_s` (5 s): the silence after which a machine is lost, 1 to 600 seconds. Its tasks continue on other
    machines; a shorter cut of the network is a pause.
    `trees` (auto): the number of relays to which a node of a multicast tree sends at most, or 'auto'. With 'auto' the
    number follows the load. 'toggle:1' has the trees switch every second, for tests.
    """

    workers: int | None = None
    parallelism: int | None = None
    local: bool = False
    detached: bool = False
    address: str | None = None
    ring_bytes: int | None = None
    window_bytes: int = CREDIT_WINDOW_BYTES
    cache_bytes: int = MEMORY_BYTES
    check_shared: bool = False
    cpus_per_worker: float = 1.0
    start_timeout_s: float = 60.0
    epoch_interval_s: float | None = 1.0
    epoch_timeout_s: float = 60.0
    checkpoints: str | os.PathLike[str] | None = None
    max_restarts: int = 10
    max_attempts: int = 3
    hang_timeout_s: float = 60.0
    savepoint: str | os.PathLike[str] | None = None
    dual: str | BurstOptions = "off"
    spark: SparkOptions | None = None
    placement: Method | PlacementOptions = "auto"
    nodes: int | None = None
    replan_s: float | Literal["auto"] | None = None
    spares: bool = True
    transport: TransportName = "auto"
    ports: tuple[int, int] | None = None
    tls: bool | Tls = False
    node_timeout_s: float = NODE_TIMEOUT_S
    trees: int | str = "auto"

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(getattr(self, name), name))
        if self.local:
            self._refuse_what_needs_ray()

    def _refuse_what_needs_ray(self) -> None:
        for name in _NEED_RAY:
            value = getattr(self, name)
            if value != getattr(JobOptions, name) and (name, value) != ("placement", "round-robin"):
                raise OptionError(
                    f"{{{name}=}} is not for local jobs, which run in processes of this program, without Ray; leave "
                    f"out {{{name}}} or {{local=}}",
                    {name: value, "local": True},
                )

    @property
    def worker_count(self) -> int:
        """Returns the number of worker processes."""
        return self.workers or 1

    def network(self) -> Network:
        """Returns how the job's processes reach each other."""
        first, last = self.ports or (0, 0)
        return Network(self.transport, first, last, self.node_timeout_s, checked_tls(self.tls, self.transport))

    def tree_options(self) -> TreeOptions:
        """Returns the trees of the job's streams."""
        trees = self.trees
        if trees == "auto":
            return TreeOptions()
        if isinstance(trees, int) and not isinstance(trees, bool) and trees >= 1:
            return TreeOptions(limit=trees)
        name, _, text = trees.partition(":") if isinstance(trees, str) else ("", "", "")
        try:
            every_s = float(text) if name == "toggle" else 0.0
        except ValueError:
            every_s = 0.0
        if not 0 < every_s < math.inf:
            raise FlowError(f"trees={shorten(trees)}; it must be 'auto', a number of 1 or more, or 'toggle:SECONDS'")
        return TreeOptions(toggle_s=every_s)

    def placement_options(self) -> PlacementOptions:
        """Returns where the job's tasks run. `PlacementOptions.checked` has still to look at the flow."""
        if not isinstance(self.placement, PlacementOptions):
            return PlacementOptions(self.placement, self.nodes, self.replan_s)
        beside = {} if self.nodes is None else {"nodes": str(self.nodes)}
        if self.replan_s is not None:
            beside["replan_s"] = '"auto"' if self.replan_s == "auto" else f"{self.replan_s:g}"
        if beside:
            given = ", ".join(f"{name}={value}" for name, value in beside.items())
            raise FlowError(
                f"run() got both placement=PlacementOptions(...) and {given}, which PlacementOptions has itself; write "
                f"placement=PlacementOptions(..., {given}) and leave out {' and '.join(beside)} of run()"
            )
        return self.placement

    def dual_options(self) -> DualOptions | None:
        """Returns how the job uses Spark, or None when it does not."""
        dual, spark = self.dual, self.spark
        if isinstance(dual, str) and dual == "off" and spark is None:
            return None
        from penstock.bridge.burst import BurstOptions  # a job without Spark starts sooner without these
        from penstock.bridge.session import SparkOptions

        if not isinstance(dual, str | BurstOptions):
            raise FlowError(
                f"dual={shorten(dual)}; it must be text such as 'on', or penstock.bridge.burst.BurstOptions"
            )
        if spark is not None and not isinstance(spark, SparkOptions):
            raise FlowError(f"spark={shorten(spark)}; it must be penstock.bridge.session.SparkOptions(...), or None")
        if dual == "off":
            raise OptionError(
                "{spark} starts no Spark with {dual=}; give {dual} as 'on', 'spark-only' or 'toggle:SECONDS', or leave "
                "out {spark}",
                {"dual": dual},
            )
        from penstock.bridge.paradigm_scheduler import DualOptions  # loads pyarrow

        if isinstance(dual, BurstOptions):
            return DualOptions(replace(dual, epoch_s=self.epoch_interval_s), spark or SparkOptions())
        try:
            mode, numbers = _dual_settings(dual)
            burst = BurstOptions(mode=mode, epoch_s=self.epoch_interval_s, ahead=True, **numbers)
        except ValueError as error:
            raise OptionError(
                "{dual=}: {problem}; use 'off', 'on', 'spark-only' or 'toggle:SECONDS'. Settings follow a comma, as in "
                "'on,delta=0.3'; the settings are {settings}",
                {"dual": dual},
                problem=error,
                settings=", ".join(_DUAL_SETTINGS),
            ) from None
        return DualOptions(burst, spark or SparkOptions())


@dataclass(frozen=True)
class Option:
    """One option, as its field and the docstring of JobOptions describe it.

    `kind`: its type, as written. `default`: its value, and `default_words` the same for people. `heading`: of its
    group. `text`: its meaning.
    """

    name: str
    kind: str
    default: Any
    default_words: str
    heading: str
    text: str

    @property
    def sentence(self) -> str:
        """Returns the first sentence of its meaning, without its full stop."""
        return self.text.partition(". ")[0].removesuffix(".")

    def checked(self, value: Any) -> Any:
        """Returns the value that a user has given, as the job uses it. Raises FlowError. A value that is checked
        together with others is returned as it is."""
        check = _CHECKS.get(self.name)
        return value if check is None else check(value, self.name)


@cache
def described() -> tuple[Option, ...]:
    """Returns all options, in the order of `run`."""
    found: dict[str, tuple[str, str, str]] = {}
    heading = ""
    for paragraph in re.split(r"\n(?=\n|`\w+` \()", inspect.getdoc(JobOptions) or ""):
        text = " ".join(paragraph.split())
        if entry := re.match(r"`(\w+)` \((.+?)\): (.+)", text):
            found[entry[1]] = (entry[2], heading, entry[3])
        elif text.endswith(":"):
            heading = text[:-1]
    return tuple(
        Option(each.name, str(each.type), each.default, *found.get(each.name, ("", "", "")))
        for each in fields(JobOptions)
    )


def paragraphs() -> str:
    """Returns the part of the docstring of JobOptions that describes the options."""
    text = inspect.getdoc(JobOptions) or ""
    return text[text.find(f"{described()[0].heading}:") :]


def _dual_settings(dual: str) -> tuple[Mode, dict[str, Any]]:
    """Returns the mode and the settings of a text such as "on,delta=0.3". Raises ValueError with what is wrong."""
    first, *settings = dual.split(",")
    name, colon, duration = first.partition(":")
    modes: dict[str, Mode] = {"on": "auto", "spark-only": "spark-only", "toggle": "toggle"}
    if first == "off":
        raise ValueError("'off' takes no settings")
    if name not in modes or (colon and name != "toggle"):
        raise ValueError(f"{first!r} is not a mode")
    numbers: dict[str, Any] = {}
    if name == "toggle":
        if not duration:
            raise ValueError("the seconds are missing, as in 'toggle:3'")
        numbers["toggle_s"] = _finite(duration, first)
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in _DUAL_SETTINGS:
            raise ValueError(f"{key!r} is not a setting")
        if key in numbers:
            raise ValueError(f"{key!r} is given twice")
        if not value:
            raise ValueError(f"{key!r} has no value")
        numbers[key] = _finite(value, setting)
    return modes[name], numbers


def _finite(text: str, where: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{text!r} in {where!r} is not a finite number")
    return found
