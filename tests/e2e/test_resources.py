"""Tasks that need resources run in the workers that have reserved them, on real Ray."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from tests.e2e.jobs import run
from tests.e2e.processes import LIMIT_S, kill, wait_until

pytestmark = pytest.mark.ray


class Where:
    """Tells of each record which process it was in, and which GPU the process may use."""

    def __call__(self, number: int) -> tuple[int, int, str]:
        return number, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


def free(*names: str) -> list[float]:
    import ray

    left = ray.available_resources()
    return [left.get(name, 0.0) for name in names]


@pytest.mark.timeout(600)
def test_tasks_run_where_their_resources_are(cluster: str, fresh_name: Callable[[], str], tmp_path: Path) -> None:
    """Also after their worker has died. What was reserved is free again when the job has ended."""
    wait_until(lambda: free("GPU", "fpga") == [2, 3], "nobody else has them")
    flow = ps.Flow(fresh_name())
    numbers = flow.read(ps.sources.Generator(int, 1_000), name="numbers", parallelism=1).rebalance()
    seen = numbers.map(Where, name="where", parallelism=2, num_gpus=1, resources={"fpga": 1})
    seen.write(ps.sinks.Collect(), name="out", parallelism=2)
    job = run(flow, workers=4, checkpoints=tmp_path, epoch_interval_s=0.2)

    def tasks() -> dict[str, int]:
        return {each["name"]: each["worker"] for each in job.status()["tasks"]}

    wait_until(lambda: job.status()["records_written"] > 500, "records come")
    assert free("GPU", "fpga") == [0, 1]
    at = tasks()
    own = {name: worker for name, worker in at.items() if name.startswith("where")}
    assert own == {"where > out[0]": 0, "where > out[1]": 1}
    with pytest.raises(ps.JobError, match=r"stays in worker 0, because it needs 1 GPU and 1 fpga, which only this"):
        job.migrate({"where > out[0]": 3})
    with pytest.raises(ps.PenstockError, match=r"the number of tasks of 'where' cannot change while the job runs"):
        job.rescale("where", 3)
    with pytest.raises(ps.NotEnoughResources, match="GPU"):
        run(other(fresh_name()), workers=2, start_timeout_s=5).wait(LIMIT_S, progress=False)

    wait_until(lambda: job.status()["spares"], "there is a spare process, which has no GPU")
    before = dict(enumerate(worker["pid"] for worker in job.status()["workers"]))
    kill(before[0])
    wait_until(lambda: job.status()["workers"][0]["pid"] not in (None, before[0]), "the worker is there again")
    written = job.status()["records_written"]
    wait_until(lambda: job.status()["records_written"] > written + 500, "records come again")
    assert tasks() == at
    pids = dict(enumerate(worker["pid"] for worker in job.status()["workers"]))
    job.stop()
    read = job.wait(LIMIT_S, progress=False)["records_read"]
    found: list[Any] = job.records("out")
    assert sorted(number for number, _, _ in found) == list(range(read))
    assert {pid for _, pid, _ in found} <= {before[0], pids[0], pids[1]}
    assert {gpu for _, _, gpu in found} == {"0", "1"}
    wait_until(lambda: free("GPU", "fpga") == [2, 3], "what was reserved is free again")


def other(name: str) -> ps.Flow:
    flow = ps.Flow(name)
    flow.read(ps.sources.Memory([1])).map(Where, name="where", parallelism=2, num_gpus=1).write(ps.sinks.Null())
    return flow


def test_what_the_cluster_has_not_is_said_at_once(cluster: str, fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Memory([1])).map(Where, name="where", parallelism=2, resources={"tpu": 1}).write(
        ps.sinks.Null()
    )
    with pytest.raises(ps.NotEnoughResources, match=r"workers need 2 x \(1 CPU and 1 tpu\), .* and 0 tpu in all"):
        run(flow, workers=2).wait(LIMIT_S, progress=False)
