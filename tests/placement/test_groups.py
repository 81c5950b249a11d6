"""Plans as placement groups of Ray, and what Ray does with a group when its maker or a node dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import cloudpickle
import pytest

from tests.placement.world import LIMIT_S, World, apart

pytestmark = pytest.mark.ray


@apart
def test_machines_are_told_with_the_head_first(world: World) -> None:
    from penstock.placement.groups import machines

    found = machines()
    assert found[0].node_id == world.head
    assert {machine.node_id: machine.cpus for machine in found} == {world.head: 2, world.two: 2, world.one: 1}
    assert all(machine.free_cpus == machine.cpus and machine.memory > 0 and machine.name for machine in found)
    two = next(machine for machine in found if machine.node_id == world.two)
    assert (two.labels["rack"], two.resources["disk"]) == ("a", 1)
    holder = world.actor(num_cpus=1.5, scheduling_strategy=world.on(world.two))
    world.until(lambda: {machine.node_id: machine.free_cpus for machine in machines()}[world.two] == 0.5)
    del holder


@apart
def test_workers_are_exactly_where_the_plan_says(world: World) -> None:
    from penstock.placement.groups import Group

    where = [world.two, world.one, world.head, world.two, world.head]
    group = Group.reserve(where, cpus=1, name="exact", timeout_s=LIMIT_S)
    assert group.where() == where
    assert (len(group), group.lost(), group.is_gone()) == (5, [], False)
    import ray

    actors = [world.actor(num_cpus=1, scheduling_strategy=group.strategy(worker)) for worker in range(5)]
    assert ray.get([actor.node.remote() for actor in actors]) == where
    group.remove()
    group.remove()
    assert group.is_gone()
    assert (group.where(), group.lost(), Group.attach("exact")) == ([], [0, 1, 2, 3, 4], None)
    with pytest.raises(ray.exceptions.RayActorError):  # they go with it
        world.until(lambda: ray.get(actors[0].node.remote(), timeout=LIMIT_S) is None)


@apart
def test_parts_of_a_cpu_none_at_all_and_other_resources(world: World) -> None:
    import ray

    from penstock.placement.groups import Group

    for cpus, resources, where in [
        (0.25, None, [world.one] * 4),
        (0, None, [world.one, world.two, world.head, world.one]),
        (1, [{"disk": 0.5}] * 2, [world.two] * 2),
        (0.5, [{}, {"disk": 1}], [world.one, world.two]),
    ]:
        group = Group.reserve(where, cpus=cpus, resources=resources, name="parts", timeout_s=LIMIT_S)
        last = len(where) - 1
        own = None if resources is None else resources[last]
        actor = world.actor(num_cpus=cpus, resources=own, scheduling_strategy=group.strategy(last))
        assert group.where() == where
        assert ray.get(actor.node.remote()) == where[last]
        group.remove()


@apart
def test_what_can_never_be_is_said_at_once(world: World) -> None:
    from penstock.placement.groups import Group, NotPlaced
    from penstock.runtime.errors import NotEnoughResources

    began = time.monotonic()
    with pytest.raises(NotPlaced) as raised:
        Group.reserve([world.head, world.one, world.one], cpus=1, name="much", timeout_s=1e9)
    assert isinstance(raised.value, NotEnoughResources)
    assert f"({world.one[:8]}) has only 1 of the 2 CPUs that workers 1 and 2 need" in str(raised.value)
    assert raised.value.nodes == (world.one,)
    assert cloudpickle.loads(cloudpickle.dumps(raised.value)).nodes == (world.one,)
    with pytest.raises(NotPlaced, match="0 of the 1 disk that worker 0 needs"):
        Group.reserve([world.one], cpus=1, resources=[{"disk": 1}], name="disk", timeout_s=1e9)
    with pytest.raises(NotPlaced, match="there is no node ffffffff, which worker 1 should be on"):
        Group.reserve([world.one, "f" * 56], cpus=1, name="nowhere", timeout_s=1e9)
    with pytest.raises(ValueError, match="at least one"):
        Group.reserve([], cpus=1, name="none", timeout_s=1)
    assert time.monotonic() - began < 20
    assert [Group.attach(name) for name in ("much", "disk", "nowhere", "none")] == [None] * 4


@apart
def test_what_others_hold_is_said_when_the_time_is_over(world: World) -> None:
    import ray

    from penstock.placement.groups import Group, NotPlaced

    holder = world.actor(num_cpus=1, scheduling_strategy=world.on(world.two))
    other = Group.reserve([world.two, world.one], cpus=0.5, name="other", timeout_s=LIMIT_S)
    with pytest.raises(NotPlaced) as raised:
        Group.reserve([world.head, world.two, world.two], cpus=1, name="late", timeout_s=1)
    said = str(raised.value)
    assert f"({world.two[:8]}) has 0.5 of the 2 CPUs that workers 1 and 2 need" in said
    assert "(held: 0.5 CPUs by placement group other, 1 CPU by actors and tasks of no group)" in said
    assert "within 1 s" in said
    assert raised.value.nodes == (world.two,)
    assert Group.attach("late") is None
    # What was taken back in between is used.
    ray.kill(holder)
    other.remove()
    late = Group.reserve([world.head, world.two, world.two], cpus=1, name="late", timeout_s=LIMIT_S)
    assert late.where() == [world.head, world.two, world.two]
    late.remove()


@apart
def test_waiting_can_be_cancelled_or_interrupted_and_leaves_nothing(world: World) -> None:
    import threading

    from penstock.placement.groups import Group, NotPlaced, PlacingCancelled, release

    other = Group.reserve([world.one], cpus=1, name="other", timeout_s=LIMIT_S)
    asked = []
    with pytest.raises(PlacingCancelled):
        Group.reserve([world.one], cpus=1, name="late", timeout_s=1e9, cancelled=lambda: asked.append(1) or True)
    assert asked == [1]
    assert Group.attach("late") is None

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Group.reserve([world.one], cpus=1, name="late", timeout_s=1e9, cancelled=interrupt)
    assert Group.attach("late") is None
    remover = threading.Thread(target=lambda: world.until(lambda: release("late")))
    remover.start()
    with pytest.raises(NotPlaced, match="somebody has removed"):
        Group.reserve([world.one], cpus=1, name="late", timeout_s=1e9)
    remover.join()
    other.remove()


@apart
def test_a_group_of_the_same_name_is_replaced(world: World) -> None:
    from penstock.placement.groups import Group, release

    first = Group.reserve([world.one], cpus=1, name="same", timeout_s=LIMIT_S)
    second = Group.reserve([world.one], cpus=1, name="same", timeout_s=LIMIT_S)
    assert first.is_gone()
    assert second.where() == [world.one]
    assert release("same")
    assert not release("same")
    assert second.is_gone()


@apart
def test_anywhere_goes_where_there_is_room_and_waits_for_nodes_to_come(world: World) -> None:
    from penstock.placement.groups import Group, NotPlaced

    group = Group.reserve_anywhere(3, cpus=1, name="any", strategy="STRICT_SPREAD", timeout_s=LIMIT_S)
    assert sorted(group.where()) == sorted([world.head, world.two, world.one])
    with pytest.raises(NotPlaced) as raised:
        Group.reserve_anywhere(2, cpus=1, name="more", strategy="STRICT_PACK", timeout_s=1)
    said = str(raised.value)
    assert "2 x 1 CPU (STRICT_PACK)" in said
    assert f"({world.one[:8]}) has 0 CPUs free of 1 CPU (held: 1 CPU by placement group any)" in said
    assert Group.attach("more") is None
    added: list[Any] = []

    def add_when_it_waits() -> bool:  # in the main thread: Cluster sets signal handlers
        if not added:
            added.append(world.add(2))
        return False

    more = Group.reserve_anywhere(
        2, cpus=1, name="more", strategy="STRICT_PACK", timeout_s=LIMIT_S, cancelled=add_when_it_waits
    )
    assert more.where() == [added[0].node_id] * 2
    group.remove()
    more.remove()
    world.cluster.remove_node(added[0])


@apart
def test_a_group_outlives_its_actor_and_is_found_by_the_next_life(world: World) -> None:
    import ray

    from penstock.placement.groups import Group, release

    maker = world.actor(max_restarts=1, max_task_retries=-1)
    group = ray.get(maker.reserve.remote([world.two, world.one], "lives"), timeout=LIMIT_S)
    before = ray.get(maker.pid.remote())
    os.kill(before, signal.SIGKILL)
    found = ray.get(maker.attach.remote("lives"), timeout=LIMIT_S)
    assert ray.get(maker.pid.remote()) != before
    assert found is not None
    assert found.where() == group.where() == [world.two, world.one]
    worker = world.actor(num_cpus=1, scheduling_strategy=found.strategy(1))
    assert ray.get(worker.node.remote()) == world.one
    # Nobody removes it while the driver lives, wherefore it has to be released.
    ray.kill(maker)
    world.until(lambda: ray._private.state.actors(maker._actor_id.hex())["State"] == "DEAD")
    assert Group.attach("lives") is not None
    assert release("lives")
    assert group.is_gone()


@apart
def test_a_group_of_a_detached_actor_goes_when_that_dies_or_starts_again(world: World) -> None:
    import ray

    from penstock.placement.groups import Group

    maker = world.actor(max_restarts=1, max_task_retries=-1, name="maker", lifetime="detached")
    group = ray.get(maker.reserve.remote([world.two, world.one], "detached"), timeout=LIMIT_S)
    os.kill(ray.get(maker.pid.remote()), signal.SIGKILL)
    world.until(group.is_gone)
    again = ray.get(maker.reserve.remote([world.two, world.one], "detached"), timeout=LIMIT_S)
    assert again.where() == [world.two, world.one]
    ray.kill(maker)
    world.until(again.is_gone)
    assert Group.attach("detached") is None


@apart
def test_a_group_goes_when_its_driver_is_killed(world: World) -> None:
    from penstock.placement.groups import Group

    driver = """if True:
        import sys, time, threading, ray
        from penstock.placement.groups import Group
        address, one = sys.argv[1:]
        ray.init(address=address, namespace="another", logging_level="warning", log_to_driver=False)
        @ray.remote(num_cpus=0)
        class Maker:
            def reserve(self, cpus, name):
                Group.reserve([one], cpus=cpus, name=name, timeout_s=1e9)
        maker, other = Maker.remote(), Maker.remote()
        ray.get(maker.reserve.remote(1, "placed"))
        late = other.reserve.remote(1, "waiting")
        while Group.attach("waiting") is None:
            time.sleep(0.02)
        print("made", flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", driver, world.cluster.address, world.one]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
            groups = [Group.attach("placed"), Group.attach("waiting")]  # in another namespace than here
            assert groups[0] is not None
            assert groups[1] is not None
            assert groups[0].where() == [world.one]
            assert groups[1].where() == [""]
        finally:
            process.kill()
    world.until(lambda: all(group is not None and group.is_gone() for group in groups))


@apart
def test_what_a_dead_node_had_is_lost_and_the_rest_stays(world: World) -> None:
    import ray

    from penstock.placement.groups import Group, NotPlaced, machines

    node = world.add(2)
    world.until(lambda: len(machines()) == 4)
    group = Group.reserve([node.node_id, world.two, node.node_id], cpus=1, name="dying", timeout_s=LIMIT_S)
    free = Group.reserve_anywhere(1, cpus=1, name="dying too", timeout_s=LIMIT_S)
    actors = [world.actor(num_cpus=1, scheduling_strategy=group.strategy(worker)) for worker in range(2)]
    assert group.lost() == []
    world.cluster.remove_node(node)
    world.until(lambda: group.lost() == [0, 2])
    assert group.where()[1] == world.two
    assert not group.is_gone()
    # Those that are left run on, and can be started anew.
    assert ray.get(actors[1].node.remote(), timeout=LIMIT_S) == world.two
    ray.kill(actors[1])
    assert ray.get(world.actor(num_cpus=1, scheduling_strategy=group.strategy(1)).node.remote()) == world.two
    world.until(lambda: free.lost() == [])
    with pytest.raises(NotPlaced, match=r"node .* which worker 1 should be on, has died"):
        Group.reserve([world.one, node.node_id], cpus=1, name="dead", timeout_s=1e9)
    # A node more has another id: it is not what the lost ones wait for, so there is a group for them alone.
    more = Group.reserve([world.one, world.head], cpus=1, name="dying 1", timeout_s=LIMIT_S)
    assert more.where() == [world.one, world.head]
    assert group.lost() == [0, 2]
    for each in (group, free, more):
        each.remove()
