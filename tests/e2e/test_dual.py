"""Jobs that go to Spark and back on real Ray: exact while processes are killed, and without Java as if it were off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.bridge.burst import BurstOptions
from penstock.bridge.session import SparkOptions
from penstock.jobs.options import JobOptions
from tests.e2e.jobs import STARTED, run
from tests.e2e.processes import kill, wait_until
from tests.e2e.switch_campaign import CASES

pytestmark = pytest.mark.ray
LIMIT_S = 240.0


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")
@pytest.mark.timeout(900)
def test_windows_are_exact_while_the_job_switches_and_processes_die(
    cluster: str, fresh_name: Callable[[], str]
) -> None:
    """That another bridge follows one that died: tests/bridge/test_paradigm_scheduler.py, and the switch campaign."""
    case = CASES["windows"]
    flow = ps.Flow(fresh_name(), parallelism=2)
    lines = flow.read(ps.sources.Generator(case.line, 1_000), name="lines", parallelism=1).rebalance()
    found = ps.sinks.Collect()
    case.build(lines, found)
    spark = SparkOptions(kind="pyspark", start_s=LIMIT_S)
    job = run(flow, workers=2, dual="toggle:1", spark=spark, epoch_interval_s=0.5, max_restarts=20)

    def seen(condition: Callable[[dict[str, Any], dict[str, Any]], object], what: str) -> dict[str, Any]:
        """The first status of which something is true, of it and of its range."""
        status: dict[str, Any] = {}

        def met() -> bool:
            nonlocal status
            status = job.status()
            return any(condition(status, one) for one in status.get("dual", {}).get("ranges", []))

        wait_until(met, what, LIMIT_S)
        return status

    status = seen(lambda _, one: one["state"] == "OPERATION" and one["records_in_spark"] > 0, "records are in Spark")
    kill(status["workers"][0]["pid"])
    first = status["dual"]["processes"]["bridge"]
    there = status["dual"]["ranges"][0]["records_in_spark"]
    seen(lambda s, one: s["state"] == "RUNNING" and one["records_in_spark"] > there, "and again after a worker's death")
    kill(first)
    status = seen(lambda _, one: one["failed"], "the bridge's death is noticed")
    (why,) = {one["failed"] for one in status["dual"]["ranges"]}
    assert why == "NotAnswered: the process that holds the Spark session has died"
    read = status["records_read"]
    seen(lambda s, _: s["records_read"] > read + 1_000, "the job continues without it")
    job.stop()
    job.wait(LIMIT_S, progress=False)
    n = job.status()["records_read"]
    assert n > read
    assert case.found(found.records()) == case.expected(n)


def first(number: int) -> tuple[int, int]:
    return number % 7, number


def second(pair: tuple[int, int]) -> tuple[int, int]:
    return pair[0], pair[1] + 1


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")
@pytest.mark.timeout(900)
def test_ranges_without_a_sample_of_their_source_are_tried_before_any_burst(
    cluster: str, fresh_name: Callable[[], str]
) -> None:
    """At a generator and behind an exchange, on records that their tasks have taken. Nothing of this reaches a sink."""
    flow = ps.Flow(fresh_name())
    numbers = flow.read(ps.sources.Generator(lambda i: i, 2_000), name="numbers").map(first, name="first")
    found = ps.sinks.Collect()
    numbers.rebalance().map(second, name="second").key_by(lambda pair: pair[0]).count(emit="final").write(found)
    spark = SparkOptions(kind="pyspark", start_s=LIMIT_S)
    job = run(flow, workers=2, dual="on", spark=spark)

    def ranges() -> list[dict[str, Any]]:
        return list(job.status().get("dual", {}).get("ranges", []))

    wait_until(
        lambda: len(ranges()) == 2 and all(one["figures"]["operation_measured"] for one in ranges()),
        "both ranges were tried",
        LIMIT_S,
    )
    wait_until(lambda: job.status()["dual"]["spark_state"] == "READY", "Spark is ready", LIMIT_S)
    for one in ranges():
        assert "in Spark's Python workers, as in the record tasks (python: " in one["way"]
        assert "records/s" in one["way"]
        assert (one["state"], one["switches"], one["records_in_spark"]) == ("RECORD", [], 0)
    job.stop()
    read = job.wait(LIMIT_S, progress=False)["records_read"]
    assert sum(count for _, count in found.records()) == read > 0


@pytest.mark.timeout(900)
def test_a_job_with_spark_continues_without_ray(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flow = ps.Flow(fresh_name())
    numbers = flow.read(ps.sources.Generator(lambda i: i, 2_000), name="numbers").map(first, name="first")
    numbers.key_by(lambda pair: pair[0]).count(emit="final").write(ps.sinks.Collect(), name="out")
    job = run(flow, dual="on", placement="traffic", checkpoints=tmp_path, epoch_interval_s=0.2, max_restarts=0)
    wait_until(lambda: job.status().get("epochs", {}).get("complete", 0) > 1, "epochs are complete", LIMIT_S)
    kill(job.status()["workers"][0]["pid"])
    with pytest.raises(ps.JobFailed):
        job.wait(LIMIT_S, progress=False)
    before = job.status()["records_read"]
    again = ps.resume(flow.name, checkpoints=tmp_path, local=True)
    STARTED.append(again)
    assert "continues without its options dual and placement, because a local job runs without Ray" in caplog.text
    wait_until(lambda: again.status()["records_read"] > before, "the job has gone on", LIMIT_S)
    again.stop()
    read = again.wait(LIMIT_S, progress=False)["records_read"]
    assert sum(count for _, count in again.records("out")) == read > before


WITHOUT = """
import penstock as ps
flow = ps.Flow("without")
out = ps.sinks.Collect()
words = flow.read(ps.sources.Generator(str, 500)).map(len, name="lengths")
words.key_by(int).count(emit="final").write(out)
job = ps.run(flow, dual="spark-only", address="local")
input()  # until the warning is there
job.stop()
read = job.wait(120, progress=False)["records_read"]
assert sum(n for _, n in out.records()) == read > 0
print(job.status()["dual"]["spark"])
"""


def test_without_java_a_job_continues_with_records_and_says_so_once(tmp_path: Path) -> None:
    environment = {**os.environ, "JAVA_HOME": str(tmp_path / "nothing"), "XDG_STATE_HOME": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    program = subprocess.Popen(
        [sys.executable, "-c", WITHOUT],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = threading.Timer(LIMIT_S, program.kill)
    limit.start()
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None
    said = []
    for line in program.stderr:
        said.append(line)
        if "job without:" in line and not program.stdin.closed:
            program.stdin.write("\n")
            program.stdin.close()
    out = program.stdout.read()
    assert program.wait() == 0, said
    limit.cancel()
    assert "JAVA_HOME" in out
    warnings = [line for line in said if "job without:" in line]
    assert len(warnings) == 1, said
    assert "record by record" in warnings[0]


def test_what_dual_can_be(fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Memory([1])).map(str).write(ps.sinks.Null())
    wrongs = ("maybe", "toggle", "toggle:0", "on:3", "toggle:x", "", "on,delta=2", "on,speed=3", "on,k", "on,k=inf")
    for wrong in wrongs:
        with pytest.raises(ps.FlowError, match="use 'off', 'on', 'spark-only' or 'toggle:SECONDS'"):
            ps.run(flow, dual=wrong)
    for right, burst in (
        ("on,delta=0.3,k=0.2", BurstOptions(delta=0.3, k=0.2, ahead=True, epoch_s=2.0)),
        ("toggle:3", BurstOptions(mode="toggle", toggle_s=3.0, ahead=True, epoch_s=2.0)),
        (BurstOptions(range_below=1.0), BurstOptions(range_below=1.0, epoch_s=2.0)),
    ):
        options = JobOptions(dual=right, epoch_interval_s=2.0).dual_options()
        assert options is not None
        assert options.burst == burst
