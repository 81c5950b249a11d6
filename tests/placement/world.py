"""A simulated Ray cluster in a process of its own, and tests that are sent there.

Other tests of a process may be connected to another cluster, and a process knows one. A test is sent whole, by value,
and called with the world there is.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

# Much longer than anything here takes.
LIMIT_S = 60.0

STORE = 80 * 1024 * 1024


class World:
    """What tests get: nodes of 2, 2 and 1 CPUs, to which this process is connected from the first."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": STORE}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.head = self.cluster.head_node.node_id
        self.two = self.add(2, resources={"disk": 1.0}, labels={"rack": "a"}).node_id
        self.one = self.add(1).node_id
        ray.init(address=self.cluster.address, namespace="penstock", logging_level="warning", log_to_driver=False)

    def add(self, cpus: int, **options: Any) -> Any:
        return self.cluster.add_node(num_cpus=cpus, object_store_memory=STORE, **options)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()

    def until(self, condition: Callable[[], Any]) -> Any:
        """What the condition says, when that is true at last."""
        until = time.monotonic() + LIMIT_S
        while not (said := condition()):
            assert time.monotonic() < until, "it did not come true"
            time.sleep(0.02)
        return said

    def actor(self, **options: Any) -> Any:
        """An actor that is there; it says where, and can be told to use groups."""
        import ray

        class Actor:
            def node(self) -> str:
                node: str = ray.get_runtime_context().get_node_id()
                return node

            def pid(self) -> int:
                return os.getpid()

            def reserve(self, where: list[str], name: str) -> Any:
                from penstock.placement.groups import Group

                return Group.reserve(where, cpus=1, name=name, timeout_s=LIMIT_S)

            def attach(self, name: str) -> Any:
                from penstock.placement.groups import Group

                return Group.attach(name)

        actor = ray.remote(Actor).options(**{"num_cpus": 0, **options}).remote()
        ray.get(actor.node.remote(), timeout=LIMIT_S)
        return actor

    def on(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)

    def clear(self) -> None:
        """Remove what a test that failed has left."""
        from ray.util import placement_group_table

        from penstock.placement.groups import release

        for entry in placement_group_table().values():
            release(entry["name"])
        for node in [node for node in self.cluster.worker_nodes if node.node_id not in {self.two, self.one}]:
            self.cluster.remove_node(node)

    def settle(self) -> None:
        """Wait until all CPUs are free again, and known to be."""
        from penstock.placement.groups import machines

        self.until(lambda: all(machine.cpus == machine.free_cpus for machine in machines()))


class ByValue:
    """Pickled, and unpickled as what it stands for: functions of this module, which no other process can import."""

    def __init__(self, target: Any) -> None:
        self._data = cloudpickle.dumps(target)

    def __reduce__(self) -> tuple[Any, ...]:
        return cloudpickle.loads, (self._data,)


def serve(pipe: Connection) -> None:
    world = World()
    pipe.send("")
    while (test := pipe.recv()) is not None:
        problem = ""
        try:
            test(world)
            world.settle()
        except BaseException:
            problem = traceback.format_exc()
            world.clear()
        pipe.send(problem)
    world.close()


@contextmanager
def elsewhere(folder: Path) -> Iterator[Callable[[Any], None]]:
    """Calls tests with the World, in the process that has it."""
    mine = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(mine)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        # Ray's own word is "auto" for a cluster that it finds here: this one is for nobody else, and finds nobody.
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_TMPDIR", str(folder))
        process = context.Process(target=ByValue(serve), args=(theirs,), daemon=False)
        process.start()
    theirs.close()

    def call(test: Any) -> None:
        if test is not None:
            module = sys.modules[test.__module__]
            cloudpickle.register_pickle_by_value(module)
            try:
                ours.send(ByValue(test))
            finally:
                cloudpickle.unregister_pickle_by_value(module)
        assert ours.poll(3 * LIMIT_S), "no answer"
        if problem := ours.recv():
            pytest.fail(problem, pytrace=False)

    try:
        call(None)  # the world is there
        yield call
        ours.send(None)
        process.join(LIMIT_S)
    finally:
        cloudpickle.unregister_pickle_by_value(mine)
        if process.is_alive():
            process.kill()  # Ray's reapers end its cluster


def apart(test: Callable[[World], None]) -> Callable[[Any], None]:
    """A test that is called where the World is."""

    def run(elsewhere: Any) -> None:
        elsewhere(test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run
