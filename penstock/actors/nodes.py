"""Chooses the nodes of a job, on which its workers run, and reserves room on them (docs/papers.md: T10).

Other jobs choose at the same time, from the same figures, so room is certain only when a placement group holds it
(`placement/groups.py`). While a group waits for room that another job has taken, nodes are chosen again as soon as
other nodes have more room.

Without options all workers are on the JobMaster's node if it has enough CPUs, else on the fewest nodes that have. When
a node is lost, each of its workers gets room on another node, and the other workers stay where they are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import cluster
from penstock.placement.groups import Group, Machine, NotPlaced, PlacingCancelled, machines, replacement_name
from penstock.placement.layout import Layout, Share, has, told
from penstock.placement.options import PlacementOptions
from penstock.placement.placement import spread
from penstock.placement.traffic import Node
from penstock.runtime.operators.resources import Needs, together, told_needs

logger = logging.getLogger(__name__)

# Ray counts CPUs in ten-thousandths.
_LEAST_CPUS = 1e-6
# For how long it counts that a node has answered, or has not.
_ASKED_S = 3.0
# As many workers as take no CPU at all have room on a node.
_MANY = 1 << 30


class Nodes:
    """The nodes of a job. The JobMaster's supervising thread calls `reserve` once, before anything else is called."""

    def __init__(self, options: PlacementOptions, workers: int, *, continues: bool = False) -> None:
        """`continues`: the job has run before. It then makes do with fewer nodes, because some may have been lost."""
        self._options = options
        self._continues = continues
        self.workers = workers  # the number of workers; less than was asked for if the job may be smaller
        self.layout = Layout((Node("here", workers),), (), tuple(range(workers)))
        self._at: list[Machine] = []  # the machine of each worker, when the layout has machines
        self._group: Group | None = None
        self._job = ""
        self._cpus = 0.0
        self._needs: list[dict[str, float]] = [{} for _ in range(workers)]  # what each worker takes beside CPUs
        self._timeout_s = 0.0
        self._lock = threading.Lock()  # of what follows, which changes when nodes are lost
        self._lost: set[str] = set()
        self._asked: dict[str, tuple[float, bool]] = {}  # by node id: when it was asked, and whether it has answered
        #: The room of each worker whose node was lost: a group, and the number of the bundle.
        self._moved: dict[int, tuple[Group, int]] = {}
        #: The room that these workers had, on nodes that may come back, and what is reserved there beside CPUs.
        self._unused: list[tuple[Group, int, dict[str, float]]] = []
        self._replacements = 0

    def reserve(
        self,
        job: str,
        cpus: float,
        timeout_s: float,
        cancelled: Callable[[], bool],
        share: Share | None = None,
        needs: Sequence[Needs] | None = None,
    ) -> None:
        """Chooses nodes, and reserves room on them for the workers, each of which takes `cpus` CPUs. `share` says how
        many of them each node gets (None: what the free CPUs say). `needs`: what each worker takes beside CPUs; when a
        worker takes anything, the nodes follow from this. Raises NotPlaced."""
        options = self._options
        self._job, self._cpus, self._timeout_s = job, cpus, timeout_s
        self._needs = [{} for _ in range(self.workers)] if needs is None else [dict(own) for own in needs]
        needing = any(self._needs)
        packed = options.nodes is None and not options.pin and options.at_least is None and not options.grow
        if packed and not needing and self._all_fit_here():
            return
        name = cluster.workers_group(job)
        wanted = options.nodes or 1
        grown: list[str] = []
        if options.grow:
            try:
                grown = _grown(wanted, cpus * self._most(wanted), name, timeout_s, cancelled)
            except PlacingCancelled:
                raise
            except NotPlaced as error:
                if options.at_least is None:
                    raise
                logger.warning("job %s starts on the nodes that there are: %s", job, error)
        until = time.monotonic() + timeout_s

        def chosen_now() -> list[Machine]:
            if needing:
                return self._with_needs(wanted)
            if packed:
                found = self._fewest()
            else:
                chosen = self._choose(wanted, cpus, grown)
                free, most = ([_slots(m.free_cpus, cpus) for m in chosen], [_slots(m.cpus, cpus) for m in chosen])
                found = list(zip(chosen, spread(self.workers, free, most), strict=True))
            if share is None:
                return _each(found)
            at = [machine for machine, _ in found]
            rooms = [_slots(machine.free_cpus, cpus) for machine in at]
            counts = share([count for _, count in found], rooms, [machine.speed for machine in at])
            return _each(zip(at, counts, strict=True))

        while True:
            chosen = chosen_now()

            def in_vain(chosen: list[Machine] = chosen) -> bool:
                """Returns whether the job was cancelled, or other nodes have more room by now and there is time to wait
                for it."""
                if cancelled():
                    return True
                if time.monotonic() >= until:
                    return False
                now, before = self._wanted(chosen_now()), self._wanted(chosen)
                return now.keys() != before.keys() or (now != before and _all_free(now))

            try:
                self._take(chosen, name, max(0.0, until - time.monotonic()), in_vain)
                break
            except PlacingCancelled:
                if cancelled():
                    raise
            except NotPlaced as error:
                fewer = _with_room(chosen, cpus)
                room = len(fewer)
                if options.at_least is None or room < options.at_least:
                    raise
                logger.warning("job %s starts with %d workers, not %d: %s", job, room, self.workers, error)
                self.workers = room
                self._take(fewer, name, timeout_s, cancelled)
                break
        found = len(self.layout.nodes)
        if found < wanted:
            logger.warning("job %s runs on %d nodes, not %d", job, found, wanted)

    def spans_machines(self) -> bool:
        """Returns whether workers run on another machine than the JobMaster."""
        return bool(self.elsewhere())

    def elsewhere(self) -> list[Machine]:
        """Returns the nodes of the job that are not on the JobMaster's machine."""
        own = self.layout.machines
        if not own:
            return []
        here = _here(machines())
        return [machine for machine in own if machine.host != here.host]

    def _usable(self) -> list[Machine]:
        """Returns the nodes that are alive. Ray also takes a node for alive that has just been cut off, and would wait
        for it without end. So nodes of other machines have to answer."""
        known = machines()
        here = _here(known)
        with self._lock:
            known = [machine for machine in known if machine.node_id not in self._lost]
        return [machine for machine in known if machine.host == here.host or self._answers(machine)]

    def _answers(self, machine: Machine) -> bool:
        now = time.monotonic()
        asked = self._asked.get(machine.node_id)
        if asked is None or now - asked[0] > _ASKED_S:
            answers = not machine.port or cluster.answers_tcp(f"{machine.address}:{machine.port}")
            asked = self._asked[machine.node_id] = (now, answers)
        return asked[1]

    def _all_fit_here(self) -> bool:
        """Returns whether the JobMaster's node has enough CPUs for all workers, in use or free. Raises NotPlaced when
        no other node could help."""
        known = self._usable()
        here = _here(known)
        if self._cpus * self.workers <= here.cpus + _LEAST_CPUS:
            return True
        check_fits(known, self.workers, self._cpus)
        return False

    def _fewest(self) -> list[tuple[Machine, int]]:
        """Returns the fewest nodes that have room for all workers, and the number of workers for each. Nodes of the
        JobMaster's machine come first, then those with the most room."""
        known = self._usable()
        here = _here(known)
        for cpus in ({m.node_id: m.free_cpus for m in known}, {m.node_id: m.cpus for m in known}):

            def rank(machine: Machine, cpus: dict[str, float] = cpus) -> tuple[bool, bool, float]:
                return machine.node_id != here.node_id, machine.host != here.host, -cpus[machine.node_id]

            left, found = self.workers, list[tuple[Machine, int]]()
            for machine in sorted(known, key=rank):
                count = min(left, _slots(cpus[machine.node_id], self._cpus))
                if count:
                    found.append((machine, count))
                    left -= count
            if not left:
                return found
        check_fits(known, self.workers, self._cpus)
        raise AssertionError("the nodes have room, and have none")

    def _with_needs(self, count: int) -> list[Machine]:
        """Returns the machine of each worker, when workers need more than CPUs. Workers with the greatest needs choose
        first: a node that has what they need, where the job has other workers already, or as few as it should have when
        it is to run on `count` nodes, and then the node with the most free CPUs."""
        known = self._usable()
        here = _here(known)
        most = self.workers if self._options.nodes is None else self._most(count)
        placed: dict[int, Machine] = {}
        for free in (True, False):  # what is free now, or else what will be free when others give it back
            left = {m.node_id: dict(m.resources if free else m.totals) for m in known}
            placed = {}
            for worker in sorted(range(self.workers), key=lambda worker: -sum(self._needs[worker].values())):
                used = Counter(machine.node_id for machine in placed.values())
                wanted = self._bundle(worker)
                fit = [m for m in known if used[m.node_id] < most and _suffices(left[m.node_id], wanted)]
                if not fit:
                    break
                spare = len(used) < count and self._options.nodes is not None
                best = min(
                    fit,
                    key=lambda m: (
                        (m.node_id in used) == spare,
                        m.node_id != here.node_id,
                        m.host != here.host,
                        -left[m.node_id].get("CPU", 0.0),
                    ),
                )
                placed[worker] = best
                for name, each in wanted.items():
                    left[best.node_id][name] = left[best.node_id].get(name, 0.0) - each
            if len(placed) == self.workers:
                return [placed[worker] for worker in range(self.workers)]
        raise NotPlaced(
            f"the job's workers need {self._told_needs()}, and the cluster has no nodes with that: "
            f"{'; '.join(_has_in_all(machine, self._needs) for machine in known)}. Add nodes that have it, start Ray "
            "with it (ray start --num-gpus, or --resources), or use a lower parallelism of the operators that need it",
            (machine.node_id for machine in known),
        )

    def _told_needs(self) -> str:
        """Describes the needs of the workers, for people."""
        kinds = Counter(told_needs(self._bundle(worker)) for worker in range(self.workers))
        return ", and ".join(f"{count} x ({kind})" for kind, count in kinds.items())

    def _wanted(self, at: Sequence[Machine]) -> dict[str, dict[str, float]]:
        """Returns the needs of the workers on these machines, by the id of the node."""
        found: dict[str, list[Needs]] = {}
        for worker, machine in enumerate(at):
            found.setdefault(machine.node_id, []).append(self._bundle(worker))
        return {node_id: together(several) for node_id, several in found.items()}

    def _take(self, at: list[Machine], name: str, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        layout = Layout.of(at)  # a node with a wrong label is refused before anything is reserved
        where = [machine.node_id for machine in at]
        self._group = Group.reserve(
            where,
            cpus=self._cpus,
            name=name,
            resources=self._needs[: len(where)],
            timeout_s=timeout_s,
            cancelled=cancelled,
        )
        self._settle(at, layout)

    def needs(self, worker: int) -> dict[str, float]:
        """Returns the resources that a worker takes beside CPUs."""
        return self._needs[worker]

    def _bundle(self, worker: int) -> dict[str, float]:
        """Returns all that a worker takes."""
        return {"CPU": self._cpus, **self._needs[worker]}

    def _settle(self, at: list[Machine], layout: Layout | None = None) -> None:
        """Notes on which machine each worker is. `layout`: that of these machines, if it is known."""
        self._at = at
        self.layout = Layout.of(at) if layout is None else layout

    def _most(self, nodes: int) -> int:
        """Returns the greatest number of workers on a node, when the workers are spread over this many nodes."""
        return -(-self.workers // nodes)

    def _choose(self, count: int, cpus: float, grown: list[str]) -> list[Machine]:
        """Returns the nodes to use: first a node for each pinned operator, then nodes that the cluster has added for
        the job, then those with the most room. Returns fewer than `count` when the cluster has fewer and the job may be
        smaller."""
        known = self._usable()
        host = _here(known).host
        if len(known) < count:
            if self._options.at_least is None and not self._continues:
                raise NotPlaced(
                    f"the job is to run on {count} nodes, and the cluster has {len(known)}. Give fewer nodes, or "
                    "PlacementOptions(at_least=...) to allow fewer, or PlacementOptions(grow=True) to wait for more"
                )
            count = len(known)
        most = cpus * self._most(count)
        # A node that is too small comes last, however much of it is free.
        known.sort(key=lambda m: (m.node_id not in grown, m.cpus < most, -min(m.free_cpus, most), m.host != host))
        chosen: list[Machine] = []
        for operator, wanted in self._options.pin.items():
            fit = [machine for machine in known if has(machine, wanted)]
            if not fit:
                raise NotPlaced(
                    f"operator {operator!r} is pinned to nodes with {told(wanted)}, and no node of the cluster has "
                    "that; add such a node, or change PlacementOptions(pin=...)"
                )
            if not any(machine in fit for machine in chosen):
                chosen.append(fit[0])
        if len(chosen) > count:
            raise NotPlaced(
                f"the job's operators are pinned to {len(chosen)} different nodes, and the job is to run on {count}; "
                f"give nodes={len(chosen)} or more, or change PlacementOptions(pin=...)"
            )
        return [*chosen, *(machine for machine in known if machine not in chosen)][:count]

    def strategy(self, worker: int) -> Any:
        """Returns Ray's scheduling strategy for a worker's actor. When the worker's node is lost, room is found on
        another node, also on one that the cluster adds, or on a lost one that is back. Raises NotPlaced when there is
        no room in time."""
        if self._group is None:
            return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        with self._lock:
            group, bundle = self._moved.get(worker, (self._group, worker))
            lost = self._at[worker].node_id in self._lost
        if lost or bundle in group.lost():
            group, bundle = self._replace(worker, (group, bundle))
        return group.strategy(bundle)

    def node_id(self, worker: int) -> str:
        """Returns the id of the node on which a worker runs, or is to run."""
        with self._lock:
            if self._at:
                return self._at[worker].node_id
            here: str = ray.get_runtime_context().get_node_id()
            return here

    def lose(self, node_id: str) -> None:
        """Notes that a node is lost for the job, even if Ray says otherwise."""
        with self._lock:
            self._lost.add(node_id)

    def find_again(self) -> None:
        """Notes that no node is lost, as far as is known."""
        with self._lock:
            self._lost.clear()

    def is_lost(self, node_id: str) -> bool:
        """Returns whether a node is lost for the job."""
        with self._lock:
            return node_id in self._lost

    def name(self, node_id: str) -> str:
        """Returns the name of a node, for people."""
        with self._lock:
            return next((str(machine) for machine in self._at if machine.node_id == node_id), node_id[:8])

    def _replace(self, worker: int, before: tuple[Group, int]) -> tuple[Group, int]:
        """Finds room for a worker whose node is lost: on a node that has room now, or what the job still has on a lost
        node that is back, else wherever there will be room first."""
        with self._lock:
            gone = self._at[worker]
            self._lost.add(gone.node_id)
            self._replacements += 1
            name = replacement_name(cluster.workers_group(self._job), worker, self._replacements)
            self._unused.append((*before, self._needs[worker]))
            used = Counter(machine.node_id for machine in self._at if machine.node_id not in self._lost)
        fit = [machine for machine in self._usable() if _suffices(machine.resources, self._bundle(worker))]
        back: list[tuple[Group, int]] = []
        try:
            if fit:
                room = self._room_on(fit, used, name, worker), 0
            else:
                logger.warning("job %s: a worker waits for a node with room, because its node is lost", self._job)
                room = self._room_anywhere(name, back, worker), 0
        except PlacingCancelled:
            (room,) = back
        except NotPlaced as error:
            raise NotPlaced(
                f"its node {gone} is lost, and no other node has room for worker {worker}: {error}. Resume the job "
                "when there is room, and it continues from its last complete epoch",
                error.nodes,
            ) from error
        node_id = room[0].where()[room[1]]
        machine = next((machine for machine in machines() if machine.node_id == node_id), None)
        if machine is None:
            with self._lock:
                self._unused.append((*room, self._needs[worker]))
            raise NotPlaced(f"the node that was to replace {gone} has died too", (node_id,))
        with self._lock:
            self._lost.discard(node_id)
            self._moved[worker] = room
            at = list(self._at)
            at[worker] = machine
            self._settle(at)
        if machine.node_id == gone.node_id:
            logger.warning("job %s: worker %d starts again on node %s, which is back", self._job, worker, gone)
        else:
            logger.warning(
                "job %s: worker %d moves from node %s, which is lost, to %s", self._job, worker, gone, machine
            )
        return room

    def _room_on(self, fit: list[Machine], used: Counter[str], name: str, worker: int) -> Group:
        """Reserves room for a worker on the best of these nodes. `used`: the number of the job's workers on each node
        that is not lost."""
        # Who has asked for so many nodes gets as many again.
        spread = len(used) < (self._options.nodes or 1)
        best = min(fit, key=lambda m: ((m.node_id in used) == spread, used[m.node_id] / max(m.cpus, 1.0), -m.free_cpus))
        resources = [self._needs[worker]]
        return Group.reserve([best.node_id], cpus=self._cpus, name=name, resources=resources, timeout_s=self._timeout_s)

    def _room_anywhere(self, name: str, back: list[tuple[Group, int]], worker: int) -> Group:
        """Waits for room for a worker. Raises PlacingCancelled when there is room on a lost node that is back, and
        puts this room into `back`."""

        def is_back() -> bool:
            found = self._unused_room(worker)
            back.extend([] if found is None else [found])
            return bool(back)

        if is_back():
            raise PlacingCancelled("a node is back")
        return Group.reserve_anywhere(
            1,
            cpus=self._cpus,
            name=name,
            resources=self._needs[worker],
            timeout_s=self._timeout_s,
            cancelled=is_back,
        )

    def _unused_room(self, worker: int) -> tuple[Group, int] | None:
        """Takes room that the job has reserved for such a worker, and does not use, on a node that is there: a lost one
        that is back, or one to which Ray has moved the bundle."""
        there = {machine.node_id for machine in machines() if self._answers(machine)}
        with self._lock:
            for place, (group, bundle, own) in enumerate(self._unused):
                where = group.where()
                if own == self._needs[worker] and bundle < len(where) and where[bundle] in there:
                    del self._unused[place]
                    return group, bundle
        return None

    def close(self) -> None:
        """Gives the reserved room back."""
        with self._lock:
            own = [] if self._group is None else [self._group]
            groups = [group for group, _ in self._moved.values()] + [group for group, _, _ in self._unused]
            others = [group for group in groups if group is not self._group]
            self._moved.clear()
            self._unused.clear()
            self._group = None
        for group in (*others, *own):
            group.remove()


def check_fits(known: list[Machine], workers: int, cpus: float) -> None:
    """Raises NotPlaced when the nodes have too few CPUs for the workers, even if they were all free. Waiting would not
    help."""
    if sum(_slots(machine.cpus, cpus) for machine in known) < workers:
        have = "; ".join(f"{machine} has {machine.cpus:g} in all, {machine.free_cpus:g} free" for machine in known)
        raise NotPlaced(
            f"the job asks for {workers} x {cpus:g} = {workers * cpus:g} CPUs, and the cluster has fewer: {have}. Use "
            "fewer workers or a smaller cpus_per_worker, or start Ray with more CPUs (ray start --num-cpus; a cluster "
            "that a program has started for itself has as many as its first job needed), or add nodes",
            (machine.node_id for machine in known),
        )


def _here(known: list[Machine]) -> Machine:
    """Returns the JobMaster's node."""
    here = ray.get_runtime_context().get_node_id()
    return next(machine for machine in known if machine.node_id == here)


def _slots(cpus: float, each: float) -> int:
    """Returns the number of workers that take `each` CPUs and fit into a number of CPUs."""
    return _MANY if not each else int(cpus / each + _LEAST_CPUS)


def _each(chosen: Iterable[tuple[Machine, int]]) -> list[Machine]:
    """Returns the machine of each worker, from the number of workers on each machine."""
    return [machine for machine, count in chosen for _ in range(count)]


def _suffices(have: Needs, wanted: Needs) -> bool:
    """Returns whether there is enough of all that is wanted."""
    return all(have.get(name, 0.0) >= amount - _LEAST_CPUS for name, amount in wanted.items())


def _all_free(wanted: Mapping[str, Needs]) -> bool:
    """Returns whether each node has its wanted resources free now."""
    free = {machine.node_id: machine.resources for machine in machines()}
    return all(_suffices(free.get(node_id, {}), needs) for node_id, needs in wanted.items())


def _has_in_all(machine: Machine, needs: Sequence[Needs]) -> str:
    """Says how much of the needed resources a node has, in use or free."""
    names = ["CPU", *dict.fromkeys(name for own in needs for name in own)]
    return f"{machine} has {told_needs({name: machine.totals.get(name, 0.0) for name in names})} in all"


def _with_room(chosen: Sequence[Machine], cpus: float) -> list[Machine]:
    """Returns the machine of each worker for which its machine has room now."""
    rooms = {machine.node_id: _slots(machine.free_cpus, cpus) for machine in machines()}
    found = []
    for machine in chosen:
        if rooms.get(machine.node_id, 0) > 0:
            rooms[machine.node_id] -= 1
            found.append(machine)
    return found


def _grown(count: int, cpus: float, name: str, timeout_s: float, cancelled: Callable[[], bool]) -> list[str]:
    """The ids of nodes with enough free CPUs, as soon as the cluster has them: what waits for room is what Ray's
    autoscaler adds nodes for. Raises NotPlaced when they do not come in time."""
    hold = Group.reserve_anywhere(
        count, cpus=cpus, name=name, strategy="STRICT_SPREAD", timeout_s=timeout_s, cancelled=cancelled
    )
    try:
        return hold.where()
    finally:
        hold.remove()  # for the workers, who are reserved room for on the same nodes
