"""The settling campaign: whether jobs that replan move their tasks at most once for each change of their traffic.

    python -m tests.placement.settling --series 200 --seed 1

Each series has a random job on two nodes of two workers. Its traffic changes twice, by up to ten times for each two
tasks, and at any time within a period. Everything that is measured is off by up to a tenth, in each period anew, and is
smoothed as in a Monitor. The measurements go through the planner, `decide` and the rest after a move, as in a Placer. A
series with more than one migration between two changes is told of, and ends the campaign with exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from penstock.placement.adoption import AdoptionOptions, decide, resting
from penstock.placement.monitor import RECORD_BYTES
from penstock.placement.placement import Placement, workers_of
from penstock.placement.planner import plan
from penstock.placement.traffic import Node, TrafficGraph
from tests.placement.exact import edges_of
from tests.placement.random_topologies import topology

NODES = (Node("a", 2), Node("b", 2))
NOISE = 0.1
PERIOD_S = 10.0
PHASES = 3
# The first two show what was adopted, the two after them are the rest after a move, and in the others noise could move.
PERIODS_A_PHASE = 8
# Of a new measurement, with two half-lives a period.
_NEW = 0.75
_RECORD_BYTES = 100.0


def migrations(seed: int, tasks: int) -> list[int]:
    """Returns how often a job of up to so many tasks moves some of them in each phase of its traffic."""
    chance = random.Random(seed)
    shape = topology(chance, chance.randint(4, tasks))
    scale = 10 ** chance.uniform(3, 5.5)
    first = {(a, b): scale * traffic for a, b, traffic in edges_of(shape)}
    cpu = [0.1 * weight for weight in shape.cpu.tolist()]
    options = AdoptionOptions()
    running = Placement(NODES, workers_of(NODES), tuple(task % 4 for task in range(len(shape))))
    now_s, moved_s = 0.0, -options.rest_s
    rates, smoothed, found = first, dict[tuple[int, int], float](), []
    for phase in range(PHASES):
        before = rates
        if phase:
            rates = {edge: rate * 10 ** chance.uniform(-1, 1) for edge, rate in first.items()}
        moves = 0
        for period in range(PERIODS_A_PHASE):
            old = chance.random() if phase and not period else 0.0
            for edge, rate in rates.items():
                seen = (old * before[edge] + (1 - old) * rate) * chance.uniform(1 - NOISE, 1 + NOISE)
                was = smoothed.get(edge, seen)
                smoothed[edge] = was + _NEW * (seen - was)
            now_s += PERIOD_S
            if resting(now_s - moved_s, options) is not None:
                continue
            records = TrafficGraph.of(len(shape), [(a, b, rate) for (a, b), rate in smoothed.items()])
            size = _RECORD_BYTES + RECORD_BYTES
            graph = TrafficGraph.of(len(shape), [(a, b, size * rate) for (a, b), rate in smoothed.items()], cpu=cpu)
            new = plan(graph, NODES, factor=options.factor, running=running)
            if decide(running, new, graph, options, records=records).adopt:
                running, moved_s = new, now_s
                moves += 1
        found.append(moves)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=8, help="the most tasks of a job")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts: Counter[int] = Counter()
    for seed in range(options.seed, options.seed + options.series):
        found = migrations(seed, options.tasks)
        counts.update(found)
        if max(found) > 1:
            print(f"seed {seed}: {found} migrations by phase", flush=True)
    told = ", ".join(f"{moves} migrations: {count:,}" for moves, count in sorted(counts.items()))
    print(f"{options.series:,} series, phases with {told}")
    return int(max(counts) > 1)


if __name__ == "__main__":
    sys.exit(main())
