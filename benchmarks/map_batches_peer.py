"""A program whose map_batches costs about 1 us a record, in a process of its own:
`python -m benchmarks.map_batches_peer JSON`. It prints how many records a second one worker processed, the processor
time (in ns) of its thread for each, and how many of them each call got.

It uses nothing but Python and what Penstock offers to users. So the same file measures older releases, too, when it is
run as a script by a Python that has one of them installed; see README.md.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import penstock as ps

_PART = 4  # the first one of so many parts of the records is not counted: the job is still learning the size of steps


def cost(record: int) -> int:
    """Some arithmetic that takes about 1 us."""
    low, high = record & 0xFFFF, record >> 16
    mixed = (low * 40503 + high * 30011) ^ (record * 2654435761 & 0xFFFFFFFF)
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 13)) * 3266489917 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 16)) * 668265263 & 0xFFFFFFFF
    return mixed ^ (mixed >> 12)


def batch_cost(batch: list[int]) -> list[int]:
    """The function that is given to map_batches, and to the plain loop beside it."""
    return [cost(record) for record in batch]


class Counted:
    """Calls `batch_cost`, and writes down the number of calls with the last record."""

    def __init__(self, place: str, count: int) -> None:
        self._place = place
        self._count = count
        self._calls = 0
        self._records = 0

    def __call__(self, batch: list[int]) -> list[int]:
        self._calls += 1
        self._records += len(batch)
        if self._records == self._count:
            Path(self._place, "calls").write_text(str(self._calls))
        return batch_cost(batch)


class Arrived:
    """Adds up what comes, and writes down the sum, and the time of the records that count, with the last record."""

    def __init__(self, place: str, count: int) -> None:
        self._place = place
        self._count = count
        self._records = 0
        self._sum = 0
        self._since: tuple[int, int, int] | None = None

    def __call__(self, batch: list[Any]) -> None:
        self._records += len(batch)
        self._sum += sum(batch)
        if self._since is None:
            if self._records >= self._count // _PART:
                self._since = self._records, time.monotonic_ns(), time.thread_time_ns()
        elif self._records == self._count:
            before, began, began_cpu = self._since
            took, cpu = time.monotonic_ns() - began, time.thread_time_ns() - began_cpu
            found = {"sum": self._sum, "records": self._count - before, "ns": took, "cpu_ns": cpu}
            Path(self._place, "end").write_text(json.dumps(found))


def main(count: int, batch_size: int, options: dict[str, Any]) -> None:
    """Run the job with these options, check what came, print."""
    with TemporaryDirectory() as place:
        flow = ps.Flow(f"bench-map-batches-cheap-{batch_size}", parallelism=1)
        records = flow.read(ps.sources.Generator(int, limit=count))
        results = records.map_batches(Counted(place, count), batch_size=batch_size)
        results.write(ps.sinks.Call(Arrived(place, count), batches=True))
        ps.run(flow, workers=1, epoch_interval_s=None, **options).wait(progress=False)
        end = json.loads(Path(place, "end").read_text())
        calls = int(Path(place, "calls").read_text())
    expected = sum(map(cost, range(count)))
    if end["sum"] != expected:
        raise SystemExit(f"the sum of the results is {end['sum']:,} and must be {expected:,}")
    found = {
        "records/s": end["records"] / end["ns"] * 1e9,
        "CPU a record": end["cpu_ns"] / end["records"],
        "records a call": count / calls,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
