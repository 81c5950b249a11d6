"""Fuzzes what reads bytes that other machines have sent: heads of messages, frames, acknowledgements, handshakes, and
the messages of relays.

Inputs are valid messages of all kinds that are changed: bits, numbers at their limits, pieces that are cut out,
doubled, exchanged with those of other inputs. Whatever comes, a decoder raises the error that its docstring names, or
returns what makes the same bytes again; it takes memory in proportion to the input, whatever a head claims; and nothing
is unpickled unless a head that keeps to the format says so.

    python -m tests.heads.fuzz --seconds 600 --seed 1

One seed is one row of inputs. A failure names the input.
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from penstock.runtime.errors import CodecError
from penstock.runtime.exchange import message
from penstock.runtime.exchange.message import BadMessage
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.records import codec
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.relaying import wire
from penstock.runtime.transport import peer_handshake
from penstock.runtime.transport.base import Buffer
from penstock.runtime.transport.framing import (
    ACKNOWLEDGE,
    ACKNOWLEDGEMENT,
    CLOSED,
    FIRST_OWN,
    FRAME_HEAD,
    HEAD_BYTES,
    LARGEST_BODY,
    LEFT,
    RECEIVED,
    BadFrame,
    FrameDecoder,
)
from penstock.runtime.transport.handshake import NotProved, admit, introduce, proof
from penstock.runtime.transport.peer_handshake import Admitting, Introducing, Process
from penstock.runtime.transport.send_region import WRAP
from penstock.runtime.transport.send_stream import SendStream

# An object of a message takes up to so many bytes of memory for each byte of the message: an empty dict has one byte.
_MEMORY_PER_BYTE = 160
_MEMORY = 64 * 1024
# Every so many inputs, memory is measured, which takes long.
_MEASURED = 16
_CHANGES_MAX = 6
_INPUT_MAX = 4096
_U64 = (1 << 64) - 1
_LIMITS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFF0, 0xFFFF_FFFF, _U64)


class Unpickled(CodecError):
    """Stands for what unpickling would do. Inputs are not unpickled: they could do anything."""


class UserCode:
    """Stands in for the unpickler, and says whether it may be asked."""

    def __init__(self) -> None:
        self.allowed = False

    def __call__(self, payload: Buffer) -> Any:
        assert self.allowed, f"{len(payload)} bytes were unpickled that nobody has vouched for"
        raise Unpickled("it would be unpickled")


# --- changes ----------------------------------------------------------------------------------------------------------


def changed(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Returns an input with some changes."""
    found = bytearray(data)
    for _ in range(rng.randint(1, _CHANGES_MAX)):
        rng.choice(_CHANGES)(rng, found, others)
    return bytes(found[:_INPUT_MAX])


def _flip(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _number(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """Sets, or changes a little, a number of 2, 4 or 8 bytes; most heads have theirs at such places."""
    size = rng.choice((2, 4, 4, 8))
    if len(data) < size:
        return
    last = len(data) - size
    at = rng.randrange(min(last, 64) // 2 + 1) * 2 if rng.random() < 0.8 else rng.randint(0, last)
    order = "big" if rng.random() < 0.1 else "little"  # msgpack's numbers are big
    value = int.from_bytes(data[at : at + size], order)
    value = rng.choice(_LIMITS) if rng.random() < 0.5 else value + rng.choice((-8, -2, -1, 1, 2, 8))
    data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, order)


def _cut(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randint(0, len(data))
    del data[at : at + rng.choice((1, 2, 4, 8, 16, len(data)))]


def _insert(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 16)))


def _double(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = data[at : at + rng.choice((4, 8, 16, 64))]


def _splice(rng: random.Random, data: bytearray, others: list[bytes]) -> None:
    other = rng.choice(others)
    data[rng.randint(0, len(data)) :] = other[rng.randint(0, len(other)) :]


def _claim(rng: random.Random, data: bytearray, _: list[bytes]) -> None:
    """A list, dict or text of msgpack that claims 4 GiB."""
    at = rng.randint(0, len(data))
    data[at : at + 5] = rng.choice((b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9")) + b"\xff\xff\xff\xff"


_CHANGES: tuple[Callable[[random.Random, bytearray, list[bytes]], None], ...] = (
    _flip,
    _set,
    _number,
    _number,
    _number,
    _cut,
    _insert,
    _double,
    _splice,
    _claim,
)


# --- what reads bytes -------------------------------------------------------------------------------------------------


class Target:
    """A decoder with inputs that keep to its format."""

    name: str

    def valid(self, rng: random.Random) -> bytes:
        """Returns an input that the decoder takes."""
        raise NotImplementedError

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        """Has an input decoded, and says in a word what came of it. Raises AssertionError for what must not be."""
        raise NotImplementedError


def _destinations(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randrange(1 << 32), rng.randrange(1 << 32)) for _ in range(rng.choice((1, 1, 1, 2, 5)))]


class Messages(Target):
    """Messages between workers."""

    name = "messages"
    BATCHES: tuple[Any, ...] = (
        [],
        ["a", "text", ""],
        [1, None, 2.5, True, b"bytes", -(1 << 40)],
        [(1, "one"), (2, "two")],
        [[1, [2, {"a": []}]], {}],
        [{1, 2}, 3j],
        KeyedBatch(["k", "l"], [1, 2], False),
        KeyedBatch([("k", 1), ("l", 2)], [[], {"x": 1}], True),
        KeyedBatch([3j], [{4}], False),
    )

    def valid(self, rng: random.Random) -> bytes:
        kind = rng.choice((message.DATA, message.DATA, message.DATA, message.END, message.CREDIT, message.BARRIER, 5))
        stamp = rng.choice((0, 1, -1, (1 << 63) - 1, -(1 << 63)))
        if kind == message.DATA:
            _, parts = message.encode_body(rng.choice(self.BATCHES), stamp, ErrorHandler("fail", "fuzz"))
            body = b"".join(parts)
        else:
            body = message.signal(kind, stamp)
        piece = rng.choice((0, 0, 0, 1, message.PIECES_MAX - 1))
        marks = rng.choice((0, message.MORE) if piece else (0, message.FIRST, message.MORE))
        return message.address(_destinations(rng), rng.randrange(1 << 32), marks, piece) + body

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        try:
            head = message.read_head(data)
        except BadMessage:
            return "refused"
        destinations, at = message.read_address(data)
        body = data[at:]
        assert head.destinations == destinations
        assert message.address(destinations, head.number, head.marks, head.piece) == data[:at]
        assert (
            message.BODY.pack(head.kind, head.flags, head.codec, head.records, head.stamp) == body[: message.BODY.size]
        )
        assert (head.body_bytes, head.payload_at) == (len(body), at + message.BODY.size)
        if head.kind != message.DATA:
            assert len(body) == message.BODY.size
            return "signal"
        code.allowed = True
        try:
            batch = message.decode_payload(data, head)
        except Unpickled:
            return "pickled"
        except CodecError:
            return "no payload"
        finally:
            code.allowed = False
        assert len(batch) == head.records
        assert isinstance(batch, KeyedBatch) == bool(head.flags)
        return "decoded"


class Relayed(Target):
    """Messages between roots and relays."""

    name = "messages of relays"

    def valid(self, rng: random.Random) -> bytes:
        kind = rng.randint(wire.ENTRY, wire.DELIVERED)
        stream = (rng.randrange(100), rng.randrange(1 << 32), rng.randrange(10))
        payload = b""
        if kind == wire.ENTRY:
            payload = message.signal(message.BARRIER, 7)
        elif kind == wire.MEMBERS:
            relays = [wire.FIRST_RELAY + i for i in range(3)]
            payload = wire.write_members(
                {relay: {n: tuple(_destinations(rng)) for n in range(rng.randint(1, 3))} for relay in relays}
            )
        elif kind in (wire.TREE, wire.JOIN):
            nodes = [wire.FIRST_RELAY + i for i in range(rng.randint(0, 6))]
            pairs = [(node, rng.choice([3, *nodes[:i]])) for i, node in enumerate(nodes)]
            payload = wire.write_tree(Tree.of_parents(3, pairs))
        return wire.head(kind, stream, rng.randrange(1 << 64), rng.randrange(1 << 32)) + payload

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        try:
            head = wire.read(data)
        except BadMessage:
            return "refused"
        assert wire.head(head.kind, head.stream, head.number, head.place) == data[: wire.HEAD_BYTES]
        payload = head.kind in (wire.ENTRY, wire.MEMBERS, wire.TREE, wire.JOIN)
        assert payload or len(data) == wire.HEAD_BYTES
        try:
            if head.kind == wire.MEMBERS:
                members = wire.read_members(data)
                assert wire.read_members(data[: wire.HEAD_BYTES] + wire.write_members(members)) == members
                return "members"
            if head.kind in (wire.TREE, wire.JOIN):
                tree = wire.read_tree(data)
                again = wire.read_tree(data[: wire.HEAD_BYTES] + wire.write_tree(tree))
                assert (again.root, again.parent) == (tree.root, tree.parent)
                return "tree"
        except BadMessage:
            return "no payload"
        return "head"


class Frames(Target):
    """A stream of frames, which comes in pieces."""

    name = "frames"

    def valid(self, rng: random.Random) -> bytes:
        return b"".join(
            FRAME_HEAD.pack(len(body), task, number) + body
            for number in range(rng.randint(1, 5))
            for task, body in [
                (rng.choice((LEFT, ACKNOWLEDGE)), b"")
                if rng.random() < 0.2
                else (rng.randrange(FIRST_OWN), rng.randbytes(rng.choice((0, 1, 30, 300))))
            ]
        )

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        limit = rng.choice((100, 1000, LARGEST_BODY))
        due, position, bad = self._model(data, limit)
        decoder = FrameDecoder(limit)
        found: list[tuple[int, Buffer]] = []
        start = 0
        cuts = [*sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 4))), len(data)]
        refused = False
        view = memoryview(data)
        for stop in cuts:
            try:
                start = decoder.decode(view, start, stop, found)
            except BadFrame:
                refused = True
                break
            assert 0 <= start <= stop
            assert decoder.wanted <= HEAD_BYTES + limit
        assert (refused, decoder.position) == (bad, position)
        assert [(task, bytes(body)) for task, body in found] == due
        return "refused" if refused else "frames"

    @staticmethod
    def _model(data: bytes, limit: int) -> tuple[list[tuple[int, bytes]], int, bool]:
        """What a plain loop finds: the messages, the position after them, and whether a bad head follows."""
        messages, at, number = [], 0, 0
        while at + 16 <= len(data):
            length, task, its = struct.unpack_from("<IIQ", data, at)
            own = task in (LEFT, ACKNOWLEDGE) and length == 0
            if its != number or length > limit or (task >= FIRST_OWN and not own):
                return messages, at, True
            if at + 16 + length > len(data):
                break
            if not own:
                messages.append((task, data[at + 16 : at + 16 + length]))
            number += 1
            at += 16 + length
        return messages, at, False


class Acknowledgements(Target):
    """What a receiver answers."""

    name = "acknowledgements"

    def valid(self, rng: random.Random) -> bytes:
        # The first one says where the sender goes on, which it has not done yet when the others come.
        position = rng.choice((0, 16, 116, 132, 232))
        return b"".join(
            ACKNOWLEDGEMENT.pack(position, rng.choice((CLOSED, RECEIVED))) for _ in range(rng.randint(1, 4))
        )

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        stream = SendStream(4096, 0, 0)
        for _ in range(2):
            assert stream.put(1, (b"x" * 100,), 100)
        at = 0
        try:
            while at < len(data):
                size = rng.choice((1, 7, 16, 40, 4096))
                stream.answered(data[at : at + size])
                at += size
        except BadFrame:
            return "refused"
        finally:
            region = stream.region
            assert (region.tail & WRAP) <= region.head, "what was never sent is not free"
            assert region.head == 2 * (HEAD_BYTES + 100)
        return "answered" if stream.resumed else "waiting"


class Peers(Target):
    """The handshake of two workers. A dialogue of which anything was changed proves nothing."""

    name = "handshakes of peers"
    KEY = b"k" * 32
    ONE, OTHER = Process(1, b"1" * 16), Process(2, b"2" * 16)

    def valid(self, rng: random.Random) -> bytes:
        # `os.urandom` is used up by others too: the nonces are set here.
        nonce = rng.randbytes(32)
        with mock.patch.object(peer_handshake.os, "urandom", return_value=nonce):
            return Introducing(self.KEY, self.ONE, self.OTHER, rng.randrange(9), rng.randrange(1 << 64)).output

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        admitting = Admitting(self.KEY, self.OTHER)
        size = admitting.need
        assert size <= 200
        if len(data) < size:
            return "too short"
        hello, then = data[:size], data[size : size + 32].ljust(32, b"\0")
        try:
            admitting.take(hello)
        except (NotProved, EOFError):
            assert admitting.need, "it has not proved itself"
            return "refused"
        assert hello[-32:] == proof(self.KEY, b"hello", hello[:-32])
        assert admitting.need == 32
        try:
            admitting.take(then)
        except NotProved:
            assert admitting.need, "it has not proved itself"
            return "no proof"
        raise AssertionError("a guess has proved something")


class Answers(Target):
    """What the connecting worker hears, from one who does not know the key."""

    name = "answers of peers"

    def valid(self, rng: random.Random) -> bytes:
        return rng.randbytes(64)

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        introducing = Introducing(Peers.KEY, Peers.ONE, Peers.OTHER, 1, 4096)
        size = introducing.need
        try:
            introducing.take(data[:size])
        except NotProved:
            assert introducing.need == size
            return "refused"
        raise AssertionError("a guess has proved something")


class Control(Target):
    """The handshake of control connections, from either end, over a socket."""

    name = "handshakes of control"

    def valid(self, rng: random.Random) -> bytes:
        nonce = rng.randbytes(32)
        return nonce + proof(b"another key", b"client", nonce, nonce)

    def look(self, rng: random.Random, data: bytes, code: UserCode) -> str:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            try:
                rng.choice((admit, introduce))(ours, b"k" * 32, 60.0)
            except (OSError, EOFError) as error:
                ours.settimeout(0)
                left = ours.recv(2 * _INPUT_MAX)
                assert len(left) >= len(data) - 64, f"{len(data) - len(left)} bytes of a stranger were read"
                return "refused" if isinstance(error, NotProved) else "gone"
        raise AssertionError("a guess has proved something")


TARGETS: tuple[Target, ...] = (
    Messages(),
    Messages(),
    Messages(),
    Relayed(),
    Relayed(),
    Frames(),
    Frames(),
    Acknowledgements(),
    Peers(),
    Answers(),
    Control(),
)


# --- runs -------------------------------------------------------------------------------------------------------------


@contextmanager
def nothing_is_unpickled() -> Iterator[UserCode]:
    """Puts the stand-in where the codec has its unpickler."""
    code = UserCode()
    for arity in range(1, codec.MOST_ARITY + 1):  # each has a decoder, which stays
        codec.decode(codec.TUPLES | arity << codec.KIND_BITS, b"\x90")
    with mock.patch.dict(codec._decoders, {codec.PICKLE: code}):
        yield code


def one(seed: int, code: UserCode, measured: bool) -> tuple[str, str]:
    """Looks at the input of a seed. Returns its target and what came of it. Raises AssertionError."""
    rng = random.Random(seed)
    target = rng.choice(TARGETS)
    data = target.valid(rng)
    if rng.random() < 0.95:
        data = changed(rng, data, [target.valid(rng), rng.choice(TARGETS).valid(rng), rng.randbytes(100)])
    if measured:
        tracemalloc.start()
    try:
        outcome = target.look(rng, data, code)
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
    except Exception as error:  # whatever it is, it is none of those that a decoder may raise
        raise AssertionError(
            f"{target.name}, seed {seed}: {type(error).__name__}: {error}; the input: {data.hex()}; "
            f"repeat: python -m tests.heads.fuzz --inputs 1 --seed {seed}"
        ) from error
    finally:
        if measured:
            tracemalloc.stop()
    most = _MEMORY + _MEMORY_PER_BYTE * len(data)
    assert peak <= most, f"{target.name}, seed {seed}: {peak:,} bytes of memory for {len(data):,} bytes: {data.hex()}"
    return target.name, outcome


def run(seed: int, inputs: int | None, seconds: float) -> Counter[tuple[str, str]]:
    """Looks at the inputs of seeds from one on, for some seconds or some inputs. Returns what came of them."""
    until = time.monotonic() + seconds
    outcomes: Counter[tuple[str, str]] = Counter()
    with nothing_is_unpickled() as code:
        while (outcomes.total() < inputs) if inputs is not None else (time.monotonic() < until):
            number = seed + outcomes.total()
            outcomes[one(number, code, measured=inputs == 1 or number % _MEASURED == 0)] += 1
    return outcomes


def main() -> None:
    """Runs for some time, and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--inputs", type=int, help="in place of --seconds")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcomes = run(options.seed, options.inputs, options.seconds)
    for (target, outcome), count in sorted(outcomes.items()):
        print(f"{target:24} {outcome:12} {count:12,}")
    print(f"{outcomes.total():,} inputs from seed {options.seed}: every one was refused, or is what it says")


if __name__ == "__main__":
    main()
