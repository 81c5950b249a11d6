"""Nexmark queries beside Flink SQL and Bytewax: events a second, and delays of results. See README.md.

For the events a second, all read the same files of JSON lines, parse them, and drop the results. Penstock and Flink
save their state once a second; Bytewax saves nothing. Each runs on all cores of the machine, as two workers, two slots
or two threads. The time is that of the job, from its start until its last result: processes that must start before, a
JVM or an interpreter, do not count, and Flink's JVM has run the same job once before. Once, with few events, the
results are written, and must be as many as the reference says.

For the delays, all read the same lines from a socket (nexmark_load.py), each query at half of what the slowest of them
has just processed a second, and write when each result was due and when it was there. A result of one event is due with
the event, a window's with its end. A result of q4 is due when its auction closes; Flink corrects q4 with each bid
instead, so there it is due with the newest bid.

Flink is its Java packages from PyPI (`make .venv/flink`). Without them, Bytewax alone stands beside Penstock.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import penstock as ps
from benchmarks.common import ROOT, Bench, WrongResult, median, print_table, run_script, scratch
from benchmarks.nexmark_bytewax import QUERIES as OF_BYTEWAX
from benchmarks.nexmark_load import Load, measure
from penstock.apps.nexmark.events import Events
from penstock.apps.nexmark.queries import QUERIES
from penstock.jobs.run import run as start_job

ASKED = ("q1", "q2", "q4", "q5", "q7", "q8", "q11")
FLINK = ROOT / ".venv" / "flink" / "pyflink"
PARTS = 2  # files, and readers of them
_RATE = 10_000  # events a second of event time
_STATELESS = ("q1", "q2")
# The queries whose delays are measured with --quick: one without and one with windows.
_DELAYS_QUICK = ("q1", "q5")
_EVENTS, _EVENTS_STATELESS = 1_000_000, 4_000_000  # so that no contestant's run is shorter than some seconds
_NAMES = ("penstock", "flink", "bytewax")
_number = itertools.count()


def parse(line: str) -> dict[str, Any]:
    """Returns the event of a line."""
    return _decode(line)  # type: ignore[no-any-return]


_decode = msgspec.json.decode


def write(folder: Path, count: int) -> list[str]:
    """Writes the first events, in turn to each of the files."""
    folder.mkdir()
    encode = msgspec.json.Encoder().encode
    paths = [folder / f"{part}.json" for part in range(PARTS)]
    files = [path.open("wb") for path in paths]
    for number, event in enumerate(Events(1, count, rate=_RATE)):
        files[number % PARTS].write(encode(event) + b"\n")
    for file in files:
        file.close()
    return [str(path) for path in paths]


def penstock(query: str, files: list[str]) -> dict[str, float]:
    """Runs a query as a local job. Returns its seconds and the number of its results."""
    flow = ps.Flow(f"bench-nexmark-{next(_number)}", parallelism=PARTS)
    lines = flow.read(ps.sources.TextFiles(files, parallel=False), name="lines")  # a task reads a file in its order
    events = lines.map(parse, name="parse").watermark("date_time", name="watermark")
    QUERIES[query](events).write(ps.sinks.Null(), name="results")
    job = start_job(flow, workers=PARTS, local=True, epoch_interval_s=1.0)
    job.wait(600, progress=False)
    status = job.status()
    return {"seconds": status["running_s"], "results": status["operators"]["results"]["records_in"]}


def flink(query: str, files: list[str], *, check: bool = False) -> dict[str, float]:
    """The same by Flink SQL, in a JVM of its own."""
    asked = {"query": query, "folder": str(Path(files[0]).parent), "home": str(FLINK), "check": check}
    found: dict[str, float] = json.loads(run_script("benchmarks.nexmark_flink", asked, timeout=900).splitlines()[-1])
    return found


def bytewax(query: str, files: list[str]) -> dict[str, float]:
    """The same by Bytewax, in a process of its own with two worker threads."""
    found: dict[str, float] = json.loads(
        run_script("benchmarks.nexmark_bytewax", {"query": query, "files": files}, timeout=900).splitlines()[-1]
    )
    return found


def _delays(bench: Bench, query: str, rate: float, with_flink: bool) -> dict[str, dict[str, float]]:
    """Measures the delays of each contestant at a rate."""
    stateless = query in _STATELESS  # the others have windows of ten seconds
    seconds, warm = bench.pick((12.0, 4.0), (3.0, 1.0)) if stateless else bench.pick((36.0, 12.0), (14.0, 2.0))
    load = Load(rate, seconds)
    home = {"query": query, "home": str(FLINK), "check": False}
    contestants: dict[str, Callable[[int, Path], object]] = {
        "penstock": lambda port, folder: run_script(
            "benchmarks.nexmark_penstock", {"query": query, "port": port, "out": str(folder)}
        )
    }
    if with_flink:
        contestants["flink"] = lambda port, folder: run_script(
            "benchmarks.nexmark_flink", {**home, "port": port, "out": str(folder)}
        )
    if query in OF_BYTEWAX:
        contestants["bytewax"] = lambda port, folder: run_script(
            "benchmarks.nexmark_bytewax", {"query": query, "port": port, "out": str(folder)}
        )
    found = {}
    for name, contestant in contestants.items():
        with scratch() as folder:
            found[name] = measure(load, warm, contestant, folder)
        bench.say(f"{query} at {rate:,.0f} events/s, {name}: {found[name]}")
    if query != "q4" and with_flink and found["penstock"]["results"] != found["flink"]["results"]:
        raise WrongResult(f"{query}: {found}")
    return found


def run(bench: Bench) -> None:
    """See the module."""
    with_flink = FLINK.is_dir() and shutil.which("java") is not None
    if not with_flink:
        bench.say("Flink is not installed (make .venv/flink, and Java 17), so Bytewax stands alone beside Penstock")
    rows = []
    with scratch() as folder:
        few = write(folder / "few", 50_000)
        sizes = {query: bench.pick(_EVENTS_STATELESS if query in _STATELESS else _EVENTS, 60_000) for query in ASKED}
        files = {size: write(folder / f"{size}", size) for size in sorted(set(sizes.values()))}
        for query in ASKED:
            _check(query, few, with_flink)
            events = sizes[query]
            many = files[events]
            contestants: dict[str, Any] = {"penstock": partial(penstock, query, many)}
            if with_flink:
                contestants["flink"] = partial(flink, query, many)
            if query in OF_BYTEWAX:
                contestants["bytewax"] = partial(bytewax, query, many)
            runs = bench.take_turns(contestants, (bench.runs + 1) // 2)
            rates = {name: [events / one["seconds"] for one in each] for name, each in runs.items()}
            config = f"2 workers, local, epochs each second, {events:,} events"
            peers = [name for name in _NAMES[1:] if name in rates]
            for peer in peers:
                bench.case(
                    f"{query}, events a second",
                    median(rates["penstock"]),
                    "events/s",
                    peer=peer,
                    peer_figure=median(rates[peer]),
                    runs=rates["penstock"],
                    peer_runs=rates[peer],
                    config=config,
                    goal=">= 1",
                )
            rate = min(min(map(median, rates.values())) / 2, bench.pick(math.inf, 5_000))
            measured = query in bench.pick(ASKED, _DELAYS_QUICK)
            delays = _delays(bench, query, rate, with_flink) if measured else {}
            for peer in peers if measured else ():
                bench.case(
                    f"{query}, p99 at {rate:,.0f} events/s",
                    delays["penstock"]["p99"],
                    "ms",
                    peer=peer,
                    peer_figure=delays[peer]["p99"],
                    config="2 workers, local, epochs each second, lines from a socket",
                    note=", ".join(f"{each['results']:,} results of {name}" for name, each in delays.items()),
                    goal="<= 1",
                )
            row = [query, *(f"{median(rates[name]):,.0f}" if name in rates else "-" for name in _NAMES), f"{rate:,.0f}"]
            row += ["{p50:,.1f} / {p99:,.1f}".format(**delays[name]) if name in delays else "-" for name in _NAMES]
            rows.append(tuple(row))
    print_table(
        "Nexmark: events a second, and at half of the slowest's the p50 / p99 of the delays in ms",
        ("query", *_NAMES, "at", *(f"{name}'s delays" for name in _NAMES)),
        rows,
    )


def _check(query: str, files: list[str], with_flink: bool) -> None:
    """Compares how many results each of them has. Flink and Penstock correct the results of q4 in other batches."""
    if query == "q4":
        return
    wanted = penstock(query, files)["results"]
    others = {"flink": flink(query, files, check=True)["results"]} if with_flink else {}
    if query in OF_BYTEWAX:
        others["bytewax"] = bytewax(query, files)["results"]
    for name, found in others.items():
        if found != wanted:
            raise WrongResult(f"{query}: Penstock has {wanted:,} results, {name} {found:,}")
