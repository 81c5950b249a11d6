"""Due time of a sentence to the update of each of its words at the sink; see README.md."""

from __future__ import annotations

from typing import Any

import penstock as ps
from benchmarks.common import Bench
from benchmarks.latency import Contestant, bare, bytewax_forms, compare, penstock
from benchmarks.pacing import split, word_of


def running(ctx: ps.ProcessContext, word: str, pair: tuple[str, int]) -> tuple[tuple[str, int, int], ...]:
    """The user's running count, which passes the due time on."""
    count = ctx.get(0) + 1
    ctx.set(count)
    return ((word, pair[1], count),)


def build(flow: ps.Flow, records: ps.Stream, keyed: int) -> Any:
    """The operators."""
    return records.flat_map(split).key_by(word_of).process(running, parallelism=keyed)


def run(bench: Bench) -> None:
    """See the module."""
    forms = {
        "1 worker": penstock(build, 1, 1),
        "2 workers, 2 counting tasks": penstock(build, 2, 2),
    }
    systems: dict[str, dict[str, Contestant]] = {
        "penstock": forms,
        **bytewax_forms(bench),
        "feeder and loop": {"a pipe between, cores 0 and 1": bare},
    }
    compare(bench, systems, bench.pick((1_000, 20_000), (20_000,)))
