"""The two ends of a channel between tasks, and the credit that limits how many bytes are outstanding in each channel.

A channel leads from one sender task to one receiver task, and keeps the order of records. The sender's end is a
*cursor* in a log (runtime/exchange/log.py): it knows which entry of the log comes next. Bytes are outstanding from the
time they are sent until the receiver's task has taken them up. The sender may send while less than a *credit window* is
outstanding. So a worker can always receive what reaches it: the credit windows limit its inboxes, and a slow task holds
up only the tasks that send to it. The sender counts the bytes that it has sent. The receiver grants credit for the
bytes that its task has taken up, in lots of half a credit window.

Why nothing deadlocks: a sender stops only while at least a credit window is outstanding. When the receiver has taken up
all of it, the receiver owes more than half a credit window, and therefore grants. Grants never wait for credit, and
barriers and ends wait only for the records before them. When a task may not send, its worker skips the task and runs
the others.

When the receiver goes back, the channel is *disconnected*: nothing is sent, and the sender is not held up. When the
receiver has been built again, the channel is *connected* to it under a new *generation*, and its cursor goes back to
the first entry that the log keeps. The other channels of the log go on. Until the channel has sent what was in the log
at that moment, it is *catching up*, and its sender is still not held up. A message of an older generation is dropped
wherever it arrives.

The messages of a channel are numbered, because they are entries of one log. So the receiver sees at once when one is
missing or comes twice. Messages of an exchange to all may come by two ways, straight from the sender and through a
relay (runtime/relaying). These are *sorted* by their numbers: what comes early is held, and what has come already is
dropped. What is held is part of what is outstanding. A channel must never change the order of records, and must never
let a record pass a barrier.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Protocol

from penstock.runtime.errors import PenstockError
from penstock.runtime.exchange.channel_state import CHANNEL, ChannelState
from penstock.runtime.exchange.message import FIRST, MORE, NUMBERS_MASK, PIECES_MAX, Head, credit
from penstock.runtime.lifecycle import StateMachine
from penstock.runtime.records.batch import Batch
from penstock.runtime.transport.base import Transport

# The credit window: the number of bytes that may be outstanding in one channel. Below some 64 KiB, a fast sender waits
# for grants between messages. With a much larger window, much waits for a slow receiver, which is latency. A channel
# inside a worker has the same credit window.
CREDIT_WINDOW_BYTES = 256 * 1024

# In some releases of Python, looking up the members of an Enum is slow.
_CONNECTED, _MEMBER = ChannelState.CONNECTED, ChannelState.MEMBER
_GONE, _MOVED = ChannelState.GONE, ChannelState.MOVED

#: A sender stops at this many credit windows at most, however long the way of its entries through relays is.
LINKS_MAX = 16


class OutOfStep(PenstockError):
    """A message is missing in a channel, or has come twice."""


#: A message as a task takes it: kind, stamp, batch and cost.
Arrival = tuple[int, int, "Batch | None", int]


class Turn(Enum):
    """When a message of a channel is to be delivered that may come by several ways."""

    NOW = 1
    EARLY = 2  # it is held until the messages before it have come
    OLD = 3  # it has come already


class Receiver(Protocol):
    """The task at the end of a channel, as far as the channel knows it."""

    def receive(self, channel: int, batch: Batch, stamp: int, cost: int) -> None:
        """Takes a batch into the inbox. It uses `cost` bytes of the channel's credit window until the task takes it up.
        Other tasks may have the same batch, so nobody may change it."""

    def receive_barrier(self, channel: int, epoch: int) -> None:
        """Takes a barrier. What follows it in this channel belongs to the next epoch."""

    def receive_watermark(self, channel: int, value: int) -> None:
        """Takes a watermark. What follows it in this channel is not earlier than this time, or late."""

    def receive_end(self, channel: int) -> None:
        """Takes the end of this channel. Nothing follows it."""


class OutChannel:
    """The sender's end of a channel: a cursor in a log. It leads to `task` of `worker`; when it is `local`, the task is
    of the same worker, and `receiver` is this task as soon as it is built. Its states are in channel_state.py. It knows
    nothing of its log, which gives it the numbers of entries."""

    def __init__(self, number: int, task: int, worker: int, *, local: bool, credit_window: int) -> None:
        self.number = number
        self.task = task
        self.worker = worker
        self.local = local
        self.life = StateMachine(CHANNEL, f"channel {number}")
        self.receiver: Receiver | None = None
        self.credit_window = credit_window
        self.credit_limit = credit_window  # the bytes at which the sender stops
        self.generation = 0
        self.outstanding = 0
        self.next = 0  # the number of the entry that it sends next
        self.run_begins = 0  # the number of the entry with which a run of numbers begins (message.py: FIRST)
        # What is sent of the next entry are the pieces from `piece` on.
        self.pieces: deque[tuple[bytes, ...]] = deque()
        self.piece = 0
        self.until = 0  # the number of the first entry after which the task may be held up again
        self.repeats_until = 0  # entries before this number were sent through a relay, and are outstanding already

    @property
    def connected(self) -> bool:
        return self.life.state is not _GONE and self.life.state is not _MOVED

    @property
    def catching_up(self) -> bool:
        """Whether its receiver misses entries, so that its task is not held up."""
        return self.life.state is not _CONNECTED and self.life.state is not _MEMBER

    def deliver_to(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def granted(self, granted: int) -> None:
        """Takes credit for this many bytes, which the receiver has taken up."""
        self.outstanding -= granted

    def passes(self, links: int) -> None:
        """Sends over this many links from now on. A relay has all of a body before it sends the body on, so each link
        has bodies of its own under way, and gets a credit window of its own, up to a limit."""
        self.credit_limit = self.credit_window * min(links, LINKS_MAX)

    def may_join(self, end: int) -> bool:
        """Returns whether it may join the stream of its log, because it has sent all entries before `end`, and its
        receiver has had one of them."""
        return self.life.state is _CONNECTED and self.next == end and self.next != self.run_begins

    def join(self) -> None:
        """Sends nothing itself from now on, because the stream of its log does."""
        self.life.move("join")

    def leave(self) -> None:
        """Sends for itself again."""
        self.life.move("leave")
        self.passes(1)

    def repeat(self, number: int) -> None:
        """Sends the entries from this number on straight to the worker. The channel has left the stream, and some of
        these entries may not have been delivered."""
        self.repeats_until = self.next
        self.next = number

    def disconnect(self) -> None:
        self.life.move("disconnect")

    def move(self, worker: int, *, local: bool) -> None:
        """Leads to another worker from now on, where the receiver is built again. The channel is disconnected."""
        self.life.move("move here" if local else "move")
        self.worker, self.local, self.receiver = worker, local, None

    def connect(self, generation: int, first: int, end: int) -> None:
        """Sends everything since the last complete epoch, because the receiver is back at this epoch. The log keeps
        the entries from `first` on, and its next entry is `end`."""
        self.life.move("connect")
        self.generation = generation
        self.outstanding = self.piece = self.repeats_until = 0
        self.pieces.clear()
        self.next = self.run_begins = first
        # The task is held up again before everything is sent. A sender that is faster than its receiver would otherwise
        # never be held up again.
        self.until = end
        self.passed()

    def skip(self, number: int) -> None:
        """Goes on with the entry of this number, because no receiver needs the entries before it."""
        self.next = self.run_begins = number
        self.piece = 0
        self.pieces.clear()
        self.passed()

    def passed(self) -> None:
        if self.next >= self.until and self.catching_up and self.connected:
            self.life.move("caught up")


class InChannel:
    """The receiver's end of a channel: counts the bytes that its task has taken up, and how many of them are not
    granted yet."""

    def __init__(self, number: int, credit_window: int = CREDIT_WINDOW_BYTES, generation: int = 0) -> None:
        self.number = number
        self.generation = generation
        self.port = 0  # the input of the task's first operator that its records are for
        self.ended = False
        self._credit_window = credit_window
        self._owed = 0
        self.expected: int | None = None  # the number of the next message; None: none has come
        self.ahead_ns = 0  # how far the clock of the sender's machine is ahead of this machine's
        self._piece = 0  # of this message
        self.held: dict[int, Arrival] = {}  # by number: what came before its turn

    def accept(self, head: Head) -> bool:
        """Returns whether a message is the one that comes next in this channel, and notes that it has come."""
        if head.number != self.expected:
            # Numbers begin anew in each generation. Within one, they only go forward.
            back = self.expected is not None and (head.number - self.expected) & NUMBERS_MASK > NUMBERS_MASK >> 1
            if back or not head.marks & FIRST:
                return False
            self._piece = 0
        if head.piece != self._piece:
            return False
        if head.marks & MORE:
            self.expected = head.number
            self._piece = (head.piece + 1) % PIECES_MAX
        else:
            self.expected = head.number + 1 & NUMBERS_MASK
            self._piece = 0
        return True

    def sort(self, head: Head) -> Turn:
        """Returns when a message is to be delivered that may have come by several ways, and notes that it has come."""
        number, expected = head.number, self.expected
        if expected is None:
            if not head.marks & FIRST:
                return Turn.EARLY
        elif (number - expected) & NUMBERS_MASK > NUMBERS_MASK >> 1:
            return Turn.OLD
        elif number != expected and not head.marks & FIRST:
            return Turn.EARLY
        if not self.accept(head):
            return Turn.OLD
        if number != expected:  # nobody needs what is between
            self.held = {
                at: held for at, held in self.held.items() if (at - number) & NUMBERS_MASK <= NUMBERS_MASK >> 1
            }
        return Turn.NOW

    def hold(self, number: int, arrival: Arrival) -> None:
        self.held[number] = arrival

    def release(self) -> Arrival | None:
        """Returns the held message that is next, and notes that it has come."""
        expected = self.expected
        arrival = None if expected is None else self.held.pop(expected, None)
        if expected is not None and arrival is not None:
            self.expected = expected + 1 & NUMBERS_MASK
        return arrival

    def take(self, cost: int) -> None:
        self._owed += cost
        if 2 * self._owed >= self._credit_window:
            self.grant()

    def grant(self) -> None:
        raise NotImplementedError


class LocalInChannel(InChannel):
    """The receiver's end of a channel from a task of the same worker."""

    def __init__(self, sender: OutChannel, generation: int = 0) -> None:
        super().__init__(sender.number, sender.credit_window, generation)
        self._sender = sender

    def grant(self) -> None:
        self._sender.granted(self._owed)
        self._owed = 0


class RemoteInChannel(InChannel):
    """The receiver's end of a channel from a task of another worker. A grant that finds no room is noted in `due`, and
    the run loop sends it again."""

    def __init__(
        self,
        number: int,
        worker: int,
        task: int,
        transport: Transport,
        due: dict[int, RemoteInChannel],
        credit_window: int = CREDIT_WINDOW_BYTES,
        generation: int = 0,
    ) -> None:
        super().__init__(number, credit_window, generation)
        self.worker = worker
        self._task = task
        self._transport = transport
        self._due = due

    def grant(self) -> None:
        if self.ended:
            self._due.pop(self.number, None)
            return
        if self._transport.send(self.worker, self._task, credit(self.number, self.generation, self._owed)):
            self._owed = 0
            self._due.pop(self.number, None)
        else:
            self._due[self.number] = self
