"""One run of the Yahoo topology in Spark Structured Streaming, checked; see spark_stream_peer."""

from __future__ import annotations

import json
from dataclasses import dataclass

from benchmarks.common import run_script, scratch
from benchmarks.ysb_job import CORES, MEMORY
from benchmarks.ysb_load import Load, Results

EVERY_S = 0.1  # a file with what has fallen due
PARSER = "from_json"


@dataclass(frozen=True)
class MicroBatch:
    """One of Spark's; times in seconds since the start, `ms` by what Spark was doing."""

    began: float
    ended: float
    rows: int
    ms: dict[str, float]


@dataclass
class StreamRun:
    """A run that has ended."""

    results: Results
    batches: list[MicroBatch]


def play(load: Load) -> StreamRun:
    """Run the load through a query."""
    with scratch() as folder:
        settings = {
            "steps": load.steps,
            "seed": load.seed,
            "folder": str(folder),
            "cores": CORES,
            "memory": MEMORY,
            "parser": PARSER,
            "every_s": EVERY_S,
        }
        run_script("benchmarks.spark_stream_peer", settings, timeout=load.seconds + 600)
        said = json.loads((folder / "stream.json").read_text())
        results = Results(load, folder, said["start_ns"], "Structured Streaming")
        return StreamRun(results, [MicroBatch(**batch) for batch in said["batches"]])
