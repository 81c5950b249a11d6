"""The plain Ray contestants: a feeder in the driver, two actors that do the work; what one writes in an afternoon."""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from time import monotonic_ns
from typing import Any

from benchmarks.common import ray_cluster
from benchmarks.text import NEEDLE, key

ACTORS = 2
_UNDER_WAY = 1_000  # calls; enough to keep the actors busy, little enough to bound memory


class _Worker:
    """Counts words, or finds lines; each actor its share, put together at the end."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._found = 0
        self._search = re.compile(NEEDLE).search

    def count_one(self, line: str) -> None:
        counts = self._counts
        for word in line.split():
            counts[key(word)] += 1

    def count_many(self, lines: list[str]) -> None:
        for line in lines:
            self.count_one(line)

    def find_one(self, line: str) -> None:
        if self._search(line):
            self._found += 1

    def find_many(self, lines: list[str]) -> None:
        for line in lines:
            if self._search(line):
                self._found += 1

    def result(self) -> tuple[Counter[str], int]:
        return self._counts, self._found


def run(paths: list[str], lines: int, what: str, a_call: int) -> tuple[float, Counter[str], int]:
    """(seconds from the first read to the last result, counts, lines found) over the first `lines` lines.
    `what` is "count" or "find"; `a_call` lines go into one call."""
    import ray

    ray_cluster()
    actors = [ray.remote(_Worker).options(num_cpus=1).remote() for _ in range(ACTORS)]
    ray.get([actor.result.remote() for actor in actors])
    methods = [getattr(actor, f"{what}_{'one' if a_call == 1 else 'many'}") for actor in actors]
    texts = islice((line.rstrip("\n") for path in paths for line in open(path, encoding="utf-8")), lines)  # noqa: SIM115
    pending: list[Any] = []
    turn = 0
    started = monotonic_ns()
    while part := list(islice(texts, a_call)):
        pending.append(methods[turn].remote(part[0] if a_call == 1 else part))
        turn = (turn + 1) % ACTORS
        if len(pending) >= _UNDER_WAY:
            _, pending = ray.wait(pending, num_returns=_UNDER_WAY // 2)
    ray.get(pending)
    counts: Counter[str] = Counter()
    found = 0
    for part_counts, part_found in ray.get([actor.result.remote() for actor in actors]):
        counts += part_counts
        found += part_found
    seconds = (monotonic_ns() - started) / 1e9
    for actor in actors:
        ray.kill(actor)
    return seconds, counts, found
