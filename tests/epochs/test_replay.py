"""One channel through any number of failures of its receiver: every record arrives once and in order, as it was made.

The receiver of the model counts as Delivery.deliver and a task do. It saves where it is at each barrier; some of what
it saved becomes a complete epoch; when it is taken back it is a new one, which continues from there.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.runtime.exchange.channel import InChannel, LocalInChannel, RemoteInChannel
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import (
    ADDRESS_BYTES,
    BARRIER,
    CREDIT,
    DATA,
    DESTINATION_BYTES,
    END,
    read_head,
)
from penstock.runtime.exchange.output_cache import OutputCache, OutputCaches
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.records.userfunc import ErrorHandler, OnError
from penstock.runtime.transport.base import Buffer, Transport
from penstock.runtime.transport.memory import MemoryNetwork
from tests.exchange.test_channel import one_log, read

NUMBER = 7
CREDIT_FROM = 99  # task number of the sender
ACTS = {
    "push": 30,
    "barrier": 5,
    "end": 0.2,
    "flush": 25,
    "deliver": 30,
    "take": 35,
    "credit": 15,
    "complete": 7,
    "stale": 2,
    "disconnect": 2,
    "connect": 5,
    "elsewhere": 1,
}


def errors_of(policy: OnError = "fail") -> ErrorHandler:
    return ErrorHandler("a -> b", policy, "flow.py:1", [] if policy == "dead_letter" else None)


class Wire(Transport):
    """One way of a transport: at most `room` messages under way, and says no at random."""

    def __init__(self, rng: Random, room: int, target_message: int = 200) -> None:
        self.target_message = target_message
        self.messages: deque[bytes] = deque()
        self._rng = rng
        self._room = room

    def max_message(self, worker: int) -> int:
        return 10_000

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        if len(self.messages) >= self._room or self._rng.random() < 0.1:
            return False
        self.messages.append(b"".join(parts))
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        raise NotImplementedError

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class Receiver:
    """A receiving task from its making to its being taken back; `got` are the records and barriers it has taken up."""

    def __init__(self, inbound: InChannel, got: list[Any]) -> None:
        self.inbound = inbound
        self.got = got
        self.inbox: deque[tuple[str, Any, int]] = deque()
        self.saved: dict[int, int] = {}  # length of `got` by epoch
        self.ended = False

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        assert channel == NUMBER
        assert len(batch)
        self.inbox.append(("data", batch, cost))

    def receive_barrier(self, channel: int, epoch: int) -> None:
        self.inbox.append(("barrier", epoch, 0))

    def receive_end(self, channel: int) -> None:
        self.inbound.ended = True
        self.inbox.append(("end", None, 0))

    def take(self) -> None:
        """Take up what is next, and spoil it."""
        kind, what, cost = self.inbox.popleft()
        assert not self.ended, "nothing may follow the end"
        if kind == "barrier":
            self.got.append(("barrier", what))
            self.saved[what] = len(self.got)
        elif kind == "end":
            self.ended = True
        else:
            records = what if isinstance(what, list) else list(zip(what.keys, what.values, strict=True))
            self.got += copy.deepcopy(records)
            self.inbound.take(cost)
            for record in what if isinstance(what, list) else what.values:
                spoil(record)


def spoil(record: Any) -> None:
    """What a user's function may do to a record it was given."""
    if isinstance(record, dict):
        record["n"] = "spoiled"
        record.setdefault("list", []).append("spoiled")
    elif isinstance(record, list):
        record.append("spoiled")
    elif isinstance(record, tuple):
        for field in record:
            spoil(field)


MAKERS = {
    "text": lambda rng, n: f"{n}" + "x" * rng.randrange(40),
    "dicts": lambda rng, n: {"n": n, "list": [n] * rng.randrange(5)},
    "tuples": lambda rng, n: (n, "y" * rng.randrange(30)),
    "tuples of lists": lambda rng, n: (n, [n]),
    "mixed": lambda rng, n: rng.choice((n, None, f"{n}", {"n": n}, {n}, [n])),
}


class Model:
    """A sender's channel, what its task has made, and the receivers it has had."""

    def __init__(self, seed: int, directory: Path, local: bool) -> None:
        print(f"seed {seed}, {'local' if local else 'remote'}")
        self.rng = rng = Random(seed)
        self.local = local
        self.output_caches = OutputCaches(rng.choice((300, 2000, 10**9)), directory=str(directory))
        self.elsewhere = self.output_caches.cache()  # another channel of the worker, whose cache competes for memory
        other = OutChannelOf(self.elsewhere)
        self.other = other
        self.window = rng.choice((1, 300, 2000, 10**6))
        self.to_receiver = Wire(rng, rng.randint(1, 6), rng.choice((1, 200, 3000)))
        self.to_sender = Wire(rng, rng.randint(1, 3))
        self.due: dict[int, RemoteInChannel] = {}
        cache = self.output_caches.cache()
        errors = errors_of()
        self.channel = OutLog(self.to_receiver, errors, cache)
        self.cursor = self.channel.channel(NUMBER, 0, 1, local=local, credit_window=self.window)
        self.maker = MAKERS[rng.choice(list(MAKERS))]
        self.keyed = rng.random() < 0.3
        self.made: list[Any] = []
        self.records = 0
        self.epoch = 0  # of the last barrier
        self.ended = False
        self.complete = 0  # what the coordinator knows
        self.complete_got: list[Any] = []
        self.generation = 0
        self.receiver: Receiver | None = self.new_receiver()
        self.free = True  # the last flush was True: the sender's task may run
        self.largest = 0
        self.seen: Counter[str] = Counter()

    def new_receiver(self) -> Receiver:
        inbound: InChannel
        if self.local:
            inbound = LocalInChannel(self.cursor, self.generation)
        else:
            inbound = RemoteInChannel(NUMBER, 0, CREDIT_FROM, self.to_sender, self.due, self.window, self.generation)
        receiver = Receiver(inbound, list(self.complete_got))
        self.cursor.deliver_to(receiver)
        return receiver

    # --- the sender ---------------------------------------------------------------------------------------------

    def push(self) -> None:
        if not self.free or self.ended:
            return
        records = [self.maker(self.rng, self.records + i) for i in range(self.rng.randint(1, 6))]
        self.records += len(records)
        if self.keyed:
            keys = [f"k{i}" for i in range(len(records))]
            self.made += copy.deepcopy(list(zip(keys, records, strict=True)))
            self.channel.push(KeyedBatch(keys, records, False), self.records)
        else:
            self.made += copy.deepcopy(records)
            self.channel.push(records, self.records)
        if self.rng.random() < 0.8:
            self.flush()

    def barrier(self) -> None:
        if not self.free or self.ended:
            return
        self.epoch += self.rng.choice((1, 1, 1, 2))
        self.made.append(("barrier", self.epoch))
        self.channel.barrier(self.epoch)
        if self.rng.random() < 0.8:
            self.flush()

    def end(self) -> None:
        if self.free and not self.ended:
            self.ended = True
            self.channel.end()

    def flush(self) -> None:
        behind = self.cursor.catching_up
        self.free = self.channel.flush()
        if not self.cursor.connected or (behind and self.cursor.catching_up):
            assert self.free, "a task is not held up while its receiver is away or catching up"
            assert not self.channel.queue
            self.seen["free while behind"] += 1
        if self.free and not behind:
            assert self.channel.unsent(self.cursor) == 0
        self.seen["held up"] += not self.free

    # --- the way, and the receiver ------------------------------------------------------------------------------

    def deliver(self) -> None:
        """A message reaches the receiver's worker, as in Delivery.deliver."""
        if not self.to_receiver.messages:
            return
        message = self.to_receiver.messages.popleft()
        kind, channel, stamp, generation, batch = read(message)
        receiver = self.receiver
        if receiver is None or receiver.inbound.generation != generation:
            self.seen["dropped"] += 1
            return
        assert receiver.inbound.accept(read_head(message)), "a message is missing or came twice"
        if kind == DATA:
            assert batch is not None
            self.largest = max(self.largest, len(message))
            receiver.receive(channel, batch, stamp, read_head(message).body_bytes)
        elif kind == BARRIER:
            receiver.receive_barrier(channel, stamp)
        else:
            assert kind == END
            receiver.receive_end(channel)

    def take(self) -> None:
        if self.receiver is not None and self.receiver.inbox:
            self.receiver.take()
        for due in list(self.due.values()):
            due.grant()

    def credit(self) -> None:
        if self.to_sender.messages:
            kind, channel, stamp, generation, _ = read(self.to_sender.messages.popleft())
            assert (kind, channel) == (CREDIT, NUMBER)
            if self.cursor.generation == generation:
                self.cursor.granted(stamp)
            else:
                self.seen["old credit"] += 1

    # --- the coordinator ----------------------------------------------------------------------------------------

    def finish_epoch(self) -> None:
        """Something that the receiver has saved becomes complete; the sender is mostly told at once."""
        receiver = self.receiver
        if receiver is None:
            return
        if receiver.ended and self.rng.random() < 0.5:
            # Barriers of its other senders, which have not ended, are passed on.
            receiver.saved[max(self.epoch, self.complete) + 1] = len(receiver.got)
        later = [epoch for epoch in receiver.saved if epoch > self.complete]
        if later:
            self.complete = self.rng.choice(later)
            self.complete_got = receiver.got[: receiver.saved[self.complete]]
            self.seen["complete"] += 1
        if self.rng.random() < 0.8:
            self.channel.complete(self.complete)

    def stale(self) -> None:
        """What is known already is told again."""
        before = len(self.channel.cache.entries), self.cursor.next
        self.channel.complete(self.rng.randint(0, self.channel.cache.completed))
        assert (len(self.channel.cache.entries), self.cursor.next) == before

    def disconnect(self) -> None:
        """The receiver dies or is taken back, as in RunLoop.remove_tasks; sometimes twice before it is back."""
        if self.receiver is None and self.rng.random() < 0.7:
            return
        self.receiver = None
        self.due.clear()
        self.cursor.deliver_to(Nobody())  # type: ignore[arg-type]
        self.channel.disconnect(self.cursor)
        self.channel.complete(self.complete)
        self.seen["disconnect"] += 1

    def connect(self) -> None:
        if self.receiver is not None:
            return
        self.generation += self.rng.randint(1, 3)
        self.receiver = self.new_receiver()
        self.channel.connect(self.cursor, self.generation)
        self.seen["ended before"] += [entry[0] for entry in self.channel.cache.entries] == [END]

    # ------------------------------------------------------------------------------------------------------------

    def act(self, name: str) -> None:
        if name == "complete":
            self.finish_epoch()
        elif name == "elsewhere":
            self.other.act(self.rng)
        else:
            getattr(self, name)()
        channel, cache, output_caches = self.cursor, self.channel.cache, self.output_caches
        assert cache.in_memory + self.elsewhere.in_memory == output_caches.used <= output_caches.memory_bytes
        self.seen["spilled"] += output_caches.spilled > 0
        assert channel.outstanding >= 0
        if self.receiver is not None:
            costs = [cost for _, _, cost in self.receiver.inbox]
            self.largest = max([self.largest, *(entry[3] for entry in cache.entries), *costs])
            assert sum(costs) <= self.window + self.largest, "more than a window"
            got = self.receiver.got
            assert got == self.made[: len(got)], "not what was made"

    def run(self, acts: int) -> None:
        names, weights = list(ACTS), list(ACTS.values())
        for _ in range(acts):
            self.act(self.rng.choices(names, weights)[0])
        self.flush()  # where it was held up before its end, the task says it now
        idle = 0
        while idle < 100:
            if self.free and not self.ended:
                self.act("end")
            before = self.state()
            for name in ("connect", "flush", "deliver", "take", "credit"):
                self.act(name)
            idle = 0 if self.state() != before else idle + 1
        assert self.receiver is not None
        assert self.receiver.ended, f"stuck: {self.state()}"
        assert self.receiver.got == self.made
        assert self.channel.flush()
        assert not self.cursor.catching_up
        assert self.channel.unsent(self.cursor) == 0
        self.finish()

    def state(self) -> tuple[Any, ...]:
        receiver = self.receiver
        return (
            receiver and (len(receiver.got), len(receiver.inbox), receiver.ended),
            len(self.channel.queue),
            self.cursor.next,
            len(self.to_receiver.messages),
            len(self.to_sender.messages),
            self.cursor.outstanding,
        )

    def finish(self) -> None:
        """An epoch after the end leaves nothing but the end, and that takes no memory."""
        self.channel.complete(max(self.epoch, self.complete) + 1)
        assert [entry[0] for entry in self.channel.cache.entries] == [END]
        self.elsewhere.clear()
        assert (self.output_caches.used, self.output_caches.spilled) == (0, 0)


class Nobody:
    """Where a receiver was that is gone: to call it is an error."""


class OutChannelOf:
    """Another channel of the same worker, whose receiver is away for good."""

    def __init__(self, cache: OutputCache) -> None:
        self.channel = one_log(MemoryNetwork(1).transport(0), errors_of(), cache=cache, receiver=Nobody())
        self.channel.disconnect(self.channel.channels[0])
        self.epoch = 0

    def act(self, rng: Random) -> None:
        if rng.random() < 0.2:
            self.epoch += 1
            self.channel.barrier(self.epoch)
            assert self.channel.flush()
            self.channel.complete(self.epoch)
        else:
            self.channel.push(["z" * rng.randrange(300)] * rng.randint(1, 4), 0)
            assert self.channel.flush()


@pytest.mark.parametrize("local", [False, True], ids=["remote", "local"])
def test_replay(local: bool, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        model = Model(seed, tmp_path, local)
        model.run(200 + 400 * (seed % 2))
        seen += model.seen
    wanted = {"free while behind", "held up", "complete", "disconnect", "ended before", "spilled"}
    wanted |= set() if local else {"dropped", "old credit"}
    assert all(seen[what] >= 10 for what in wanted), f"too little happens to test anything: {seen}"


# --- what is sent again ------------------------------------------------------------------------------------------


class Open(Transport):
    """Takes everything."""

    def __init__(self, max_message: int = 10_000) -> None:
        self._max_message = max_message
        self.target_message = 300
        self.sent: list[bytes] = []

    def max_message(self, worker: int) -> int:
        return self._max_message

    def send(self, worker: int, task: int, parts: Sequence[Buffer]) -> bool:
        self.sent.append(b"".join(parts))
        return True

    def receive(self, timeout: float | None) -> Sequence[tuple[int, Buffer]]:
        raise NotImplementedError

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class Recorder:
    """A receiving task that keeps what it is handed, as it is."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        self.calls.append((channel, batch, stamp, cost))

    def receive_barrier(self, channel: int, epoch: int) -> None:
        self.calls.append((channel, epoch))

    def receive_end(self, channel: int) -> None:
        self.calls.append((channel,))

    def records(self) -> list[Any]:
        return [record for call in self.calls if len(call) == 4 for record in call[1]]


def remote(
    output_caches: OutputCaches, errors: ErrorHandler | None = None, max_message: int = 10_000
) -> tuple[OutLog, Open]:
    wire = Open(max_message)
    return one_log(wire, errors or errors_of(), 10**9, output_caches.cache(), NUMBER), wire


def local(output_caches: OutputCaches, errors: ErrorHandler | None = None) -> tuple[OutLog, Recorder]:
    task = Recorder()
    log = one_log(Open(), errors or errors_of(), 10**9, output_caches.cache(), NUMBER, task)
    return log, task


def rejoin(channel: OutLog, generation: int) -> Recorder:
    task = Recorder()
    channel.disconnect(channel.channels[0])
    channel.channels[0].deliver_to(task)
    channel.connect(channel.channels[0], generation)
    assert channel.flush()
    return task


@pytest.mark.parametrize("spill", [False, True])
@pytest.mark.parametrize("generation", [1, 2**32 - 1])
def test_messages_come_again_byte_for_byte_but_for_their_generation(
    spill: bool, generation: int, tmp_path: Path
) -> None:
    channel, wire = remote(OutputCaches(directory=str(tmp_path)))
    for i, batch in enumerate(([1, 2], KeyedBatch(["a"], [[1]], True), ["x" * 500], [{"a": {1}}], [None] * 100)):
        channel.push(batch, 10 * i)
        assert channel.flush()
        channel.barrier(i)
    channel.disconnect(channel.channels[0])
    channel.push(["while away"], 99)
    assert channel.flush()
    assert read(wire.sent[-1])[0] == DATA, "nothing is sent while the receiver is away, not even a barrier"
    before = [read(message) for message in wire.sent]
    assert {decoded[3] for decoded in before} == {0}
    if spill:
        channel.cache.spill()
    first, wire.sent = wire.sent, []
    channel.connect(channel.channels[0], generation)
    channel.push(["after"], 100)
    channel.end()
    assert channel.flush()
    again = [read(message) for message in wire.sent]
    assert {decoded[3] for decoded in again} == {generation}
    body = ADDRESS_BYTES + DESTINATION_BYTES
    assert [message[body:] for message in wire.sent[: len(first)]] == [message[body:] for message in first]
    assert [(kind, stamp) for kind, _, stamp, _, _ in again[len(first) :]] == [
        (BARRIER, 4),
        (DATA, 99),
        (DATA, 100),
        (END, 0),
    ]


@pytest.mark.parametrize("spill", [False, True])
def test_a_receiver_of_the_same_worker_gets_what_was_made_and_not_what_another_made_of_it(
    spill: bool, tmp_path: Path
) -> None:
    records = [{"n": 1, "in": {"deep": [1]}}, [1, [2]], {3}, (4, [5]), bytearray(b"6")]
    channel, task = local(OutputCaches(directory=str(tmp_path)))
    channel.push(copy.deepcopy(records), 5)
    channel.push(KeyedBatch(["k"], [[7]], True), 6)
    assert channel.flush()
    for generation in range(1, 4):
        if spill:
            channel.cache.spill()
        (_, plain, first, cost), (_, keyed, second, _) = task.calls
        assert plain == records
        assert [type(record) for record in plain] == [type(record) for record in records]
        assert (first, second) == (5, 6)
        assert cost > 0
        assert isinstance(keyed, KeyedBatch)
        assert (keyed.keys, keyed.values, keyed.partial) == (["k"], [[7]], True)
        plain[0]["in"]["deep"].append("spoiled")
        plain[1].clear()
        plain[2].clear()
        plain[3][1].clear()
        plain[4].clear()
        plain.clear()
        keyed.values[0].clear()
        task = rejoin(channel, generation)


def test_what_is_made_while_the_receiver_is_away_is_not_spoiled_by_others_that_got_it() -> None:
    """A broadcast gives the same records to all; some of its receivers do not go back."""
    channel, _ = local(OutputCaches())
    channel.disconnect(channel.channels[0])
    records = [{"n": 1}, {"n": 2}]
    channel.push(records, 0)
    assert channel.flush()
    for record in records:
        spoil(record)
    assert rejoin(channel, 1).records() == [{"n": 1}, {"n": 2}]


def test_a_batch_is_handed_over_as_it_is_and_kept_as_bytes() -> None:
    """Kept objects would fill the memory, also those that nobody can change."""
    channel, task = local(OutputCaches())
    batch = ["a", "b"]
    channel.push(batch, 0)
    assert channel.flush()
    assert task.calls[0][1] is batch
    (entry,) = channel.cache.entries
    assert all(isinstance(part, bytes) for part in entry[4:])
    gc.collect()
    assert not gc.is_tracked(entry), "the garbage collector looks through it again and again"
    assert channel._made is None
    assert rejoin(channel, 1).records() == batch


class Unpicklable:
    """A record that cannot be kept as bytes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_inside_a_worker_what_cannot_come_again_does_not_come_at_all() -> None:
    """It is told as a record that failed, so it must not be there as well: after a failure it would not be."""
    errors = errors_of("dead_letter")
    channel, task = local(OutputCaches(), errors)
    channel.push([{"n": 1}, Unpicklable(), {"n": 2}], 0)
    channel.push([Unpicklable()], 0)
    assert channel.flush()
    assert errors.skipped == 2
    assert errors.dead_letters is not None
    assert len(errors.dead_letters) == 2
    assert task.records() == [{"n": 1}, {"n": 2}]
    assert rejoin(channel, 1).records() == [{"n": 1}, {"n": 2}]
    assert channel.unsent(channel.channels[0]) == 0
    assert errors.skipped == 2


def test_memory_counts_what_is_kept_and_not_what_it_looks_like(tmp_path: Path) -> None:
    """A nested record looks as small as its outermost dict."""
    output_caches = OutputCaches(100_000, directory=str(tmp_path))
    channel, _ = local(output_caches)
    for i in range(10):
        channel.push([{"n": {"n": {"n": "x" * 30_000}}}], i)
        assert channel.flush()
        assert (
            sum(len(part) for *_, parts in channel.cache.entries if type(parts) is tuple for part in parts) <= 100_000
        )
    assert output_caches.spilled >= 200_000


def test_a_quicker_sender_is_held_up_again_some_time_after_a_failure(tmp_path: Path) -> None:
    """As before the failure. A file is read quicker than any flow takes it: all of it would go to disk, and each
    barrier after what waits there, so that epochs take longer and longer."""
    channel, task = local(OutputCaches(10_000, directory=str(tmp_path)))
    channel.channels[0].credit_window = 1000
    inbound = LocalInChannel(channel.channels[0], 1)
    held_up = 0

    def run(steps: int) -> None:
        nonlocal held_up
        for step in range(steps):
            if channel.flush():
                channel.push(["x" * 40] * 2, step)
            else:
                held_up += 1
            if step % 2 and task.calls:
                inbound.take(task.calls.pop(0)[3])

    run(200)
    assert held_up
    task = Recorder()
    channel.disconnect(channel.channels[0])
    channel.channels[0].deliver_to(task)
    channel.connect(channel.channels[0], 1)
    held_up = 0
    run(5000)
    assert held_up, f"{channel.unsent(channel.channels[0]):,} records wait, and more with each step"


def test_a_record_that_failed_on_the_way_is_told_once() -> None:
    errors = errors_of("skip")
    channel, wire = remote(OutputCaches(), errors, max_message=300)
    channel.push(["a", Unpicklable(), "x" * 1000, "b"], 0)
    assert channel.flush()
    assert errors.skipped == 2
    for generation in (1, 2):
        wire.sent.clear()
        channel.disconnect(channel.channels[0])
        channel.connect(channel.channels[0], generation)
        assert channel.flush()
        batches = [read(message)[4] for message in wire.sent]
        assert [record for batch in batches if isinstance(batch, list) for record in batch] == ["a", "b"]
    assert errors.skipped == 2


def test_nothing_is_kept_in_a_job_without_epochs() -> None:
    task = Recorder()
    channel = one_log(Open(), errors_of(), receiver=task)
    thing = Unpicklable()
    channel.push([thing], 0)
    assert channel.flush()
    assert task.calls[0][1] == [thing], "and nothing needs to be encoded"
    assert not channel.cache.entries
