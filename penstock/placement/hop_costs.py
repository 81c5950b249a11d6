"""The costs of hops: inside a worker, between two workers of a node, and between nodes (docs/papers.md: T10, T12).

The workers of a job that replans measure this while they work (`runtime/transport/hop_meter.py`), and `HopCosts.of`
puts their reports together. What a message costs and what each of its bytes costs are told apart, because one kind of
hop may have the smaller messages, and because a task that sends many small ones has more to gain by a nearer receiver
than its bytes say.

Planning needs the cost of a message in bytes, `message_bytes`, and how much a hop between nodes costs more than one
between two workers of a node, `node_cost`. A decision about a plan needs what the latter costs, `core_bytes_per_s`.
Until there is enough of a kind of hop, MESSAGE_BYTES, NODE_COST and CORE_BYTES_PER_S hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.runtime.transport.hop_meter import Row, Step

#: The cost of traffic between nodes, relative to traffic between workers of one node, until it is measured.
NODE_COST = 4.0

#: To send a message from one worker of a node to another costs as much as so many of its bytes, until it is measured.
MESSAGE_BYTES = 500.0

#: The bytes a second that a core takes from one worker of a node to another, until they are measured.
CORE_BYTES_PER_S = 1e9

#: What is measured counts within these limits, so that an odd measurement moves no task.
NODE_COST_LEAST, NODE_COST_MOST = 1.0, 16.0
MESSAGE_BYTES_MOST = 20_000.0
CORE_BYTES_PER_S_LEAST, CORE_BYTES_PER_S_MOST = 1e7, 1e10

# A step counts when so many messages were measured, and a size when it has so many.
_MESSAGES_LEAST = 10

# Messages whose greatest size is less than so many times the least one count as of one size.
_APART = 2.0

#: Messages, bytes and ns of one size.
_Size = list[float]


@dataclass(frozen=True)
class HopCost:
    """Holds the processor time that a hop takes in both workers together, in ns: of each message, and of each byte."""

    message_ns: float = 0.0
    byte_ns: float = 0.0

    def ns(self, messages: float, size: float) -> float:
        """Returns the processor time of a number of messages with a number of bytes in all."""
        return messages * self.message_ns + size * self.byte_ns

    def __add__(self, other: HopCost) -> HopCost:
        return HopCost(self.message_ns + other.message_ns, self.byte_ns + other.byte_ns)

    def __sub__(self, other: HopCost) -> HopCost:
        return HopCost(self.message_ns - other.message_ns, self.byte_ns - other.byte_ns)

    def times(self, factor: float) -> HopCost:
        """Returns a multiple of this cost."""
        return HopCost(factor * self.message_ns, factor * self.byte_ns)


@dataclass(frozen=True)
class Volume:
    """Holds the messages and bytes that a job sends in a second over all hops: messages, bytes, and the traffic that
    plans are made with."""

    messages: float
    size: float
    traffic: float


# What a job counts as sending while it sends nothing.
_NOMINAL = Volume(0.0, 1024.0, 1024.0)


@dataclass(frozen=True)
class HopCosts:
    """Holds the costs of hops: inside a worker, between two workers of a node, and between nodes. None: this kind of
    hop was not measured. A hop inside a worker still encodes, for the output cache."""

    worker: HopCost
    node: HopCost | None
    network: HopCost | None

    def _near(self) -> HopCost:
        """Returns the cost of a hop between two workers of a node beyond the cost of a hop inside a worker, which a
        plan can choose instead."""
        if self.node is not None:
            return self.node - self.worker
        assert self.network is not None
        return (self.network - self.worker).times(1 / NODE_COST)

    @property
    def message_bytes(self) -> float:
        """Returns how many bytes cost as much as a message, from one worker of a node to another."""
        near = self._near()
        return min(max(near.message_ns / near.byte_ns, 0.0), MESSAGE_BYTES_MOST) if near.byte_ns > 0 else MESSAGE_BYTES

    def node_cost(self, volume: Volume) -> float:
        """Returns how much a hop between nodes costs more than one between two workers of a node, for a job that sends
        this. Both are compared with a hop inside a worker."""
        if self.node is None or self.network is None:
            return NODE_COST
        volume = volume if volume.traffic else _NOMINAL
        near, far = (kind.ns(volume.messages, volume.size) for kind in (self._near(), self.network - self.worker))
        return min(max(far / near, NODE_COST_LEAST), NODE_COST_MOST) if near > 0 else NODE_COST

    def core_bytes_per_s(self, volume: Volume) -> float:
        """Returns how much traffic a core takes in a second from one worker of a node to another, if it does nothing
        else, for a job that sends this. What a hop inside a worker costs does not count."""
        volume = volume if volume.traffic else _NOMINAL
        near = self._near().ns(volume.messages, volume.size)
        if near <= 0:
            return CORE_BYTES_PER_S
        return min(max(1e9 * volume.traffic / near, CORE_BYTES_PER_S_LEAST), CORE_BYTES_PER_S_MOST)

    @classmethod
    def of(cls, reports: Iterable[Iterable[Row]]) -> HopCosts | None:
        """Returns the costs from the reports of a job's workers, or None when too little was measured."""
        rows: dict[Step, dict[int, _Size]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
        for report in reports:
            for step, digits, *figures in report:
                row = rows[step][digits]
                row[:] = [before + more for before, more in zip(row, figures, strict=True)]
        encode, decode = _fit(rows["encode"]), _fit(rows["decode"])
        near = _both(_fit(rows["send near"]), _fit(rows["receive near"]))
        far = _both(_fit(rows["send far"]), _fit(rows["receive far"]))
        if encode is None or decode is None or (near is None and far is None):
            return None
        node = network = None
        if near is not None:
            node = encode + near + decode
        if far is not None:
            every = [*rows["send far"].values(), *rows["receive far"].values()]
            alone = sum(ns for messages, _, ns in every if not messages)
            others = sum(ns for messages, _, ns in every if messages)
            network = encode + far.times(1 + (alone / others if others else 0.0)) + decode
        return cls(encode, node, network)


def _both(send: HopCost | None, receive: HopCost | None) -> HopCost | None:
    return None if send is None or receive is None else send + receive


def _fit(sizes: dict[int, _Size]) -> HopCost | None:
    """Returns the cost of each message and of each byte in a step, neither of them below 0, or None when too little was
    measured. The relative errors of all sizes count alike for each message, because a large message takes a thousand
    times as long as a small one. Of messages of one size the two cannot be told apart: they then cost in proportion to
    MESSAGE_BYTES."""
    rows = [row for row in sizes.values() if row[0]]
    if sum(messages for messages, _, _ in rows) < _MESSAGES_LEAST:
        return None
    # Each row as (weight, bytes a message, ns a message).
    each = [(messages, size / messages, ns / messages) for messages, size, ns in rows if messages >= _MESSAGES_LEAST]
    by_size = [size for _, size, _ in each]
    if len(each) < 2 or max(by_size) < _APART * min(by_size):
        messages, size, ns = (sum(column) for column in zip(*rows, strict=True))
        byte_ns = ns / (MESSAGE_BYTES * messages + size)
        return HopCost(MESSAGE_BYTES * byte_ns, byte_ns)
    each = [(messages / max(ns, 1.0) ** 2, size, ns) for messages, size, ns in each]
    one = sum(weight for weight, _, _ in each)
    x, y = (sum(row[0] * row[at] for row in each) for at in (1, 2))
    xx, xy = (sum(row[0] * row[1] * row[at] for row in each) for at in (1, 2))
    spread = one * xx - x * x
    byte_ns = (one * xy - x * y) / spread if spread > 0 else 0.0
    message_ns = (y - byte_ns * x) / one
    if byte_ns < 0:
        return HopCost(max(0.0, y / one), 0.0)
    if message_ns < 0:
        return HopCost(0.0, max(0.0, xy / xx))
    return HopCost(message_ns, byte_ns)
