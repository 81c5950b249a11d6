"""All graphs of a few tasks, each once up to the names of its tasks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

Pairs = frozenset[tuple[int, int]]


@cache
def graphs(tasks: int) -> tuple[Pairs, ...]:
    """The graphs of so many tasks, as their edges (u < v): 1, 2, 4, 11, 34, 156, 1044, 12346, ..."""
    if tasks == 0:
        return (frozenset(),)
    new = tasks - 1
    found: dict[Pairs, None] = {}
    # Any graph is one of a task fewer, and a task that talks to some of its tasks.
    for smaller in graphs(tasks - 1):
        for joined in _subsets(new):
            found[_canonical(tasks, smaller | {(u, new) for u in joined})] = None
    return tuple(found)


def _subsets(tasks: int) -> Iterator[tuple[int, ...]]:
    for size in range(tasks + 1):
        yield from itertools.combinations(range(tasks), size)


def _canonical(tasks: int, pairs: Pairs) -> Pairs:
    """The same for graphs that differ in names only: the least of those that come of renaming, where a task's name may
    only fall among those of its colour; colours tell tasks apart by their neighbours', as far as that goes."""
    near: list[list[int]] = [[] for _ in range(tasks)]
    for u, v in pairs:
        near[u].append(v)
        near[v].append(u)
    colours = [len(them) for them in near]
    while True:
        seen = [(colours[v], tuple(sorted(colours[u] for u in near[v]))) for v in range(tasks)]
        order = {what: number for number, what in enumerate(sorted(set(seen)))}
        finer = [order[what] for what in seen]
        if len(set(finer)) == len(set(colours)):
            break
        colours = finer
    classes = [[v for v in range(tasks) if finer[v] == colour] for colour in sorted(set(finer))]
    best: tuple[tuple[int, int], ...] | None = None
    for arranged in itertools.product(*(itertools.permutations(them) for them in classes)):
        name = {v: place for place, v in enumerate(itertools.chain(*arranged))}
        renamed = tuple(sorted((min(name[u], name[v]), max(name[u], name[v])) for u, v in pairs))
        if best is None or renamed < best:
            best = renamed
    return frozenset(best or ())
