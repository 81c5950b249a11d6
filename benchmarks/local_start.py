"""Local jobs beside Ray, Bytewax and a plain loop: start to the first result, memory, throughput, latency; see
README.md."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

from benchmarks import text, wordcount_latency, wordcount_throughput
from benchmarks.common import Bench, median, run_script, scratch
from benchmarks.latency import Load, bare
from benchmarks.latency import bytewax as paced_bytewax
from benchmarks.latency import penstock as paced
from benchmarks.local_peer import WORKERS
from benchmarks.throughput import Input, bytewax, penstock, plain

RATE = 20_000
MIB = 1 << 20


def run(bench: Bench) -> None:
    """See the module."""
    has_bytewax = importlib.util.find_spec("bytewax") is not None
    if not has_bytewax:
        bench.say("without Bytewax, which is not installed: make .venv/bench")
    _start(bench, ["local", "ray", *(["bytewax"] if has_bytewax else [])])
    _throughput(bench, has_bytewax)
    _latency(bench, has_bytewax)


def _start(bench: Bench, whom: list[str]) -> None:
    def first(who: str) -> Callable[[], dict[str, float]]:
        def start() -> dict[str, float]:
            with scratch() as folder:
                found: dict[str, float] = json.loads(
                    run_script("benchmarks.local_peer", {"who": who, "place": str(folder / "first")})
                )
                return found

        return start

    results = bench.take_turns({who: first(who) for who in whom})
    for who in whom[1:]:
        for what, name, unit, size, goal in (
            ("seconds", "run() to the first result", "s", 1, "<= 0.7"),
            ("bytes", "memory of all processes (PSS)", "MiB", MIB, "<= 150"),
        ):
            ours, theirs = ([result[what] / size for result in results[one]] for one in ("local", who))
            bench.case(
                f"{name} beside {who}",
                median(ours),
                unit,
                peer=who,
                peer_figure=median(theirs),
                goal=goal if who == "ray" else None,
                config=f"{WORKERS} workers",
                note="the goal is that of the local job alone",
                runs=ours,
                peer_runs=theirs,
            )


def _throughput(bench: Bench, has_bytewax: bool) -> None:
    build = wordcount_throughput.build("final")
    contestants = {
        "local": penstock(build, WORKERS, WORKERS, local=True),
        "ray": penstock(build, WORKERS, WORKERS),
        "plain loop": plain("wordcount"),
    }
    if has_bytewax:
        contestants["bytewax"] = bytewax("wordcount", "2 processes", input="batch", count="final")
    with scratch() as folder:
        lines = text.sentences(bench.pick(500_000, 20_000))
        data = Input(folder, text.write_text(folder, lines), len(lines), text.count_words(lines), None)
        results = bench.take_turns(
            {who: lambda contestant=contestant: contestant(data) for who, contestant in contestants.items()},
            unit="sentences/s",
        )
    for who in list(contestants)[1:]:
        bench.case(
            f"throughput beside {who}",
            median(results["local"]),
            "sentences/s",
            peer=who,
            peer_figure=median(results[who]),
            config=f"{WORKERS} workers, without epochs",
            runs=results["local"],
            peer_runs=results[who],
        )


def _latency(bench: Bench, has_bytewax: bool) -> None:
    contestants = {
        "local": paced(wordcount_latency.build, WORKERS, WORKERS, local=True),
        "ray": paced(wordcount_latency.build, WORKERS, WORKERS),
        "plain loop": bare,
    }
    if has_bytewax:
        contestants["bytewax"] = paced_bytewax("batch", "due", 1)
    with scratch() as folder:
        load = Load(folder, "wordcount_latency", RATE, bench.pick(10.0, 2.0))
        results = bench.take_turns(
            {who: lambda contestant=contestant: contestant(load) for who, contestant in contestants.items()}
        )
    for who in list(contestants)[1:]:
        for what in ("p50", "p99"):
            ours, theirs = ([result[what] for result in results[one]] for one in ("local", who))
            bench.case(
                f"{what} at {RATE:,}/s beside {who}",
                median(ours),
                "ms",
                peer=who,
                peer_figure=median(theirs),
                config=f"{WORKERS} workers, without epochs",
                runs=ours,
                peer_runs=theirs,
            )
