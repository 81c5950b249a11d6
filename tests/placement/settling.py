"""The settling campaign: whether jobs that replan move their tasks at most once for each change of their traffic.

    python -m tests.placement.settling --series 200 --seed 1

Each series has a random job on two nodes of two workers. Its traffic and its load change twice, by up to ten times for
each two tasks and up to three times for each task, and at any time within a period. Everything that is measured is off
by up to a tenth, in each period anew, and is smoothed as in a Monitor. `--noise 0` measures exactly. How many records
come in a message is another number for each two tasks, up to four times as many, when the traffic has changed and when
tasks have moved. What hops cost and how long they take differs between jobs, and is off by up to three tenths in each
period. How old records are depends on the placement: in a third of the plans it is half as much again as before, and in
the others a tenth to three tenths less; it is off by up to a twentieth. What was measured goes through a Replanner, as
in a Placer. Tasks may move once between two changes, and back once when their records are older. A series with more is
told of, and ends the campaign with exit code 1, as does one whose tasks stay where records are older, or leave where
they are not.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pool

from penstock.placement.adoption import AdoptionOptions
from penstock.placement.hop_latencies import HopLatencies
from penstock.placement.monitor import RECORD_BYTES
from penstock.placement.placement import Placement, workers_of
from penstock.placement.replanning import Look, Measured, Replanner
from penstock.placement.traffic import Node, TrafficGraph
from tests.placement.exact import edges_of
from tests.placement.random_topologies import topology

NODES = (Node("a", 2), Node("b", 2))
NOISE = 0.1
HOP_NOISE = 0.3
AGE_NOISE = 0.05
PERIOD_S = 10.0
PHASES = 3
# The first three show what was adopted, the two after them are the rest after a move, and in the others noise could
# move tasks.
PERIODS_A_PHASE = 10
# So long after a move, a job has compared how old its records are.
JUDGED_S = 60.0
# Of a new measurement, with two half-lives a period.
_NEW = 0.75
_RECORD_BYTES = 100.0


class Meter:
    """Measures figures with an error of up to a tenth in each period, and smooths them."""

    def __init__(self, chance: random.Random, noise: float) -> None:
        self._chance = chance
        self._noise = noise
        self._smoothed: dict[Hashable, float] = {}

    def __call__(self, name: Hashable, figure: float) -> tuple[float, float]:
        seen = figure * self._chance.uniform(1 - self._noise, 1 + self._noise)
        was = self._smoothed.get(name, seen)
        self._smoothed[name] = was + _NEW * (seen - was)
        return seen, self._smoothed[name]


def measured(
    tasks: int,
    edges: list[tuple[int, int, tuple[float, float]]],
    loads: list[tuple[float, float]],
    batches: dict[tuple[int, int], float],
) -> Look:
    """The look at a job of so many tasks; of each figure there is the one of this period and the smoothed one.
    `batches`: how many records come in a message."""
    both = []
    for which in (0, 1):
        sent = [(a, b, rates[which]) for a, b, rates in edges]
        size = _RECORD_BYTES + RECORD_BYTES
        cpu = [load[which] for load in loads]
        graph = TrafficGraph.of(tasks, [(a, b, size * rate) for a, b, rate in sent], cpu=cpu)
        messages = [(a, b, rate / batches[a, b]) for a, b, rate in sent]
        both.append(Measured(graph, TrafficGraph.of(tasks, sent), TrafficGraph.of(tasks, messages)))
    return Look(Placement(NODES, workers_of(NODES), (0,) * tasks), *both)


@dataclass
class Phase:
    """Holds what a job did between two changes of its traffic: how often tasks moved, how often they moved back, and
    whether they were right to move back or to stay."""

    moves: int = 0
    back: int = 0
    right: bool = True

    @property
    def settled(self) -> bool:
        """Whether the job did what it should."""
        return self.moves <= 1 and self.back <= self.moves and self.right


def migrations(seed: int, tasks: int, noise: float = NOISE) -> list[Phase]:
    """Returns what a job of up to so many tasks does in each phase of its traffic."""
    chance = random.Random(seed)
    of_ages = random.Random(-seed - 1)
    shape = topology(chance, chance.randint(4, tasks))
    scale = 10 ** chance.uniform(3, 5.5)
    first = {(a, b): scale * traffic for a, b, traffic in edges_of(shape)}
    first_cpu = [0.1 * weight for weight in shape.cpu.tolist()]
    options = AdoptionOptions()
    replanner, meter = Replanner(options), Meter(chance, noise)
    running = Placement(NODES, workers_of(NODES), tuple(task % 4 for task in range(len(shape))))
    now_s = 0.0
    most = 10 ** chance.uniform(0, 2)
    hops = [chance.uniform(*limits) for limits in ((1.0, 16.0), (1e8, 2e9), (0.0, 5_000.0), (1e-5, 1e-3), (1e-5, 1e-3))]

    def records_in_messages() -> dict[tuple[int, int], float]:
        return {edge: 1 + most * chance.uniform(0.25, 1) for edge in first}

    def hop_figures() -> tuple[float, float, float, HopLatencies]:
        seen = [figure * (1 + chance.uniform(-1, 1) * HOP_NOISE * bool(noise)) for figure in hops]
        return seen[0], seen[1], seen[2], HopLatencies(1e-6, seen[3], seen[4])

    ages: dict[Placement, float] = {}  # how old records are in each placement
    rates, cpu, found = first, first_cpu, []
    for phase in range(PHASES):
        before, cpu_before = rates, cpu
        if phase:
            rates = {edge: rate * 10 ** chance.uniform(-1, 1) for edge, rate in first.items()}
            cpu = [of * 3 ** chance.uniform(-1, 1) for of in first_cpu]
        told = Phase()
        left = None  # where the tasks were before they moved in this phase
        batches = records_in_messages()
        for period in range(PERIODS_A_PHASE):
            old = chance.random() if phase and not period else 0.0
            edges = [(*edge, meter(edge, old * before[edge] + (1 - old) * rate)) for edge, rate in rates.items()]
            both = enumerate(zip(cpu_before, cpu, strict=True))
            loads = [meter(task, old * was + (1 - old) * is_) for task, (was, is_) in both]
            now_s += PERIOD_S
            node_cost, core_bytes_per_s, message_bytes, latencies = hop_figures()
            seen = replace(
                measured(len(shape), edges, loads, batches),
                running=running,
                node_cost=node_cost,
                core_bytes_per_s=core_bytes_per_s,
                message_bytes=message_bytes,
                hops=latencies,
                latency_s=ages.setdefault(running, 0.001) * (1 + of_ages.uniform(-1, 1) * AGE_NOISE * bool(noise)),
            )
            new, _ = replanner.look(now_s, seen)
            if new is None:
                continue
            if new == left:
                told.back += 1
                told.right = ages[new] < ages[running]
            else:
                told.moves += 1
                part = 1.5 if of_ages.random() < 1 / 3 else of_ages.uniform(0.7, 0.9)
                ages.setdefault(new, part * ages[running])
            left, running = running, new
            replanner.moved(now_s)
            batches = records_in_messages()
        # A plan that was adopted in the last periods of a phase is not judged in it.
        if left is not None and told.moves + told.back == 1:
            told.right = ages[running] < ages[left] or now_s - (replanner._moved_at_s or now_s) < JUDGED_S
        found.append(told)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=8, help="the most tasks of a job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise", type=float, default=NOISE, help="by which part a measurement may be off")
    options = parser.parse_args()
    began = time.perf_counter()
    counts: Counter[int] = Counter()
    back = bad = 0
    seeds = range(options.seed, options.seed + options.series)
    series = partial(migrations, tasks=options.tasks, noise=options.noise)
    with Pool() as processes:
        for seed, found in zip(seeds, processes.imap(series, seeds), strict=True):
            counts.update(phase.moves for phase in found)
            back += sum(phase.back for phase in found)
            if not all(phase.settled for phase in found):
                print(f"seed {seed}: {found}", flush=True)
                bad += 1
    told = ", ".join(f"{moves} migrations: {count:,}" for moves, count in sorted(counts.items()))
    seconds = time.perf_counter() - began
    print(f"{options.series:,} series, phases with {told}; {back:,} migrations back; {bad} bad; {seconds:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
