"""Due time of a line to its arrival at the sink, when it matches; see README.md."""

from __future__ import annotations

import re
from typing import Any

import penstock as ps
from benchmarks.common import Bench
from benchmarks.latency import Contestant, bare, bytewax_forms, compare, penstock
from benchmarks.text import NEEDLE

_search = re.compile(NEEDLE).search


def matches(record: tuple[int, str]) -> bool:
    """The user's filter."""
    return _search(record[1]) is not None


def shape(record: tuple[int, str]) -> tuple[str, int, int]:
    """(line, due ns, 1), as the sink takes it."""
    return record[1], record[0], 1


def build(flow: ps.Flow, records: ps.Stream, keyed: int) -> Any:
    """The operators."""
    return records.filter(matches).map(shape)


def build_apart(flow: ps.Flow, records: ps.Stream, keyed: int) -> Any:
    """The same with the search in another worker than the source."""
    return records.rebalance().filter(matches, parallelism=2).map(shape, parallelism=2).to_first()


def run(bench: Bench) -> None:
    """See the module."""
    systems: dict[str, dict[str, Contestant]] = {
        "penstock": {"1 worker": penstock(build, 1, 1), "2 workers, 2 searching tasks": penstock(build_apart, 2, 1)},
        **bytewax_forms(bench),
        "feeder and loop": {"a pipe between, cores 0 and 1": bare},
    }
    compare(bench, systems, bench.pick((1_000, 20_000), (20_000,)))
