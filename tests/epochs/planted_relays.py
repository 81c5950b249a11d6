"""Faults to plant into relays, roots and their receivers: entries of the table of tests/planting.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

from penstock.runtime.exchange.channel import InChannel, OutChannel, Turn
from penstock.runtime.relaying import relay as relay_module
from penstock.runtime.relaying import wire
from penstock.runtime.relaying.limit_adjuster import LimitAdjuster
from penstock.runtime.relaying.relay import Relay
from penstock.runtime.relaying.root import MulticastRoot, RootStream
from tests.epochs.sim import Faults
from tests.planting import Seeds, Test, planted_fault

RELAY = "penstock/runtime/relaying/relay.py"
CHANNEL = "penstock/runtime/exchange/channel.py"


def _several(faults: Faults) -> bool:
    return faults.nodes > 1


def _relays_die(faults: Faults) -> bool:
    return faults.nodes > 1 and faults.relay_kills > 0


@planted_fault(RELAY, Seeds(78, _relays_die))
def _delivered_before_the_workers_have_it() -> Any:
    """A relay tells the root that everything is delivered that it has itself."""
    return mock.patch.object(relay_module._Stream, "undelivered", property(lambda self: self.log.next))


@planted_fault(RELAY, Seeds(61, _several))
def _a_worker_behind_is_forgotten() -> Any:
    """What a worker had no room for is not kept."""
    process = Relay._process

    def forgets(self: Relay, stream_id: Any, stream: Any, number: int, message: bytes) -> None:
        process(self, stream_id, stream, number, message)
        stream.behind.clear()
        self._late.pop(stream_id, None)

    return mock.patch.object(Relay, "_process", forgets)


@planted_fault(CHANNEL, Seeds(61, _relays_die))
def _repeats_one_too_few() -> Any:
    """A channel that leaves a stream goes back to the entry after the first one that was not delivered."""
    repeat = OutChannel.repeat
    return mock.patch.object(OutChannel, "repeat", lambda self, number: repeat(self, min(number + 1, self.next)))


def _sorted_as(taken_for_next: Turn) -> Any:
    sort = InChannel.sort
    (next_,) = set(Turn) - {Turn.OLD, Turn.EARLY}

    def careless(self: InChannel, head: Any) -> Turn:
        turn = sort(self, head)
        return next_ if turn is taken_for_next else turn

    return mock.patch.object(InChannel, "sort", careless)


@planted_fault(CHANNEL, Seeds(8, _several))
def _what_comes_twice_is_taken_twice() -> Any:
    """A receiver takes what has come by the other way already."""
    return _sorted_as(Turn.OLD)


@planted_fault(CHANNEL, Seeds(78, _several))
def _what_comes_early_is_taken_at_once() -> Any:
    """A receiver does not wait for what is still to come by the other way."""
    return _sorted_as(Turn.EARLY)


@planted_fault("penstock/runtime/relaying/root.py", Seeds(61, _relays_die))
def _nobody_looks_at_channels_that_repeat() -> Any:
    """A channel that leaves a stream repeats entries only when its task has something to send."""
    withdraw = RootStream._withdraw

    def forgets(self: RootStream, members: Any) -> None:
        known = dict(self._root.repeating)
        withdraw(self, members)
        for number in self._root.repeating.keys() - known.keys():
            del self._root.repeating[number]

    return mock.patch.object(RootStream, "_withdraw", forgets)


STREAMS = "tests/relaying/test_streams.py"


@planted_fault(RELAY, Test(f"{STREAMS}::test_entries_of_a_root_s_dead_process_are_not_taken_for_its_successor_s"))
def _the_lives_of_a_root_are_one() -> Any:
    """A relay takes what a dead process of a worker has sent for what the process after it sends."""
    take = Relay.take

    def careless(self: Relay, sender: int, message: Any) -> None:
        kind, (root, life, number), place, entry = wire.read(message)
        _, known = self._workers.get(root, ("", life))
        newest = wire.head(kind, (root, max(life, known), number), entry, place)
        take(self, sender, newest + bytes(message)[wire.HEAD_BYTES :])

    return mock.patch.object(Relay, "take", careless)


@planted_fault(CHANNEL, Test("tests/relaying/test_credit.py"))
def _one_credit_window_for_any_way() -> Any:
    """A channel has one credit window, however many links its entries pass."""
    return mock.patch.object(OutChannel, "passes")


@planted_fault(
    "penstock/runtime/relaying/limit_adjuster.py",
    Test("tests/relaying/test_limit_adjuster.py::test_a_burst_after_a_stall_of_the_source_makes_no_chain"),
)
def _one_look_makes_a_chain() -> Any:
    """The limit becomes 1 as soon as a look says so."""
    return mock.patch.object(LimitAdjuster, "_twice", lambda self, now_s, verdict, limit, sign: verdict)


@planted_fault(
    "penstock/runtime/relaying/root.py",
    Test(f"{STREAMS}::test_what_relays_say_to_an_earlier_process_of_a_root_has_no_effect"),
)
def _a_root_takes_what_was_for_an_earlier_life() -> Any:
    """A root does not look at the life of the process to which a relay speaks."""
    take = MulticastRoot.take

    def careless(self: MulticastRoot, sender: int, message: Any) -> None:
        head = wire.read(message)
        root, _, number = head.stream
        take(self, sender, wire.head(head.kind, (root, self.life, number), head.number, head.place))

    return mock.patch.object(MulticastRoot, "take", careless)


@planted_fault(RELAY, Test(f"{STREAMS}::test_a_relay_forgets_the_streams_of_a_root_that_is_gone"))
def _streams_of_the_dead_are_kept() -> Any:
    """A relay keeps the streams of a root that has died."""
    drop = Relay._drop_workers

    def keeps(self: Relay, gone: list[int]) -> None:
        streams = dict(self._streams)
        drop(self, gone)
        self._streams.update(streams)

    return mock.patch.object(Relay, "_drop_workers", keeps)
