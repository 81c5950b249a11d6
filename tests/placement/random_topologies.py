"""Random jobs: components of some tasks each, fed by shuffles or task by task."""

from __future__ import annotations

import random

from penstock.placement.shape import TrafficEdge
from penstock.placement.traffic import TrafficGraph


def edges(chance: random.Random, tasks: int, widest: int) -> list[TrafficEdge]:
    """The traffic of a job of so many tasks, in components of up to `widest`."""
    components: list[range] = []
    made = 0
    while made < tasks:
        width = min(chance.randint(1, widest), tasks - made)
        components.append(range(made, made + width))
        made += width
    found: list[TrafficEdge] = []
    for number, component in enumerate(components[1:], 1):
        for of in {chance.randrange(max(0, number - 3), number) for _ in range(chance.choice([1, 1, 2]))}:
            feeding = components[of]
            traffic = chance.expovariate(1) + 0.05
            if chance.random() < 0.4:
                found += [(feeding[i % len(feeding)], task, traffic) for i, task in enumerate(component)]
            else:
                each = traffic / len(component) / len(feeding)
                found += [(a, b, each * chance.uniform(0.5, 2)) for b in component for a in feeding]
    return found


def topology(chance: random.Random, tasks: int, widest: int = 6) -> TrafficGraph:
    """The graph of such a job, whose tasks differ in weight by a factor of four at most."""
    return TrafficGraph.of(tasks, edges(chance, tasks, widest), cpu=[chance.uniform(0.5, 2) for _ in range(tasks)])
