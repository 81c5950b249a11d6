"""The options of a job: their defaults, their meanings and their checks.

This is the one definition of them. `run` takes the options as keywords, the `penstock` command takes them as options on
the command line, and `make options` writes the table of docs/running.md; tests compare the three with this module. It
never loads Ray or Spark, because `penstock run --help` needs it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from textwrap import fill
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
from penstock.placement.options import METHODS, Method, PlacementOptions
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
_DUAL_SETTINGS = ("delta", "k", "margin", "range_below", "smoothing_s", "interval_min_s", "interval_max_s")

#: The place of the checkpoint store of a job without `checkpoints`, in words.
STATE = "penstock/ below XDG_STATE_HOME or ~/.local/state"


@dataclass(frozen=True)
class About:
    """Describes one option.

    `group`: the heading under which it is listed. `text`: its meaning; the first sentence is also the help of the
    command. `check`: returns the value that a user has given, as the job uses it, or raises FlowError; it gets the
    option's name too. `unit`: of its number. `default`: its default in words, where the value does not say it. `ray`:
    whether it is refused in a local job. `too_small` and `too_large`: the consequences of such values.
    """

    group: str
    text: str
    check: Callable[[Any, str], Any]
    unit: Literal["", "seconds", "bytes", "count", "CPUs", "place"] = ""
    default: str | None = None
    ray: bool = False
    too_small: str = ""
    too_large: str = ""

    @property
    def sentence(self) -> str:
        """Returns the first sentence, without its full stop."""
        return self.text.partition(". ")[0].removesuffix(".")


def _about(*args: Any, **kwargs: Any) -> dict[str, About]:
    """Returns the metadata of a field that an About describes."""
    return {"about": About(*args, **kwargs)}


# --- checks of one value -----------------------------------------------------------------------------------------


def _optional(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    return lambda value, name: None if value is None else check(value, name)


def _at_least(least: int) -> Callable[[Any, str], int]:
    return lambda value, name: whole(value, name, least)


def _as_given(value: Any, name: str) -> Any:
    """Returns a value that is checked together with others."""
    return value


def _ring_bytes(given: Any, name: str) -> int:
    size = whole(given, name)
    if size & (size - 1) or not MIN_CAPACITY <= size <= MAX_CAPACITY:
        near = min(max(1 << size.bit_length(), MIN_CAPACITY), MAX_CAPACITY)
        raise OptionError(
            f"{{ring_bytes=}}; it must be a power of two, {MIN_CAPACITY:,} to {MAX_CAPACITY:,}, such as {near}",
            {name: size},
        )
    return size


def _epoch_interval(given: Any, name: str) -> float:
    return above_zero(given, name, ", or None for a job without epochs")


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


def _ports(given: Any, name: str) -> tuple[int, int]:
    return checked_ports(given)


def _node_timeout(given: Any, name: str) -> float:
    return checked_node_timeout(given)


# --- the options -------------------------------------------------------------------------------------------------

_PROCESSES = "Processes and memory"
_RECOVERY = "Recovery"
_SPARK = "Spark"
_PLACEMENT = "Placement"
_MACHINES = "Several machines"


@dataclass(frozen=True)
class JobOptions:
    """The options of one job, each of them checked by itself.

    The methods return what several options mean together, and raise FlowError when they do not fit.
    """

    workers: int | None = field(
        default=None,
        metadata=_about(
            _PROCESSES,
            "the number of worker processes.",
            _optional(_at_least(1)),
            "count",
            default="1",
            too_small="cores stand idle",
            too_large="workers share cores, and latency grows",
        ),
    )
    parallelism: int | None = field(
        default=None,
        metadata=_about(
            _PROCESSES,
            "the number of tasks of each operator that does not set its own. It replaces the flow's own default.",
            _optional(_at_least(1)),
            "count",
            default="one task for each worker",
            too_small="workers stand idle",
            too_large="more and smaller batches",
        ),
    )
    local: bool = field(
        default=False,
        metadata=_about(
            _PROCESSES,
            "run the workers as child processes of this program, without Ray. They end with it, other programs do not "
            "see the job, and options that need Ray are refused.",
            flag,
        ),
    )
    detached: bool = field(
        default=False,
        metadata=_about(
            _PROCESSES, "let the job outlive this process. Otherwise the job ends with this process.", flag, ray=True
        ),
    )
    address: str | None = field(
        default=None,
        metadata=_about(
            _PROCESSES,
            "the address of a Ray cluster, or 'local' for a new one. By default the job joins the cluster of this "
            "machine, or starts one for this process.",
            _optional(_address),
            default="the one on this machine, else a new one",
            ray=True,
        ),
    )
    ring_bytes: int | None = field(
        default=None,
        metadata=_about(
            _PROCESSES,
            "the size of each worker's inbox, a power of two. No record may be larger than about half of it. By "
            "default it grows for larger records.",
            _optional(_ring_bytes),
            "bytes",
            default="2 MiB",
            too_small="senders wait",
            too_large="uses memory and cache",
        ),
    )
    window_bytes: int = field(
        default=CREDIT_WINDOW_BYTES,
        metadata=_about(
            _PROCESSES,
            "the credit window: the bytes that may be on their way from one task to another.",
            _at_least(_LEAST_WINDOW_BYTES),
            "bytes",
            too_small="senders wait for credit",
            too_large="more records queue before a slow task, and epochs take longer",
        ),
    )
    cache_bytes: int = field(
        default=MEMORY_BYTES,
        metadata=_about(
            _PROCESSES,
            "the memory in which a worker keeps records that it has sent since the last complete epoch, to send them "
            "again after a failure. The rest goes to a file in TMPDIR.",
            _at_least(1),
            "bytes",
            too_small="bursts are written to disk between epochs",
            too_large="uses memory",
        ),
    )
    check_shared: bool = field(
        default=False,
        metadata=_about(
            _PROCESSES,
            "fail the job when a function changes a record which other tasks have too, for debugging. The other tasks "
            "are in another branch of the stream, or behind broadcast(). It makes such jobs much slower.",
            flag,
        ),
    )
    cpus_per_worker: float = field(
        default=1.0,
        metadata=_about(
            _PROCESSES,
            "the CPUs that Ray reserves for each worker.",
            number,
            "CPUs",
            ray=True,
            too_small="Ray places more workers than there are cores",
            too_large="the job finds no room (NotEnoughResources)",
        ),
    )
    start_timeout_s: float = field(
        default=60.0,
        metadata=_about(
            _PROCESSES,
            "the time within which all workers must be placed and started, and then again for loading the program. "
            "The start of Ray itself comes before, and has time limits of its own.",
            above_zero,
            "seconds",
            too_small="the job fails on a busy cluster",
            too_large="a job that finds no room fails late; a job that can never fit still fails at once",
        ),
    )
    epoch_interval_s: float | None = field(
        default=1.0,
        metadata=_about(
            _RECOVERY,
            "the time between epochs, longer while no record moves. In each epoch the state of all tasks is saved as "
            "one consistent epoch. When a process dies, the job goes back to the last complete epoch, without losing "
            "or doubling a record. With None (0 on the command line) the job saves nothing, and any death of a process "
            "ends it.",
            _optional(_epoch_interval),
            "seconds",
            too_small="the job spends more of its time on saving",
            too_large="more work is repeated after a failure, more sent records are kept, and Files and Collect show "
            "records later",
        ),
    )
    epoch_timeout_s: float = field(
        default=60.0,
        metadata=_about(
            _RECOVERY,
            "the time after which the next epoch begins although the last one has not completed.",
            above_zero,
            "seconds",
            too_small="several slow epochs run side by side and become slower",
            too_large="one epoch that is stuck delays all later ones",
        ),
    )
    checkpoints: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_about(
            _RECOVERY,
            "the checkpoint store, where epochs are saved: a directory or a URL such as s3://bucket/prefix. Saved "
            "epochs are deleted when the job has finished or was cancelled. They stay when it failed, for `resume`.",
            _optional(_place),
            "place",
            default=STATE,
        ),
    )
    max_restarts: int = field(
        default=10,
        metadata=_about(
            _RECOVERY,
            "the number of deaths of workers within ten minutes that the job survives. Workers that die before the job "
            "runs again count once.",
            _at_least(0),
            "count",
            too_small="a passing problem ends the job",
            too_large="a job that can never succeed tries for longer",
        ),
    )
    max_attempts: int = field(
        default=3,
        metadata=_about(
            _RECOVERY,
            "the number of crashes of a worker by a suspected record before it counts as a failed record. Its "
            "operator's `on_error` decides then. (Two further deaths are needed to find out which record it is. A "
            "death by a signal from outside, or for lack of memory, counts half, and only until an epoch completes.)",
            _at_least(1),
            "count",
            too_small="a crash with another cause costs the record",
            too_large="a record that crashes its process causes more recoveries, or `max_restarts` ends the job first",
        ),
    )
    hang_timeout_s: float = field(
        default=60.0,
        metadata=_about(
            _RECOVERY,
            "the time after which a worker or JobMaster whose process does not answer is killed, and counts as dead. "
            "It must be longer than any call into native code that keeps the interpreter.",
            above_zero,
            "seconds",
            too_small="a slow machine, or a long call into native code, causes recoveries",
            too_large="a process that hangs is noticed late",
        ),
    )
    savepoint: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_about(
            _RECOVERY,
            "the savepoint from which the job starts, a directory or a URL. It is the place where `job.savepoint` has "
            "saved the state. The flow may have other parallelism and other operators, but it must have all operators "
            "with state, under the same names.",
            _optional(_place),
            "place",
            default="none",
        ),
    )
    dual: str | BurstOptions = field(
        default="off",
        metadata=_about(
            _SPARK,
            "how bursts go through Spark: 'off', 'on', 'spark-only' or 'toggle:SECONDS', and settings after a comma, "
            "as in 'on,delta=0.3'. 'off' processes all records in the job's own tasks. 'on' sends the input of "
            "operators with growing queues to Spark in micro-batches until the burst is over; Spark starts with the "
            "job and is kept ready. 'spark-only' sends all input as soon as Spark is ready. 'toggle:3' changes the "
            "side every 3 seconds. penstock.bridge.burst.BurstOptions describes the settings and may replace the text. "
            "Without Java or Spark the job processes all records itself, and says so once.",
            _as_given,
            ray=True,
        ),
    )
    spark: SparkOptions | None = field(
        default=None,
        metadata=_about(
            _SPARK,
            "the Spark session to start (penstock.bridge.session.SparkOptions).",
            _as_given,
            default="one executor",
            ray=True,
        ),
    )
    placement: Method | PlacementOptions = field(
        default="auto",
        metadata=_about(
            _PLACEMENT,
            f"how tasks are assigned to workers: {', '.join(METHODS)}. 'auto' is the plan that `penstock plan` shows. "
            "'round-robin' takes turns. 'traffic' keeps traffic between nodes and between workers low, as if all tasks "
            "cost the same. The others do as other systems do. penstock.placement.options.PlacementOptions has further "
            "settings and may replace the text.",
            _as_given,
            ray=True,
        ),
    )
    nodes: int | None = field(
        default=None,
        metadata=_about(
            _PLACEMENT,
            "the number of cluster nodes over which the workers are spread, with room reserved on each.",
            _as_given,
            "count",
            default="the JobMaster's node if it has enough CPUs, else the fewest nodes that have",
            ray=True,
        ),
    )
    replan_s: float | Literal["auto"] | None = field(
        default=None,
        metadata=_about(
            _PLACEMENT,
            "the time between two measurements of load and traffic, after which tasks move when that is worth it. "
            "'auto' is every 10 seconds in a job that has epochs and several workers and does not use Spark.",
            _optional(_replan),
            "seconds",
            default="never",
            ray=True,
        ),
    )
    spares: bool = field(
        default=True,
        metadata=_about(
            _RECOVERY,
            "keep a spare process on each node, which takes the place of a worker that has died. It starts when the "
            "job has run for ten seconds, and has some 80 MiB. Without it a worker takes half a second longer to come "
            "back.",
            flag,
        ),
    )
    transport: TransportName = field(
        default="auto",
        metadata=_about(
            _MACHINES,
            f"the way of records between machines: {', '.join(TRANSPORTS)}. 'auto' is the best that both machines "
            "have. The others are also used between the workers of one machine.",
            _transport,
        ),
    )
    ports: tuple[int, int] | None = field(
        default=None,
        metadata=_about(
            _MACHINES,
            "the first and the last port at which the job's processes may listen for other machines.",
            _optional(_ports),
            default="any",
            ray=True,
        ),
    )
    tls: bool | Tls = field(
        default=False,
        metadata=_about(
            _MACHINES,
            "encrypt what the job's processes send to other machines, by a certificate that the job makes. "
            "penstock.Tls names files of your own instead. docs/cluster.md says what Ray itself sends.",
            _as_given,
        ),
    )
    node_timeout_s: float = field(
        default=NODE_TIMEOUT_S,
        metadata=_about(
            _MACHINES,
            "the silence after which a machine is lost, 1 to 600 seconds. Its tasks continue on other machines; a "
            "shorter cut of the network is a pause.",
            _node_timeout,
            "seconds",
            ray=True,
        ),
    )
    trees: int | str = field(
        default="auto",
        metadata=_about(
            _MACHINES,
            "the number of relays to which a node of a multicast tree sends at most, or 'auto'. With 'auto' the "
            "number follows the load. 'toggle:1' has the trees switch every second, for tests.",
            _as_given,
            ray=True,
        ),
    )

    def __post_init__(self) -> None:
        for name, _, about in described():
            object.__setattr__(self, name, about.check(getattr(self, name), name))
        if self.local:
            self._refuse_what_needs_ray()

    def _refuse_what_needs_ray(self) -> None:
        for name, default, about in described():
            value = getattr(self, name)
            if not about.ray or value == default or (name == "placement" and value == "round-robin"):
                continue
            raise OptionError(
                f"{{{name}=}} is not for local jobs, which run in processes of this program, without Ray; leave out "
                f"{{{name}}} or {{local=}}",
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


def described() -> Iterator[tuple[str, Any, About]]:
    """Yields the name, the default and the description of each option, in the order of `run`."""
    for each in fields(JobOptions):
        yield each.name, each.default, each.metadata["about"]


def groups() -> Mapping[str, list[tuple[str, Any, About]]]:
    """Returns the options by the headings under which they are listed."""
    found: dict[str, list[tuple[str, Any, About]]] = {}
    for name, default, about in described():
        found.setdefault(about.group, []).append((name, default, about))
    return found


def shown_default(default: Any, about: About) -> str:
    """Returns the default of an option in words."""
    if about.default is not None:
        return about.default
    if about.unit == "bytes":
        return f"{default >> 20} MiB" if default >= 1 << 20 else f"{default >> 10} KiB"
    return f"{default:g}" if isinstance(default, int | float) and not isinstance(default, bool) else str(default)


def as_paragraphs() -> str:
    """Returns the options in words, as `help(penstock.run)` shows them."""
    found = []
    for heading, them in groups().items():
        lines = [f"`{name}` ({shown_default(default, about)}): {about.text}" for name, default, about in them]
        found.append("\n".join((f"{heading}:\n", *(fill(line, 116) for line in lines))))
    return "\n\n".join(found)


def _dual_settings(dual: str) -> tuple[Mode, dict[str, float]]:
    """Returns the mode and the settings of a text such as "on,delta=0.3". Raises ValueError with what is wrong."""
    first, *settings = dual.split(",")
    name, colon, duration = first.partition(":")
    modes: dict[str, Mode] = {"on": "auto", "spark-only": "spark-only", "toggle": "toggle"}
    if first == "off":
        raise ValueError("'off' takes no settings")
    if name not in modes or (colon and name != "toggle"):
        raise ValueError(f"{first!r} is not a mode")
    numbers: dict[str, float] = {}
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
