"""Sentences a second: split into words, count by key, every system over the same files; see README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import penstock as ps
from benchmarks import text
from benchmarks.common import Bench, scratch
from benchmarks.penstock_parts import StampedSink, StampedText
from benchmarks.stamps import Counts
from benchmarks.throughput import Input, System, bytewax, compare, penstock, plain, ray_actors


def build(emit: Literal["latest", "final"]) -> Callable[[Input, str], ps.Flow]:
    """Makes the flow."""

    def flow(data: Input, name: str) -> ps.Flow:
        made = ps.Flow(name)
        (
            made.read(StampedText(data.paths, str(data.out)))
            .flat_map(str.split)
            .key_by(text.key)
            .count(emit=emit)
            .write(StampedSink(Counts, str(data.out)))
        )
        return made

    return flow


def run(bench: Bench) -> None:
    """See the module."""
    emits: tuple[Literal["latest", "final"], ...] = ("final", "latest")
    forms: System = {
        f"{workers} worker{'s' * (workers > 1)}, parallelism {parallelism}, {emit}": penstock(
            build(emit), workers, parallelism
        )
        for workers, parallelism in bench.pick([(1, 1), (1, 2), (2, 1), (2, 2)], [(1, 1), (2, 2)])
        for emit in bench.pick(emits, emits[:1])
    }
    bytewax_forms: System = {
        f"{how}, {form} input, {count}": bytewax("wordcount", how, input=form, count=count)
        for how in bench.pick(["1 process", "2 threads", "2 processes"], ["1 process", "2 processes"])
        for form in bench.pick(["line", "batch"], ["batch"])
        for count in bench.pick(["final", "stateful", "stateful_batch"], ["final"])
    }
    combined: System = {
        f"{how}, {count}": bytewax("wordcount", how, input="combined", count=count)
        for how in bench.pick(["1 process", "2 processes"], ["1 process"])
        for count in ["final"]
    }
    systems: dict[str, System] = {
        "penstock": forms,
        "plain loop": {"one process, core 0": plain("wordcount")},
        "bytewax": bytewax_forms,
        "bytewax, user combines": combined,
        "ray actors, 1 a call": {"2 actors": ray_actors("count", 1, bench.pick(20_000, 2_000))},
        "ray actors, 100 a call": {"2 actors": ray_actors("count", 100, bench.pick(500_000, 20_000))},
    }
    with scratch() as folder:
        lines = text.sentences(bench.pick(1_000_000, 20_000))
        short = lines[: bench.pick(200_000, 10_000)]
        inputs = []
        for name, some in (("trial", short), ("full", lines)):
            (folder / name).mkdir()
            inputs.append(
                Input(folder / name, text.write_text(folder / name, some), len(some), text.count_words(some), None)
            )
        del lines, short
        compare(bench, systems, inputs[0], inputs[1], "sentences/s")
