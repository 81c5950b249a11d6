"""Simulated streams through relays by the thousand.

    python -m tests.relaying.campaign --seeds 10000 --seed 1        run the streams of seeds 1 to 10000
    python -m tests.relaying.campaign --only 4711                   run one seed

A seed that fails says what was found. The exit code is 1 then.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.relaying.model import run_seed


def main() -> int:
    """Runs the seeds. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.seeds) if options.only is None else [options.only]
    counts: Counter[str] = Counter()
    failed = 0
    for done, seed in enumerate(seeds, 1):
        try:
            counts += run_seed(seed)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {error}", flush=True)
        if done % 1000 == 0:
            print(f"{done:,} seeds, {failed} failed", flush=True)
    print(f"{len(seeds):,} seeds, {failed} failed: {dict(counts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
