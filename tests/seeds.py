"""Runs the seeds of a campaign one after the other, and tells how many failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


def run_seeds(run: Callable[[int], Counter[str]], seeds: Iterable[int]) -> int:
    """Runs the seeds, and prints what failed, how far it is, and what happened in all of them. Returns how many
    failed."""
    counts: Counter[str] = Counter()
    failed = 0
    for done, seed in enumerate(seeds, 1):
        try:
            counts += run(seed)
        except AssertionError as error:
            failed += 1
            print(f"FAILED {error}", flush=True)
        if done % 1000 == 0:
            print(f"{done:,} seeds, {failed} failed", flush=True)
    print(", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))
    return failed
