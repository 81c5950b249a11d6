"""Plants each fault of the table in tests/planting.py, and fails when the command of its entry does not find it.

    python -m tests.planted_campaign                         all of them
    python -m tests.planted_campaign --only early-commit     some of them
    python -m tests.planted_campaign --list                  the table: what is changed, where, and what finds it

A finder that is red without the fault has found nothing, so each finder first runs without it, and must be green. When
the seed of an entry no longer finds its fault, others are tried, and the entry is *stale*: the campaign fails, and
names the seed to write down. Any change of what a simulated job does may make entries stale, because a seed is then
another run. The suite plants only two of the faults, so nobody else notices.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from tests.planting import SEEDS, VARIABLE, PlantedFault, Seeds, Test, table

FOUND = (
    1  # how pytest and tests/epochs/campaign.py end when something has failed; a command that is wrong ends otherwise
)


@dataclass(frozen=True)
class Outcome:
    """What came of one fault: how it was found, or why it was not. `stale`: another seed has found it than that of its
    entry."""

    found: bool
    told: str
    stale: bool = False


def _run(command: Sequence[str], plant: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if plant:
        environment[VARIABLE] = plant
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _end(ended: subprocess.CompletedProcess[str]) -> str:
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return f"exit code {ended.returncode}: " + "\n    ".join(lines[-12:])


def look_for(fault: PlantedFault) -> Outcome:
    """Plant one fault and run its finder."""
    if isinstance(fault.finder, Test):
        return _by_test(fault.name, fault.finder)
    return _by_seeds(fault.name, fault.finder)


def _by_test(name: str, finder: Test) -> Outcome:
    command = finder.command()
    if (without := _run(command)).returncode:
        return Outcome(False, f"{finder.node} is red without it; {_end(without)}")
    ended = _run(command, name)
    if ended.returncode != FOUND:
        return Outcome(False, f"{finder.node} does not find it; {_end(ended)}")
    failed = re.findall(r"^FAILED (\S+)", ended.stdout, re.MULTILINE)
    return Outcome(bool(failed), f"found by {failed[0]}" if failed else _end(ended))


def _by_seeds(name: str, finder: Seeds) -> Outcome:
    ended = _run(finder.command(name, finder.first, 1))
    if ended.returncode == 0:
        ended = _run(finder.command(name, 1, SEEDS))
    if ended.returncode == 0:
        return Outcome(False, f"not found in {SEEDS:,} seeds")
    failed = re.search(r"^FAILED seed (\d+): (.*)", ended.stdout, re.MULTILINE)
    if ended.returncode != FOUND or not failed:
        return Outcome(False, _end(ended))
    seed = int(failed[1])
    if (without := _run(finder.command("", seed, 1))).returncode:
        return Outcome(False, f"seed {seed} is red without it; {_end(without)}")
    stale = seed != finder.first
    moved = f" (no longer by seed {finder.first}: write {seed} into its entry)" if stale else ""
    return Outcome(True, f"found by seed {seed}{moved}: {failed[2][:100]}", stale)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted_campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    faults = table()
    parser.add_argument("--only", nargs="+", choices=sorted(faults), metavar="FAULT", help="plant these only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="at a time (one a core)")
    parser.add_argument("--list", action="store_true", help="print the table")
    given = parser.parse_args()
    chosen = [faults[name] for name in given.only or faults]
    if given.list:
        for fault in chosen:
            print(f"{fault.name}\n    {fault.file}: {fault.what}\n    {fault.command()}")
        return 0
    started = time.monotonic()
    missed, stale = [], []
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(look_for, fault): fault for fault in chosen}
        for done in as_completed(running):
            fault, outcome = running[done], done.result()
            print(f"{fault.name}: {'' if outcome.found else 'NOT FOUND: '}{outcome.told}", flush=True)
            if not outcome.found:
                missed.append(fault)
            elif outcome.stale:
                stale.append((fault, outcome))
    print(f"{len(chosen) - len(missed)} of {len(chosen)} planted faults found in {time.monotonic() - started:.0f} s")
    for fault in missed:
        print(f"NOT FOUND {fault.name}, in {fault.file}: {fault.what}\n    {fault.command()}")
    for fault, outcome in stale:
        print(f"STALE {fault.name}: {outcome.told}")
    return 1 if missed or stale else 0


if __name__ == "__main__":
    sys.exit(main())
