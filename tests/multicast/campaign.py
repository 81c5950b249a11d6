"""Simulated trees by the thousand, and the changes of trees beside the fewest, of an integer programme.

    python -m tests.multicast.campaign --seeds 10000 --seed 1       run the simulated trees of seeds 1 to 10000
    python -m tests.multicast.campaign --only 4711                  run one seed
    python -m tests.multicast.campaign --changes 200 --nodes 20     compare so many changes of trees of up to 20 nodes

A seed that fails says what was found, and the end of its story. The exit code is 1 then, and also when a tree of up to
three nodes changes more parents than it must. Larger trees are only told of.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable

from penstock.runtime.multicast.building import non_blocking
from penstock.runtime.multicast.least_change import adapted
from tests.multicast.brute_force import by_integer_programme
from tests.multicast.sim import changed_parents, run_seed
from tests.seeds import run_seeds

#: Trees of so many nodes are always changed as little as possible.
EXACT = 3


def clusters(seeds: Iterable[int]) -> int:
    """Runs simulated trees: how many failed."""
    return run_seeds(run_seed, seeds)


def changes(count: int, most: int, seed: int) -> int:
    """Adapts random trees: how many small ones changed more than they had to."""
    more: Counter[int] = Counter()
    failed = 0
    for number in range(count):
        chance = random.Random(seed * 1_000_003 + number)
        nodes = list(range(1, chance.randint(2, most) + 1))
        tree = non_blocking(0, nodes, chance.randint(1, 4))
        for _ in range(chance.randint(0, 2)):
            tree = adapted(tree, nodes, chance.randint(1, 4))
        if chance.random() < 0.5:
            nodes.remove(chance.choice(nodes))
        if chance.random() < 0.2:
            nodes.append(most + 1)
        limit = chance.randint(1, 4)
        found = len(changed_parents(tree, adapted(tree, nodes, limit)))
        least = by_integer_programme(tree, nodes, limit)
        more[found - least] += 1
        if found != least and len(nodes) <= EXACT:
            failed += 1
            print(f"FAILED change {number}: {found} changes, where {least} would do: {tree}, {nodes}, {limit}")
    print(f"changes more than necessary in trees of up to {most} nodes: {dict(sorted(more.items()))}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.multicast.campaign", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="the first of them (1)")
    parser.add_argument("--only", type=int, metavar="SEED", help="run one seed")
    parser.add_argument("--changes", type=int, default=200, help="how many changes to compare (200)")
    parser.add_argument("--nodes", type=int, default=20, help="of the trees that change, at most (20)")
    options = parser.parse_args()
    started = time.monotonic()
    if options.only is not None:
        failed = clusters([options.only])
    else:
        failed = clusters(range(options.seed, options.seed + options.seeds))
        failed += changes(options.changes, options.nodes, options.seed)
    print(f"{failed or 'nothing'} failed in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
