"""Channels: what a message carries, records that cannot travel, and credit that bounds and never blocks for good."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import CodecError, RecordError
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES, InChannel, LocalInChannel, RemoteInChannel
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import (
    ADDRESS_BYTES,
    BARRIER,
    CREDIT,
    DATA,
    DESTINATION_BYTES,
    END,
    FIRST,
    KEYED,
    PARTIAL,
    BadMessage,
    address,
    credit,
    decode_body,
    decode_payload,
    encode_body,
    read_address,
    read_head,
    signal,
)
from penstock.runtime.exchange.output_cache import OutputCache
from penstock.runtime.program.flow import Flow
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.userfunc import ErrorHandler, OnError
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.transport.base import Buffer, Transport
from tests.runtime.sim import Cluster, Trickle, small_steps


class Unpicklable:
    """A record that cannot travel."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return "<unpicklable>"


class Wire(Transport):
    """Keeps what was sent; has room for `room` messages."""

    def __init__(self, max_message: int = 10_000, target_message: int = 10_000, room: int = 10**9) -> None:
        self._max_message = max_message
        self.target_message = target_message
        self.room = room
        self.sent: list[bytes] = []

    def max_message(self, worker: int) -> int:
        return self._max_message

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        if len(self.sent) >= self.room:
            return False
        message = b"".join(parts)
        assert len(message) <= self._max_message, "larger than the transport can take"
        self.sent.append(message)
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        sent, self.sent = self.sent, []
        return [(0, message) for message in sent]

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


def read(message: Buffer) -> tuple[int, int, int, int, Batch | None]:
    """The kind, the channel, the stamp, the generation and the records of a message to one task."""
    head = read_head(message)
    channel, generation = head.destinations[0]
    return head.kind, channel, head.stamp, generation, decode_payload(message, head) if head.kind == DATA else None


def records_in(message: Buffer) -> Batch | None:
    """The records of a message."""
    return read(message)[4]


def one_log(
    wire: Transport,
    errors: ErrorHandler,
    window: int = CREDIT_WINDOW_BYTES,
    cache: OutputCache | None = None,
    number: int = 3,
    receiver: Any = None,
) -> OutLog:
    """A log with one channel, to task 0 of worker 1, or to a receiver of the same worker."""
    log = OutLog(wire, errors, cache)
    log.channel(number, 0, 1, local=receiver is not None, credit_window=window).receiver = receiver
    return log


def errors_of(policy: OnError) -> ErrorHandler:
    return ErrorHandler("a -> b", policy, "flow.py:1", [] if policy == "dead_letter" else None)


def content(batch: Batch | None) -> Any:
    return (batch.keys, batch.values, batch.partial) if isinstance(batch, KeyedBatch) else batch


def sent_records(wire: Wire) -> list[Any]:
    """The records of all data messages so far, keyed ones as pairs."""
    records: list[Any] = []
    for message in wire.sent:
        kind, _, _, _, batch = read(message)
        if kind == DATA:
            assert batch is not None
            records += batch if isinstance(batch, list) else zip(batch.keys, batch.values, strict=True)
    return records


# --- messages ---------------------------------------------------------------------------------------------------

values = st.lists(st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.binary()), max_size=10)


generations = st.integers(0, 2**32 - 1)


@given(values, st.integers(-(2**63), 2**63 - 1), st.lists(st.tuples(generations, generations), min_size=1, max_size=70))
def test_plain_batches_come_back(records: list[Any], stamp: int, destinations: list[tuple[int, int]]) -> None:
    body = encode_body(records, stamp, errors_of("fail"))[1]
    message = b"".join((address(destinations, 7), *body))
    assert len(message) == ADDRESS_BYTES + DESTINATION_BYTES * len(destinations) + sum(map(len, body))
    head = read_head(memoryview(message))
    assert (head.kind, head.stamp, head.number, head.marks, head.piece) == (DATA, stamp, 7, 0, 0)
    assert head.destinations == tuple(destinations)
    assert head.body_bytes == sum(map(len, body))
    assert decode_payload(memoryview(message), head) == records
    assert read_address(message) == (tuple(destinations), len(message) - head.body_bytes)


@given(values, st.booleans(), st.integers(1, 3), st.data())
def test_keyed_batches_come_back(records: list[Any], partial: bool, n: int, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers() | st.text(), min_size=len(records), max_size=len(records)))
    body = encode_body(KeyedBatch(keys, records, partial), 5, errors_of("fail"))[1]
    message = b"".join((address([(1, 2)] * n, 2**32 + 3, FIRST), *body))
    head = read_head(message)
    assert (head.stamp, head.number, head.marks, head.destinations) == (5, 3, FIRST, ((1, 2),) * n)
    assert content(decode_payload(message, head)) == (keys, records, partial)


@pytest.mark.parametrize("n", [1, 2])
def test_end_credit_and_barrier_have_no_batch(n: int) -> None:
    for kind, stamp in ((END, 0), (BARRIER, 12)):
        head = read_head(address([(7, 9)] * n, 4) + signal(kind, stamp))
        assert (head.kind, head.stamp, head.number, head.destinations) == (kind, stamp, 4, ((7, 9),) * n)
    assert read(b"".join(credit(7, 9, 1 << 40))) == (CREDIT, 7, 1 << 40, 9, None)


def test_a_count_that_does_not_match_is_noticed() -> None:
    for batch in (["a", "b"], KeyedBatch(["a"], ["b"])):
        message = bytearray(b"".join((address([(1, 0)], 0), *encode_body(batch, 0, errors_of("fail"))[1])))
        message[20] += 1
        with pytest.raises(BadMessage, match=r"a message of \d records decoded to \d"):
            read(message)
    message = b"".join((address([(1, 0)], 0), *encode_body(KeyedBatch(["a"], ["b"]), 0, errors_of("fail"))[1]))
    changed = message.replace(b"\xa1b", b"\xa0")
    with pytest.raises((BadMessage, CodecError)):
        read(changed[:-1])


def test_only_what_keeps_to_the_format_is_a_message() -> None:
    data = b"".join(encode_body(["a", "b"], 0, errors_of("fail"))[1])
    keyed = bytearray(b"".join(encode_body(KeyedBatch([1], [2]), 0, errors_of("fail"))[1]))
    keyed[18:22] = (1 << 31).to_bytes(4, "little")
    good = address([(1, 0)], 0)
    two = address([(1, 0), (2, 0)], 0)
    wrong = {
        "nothing": b"",
        "a part of an address": good[:7],
        "an address alone": good,
        "nobody": b"\0\0" + good[2:] + data,
        "too many destinations": b"\xff\xff" + good[2:] + data,
        "unknown marks": address([(1, 0)], 0, 8) + data,
        "a first piece that is not the first": address([(1, 0)], 0, FIRST, 1) + data,
        "an unknown kind": good + bytes([6]) + data[1:],
        "no kind": good + bytes([0]) + data[1:],
        "unknown flags": good + data[:1] + bytes([PARTIAL]) + data[2:],
        "more flags": two + data[:1] + bytes([4 | KEYED]) + data[2:],
        "an unknown codec": good + data[:2] + b"\xff\xff" + data[4:],
        "a signal with records": good + bytes([BARRIER]) + data[1:],
        "a signal and more": good + signal(END, 0) + b"x",
        "keys of 2 GiB": good + bytes(keyed),
        "no room for keys": good + data[:1] + bytes([KEYED]) + data[2:16],
    }
    taken = []
    for what, message in wrong.items():
        try:
            read(message)
        except CodecError:
            continue
        taken.append(what)
    assert not taken


@given(st.binary(max_size=80), st.booleans())
def test_random_bytes_are_no_error_but_a_bad_message(garbage: bytes, addressed: bool) -> None:
    message = address([(1, 0)], 0) + b"\x01" + garbage if addressed else garbage
    with contextlib.suppress(CodecError):
        head = read_head(message)
        if head.kind == DATA and head.codec:  # not pickled: only peers that have proved themselves may send that
            decode_payload(message, head)


# --- records that cannot travel ---------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=8), st.booleans())
def test_records_that_cannot_be_pickled_are_left_out(good: list[bool], keyed: bool) -> None:
    records = [i if fine else Unpicklable() for i, fine in enumerate(good)]
    errors = errors_of("dead_letter")
    batch: Batch = KeyedBatch(list("abcdefgh"[: len(records)]), records) if keyed else records
    rest, parts = encode_body(batch, 0, errors)
    decoded = decode_body(b"".join(parts))
    assert content(rest) == content(decoded)
    kept = [i for i, fine in enumerate(good) if fine]
    assert content(decoded) == ((["abcdefgh"[i] for i in kept], kept, False) if keyed else kept)
    assert errors.skipped == len(good) - len(kept)
    assert errors.dead_letters is not None
    assert len(errors.dead_letters) == errors.skipped


def test_a_key_that_cannot_be_pickled_takes_its_record_along() -> None:
    errors = errors_of("skip")
    _, parts = encode_body(KeyedBatch([Unpicklable(), "b"], [1, 2]), 0, errors)
    batch = decode_body(b"".join(parts))
    assert content(batch) == (["b"], [2], False)


def test_the_error_names_the_edge_and_the_record() -> None:
    with pytest.raises(RecordError, match=r"operator 'a -> b' failed") as caught:
        encode_body([1, Unpicklable()], 0, errors_of("fail"))
    assert "<unpicklable>" in caught.value.record


@given(st.lists(st.integers(0, 400), max_size=20), st.integers(30, 2000))
def test_messages_are_divided_by_size_and_only_too_large_records_fail(sizes: list[int], target: int) -> None:
    wire = Wire(max_message=300, target_message=target)
    errors = errors_of("dead_letter")
    channel = one_log(wire, errors, 10**9)
    records = [b"%d" % (i % 10) * size for i, size in enumerate(sizes)]
    channel.push(records, 0)
    assert channel.flush()
    alone = [16 + sum(map(len, encode_body([record], 0, errors)[1])) for record in records]
    assert sent_records(wire) == [record for record, size in zip(records, alone, strict=True) if size <= 300]
    assert errors.skipped == len(records) - len(sent_records(wire))


@given(st.lists(st.sampled_from(("small", "large", "bad", "too large")), max_size=12))
def test_a_record_that_fails_is_let_go_once_however_its_batch_is_divided(kinds: list[str]) -> None:
    make = {"small": lambda: "s", "large": lambda: "l" * 120, "bad": Unpicklable, "too large": lambda: "t" * 500}
    wire = Wire(max_message=300)
    errors = errors_of("dead_letter")
    channel = one_log(wire, errors, 10**9)
    if kinds:
        channel.push([make[kind]() for kind in kinds], 0)
    assert channel.flush()
    good = [kind for kind in kinds if kind in ("small", "large")]
    assert [record[0] for record in sent_records(wire)] == [kind[0] for kind in good]
    assert errors.skipped == len(kinds) - len(good)
    assert errors.dead_letters is not None
    assert len(errors.dead_letters) == errors.skipped


def test_a_too_large_record_tells_the_remedy() -> None:
    channel = one_log(Wire(max_message=300), errors_of("fail"))
    channel.push(["x" * 950], 0)
    with pytest.raises(RecordError, match=r"284 at most; run with a larger ring.*ring_bytes=4,?096"):
        channel.flush()


@pytest.mark.parametrize("bad", [Unpicklable, lambda: "x" * 5000], ids=["unpicklable", "too large"])
def test_letters_of_records_that_cannot_travel_travel_themselves(bad: Any) -> None:
    """The sender's worker reports them to a sink on another one."""
    flow = Flow("f", chaining=False)
    letters, whole = Collect(), Collect()
    spoiled = flow.read(Trickle([list(range(40))], 1), parallelism=1).map(
        lambda n: bad() if n % 10 == 0 else n, parallelism=1
    )
    taken = spoiled.map(lambda n: n, name="taken", on_error="dead_letter", parallelism=1)
    taken.write(whole, parallelism=1)
    taken.dead_letters().write(letters, parallelism=1)
    with small_steps(1):
        tasks = len(flow.plan().tasks)
        cluster = Cluster(flow, {task: task % 2 for task in range(tasks)}, seed=1, capacity=4096, window=500)
        cluster._ledger.pushed = _Forgiving(cluster._ledger)
        outputs = cluster.run()
    assert outputs[whole.channel] == [n for n in range(40) if n % 10]
    assert len(outputs[letters.channel]) == 4


class _Forgiving(dict[int, list[Any]]):
    """Records that were let go on the way are missing at its end: what was received is what was pushed."""

    def __init__(self, ledger: Any) -> None:
        super().__init__()
        self._ledger = ledger

    def __getitem__(self, number: int) -> list[Any]:
        return list(self._ledger.received[number])


# --- credit -----------------------------------------------------------------------------------------------------


class Receiver:
    """Stands for the receiving task: an inbox that is taken up one by one."""

    def __init__(self) -> None:
        self.inbox: list[tuple[Batch, int]] = []
        self.ended = 0
        self.got: list[Any] = []

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        self.inbox.append((batch, cost))

    def receive_end(self, channel: int) -> None:
        self.ended += 1

    def take(self, into: InChannel) -> None:
        batch, cost = self.inbox.pop(0)
        assert isinstance(batch, list)
        self.got += batch
        into.take(cost)


sizes = st.lists(st.integers(0, 2000), max_size=25)
windows = st.sampled_from((1, 2, 100, 1000, 10_000))
_ACTS = ("flush", "deliver", "take", "credit")


def _state(out: OutLog, task: Receiver) -> tuple[int, ...]:
    return (
        len(out.queue),
        len(out.cache.entries),
        out.ended,
        len(task.got),
        out.channels[0].outstanding,
        task.ended,
        len(task.inbox),
    )


@given(sizes, windows, st.randoms(use_true_random=False), st.integers(1, 4))
def test_credit_over_a_wire_never_blocks_for_good(lengths: list[int], window: int, rng: Any, room: int) -> None:
    """Both wires have little room, and everybody acts at random times."""
    to_receiver, to_sender = Wire(room=room), Wire(room=room)
    due: dict[int, RemoteInChannel] = {}
    out = one_log(to_receiver, errors_of("fail"), window)
    cursor = out.channels[0]
    into = RemoteInChannel(3, 0, 0, to_sender, due, window)
    task = Receiver()
    records = ["x" * length for length in lengths]
    for record in records:
        out.push([record], 0)
    out.end()
    idle = 0
    largest = 0
    while not (out.ended and task.ended and not task.inbox):
        before = _state(out, task)
        acts = _ACTS if idle > 50 else (rng.choice(_ACTS),)
        for act in acts:
            if act == "flush":
                out.flush()
            elif act == "deliver":
                for _, message in to_receiver.receive(0):
                    kind, _, stamp, _, batch = read(message)
                    if kind == END:
                        into.ended = True
                        task.receive_end(3)
                    else:
                        assert batch is not None
                        largest = max(largest, len(message))
                        task.receive(3, batch, stamp, read_head(message).body_bytes)
                for waiting in list(due.values()):
                    waiting.grant()
            elif act == "take" and task.inbox:
                task.take(into)
            elif act == "credit":
                for _, message in to_sender.receive(0):
                    kind, _, granted, _, _ = read(message)
                    assert kind == CREDIT
                    cursor.granted(granted)
        assert cursor.outstanding >= 0
        assert sum(cost for _, cost in task.inbox) <= window + largest
        idle = 0 if before != _state(out, task) else idle + 1
        assert idle < 200, "no side can continue"
    assert task.got == records
    assert task.ended == 1
    to_sender.receive(0)
    for waiting in list(due.values()):
        waiting.grant()
    assert not due, "an ended channel must not wait for room"


@given(sizes, windows, st.randoms(use_true_random=False))
def test_credit_inside_a_worker_never_blocks_for_good(lengths: list[int], window: int, rng: Any) -> None:
    task = Receiver()
    out = one_log(Wire(), errors_of("fail"), window, receiver=task)
    cursor = out.channels[0]
    into = LocalInChannel(cursor)
    records = ["x" * length for length in lengths]
    for record in records:
        out.push([record], 0)
    out.end()
    while not (out.flush() and not task.inbox):
        assert task.inbox or cursor.outstanding < window, "no side can continue"
        if task.inbox and rng.random() < 0.5:
            task.take(into)
    assert task.got == records
    assert task.ended == 1
    assert 2 * cursor.outstanding < max(window, 2), "what is taken up is granted back but for half a window"


def test_credit_counts_what_was_sent_and_taken() -> None:
    wire = Wire(target_message=64)
    out = one_log(wire, errors_of("fail"), 100)
    cursor = out.channels[0]
    out.push(["x" * 150], 0)
    out.push(["y"], 0)
    assert not out.flush()
    assert cursor.outstanding == len(wire.sent[0]) - ADDRESS_BYTES - DESTINATION_BYTES == out.bytes
    assert out.unsent(cursor) == 1
    assert not out.stopped_by_room, "a grant will tell"
    cursor.granted(cursor.outstanding)
    assert out.flush()
    assert out.unsent(cursor) == 0


@pytest.mark.parametrize("room", [1, 10**9])
def test_what_waits_for_credit_travels_together(room: int) -> None:
    """Under load messages grow: what cannot be sent yet is not encoded piece by piece."""
    wire = Wire(room=room)
    out = one_log(wire, errors_of("fail"), 1)
    for i in range(20):
        out.push([i], i)
        assert out.flush() == (i == 0)
    assert len(wire.sent) == 1
    wire.room += 1
    out.channels[0].outstanding = 0
    assert out.flush()
    assert [records_in(message) for message in wire.sent] == [[0], list(range(1, 20))]


def test_no_room_is_told_apart_from_no_credit() -> None:
    wire = Wire(room=0)
    out = one_log(wire, errors_of("fail"))
    out.push(["x", "y", "z"], 0)
    assert not out.flush()
    assert out.stopped_by_room
    assert out.channels[0].outstanding == 0, "not sent yet"
    assert out.unsent(out.channels[0]) == 3
    wire.room = 1
    out.end()
    assert not out.flush()
    assert out.stopped_by_room
    assert [read(message)[0] for message in wire.sent] == [DATA], "the end is not sent"
    assert out.channels[0].next < out.cache.end
    wire.room = 2
    assert out.flush()
    assert not out.cache.entries, "without epochs nothing is kept"
    assert [read(message)[0] for message in wire.sent] == [DATA, END]
    assert out.flush()
    assert len(wire.sent) == 2, "the end is sent once"


def test_a_grant_that_waits_for_room_is_forgotten_when_its_channel_ends() -> None:
    """Or its worker would look for room every two milliseconds until the job ends."""
    due: dict[int, RemoteInChannel] = {}
    into = RemoteInChannel(3, 0, 0, Wire(room=0), due, credit_window=10)
    into.take(10)
    assert list(due) == [3]
    into.ended = True
    into.grant()
    assert not due


def test_a_grant_that_waits_for_room_is_sent_whole() -> None:
    wire = Wire(room=0)
    due: dict[int, RemoteInChannel] = {}
    into = RemoteInChannel(3, 0, 0, wire, due, credit_window=10)
    into.take(10)
    into.take(7)
    wire.room = 1
    due[3].grant()
    assert not due
    assert read(wire.sent[0]) == (CREDIT, 3, 17, 0, None)


def test_the_queue_length_can_be_asked_while_the_loop_changes_the_queue() -> None:
    """A status call comes from another thread, which may run between any two records."""
    wire = Wire()
    out = one_log(wire, errors_of("fail"))

    class Slow(list[Any]):
        def __len__(self) -> int:
            if not wire.sent:
                wire.sent.append(b"")
                out.queue.append((["more"], 0))  # what the loop does meanwhile
            return super().__len__()

    out.queue.append((Slow(["a"]), 0))
    assert out.queued() in (1, 2)


def test_neighbouring_batches_travel_together_with_the_oldest_stamp() -> None:
    wire = Wire()
    out = one_log(wire, errors_of("fail"))
    for stamp in (9, 4, 7):
        out.push([stamp], stamp)
    assert out.flush()
    assert [read(message)[1:] for message in wire.sent] == [(3, 4, 0, [9, 4, 7])]
