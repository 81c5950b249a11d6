"""Lines a second through a regular expression that one line in a hundred matches; see README.md."""

from __future__ import annotations

import re

import penstock as ps
from benchmarks import text
from benchmarks.common import Bench, scratch
from benchmarks.penstock_parts import StampedSink, StampedText
from benchmarks.stamps import Lines
from benchmarks.throughput import Input, System, bytewax, compare, penstock, plain, ray_actors


def build(data: Input, name: str) -> ps.Flow:
    """The flow."""
    flow = ps.Flow(name)
    found = flow.read(StampedText(data.paths, str(data.out))).filter(re.compile(text.NEEDLE).search)
    found.write(StampedSink(Lines, str(data.out)))
    return flow


def run(bench: Bench) -> None:
    """See the module."""
    forms: System = {f"{workers} worker{'s' * (workers > 1)}": penstock(build, workers, None) for workers in (1, 2)}
    bytewax_forms: System = {
        f"{how}, {form} input": bytewax("grep", how, input=form)
        for how in bench.pick(["1 process", "2 threads", "2 processes"], ["1 process"])
        for form in bench.pick(["line", "batch"], ["batch"])
    }
    systems: dict[str, System] = {
        "penstock": forms,
        "plain loop": {"one process, core 0": plain("grep")},
        "bytewax": bytewax_forms,
        "ray actors, 1 a call": {"2 actors": ray_actors("find", 1, bench.pick(20_000, 2_000))},
        "ray actors, 100 a call": {"2 actors": ray_actors("find", 100, bench.pick(500_000, 20_000))},
    }
    with scratch() as folder:
        lines = text.sentences(bench.pick(2_000_000, 40_000), marked=True)
        short = lines[: bench.pick(400_000, 20_000)]
        inputs = []
        for name, some in (("trial", short), ("full", lines)):
            (folder / name).mkdir()
            found = sum(text.NEEDLE in line for line in some)
            inputs.append(Input(folder / name, text.write_text(folder / name, some), len(some), None, found))
        del lines, short
        compare(bench, systems, inputs[0], inputs[1], "lines/s")
