"""Nexmark queries beside Flink SQL and Bytewax: how many events a second does each of them process? See README.md.

All read the same files of JSON lines, parse them, and drop the results. Penstock and Flink save their state once a
second; Bytewax saves nothing. Each runs on all cores of the machine, as two workers, two slots or two threads. The time
is that of the job, from its start until its last result: processes that must start before, a JVM or an interpreter, do
not count. Once, with few events, the results are written, and must be as many as the reference says.

Flink is its Java packages from PyPI (`make .venv/flink`). Without them, Bytewax alone stands beside Penstock.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec

import penstock as ps
from benchmarks.common import ROOT, Bench, WrongResult, median, print_table, run_script, scratch
from benchmarks.nexmark_bytewax import QUERIES as OF_BYTEWAX
from penstock.actors.run import run as start_job
from penstock.apps.nexmark.events import Events
from penstock.apps.nexmark.queries import QUERIES

ASKED = ("q1", "q2", "q4", "q5", "q7", "q8", "q11")
FLINK = ROOT / ".venv" / "flink" / "pyflink"
PARTS = 2  # files, and readers of them
_RATE = 10_000  # events a second of event time
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


def run(bench: Bench) -> None:
    """See the module."""
    with_flink = FLINK.is_dir() and shutil.which("java") is not None
    if not with_flink:
        bench.say("Flink is not installed (make .venv/flink, and Java 17), so Bytewax stands alone beside Penstock")
    rows = []
    with scratch() as folder:
        few = write(folder / "few", 50_000)
        many = write(folder / "many", bench.pick(1_000_000, 60_000))
        events = bench.pick(1_000_000, 60_000)
        for query in ASKED:
            _check(query, few, with_flink)
            contestants: dict[str, Any] = {"penstock": lambda query=query: penstock(query, many)}
            if with_flink:
                contestants["flink"] = lambda query=query: flink(query, many)
            if query in OF_BYTEWAX:
                contestants["bytewax"] = lambda query=query: bytewax(query, many)
            runs = bench.take_turns(contestants, (bench.runs + 1) // 2)
            rates = {name: [events / one["seconds"] for one in each] for name, each in runs.items()}
            for peer in ("flink", "bytewax"):
                if peer in rates:
                    bench.case(
                        f"{query}, events a second",
                        median(rates["penstock"]),
                        "events/s",
                        peer=peer,
                        peer_figure=median(rates[peer]),
                        runs=rates["penstock"],
                        peer_runs=rates[peer],
                        config=f"2 workers, local, epochs each second, {events:,} events",
                        goal=">= 1",
                    )
            shown = [
                f"{median(rates[name]):,.0f}" if name in rates else "-" for name in ("penstock", "flink", "bytewax")
            ]
            rows.append((query, *shown))
    print_table("Nexmark, events a second", ("query", "penstock", "flink", "bytewax"), rows)


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
