"""A plan becomes a Ray placement group: one bundle for each worker, pinned to the node that the plan chose for it.

The paper's last step (docs/papers.md: T10): it decides which tasks share a worker and which workers share a node, and
Ray has to keep to it. A label selector on each bundle says so; NodeAffinity would place the actors as well, but reserve
nothing: a group is placed whole or not at all, and nobody else gets its CPUs while a worker is started anew. What Ray
made of it is read back before it is believed: early versions lost selectors on the way (ray#55590).

What Ray 2.60 does with a group, found by trying it (tests/placement/test_groups.py holds it to that):

- A group belongs to the actor that made it *and* to that actor's driver, and goes when both have ended; a detached
  actor has no driver. So:
  - made by a driver: it goes when the driver ends, killed or not (0.1 s);
  - made by an actor of a driver: it outlives the actor, whether that is restarted, killed for good, or ends by itself,
    until the driver ends (0.1 s). The actor's next life finds it by `Group.attach`. **Where the actor ends and its
    driver lives on, somebody has to call `release`**: the JobMaster itself when its job ends, and the driver (or the
    next run of the job) when the JobMaster died without a word;
  - made by a detached actor: it goes when that actor's process or node dies (1 s), also when Ray starts the actor
    again: its next life finds nothing, and has to reserve anew.
- Ray's own lifetime="detached" would leak a group: never used here.
- A group that still waits for room goes in the same ways, and when a group goes, Ray kills the actors in it.
- When a node dies, those of its bundles are without a node (`lost`) as soon as Ray has noticed: at once when it said
  good-bye, 13 s after its raylet was killed, later than 40 s when that was only stopped. The others stay as they are,
  with their actors, and take new ones. A bundle that was pinned waits for ever, as no node has the same id again, and
  an actor put into it waits with it; one that was not pinned moves to another node with room. So after a node's death:
  reserve a second group for the lost workers, or remove this one and reserve all anew (which ends the workers that are
  left).
- Waiting has a resolution of one second: Ray takes no part of one.

What this must never do: keep a group when reserving failed, or was cancelled, or was interrupted; place a
worker where the plan did not say; wait for what cannot come (a node that is dead, or too small).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.runtime.errors import NotEnoughResources
from penstock.runtime.operators.resources import together

#: The label by which the user says how fast a core of a node is, where 1 is the speed of a node without the label.
SPEED = "penstock/speed"

#: The label by which a bundle is pinned to a node; Ray gives it to every node.
NODE_ID = "ray.io/node-id"

_HEAD = "node:__internal_head__"  # a resource that only the head node has

# Ray refuses a bundle without resources. Every node has memory, also one with 0 CPUs (as head nodes often are), and a
# byte of it is missed by nobody.
_NEXT_TO_NOTHING = {"memory": 1.0}

# Ray counts resources in ten-thousandths.
_LEAST = 0.00005

_WAIT_S = 1

# Stands between the name of a group and the number of the worker for which another group has replaced a part of it.
_REPLACED = "/worker-"

_REMEDY = "Stop other jobs, or use fewer workers or a smaller cpus_per_worker"


class NotPlaced(NotEnoughResources):
    """The workers could not be placed as asked, and nothing is left reserved in Ray. The message says what is missing
    on which node.

    `nodes`: the ids of the nodes that have died, or cannot take (or did not take in time) what was asked of them: a
    plan without them may work.
    """

    def __init__(self, message: str, nodes: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.nodes))


class PlacingCancelled(NotPlaced):
    """Placement was cancelled while the workers were waiting for room."""


@dataclass(frozen=True)
class Machine:
    """A living node of the cluster. `resources` and `free_cpus`: what nobody uses now, or used a moment ago."""

    node_id: str
    name: str  # its host's, for people: several nodes may have the same
    cpus: float
    free_cpus: float
    memory: float  # bytes that Ray may give away
    labels: Mapping[str, str]
    resources: Mapping[str, float]
    totals: Mapping[str, float]
    address: str = ""  # the numeric network address
    port: int = 0  # at this address, of the node's raylet; 0: unknown

    @property
    def host(self) -> tuple[str, str]:
        """The common part of the nodes of one machine."""
        return self.name, self.address

    @property
    def speed(self) -> float:
        """How fast one of its cores is, by the label SPEED. Raises NotPlaced when the label is no number above 0."""
        given = self.labels.get(SPEED, "1")
        try:
            speed = float(given)
        except ValueError:
            speed = 0.0
        if not 0 < speed < float("inf"):
            raise NotPlaced(
                f"node {self} has the label {SPEED}={given}; it must be a number above 0, such as 0.5 for a node whose "
                "cores are half as fast as those of nodes without this label",
                (self.node_id,),
            )
        return speed

    def __str__(self) -> str:
        return f"{self.name} ({self.node_id[:8]})"


def machines() -> list[Machine]:
    """Returns the living nodes: the head first, then the others by name and id."""
    # There is no public way to what is free on each node: ray.available_resources() is the sum, and ray.util.state
    # needs the dashboard and knows totals only. ray.nodes() and this are one call each to the GCS (some 1 ms).
    free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        totals: dict[str, float] = node["Resources"]
        left = free.get(node["NodeID"], totals)  # one that has just come has not said what it has: nothing runs there
        found.append(
            Machine(
                node["NodeID"],
                node["NodeManagerHostname"] or node["NodeManagerAddress"],
                totals.get("CPU", 0.0),
                left.get("CPU", 0.0),
                totals.get("memory", 0.0),
                dict(node["Labels"]),
                {name: amount for name, amount in left.items() if "_group_" not in name},
                dict(totals),
                node["NodeManagerAddress"],
                node["NodeManagerPort"],
            )
        )
    return sorted(found, key=lambda machine: (_HEAD not in machine.totals, machine.name, machine.node_id))


def replacement_name(name: str, worker: int, number: int) -> str:
    """Returns the name of a group for one worker, whose place in the group of this name is lost."""
    return f"{name}{_REPLACED}{worker}.{number}"


def release(name: str) -> bool:
    """Removes the group of this name, and the groups that have replaced parts of it. Returns whether there was one. A
    process that outlives the group's maker calls this."""
    found = False
    for hexadecimal, entry in placement_group_table().items():
        if entry["name"].partition(_REPLACED)[0] == name and entry["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(hexadecimal))))
            found = True
    return found


class Group:
    """A placement group of a job; bundle i is for worker i. It may be sent to other processes of the cluster.

    It has nothing that goes with this object: see the module's docstring for when Ray removes it.
    """

    def __init__(self, name: str, group: PlacementGroup, count: int) -> None:
        """Use `reserve`, `reserve_anywhere` or `attach` instead."""
        self.name = name
        self._group = group
        self._count = count

    @classmethod
    def reserve(
        cls,
        where: Sequence[str],
        *,
        cpus: float,
        name: str,
        resources: Sequence[Mapping[str, float]] | None = None,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Group:
        """Reserves a bundle of `cpus` CPUs (and the other `resources` of the worker) for each entry of `where`, the id
        of the node on which the worker of the same number is to run. Returns when all bundles are placed.

        A group of this name that an earlier process of the job has left is removed first, in whatever namespace it is:
        names must belong to one job. With 0 CPUs a bundle has one byte of memory, because Ray does not pin an empty
        bundle.

        Raises NotPlaced after `timeout_s` (in whole seconds, rounded up), or at once when waiting is useless, and
        PlacingCancelled within a second after `cancelled` has become true.
        """
        bundles = [_bundle(cpus, own) for own in (resources or [{}] * len(where))]
        selectors = [{NODE_ID: node} for node in where]

        def hopeless() -> None:
            _check_nodes(where, bundles, machines())

        def missing(group: Group) -> NotPlaced:
            return _missing(where, bundles, timeout_s, group)

        hopeless()
        group = cls._make(bundles, "PACK", name, selectors)
        return group._placed(timeout_s, cancelled, hopeless, missing, where)

    @classmethod
    def reserve_anywhere(
        cls,
        count: int,
        *,
        cpus: float,
        name: str,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Group:
        """Does the same for `count` workers wherever there is room, and in a cluster that grows by demand, wherever
        there will be: Ray's autoscaler adds nodes for bundles that wait. `where()` says which nodes the group got.
        `strategy` is Ray's: PACK (as few nodes as possible), SPREAD, STRICT_PACK (one node), STRICT_SPREAD (each on its
        own).

        In a cluster that may grow, nothing is known to be too much, so only the time ends the waiting.
        """
        bundle = _bundle(cpus, resources)

        def missing(group: Group) -> NotPlaced:
            return _missing_anywhere(count, bundle, strategy, timeout_s, group)

        group = cls._make([bundle] * count, strategy, name, None)
        return group._placed(timeout_s, cancelled, lambda: None, missing, None)

    @classmethod
    def attach(cls, name: str) -> Group | None:
        """Returns the group of this name, placed or not, or None when there is none, or no longer.

        The group is looked for in all namespaces, unlike by ray.util.get_placement_group: a group has the namespace of
        the driver whose actor has made it, and other drivers of the job need not share this namespace.
        """
        for hexadecimal, entry in placement_group_table().items():
            if entry["name"] == name and entry["state"] != "REMOVED":
                group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(hexadecimal)))
                return cls(name, group, len(entry["bundles"]))
        return None

    def __len__(self) -> int:
        return self._count

    def strategy(self, worker: int) -> PlacementGroupSchedulingStrategy:
        """Returns the scheduling strategy for the actor of a worker. Actors and tasks that this actor starts are not
        put into the group."""
        return PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=worker, placement_group_capture_child_tasks=False
        )

    def where(self) -> list[str]:
        """Returns the present node id of each bundle, "" for a bundle without a node, and an empty list when the group
        has gone."""
        entry = self._entry()
        if entry is None:
            return []
        at: dict[int, str] = entry["bundles_to_node_id"]
        return [at[index] for index in sorted(at)]

    def lost(self) -> list[int]:
        """Returns the workers whose node has died, as far as Ray has noticed; all workers when the group has gone."""
        entry = self._entry()
        if entry is None:
            return list(range(self._count))
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return sorted(index for index, node in entry["bundles_to_node_id"].items() if node not in living)

    def is_gone(self) -> bool:
        """Tells whether the group was removed, by anyone."""
        return self._entry() is None

    def remove(self) -> None:
        """Removes the group and gives its resources back. Ray kills the actors in it. A second call does nothing."""
        remove_placement_group(self._group)

    def _entry(self) -> dict[str, Any] | None:
        entry: dict[str, Any] = placement_group_table(self._group)
        return entry if entry and entry["state"] != "REMOVED" else None

    @classmethod
    def _make(
        cls, bundles: list[dict[str, float]], strategy: str, name: str, selectors: list[dict[str, str]] | None
    ) -> Group:
        if not bundles:
            raise ValueError("there must be at least one worker to place")
        release(name)
        group = placement_group(bundles, strategy=strategy, name=name, bundle_label_selector=selectors)
        return cls(name, group, len(bundles))

    def _placed(
        self,
        timeout_s: float,
        cancelled: Callable[[], bool],
        hopeless: Callable[[], None],
        missing: Callable[[Group], NotPlaced],
        where: Sequence[str] | None,
    ) -> Group:
        """Waits until the group is placed, and returns the group. Removes the group when the wait fails in any way."""
        until = time.monotonic() + timeout_s
        try:
            # In steps, to notice what ends the waiting; each ends as soon as the group is placed.
            while not self._wait():
                if cancelled():
                    raise PlacingCancelled(f"placing the workers of {self.name} was cancelled")
                hopeless()
                if time.monotonic() >= until:
                    raise missing(self)
            if where is not None and (got := self.where()) != list(where):
                raise NotPlaced(
                    f"this version of Ray ({ray.__version__}) does not obey bundle_label_selector: workers were to "
                    f"be on the nodes {', '.join(_short(where))}, and it chose {', '.join(_short(got))}. Use Ray 2.60"
                )
        except BaseException:
            self.remove()
            raise
        return self

    def _wait(self) -> bool:
        try:
            return bool(self._group.wait(_WAIT_S))
        except Exception as error:  # Ray has no class of its own for it
            if self.is_gone():
                raise NotPlaced(
                    f"the workers of {self.name} cannot be placed, because somebody has removed their placement group; "
                    "start the job again"
                ) from error
            raise


def _bundle(cpus: float, resources: Mapping[str, float] | None) -> dict[str, float]:
    wanted = {"CPU": float(cpus), **(resources or {})}
    if any(amount < 0 for amount in wanted.values()):
        raise ValueError(f"a worker's resources must be 0 or more: {wanted}")
    return {name: amount for name, amount in wanted.items() if amount} or dict(_NEXT_TO_NOTHING)


def _check_nodes(where: Sequence[str], bundles: Sequence[Mapping[str, float]], living: Sequence[Machine]) -> None:
    """Raises NotPlaced when the nodes can never take the workers, even if all else ends."""
    by_id = {machine.node_id: machine for machine in living}
    problems: dict[str, str] = {}
    known = None
    for node, workers in _workers_at(where).items():
        machine = by_id.get(node)
        if machine is not None:
            if text := _short_of(machine, workers, bundles, machine.totals, "has only"):
                problems[node] = text
            continue
        if known is None:
            known = {entry["NodeID"]: entry for entry in ray.nodes()}
        entry = known.get(node)
        if entry is None:
            problems[node] = f"there is no node {node[:8]}, which {_list(workers)} should be on"
        else:
            host = entry["NodeManagerHostname"] or entry["NodeManagerAddress"]
            problems[node] = f"node {host} ({node[:8]}), which {_list(workers)} should be on, has died"
    if problems:
        names = ", ".join(map(str, living))
        raise NotPlaced(
            f"the workers cannot be placed: {'; '.join(problems.values())}. The living nodes: {names}", problems
        )


def _missing(where: Sequence[str], bundles: Sequence[Mapping[str, float]], timeout_s: float, group: Group) -> NotPlaced:
    """Describes the missing resources on the nodes that were chosen for the workers."""
    living = machines()
    _check_nodes(where, bundles, living)
    by_id = {machine.node_id: machine for machine in living}
    held = _held_by_groups(group)
    problems = {}
    for node, workers in _workers_at(where).items():
        machine = by_id[node]
        if text := _short_of(machine, workers, bundles, machine.resources, "has"):
            names = {name for worker in workers for name in bundles[worker]}
            problems[node] = text + _holders(machine, sorted(names), held[node])
    said = "; ".join(problems.values()) or f"each node seems to have room by now; Ray says {_says(group)}"
    return NotPlaced(
        f"the {len(where)} workers of {group.name} could not be placed within {timeout_s:g} s: {said}. {_REMEDY}",
        problems,
    )


def _missing_anywhere(
    count: int, bundle: Mapping[str, float], strategy: str, timeout_s: float, group: Group
) -> NotPlaced:
    held = _held_by_groups(group)
    living = machines()
    rooms = [
        f"{machine} has {_amounts(bundle, machine.resources)} free of {_amounts(bundle, machine.totals)}"
        + _holders(machine, bundle, held[machine.node_id])
        for machine in living
    ]
    return NotPlaced(
        f"{count} x {_amounts(bundle, bundle)} ({strategy}) for the workers of {group.name} could not be placed within "
        f"{timeout_s:g} s; Ray says {_says(group)}: {'; '.join(rooms)}. {_REMEDY}; a cluster that adds nodes by demand "
        "may just need a longer start_timeout_s",
        (machine.node_id for machine in living),
    )


def _short_of(
    machine: Machine,
    workers: Sequence[int],
    bundles: Sequence[Mapping[str, float]],
    have: Mapping[str, float],
    verb: str,
) -> str:
    """Describes which resources of `have` are too few for the workers; "" when none are."""
    parts = []
    for name, needed in together(bundles[worker] for worker in workers).items():
        there = have.get(name, 0.0)
        if there < needed - _LEAST:
            parts.append(f"{there:g} of the {needed:g} {_unit(name, needed)}")
    needs = "needs" if len(workers) == 1 else "need"
    return f"node {machine} {verb} {' and '.join(parts)} that {_list(workers)} {needs}" if parts else ""


def _held_by_groups(but: Group) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the resources that the bundles of each placement group hold, by node and by the group's display name."""
    held: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for hexadecimal, entry in placement_group_table().items():
        if entry["state"] == "REMOVED" or hexadecimal == but._group.id.hex():
            continue
        label = f"placement group {entry['name'] or hexadecimal[:8]}"
        for index, node in entry["bundles_to_node_id"].items():
            if node:
                sums = held[node].setdefault(label, {})
                for name, amount in entry["bundles"][index].items():
                    sums[name] = sums.get(name, 0.0) + amount
    return held


def _holders(machine: Machine, names: Iterable[str], groups: Mapping[str, Mapping[str, float]]) -> str:
    """Describes the holders of the resources that the workers need on a node. Ray says this for placement groups; the
    rest is held by actors and tasks without a group."""
    parts = []
    for name in names:
        taken = machine.totals.get(name, 0.0) - machine.resources.get(name, 0.0)
        for label, sums in groups.items():
            if amount := sums.get(name, 0.0):
                parts.append(f"{amount:g} {_unit(name, amount)} by {label}")
                taken -= amount
        if taken > _LEAST:
            parts.append(f"{taken:g} {_unit(name, taken)} by actors and tasks of no group")
    return f" (held: {', '.join(parts)})" if parts else ""


def _says(group: Group) -> str:
    entry = group._entry()
    return "the group has gone" if entry is None else f"{entry['state']}, {entry['stats']['scheduling_state']}"


def _workers_at(where: Sequence[str]) -> dict[str, list[int]]:
    at: dict[str, list[int]] = defaultdict(list)
    for worker, node in enumerate(where):
        at[node].append(worker)
    return at


def _list(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return f"workers {', '.join(map(str, workers[:-1]))} and {workers[-1]}"


def _amounts(names: Iterable[str], have: Mapping[str, float]) -> str:
    return ", ".join(f"{have.get(name, 0.0):g} {_unit(name, have.get(name, 0.0))}" for name in names)


def _unit(resource: str, amount: float) -> str:
    return "CPUs" if resource == "CPU" and amount != 1 else resource


def _short(nodes: Iterable[str]) -> list[str]:
    return [node[:8] or "none" for node in nodes]
