"""What hops cost: inside a worker, between two workers of a node, and between nodes (docs/papers.md: T10, T12).

The workers of a job over several machines measure this while they work (`runtime/transport/hop_meter.py`), and
`HopCosts.of` puts their reports together. Planning needs how much a hop between nodes costs more than one between two
workers of a node, `node_cost`, and a decision about a plan what the latter costs, `core_bytes_per_s`. Messages of like
size are compared, because a small message costs more for each byte, and one kind of hop may have the smaller ones.
Until there is enough of both kinds, NODE_COST and CORE_BYTES_PER_S hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.runtime.transport.hop_meter import Row, Step

#: The cost of traffic between nodes, relative to traffic between workers of one node, until it is measured.
NODE_COST = 4.0

#: The bytes a second that a core takes from one worker of a node to another, until they are measured.
CORE_BYTES_PER_S = 1e9

#: What is measured counts within these limits, so that an odd measurement moves no task.
NODE_COST_LEAST, NODE_COST_MOST = 1.0, 16.0
CORE_BYTES_PER_S_LEAST, CORE_BYTES_PER_S_MOST = 1e8, 1e10

# Messages of fewer bytes are mostly not records, but credit and signals. (binary digits of 128)
_DIGITS_LEAST = 8
# A size counts when so many messages of each kind of hop were measured.
_MESSAGES_LEAST = 10


@dataclass(frozen=True)
class HopCosts:
    """Holds the processor time that records take in both workers together, in ns a byte: in a hop inside a worker,
    between two workers of a node, and between nodes. A hop inside a worker still encodes, for the output cache."""

    worker: float
    node: float
    network: float

    @property
    def node_cost(self) -> float:
        """Returns how much a hop between nodes costs more than one between two workers of a node. Both are compared
        with a hop inside a worker, which is what a plan can choose instead."""
        near, far = self.node - self.worker, self.network - self.worker
        return min(max(far / near, NODE_COST_LEAST), NODE_COST_MOST) if near > 0 else NODE_COST

    @property
    def core_bytes_per_s(self) -> float:
        """Returns how many bytes a second a core takes from one worker of a node to another, if it does nothing else.
        What a hop inside a worker costs does not count."""
        near = self.node - self.worker
        return min(max(1e9 / near, CORE_BYTES_PER_S_LEAST), CORE_BYTES_PER_S_MOST) if near > 0 else CORE_BYTES_PER_S

    @classmethod
    def of(cls, reports: Iterable[Iterable[Row]]) -> HopCosts | None:
        """Returns the costs from the reports of a job's workers, or None when too little was measured."""
        rows: dict[Step, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
        for report in reports:
            for step, digits, *figures in report:
                row = rows[step][digits]
                row[:] = [before + more for before, more in zip(row, figures, strict=True)]
        encode, decode = _each_byte(rows["encode"]), _each_byte(rows["decode"])
        sends = _like(rows["send near"], rows["send far"])
        receives = _like(rows["receive near"], rows["receive far"])
        if encode is None or decode is None or sends is None or receives is None:
            return None
        far = [*rows["send far"].values(), *rows["receive far"].values()]
        alone = sum(ns for messages, _, ns in far if not messages)
        others = sum(ns for messages, _, ns in far if messages)
        network = (sends[1] + receives[1]) * (1 + (alone / others if others else 0.0))
        return cls(encode, encode + sends[0] + receives[0] + decode, encode + network + decode)


def _each_byte(sizes: dict[int, list[float]]) -> float | None:
    """Returns the ns a byte of a step that is the same for all hops, or None when too little was measured."""
    rows = [row for digits, row in sizes.items() if digits >= _DIGITS_LEAST]
    if sum(messages for messages, _, _ in rows) < _MESSAGES_LEAST:
        return None
    return sum(ns for _, _, ns in rows) / sum(size for _, size, _ in rows)


def _like(near: dict[int, list[float]], far: dict[int, list[float]]) -> tuple[float, float] | None:
    """Returns the ns a byte of a step in both kinds of hop, for the same number of messages of each size. Returns None
    when too little of the same sizes was measured."""
    pairs = [
        (near[digits], far[digits])
        for digits in near.keys() & far.keys()
        if digits >= _DIGITS_LEAST and min(near[digits][0], far[digits][0]) >= _MESSAGES_LEAST
    ]
    total = sum(one[1] + other[1] for one, other in pairs)
    if not total:
        return None
    each = [sum((pair[0][1] + pair[1][1]) * pair[kind][2] / pair[kind][1] for pair in pairs) / total for kind in (0, 1)]
    return each[0], each[1]
