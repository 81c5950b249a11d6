"""Logs with several channels: each receiver gets everything once and in order, however the cursors move, and a batch
is encoded and sent no more often than it must be."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.runtime.errors import RecordError
from penstock.runtime.exchange import log as log_module
from penstock.runtime.exchange import output_cache
from penstock.runtime.exchange.channel import InChannel, LocalInChannel, OutChannel, RemoteInChannel
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import (
    ADDRESS_BYTES,
    BARRIER,
    CREDIT,
    DATA,
    DESTINATION_BYTES,
    END,
    FIRST,
    MORE,
    WATERMARK,
    decode_payload,
    encode_body,
    read_head,
)
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.transport.base import Buffer, Transport

HOME = 0  # the sender's worker


class Wires(Transport):
    """The sender's end: a wire to each worker, with room for some messages. It counts what is sent."""

    target_message = 200

    def __init__(self, room: int = 10**9, sizes: dict[int, int] | None = None) -> None:
        self.wires: dict[int, deque[bytes]] = {}
        self.room = room
        self.sizes = sizes or {}
        self.sends = 0

    def max_message(self, worker: int) -> int:
        return self.sizes.get(worker, 1000)

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        wire = self.wires.setdefault(worker, deque())
        message = b"".join(parts)
        assert len(message) <= self.max_message(worker), "larger than this worker can take"
        if len(wire) >= self.room:
            return False
        wire.append(message)
        self.sends += 1
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        raise NotImplementedError

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class Receiver:
    """A receiving task. `got` has records as they are, barriers as pairs, and "end"."""

    def __init__(self, inbound: InChannel, got: list[Any]) -> None:
        self.inbound = inbound
        self.inbox: deque[tuple[int, Any, int]] = deque()
        self.got = got
        self.saved: dict[int, int] = {}
        self.ended = False
        self.marks: list[int] = []
        self.told_first = False  # whether anything but a watermark has come

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        self.inbox.append((DATA, batch, cost))

    def receive_barrier(self, channel: int, epoch: int) -> None:
        self.inbox.append((BARRIER, epoch, 0))

    def receive_watermark(self, channel: int, value: int) -> None:
        self.inbox.append((WATERMARK, value, 0))

    def receive_end(self, channel: int) -> None:
        self.inbound.ended = True
        self.inbox.append((END, None, 0))

    def take(self) -> None:
        kind, what, cost = self.inbox.popleft()
        assert not self.ended, "nothing may follow the end"
        if kind == DATA:
            self.got += what
            self.inbound.take(cost)
        elif kind == BARRIER:
            self.got.append(("barrier", what))
            self.saved[what] = len(self.got)
        elif kind == WATERMARK:
            # Its value is the number of things before it. One that is older is told again at the start only.
            assert what == len(self.got) or (what < len(self.got) and not self.told_first)
            self.marks.append(what)
            return
        else:
            self.got.append("end")
            self.ended = True
        self.told_first = True


class LogMachine(RuleBasedStateMachine):
    """A log, its receivers in several workers, and a coordinator that lets epochs complete and receivers go back."""

    @initialize(
        places=st.lists(st.integers(0, 3), min_size=1, max_size=5),
        epochs=st.booleans(),
        window=st.sampled_from((1, 150, 600, 10**6)),
        room=st.sampled_from((1, 3, 10**6)),
        memory=st.sampled_from((0, 500, 10**9)),
    )
    def begin(self, places: list[int], epochs: bool, window: int, room: int, memory: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.patches = [
            mock.patch.object(output_cache, "SLAB_MESSAGE", 40),
            mock.patch.object(log_module, "encode_body", self.encode),
        ]
        for patch in self.patches:
            patch.start()
        self.encoded = 0
        self.entries_made = 0
        self.window = window
        self.wires = Wires(room)
        self.grants: deque[bytes] = deque()
        self.grants_due: dict[int, RemoteInChannel] = {}
        self.output_caches = OutputCaches(memory, directory=self.folder.name) if epochs else None
        self.epochs = epochs
        errors = ErrorHandler("a -> b", "fail", None, None)
        self.log = OutLog(self.wires, errors, self.output_caches.cache() if self.output_caches else None)
        self.channels: list[OutChannel] = []
        self.receivers: list[Receiver | None] = []
        self.generations = [0] * len(places)
        for number, place in enumerate(places):
            self.channels.append(
                self.log.channel(number, 10 + number, place, local=place == HOME, credit_window=window)
            )
            self.receivers.append(self.new_receiver(number, []))
        self.made: list[Any] = []
        self.marks = 0
        self.records = 0
        self.epoch = self.complete = 0
        self.complete_at = 0
        self.over = False
        self.free = True
        self.largest = 0

    def encode(self, *arguments: Any) -> Any:
        self.encoded += 1
        return encode_body(*arguments)

    def new_receiver(self, number: int, got: list[Any]) -> Receiver:
        channel = self.channels[number]
        inbound: InChannel
        if channel.local:
            inbound = LocalInChannel(channel, self.generations[number])
        else:
            inbound = RemoteInChannel(
                number, HOME, 0, _Grants(self.grants), self.grants_due, self.window, self.generations[number]
            )
        receiver = Receiver(inbound, list(got))
        if channel.local:
            channel.deliver_to(receiver)
        return receiver

    # --- the sender ----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        self.free = self.log.flush()

    def may_push(self) -> bool:
        return self.free and not self.over

    @precondition(may_push)
    @rule(sizes=st.lists(st.integers(0, 90), min_size=1, max_size=6), flushed=st.booleans())
    def push(self, sizes: list[int], flushed: bool) -> None:
        batch = [f"{self.records + i} " + "x" * size for i, size in enumerate(sizes)]
        self.records += len(batch)
        self.made += batch
        self.log.push(batch, self.records)
        if flushed:
            self.flush()

    @precondition(lambda self: self.may_push() and self.epochs)
    @rule(flushed=st.booleans())
    def barrier(self, flushed: bool) -> None:
        self.epoch += 1
        self.made.append(("barrier", self.epoch))
        self.log.barrier(self.epoch)
        if flushed:
            self.flush()

    @precondition(may_push)
    @rule()
    def watermark(self) -> None:
        self.log.watermark(len(self.made))
        self.marks = len(self.made)
        self.flush()

    @precondition(may_push)
    @rule(really=st.integers(0, 9))
    def end(self, really: int) -> None:
        if not really:
            self.over = True
            self.made.append("end")
            self.log.end()
            self.flush()

    @rule()
    def try_again(self) -> None:
        self.flush()

    # --- the ways and the receivers ------------------------------------------------------------------------------

    @rule(worker=st.integers(1, 3))
    def deliver(self, worker: int) -> None:
        wire = self.wires.wires.get(worker)
        if not wire:
            return
        message = wire.popleft()
        head = read_head(message)
        batch = decode_payload(message, head) if head.kind == DATA else None
        for number, generation in head.destinations:
            receiver, channel = self.receivers[number], self.channels[number]
            if receiver is None or receiver.inbound.generation != generation:
                continue
            assert channel.worker == worker, "a message for a task that is elsewhere"
            assert receiver.inbound.accept(head), "a message is missing or has come twice"
            if batch is not None:
                receiver.receive(number, batch, head.stamp, head.body_bytes)
            elif head.kind == BARRIER:
                receiver.receive_barrier(number, head.stamp)
            elif head.kind == WATERMARK:
                receiver.receive_watermark(number, head.stamp)
            else:
                receiver.receive_end(number)

    @rule(number=st.integers(0, 4))
    def take(self, number: int) -> None:
        if number < len(self.receivers) and (receiver := self.receivers[number]) is not None and receiver.inbox:
            receiver.take()
        for due in list(self.grants_due.values()):
            due.grant()

    @rule()
    def credit(self) -> None:
        while self.grants:
            head = read_head(self.grants.popleft())
            ((number, generation),) = head.destinations
            assert head.kind == CREDIT
            if self.channels[number].generation == generation:
                self.channels[number].granted(head.stamp)

    # --- the coordinator -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.epochs)
    @rule(told=st.booleans())
    def finish_epoch(self, told: bool) -> None:
        receivers = [receiver for receiver in self.receivers if receiver is not None]
        if len(receivers) < len(self.receivers):
            return
        if all(receiver.ended for receiver in receivers):
            self.complete, self.complete_at = max(self.epoch, self.complete) + 1, len(self.made) - 1
        else:
            saved = set.intersection(*(set(receiver.saved) for receiver in receivers))
            later = [epoch for epoch in saved if epoch > self.complete]
            if not later:
                return
            self.complete = min(later)
            self.complete_at = receivers[0].saved[self.complete]
        if told:
            self.log.complete(self.complete)

    @precondition(lambda self: self.epochs)
    @rule(numbers=st.sets(st.integers(0, 4), min_size=1))
    def disconnect(self, numbers: set[int]) -> None:
        for number in numbers & set(range(len(self.channels))):
            self.receivers[number] = None
            self.grants_due.pop(number, None)
            self.log.disconnect(self.channels[number])
        self.log.complete(self.complete)

    @precondition(lambda self: self.epochs)
    @rule(numbers=st.sets(st.integers(0, 4), min_size=1), moves=st.integers(-1, 3))
    def connect(self, numbers: set[int], moves: int) -> None:
        for number in numbers & set(range(len(self.channels))):
            if self.receivers[number] is not None:
                continue
            if moves >= 0:
                self.log.move(self.channels[number], moves, local=moves == HOME)
            self.generations[number] += 1
            self.receivers[number] = self.new_receiver(number, self.made[: self.complete_at])
            self.log.connect(self.channels[number], self.generations[number])

    @precondition(lambda self: self.epochs)
    @rule()
    def spill(self) -> None:
        self.log.cache.spill()

    # -------------------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "log"):
            return
        cache = self.log.cache
        self.largest = max([self.largest, *(entry[3] for entry in cache.entries)])
        for channel, receiver in zip(self.channels, self.receivers, strict=True):
            assert channel.outstanding >= 0
            assert channel.next <= cache.end
            if receiver is not None:
                assert receiver.got == self.made[: len(receiver.got)]
                costs = [cost for _, _, cost in receiver.inbox]
                self.largest = max([self.largest, *costs])
                assert sum(costs) <= self.window + self.largest, "more than a window"
        if self.output_caches is not None:
            assert self.output_caches.used == cache.in_memory <= self.output_caches.memory_bytes
            assert {entry[0] for entry in cache.entries} <= {DATA, BARRIER, WATERMARK, END}
        live = [channel.next for channel in self.channels if channel.connected and not channel.catching_up]
        if not self.epochs:
            assert cache.end - min(live) <= 1, "siblings are further apart than an entry"
            assert len(cache.entries) == cache.end - min(live), "sent entries are kept"

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        try:
            self.wires.room = 10**9
            self.flush()
            for _ in range(2000):
                self.connect(set(range(5)), -1)
                if self.free and not self.over:
                    self.over = True
                    self.made.append("end")
                    self.log.end()
                self.flush()
                for worker in (1, 2, 3):
                    self.deliver(worker)
                for number in range(5):
                    self.take(number)
                self.credit()
                if self.over and all(receiver is not None and receiver.ended for receiver in self.receivers):
                    break
            for channel, receiver in zip(self.channels, self.receivers, strict=True):
                assert receiver is not None
                assert receiver.got == self.made, (
                    f"channel {channel.number} got {len(receiver.got)} of {len(self.made)}"
                )
                assert self.marks in [0, *receiver.marks] or self.marks < self.complete_at
                assert self.log.unsent(channel) == 0
            assert self.log.flush()
            if self.epochs:
                self.log.complete(max(self.epoch, self.complete) + 1)
                assert [entry[0] for entry in self.log.cache.entries] in ([END], [WATERMARK, END])
                assert self.output_caches is not None
                assert (self.output_caches.used, self.output_caches.spilled) == (0, 0)
            else:
                assert not self.log.cache.entries
            assert self.log._made is None
        finally:
            for patch in self.patches:
                patch.stop()
            self.folder.cleanup()


class _Grants(Wires):
    """The way back: what receivers grant."""

    def __init__(self, grants: deque[bytes]) -> None:
        super().__init__()
        self._grants = grants

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        self._grants.append(b"".join(parts))
        return True


LogMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLog = LogMachine.TestCase


# --- what is encoded, sent and shared ----------------------------------------------------------------------------


class Told:
    """A receiving task that notes what it is told."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.costs: list[int] = []
        self.others: list[tuple[str, int]] = []

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        self.batches.append(batch)
        self.costs.append(cost)

    def receive_barrier(self, channel: int, epoch: int) -> None:
        self.others.append(("barrier", epoch))

    def receive_watermark(self, channel: int, value: int) -> None:
        self.others.append(("watermark", value))

    def receive_end(self, channel: int) -> None:
        self.others.append(("end", 0))


def shared_log(
    places: list[int], wires: Wires, *, epochs: bool, window: int = 10**6, policy: str = "fail"
) -> tuple[OutLog, list[Told]]:
    """A log with a channel to each of these workers; those to the sender's own one lead to the tasks that are
    returned."""
    errors = ErrorHandler("a -> b", policy, None, None)  # type: ignore[arg-type]
    log = OutLog(wires, errors, OutputCaches().cache() if epochs else None)
    tasks = []
    for number, place in enumerate(places):
        channel = log.channel(number, 10 + number, place, local=place == HOME, credit_window=window)
        if place == HOME:
            tasks.append(Told())
            channel.deliver_to(tasks[-1])
    return log, tasks


def records_of(messages: Sequence[bytes]) -> list[Any]:
    """The records of these messages."""
    return [
        record
        for message in messages
        if (head := read_head(message)).kind == DATA
        for record in decode_payload(message, head)  # type: ignore[union-attr]
    ]


@pytest.mark.parametrize("epochs", [False, True])
def test_a_batch_is_encoded_once_and_sent_once_to_each_worker(epochs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    monkeypatch.setattr(log_module, "encode_body", lambda *given: encoded.append(1) or encode_body(*given))
    wires = Wires()
    wires.target_message = 10_000
    log, tasks = shared_log([0, 1, 1, 2, 0, 1, 3], wires, epochs=epochs)
    batches = [[f"{i}{j}" for j in range(5)] for i in range(20)]
    for i, batch in enumerate(batches):
        log.push(batch, i)
        assert log.flush()
    assert len(encoded) == 20
    assert wires.sends == 20 * 3
    flat = [record for batch in batches for record in batch]
    for worker, numbers in ((1, [1, 2, 5]), (2, [3]), (3, [6])):
        heads = [read_head(message) for message in wires.wires[worker]]
        assert [head.destinations for head in heads] == [tuple((number, 0) for number in numbers)] * 20
        assert [head.number for head in heads] == list(range(20))
        assert [head.marks for head in heads] == [FIRST] + [0] * 19
        assert records_of(wires.wires[worker]) == flat
        for message, head in zip(wires.wires[worker], heads, strict=True):
            assert len(message) == head.body_bytes + ADDRESS_BYTES + DESTINATION_BYTES * len(numbers)
    for task in tasks:
        assert [id(batch) for batch in task.batches] == [id(batch) for batch in batches], "handed over as it is"
    assert [channel.outstanding for channel in log.channels if not channel.local] == [log.bytes] * 5
    assert len(log.cache.entries) == (20 if epochs else 0)


@pytest.mark.parametrize("epochs", [False, True])
def test_tasks_of_the_senders_worker_alone_need_no_more_than_the_kept_copy(
    epochs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    monkeypatch.setattr(log_module, "encode_body", lambda *given: encoded.append(1) or encode_body(*given))
    log, tasks = shared_log([0, 0, 0], Wires(), epochs=epochs)
    log.push(["a"], 1)
    log.barrier(1)
    log.end()
    assert log.flush()
    assert len(encoded) == epochs
    assert [(task.batches, task.others) for task in tasks] == [([["a"]], [("barrier", 1), ("end", 0)])] * 3


def test_siblings_run_a_window_ahead_of_the_slowest_and_no_further() -> None:
    wires = Wires()
    log, _ = shared_log([1, 2], wires, epochs=True, window=300)
    slow, quick = log.channels
    pushed = 0
    for i in range(100):
        log.push(["x" * 50], i)
        quick.outstanding = 0
        if not log.flush():
            break
        pushed += 1
    assert slow.outstanding >= 300
    assert slow.next == quick.next == pushed <= 6
    assert log.unsent(quick) == 1, "the sender waits for the slow one"
    log.disconnect(slow)
    for i in range(100):
        quick.outstanding = 0
        assert log.flush()
        log.push(["x" * 50], i)
    assert quick.next == pushed + 100, "a disconnected channel holds up nobody"
    quick.outstanding = 300
    assert not log.flush(), "but its siblings do"


def test_who_goes_back_is_sent_alone_what_it_missed_and_shares_messages_again() -> None:
    wires = Wires()
    log, _ = shared_log([1, 1, 1, 2], wires, epochs=True)
    back = log.channels[1]
    for i in range(3):
        log.push([i], i)
    log.barrier(1)
    assert log.flush()
    log.complete(1)
    log.push([3], 3)
    assert log.flush()
    log.disconnect(back)
    log.push([4], 4)
    assert log.flush()
    wires.wires.clear()
    log.connect(back, 7)
    assert back.catching_up
    log.push([5], 5)
    assert log.flush()
    assert not back.catching_up
    told = [(head.destinations, head.number, head.marks) for head in map(read_head, wires.wires[1])]
    first = log.cache.first
    assert told == [
        (((1, 7),), first, FIRST),
        (((1, 7),), first + 1, 0),
        (((0, 0), (1, 7), (2, 0)), first + 2, 0),
    ]
    assert records_of(wires.wires[1]) == [3, 4, 5]
    assert records_of(wires.wires[2]) == [5], "others get nothing again"


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_entries_that_nobody_needs_are_passed_over(ended: bool, marked: bool) -> None:
    """A task that had ended is sent again what it had received. Epochs are complete without it meanwhile."""
    wires = Wires()
    log, _ = shared_log([1, 1, 2], wires, epochs=True, window=1)
    late = log.channels[0]

    def push(record: str) -> None:
        log.push([record], 0)
        for channel in log.channels[1:]:
            channel.outstanding = 0
        if late.connected and not late.catching_up:
            late.outstanding = 0
        assert log.flush()

    for epoch in (1, 2, 3):
        push(f"a{epoch}")
        push(f"b{epoch}")
        if marked:
            log.watermark(epoch)
        log.barrier(epoch)
        assert log.flush()
    if ended:
        log.end()
    else:
        push("c")
    assert log.flush()
    wires.wires.clear()
    log.disconnect(late)
    log.connect(late, 1)
    log.flush()
    log.complete(4 if ended else 3)
    late.outstanding = 0
    log.flush()
    heads = [read_head(message) for message in wires.wires[1] if read_head(message).destinations == ((0, 1),)]
    told = [
        (head.kind, decode_payload(m, head) if head.kind == DATA else head.stamp)
        for m, head in zip([m for m in wires.wires[1] if read_head(m).destinations == ((0, 1),)], heads, strict=True)
    ]
    last: list[Any] = [(END, 0)] if ended else [(DATA, ["c"])]
    assert told == [(DATA, ["a1"]), *([(WATERMARK, 3)] if marked else []), *last]
    inbound = RemoteInChannel(0, HOME, 0, Wires(), {})
    assert all(inbound.accept(head) for head in heads)
    assert not inbound.accept(heads[0]), "numbers go back in a new generation only"
    assert not inbound.accept(heads[1])
    assert late.next == log.cache.end
    assert not late.catching_up


def test_a_body_obeys_the_smallest_of_its_receivers() -> None:
    wires = Wires(sizes={1: 5000, 2: 120, 3: 5000})
    wires.target_message = 4000
    log, _ = shared_log([1, 2, 2, 3], wires, epochs=True, policy="skip")
    records = ["x" * 20 + str(i) for i in range(50)] + ["y" * 200] + ["z"]
    log.push(records, 1)
    assert log.flush()
    for worker in (1, 2, 3):
        assert records_of(wires.wires[worker]) == [record for record in records if record[0] != "y"]
    assert log.errors.skipped == 1, "what is too large for one of them goes to none"
    assert max(map(len, wires.wires[2])) <= 120


class Growing(Wires):
    """Workers whose inbox grows when a larger message comes."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__(sizes=sizes)
        self.asked: list[tuple[int, int]] = []

    def largest_message(self, worker: int) -> int:
        return 10_000

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        size = sum(map(len, parts))
        if size > self.max_message(worker):
            self.asked.append((worker, size))
            return False
        return super().send(worker, task, parts)


def test_only_who_is_too_small_for_a_record_is_asked_to_grow() -> None:
    wires = Growing({1: 5000, 2: 120})
    log, _ = shared_log([1, 2], wires, epochs=False)
    log.push(["x" * 1000], 1)
    assert not log.flush()
    assert log.stopped_by_room
    assert [worker for worker, _ in wires.asked] == [2]
    wires.sizes[2] = 2000
    assert log.flush()
    assert records_of(wires.wires[1]) == records_of(wires.wires[2]) == ["x" * 1000]


@pytest.mark.parametrize("alone", [False, True])
def test_a_receiver_that_moves_gets_large_entries_in_pieces(alone: bool) -> None:
    """What was made for its old place may be too large for the new one, and others have it already as it is."""
    wires = Wires(sizes={2: 200})
    log, _ = shared_log([1] if alone else [1, 1], wires, epochs=True, policy="skip")
    channel = log.channels[0]
    records = [*("x" * 30 + str(i) for i in range(16)), "y" * 300, *("z" * 50 for _ in range(3))]
    log.push(records[:10], 1)
    log.push(records[10:], 1)
    log.push(["y" * 250], 2)
    log.end()
    assert log.flush()
    assert records_of(wires.wires[1]) == [*records, "y" * 250]
    log.disconnect(channel)
    log.move(channel, 2, local=False)
    log.connect(channel, 1)
    wires.room = 2
    got: list[bytes] = []
    while not log.flush() or channel.catching_up:
        got += wires.wires[2]
        wires.wires[2].clear()
    got += wires.wires[2]
    assert records_of(got) == [record for record in records if record[0] != "y"]
    assert log.errors.skipped == 2, "they do not fit even alone, and are told"
    heads = [read_head(message) for message in got]
    assert heads[-1].kind == END
    assert any(head.marks & MORE for head in heads)
    inbound = RemoteInChannel(0, HOME, 0, Wires(), {})
    assert all(inbound.accept(head) for head in heads)
    assert inbound.expected == log.cache.end
    for missing in range(len(heads) - 1):
        inbound = RemoteInChannel(0, HOME, 0, Wires(), {})
        assert not all(inbound.accept(head) for at, head in enumerate(heads) if at != missing)
        inbound = RemoteInChannel(0, HOME, 0, Wires(), {})
        twice = [head for at, head in enumerate(heads) for _ in range(1 + (at == missing))]
        assert not all(inbound.accept(head) for head in twice)
    channel.granted(sum(head.body_bytes for head in heads if head.kind == DATA))
    assert channel.outstanding == 0


def test_a_receiver_that_moves_to_the_senders_worker_gets_the_records_themselves() -> None:
    log, _ = shared_log([1, 2], Wires(), epochs=True)
    log.push(["a", "b"], 1)
    assert log.flush()
    log.disconnect(log.channels[0])
    log.move(log.channels[0], HOME, local=True)
    task = Told()
    log.channels[0].deliver_to(task)
    log.connect(log.channels[0], 1)
    batch: Batch = ["c"]
    log.push(batch, 2)
    assert log.flush()
    assert task.batches == [["a", "b"], ["c"]]
    assert task.batches[1] is batch
    assert log.channels[0].outstanding == sum(task.costs)


def test_a_record_that_cannot_be_encoded_is_told_once_and_goes_to_nobody() -> None:
    wires = Wires()
    log, (task,) = shared_log([0, 1, 2], wires, epochs=False, policy="skip")
    log.push([1, Lock(), 2], 1)
    assert log.flush()
    assert log.errors.skipped == 1
    assert [list(batch) for batch in task.batches] == [[1, 2]]  # type: ignore[arg-type]
    assert records_of(wires.wires[1]) == records_of(wires.wires[2]) == [1, 2]
    log, _ = shared_log([1, 2], wires, epochs=False)
    log.push([Lock()], 1)
    with pytest.raises(RecordError):
        log.flush()


def test_a_shared_body_takes_memory_once(tmp_path: Any) -> None:
    output_caches = OutputCaches(20_000, directory=str(tmp_path))
    log = OutLog(Wires(), ErrorHandler("a", "fail", None, None), output_caches.cache())
    for number in range(8):
        log.channel(number, number, 1 + number % 3, local=False, credit_window=10**9)
    for i in range(20):
        log.push([b"x" * 500], i)
        assert log.flush()
    assert output_caches.used < 20 * (500 + 100 + output_cache.ENTRY_BYTES)
    log.cache.spill()
    assert 20 * 500 <= output_caches.spilled < 20 * 600
    log.barrier(1)
    assert log.flush()
    log.complete(1)
    assert (output_caches.used, output_caches.spilled) == (0, 0)
