"""The messages between source workers and relays (docs/papers.md: W2, W6).

A *stream* carries one log (runtime/exchange/log.py) to the relays of other nodes. Its *root* is the worker with the
sending task. A message has a head of 28 bytes, and for some kinds a payload:

    kind u8 | zero u8 | zero u16 | root u32 | life u32 | stream u32 | place u32 | number u64

`root` and `life` are the index of the root's worker and the number of its present process. So nothing of a process that
has died is taken for its successor's. `stream` counts the streams of this process, and `number` the entries of the
stream. A message that is part of a stream is forwarded as it is, so it names no tasks: an entry of the kind MEMBERS
says which channels the later entries are for.

    kind        from, to          number                  place               payload
    ENTRY       parent to child   of this entry           number in the log   a body (runtime/exchange/message.py)
    SKIPPED     the same          of this entry                               none: all receivers have the body already
    MEMBERS     the same          of this entry                               by relay and worker: channels
    TREE        the same          of this entry           version             the tree of all later entries
    JOIN        root to relay     of the first entry      version             the tree
    CONNECT     root to relay     parent                  version
    SETTLE      root to relay     of the announcement
    LOST        root to relay     another relay
    CLOSE       root to relay
    CONNECTING  child to parent                           version
    ASK         child to parent   of the next entry
    CONNECTED   parent to root    child                   version
    RECEIPT     child to parent   of the last entry
    DELIVERED   relay to root     of the first entry  the first entry
                                  that a worker of    that the relay
                                  the relay lacks     itself lacks

Messages may come over networks, from processes that belong to the job. One that does not keep to this format raises
BadMessage, and nothing of it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.runtime.exchange.message import BadMessage, Destination
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.multicast.tree_switch import Announcement
from penstock.runtime.transport.base import Buffer

ENTRY, SKIPPED, MEMBERS, TREE = 1, 2, 3, 4
JOIN, CONNECT, SETTLE, LOST, CLOSE = 5, 6, 7, 8, 9
CONNECTING, ASK, CONNECTED, RECEIPT, DELIVERED = 10, 11, 12, 13, 14

#: The kinds of entries, which have numbers in the stream.
ENTRIES = (ENTRY, SKIPPED, MEMBERS, TREE)

#: Relays have these numbers and higher ones among the peers of a transport. Workers have lower ones.
FIRST_RELAY = 1 << 20

_HEAD = struct.Struct("<BBHIIIIQ")
HEAD_BYTES = _HEAD.size
_WITH_PAYLOAD = frozenset((ENTRY, MEMBERS, TREE, JOIN))
_U32 = (1 << 32) - 1

#: A stream: the root's worker, the life of its process, and the number of the stream.
StreamId = tuple[int, int, int]

#: The channels of each worker, by relay and worker.
Members = Mapping[int, Mapping[int, tuple[Destination, ...]]]


class Head(NamedTuple):
    """The head of a message."""

    kind: int
    stream: StreamId
    place: int
    number: int


def head(kind: int, stream: StreamId, number: int = 0, place: int = 0) -> bytes:
    """Returns the head of a message."""
    return _HEAD.pack(kind, 0, 0, *stream, place & _U32, number)


def read(message: Buffer) -> Head:
    """Reads the head of a message. Raises BadMessage."""
    if len(message) < HEAD_BYTES:
        raise BadMessage(f"a relay's message has {len(message)} bytes, and its head has {HEAD_BYTES}")
    kind, zero, also_zero, root, life, stream, place, number = _HEAD.unpack_from(message)
    if not ENTRY <= kind <= DELIVERED or zero or also_zero:
        raise BadMessage(f"a relay's message has the kind {kind} ({zero}, {also_zero})")
    if len(message) > HEAD_BYTES and kind not in _WITH_PAYLOAD:
        raise BadMessage(f"a relay's message of the kind {kind} has {len(message)} bytes")
    return Head(kind, (root, life, stream), place, number)


# --- payloads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Announced(Announcement):
    """An announcement as a relay gets it, with the message, which it forwards as it is."""

    message: bytes = b""


def write_tree(tree: Tree) -> bytes:
    """Returns the payload of a TREE or JOIN: the root, and each node with its parent. The children of a node are in
    their sending order."""
    pairs = [field for pair in tree.parent.items() for field in pair]
    return struct.pack(f"<{len(pairs) + 1}I", tree.root, *pairs)


def read_tree(message: Buffer) -> Tree:
    """Reads the payload of a TREE or JOIN. Raises BadMessage."""
    size = len(message) - HEAD_BYTES
    if size % 8 != 4:
        raise BadMessage(f"a tree has {size} bytes")
    root, *fields = struct.unpack_from(f"<{size // 4}I", message, HEAD_BYTES)
    try:
        return Tree.of_parents(root, zip(fields[::2], fields[1::2], strict=True))
    except ValueError as error:
        raise BadMessage(f"a message has no tree: {error}") from error


def write_members(members: Members) -> bytes:
    """Returns the payload of MEMBERS: for each worker its relay, the worker, the number of its channels, and each
    channel with its generation."""
    fields: list[int] = []
    for relay, workers in members.items():
        for worker, channels in workers.items():
            fields += (relay, worker, len(channels))
            for channel in channels:
                fields += channel
    return struct.pack(f"<{len(fields)}I", *fields)


def read_members(message: Buffer) -> dict[int, dict[int, tuple[Destination, ...]]]:
    """Reads the payload of MEMBERS. Raises BadMessage."""
    size = len(message) - HEAD_BYTES
    if size % 4:
        raise BadMessage(f"a list of members has {size} bytes")
    fields = struct.unpack_from(f"<{size // 4}I", message, HEAD_BYTES)
    members: dict[int, dict[int, tuple[Destination, ...]]] = {}
    at = 0
    while at < len(fields):
        if at + 3 > len(fields) or at + 3 + 2 * fields[at + 2] > len(fields):
            raise BadMessage(f"a list of members of {size} bytes ends in the middle of a worker")
        relay, worker, count = fields[at : at + 3]
        at += 3
        among = fields[at : at + 2 * count]
        at += 2 * count
        workers = members.setdefault(relay, {})
        if not count or worker in workers:
            raise BadMessage(f"a list of members names worker {worker} twice, or without a channel")
        workers[worker] = tuple(zip(among[::2], among[1::2], strict=True))
    return members
