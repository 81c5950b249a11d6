"""What all benchmarks share: cases and their JSON lines, tables, taking turns, processes and pinning.

A benchmark is a function `run(bench: Bench)` that measures and calls `bench.case(...)` for every figure. The
contestants of a figure take turns (A B A B ...) in one invocation, so that a machine that is busy for a while is so for
all of them.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
_SHOWN = 80  # characters of a result
_PEERS = ("bytewax", "ray", "raydp", "pyspark", "pyzmq", "iceoryx2", "pyarrow", "msgspec", "numpy")


class WrongResult(Exception):
    """A contestant's output is not what the input says it must be: its figure would mean nothing."""


class Skipped(Exception):
    """This machine lacks something without which a benchmark has no figures; the message says what."""


@dataclass
class Case:
    """One figure, beside a peer's where there is one; a line of JSON."""

    benchmark: str
    name: str
    figure: float
    unit: str
    peer: str | None = None
    peer_figure: float | None = None
    goal: str | None = None  # about the ratio when there is a peer, else about the figure: ">= 4", "< 5"
    config: str | None = None
    peer_config: str | None = None
    note: str | None = None
    checked: bool = True  # the output was compared with what it must be
    runs: list[float] = field(default_factory=list)
    peer_runs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """figure / peer_figure."""
        return self.figure / self.peer_figure if self.peer_figure else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        if self.goal is None:
            return None
        sign, limit = self.goal.split()[:2]
        value = self.figure if self.ratio is None else self.ratio
        bound = float(limit)
        return {">=": value >= bound, "<=": value <= bound, "<": value < bound, ">": value > bound}[sign]

    def line(self, about: dict[str, Any]) -> dict[str, Any]:
        """The JSON object."""
        return {
            "benchmark": self.benchmark,
            "name": self.name,
            "figure": self.figure,
            "unit": self.unit,
            "peer": self.peer,
            "peer_figure": self.peer_figure,
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
            "config": self.config,
            "peer_config": self.peer_config,
            "note": self.note,
            "checked": self.checked,
            "runs": self.runs,
            "peer_runs": self.peer_runs,
            **about,
        }


class Bench:
    """One benchmark of one invocation: its settings, its cases, its files."""

    def __init__(self, name: str, *, quick: bool, runs: int, out: Path, about: dict[str, Any]) -> None:
        self.name = name
        self.quick = quick
        self.runs = runs
        self.cases: list[Case] = []
        self._out = out
        self._about = about
        out.mkdir(parents=True, exist_ok=True)
        self.file = self.path(f"{name}.jsonl")
        self.file.write_text("")

    def path(self, file: str) -> Path:
        """Where a file of its results goes."""
        return self._out / file

    def pick(self, normal: T, quick: T) -> T:
        """A setting that --quick makes smaller."""
        return quick if self.quick else normal

    def case(self, name: str, figure: float, unit: str, **more: Any) -> Case:
        """Record a figure; it is in the file at once."""
        case = Case(self.name, name, float(figure), unit, **more)
        self.cases.append(case)
        with self.file.open("a") as file:
            file.write(json.dumps(case.line(self._about)) + "\n")
        return case

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        print(f"  {text}", file=sys.stderr, flush=True)

    def take_turns(
        self, contestants: dict[str, Callable[[], T]], runs: int | None = None, unit: str = ""
    ) -> dict[str, list[T]]:
        """Every contestant `runs` times (default: as invoked), one after the other in each round."""
        results: dict[str, list[T]] = {label: [] for label in contestants}
        for number in range(runs or self.runs):
            for label, contestant in contestants.items():
                result = contestant()
                results[label].append(result)
                shown = f"{result:,.4g}" if isinstance(result, int | float) else _short(str(result))
                self.say(f"{self.name} {number + 1}/{runs or self.runs} {label}: {shown} {unit}")
        return results

    def pyplot(self, file: str) -> Any:
        """Returns matplotlib's pyplot, or None, with a line that says which plot is left out, where matplotlib is not
        installed: the figures of a run must not be lost with its plots."""
        try:
            import matplotlib as mpl
        except ModuleNotFoundError:
            self.say(f"{file} is left out, because matplotlib is not installed: make .venv/bench")
            return None
        mpl.use("Agg")
        from matplotlib import pyplot as plt

        return plt

    def plot(
        self,
        file: str,
        title: str,
        series: dict[str, list[tuple[float, float]]],
        x: str,
        y: str,
        *,
        log_x: bool = False,
        log_y: bool = False,
        lines: dict[str, float] | None = None,
    ) -> None:
        """A PNG beside the JSON lines: one curve a series; `lines` are vertical marks."""
        if (plt := self.pyplot(file)) is None:
            return
        figure, axes = plt.subplots(figsize=(7, 4.5))
        for (label, points), mark in zip(series.items(), "osd^vx*+" * len(series), strict=False):
            ordered = sorted(points)
            axes.plot([a for a, _ in ordered], [b for _, b in ordered], marker=mark, label=label)
        for label, at in (lines or {}).items():
            axes.axvline(at, linestyle=":", color="grey")
            axes.annotate(label, (at, axes.get_ylim()[1]), fontsize=7, rotation=90, va="top", ha="right")
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(self.path(file), dpi=120)
        plt.close(figure)


def _short(text: str) -> str:
    """Returns a text that fits a line."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def median(values: Iterable[float]) -> float:
    """The median."""
    return float(statistics.median(values))


def best(results: dict[str, list[float]], pick: Callable[..., str] = max) -> str:
    """The label with the best median."""
    return pick(results, key=lambda label: median(results[label]))


def quantile(ordered: Any, q: float) -> float:
    """The q-quantile of a sorted list or array: the least value that at least this share does not exceed."""
    return float(ordered[min(len(ordered) - 1, max(0, -(-int(q * 1e6) * len(ordered) // 1_000_000) - 1))])


def about() -> dict[str, Any]:
    """The machine and the versions, for every line."""

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    model = ""
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = psutil.virtual_memory().total / 2**30
    return {
        "machine": {
            "cpu": model or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory, 1),
            "kernel": platform.release(),
            "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        },
        "versions": {
            "python": platform.python_version(),
            "penstock": of("penstock"),
            **{name: of(name) for name in _PEERS},
        },
    }


def pin(core: int) -> None:
    """Keep this thread, and the processes that it starts, on the core-th of the cores that we may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[core % len(cores)]})


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """As `pin`, for the length of a block."""
    before = os.sched_getaffinity(0)
    pin(core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for inputs and outputs, in shared memory where there is room, so that no disk is measured."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 2**30 else None
    path = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run_script(module: str, settings: dict[str, Any], *, timeout: float = 300, core: int | None = None) -> str:
    """Run `python -m MODULE SETTINGS` to its end in a process of its own; what it printed."""
    (printed,) = run_scripts(module, [settings], timeout=timeout, core=core)
    return printed


def run_scripts(
    module: str, settings: list[dict[str, Any]], *, timeout: float = 300, core: int | None = None
) -> list[str]:
    """As `run_script`, for several processes side by side; none is left when this returns or raises."""
    command = [sys.executable, "-m", module]
    before = os.sched_getaffinity(0)
    running: list[subprocess.Popen[str]] = []
    try:
        if core is not None:
            pin(core)
        for one in settings:
            running.append(  # noqa: PERF401
                subprocess.Popen(
                    [*command, json.dumps(one)],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        os.sched_setaffinity(0, before)
        printed = []
        for process in running:
            out, err = process.communicate(timeout=timeout)
            if process.returncode:
                raise RuntimeError(f"{module} ended with {process.returncode}:\n{err[-3000:]}")
            printed.append(out)
        return printed
    finally:
        os.sched_setaffinity(0, before)
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 60.0, every_s: float = 0.02) -> None:
    """Return when the condition holds; TimeoutError when it does not in time."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s: {what}")
        time.sleep(every_s)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


_started_ray = False


_RAY_STARTS = 3
_STORE_BYTES = 1 << 30  # as `run` has it for a job with Spark: RayDP's executors read micro-batches from there


def ray_cluster() -> None:
    """The one Ray of this invocation, started on first use; Penstock's jobs and the plain actors run in it. Ray gives a
    node half a minute to start, which is not enough on a busy machine, so it is started again."""
    global _started_ray
    import ray

    from penstock.actors import cluster
    from penstock.runtime.errors import NoCluster

    for left in reversed(range(_RAY_STARTS)):
        if ray.is_initialized():
            return
        try:
            cluster.connect("local", cpus=16, store_bytes=_STORE_BYTES)
            _started_ray = True
        except NoCluster:
            if not left:
                raise


def stop_ray() -> None:
    """End it, when it was started here: a caller's own Ray stays."""
    global _started_ray
    if _started_ray:
        import ray

        ray.shutdown()
        _started_ray = False


def run_job(flow: Any, *, timeout: float = 300.0, **options: Any) -> dict[str, Any]:
    """Run a Penstock flow to its end on the invocation's Ray, or with local=True without Ray; its last status."""
    from penstock.jobs.run import run

    if not options.get("local"):
        ray_cluster()
    return run(flow, **options).wait(timeout, progress=False)


def job_processes(job: Any) -> list[int]:
    """The processes of a running job: its workers and its JobMaster."""
    import ray

    master = ray.get(job._link.handle.__ray_call__.remote(lambda self: os.getpid()))
    return [*(worker["pid"] for worker in job.status()["workers"]), master]


def cpu_ns(pid: int) -> int:
    """The CPU time that all threads of a process have used, in ns; psutil has it in hundredths of a second only."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """A table that is no list of figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_cases(cases: list[Case]) -> None:
    """The table of all figures."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=False)
    for column in ("benchmark", "case", "figure", "unit", "peer", "peer's figure", "ratio", "goal", "met"):
        right = column in ("figure", "peer's figure", "ratio")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for case in cases:
        table.add_row(
            case.benchmark,
            case.name,
            shown(case.figure),
            case.unit,
            case.peer or "",
            shown(case.peer_figure),
            "" if case.ratio is None else f"{case.ratio:.2f}",
            case.goal or "",
            {None: "", True: "yes", False: "NO"}[case.met],
        )
    wide = None if sys.stdout.isatty() else 160
    Console(width=wide).print(table)


def shown(value: float | None) -> str:
    """A number with four digits that mean something."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
