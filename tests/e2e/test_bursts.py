"""A burst inside of a flow on real Ray and Spark: it goes to Spark and comes back, and the counts are exact."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from penstock.bridge.session import SparkOptions
from tests.e2e import bursts
from tests.e2e.jobs import run
from tests.e2e.processes import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java"),
    pytest.mark.timeout(900),
]


def test_a_burst_inside_goes_to_spark_and_comes_back(cluster: str, tmp_path: Path) -> None:
    """That it is seen where it is: tests/bridge/test_burst_inside.py. The other kinds, RayDP, and when each is seen:
    `python -m tests.e2e.bursts`, and the switch campaign."""
    case = bursts.Case("inside", tmp_path)
    spark = SparkOptions(kind="pyspark", start_s=bursts.LIMIT_S)
    # By the queue alone: on a busy machine, Spark need not be quicker.
    job = run(case.flow(f"inside-{time.time_ns():x}"), workers=1, dual="on,k=0.2", spark=spark)
    bursts.await_calm(job, calm_s=0.0)
    flag = Path(case.flag.path)
    flag.touch()
    wait_until(
        lambda: bursts.ranges_of(job.status())["work"]["records_in_spark"] > 0, "Spark has answered", bursts.LIMIT_S
    )
    # On a busy machine the range of the source switches first and takes "work" along: the switch is told there.
    switches = [one for range_ in job.status()["dual"]["ranges"] for one in range_["switches"]]
    there = next(one for one in switches if one["to"] == "operation" and one["answer_s"] is not None)
    assert there["answer_s"] >= there["switched_s"] > 0
    assert there["peak"]["queue"] >= there["queue"] > 0
    flag.unlink()
    wait_until(lambda: bursts.ranges_of(job.status())["work"]["state"] == "RECORD", "it is back", bursts.LIMIT_S)
    assert case.wrong(case.end(job)) is None
