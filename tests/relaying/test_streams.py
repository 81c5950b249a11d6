"""Some of the simulated streams of tests/relaying/model.py; `make campaign-relays` runs ten thousand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest

from penstock.runtime.exchange.log import OutLog
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.relaying import wire
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.transport.base import Buffer, PeerTransport
from tests.relaying.model import run_seed

CHUNK = 50


@pytest.mark.parametrize("first", range(0, 400, CHUNK))
def test_every_task_gets_every_batch_once_and_in_order(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += run_seed(seed)
    needed = ("batches", "forwarded", "handed over", "deaths", "back", "epochs", "stale", "crowds", "stalls")
    assert all(counts[what] for what in needed)
    assert counts["OLD"] + counts["EARLY"], "nothing has come by two ways"


@pytest.mark.parametrize("seed", [24, 27, 158, 210, 694, 1545, 2200, 2548, 584, 816, 903])
def test_seeds_that_have_failed(seed: int) -> None:
    # The last three fail when a relay tells that an entry is delivered before its workers have the entry.
    run_seed(seed, calm=True)


class _Nowhere(PeerTransport):
    """Takes everything, and asks no system."""

    address, ring_bytes, target_message = "", 0, 1 << 16

    def max_message(self, worker: int) -> int:
        return 1 << 20

    def connect(self, addresses: Mapping[int, str]) -> None: ...

    def drop(self, workers: Iterable[int]) -> dict[int, int]:
        return {}

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        self.sent.append((worker, b"".join(parts)))
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        return []

    def wake(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("on_nodes", "limit", "tree", "why"),
    [
        ([1, 1, 1], None, False, "3 nodes with one worker each are sent to straight"),
        ([1, 1, 1], 2, True, ""),
        ([1, 1, 2], None, True, ""),
        ([1] * 5, None, False, "5 nodes"),
        ([1] * 6, None, True, ""),
        ([2], None, True, ""),
        ([1], None, False, "one worker alone"),
        ([], None, False, "no worker on another node"),
    ],
)
def test_a_stream_has_a_tree_where_the_tree_saves_copies(
    on_nodes: list[int], limit: int | None, tree: bool, why: str
) -> None:
    root = MulticastRoot(0, 0, _Nowhere(), lambda: 0, limit)
    log = OutLog(_Nowhere(), ErrorHandler("test"), None)
    log.stream = root.stream(log)
    nodes = [node for node, workers in enumerate(on_nodes) for _ in range(workers)]
    for worker, _ in enumerate(nodes, 1):
        log.channel(worker, worker, worker, local=False, credit_window=1000)
    root.tick()
    (before,) = root.status()
    assert before["no_tree"]
    root.use(
        RelayMap(
            {FIRST_RELAY + node: "" for node in range(len(on_nodes))},
            {worker: FIRST_RELAY + node for worker, node in enumerate(nodes, 1)},
        )
    )
    (after,) = root.status()
    assert why in after["no_tree"]
    assert (after["no_tree"] == "") == tree == after["switching"]


def test_what_relays_say_to_an_earlier_process_of_a_root_has_no_effect() -> None:
    transport, life = _Nowhere(), 3
    root = MulticastRoot(0, life, transport, lambda: 0, 2)
    log = OutLog(_Nowhere(), ErrorHandler("test"), None)
    log.stream = root.stream(log)
    for worker in (1, 2):
        log.channel(worker, worker, worker, local=False, credit_window=1000)
    relays = {worker: FIRST_RELAY + worker for worker in (1, 2)}
    root.use(RelayMap(dict.fromkeys(relays.values(), ""), relays))
    joins = [wire.read(message) for _, message in transport.sent if message[0] == wire.JOIN]
    assert [join.stream for join in joins] == [(0, life, 0)] * 2

    def switching(by: int) -> bool:
        """Whether the stream still begins with its tree after the relays have said that they have all before it."""
        for relay, join in zip(relays.values(), joins, strict=True):
            root.take(relay, wire.head(wire.DELIVERED, (0, by, 0), join.number))
        (status,) = root.status()
        return bool(status["switching"])

    assert switching(life - 1)
    assert not switching(life)


def test_entries_of_a_root_s_dead_process_are_not_taken_for_its_successor_s() -> None:
    """Another relay of the dead process's tree, which has not heard of the death yet, sends them late."""
    own, parent, life = FIRST_RELAY, FIRST_RELAY + 1, 2
    transport = _Nowhere()
    relay = Relay(own, transport)
    relay.use({0: ("the root", life), 1: ("here", 0)}, {own: "", parent: ""})
    stream = (0, life, 0)
    tree = wire.write_tree(Tree.of_parents(0, [(parent, 0), (own, parent)]))
    relay.take(0, wire.head(wire.JOIN, stream) + tree)
    relay.take(parent, wire.head(wire.MEMBERS, stream) + wire.write_members({own: {1: ((7, 1),)}}))

    def got() -> list[bytes]:
        return [message for to, message in transport.sent if to == 1]

    relay.take(parent, wire.head(wire.ENTRY, (0, life - 1, 0), 1) + b"dead")
    assert got() == []
    relay.take(parent, wire.head(wire.ENTRY, stream, 1) + b"alive")
    (message,) = got()
    assert message.endswith(b"alive")


def test_a_relay_forgets_the_streams_of_a_root_that_is_gone() -> None:
    """Those that it knows, those of which it has heard, and those that have ended."""
    own, other = FIRST_RELAY, FIRST_RELAY + 1
    relay = Relay(own, _Nowhere())
    relays = {own: "", other: ""}
    relay.use({0: ("a", 1), 9: ("b", 0)}, relays)
    tree = wire.write_tree(Tree.of_parents(0, [(own, 0)]))
    for stream in ((0, 1, 0), (0, 1, 1), (9, 0, 0)):
        relay.take(stream[0], wire.head(wire.JOIN, stream) + tree)
    relay.take(0, wire.head(wire.CLOSE, (0, 1, 1)))
    relay.take(other, wire.head(wire.ENTRY, (0, 1, 2)) + b"early")
    assert set(relay._streams) == {(0, 1, 0), (9, 0, 0)}
    assert (set(relay._early), relay._closed) == ({(0, 1, 2)}, {(0, 1, 1)})
    relay.use({0: ("c", 2), 9: ("b", 0)}, relays)
    assert set(relay._streams) == {(9, 0, 0)}
    assert not relay._early
    assert not relay._closed
    relay.take(other, wire.head(wire.ENTRY, (0, 1, 3)) + b"late")
    assert not relay._early, "of a process that is gone"
