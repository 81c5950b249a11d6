"""Start-up of a job, and how soon a loaded one answers job.status(); see README.md."""

from __future__ import annotations

import itertools
from time import monotonic_ns

import penstock as ps
from benchmarks import stamps
from benchmarks.common import Bench, median, quantile, ray_cluster, run_job, scratch, wait_until
from benchmarks.idle import _Idle
from benchmarks.penstock_parts import StampedSink
from penstock.jobs.run import run as start_job

_number = itertools.count()
WORKERS = 2


def word(i: int) -> str:
    """A word."""
    return f"Word-{i % 1000}"


def run(bench: Bench) -> None:
    """See the module."""
    ray_cluster()
    _start(bench)
    _status(bench)


def _start(bench: Bench) -> None:
    import ray

    def job() -> float:
        with scratch() as out:
            flow = ps.Flow(f"bench-start-{next(_number)}")
            source = ps.sources.Generator(word, limit=1)
            flow.read(source).rebalance().map(str.lower).write(StampedSink(stamps.Lines, str(out)))
            started = monotonic_ns()
            status = run_job(flow, workers=WORKERS)
            assert status["records_written"] == 1
            return max(at for at, _, _ in stamps.arrivals(out)) / 1e9 - started / 1e9

    def actors() -> float:
        started = monotonic_ns()
        made = [ray.remote(_Idle).options(num_cpus=1).remote() for _ in range(WORKERS + 1)]
        ray.get([actor.pid.remote() for actor in made])
        took = (monotonic_ns() - started) / 1e9
        for actor in made:
            ray.kill(actor)
        return took

    results = bench.take_turns({"penstock": job, "ray actors": actors}, unit="s")
    bench.case(
        "run() to the first record at the sink",
        median(results["penstock"]),
        "s",
        peer=f"{WORKERS + 1} plain Ray actors to their first answers",
        peer_figure=median(results["ray actors"]),
        config=f"{WORKERS} workers, a Ray that runs already",
        runs=results["penstock"],
        peer_runs=results["ray actors"],
    )


def _status(bench: Bench) -> None:
    import ray

    flow = ps.Flow(f"bench-status-{next(_number)}")
    flow.read(ps.sources.Generator(word)).key_by(str.lower).count().write(ps.sinks.Null())
    job = start_job(flow, workers=WORKERS)
    idle = ray.remote(_Idle).options(num_cpus=1).remote()
    ray.get(idle.pid.remote())
    looks = bench.pick(300, 30)
    ours: dict[str, list[float]] = {"p50": [], "p99": []}
    theirs: dict[str, list[float]] = {"p50": [], "p99": []}
    try:
        wait_until(lambda: job.status().get("records_written", 0) > 0, "records flow")
        for _ in range(bench.runs):
            for taken, ask in ((ours, job.status), (theirs, lambda: ray.get(idle.pid.remote()))):
                took = []
                for _ in range(looks):
                    started = monotonic_ns()
                    ask()
                    took.append((monotonic_ns() - started) / 1e6)
                for what, q in (("p50", 0.5), ("p99", 0.99)):
                    taken[what].append(quantile(sorted(took), q))
        assert job.status()["state"] == "RUNNING"
    finally:
        job.cancel()
        job.wait(60, progress=False)
        ray.kill(idle)
    for what, figures in ours.items():
        bench.case(
            f"job.status() of a loaded job, {what}",
            median(figures),
            "ms",
            peer="a call of an idle Ray actor, at the same time",
            peer_figure=median(theirs[what]),
            config=f"{WORKERS} workers, each busy all the time; {looks} calls a run",
            runs=figures,
            peer_runs=theirs[what],
        )
