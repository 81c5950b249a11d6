"""Faults of the transport between machines that somebody might write in good faith (tests/planting.py)."""

from __future__ import annotations

from typing import Any
from unittest import mock

from penstock.runtime.exchange import message
from penstock.runtime.relaying import wire
from penstock.runtime.transport import framing, peer_handshake, peer_links, tcp
from penstock.runtime.transport.framing import FrameDecoder
from penstock.runtime.transport.peer_handshake import Admitting
from penstock.runtime.transport.send_region import SendRegion
from penstock.runtime.transport.send_stream import SendStream
from penstock.runtime.transport.tcp import Incoming
from tests.planting import Test, planted_fault

FRAMING = "penstock/runtime/transport/framing.py"
STREAM = "penstock/runtime/transport/send_stream.py"
TCP = "penstock/runtime/transport/tcp.py"
HANDSHAKE = "penstock/runtime/transport/peer_handshake.py"
LINKS = "penstock/runtime/transport/peer_links.py"
REGION = "penstock/runtime/transport/send_region.py"
TESTS = "tests/transport/test_tcp.py"
STREAMS = "tests/transport/test_streams.py"
CUT_ANYWHERE = Test(f"{STREAMS}::test_nothing_is_lost_doubled_or_reordered_wherever_connections_are_cut")


@planted_fault(STREAM, CUT_ANYWHERE)
def _resends_from_the_acknowledged_byte() -> Any:
    """A new connection begins at the last acknowledgement, and not where the receiver is."""
    answered = SendStream.answered

    def from_the_tail(self: Any, data: bytes) -> None:
        tail, resumed = self.region.tail, self.resumed
        answered(self, data)
        if self.resumed and not resumed:
            self.written = tail

    return mock.patch.object(SendStream, "answered", from_the_tail)


@planted_fault(STREAM, CUT_ANYWHERE)
def _goes_on_where_the_last_connection_was() -> Any:
    """What the kernel had taken when the connection broke is not sent again."""
    answered = SendStream.answered

    def where_it_was(self: Any, data: bytes) -> None:
        written, resumed = self.written, self.resumed
        answered(self, data)
        if self.resumed and not resumed:
            self.written = written

    return mock.patch.object(SendStream, "answered", where_it_was)


@planted_fault(TCP, CUT_ANYWHERE)
def _keeps_half_a_frame() -> Any:
    """A receiver keeps what has come of a frame when the connection breaks, though the frame comes again."""
    end = Incoming.end

    def keeps(self: Any) -> None:
        buffer, start, stop = self._buffer, self._start, self._stop
        end(self)
        self._buffer, self._start, self._stop = buffer, start, stop

    return mock.patch.object(Incoming, "end", keeps)


@planted_fault(REGION, Test(f"{STREAMS}::test_a_region_gives_back_what_was_put_into_it"))
def _grows_to_the_same_places() -> Any:
    """A region that has grown keeps its bytes at the places that they had in the smaller one."""

    def grow(self: Any, capacity: int) -> None:
        view = memoryview(bytearray(capacity))
        view[: self.capacity] = self._view
        self.capacity, self._index, self._view = capacity, capacity - 1, view

    return mock.patch.object(SendRegion, "grow", grow)


@planted_fault(FRAMING, Test(f"{STREAMS}::test_a_head_that_cannot_be_is_refused"))
def _numbers_are_not_looked_at() -> Any:
    """A receiver counts frames, and does not compare their numbers."""
    check = FrameDecoder._check

    def only_the_rest(self: Any, length: int, task: int, number: int, expected: int) -> None:
        if length > self.limit or task >= framing.FIRST_OWN:
            check(self, length, task, expected, expected)

    return mock.patch.object(FrameDecoder, "_check", only_the_rest)


@planted_fault(FRAMING, Test(f"{STREAMS}::test_a_head_that_cannot_be_is_refused"))
def _lengths_are_not_looked_at() -> Any:
    """A frame may be of any length."""
    check = FrameDecoder._check

    def only_the_rest(self: Any, length: int, task: int, number: int, expected: int) -> None:
        if number != expected or task >= framing.FIRST_OWN:
            check(self, 0, task, number, expected)

    return mock.patch.object(FrameDecoder, "_check", only_the_rest)


@planted_fault(HANDSHAKE, Test(f"{TESTS}::test_what_was_said_once_proves_nothing_later_or_to_its_sender"))
def _one_nonce_for_all() -> Any:
    """A process uses the same nonce in each handshake."""
    return mock.patch.object(peer_handshake.os, "urandom", bytes)


@planted_fault(HANDSHAKE, Test(f"{TESTS}::test_a_handshake_with_something_wrong_proves_nothing"))
def _whoever_is_meant() -> Any:
    """A process takes a connection that was meant for the process which had its port before."""
    take = Admitting.take

    def as_meant(self: Any, data: bytes) -> None:
        if not self._said and len(data) > 120:
            *_, worker, incarnation, _, _ = peer_handshake._HELLO.unpack(data[: peer_handshake._HELLO.size])
            self._own = peer_handshake.Process(worker, incarnation)
        take(self, data)

    return mock.patch.object(Admitting, "take", as_meant)


@planted_fault(LINKS, Test(f"{TESTS}::test_a_peer_that_is_of_no_use_is_not_asked_without_end"))
def _no_pauses() -> Any:
    """A peer is connected to at once, whatever came of the last connections to it."""
    return mock.patch.object(peer_links, "_USELESS_FREE", 1 << 30)


@planted_fault(LINKS, Test(f"{TESTS}::test_a_thousand_strangers_hold_up_nobody"))
def _strangers_without_limit() -> Any:
    """Strangers may be as many as the process has descriptors."""
    return mock.patch.object(peer_links, "_STRANGERS_MAX", 1 << 30)


@planted_fault(LINKS, Test("tests/transport/test_cuts.py::test_a_cut_is_a_pause"))
def _looks_at_nothing() -> Any:
    """Nobody asks the kernel whether a peer still answers."""
    return mock.patch.object(peer_links.PeerLinks, "_look")


@planted_fault(TCP, Test(f"{TESTS}::test_a_late_connection_of_a_process_that_was_dropped_is_closed"))
def _dropped_processes_are_welcome() -> Any:
    """A connection counts as that of the worker's present process, whichever process made it."""
    adopt = tcp.TcpTransport._adopt

    def any_process(self: Any, link: Any) -> None:
        known = self._peers.get(link.peer.worker)
        adopt(self, link if known is None else peer_links.Link(known, *_without_peer(link)))

    return mock.patch.object(tcp.TcpTransport, "_adopt", any_process)


def _without_peer(link: Any) -> tuple[Any, ...]:
    return link.connection, link.incoming, link.number, link.capacity


@planted_fault(
    "penstock/runtime/exchange/message.py",
    Test("tests/heads/test_heads.py::test_whatever_comes_is_refused_or_is_what_it_says"),
)
def _believes_the_number_of_destinations() -> Any:
    """A message may claim more destinations than it has room for."""
    return mock.patch.object(message, "DESTINATION_BYTES", 4)


@planted_fault(
    "penstock/runtime/relaying/wire.py",
    Test("tests/heads/test_heads.py::test_whatever_comes_is_refused_or_is_what_it_says"),
)
def _passes_over_a_payload_that_cannot_be() -> Any:
    """A relay takes messages with more bytes than their kind has."""
    return mock.patch.object(wire, "_WITH_PAYLOAD", frozenset(range(256)))
