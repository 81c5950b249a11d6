"""From the end of a job, whatever ended it, to the end of its last process; see README.md.

`python -m benchmarks.job_end ADDRESS NAME` is the driver that is killed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import penstock as ps
from benchmarks.common import ROOT, Bench, alive, job_processes, median, ray_cluster, wait_until
from benchmarks.control import word
from penstock.jobs.job import Job
from penstock.jobs.run import run as start_job

_number = itertools.count()
WORKERS = 2


def build(name: str, duration: float | None = None) -> ps.Flow:
    """A flow with an exchange, at 2,000 records a second."""
    flow = ps.Flow(name)
    source = ps.sources.Generator(word, rate=2_000, duration_s=duration)
    flow.read(source).rebalance().map(str.upper).key_by(str.lower).count().write(ps.sinks.Null())
    return flow


def start(name: str, address: str | None = None) -> tuple[Job, list[int]]:
    """The job, running, and its processes."""
    job = start_job(build(name), workers=WORKERS, address=address, epoch_interval_s=None)  # else a death is no end
    wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
    return job, job_processes(job)


def until_gone(pids: list[int], since: int) -> float:
    """Seconds from `since` until none of the processes is there."""
    wait_until(lambda: not any(map(alive, pids)), f"processes {pids} end", every_s=0.002)
    return (time.monotonic_ns() - since) / 1e9


def run(bench: Bench) -> None:
    """See the module."""
    ray_cluster()

    def ended(end: Callable[[Job, list[int]], object]) -> Callable[[], float]:
        def once() -> float:
            job, pids = start(f"bench-end-{next(_number)}")
            since = time.monotonic_ns()
            end(job, pids)
            took = until_gone(pids, since)
            assert job.status()["state"] in ("FINISHED", "CANCELLED", "FAILED")
            return took

        return once

    contestants: dict[str, Callable[[], float]] = {
        "stop()": ended(lambda job, pids: job.stop()),
        "cancel()": ended(lambda job, pids: job.cancel()),
        "SIGKILL of a worker": ended(lambda job, pids: os.kill(pids[0], signal.SIGKILL)),
        "SIGKILL of the JobMaster": ended(lambda job, pids: os.kill(pids[-1], signal.SIGKILL)),
        "SIGKILL of the driver": _driver_killed,
    }
    for label, runs in bench.take_turns(contestants, unit="s").items():
        bench.case(
            f"{label} to the last process gone",
            median(runs),
            "s",
            goal="< 10",
            config=f"{WORKERS} workers; the Ray cluster stays",
            runs=runs,
        )


def _driver_killed() -> float:
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "benchmarks.job_end", address, f"bench-end-{next(_number)}"]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        pids: list[int] = []
        for line in driver.stdout:
            if line.startswith("["):
                pids = json.loads(line)
                break
        if not pids:
            raise RuntimeError("the driver ended before its job ran")
        since = time.monotonic_ns()
        driver.kill()
        return until_gone(pids, since)
    finally:
        driver.kill()
        driver.communicate()


def main() -> None:
    """The driver that is killed."""
    job, pids = start(sys.argv[2], sys.argv[1])
    print(json.dumps(pids), flush=True)
    job.wait(progress=False)


if __name__ == "__main__":
    main()
