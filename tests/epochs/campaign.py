"""Simulated jobs with epochs by the thousand, each with faults of its own: see tests/epochs/sim.py and checks.py.

    python -m tests.epochs.campaign --seeds 10000 --seed 1     run seeds 1 to 10000
    python -m tests.epochs.campaign --only 4711 --story        run one seed, and tell what happens in it
    python -m tests.epochs.campaign --plant early-commit       see that a planted fault is found (tests/planting.py)

A seed decides the flow, where its tasks are, who runs when, and what goes wrong; the same seed is the same run. On a
failure you get the seed, what was found, the command that runs it again, and the end of its story.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.epochs.flows import epoch_flow
from tests.epochs.sim import EpochCluster, faults_of
from tests.planting import Seeds, planted, table
from tests.runtime.sim import small_steps

CHUNK = 25  # seeds that a process takes at a time
BROKEN = 3  # the exit code when a fault cannot be planted
STORY = 60  # lines of it that a failure shows


@dataclass
class Result:
    """What came of some seeds."""

    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # seed, what in a line, all


def run_seed(seed: int, story: bool = False) -> Counter[str]:
    """Run one seed: what happened, counted. AssertionError, with all that is known, when it fails."""
    cluster = None
    with small_steps(seed):
        try:
            cluster = EpochCluster(epoch_flow(seed), seed, faults_of(seed))
            cluster.run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            lines = [f"seed {seed}: {type(error).__name__}: {error}", f"at {where.filename}:{where.lineno}"]
            if cluster is not None:
                lines += ["", cluster.made.flow.explain(), "", cluster.dump(), "", "The end of its story:"]
                lines.append(cluster.told(None if story else STORY))
            raise AssertionError("\n".join(lines)) from error
    if story:
        print(cluster.told())
        print(f"seed {seed}: {cluster.faults}")
    return cluster.counts


def run_seeds(job: tuple[range, str | None]) -> Result:
    """Run some seeds, with a fault planted or none; for another process."""
    seeds, plant = job
    finder = table()[plant].finder if plant else None
    result = Result()
    gc.disable()
    with planted(plant):
        for seed in seeds:
            result.seeds += 1
            if isinstance(finder, Seeds) and not _may_find(finder, seed):
                continue
            try:
                counts = run_seed(seed)
            except AssertionError as error:
                if plant:
                    _check_fault(plant, error.__cause__)
                text = str(error)
                result.failures.append((seed, text.partition("\n")[0], text))
                if plant:
                    break  # it is found
            else:
                result.counts += counts
    gc.enable()
    gc.collect()
    return result


def _may_find(finder: Seeds, seed: int) -> bool:
    if not finder.may_find(faults_of(seed)):
        return False
    if finder.operator is None:
        return True
    with small_steps(seed):
        return any(map(finder.operator, epoch_flow(seed).flow.graph.operators.values()))


class BrokenFault(Exception):
    """A planted fault does not fit the code into which it is planted."""


def _check_fault(plant: str, error: BaseException | None) -> None:
    """Raise BrokenFault when an error tells of the fault's own code, not of what the fault does to the runtime."""
    if error is not None and isinstance(error, (AttributeError, TypeError, NameError)):
        where = traceback.extract_tb(error.__traceback__)[-1]
        if where.filename == inspect.getsourcefile(table()[plant].plant):
            raise BrokenFault(f"{plant} does not fit the code: {error!r} at {where.filename}:{where.lineno}")


def campaign(first: int, seeds: int, jobs: int = 1, plant: str | None = None) -> Iterator[Result]:
    """Run seeds; the results of some at a time, as they come."""
    parts = [(range(at, min(at + CHUNK, first + seeds)), plant) for at in range(first, first + seeds, CHUNK)]
    if jobs == 1:
        yield from map(run_seeds, parts)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(run_seeds, parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.epochs.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--seed", type=int, default=1, metavar="SEED", help="the first one (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (one a core)")
    parser.add_argument("--only", type=int, metavar="SEED", help="run this seed alone, in this process")
    parser.add_argument("--story", action="store_true", help="with --only: print all that happens")
    parser.add_argument("--plant", choices=sorted(table()), metavar="FAULT", help="plant this fault")
    parser.add_argument("--failures", type=int, default=5, metavar="N", help="stop after so many (5)")
    given = parser.parse_args()
    try:
        with planted(given.plant):
            pass  # it can be planted
    except Exception as error:
        print(f"{given.plant} does not fit the code: {error!r}", file=sys.stderr)
        return BROKEN
    if given.only is not None:
        return _only(given.only, given.story, given.plant)
    try:
        return _many(given.seed, given.seeds, given.jobs, given.plant, given.failures)
    except BrokenFault as error:
        print(error, file=sys.stderr)
        return BROKEN


def _only(seed: int, story: bool, plant: str | None) -> int:
    try:
        with planted(plant):
            counts = run_seed(seed, story)
    except AssertionError as error:
        print(error)
        return 1
    print(f"seed {seed}: {_told(counts) or 'nothing went wrong in it'}")
    return 0


def _many(first: int, seeds: int, jobs: int, plant: str | None, failures_max: int) -> int:
    started = shown = time.monotonic()
    total = Result()
    live = sys.stdout.isatty()
    every = 0.5 if live else 15.0
    with contextlib.suppress(KeyboardInterrupt):
        for result in campaign(first, seeds, jobs, plant):
            total.seeds += result.seeds
            total.counts += result.counts
            total.failures += result.failures
            for seed, _, text in result.failures:
                print("\r\033[K" * live + text)
                again = f" --plant {plant}" if plant else ""
                print(f"\nAgain: python -m tests.epochs.campaign --only {seed} --story{again}\n", flush=True)
            now = time.monotonic()
            if now - shown > every:
                shown = now
                print("\r\033[K" * live + _progress(total, seeds, now - started), end="" if live else "\n", flush=True)
            if len(total.failures) >= failures_max:
                break
    print("\r\033[K" * live + _progress(total, seeds, time.monotonic() - started))
    print(_told(total.counts))
    for seed, line, _ in total.failures:
        print(f"FAILED {line or seed}"[:200])
    return 1 if total.failures else 0


def _progress(total: Result, seeds: int, seconds: float) -> str:
    rate = 60 * total.seeds / max(seconds, 0.001)
    failed = f", {len(total.failures)} FAILED" if total.failures else ""
    return f"{total.seeds:,} of {seeds:,} seeds in {seconds:,.0f} s, {rate:,.0f} a minute{failed}"


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{n:,} {what}" for what, n in sorted(counts.items()) if n)


if __name__ == "__main__":
    logging.getLogger("penstock").setLevel(logging.ERROR)  # what is mended is no news here
    sys.exit(main())
