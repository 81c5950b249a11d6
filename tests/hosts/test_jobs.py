"""Ray, and jobs, on two hosts: what holds on one machine holds over several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import LIMIT_S
from tests.hosts import spaces
from tests.hosts.hosts import OWN, ROOT, Hosts
from tests.hosts.ray_cluster import RayCluster

pytestmark = pytest.mark.ray

ACTORS = """
import json, socket
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init(logging_level="error", log_to_driver=False)
nodes = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])

@ray.remote(num_cpus=1)
class Actor:
    def where(self, *others):
        return [socket.gethostname(), *ray.get([other.where.remote() for other in others])]

actors = [
    Actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
    for node in nodes
]
print(json.dumps([
    [node["NodeManagerHostname"] for node in nodes],
    ray.get(actors[0].where.remote(actors[1])),
    ray.get(actors[1].where.remote(actors[0])),
]))
"""

# A flow whose output is known beforehand, over both hosts.
JOB = """
import json, pathlib, sys
import penstock as ps
from tests.e2e.recovery_flows import FLOWS

name, place, checkpoints = sys.argv[1:]
made = FLOWS[name](name, pathlib.Path(place), 20_000, None)
try:
    status = ps.run(made.flow, workers=2, nodes=2, checkpoints=checkpoints).wait(progress=False)
except ps.PenstockError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
else:
    made.check()
    nodes = len({worker["node_id"] for worker in status["workers"]})
    print(json.dumps({"nodes": nodes, "latency_ms": status["latency_all_ms"]}))
"""


class Cluster:
    """Two hosts with Ray; drivers run on the first."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._ray = RayCluster(hosts)

    def says(self, text: str, *arguments: str | Path, **env: str) -> Any:
        """What a driver prints, which is one value of JSON."""
        env = {**self._ray.environment, **env}
        return json.loads(self.hosts[0].python(text, *map(str, arguments), env=env, directory=ROOT))


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Cluster]:
    if reason := spaces.why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Cluster(stack.enter_context(Hosts(2)))


def test_actors_on_two_hosts_call_each_other(two_hosts: Cluster) -> None:
    names = [host.name for host in two_hosts.hosts]
    assert two_hosts.says(ACTORS) == [names, [names[0], [names[1]]], [names[1], [names[0]]]]
    assert all(any("raylet" in line for line in host.processes().values()) for host in two_hosts.hosts)


def test_the_answer_over_two_hosts_is_right(two_hosts: Cluster, tmp_path: Path) -> None:
    said = two_hosts.says(JOB, "wordcount", tmp_path / "out", tmp_path / "epochs")
    assert said["nodes"] == 2, said
    # The clocks of the hosts are a day apart where the kernel allows that. Latency is measured across them.
    assert 0 < said["latency_ms"]["p50"] <= said["latency_ms"]["p99"] < LIMIT_S * 1000


def test_a_store_that_the_other_host_cannot_see_is_refused(two_hosts: Cluster, tmp_path: Path) -> None:
    said = two_hosts.says(JOB, "wordcount", tmp_path / "out", OWN / "epochs")
    assert f"the checkpoint store {OWN}/epochs/wordcount is a directory of the JobMaster's machine" in said["error"]
    assert f"machine that {two_hosts.hosts[1].name} (" in said["error"]
    assert "let all workers run on one machine" in said["error"]
    assert not list(tmp_path.glob("out/*part*")), "nothing has begun"
