"""Jobs over several nodes of a simulated cluster: tasks run where the plan says, and nothing is left."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.placement.world import World, apart

pytestmark = pytest.mark.ray

WORDS = "the quick brown fox jumps over the lazy dog".split()


@apart
def test_tasks_run_where_the_plan_says(world: World) -> None:
    """Two workers on each of two nodes, and the plan from the same pure function: read back from Ray, by process."""
    import ray

    import penstock as ps
    from penstock.placement.groups import machines
    from penstock.placement.planner import plan
    from penstock.placement.topology import of_plan
    from penstock.placement.traffic import Node

    flow = ps.Flow("over-nodes", chaining=False)
    lines = flow.read(ps.sources.Generator(lambda i: WORDS[i % len(WORDS)], 2_000, duration_s=3), parallelism=2)
    sink = ps.sinks.Collect()
    lines.map(str.upper, parallelism=4).key_by(str.lower).count(emit="final", parallelism=2).write(sink, parallelism=1)
    job = ps.run(flow, workers=4, nodes=2, placement="traffic", epoch_interval_s=0.2)
    world.until(lambda: job.status()["state"] == "RUNNING")
    status = job.status()
    nodes = [Node(node["name"], node["workers"]) for node in status["placement"]["nodes"]]
    assert [node.workers for node in nodes] == [2, 2]
    wanted = plan(of_plan(flow.plan(4)).graph, nodes)
    assert tuple(task["worker"] for task in status["tasks"]) == wanted.tasks
    chosen = status["placement"]["node_ids"]
    assert set(chosen) == {world.head, world.two}, "the nodes with room for two"
    by_worker = {worker["index"]: worker for worker in status["workers"]}
    actors = {actor["Pid"]: actor["Address"]["NodeID"] for actor in ray._private.state.actors().values()}
    for index, worker in by_worker.items():
        assert worker["node_id"] == chosen[wanted.workers[index]], "what the worker says"
        assert actors[worker["pid"]] == worker["node_id"], "and what Ray says of its process"
    job.wait(60, progress=False)
    assert Counter(dict(sink.records())) == Counter(WORDS[i % len(WORDS)] for i in range(6_000))
    world.until(lambda: all(machine.cpus == machine.free_cpus for machine in machines()))


@apart
def test_more_nodes_than_there_are(world: World) -> None:
    import penstock as ps
    from penstock.placement.options import PlacementOptions
    from penstock.runtime.errors import NotEnoughResources

    flow = ps.Flow("too-many-nodes")
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Null())
    job = ps.run(flow, workers=4, nodes=4)
    with pytest.raises(NotEnoughResources, match="to run on 4 nodes, and the cluster has 3"):
        job.wait(60, progress=False)
    job = ps.run(flow, workers=4, start_timeout_s=1, placement=PlacementOptions(nodes=4, grow=True))
    with pytest.raises(
        NotEnoughResources, match=r"4 x 1 CPU \(STRICT_SPREAD\) .* may just need a longer start_timeout_s"
    ):
        job.wait(60, progress=False)
    job = ps.run(flow, workers=6, start_timeout_s=1, placement=PlacementOptions(grow=True))
    with pytest.raises(NotEnoughResources, match=r"1 x 6 CPUs \(STRICT_SPREAD\)"):
        job.wait(60, progress=False)
    job = ps.run(flow, workers=4, placement=PlacementOptions(nodes=4, at_least=3))
    job.wait(60, progress=False)
    assert sorted(node["workers"] for node in job.status()["placement"]["nodes"]) == [1, 1, 2]


@apart
def test_a_job_waits_for_the_nodes_that_its_cluster_adds(world: World) -> None:
    """Four nodes, a worker each, one of which comes when it is asked for; and tasks run where the plan says."""
    import penstock as ps
    from penstock.actors.cluster import workers_group
    from penstock.placement.groups import Group, machines
    from penstock.placement.options import PlacementOptions
    from penstock.placement.planner import plan
    from penstock.placement.topology import of_plan
    from penstock.placement.traffic import Node

    flow = ps.Flow("grown-nodes", chaining=False)
    numbers = flow.read(ps.sources.Generator(int, 100), parallelism=2)
    numbers.key_by(lambda n: n % 5).count(parallelism=4).write(ps.sinks.Null(), parallelism=2)
    job = ps.run(flow, workers=4, placement=PlacementOptions("traffic", nodes=4, grow=True))
    world.until(lambda: Group.attach(workers_group(job.name)) is not None)
    assert job.state == "STARTING"
    added = world.add(1)
    world.until(lambda: job.state == "RUNNING")
    status = job.status()
    node_of = {worker["index"]: worker["node_id"] for worker in status["workers"]}
    assert set(node_of.values()) == {world.head, world.two, world.one, added.node_id}
    wanted = plan(of_plan(flow.plan(4)).graph, [Node(str(n)) for n in range(4)])
    chosen = status["placement"]["node_ids"]
    there = [node_of[task["worker"]] for task in status["tasks"]]
    assert there == [chosen[node] for node in wanted.node_of]
    job.cancel()
    job.wait(60, progress=False)
    world.settle()
    world.cluster.remove_node(added)
    world.until(lambda: added.node_id not in {machine.node_id for machine in machines()})


@apart
def test_a_job_whose_node_dies_continues_on_another_or_says_that_there_is_none(world: World) -> None:
    import ray

    import penstock as ps
    from penstock.placement.groups import machines
    from penstock.runtime.errors import NotEnoughResources

    added = [world.add(2), world.add(2)]
    flow = ps.Flow("dying-node")
    flow.read(ps.sources.Generator(int, 100), parallelism=2).write(ps.sinks.Null())
    job = ps.run(flow, workers=4, cpus_per_worker=2, start_timeout_s=30, nodes=4)
    world.until(lambda: job.state == "RUNNING")
    workers = {worker["pid"] for worker in job.status()["workers"]}
    # The JobMaster is on any of them: one that dies with its node starts again, and finds too few nodes.
    at = {a["Address"]["NodeID"] for a in ray._private.state.actors().values() if a["Pid"] not in workers}
    dying = next(node for node in added if node.node_id not in at)
    assert dying.node_id in job.status()["placement"]["node_ids"]
    spare = world.add(2)
    world.cluster.remove_node(dying)
    world.until(lambda: job.state == "RUNNING" and spare.node_id in job.status()["placement"]["node_ids"])
    status = job.status()
    assert dying.node_id not in status["placement"]["node_ids"]
    (moved,) = [worker for worker in status["workers"] if worker["node_id"] == spare.node_id]
    assert [task["worker"] for task in status["tasks"]].count(moved["index"]), "its tasks are the same"
    world.cluster.remove_node(spare)
    with pytest.raises(NotEnoughResources, match=r"is lost, and no other node has room for worker \d"):
        job.wait(120, progress=False)
    world.cluster.remove_node(next(node for node in added if node is not dying))
    world.until(lambda: len(machines()) == 3)


@apart
def test_no_room_on_a_node(world: World) -> None:
    import penstock as ps
    from penstock.runtime.errors import NotEnoughResources

    flow = ps.Flow("no-room")
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Null())
    job = ps.run(flow, workers=6, nodes=3, start_timeout_s=2)
    with pytest.raises(NotEnoughResources, match="has only 1 of the 2 CPUs that workers"):
        job.wait(60, progress=False)


@apart
def test_room_that_comes_elsewhere_is_taken(world: World) -> None:
    """Jobs that start together choose the same nodes, and one of them has to take others."""
    from penstock.actors.nodes import Nodes
    from penstock.placement.groups import Group
    from penstock.placement.options import PlacementOptions

    head = Group.reserve([world.head] * 2, cpus=1, name="head", timeout_s=60)
    two = Group.reserve([world.two] * 2, cpus=1, name="two", timeout_s=60)
    asked = []

    def cancelled() -> bool:
        if not asked:
            two.remove()
        asked.append(1)
        return False

    nodes = Nodes(PlacementOptions(nodes=1), 2)
    nodes.reserve("late", 1.0, 60.0, cancelled)
    assert asked, "at first there was no room"
    assert [machine.node_id for machine in nodes.layout.machines] == [world.two]
    assert nodes.workers == 2
    nodes.close()
    head.remove()


@apart
def test_two_jobs_share_the_nodes(world: World) -> None:
    """Nothing is reserved for them any more when they were cancelled."""
    import penstock as ps
    from penstock.actors.cluster import workers_group
    from penstock.placement.groups import Group

    jobs = []
    for name in ("one-of-two", "two-of-two"):
        flow = ps.Flow(name)
        flow.read(ps.sources.Generator(int, 100)).write(ps.sinks.Null())
        jobs.append(ps.run(flow, workers=2, nodes=1))
    world.until(lambda: all(job.state == "RUNNING" for job in jobs))
    assert {job.status()["placement"]["node_ids"][0] for job in jobs} == {world.head, world.two}
    assert all(Group.attach(workers_group(job.name)) is not None for job in jobs)
    for job in jobs:
        job.cancel()
        job.wait(60, progress=False)
    world.until(lambda: all(Group.attach(workers_group(job.name)) is None for job in jobs))


@apart
def test_pinned_tasks_run_where_they_must(world: World) -> None:
    """By a label and by a resource, with a placement that knows nothing of it, and with one that does."""
    import penstock as ps
    from penstock.placement.options import Method, PlacementOptions

    methods: list[Method] = ["round-robin", "traffic"]
    for method in methods:
        flow = ps.Flow(f"pinned-{method}", chaining=False)
        lines = flow.read(ps.sources.Generator(int, 100), name="in", parallelism=2)
        lines.map(str, name="text", parallelism=3).write(ps.sinks.Null(), name="out", parallelism=1)
        pin = {"text": {"rack": "a"}, "in": {"disk": 1.0}}
        job = ps.run(flow, workers=2, placement=PlacementOptions(method, nodes=2, pin=pin))
        world.until(lambda job=job: job.status()["state"] == "RUNNING")
        status = job.status()
        node_of = {worker["index"]: worker["node_id"] for worker in status["workers"]}
        there = {task["name"]: node_of[task["worker"]] for task in status["tasks"]}
        assert {node for name, node in there.items() if name.startswith(("in", "text"))} == {world.two}
        job.cancel()
        job.wait(60, progress=False)
        world.settle()


@apart
def test_what_no_node_has(world: World) -> None:
    import penstock as ps
    from penstock.placement.options import PlacementOptions
    from penstock.runtime.errors import NotEnoughResources

    flow = ps.Flow("pinned-nowhere")
    flow.read(ps.sources.Memory([1]), name="in").write(ps.sinks.Null(), name="out")
    for pin, message in (
        (
            {"out": {"rack": "b"}},
            "operator 'out' is pinned to nodes with rack=b, and no node of the cluster has that",
        ),
        ({"in": {"node:__internal_head__": 1.0}, "out": {"rack": "a"}}, "'in > out' is pinned to nodes with rack=a"),
    ):
        job = ps.run(flow, workers=2, placement=PlacementOptions(nodes=2, pin=pin))
        with pytest.raises(NotEnoughResources, match=message):
            job.wait(60, progress=False)


@apart
def test_a_smaller_plan_when_that_will_do(world: World) -> None:
    import penstock as ps
    from penstock.placement.options import PlacementOptions

    flow = ps.Flow("smaller", parallelism=2)
    sink = ps.sinks.Collect()
    flow.read(ps.sources.Memory(range(100))).map(str).write(sink)
    job = ps.run(flow, workers=3, cpus_per_worker=2, placement=PlacementOptions(nodes=2, at_least=2))
    job.wait(60, progress=False)
    assert sorted(sink.records(), key=int) == [str(n) for n in range(100)]
    assert [node["workers"] for node in job.status()["placement"]["nodes"]] == [1, 1]
