"""Delivery: the receiving half of the exchange between workers. It gives each message of other workers to its tasks.

The sending half is a log (log.py), and the two ends of a channel stand in channel.py. A delivery reads the address of a
message, drops what is of an older generation or of a channel that is no more, compares the message's number with that
which comes next, and decodes the body once, however many tasks it is for (docs/papers.md: W1, W2). It translates stamps
to the clock of this machine, and repeats grants of credit that found no room.

Each task must get the messages of a channel once in each generation, and in order. A delivery never waits, because
credit bounds the inboxes of the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from penstock.runtime.errors import CodecError, PenstockError
from penstock.runtime.exchange.channel import (
    Arrival,
    InChannel,
    OutChannel,
    OutOfStep,
    Receiver,
    RemoteInChannel,
    Turn,
)
from penstock.runtime.exchange.message import (
    ADDRESS_OF_ONE,
    ANY_WAY,
    BARRIER,
    CREDIT,
    DATA,
    NUMBERS_MASK,
    WATERMARK,
    WHOLE,
    Head,
    decode_payload,
    decode_records,
    read_head,
)
from penstock.runtime.records.batch import Batch
from penstock.runtime.transport.base import Buffer, Transport
from penstock.runtime.transport.hop_times import NOT_NOTED

#: Where a message goes whose channel is not known.
_NOBODY: tuple[Receiver | None, RemoteInChannel | None] = (None, None)
_NO_OUTPUT: tuple[object, OutChannel | None] = (None, None)


class MessagesLost(PenstockError):
    """A worker died while it wrote a message to this worker. The message is lost, and recovery must send it again."""


class SharedCopies(Protocol):
    """Notes the batches that several tasks have got (runtime/worker/shared_batches.py)."""

    def add(self, batch: Batch) -> None:
        """Notes that several tasks have got this batch."""

    def came(self, channel: int, number: int, batch: Batch) -> None:
        """Notes the batch that an entry of a channel was decoded to."""


class Delivery:
    """Delivers the messages for one worker; see the module's docstring. Only the loop's thread uses it.

    `outputs` are the channels from this worker, by number, each after its log. `names` returns the names of a channel's
    sender and of its receiver, for errors. With `recovers`, recovery sends lost messages again. `shared` notes batches
    that several tasks get. `from_relay` takes a message about a stream of this worker and returns True, or returns
    False when the sender is no relay.
    """

    def __init__(
        self,
        transport: Transport,
        outputs: Mapping[int, tuple[object, OutChannel]],
        names: Callable[[int], tuple[str, str]],
        *,
        recovers: bool,
        shared: SharedCopies | None = None,
        from_relay: Callable[[int, Buffer], bool] | None = None,
    ) -> None:
        self.inputs: dict[int, tuple[Receiver, RemoteInChannel]] = {}  # by channel number, with the receiving task
        self.grants_due: dict[int, RemoteInChannel] = {}  # by channel number
        self.lost: list[str] = []  # lost messages, with their senders; recovery sends the messages again
        self._transport = transport
        self._outputs = outputs
        self._names = names
        self._recovers = recovers
        self._shared = shared
        self._from_relay = from_relay
        self._ahead_ns: dict[int, int] = {}

    def add(self, receiver: Receiver, input_: RemoteInChannel) -> None:
        input_.ahead_ns = self._ahead_ns.get(input_.worker, 0)
        self.inputs[input_.number] = receiver, input_

    def remove(self, channel: int) -> None:
        """Drops the messages of a channel from now on, and grants it nothing more."""
        self.inputs.pop(channel, None)
        self.grants_due.pop(channel, None)

    def clocks(self, ahead_ns: dict[int, int]) -> None:
        """Takes how far the clock of each other worker's machine is ahead of this machine's, by worker. The stamps of
        what these workers send are translated by it from now on."""
        self._ahead_ns = ahead_ns
        for _, input_ in self.inputs.values():
            input_.ahead_ns = ahead_ns.get(input_.worker, 0)

    def recovered(self) -> None:
        """Notes that recovery sends lost messages again. The channels of the dead senders have a new generation, in
        which nothing is missing."""
        self.lost.clear()

    def deliver(self, messages: Iterable[tuple[int, Buffer]]) -> None:
        """Delivers messages, each with its sender, and repeats grants that found no room."""
        inputs, shared = self.inputs, self._shared
        meter, times = self._transport.meter, self._transport.times
        for sender, message in messages:
            if len(message) >= WHOLE.size:
                n, marks, number, channel, generation, kind, flags, codec, count, stamp = WHOLE.unpack_from(message)
                if n == 1 and kind == DATA and count and not marks:
                    # Most messages: a whole batch for one task.
                    receiver, input_ = inputs.get(channel, _NOBODY)
                    if receiver is None or input_ is None or input_.generation != generation:
                        # It is for or from a task that has been removed, or of a plan that is no longer valid.
                        continue
                    if number == input_.expected:
                        input_.expected = number + 1 & NUMBERS_MASK
                        try:
                            if meter is None or not meter.due("decode"):
                                batch = decode_records(message, flags, codec, count, WHOLE.size)
                            else:
                                begun_ns = meter.clock()
                                batch = decode_records(message, flags, codec, count, WHOLE.size)
                                meter.note("decode", 1, len(message), begun_ns)
                        except CodecError as error:
                            raise self._unreadable(channel, error) from error
                        if shared is not None:
                            shared.came(channel, number, batch)
                        receiver.receive(channel, batch, stamp - input_.ahead_ns, len(message) - ADDRESS_OF_ONE.size)
                        if times is not None and not number & NOT_NOTED:
                            times.came(channel, generation, number, input_.ahead_ns)
                        continue
            if self._from_relay is None or not self._from_relay(sender, message):
                self._deliver_other(message)
        if self.grants_due:
            for due in list(self.grants_due.values()):
                due.grant()
        self._note_lost()

    def _deliver_other(self, message: Buffer) -> None:
        """Delivers a message of any kind, to any number of tasks. The batch is decoded once for all of them."""
        head = read_head(message)
        kind, stamp, number = head.kind, head.stamp, head.number
        whole = not head.marks and not head.piece
        batch: Batch | None = None
        for channel, generation in head.destinations:
            if kind == CREDIT:
                _, out = self._outputs.get(channel, _NO_OUTPUT)
                if out is not None and out.generation == generation:
                    out.granted(stamp)
                continue
            receiver, input_ = self.inputs.get(channel, _NOBODY)
            if receiver is None or input_ is None or input_.generation != generation:
                continue  # as above
            early = False
            if whole and number == input_.expected:
                input_.expected = number + 1 & NUMBERS_MASK
            elif head.marks & ANY_WAY:
                turn = input_.sort(head)
                if turn is Turn.OLD:
                    continue
                early = turn is Turn.EARLY
            elif not input_.accept(head):
                self._out_of_step(input_, head)
                continue
            if kind == DATA and batch is None:
                try:
                    batch = decode_payload(message, head)
                except CodecError as error:
                    raise self._unreadable(channel, error) from error
                if self._shared is not None:
                    if len(head.destinations) > 1:
                        self._shared.add(batch)
                    else:
                        self._shared.came(channel, number & NUMBERS_MASK, batch)
            arrival = kind, stamp, batch, head.body_bytes
            if early:
                input_.hold(number, arrival)
                continue
            _give(receiver, input_, arrival)
            while input_.held and (following := input_.release()) is not None:
                _give(receiver, input_, following)

    def _note_lost(self) -> None:
        lost = self._transport.lost()
        if lost:
            if not self._recovers:
                raise MessagesLost("; ".join(lost))
            self.lost += lost

    def _unreadable(self, channel: int, error: CodecError) -> CodecError:
        sender, receiver = self._names(channel)
        return CodecError(f"task {receiver} cannot read what {sender} has sent: {error}")

    def _out_of_step(self, input_: InChannel, head: Head) -> None:
        """A message of a channel is not the one that comes next. When the transport has lost messages, recovery sends
        them again, and the message is dropped. Otherwise something is wrong."""
        self._note_lost()
        if self.lost:
            return
        sender, receiver = self._names(input_.number)
        expected = "the first message" if input_.expected is None else f"message {input_.expected}"
        raise OutOfStep(
            f"{receiver} expected {expected} from {sender} in channel {input_.number}, generation {input_.generation}, "
            f"and got message {head.number} (piece {head.piece}, marks {head.marks}). A message is missing or has come "
            "twice, and the transport has not reported a loss; please report this as an error in Penstock"
        )


def _give(receiver: Receiver, input_: InChannel, arrival: Arrival) -> None:
    kind, stamp, batch, cost = arrival
    if kind == DATA:
        assert batch is not None
        if batch:
            receiver.receive(input_.number, batch, stamp - input_.ahead_ns, cost)
        else:  # all records were too large for the place to which the task has moved
            input_.take(cost)
    elif kind == BARRIER:
        receiver.receive_barrier(input_.number, stamp)
    elif kind == WATERMARK:
        receiver.receive_watermark(input_.number, stamp)
    else:
        receiver.receive_end(input_.number)
