"""Which relays a job has, and what workers and relays are told of each other, in many random orders of events.

The workers and relays of these tests answer late, in any order between them, and die at any time. They check what must
never happen: that a relay writes into an inbox that may have moved, or that a message goes to who does not know its
sender.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from penstock.host.decide.commands import KillRelay, StartRelay
from penstock.host.decide.process_commands import ExpectRelay, TellRelay, UseRelays
from penstock.host.decide.relay_keeper import Member, RelayCommand, RelayKeeper, homes
from penstock.runtime.program.flow import Flow
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory

NODES = {"a": "node a", "b": "node b", "c": "node c"}


class Worker:
    """One life of a worker: its inbox stays where it is while it has dropped a relay that has not come back."""

    def __init__(self, number: int, life: int, machine: str) -> None:
        self.number, self.life, self.machine = number, life, machine
        self.moved = 0  # how often its inbox has moved
        self.commands: deque[ExpectRelay | UseRelays] = deque()
        self.absent: set[int] = set()
        self.known: set[int] = set()
        self.connected: set[int] = set()
        self.map = RelayMap()
        self.maps = 0

    @property
    def place(self) -> str:
        return f"{self.number}/{self.life}/{self.moved}"


class Relay:
    """One life of a relay. `workers`: the place and life of each of its machine that it is connected to."""

    def __init__(self, number: int, node_id: str) -> None:
        self.number, self.machine = number, node_id[-1]
        self.ready = False
        self.commands: deque[TellRelay] = deque()
        self.workers: dict[int, tuple[str, int]] = {}
        self.relays: set[int] = set()


class World:
    """Carries out the commands late, and says what has come of them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.keeper = RelayKeeper("job")
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.lives = 0
        self.relays: dict[int, Relay] = {}
        self.machine_of = {number: "aabbcc"[number] for number in range(6)}
        self.numbers: list[int] = []

    def take(self, commands: list[RelayCommand]) -> None:
        for command in commands:
            if isinstance(command, StartRelay):
                assert not any(NODES[r.machine] == command.node_id for r in self.relays.values()), "two on a machine"
                assert command.number not in self.numbers, "each life has a number of its own"
                self.numbers.append(command.number)
                self.relays[command.number] = Relay(command.number, command.node_id)
            elif isinstance(command, KillRelay):
                self.relays.pop(command.number, None)
            elif isinstance(command, TellRelay):
                if command.number in self.relays:
                    self.relays[command.number].commands.append(command)
            else:
                self.workers[command.worker].commands.append(command)
                for served, serving in command.relays.of_worker.items() if isinstance(command, UseRelays) else ():
                    connected = self.relays[serving].workers[served]
                    assert connected[1] == self.workers[served].life, f"nobody serves worker {served}"

    # --- what happens ----------------------------------------------------------------------------------------

    def connect(self) -> None:
        """All workers that have no process get one, and all tasks are connected."""
        for number in self.machine_of:
            if number not in self.workers:
                self.lives += 1
                self.workers[number] = Worker(number, self.lives, self.machine_of[number])
        members = {n: Member(w.life, w.machine, f"far {n}/{w.life}") for n, w in self.workers.items()}
        machines = {worker.machine for worker in self.workers.values()}
        wanted = {machine: NODES[machine] for machine in sorted(machines)} if len(machines) > 1 else {}
        self.take(self.keeper.connected(members, wanted, self.now))

    def kill_worker(self, number: int) -> None:
        del self.workers[number]
        self.take(self.keeper.worker_lost(number, self.now))

    def kill_relay(self, number: int) -> None:
        del self.relays[number]
        self.take(self.keeper.relay_died(number, "left (aabb)", "it was killed", self.now))

    def lose(self, machine: str) -> None:
        """A machine is lost: its workers go to others."""
        others = [other for other in NODES if other != machine]
        for number, worker in list(self.workers.items()):
            if worker.machine == machine:
                self.machine_of[number] = self.chance.choice(others)
                self.kill_worker(number)
        for number, relay in list(self.relays.items()):
            if relay.machine == machine:
                self.kill_relay(number)

    def get_ready(self, relay: Relay) -> None:
        relay.ready = True
        info = {"pid": relay.number, "address": f"relay {relay.number}"}
        self.take(self.keeper.relay_ready(relay.number, info, self.now))

    def obey_relay(self, relay: Relay) -> None:
        """A relay does what it was told first."""
        command = relay.commands.popleft()
        for number, (place, life) in command.workers.items():
            worker = self.workers.get(number)
            if worker is None or worker.life != life:
                continue  # it has died
            if worker.machine == relay.machine:
                again = relay.workers.get(number) == (place, life)
                assert again or place == worker.place, f"relay {relay.number} writes where worker {number} was"
                assert again or relay.number in worker.absent, "its inbox could move"
            else:
                assert place == f"far {number}/{life}"
        relay.workers = dict(command.workers)
        assert relay.number not in command.relays
        relay.relays = set(command.relays)
        self.take(self.keeper.relay_knows(relay.number, self.now))

    def obey_worker(self, worker: Worker) -> None:
        """A worker does what it was told first."""
        command = worker.commands.popleft()
        if isinstance(command, ExpectRelay):
            worker.known.add(command.relay)
            worker.connected.discard(command.relay)
            worker.absent.add(command.relay)
            expects = self.keeper.worker_expects
            self.take(expects(worker.number, worker.life, command.relay, worker.place, self.now))
            return
        told = command.relays
        worker.maps += 1
        worker.map = told
        worker.absent -= worker.known - told.addresses.keys()
        before, worker.connected = worker.connected, set(told.addresses)
        worker.known = set(told.addresses)
        for number in told.addresses:
            worker.absent.discard(number)
            relay = self.relays.get(number)
            if relay is None:
                continue  # it has died
            assert told.addresses[number] == f"relay {number}"
            assert told.pids[number] == number
            for other in told.addresses.keys() - {number}:
                assert other in relay.relays or other not in self.relays, "relays do not know each other"
            if relay.machine == worker.machine and number not in before:
                assert relay.workers.get(worker.number) == (worker.place, worker.life), "it is not connected"

    def move(self, worker: Worker) -> None:
        """The inbox of a worker grows, when nobody is missing. All who are connected follow."""
        if worker.absent:
            return
        before, worker.moved = worker.place, worker.moved + 1
        for relay in self.relays.values():
            if relay.workers.get(worker.number) == (before, worker.life):
                assert relay.number in worker.connected, f"relay {relay.number} is not told of the new inbox"

    # --- at random -------------------------------------------------------------------------------------------

    def step(self, *, calm: bool = False) -> bool:
        """Lets something happen. Returns False when nothing is left to be done. `calm`: nobody dies."""
        chance = self.chance
        self.now += chance.choice((0.0, 0.001, 0.1, 1.0))
        busy_relays = [relay for relay in self.relays.values() if relay.commands]
        busy_workers = [worker for worker in self.workers.values() if worker.commands]
        starting = [relay for relay in self.relays.values() if not relay.ready]
        due = self.keeper.due()
        may: list[object] = [
            *((self.obey_relay, relay) for relay in busy_relays for _ in range(3)),
            *((self.obey_worker, worker) for worker in busy_workers for _ in range(3)),
            *((self.get_ready, relay) for relay in starting),
        ]
        if due is not None:
            may.append((self.tick, due))
        if len(self.workers) < len(self.machine_of):
            may.append((self.connect,))
        left = bool(may)
        may += [(self.move, worker) for worker in self.workers.values()]
        if not calm:
            may += [(self.kill_relay, number) for number in self.relays]
            if chance.random() < 0.3:
                may += [(self.kill_worker, number) for number in self.workers]
                may += [(self.connect,)]
            if chance.random() < 0.05:
                may += [(self.lose, chance.choice("abc"))]
        what, *arguments = chance.choice(may)  # type: ignore[misc]
        what(*arguments)
        return left

    def tick(self, due: float) -> None:
        self.now = max(self.now, due)
        self.take(self.keeper.tick(self.now))

    def settle(self) -> None:
        for _ in range(100_000):
            if not self.step(calm=True):
                return
        raise AssertionError("it does not come to rest")

    def check(self) -> None:
        """All is as it is to be when nothing happens any more."""
        machines = {worker.machine for worker in self.workers.values()}
        wanted = machines if len(machines) > 1 else set()
        assert {relay.machine for relay in self.relays.values()} == wanted
        serving = {relay.machine: relay.number for relay in self.relays.values()}
        of_worker = {n: serving[w.machine] for n, w in self.workers.items() if w.machine in serving}
        for worker in self.workers.values():
            assert worker.map.addresses == {number: f"relay {number}" for number in self.relays}
            assert worker.map.of_worker == of_worker
            assert worker.connected == set(self.relays)
            assert not worker.absent, "its inbox never grows again"
        for relay in self.relays.values():
            assert relay.relays == self.relays.keys() - {relay.number}
            for number, worker in self.workers.items():
                place = worker.place if worker.machine == relay.machine else f"far {number}/{worker.life}"
                assert relay.workers[number][1] == worker.life
                assert relay.workers[number][0].split("/")[:2] == place.split("/")[:2]
            assert relay.workers.keys() == self.workers.keys()
        assert {entry["state"] for entry in self.keeper.status()} <= {"ready"}
        assert {entry["number"] for entry in self.keeper.status()} == set(self.relays)


def settled(seed: int = 1) -> World:
    world = World(seed)
    world.connect()
    world.settle()
    world.check()
    return world


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_workers_and_relays_come_to_know_each_other(seed: int) -> None:
    world = World(seed)
    world.connect()
    for _ in range(world.chance.randrange(200)):
        world.step()
    world.settle()
    world.check()


def test_each_worker_is_told_once_of_each_relay_that_joins() -> None:
    world = settled()
    assert len(world.numbers) == 3
    assert max(worker.maps for worker in world.workers.values()) <= 3 * len(world.numbers)
    assert [entry["number"] for entry in world.keeper.status()] == [FIRST_RELAY, FIRST_RELAY + 1, FIRST_RELAY + 2]


def test_the_death_of_a_relay_is_told_at_once_to_all() -> None:
    world = settled()
    (gone,) = [relay for relay in world.relays.values() if relay.machine == "b"]
    world.kill_relay(gone.number)
    assert all(len(worker.commands) == 1 for worker in world.workers.values())
    assert all(len(relay.commands) == 1 for relay in world.relays.values())
    for worker in list(world.workers.values()):
        world.obey_worker(worker)
        assert gone.number not in worker.map.addresses
        assert gone.number not in worker.map.of_worker.values()
    assert [entry["state"] for entry in world.keeper.status()] == ["ready", "lost", "ready"]


def test_a_worker_waits_no_longer_for_a_relay_that_dies_before_it_is_used() -> None:
    world = World(1)
    world.connect()
    first = next(relay for relay in world.relays.values() if relay.machine == "a")
    world.get_ready(first)
    worker = world.workers[0]
    world.obey_worker(worker)
    assert worker.absent == {first.number}
    world.kill_relay(first.number)
    world.obey_worker(worker)
    assert not worker.absent


def test_the_death_of_a_worker_is_told_at_once_to_all() -> None:
    world = settled()
    world.kill_worker(2)
    assert all(2 not in relay.commands[-1].workers for relay in world.relays.values())
    for worker in list(world.workers.values()):
        world.obey_worker(worker)
        assert 2 not in worker.map.of_worker


def test_a_relay_that_dies_again_and_again_is_started_after_longer_and_longer_pauses() -> None:
    world = settled()
    pauses = []
    for _ in range(12):
        before = world.now
        world.kill_relay(next(number for number, relay in world.relays.items() if relay.machine == "a"))
        due = world.keeper.due()
        assert due is not None
        pauses.append(due - before)
        world.tick(due)
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.2
    assert pauses[-1] == pytest.approx(30.0)
    relay = next(relay for relay in world.relays.values() if relay.machine == "a")
    world.get_ready(relay)
    world.now += 100.0
    world.kill_relay(relay.number)
    due = world.keeper.due()
    assert due is not None
    assert due - world.now < 0.2, "it has run for a while"


def test_a_machine_that_is_lost_gets_no_relay_any_more() -> None:
    world = settled()
    world.lose("c")
    world.now += 60.0
    assert world.keeper.due() is None
    world.take(world.keeper.tick(world.now))
    assert {relay.machine for relay in world.relays.values()} == {"a", "b"}
    world.settle()
    world.check()


def test_a_job_whose_workers_are_all_on_one_machine_has_no_relays() -> None:
    world = World(1)
    world.machine_of = dict.fromkeys(range(6), "a")
    world.connect()
    world.settle()
    world.check()
    assert not world.numbers


@pytest.mark.parametrize(
    ("sources", "machines", "expected"),
    [
        (1, "aaa", set()),
        (1, "abb", {"b"}),  # no task of a gets what comes from elsewhere
        (1, "abc", {"b", "c"}),
        (3, "abb", {"a", "b"}),
        (3, "abc", {"a", "b", "c"}),
    ],
)
def test_relays_are_where_records_to_all_come_from_elsewhere(sources: int, machines: str, expected: set[str]) -> None:
    flow = Flow("to_all")
    read = flow.read(Memory([1]), parallelism=sources)
    read.broadcast().map(lambda record: record, parallelism=3).write(Null(), parallelism=3)
    plan = flow.plan(3)
    placed = {task.number: task.index for task in plan.tasks}
    assert homes(plan, placed, dict(enumerate(machines))) == expected


def test_other_exchanges_need_no_relays() -> None:
    flow = Flow("by_key")
    flow.read(Memory([1]), parallelism=3).key_by(lambda record: record).count().write(Null())
    plan = flow.plan(3)
    assert homes(plan, {task.number: task.index for task in plan.tasks}, dict(enumerate("abc"))) == set()
