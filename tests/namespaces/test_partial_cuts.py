"""Jobs on three hosts, of which two do not reach each other while both reach the JobMaster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import LIMIT_S
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Hosts
from tests.namespaces.links import Ways
from tests.namespaces.ray_cluster import RayCluster

pytestmark = pytest.mark.ray

# A job with a worker on each host, and records from each to each. Says when it runs, what it says of the cut, and what
# came of it: a machine is lost, or the link answers again.
JOB = """
import collections, json, sys, time
import penstock as ps
from penstock.jobs.progress import links, trouble

flow = ps.Flow("cuts")
got = ps.sinks.Collect()
read = flow.read(ps.sources.Generator(lambda i: i, rate=500), parallelism=3)
read.rebalance().map(lambda i: i, parallelism=3).write(got)
options = {"workers": 3, "nodes": 3, "checkpoints": sys.argv[1], "epoch_interval_s": 0.3, **json.loads(sys.argv[2])}
job = ps.run(flow, **options)

def until(condition):
    end = time.monotonic() + LIMIT_S
    while True:
        status = job.status()
        if condition(status):
            return status
        assert time.monotonic() < end and status["state"] not in ("FAILED", "FINISHED"), status
        time.sleep(0.05)

def say(word, **more):
    print(json.dumps({"said": word, **more}), flush=True)

def goes_on(status):
    epochs = until(lambda status: status["state"] == "RUNNING")["epochs"]["complete"]
    until(lambda status: status["epochs"]["complete"] > epochs + 1)

before = until(lambda status: status["state"] == "RUNNING" and status["epochs"]["complete"])
say("runs")
status = until(lambda status: status["links"])
machines = [one["state"] for one in status["placement"]["machines"]]
say("cut", links=links(status), trouble=trouble(status), machines=machines)
status = until(lambda status: not status["links"])
until(lambda status: status["state"] == "RUNNING")
goes_on(status)
job.stop()
status = job.wait(progress=False)
times = collections.Counter(got.records())
processes = [{(one["index"], one["pid"], one["node_id"]) for one in known["workers"]} for known in (before, status)]
of_tasks = [sorted(i for i in times if i % 3 == task) for task in range(3)]
say(
    "ended",
    times=sorted(set(times.values())),
    whole=all(own == list(range(task, own[-1] + 1, 3)) for task, own in enumerate(of_tasks)),
    restarts=status["epochs"]["restarts"],
    stayed=len(processes[0] & processes[1]),
    machines=sorted(one["state"] for one in status["placement"]["machines"]),
)
""".replace("LIMIT_S", repr(LIMIT_S))

# The same without an end, for a job that is to fail.
FAILS = """
import json, sys
import penstock as ps

flow = ps.Flow("closed")
read = flow.read(ps.sources.Generator(lambda i: i, rate=500), parallelism=3)
read.rebalance().map(lambda i: i, parallelism=3).write(ps.sinks.Null())
try:
    ps.run(flow, workers=3, nodes=3, **json.loads(sys.argv[1])).wait(progress=False)
except ps.PenstockError as error:
    print(json.dumps({"said": "ended", "error": f"{type(error).__name__}: {error}"}), flush=True)
"""


class Cluster:
    """Three hosts with Ray; drivers run on the first."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._ray = RayCluster(hosts)

    @contextmanager
    def running(self, text: str, *arguments: str) -> Iterator[Callable[[], dict[str, Any]]]:
        """Runs a driver. Gives a function that returns what the driver says next."""
        driver = self.hosts[0].start(
            [sys.executable, "-c", text, *arguments], env=self._ray.environment, directory=ROOT, stdout=subprocess.PIPE
        )
        assert driver.stdout is not None
        lines = iter(driver.stdout)

        def said() -> dict[str, Any]:
            for line in lines:
                with suppress(ValueError):  # the others are Ray's
                    found = json.loads(line)
                    if isinstance(found, dict) and "said" in found:
                        return found
            raise AssertionError("the driver has ended")

        yield said
        assert driver.wait(LIMIT_S) == 0


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[Cluster]:
    if reason := spaces.why_not():
        pytest.skip(reason)
    with Hosts(3) as hosts:
        yield Cluster(hosts)


@pytest.fixture
def cut(three_hosts: Cluster) -> Iterator[Callable[[Ways], None]]:
    """Cuts the second and the third host from each other, until the test has ended."""
    yield lambda ways: three_hosts.hosts.cut_between(1, 2, ways)
    three_hosts.hosts.restore_between(1, 2)


@pytest.mark.parametrize("ways", ["both", "there"])
def test_a_cut_between_two_machines_that_stays_loses_one_of_them(
    three_hosts: Cluster, cut: Callable[[Ways], None], ways: Ways, tmp_path: Path
) -> None:
    with three_hosts.running(JOB, str(tmp_path), json.dumps({"node_timeout_s": 10})) as said:
        assert said()["said"] == "runs"
        cut(ways)
        told = said()
        assert {len(told["links"]), *(link in told["trouble"] for link in told["links"])} == {1}
        one, other = three_hosts.hosts[1], three_hosts.hosts[2]
        assert f"on {one.name} does not reach worker" in told["links"][0] or f"on {other.name} does" in told["links"][0]
        assert told["machines"] == ["ok", "ok"], "the heartbeats know nothing of it"
        ended = said()
    assert ended["times"] == [1]
    assert ended["whole"]
    assert ended["restarts"] == 1
    assert ended["stayed"] == 2
    assert ended["machines"] == ["lost", "ok"]


@pytest.mark.parametrize("ways", ["both", "back"])
def test_a_cut_that_heals_in_time_loses_nothing_and_restarts_nothing(
    three_hosts: Cluster, cut: Callable[[Ways], None], ways: Ways, tmp_path: Path
) -> None:
    with three_hosts.running(JOB, str(tmp_path), json.dumps({"node_timeout_s": 15})) as said:
        assert said()["said"] == "runs"
        cut(ways)
        assert said()["said"] == "cut"
        three_hosts.hosts.restore_between(1, 2)
        ended = said()
    assert ended == {
        "said": "ended",
        "times": [1],
        "whole": True,
        "restarts": 0,
        "stayed": 3,
        "machines": ["ok", "ok"],
    }


@pytest.mark.parametrize("epochs", [True, False])
def test_a_firewall_between_two_machines_is_told_with_what_to_open(
    three_hosts: Cluster, cut: Callable[[Ways], None], epochs: bool, tmp_path: Path
) -> None:
    cut("both")
    options = {"node_timeout_s": 10, "ports": [20_000, 20_999]}
    options |= {"checkpoints": str(tmp_path)} if epochs else {}
    with three_hosts.running(FAILS, json.dumps(options)) as said:
        error = said()["error"]
    assert error.startswith("JobFailed: ")
    for host in three_hosts.hosts[1:]:
        assert f"{host.name} ({host.address})" in error
        assert f"at {host.address}:20" in error
    assert "firewall" in error
    assert "in both directions, to the ports 20000 to 20999" in error
