"""What the two latency benchmarks share: the same paced records and the same user functions in every system."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import penstock as ps
from benchmarks import pacing, text
from benchmarks.common import Bench, median, run_job, run_script, scratch
from benchmarks.pacing import Latencies, Pacer
from benchmarks.penstock_parts import LatencySink, Paced

_number = itertools.count()
_POOL = 2_000  # different sentences
GOALS = {"bytewax": "<= 0.7", "bytewax, spinning": "<= 0.7"}


class Load:
    """One rate: the input, and what must arrive."""

    def __init__(self, folder: Path, flow: str, rate: int, seconds: float) -> None:
        self.flow = flow
        self.rate = rate
        self.records = int(rate * seconds)
        self.skip_s = seconds / 4  # the start is not measured
        self.texts = text.sentences(_POOL, marked=flow == "grep_latency")
        self.file = folder / "texts.txt"
        self.file.write_text("\n".join(self.texts) + "\n")
        self.out = folder / "out"
        self.out.mkdir(exist_ok=True)
        whole, rest = divmod(self.records, _POOL)
        self.expected: Counter[str] = Counter()
        for times, part in ((whole, self.texts), (1, self.texts[:rest])):
            if flow == "wordcount_latency":
                for word, n in text.count_words(part).items():
                    self.expected[word] += n * times
            else:
                self.expected |= Counter({line: 1 for line in part if times and text.NEEDLE in line})
        self.expected = +self.expected
        if flow == "wordcount_latency":
            self.updates = sum(self.expected.values())
        else:
            self.updates = sum(
                times * sum(text.NEEDLE in line for line in part)
                for times, part in ((whole, self.texts), (1, self.texts[:rest]))
            )

    def pacer(self) -> Pacer:
        """The input."""
        return Pacer(self.texts, self.rate, self.records)

    def settings(self, **more: Any) -> dict[str, Any]:
        """For a contestant in a process of its own."""
        return {
            "flow": self.flow,
            "rate": self.rate,
            "records": self.records,
            "updates": self.updates,
            "texts": str(self.file),
            "out": str(self.out),
            **more,
        }

    def result(self, who: str) -> dict[str, float]:
        """The checked latencies of the run that has just ended."""
        return pacing.collect(self.out, dict(self.expected), self.updates, who, self.skip_s)


Contestant = Callable[[Load], dict[str, float]]


def penstock(
    build: Callable[[ps.Flow, ps.Stream, int], ps.Stream], workers: int, keyed: int, *, local: bool = False
) -> Contestant:
    """A Penstock job: one source task, `keyed` tasks after the key. build(stream, keyed) adds the operators."""

    def run(load: Load) -> dict[str, float]:
        flow = ps.Flow(f"bench-latency-{next(_number)}", parallelism=1)
        stream = build(flow, flow.read(Paced(load.pacer())), keyed)
        stream.write(LatencySink(Latencies(str(load.out), load.updates)), parallelism=keyed)
        run_job(flow, workers=workers, epoch_interval_s=None, local=local)  # as the peers, which save nothing
        return load.result("penstock")

    return run


def bytewax(form: str, awake: str, threads: int) -> Contestant:
    """A Bytewax dataflow in one process."""

    def run(load: Load) -> dict[str, float]:
        run_script("benchmarks.bytewax_peer", load.settings(input=form, awake=awake, threads=threads))
        return load.result("bytewax")

    return run


def bare(load: Load) -> dict[str, float]:
    """A feeder and a loop with a pipe between."""
    run_script("benchmarks.plain_peer", load.settings())
    return load.result("feeder and loop")


def compare(bench: Bench, systems: dict[str, dict[str, Contestant]], rates: tuple[int, ...]) -> None:
    """For each rate: a short trial of all forms, the best two of each system (by p99) take turns."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for rate in rates:
        with scratch() as folder:
            (folder / "trial").mkdir()
            (folder / "full").mkdir()
            trial = Load(folder / "trial", bench.name, rate, bench.pick(3.0, 1.0))
            full = Load(folder / "full", bench.name, rate, bench.pick(10.0, 2.0))
            finalists: dict[str, Callable[[], dict[str, float]]] = {}
            for system, forms in systems.items():
                tried = {form: contestant(trial) for form, contestant in forms.items()} if len(forms) > 1 else {}
                for form, latency in tried.items():
                    bench.say(f"trial at {rate}/s of {system}, {form}: {pacing.show(latency)}")
                order = sorted(forms, key=lambda form: tried[form]["p99"] if tried else 0)
                for form in order[: bench.pick(2, 1)]:
                    finalists[f"{system}: {form}"] = partial(forms[form], full)
            results = bench.take_turns(finalists)
            for what in ("p50", "p99"):
                winners = {}
                for system in systems:
                    mine = [label for label in results if label.startswith(f"{system}: ")]
                    # The form with the best p99 gives both figures, or each could be another's.
                    winners[system] = min(mine, key=lambda label: median(r["p99"] for r in results[label]))
                    curves.setdefault(f"{system} {what}", []).append(
                        (rate, median(r[what] for r in results[winners[system]]))
                    )
                ours = [r[what] for r in results[winners["penstock"]]]
                for system in systems:
                    if system == "penstock":
                        continue
                    theirs = [r[what] for r in results[winners[system]]]
                    bench.case(
                        f"{what} at {rate:,}/s beside {system}",
                        median(ours),
                        "ms",
                        peer=system,
                        peer_figure=median(theirs),
                        goal=GOALS.get(system) if bench.name == "wordcount_latency" and rate == max(rates) else None,
                        config=winners["penstock"].partition(": ")[2],
                        peer_config=winners[system].partition(": ")[2],
                        note=f"max {max(r['max'] for r in results[winners['penstock']]):.2f} ms",
                        runs=ours,
                        peer_runs=theirs,
                    )
    bench.plot(f"{bench.name}.png", bench.name, curves, "records/s", "ms", log_x=True, log_y=True)


def bytewax_forms(bench: Bench) -> dict[str, dict[str, Contestant]]:
    """All forms in which the Bytewax dataflows are tried; those that look for input all the time, and so use a whole
    core whatever the load, apart."""

    def forms(*looks: str) -> dict[str, Contestant]:
        return {
            f"{form} input, awake {awake}, {threads} thread{'s' * (threads > 1)}": bytewax(form, awake, threads)
            for form in bench.pick(["line", "batch"], ["batch"])
            for awake in looks
            for threads in bench.pick([1, 2], [1])
        }

    return {
        "bytewax": forms(*bench.pick(["due", "auto"], ["due"])),
        "bytewax, spinning": forms("spin"),
    }
