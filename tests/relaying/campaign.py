"""Simulated streams through relays by the thousand.

    python -m tests.relaying.campaign --seeds 10000 --seed 1        run the streams of seeds 1 to 10000
    python -m tests.relaying.campaign --only 4711                   run one seed

A seed that fails says what was found. The exit code is 1 then.
"""

from __future__ import annotations

import argparse
import sys

from tests.relaying.model import run_seed
from tests.seeds import run_seeds


def main() -> int:
    """Runs the seeds. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.seeds) if options.only is None else [options.only]
    failed = run_seeds(run_seed, seeds)
    print(f"{len(seeds):,} seeds, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
