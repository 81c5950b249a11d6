"""Streams through relays in one process: real logs, roots, relays and channels, on links of which a seed chooses what
arrives next.

Each of a few nodes has some workers and a relay. The tasks of some workers send to the tasks of all workers. There is
no time but the number of turns. Relays die and come back under new numbers, receivers go back under new generations,
workers are slow to take what has come, and inboxes have no room. With some seeds a link stands still for a time, in
which others go on, and roots do not wait for it. At the end each task must have every batch of every sender once, in
order.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.runtime.exchange.channel import OutOfStep, RemoteInChannel, Turn
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import ANY_WAY, BARRIER, CREDIT, DATA, decode_payload, read_head
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.transport.base import Buffer, PeerTransport

WINDOW = 600
#: The messages that may be under way on a link.
ROOM = 6
#: How long a turn is where links stand still: a root waits for connections for ten turns.
STALLING_TURN_NS = 100_000_000


class Network:
    """Links between peers. What is sent between two living peers arrives, in order."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.links: dict[tuple[int, int], deque[tuple[int, bytes]]] = {}
        self.dead: set[int] = set()
        self.stalled: dict[tuple[int, int], int] = {}  # until which turn nothing of a link arrives
        self.narrow = True  # whether links may have no room

    def lose(self, peer: int) -> None:
        """A relay dies with all that is under way to it, and perhaps with what is under way to other relays and to
        roots. What it has written into the inbox of a worker stays there."""
        self.dead.add(peer)
        for (sender, to), messages in self.links.items():
            if to == peer:
                messages.clear()
            elif sender == peer and self.chance.random() < 0.5:
                kept = [message for message in messages if not message[0]]
                messages.clear()
                messages.extend(kept)


class End(PeerTransport):
    """The transport of one peer."""

    target_message = 200

    def __init__(self, network: Network, own: int) -> None:
        self.network = network
        self.own = own
        self.peers: set[int] = set()

    address = "here"
    ring_bytes = 0

    def connect(self, addresses: Mapping[int, str]) -> None:
        self.peers |= addresses.keys()

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        self.peers -= set(workers)
        return {}

    def forget(self, workers: Iterable[int]) -> None:
        self.drop(workers)

    def max_message(self, worker: int) -> int:
        return 10_000

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        network = self.network
        if worker not in self.peers:
            return False
        if worker in network.dead:
            return True
        link = network.links.setdefault((self.own, worker), deque())
        if network.narrow and (len(link) >= ROOM or network.chance.random() < 0.05):
            return False
        link.append((task, b"".join(parts)))
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        return ()

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Task:
    """A receiving task: takes up what comes when it likes. `epoch_at`: for each channel, what it had got by the last
    barrier."""

    def __init__(self, cluster: Cluster, number: int, worker: int) -> None:
        self.cluster = cluster
        self.number = number
        self.worker = worker
        self.generation = 0
        self.got: dict[int, list[Any]] = {}  # by channel
        self.barriers: dict[int, list[int]] = {}  # how much it had got at each barrier
        self.inbox: deque[tuple[int, int]] = deque()
        self.inputs: dict[int, RemoteInChannel] = {}

    def receive(self, channel: int, batch: Any, cost: int) -> None:
        self.got[channel] += batch
        self.inbox.append((channel, cost))

    def take_up(self) -> None:
        channel, cost = self.inbox.popleft()
        self.inputs[channel].take(cost)


class Cluster:
    """See the module's docstring."""

    def __init__(self, seed: int, *, calm: bool = False) -> None:
        self.seed = seed
        chance = self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.network = Network(chance)
        self.epochs = chance.random() < 0.6
        nodes = chance.randint(2, 5)
        self.node_of: list[int] = [node for node in range(nodes) for _ in range(chance.randint(1, 3))]
        chance.shuffle(self.node_of)
        workers = range(len(self.node_of))
        self.ends = {worker: End(self.network, worker) for worker in workers}
        for end in self.ends.values():
            end.connect({worker: "" for worker in workers if worker != end.own})
        self.stalls = random.Random(f"stalls {seed}") if seed % 3 == 0 and not calm else None
        turn_ns = 1_000_000 if self.stalls is None else STALLING_TURN_NS
        self.roots = {
            worker: MulticastRoot(worker, 0, self.ends[worker], lambda: self.turns * turn_ns) for worker in workers
        }
        # Whose link is crowded gives all streams trees, also those that do without otherwise.
        for root in self.roots.values():
            root.adjuster.crowded = True
        self.crowds = random.Random(f"crowds {seed}") if seed % 2 and not calm else None
        self.relays: dict[int, Relay] = {}  # by number
        self.relay_node: dict[int, int] = {}
        self.known: dict[int, set[int]] = {}  # what each relay was told
        self.next_relay = FIRST_RELAY
        self.maps: dict[int, deque[RelayMap]] = {worker: deque() for worker in workers}
        self.uses: dict[int, deque[dict[int, str]]] = {}
        self.turns = 0
        self.epoch = 0
        # One or two tasks in each worker receive. Some workers have a sending task.
        self.tasks: list[Task] = []
        for worker in workers:
            for _ in range(chance.randint(1, 2)):
                self.tasks.append(Task(self, len(self.tasks), worker))
        self.senders = sorted(chance.sample(list(workers), min(len(workers), chance.randint(1, 2))))
        self.logs: dict[int, OutLog] = {}
        self.blocked: set[int] = set()  # senders whose tasks wait
        self.sent: dict[int, list[int]] = {}
        self.completed: dict[int, int] = {}
        self.ended: set[int] = set()
        for at, worker in enumerate(self.senders):
            caches = OutputCaches() if self.epochs else None
            log = self.logs[worker] = OutLog(
                self.ends[worker], ErrorHandler("test"), caches.cache() if caches is not None else None
            )
            if len(self.tasks) > 1:
                log.stream = self.roots[worker].stream(log)
            self.sent[worker] = []
            for task in self.tasks:
                number = at * len(self.tasks) + task.number
                # Tasks of the sender's worker are as far away as the others here.
                log.channel(number, task.number, task.worker, local=False, credit_window=WINDOW)
                if task.worker == worker:
                    self.ends[worker].peers.add(worker)
                task.inputs[number] = RemoteInChannel(number, worker, 0, self.ends[task.worker], {}, WINDOW)
                task.got[number] = []
                task.barriers[number] = [0]

    # --- what happens ------------------------------------------------------------------------------------------------

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turns += 1
            self._turn()
            if self.crowds is not None and self.crowds.random() < 0.02:
                self._crowd(self.roots[self.crowds.choice(self.senders)])
            if self.stalls is not None:
                self._stall(self.stalls)
        self._rest()
        self._check()

    def _turn(self) -> None:
        chance = self.chance
        what = chance.random()
        if what < 0.55:
            self._deliver()
        elif what < 0.68:
            self._emit()
        elif what < 0.80:
            self._take_up()
        elif what < 0.82:
            self._start_relay()
        elif what < 0.828 and self.relays and (self.stalls is None or self.stalls.random() < 0.2):
            self._kill_relay(chance.choice(sorted(self.relays)))
        elif what < 0.87:
            self._tell()
        elif what < 0.88 and self.epochs:
            self._go_back()
        elif what < 0.90 and self.epochs:
            self._barrier()
        elif what < 0.92 and self.epochs:
            self._complete()
        elif what < 0.93:
            root = self.roots[chance.choice(self.senders)]
            root.limit(chance.choice([1, 2, 3]))
            self.counts["limits"] += 1
        else:
            self._flush()

    def _stall(self, chance: random.Random) -> None:
        """A link between relays may stand still, and a tree may have to switch meanwhile."""
        links = sorted(link for link in self.network.links if min(link) >= FIRST_RELAY)
        if links and chance.random() < 0.03:
            self.network.stalled[chance.choice(links)] = self.turns + chance.randint(20, 400)
            self.counts["stalls"] += 1
        if chance.random() < 0.03:
            self.roots[chance.choice(self.senders)].limit(chance.choice([1, 3]))

    def _crowd(self, root: MulticastRoot) -> None:
        """The link of a root becomes crowded, or is no longer."""
        root.adjuster.crowded = not root.adjuster.crowded
        root.reconsider()
        self.counts["crowds"] += 1

    def _emit(self) -> None:
        worker = self.chance.choice(self.senders)
        log = self.logs[worker]
        if worker not in self.blocked or self.flush(worker):
            record = len(self.sent[worker])
            batch = [(worker, record + i, "x" * self.chance.randint(0, 60)) for i in range(self.chance.randint(1, 3))]
            self.sent[worker] += [record[1] for record in batch]
            log.push(batch, 0)
            self.flush(worker)
            self.counts["batches"] += 1

    def flush(self, worker: int) -> bool:
        """Sends what a sender's log has. Returns whether its task may go on."""
        if not self.logs[worker].flush():
            self.blocked.add(worker)
            return False
        self.blocked.discard(worker)
        self.roots[worker].repeating.clear()
        return True

    def _take_up(self) -> None:
        waiting = [task for task in self.tasks if task.inbox]
        if waiting:
            self.chance.choice(waiting).take_up()

    def _flush(self) -> None:
        for worker in self.senders:
            root, log = self.roots[worker], self.logs[worker]
            root.tick()
            # As a run loop does: a task that has nothing to send does not look at its channels.
            if worker in self.blocked or root.repeating or any(channel.catching_up for channel in log.channels):
                self.flush(worker)
        for relay in self.relays.values():
            relay.flush()
        for task in self.tasks:
            for input_ in task.inputs.values():
                for due in list(input_._due.values()):
                    due.grant()

    def _start_relay(self) -> None:
        """A node without a relay gets one. Workers and relays learn of it when they do."""
        without = sorted(set(self.node_of) - {self.relay_node[relay] for relay in self.relays})
        if not without:
            return
        node = self.chance.choice(without)
        number = self.next_relay
        self.next_relay += 1
        self.ends[number] = End(self.network, number)
        self.relays[number] = Relay(number, self.ends[number])
        self.relay_node[number] = node
        self.uses[number] = deque()
        self._announce()
        self._tell_relay(number)
        self.counts["relays"] += 1

    def _kill_relay(self, number: int) -> None:
        del self.relays[number]
        self.network.lose(number)
        self._announce()
        self.counts["deaths"] += 1

    def _announce(self) -> None:
        """What is known of the relays goes to relays first, and then to workers; each learns it at its own time."""
        relays = dict.fromkeys(self.relays, "")
        for number in self.relays:
            self.uses[number].append(relays)
        nodes = {self.relay_node[relay]: relay for relay in self.relays}
        of_worker = {worker: nodes[node] for worker, node in enumerate(self.node_of) if node in nodes}
        for told in self.maps.values():
            told.append(RelayMap(relays, of_worker))

    def _tell(self) -> None:
        whom = self.chance.choice([*self.relays, *self.maps])
        if whom in self.maps:
            self._tell_worker(whom)
        else:
            self._tell_relay(whom)

    def _tell_relay(self, number: int) -> None:
        if self.uses[number]:
            workers = dict.fromkeys(range(len(self.node_of)), ("", 0))
            self.relays[number].use(workers, self.uses[number].popleft())

    def _tell_worker(self, worker: int) -> None:
        if self.maps[worker]:
            relays = self.maps[worker].popleft()
            end = self.ends[worker]
            end.drop([peer for peer in end.peers if peer >= FIRST_RELAY and peer not in relays.addresses])
            end.connect(relays.addresses)
            self.roots[worker].use(relays)

    def _deliver(self) -> None:
        stalled = self.network.stalled
        busy = sorted(
            link for link, messages in self.network.links.items() if messages and stalled.get(link, 0) <= self.turns
        )
        if not busy:
            return
        link = self.chance.choice(busy)
        for _ in range(self.chance.randint(1, 4)):
            if not self.network.links[link]:
                return
            task, message = self.network.links[link].popleft()
            if link[1] >= FIRST_RELAY:
                relay = self.relays.get(link[1])
                if relay is not None and link[0] in self.ends[link[1]].peers:
                    relay.take(task, message)
                elif (
                    relay is not None and link[0] not in self.network.dead
                ):  # a transport keeps what comes from a peer that is to be connected
                    self.network.links[link].appendleft((task, message))
                    return
                if relay is not None and self.chance.random() < 0.5:
                    relay.flush()
            elif task >= FIRST_RELAY:
                if link[0] in self.ends[link[1]].peers:
                    self.roots[link[1]].take(task, message)
                elif link[0] not in self.network.dead:
                    self.network.links[link].appendleft((task, message))
                    return
            else:
                self._to_worker(link[1], message)

    def _to_worker(self, worker: int, message: bytes) -> None:
        head = read_head(message)
        for number, generation in head.destinations:
            if head.kind == CREDIT:
                out = self.logs[worker].channels[number % len(self.tasks)]
                if out.generation == generation:
                    out.granted(head.stamp)
                continue
            task = self.tasks[number % len(self.tasks)]
            assert task.worker == worker, "a message for a task of another worker"
            input_ = task.inputs[number]
            if input_.generation != generation:
                self.counts["stale"] += 1
                continue
            if head.marks & ANY_WAY:
                turn = input_.sort(head)
                self.counts[turn.name] += 1
                if turn is Turn.OLD:
                    continue
            else:
                turn = Turn.NOW
                if not input_.accept(head):
                    raise OutOfStep(f"{head}, where {input_.expected} was expected")
            batch = decode_payload(message, head) if head.kind == DATA else None
            arrival = (head.kind, head.stamp, batch, head.body_bytes)
            if turn is Turn.EARLY:
                input_.hold(head.number, arrival)
                continue
            self._give(task, number, arrival)
            while (following := input_.release()) is not None:
                self._give(task, number, following)

    def _give(self, task: Task, number: int, arrival: Any) -> None:
        kind, stamp, batch, cost = arrival
        if kind == DATA:
            task.receive(number, batch, cost)
        elif kind == BARRIER:
            assert len(task.barriers[number]) == stamp, f"barrier {stamp} after {len(task.barriers[number]) - 1}"
            task.barriers[number].append(len(task.got[number]))

    def _barrier(self) -> None:
        self.epoch += 1
        for worker, log in self.logs.items():
            log.barrier(self.epoch)
            self.flush(worker)

    def _complete(self) -> None:
        """An epoch is complete when all tasks have its barriers from all senders."""
        epoch = min(len(marks) - 1 for task in self.tasks for marks in task.barriers.values())
        for worker, log in self.logs.items():
            if self.completed.get(worker, 0) < epoch:
                self.completed[worker] = epoch
                log.complete(epoch)
                self.counts["epochs"] += 1

    def _go_back(self) -> None:
        """A task goes back to the last complete epoch, and gets everything since then anew."""
        task = self.chance.choice(self.tasks)
        task.generation += 1
        task.inbox.clear()
        self.counts["back"] += 1
        for at, worker in enumerate(self.senders):
            number = at * len(self.tasks) + task.number
            log = self.logs[worker]
            channel = log.channels[task.number]
            log.disconnect(channel)
            epoch = self.completed.get(worker, 0)
            del task.got[number][task.barriers[number][epoch] :]
            del task.barriers[number][epoch + 1 :]
            task.inputs[number] = RemoteInChannel(
                number, worker, 0, self.ends[task.worker], {}, WINDOW, task.generation
            )
            log.connect(channel, task.generation)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _rest(self) -> None:
        self.network.narrow = False
        self.network.stalled.clear()
        idle = 0
        for _ in range(100_000):
            self.turns += 1
            for worker in self.maps:
                self._tell_worker(worker)
            for relay in self.relays:
                self._tell_relay(relay)
            for task in self.tasks:
                while task.inbox:
                    task.take_up()
            self._flush()
            told = not any(self.maps.values()) and not any(self.uses[relay] for relay in self.relays)
            if not told or any(
                messages for link, messages in self.network.links.items() if link[1] not in self.network.dead
            ):
                idle = 0
                self._deliver()
            else:
                idle += 1
                if idle > 5:
                    return
        raise AssertionError("messages go back and forth without end")

    def _check(self) -> None:
        for at, worker in enumerate(self.senders):
            log = self.logs[worker]
            assert not log.queue, f"worker {worker} waits: {self._why(log)}"
            for task in self.tasks:
                got = [record[1] for record in task.got[at * len(self.tasks) + task.number]]
                assert got == self.sent[worker], (
                    f"task {task.number} of worker {task.worker} got {got} of {len(self.sent[worker])}; "
                    f"{self._why(log)}"
                )
            root = self.roots[worker]
            assert root.idle, f"worker {worker} keeps entries: {root.status()}"
            if not self.epochs:
                log.repeat(
                    log.channels[0], log.channels[0].next
                )  # entries are dropped when something is sent, or could be
                log.flush()
                assert not log.cache.entries, "the log keeps entries"
            for channel in log.channels:
                assert channel.outstanding < WINDOW / 2 + 200, "credit is lost"
            assert not any(stream["switching"] for stream in root.status()), f"a switch is not over: {root.status()}"
        for relay in self.relays.values():
            status = relay.status()
            assert not status["behind"], status
            assert not status["kept_bytes"], status
            self.counts["handed over"] += status["handed_over"]
            self.counts["forwarded"] += status["forwarded"]

    def _why(self, log: OutLog) -> str:
        return str([(c.number, c.task, c.next, c.outstanding, c.life.state) for c in log.channels]) + str(
            [root.status() for root in self.roots.values() if root.status()]
        )


def run_seed(seed: int, turns: int = 600, *, calm: bool = False) -> Counter[str]:
    """Runs a seed, and returns what happened, counted. `calm`: all links stay crowded. Raises AssertionError."""
    cluster = Cluster(seed, calm=calm)
    try:
        cluster.run(turns)
    except Exception as error:
        raise AssertionError(f"seed {seed}, turn {cluster.turns}: {type(error).__name__}: {error}") from error
    return cluster.counts
