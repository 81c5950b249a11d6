"""How much of a stream may be under way: a credit window for each link on the way to a worker."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.runtime.exchange.channel import LINKS_MAX, OutChannel
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.relaying import wire
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.transport.base import Buffer
from tests.relaying.model import End

WINDOW = 1000
RECORD = b"x" * 90


class Wire(End):
    """Sends everything, and nothing comes."""

    def __init__(self) -> None:
        pass

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        return True


class Source:
    """A worker whose stream goes to the workers 1 to `count`, each with a relay of its own."""

    def __init__(self, count: int, limit: int | None) -> None:
        self.relays = {worker: FIRST_RELAY + worker for worker in range(1, count + 1)}
        self.root = MulticastRoot(0, 1, Wire(), lambda: 0, limit)
        self.log = OutLog(Wire(), ErrorHandler("test"))
        self.stream = self.root.stream(self.log)
        self.log.stream = self.stream
        for worker in self.relays:
            self.log.channel(worker, worker, worker, local=False, credit_window=WINDOW)
        self.root.use(RelayMap(dict.fromkeys(self.relays.values(), ""), self.relays))
        for _ in range(2):  # a channel joins when it has sent something
            self.push()
            self.deliver()
        assert len(self.stream.members) == count
        self.grant()

    def push(self) -> bool:
        self.log.push([RECORD], 0)
        return self.log.flush()

    def deliver(self) -> None:
        """Each relay says that its workers have everything."""
        following = self.stream._log.next
        for relay in self.relays.values():
            self.root.take(relay, wire.head(wire.DELIVERED, self.stream.id, following, following))

    def grant(self, but: OutChannel | None = None) -> None:
        """All workers take up what they have, but one."""
        for channel in self.log.channels:
            if channel is not but:
                channel.granted(channel.outstanding)

    def stops_at(self, channel: OutChannel) -> int:
        """Returns how many credit windows are outstanding when a worker takes up nothing and the source stops."""
        while self.push():
            self.grant(channel)
        assert self.log.queue
        windows, over = divmod(channel.outstanding, WINDOW)
        assert over < 2 * len(RECORD), "more than a message too much"
        channel.granted(channel.outstanding)
        assert self.log.flush()
        self.grant()
        return windows


def test_each_link_on_the_way_of_an_entry_has_a_credit_window() -> None:
    source = Source(4, limit=1)
    depth = source.stream.tree.depth
    assert sorted(depth.values()) == [0, 1, 2, 3, 4]
    for channel in source.log.channels:
        links = depth[source.relays[channel.worker]] + 1  # the last one is from the relay to the worker
        assert source.stops_at(channel) == links
    assert source.root.window() == 2 * WINDOW  # the way to the worker of the root's child


def test_another_tree_gives_other_windows() -> None:
    source = Source(4, limit=1)
    source.root.limit(2)
    for node in source.stream._switch.progress.switch.connecting:  # type: ignore[union-attr]
        source.root.take(node, wire.head(wire.CONNECTED, source.stream.id, node, source.stream._version))
    depth = source.stream.tree.depth
    assert max(depth.values()) < 4
    assert [source.stops_at(channel) for channel in source.log.channels] == [
        depth[source.relays[channel.worker]] + 1 for channel in source.log.channels
    ]


def test_a_channel_that_has_left_has_its_own_window() -> None:
    source = Source(4, limit=1)
    source.root.use(RelayMap())
    assert not source.stream.members
    assert [source.stops_at(channel) for channel in source.log.channels] == [1, 1, 1, 1]


def test_a_root_waits_for_records_and_not_for_the_announcement_of_the_last_tree() -> None:
    """The workers of the other nodes have ended, and their relays are told nothing more. They may never answer."""
    source = Source(3, 1)
    source.push()
    assert not source.root.idle
    source.deliver()
    assert source.root.idle
    source.root.use(RelayMap(dict.fromkeys(source.relays.values(), ""), {}))
    source.root.tick()
    assert not source.stream.tree.destinations
    assert source.stream.status()["undelivered"]
    assert source.root.idle


def test_a_root_finds_out_what_is_under_way_only_when_a_look_may_be_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run loop calls it in each pass."""
    source, summed = Source(6, limit=None), list[int]()
    window, now_ns = source.root.window, 0

    def counted() -> int:
        summed.append(now_ns)
        return window()

    monkeypatch.setattr(source.root, "window", counted)
    monkeypatch.setattr(source.root, "clock", lambda: now_ns)
    for step in range(1000):
        now_ns = step * 100_000
        source.root.tick()
    assert 1 <= len(summed) <= 100 / 2.5 + 1


@pytest.mark.parametrize(("links", "windows"), [(1, 1), (LINKS_MAX, LINKS_MAX), (LINKS_MAX + 1, LINKS_MAX)])
def test_the_window_of_a_long_way_has_a_limit(links: int, windows: int) -> None:
    channel = OutLog(Wire(), ErrorHandler("test")).channel(1, 1, 1, local=False, credit_window=WINDOW)
    channel.passes(links)
    assert channel.credit_limit == windows * WINDOW
