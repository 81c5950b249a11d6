"""What the two throughput benchmarks share: contestants of each system, trial of their forms, final rounds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks import ray_peer, stamps
from benchmarks.common import Bench, WrongResult, best, free_ports, median, run_job, run_script, run_scripts

_number = itertools.count()


class Input:
    """Text files, and what must come out: counts, or a number of lines."""

    def __init__(
        self, folder: Path, paths: list[str], lines: int, counts: Counter[str] | None, found: int | None
    ) -> None:
        self.paths = paths
        self.lines = lines
        self.counts = counts
        self.found = found
        self.out = folder / "out"
        self.out.mkdir(parents=True, exist_ok=True)

    def rate(self, who: str) -> float:
        """Lines a second of the run that has just ended, whose results are checked."""
        outcome = stamps.collect(self.out)
        if self.counts is not None:
            outcome.check(self.counts, who)
        if self.found is not None and outcome.received != self.found:
            raise WrongResult(f"{who}: {outcome.received} lines found, not {self.found}")
        return self.lines / outcome.seconds


def plain(flow: str) -> Callable[[Input], float]:
    """The loop, in a process of its own, on one core."""

    def run(data: Input) -> float:
        run_script("benchmarks.plain_peer", {"flow": flow, "paths": data.paths, "out": str(data.out)}, core=0)
        return data.rate("plain loop")

    return run


def penstock(
    build: Callable[[Input, str], ps.Flow], workers: int, parallelism: int | None, *, local: bool = False
) -> Callable[[Input], float]:
    """A Penstock job; build(input, name) makes its flow."""

    def run(data: Input) -> float:
        flow = build(data, f"bench-{next(_number)}")
        # The peers save nothing; what epochs cost is measured by checkpoint_cost.
        run_job(flow, workers=workers, parallelism=parallelism, epoch_interval_s=None, local=local)
        return data.rate("penstock")

    return run


def bytewax(flow: str, how: str, **form: Any) -> Callable[[Input], float]:
    """A Bytewax dataflow; `how` is "1 process", "2 threads" or "2 processes"."""

    def run(data: Input) -> float:
        settings = {"flow": flow, "paths": data.paths, "out": str(data.out), **form}
        if how == "2 processes":
            addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
            run_scripts(
                "benchmarks.bytewax_peer",
                [{**settings, "addresses": addresses, "process": process} for process in range(2)],
            )
        else:
            run_script("benchmarks.bytewax_peer", {**settings, "threads": 2 if how == "2 threads" else 1})
        return data.rate(f"bytewax {how} {form}")

    return run


def ray_actors(what: str, a_call: int, lines: int) -> Callable[[Input], float]:
    """Plain Ray actors over the first `lines` lines: they are too slow for all of them."""

    def run(data: Input) -> float:
        count = min(lines, data.lines)
        seconds, counts, found = ray_peer.run(data.paths, count, what, a_call)
        if what == "count" and sum(counts.values()) != count * 10:
            raise WrongResult(f"ray actors: {sum(counts.values())} words counted, not {count * 10}")
        if what == "count" and count == data.lines and counts != data.counts:
            raise WrongResult("ray actors: the counts are wrong")
        if what == "find" and count == data.lines and found != data.found:
            raise WrongResult(f"ray actors: {found} lines found")
        return count / seconds

    return run


System = dict[str, Callable[[Input], float]]


def compare(bench: Bench, systems: dict[str, System], trial: Input, full: Input, unit: str) -> dict[str, str]:
    """Try every form of each system once on a short input; let the two best forms of each take turns on the full
    one with those of the others. Records a case for each system beside the fastest form of Penstock; returns the
    best form of each."""
    finalists: dict[str, Callable[[], float]] = {}
    for system, forms in systems.items():
        rates = {form: [run(trial)] for form, run in forms.items()} if len(forms) > 1 else {f: [0.0] for f in forms}
        for form, (rate,) in rates.items():
            if rate:
                bench.say(f"trial of {system}, {form}: {rate:,.0f} {unit}")
        for form in sorted(rates, key=lambda form: -rates[form][0])[: bench.pick(2, 1)]:
            finalists[f"{system}: {form}"] = partial(forms[form], full)
    results = bench.take_turns(finalists, unit=unit)
    winners = {
        system: best({label: rates for label, rates in results.items() if label.startswith(f"{system}: ")})
        for system in systems
    }
    ours = winners["penstock"]
    for system in systems:
        if system == "penstock":
            continue
        theirs = winners[system]
        bench.case(
            f"{bench.name} beside {system}",
            median(results[ours]),
            unit,
            peer=system,
            peer_figure=median(results[theirs]),
            goal={"bytewax": ">= 4", "plain loop": ">= 0.65"}.get(system) if "wordcount" in bench.name else None,
            config=ours.partition(": ")[2],
            peer_config=theirs.partition(": ")[2],
            runs=results[ours],
            peer_runs=results[theirs],
        )
    return winners
