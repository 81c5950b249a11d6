"""The relay of a node: takes the streams of workers on other nodes, forwards them along their trees, and hands them to
the workers of its own node (docs/papers.md: W2, W6).

A body crosses the network once for each node, whatever the number of workers and tasks there. The relay does not decode
it. A RelayLog for each stream decides what goes to which relay. For the workers of its node the relay writes another
address before the same body.

A relay forwards an entry before its own workers have it, and never waits for them: what a worker has no room for stays
*behind* for this worker and stream alone. What a relay keeps is bounded by credit: a sender stops when a credit window
is outstanding in one of its channels, and a relay keeps nothing that all receivers below it have taken up.

The relay tells the root what is *delivered*, which is what the inboxes of its workers have. Until then the root keeps
the entry. So the death of a relay loses nothing: the root sends again what was not delivered, straight to the workers,
and another relay joins. A relay never rewrites an entry, and never delivers one twice or out of order.

A relay has no threads and no clock. Whoever runs it calls `take` for each message and then `flush`
(runtime/relaying/relay_loop.py).
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterable, Mapping

from penstock.runtime.exchange.message import ANY_WAY, BadMessage, pack_destinations, packed_address
from penstock.runtime.multicast.relay_log import (
    Action,
    Ask,
    Connect,
    Connected,
    Process,
    Receipt,
    RelayLog,
    Send,
)
from penstock.runtime.relaying import wire
from penstock.runtime.relaying.wire import HEAD_BYTES, Announced, Head, StreamId
from penstock.runtime.status import RelayStatus
from penstock.runtime.transport.base import Buffer, PeerGone, PeerTransport

logger = logging.getLogger(__name__)

#: The place of the log's number in the head of an entry.
_PLACE = struct.Struct("<I")
_PLACE_AT = 16


class _Stream:
    """A relay's knowledge of a stream. `members`: the channels of its workers, packed for an address, with their
    number. `behind`: what the inbox of a worker had no room for, with the numbers of the entries."""

    __slots__ = ("behind", "log", "members", "receipts", "said")

    def __init__(self, log: RelayLog) -> None:
        self.log = log
        self.members: dict[int, tuple[int, bytes]] = {}
        self.behind: dict[int, deque[tuple[int, tuple[Buffer, ...]]]] = {}
        self.receipts: dict[int, int] = {}  # due to parents, which are relays
        self.said = (-1, -1)  # what the root knows: the first entry that a worker lacks, and that the relay lacks

    @property
    def undelivered(self) -> int:
        """The number of the first entry that a worker lacks."""
        return min([self.log.next, *(waiting[0][0] for waiting in self.behind.values())])


class Relay:
    """See the module's docstring. `number`: of this life of the relay."""

    def __init__(self, number: int, transport: PeerTransport) -> None:
        self.number = number
        self.forwarded = 0  # entries sent to other relays so far
        self.handed_over = 0  # entries given to workers so far, counted for each worker
        self._transport = transport
        self._streams: dict[StreamId, _Stream] = {}
        self._workers: dict[int, tuple[str, int]] = {}  # address and life of those that are connected
        self._relays: set[int] = set()
        self._lost: set[int] = set()  # relays, which never come back
        self._early: dict[StreamId, list[tuple[int, bytes]]] = {}  # messages that came before the stream has begun
        self._closed: set[StreamId] = set()
        self._outbox: dict[int, deque[tuple[Buffer, ...]]] = {}  # what found no room, by relay and root
        self._changed: dict[StreamId, None] = {}  # streams of which something may have to be said
        self._late: dict[StreamId, None] = {}  # streams that have something behind

    # --- who is there --------------------------------------------------------------------------------------------

    def use(self, workers: Mapping[int, tuple[str, int]], relays: Mapping[int, str]) -> None:
        """Knows these workers, with the address and the life of each, and these other relays, and no others."""
        gone = [worker for worker, place in self._workers.items() if workers.get(worker) != place]
        self._drop_workers(gone)
        lost = [relay for relay in self._relays if relay not in relays]
        self._drop_relays(lost)
        for worker, (address, life) in workers.items():
            if worker not in self._workers and self._connect(worker, address):
                self._workers[worker] = (address, life)
        for relay, address in relays.items():
            if relay != self.number and relay not in self._relays and self._connect(relay, address):
                self._relays.add(relay)

    def _connect(self, peer: int, address: str) -> bool:
        try:
            self._transport.connect({peer: address})
        except PeerGone as error:  # its death will be told
            logger.info("relay %d: %s", self.number, error)
            return False
        return True

    def _drop_workers(self, gone: list[int]) -> None:
        self._transport.drop(gone)
        for worker in gone:
            _, life = self._workers.pop(worker)
            self._outbox.pop(worker, None)
            for stream_id in [one for one in (*self._streams, *self._early, *self._closed) if one[0] == worker]:
                if stream_id[1] <= life:
                    self._forget(stream_id)
                    self._closed.discard(stream_id)
            for stream_id, stream in self._streams.items():
                stream.members.pop(worker, None)
                if stream.behind.pop(worker, None) is not None:
                    self._changed[stream_id] = None

    def _drop_relays(self, lost: list[int]) -> None:
        self._transport.forget(lost)
        for relay in lost:
            self._relays.discard(relay)
            self._lost.add(relay)
            self._outbox.pop(relay, None)
            # What this means for a stream, its root says.

    # --- messages ------------------------------------------------------------------------------------------------

    def take(self, sender: int, message: Buffer) -> None:
        """Takes a message of a relay or a root. Raises BadMessage."""
        head = wire.read(message)
        stream = self._streams.get(head.stream)
        if stream is not None and head.kind == wire.ENTRY:  # most messages
            self._act(head.stream, stream, stream.log.take(sender, head.number, bytes(message)))
        elif head.kind == wire.JOIN:
            self._join(head, message)
        elif head.kind == wire.CLOSE:
            self._forget(head.stream)
            self._closed.add(head.stream)
        elif stream is None or (stream.log.parent is None and head.kind in (wire.CONNECTING, wire.ASK)):
            # A relay that has left the tree may learn of children before it learns that it joins again.
            root, life, _ = head.stream
            known = self._workers.get(root)
            if head.stream not in self._closed and (known is None or life >= known[1]):
                self._early.setdefault(head.stream, []).append((sender, bytes(message)))
        else:
            self._take(sender, head, stream, message)

    def _take(self, sender: int, head: Head, stream: _Stream, message: Buffer) -> None:
        log, kind = stream.log, head.kind
        actions: list[Action] = []
        if kind in wire.ENTRIES:
            entry: object = bytes(message)
            if kind == wire.TREE:
                entry = Announced(head.place, wire.read_tree(message), bytes(message))
            actions = log.take(sender, head.number, entry)
        elif kind == wire.CONNECT:
            actions = log.connect(head.number, head.place)
        elif kind == wire.CONNECTING:
            actions = log.connected(sender, head.place)
        elif kind == wire.ASK:
            actions = log.asked(sender, head.number)
        elif kind == wire.RECEIPT:
            log.receipt(sender, head.number)
        elif kind == wire.LOST:
            self._outbox.pop(head.number, None)
            self._lost.add(head.number)
            stream.receipts.pop(head.number, None)
            actions = log.node_lost(head.number)
        elif kind == wire.SETTLE:
            log.settle(head.number)
            if log.idle:
                self._forget(head.stream, keep_early=True)
        else:
            raise BadMessage(f"relay {self.number} got a message of the kind {kind}, which is for roots")
        self._act(head.stream, stream, actions)

    def _join(self, head: Head, message: Buffer) -> None:
        """Begins with a stream that the root has announced."""
        self._forget(head.stream, keep_early=True)
        tree = wire.read_tree(message)
        log = RelayLog(self.number, tree, head.number, head.place)
        stream = self._streams[head.stream] = _Stream(log)
        self._act(head.stream, stream, log.begin())
        for sender, early in self._early.pop(head.stream, ()):
            self.take(sender, early)

    def _forget(self, stream: StreamId, *, keep_early: bool = False) -> None:
        self._streams.pop(stream, None)
        self._changed.pop(stream, None)
        self._late.pop(stream, None)
        if not keep_early:
            self._early.pop(stream, None)

    def _act(self, stream_id: StreamId, stream: _Stream, actions: Iterable[Action]) -> None:
        """Carries out the actions of a log. Sends come before what is for the own workers."""
        root = stream_id[0]
        for action in actions:
            if isinstance(action, Send):
                self._send(action.to, (_message(action.entry),))
                self.forwarded += 1
            elif isinstance(action, Receipt):
                if action.to != root:
                    stream.receipts[action.to] = action.through
            elif isinstance(action, Ask):
                self._send(action.to, (wire.head(wire.ASK, stream_id, action.number),))
            elif isinstance(action, Connect):
                self._send(action.to, (wire.head(wire.CONNECTING, stream_id, 0, action.version),))
            elif isinstance(action, Connected):
                self._send(root, (wire.head(wire.CONNECTED, stream_id, action.child, action.version),))
        for action in actions:
            if isinstance(action, Process):
                self._process(stream_id, stream, action.number, _message(action.entry))
        if stream_id in self._streams:
            self._changed[stream_id] = None

    def _process(self, stream_id: StreamId, stream: _Stream, number: int, message: bytes) -> None:
        """Gives an entry to the workers of this node."""
        kind = message[0]
        if kind == wire.ENTRY:
            (place,) = _PLACE.unpack_from(message, _PLACE_AT)
            body = memoryview(message)[HEAD_BYTES:]
            for worker, (count, packed) in stream.members.items():
                parts = (packed_address(count, packed, place, ANY_WAY), body)
                if worker in stream.behind or not self._transport.send(worker, 0, parts):
                    stream.behind.setdefault(worker, deque()).append((number, parts))
                    self._late[stream_id] = None
                else:
                    self.handed_over += 1
        elif kind == wire.MEMBERS:
            own = wire.read_members(message).get(self.number, {})
            stream.members = {worker: (len(among), pack_destinations(among)) for worker, among in own.items()}
            for worker in stream.behind.keys() - own.keys():
                del stream.behind[worker]  # its tasks have gone back, and get these entries anew

    def _send(self, peer: int, parts: tuple[Buffer, ...]) -> None:
        waiting = self._outbox.get(peer)
        if waiting:
            waiting.append(parts)
        elif peer not in self._lost and not self._transport.send(peer, self.number, parts):
            self._outbox.setdefault(peer, deque()).append(parts)

    # --- what waits ----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether something waits for room, so that `flush` must be called again."""
        # Who is not connected yet is no reason to try again and again.
        return bool(self._late) or any(
            waiting and (peer in self._relays or peer in self._workers) for peer, waiting in self._outbox.items()
        )

    def flush(self) -> None:
        """Sends the entries that have waited for room, and reports received entries to parents and roots. Called after
        some messages."""
        for peer, waiting in self._outbox.items():
            while waiting and self._transport.send(peer, self.number, waiting[0]):
                waiting.popleft()
        for stream_id in list(self._late):
            self._catch_up(stream_id)
        changed, self._changed = self._changed, {}
        for stream_id in changed:
            stream = self._streams[stream_id]
            for to, through in stream.receipts.items():
                self._send(to, (wire.head(wire.RECEIPT, stream_id, through),))
            stream.receipts.clear()
            said = stream.undelivered, stream.log.next
            if said != stream.said:
                stream.said = said
                self._send(stream_id[0], (wire.head(wire.DELIVERED, stream_id, *said),))

    def _catch_up(self, stream_id: StreamId) -> None:
        stream = self._streams[stream_id]
        for worker, waiting in list(stream.behind.items()):
            while waiting and self._transport.send(worker, 0, waiting[0][1]):
                waiting.popleft()
                self.handed_over += 1
                self._changed[stream_id] = None
            if not waiting:
                del stream.behind[worker]
        if not stream.behind:
            del self._late[stream_id]

    def status(self) -> RelayStatus:
        """Returns the state of the relay, as far as it knows it."""
        kept = sum(len(_message(entry)) for stream in self._streams.values() for entry in stream.log.entries)
        return RelayStatus(
            number=self.number,
            streams=len(self._streams),
            kept_bytes=kept,
            behind=sum(len(waiting) for stream in self._streams.values() for waiting in stream.behind.values()),
            forwarded=self.forwarded,
            handed_over=self.handed_over,
        )


def _message(entry: object) -> bytes:
    """Returns an entry of a relay's log as the message in which it came."""
    if isinstance(entry, Announced):
        return entry.message
    assert isinstance(entry, bytes)
    return entry
