"""Tasks move between workers of a running job, asked for and by themselves, and no record is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import PlacementOptions
from penstock.runtime.errors import JobError
from tests.e2e.jobs import Carrier, run
from tests.e2e.processes import wait_until

LOCAL = pytest.mark.parametrize("carrier", ["local"], indirect=True)

KEYS = 50


def where(job: Any) -> dict[str, int]:
    return {task["name"]: task["worker"] for task in job.status()["tasks"]}


def running(job: Any) -> Callable[[], bool]:
    return lambda: bool(job.status()["state"] == "RUNNING")


@LOCAL
def test_tasks_move_while_records_flow(carrier: Carrier, fresh_name: Callable[[], str]) -> None:
    """Sources, keyed state and sinks move to and fro, at last while a worker is killed; the sums are those of all
    numbers, each once."""
    total = 20_000
    flow = ps.Flow(fresh_name(), chaining=False)
    sink = ps.sinks.Collect()
    numbers = flow.read(ps.sources.Generator(int, 2_000, duration_s=total / 2_000), name="in", parallelism=2)
    keyed = numbers.map(lambda n: (n % KEYS, n), name="pairs", parallelism=2).key_by(lambda pair: pair[0])
    keyed.reduce(lambda a, b: (a[0], a[1] + b[1]), emit="final", name="sums", parallelism=2).write(
        sink, name="out", parallelism=1
    )
    job = carrier.run(flow, workers=3, epoch_interval_s=0.2)
    wait_until(running(job), "the job runs")
    over = threading.Event()
    states: set[str] = set()

    def watch() -> None:
        while not over.wait(0.02):
            states.add(job.state)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    chance = random.Random(7)
    names = sorted(where(job))
    for turn in range(8):
        wanted = {name: chance.randrange(3) for name in chance.sample(names, 3)}
        if turn == 4:
            over.set()
            watcher.join()
            assert states
            assert "RECOVERING" not in states, "a move that was asked for is no failure"
            os.kill(job.status()["workers"][1]["pid"], signal.SIGKILL)
        job.migrate(wanted)
        found = where(job)
        assert {name: found[name] for name in wanted} == wanted
    job.wait(120, progress=False)
    assert dict(value for _, value in sink.records()) == {key: sum(range(key, total, KEYS)) for key in range(KEYS)}


def test_a_job_whose_hot_edge_changes_moves_its_tasks(cluster: str, fresh_name: Callable[[], str]) -> None:
    """Two sources, each with long texts for one of two sinks, and from the middle on for the other: by what they send
    one task of each pair moves to the other's worker. The margins are set so low that a test's traffic pays."""
    flow = ps.Flow(fresh_name(), chaining=False)
    half = 4_000

    def text(index: int) -> tuple[int, str]:
        target = (index % 2) ^ (index >= half)
        return target, "x" * 2_000

    numbers = flow.read(ps.sources.Generator(text, 1_000), name="in", parallelism=2)
    numbers.partition_by(lambda record, n: record[0] % n).map(len, name="lengths", parallelism=2).write(
        ps.sinks.Null(), name="out", parallelism=2
    )
    keen = AdoptionOptions(horizon_s=1e6, rest_s=1.0)
    job = run(
        flow, workers=2, epoch_interval_s=0.2, placement=PlacementOptions("round-robin", replan_s=0.5, adoption=keen)
    )
    wait_until(running(job), "the job runs")
    wait_until(lambda: job.status()["placement"].get("total"), "traffic is measured")
    sent = {task["name"]: task["sent"] for task in job.traffic()}
    assert sum(to["bytes_per_s"] for to in sent["in[0]"].values()) > 100_000
    wait_until(lambda: job.status()["placement"]["moves"] >= 1, "a task moves")
    job.stop()
    job.wait(120, progress=False)
    status = job.status()
    read = status["operators"]["in"]["records_out"]
    assert status["operators"]["lengths"]["records_in"] == status["records_written"] == read > 0


@LOCAL
def test_what_cannot_move_says_why(carrier: Carrier, fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name(), chaining=False)
    flow.read(ps.sources.Generator(int, 100), name="in", parallelism=1).write(
        ps.sinks.Null(), name="out", parallelism=1
    )
    job = carrier.run(flow, workers=2, epoch_interval_s=0.2)
    wait_until(running(job), "the job runs")
    with pytest.raises(JobError, match=r"no task 'count\[0\]'; it has: in\[0\], out\[0\]"):
        job.migrate({"count[0]": 0})
    with pytest.raises(JobError, match="no worker 2; the job has 0 to 1"):
        job.migrate({"in[0]": 2})
    job.migrate({"in[0]": where(job)["in[0]"]})


def test_a_job_without_epochs_moves_nothing(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Generator(int, 100)).write(ps.sinks.Null())
    with pytest.raises(ps.FlowError, match="replan_s moves tasks, which takes epochs"):
        run(flow, epoch_interval_s=None, replan_s=1)
    job = run(flow, epoch_interval_s=None)
    wait_until(running(job), "the job runs")
    with pytest.raises(JobError, match="migrate needs epochs"):
        job.migrate({"x": 0})
    with pytest.raises(JobError, match="does not measure its traffic"):
        job.traffic()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "by-luck"}, "placement='by-luck'; it must be one of"),
        ({"nodes": 3, "workers": 2}, "nodes=3; it must be 1 to 2"),
        ({"replan_s": 0}, "replan_s=0; it must be above 0"),
        (
            {"placement": PlacementOptions(pin={"nobody": {"rack": "a"}})},
            "pin names an operator 'nobody'; the flow has",
        ),
        ({"placement": PlacementOptions(at_least=2)}, "at_least=2; it must be 1 with one worker"),
        (
            {"placement": PlacementOptions(nodes=1), "nodes": 1, "replan_s": 2.5},
            r"write placement=PlacementOptions\(..., nodes=1, replan_s=2.5\) and leave out nodes and replan_s",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    flow = ps.Flow("wrong")
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Null())
    with pytest.raises(ps.FlowError, match=message):
        ps.run(flow, **options)


def test_a_job_that_is_placed_by_its_traffic(cluster: str, fresh_name: Callable[[], str]) -> None:
    """The other ways of dealing tasks: tests/placement/test_placer.py."""
    flow = ps.Flow(fresh_name(), chaining=False)
    sink = ps.sinks.Collect()
    flow.read(ps.sources.Memory(range(1_000)), name="in", parallelism=2).key_by(lambda n: n % 7).count(
        emit="final", parallelism=3
    ).write(sink, parallelism=1)
    job = run(flow, workers=3, placement="traffic", epoch_interval_s=None)
    job.wait(60, progress=False)
    assert dict(sink.records()) == Counter(n % 7 for n in range(1_000))
