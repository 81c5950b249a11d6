"""Channels: what a message carries, records that cannot travel, and credit that bounds and never blocks for good."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.errors import RecordError
from penstock.runtime.exchange.channel import (
    InChannel,
    LocalChannel,
    LocalInChannel,
    OutChannel,
    RemoteChannel,
    RemoteInChannel,
)
from penstock.runtime.exchange.message import BARRIER, CREDIT, DATA, END, HEAD, decode_batch, encode_batch
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


def errors_of(policy: OnError) -> ErrorHandler:
    return ErrorHandler("a -> b", policy, "flow.py:1", [] if policy == "dead_letter" else None)


def content(batch: Batch | None) -> Any:
    return (batch.keys, batch.values, batch.partial) if isinstance(batch, KeyedBatch) else batch


def sent_records(wire: Wire) -> list[Any]:
    """The records of all data messages so far, keyed ones as pairs."""
    records: list[Any] = []
    for message in wire.sent:
        kind, _, _, _, batch = decode_batch(message)
        if kind == DATA:
            assert batch is not None
            records += batch if isinstance(batch, list) else zip(batch.keys, batch.values, strict=True)
    return records


# --- messages ---------------------------------------------------------------------------------------------------

values = st.lists(st.none() | st.integers() | st.text() | st.tuples(st.integers(), st.binary()), max_size=10)


generations = st.integers(0, 2**32 - 1)


@given(values, st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1), generations)
def test_plain_batches_come_back(records: list[Any], channel: int, stamp: int, generation: int) -> None:
    message = b"".join(encode_batch(channel, records, stamp, errors_of("fail"), generation)[1])
    assert decode_batch(memoryview(message)) == (DATA, channel, stamp, generation, records)


@given(values, st.booleans(), generations, st.data())
def test_keyed_batches_come_back(records: list[Any], partial: bool, generation: int, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers() | st.text(), min_size=len(records), max_size=len(records)))
    message = b"".join(encode_batch(1, KeyedBatch(keys, records, partial), 5, errors_of("fail"), generation)[1])
    kind, channel, stamp, came, batch = decode_batch(message)
    assert (kind, channel, stamp, came) == (DATA, 1, 5, generation)
    assert content(batch) == (keys, records, partial)


def test_end_credit_and_barrier_have_no_batch() -> None:
    assert decode_batch(HEAD.pack(END, 0, 0, 7, 0, 0, 9)) == (END, 7, 0, 9, None)
    assert decode_batch(HEAD.pack(CREDIT, 0, 0, 7, 1 << 40, 0, 9)) == (CREDIT, 7, 1 << 40, 9, None)
    assert decode_batch(HEAD.pack(BARRIER, 0, 0, 7, 12, 0, 9)) == (BARRIER, 7, 12, 9, None)


def test_a_count_that_does_not_match_is_noticed() -> None:
    _, (head, payload) = encode_batch(1, ["a", "b"], 0, errors_of("fail"))
    fields = HEAD.unpack(head)
    assert fields[5] == 2
    forged = HEAD.pack(*fields[:5], 3, fields[6]) + payload
    with pytest.raises(AssertionError, match="a message of 3 records decoded to 2"):
        decode_batch(forged)


# --- records that cannot travel ---------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=8), st.booleans())
def test_records_that_cannot_be_pickled_are_left_out(good: list[bool], keyed: bool) -> None:
    records = [i if fine else Unpicklable() for i, fine in enumerate(good)]
    errors = errors_of("dead_letter")
    batch: Batch = KeyedBatch(list("abcdefgh"[: len(records)]), records) if keyed else records
    rest, parts = encode_batch(1, batch, 0, errors)
    *_, decoded = decode_batch(b"".join(parts))
    assert content(rest) == content(decoded)
    kept = [i for i, fine in enumerate(good) if fine]
    assert content(decoded) == ((["abcdefgh"[i] for i in kept], kept, False) if keyed else kept)
    assert errors.skipped == len(good) - len(kept)
    assert errors.dead_letters is not None
    assert len(errors.dead_letters) == errors.skipped


def test_a_key_that_cannot_be_pickled_takes_its_record_along() -> None:
    errors = errors_of("skip")
    _, parts = encode_batch(1, KeyedBatch([Unpicklable(), "b"], [1, 2]), 0, errors)
    *_, batch = decode_batch(b"".join(parts))
    assert content(batch) == (["b"], [2], False)


def test_the_error_names_the_edge_and_the_record() -> None:
    with pytest.raises(RecordError, match=r"operator 'a -> b' failed") as caught:
        encode_batch(1, [1, Unpicklable()], 0, errors_of("fail"))
    assert "<unpicklable>" in caught.value.record


@given(st.lists(st.integers(0, 400), max_size=20), st.integers(30, 2000))
def test_messages_are_divided_by_size_and_only_too_large_records_fail(sizes: list[int], target: int) -> None:
    wire = Wire(max_message=300, target_message=target)
    errors = errors_of("dead_letter")
    channel = RemoteChannel(1, 0, 0, wire, errors, credit_window=10**9)
    records = [b"%d" % (i % 10) * size for i, size in enumerate(sizes)]
    channel.push(records, 0)
    assert channel.flush()
    alone = [sum(map(len, encode_batch(1, [record], 0, errors)[1])) for record in records]
    assert sent_records(wire) == [record for record, size in zip(records, alone, strict=True) if size <= 300]
    assert errors.skipped == len(records) - len(sent_records(wire))


@given(st.lists(st.sampled_from(("small", "large", "bad", "too large")), max_size=12))
def test_a_record_that_fails_is_let_go_once_however_its_batch_is_divided(kinds: list[str]) -> None:
    make = {"small": lambda: "s", "large": lambda: "l" * 120, "bad": Unpicklable, "too large": lambda: "t" * 500}
    wire = Wire(max_message=300)
    errors = errors_of("dead_letter")
    channel = RemoteChannel(1, 0, 0, wire, errors, credit_window=10**9)
    if kinds:
        channel.push([make[kind]() for kind in kinds], 0)
    assert channel.flush()
    good = [kind for kind in kinds if kind in ("small", "large")]
    assert [record[0] for record in sent_records(wire)] == [kind[0] for kind in good]
    assert errors.skipped == len(kinds) - len(good)
    assert errors.dead_letters is not None
    assert len(errors.dead_letters) == errors.skipped


def test_a_too_large_record_tells_the_remedy() -> None:
    channel = RemoteChannel(1, 0, 0, Wire(max_message=300), errors_of("fail"))
    channel.push(["x" * 990], 0)
    with pytest.raises(RecordError, match=r"at most 300; run with a larger ring.*ring_bytes=4,?096"):
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


def _state(out: OutChannel, task: Receiver) -> tuple[int, ...]:
    return (
        len(out.queue),
        len(out.cache.entries),
        out.ended,
        len(task.got),
        out.outstanding,
        task.ended,
        len(task.inbox),
    )


@given(sizes, windows, st.randoms(use_true_random=False), st.integers(1, 4))
def test_credit_over_a_wire_never_blocks_for_good(lengths: list[int], window: int, rng: Any, room: int) -> None:
    """Both wires have little room, and everybody acts at random times."""
    to_receiver, to_sender = Wire(room=room), Wire(room=room)
    due: dict[int, RemoteInChannel] = {}
    out = RemoteChannel(3, 1, 0, to_receiver, errors_of("fail"), window)
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
                    kind, _, stamp, _, batch = decode_batch(message)
                    if kind == END:
                        into.ended = True
                        task.receive_end(3)
                    else:
                        assert batch is not None
                        largest = max(largest, len(message))
                        task.receive(3, batch, stamp, len(message))
                for waiting in list(due.values()):
                    waiting.grant()
            elif act == "take" and task.inbox:
                task.take(into)
            elif act == "credit":
                for _, message in to_sender.receive(0):
                    credit = decode_batch(message)
                    assert credit.kind == CREDIT
                    out.outstanding -= credit.stamp
        assert out.outstanding >= 0
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
    out = LocalChannel(3, task, errors_of("fail"), window)  # type: ignore[arg-type]
    into = LocalInChannel(out)
    records = ["x" * length for length in lengths]
    for record in records:
        out.push([record], 0)
    out.end()
    while not (out.flush() and not task.inbox):
        assert task.inbox or out.outstanding < window, "no side can continue"
        if task.inbox and rng.random() < 0.5:
            task.take(into)
    assert task.got == records
    assert task.ended == 1
    assert 2 * out.outstanding < max(window, 2), "what is taken up is granted back but for half a window"


def test_credit_counts_what_was_sent_and_taken() -> None:
    wire = Wire(target_message=64)
    out = RemoteChannel(3, 1, 0, wire, errors_of("fail"), credit_window=100)
    out.push(["x" * 150], 0)
    out.push(["y"], 0)
    assert not out.flush()
    assert out.outstanding == len(wire.sent[0]) == out.bytes
    assert out.queued() == 1
    assert not out.stopped_by_room, "a grant will tell"
    out.outstanding -= len(wire.sent[0])
    assert out.flush()
    assert out.queued() == 0


@pytest.mark.parametrize("room", [1, 10**9])
def test_what_waits_for_credit_travels_together(room: int) -> None:
    """Under load messages grow: what cannot be sent yet is not encoded piece by piece."""
    wire = Wire(room=room)
    out = RemoteChannel(3, 1, 0, wire, errors_of("fail"), credit_window=1)
    for i in range(20):
        out.push([i], i)
        assert out.flush() == (i == 0)
    assert len(wire.sent) == 1
    wire.room += 1
    out.outstanding = 0
    assert out.flush()
    assert [decode_batch(message).batch for message in wire.sent] == [[0], list(range(1, 20))]


def test_no_room_is_told_apart_from_no_credit() -> None:
    wire = Wire(room=0)
    out = RemoteChannel(3, 1, 0, wire, errors_of("fail"))
    out.push(["x", "y", "z"], 0)
    assert not out.flush()
    assert out.stopped_by_room
    assert out.outstanding == 0, "not sent yet"
    assert out.queued() == 3
    wire.room = 1
    out.end()
    assert not out.flush()
    assert out.stopped_by_room
    assert [decode_batch(message)[0] for message in wire.sent] == [DATA], "the end is not sent"
    assert out.cache.unsent
    wire.room = 2
    assert out.flush()
    assert not out.cache.entries, "without epochs nothing is kept"
    assert [decode_batch(message)[0] for message in wire.sent] == [DATA, END]
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
    assert decode_batch(wire.sent[0]) == (CREDIT, 3, 17, 0, None)


def test_the_queue_length_can_be_asked_while_the_loop_changes_the_queue() -> None:
    """A status call comes from another thread, which may run between any two records."""
    wire = Wire()
    out = RemoteChannel(3, 1, 0, wire, errors_of("fail"))

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
    out: OutChannel = RemoteChannel(3, 1, 0, wire, errors_of("fail"))
    for stamp in (9, 4, 7):
        out.push([stamp], stamp)
    assert out.flush()
    assert [decode_batch(message)[1:] for message in wire.sent] == [(3, 4, 0, [9, 4, 7])]
