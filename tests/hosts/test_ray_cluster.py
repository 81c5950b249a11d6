"""Ray on hosts of the tests: actors on two machines call each other."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.ray_cluster import RayCluster

pytestmark = pytest.mark.ray

ACTORS = """
import json, os, socket
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


def test_actors_on_two_hosts_call_each_other(new_hosts: Callable[[int], Hosts]) -> None:
    hosts = new_hosts(2)
    cluster = RayCluster(hosts)
    names = [host.name for host in hosts]
    assert json.loads(hosts[0].python(ACTORS, env=cluster.environment)) == [
        names,
        [names[0], [names[1]]],
        [names[1], [names[0]]],
    ]
    assert all(any("raylet" in command for command in host.processes().values()) for host in hosts)
