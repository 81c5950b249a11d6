"""The placement campaign: plans beside the best there is, on more graphs than the suite has time for.

    python -m tests.placement.campaign --topologies 200 --tasks 40 --seed 1

First every graph of up to eight tasks: Algorithms 1 and 2 against all splits, and plans for two nodes against all
placements; then random topologies of up to so many tasks on two to four nodes, against an integer programme (those that
it does not solve within a minute are told of and left out). A plan that breaks its limits, or is worse than the paper's
within them, ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from statistics import median

import numpy as np

from penstock.placement.multilevel import papers, partition
from penstock.placement.traffic import TrafficGraph
from tests.placement.algorithms import check_consolidation, check_split
from tests.placement.exact import fits, least_cut, least_cut_of_two, limits
from tests.placement.random_topologies import topology
from tests.placement.small import graphs

FACTOR = 0.1


def small_graphs(most: int) -> int:
    """Every graph of up to `most` tasks; how many plans were not right."""
    wrong = count = above = 0
    for tasks in range(1, most + 1):
        for pairs in graphs(tasks):
            check_consolidation(tasks, pairs)
            check_split(tasks, pairs)
            graph = TrafficGraph.of(tasks, [(u, v, 1.0) for u, v in pairs])
            bounds, fair = limits(graph, 2, FACTOR), np.full(2, 0.5)
            found = partition(graph, fair, FACTOR)
            best = least_cut_of_two(graph, bounds)
            paper = papers(graph, fair, FACTOR)
            bad = not fits(graph, found, bounds)
            bad |= fits(graph, paper, bounds) and graph.edge_cut(found) > graph.edge_cut(paper)
            if bad:
                print(f"graph {sorted(pairs)} of {tasks} tasks: {found.tolist()}, best {best}")
            wrong += bad
            above += graph.edge_cut(found) > best
            count += 1
        print(f"graphs of up to {tasks} tasks: {count:,}; {above} above the optimum, {wrong} wrong", flush=True)
    return wrong


def topologies(count: int, most: int, seed: int) -> int:
    """Random topologies; how many plans were not right."""
    wrong = unsolved = equal = papers_fit = 0
    ratios: list[float] = []
    papers_ratios: list[float] = []
    began = time.monotonic()
    for number in range(count):
        chance = random.Random(seed * 1_000_003 + number)
        places = chance.choice([2, 3, 4])
        graph = topology(chance, chance.randint(8, most))
        bounds, fair = limits(graph, places, FACTOR), np.full(places, 1 / places)
        found, paper = partition(graph, fair, FACTOR), papers(graph, fair, FACTOR)
        fit = fits(graph, paper, bounds)
        papers_fit += fit
        if not fits(graph, found, bounds) or (fit and graph.edge_cut(found) > graph.edge_cut(paper) + 1e-9):
            wrong += 1
            print(f"topology {number}: ours {graph.edge_cut(found)}, the paper's {graph.edge_cut(paper)}")
        best = least_cut(graph, bounds)
        if best is None:
            unsolved += 1
        elif best > 0:
            ratios.append(graph.edge_cut(found) / best)
            equal += ratios[-1] < 1 + 1e-6
            if fit:
                papers_ratios.append(graph.edge_cut(paper) / best)
        if number % 10 == 9:
            print(f"{number + 1} of {count} topologies, {time.monotonic() - began:.0f} s", flush=True)
    ordered = sorted(ratios)
    print(
        f"{len(ratios)} topologies with traffic across ({unsolved} not solved in time): over the optimum "
        f"{median(ratios) - 1:.2%} in the median, {ordered[int(0.9 * len(ordered))] - 1:.1%} in one of ten, "
        f"{ordered[-1] - 1:.1%} at most; {equal} at the optimum. The paper's algorithm: "
        f"{median(papers_ratios):.2f}x in the median, in balance in {papers_fit} of {count}."
    )
    if median(ratios) > 1.05:
        print("the median is more than 5 % over the optimum")
        wrong += 1
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.placement.campaign", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--topologies", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=40, help="of a topology, at most (40)")
    parser.add_argument("--small", type=int, default=8, help="all graphs of up to so many tasks (8)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    wrong = small_graphs(options.small) + topologies(options.topologies, options.tasks, options.seed)
    print("nothing was wrong" if not wrong else f"{wrong} WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
