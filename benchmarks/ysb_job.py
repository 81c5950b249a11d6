"""One run of the Yahoo topology as a Penstock job: made ready, started, watched, checked.

A job that uses Spark gets its events when Spark is there, and one that is to run in Spark altogether when it does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import penstock as ps
from benchmarks.common import ray_cluster, scratch, wait_until
from benchmarks.ysb_load import NS, Gated, GatedFiles, Load, Results, UpdateSink, start
from penstock.apps import ysb
from penstock.bridge.session import SparkOptions
from penstock.jobs.job import Job
from penstock.jobs.run import run as start_job
from penstock.runtime.sinks import Sink

_number = itertools.count()
CORES = 2  # of Spark
MEMORY = "4g"  # of its heap; Spark without Penstock has as much
_SPARK_S = 180.0  # within which it must be there, also on a busy machine
_LATE_S = 400.0  # by which a run may be longer than its load
_SETTLE_S = 2.0  # between Spark's being ready and the start


@dataclass(frozen=True)
class Form:
    """How the job is run."""

    workers: int = 2
    dual: str = "off"
    kind: Literal["pyspark", "raydp"] = "pyspark"

    def __str__(self) -> str:
        tasks = f"{self.workers} worker{'s' * (self.workers > 1)}"
        if self.dual == "off":
            return f"{tasks}, dual=off"
        return f"{tasks}, dual={self.dual}, {self.kind} with {CORES} cores"


@dataclass
class Sample:
    """What `job.status()` said at a time, in seconds since the start."""

    at: float
    status: dict[str, Any]

    @property
    def done(self) -> int:
        """Events that have gone through the first chain, in either paradigm."""
        return int(self.status["records_read"])

    @property
    def ranges(self) -> list[dict[str, Any]]:
        """Of the operation stream."""
        ranges: list[dict[str, Any]] = self.status.get("dual", {}).get("ranges", [])
        return ranges

    @property
    def in_spark(self) -> int:
        """Events that Spark has answered, of the range that begins after the source."""
        return in_spark(self.status)

    def paradigms(self) -> dict[str, str]:
        """Operator -> paradigm."""
        paradigms = dict.fromkeys(self.status["operators"], "record")
        for one in self.ranges:
            paradigms.update(dict.fromkeys(one["operators"], one["paradigm"]))
        return paradigms


def in_spark(status: dict[str, Any]) -> int:
    """See Sample."""
    ranges = status.get("dual", {}).get("ranges", [])
    return int(ranges[0]["records_in_spark"]) if ranges else 0


@dataclass
class Run:
    """A run that has ended."""

    results: Results
    status: dict[str, Any]  # the last
    samples: list[Sample] = field(default_factory=list)


def flow_of(load: Load, folder: Path, *, updates: bool, files: list[str] | None = None) -> ps.Flow:
    """The topology with a gate before it and the noting store after it."""
    sink: Sink = UpdateSink(str(folder))
    campaigns = load.events.campaigns()
    source = Gated(load, str(folder)) if files is None else GatedFiles(files, str(folder))
    return ysb.topology(source, campaigns, sink, updates=updates, name=f"bench-ysb-{next(_number)}")


def play(
    load: Load, form: Form, *, updates: bool = True, every_s: float | None = None, files: list[str] | None = None
) -> Run:
    """Run the load through a job. `updates`: counts leave whenever they have changed, not when windows have ended.
    `every_s`: take a status so often, from the start to the end. `files`: where its events are, unless they are to be
    made as they are read."""
    with scratch() as folder:
        job = begin(flow_of(load, folder, updates=updates, files=files), form, folder)
        try:
            _await_ready(job, form)
            began = start(folder)
            samples = list(_watch(job, began, every_s)) if every_s is not None else []
            status = job.wait(load.seconds * load.paced + _LATE_S, progress=False)
        finally:
            end(job)
        if form.dual == "spark-only" and (why := status["dual"]["ranges"][0]["failed"]) is not None:
            raise RuntimeError(f"only {in_spark(status):,} of {load.number:,} events were answered by Spark: {why}")
        return Run(Results(load, folder, began, str(form)), status, samples)


def begin(flow: ps.Flow, form: Form, folder: Path) -> Job:
    """Start the job: an epoch a second, saved in memory."""
    ray_cluster()
    spark = None if form.dual == "off" else SparkOptions(kind=form.kind, cores=CORES, memory=MEMORY, start_s=_SPARK_S)
    return start_job(
        flow,
        workers=form.workers,
        parallelism=form.workers,
        checkpoints=folder / "epochs",
        dual=form.dual,
        spark=spark,
    )


def end(job: Job) -> None:
    """Whatever became of it."""
    job.cancel()
    job.wait(60, progress=False)


def _await_ready(job: Job, form: Form) -> None:
    wait_until(lambda: job.status()["state"] == "RUNNING", "the job runs", 60)
    if form.dual == "off":
        return

    def is_ready() -> bool:
        sample = Sample(0.0, job.status())
        spark = sample.status["dual"]["spark"]
        if spark is not None and "not to be had" in spark:
            raise RuntimeError(f"Spark is {spark}")
        inside = form.dual != "spark-only" or all(one["state"] == "OPERATION" for one in sample.ranges)
        return spark is not None and inside

    wait_until(is_ready, "Spark is ready", _SPARK_S, every_s=0.2)
    time.sleep(_SETTLE_S)


def _watch(job: Job, start_ns: int, every_s: float) -> Iterator[Sample]:
    due = time.monotonic()
    while True:
        status = job.status()
        yield Sample((time.time_ns() - start_ns) / NS, status)
        if status["state"] not in ("RUNNING", "STOPPING"):
            return
        due += every_s
        time.sleep(max(0.0, due - time.monotonic()))
