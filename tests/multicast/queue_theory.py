"""The paper's Eq. 1, 2 and 5, from which the queue model's Eq. 3 follows (docs/papers.md: W4)."""

from __future__ import annotations

import math

from penstock.runtime.multicast.queue_model import Cost, greatest_load


def service_rate(children: int, cost: Cost) -> float:
    """How many records a second a node can send (Eq. 1)."""
    return 1 / cost.record_s(children)


def expected_queue(rate: float, service: float) -> float:
    """The expected number of records in the queue and in service (Eq. 2). It is infinite when they arrive as quickly as
    they leave."""
    if rate >= service:
        return math.inf
    return rate * rate / (2 * service * (service - rate)) + rate / service


def affordable_rate(children: int, cost: Cost, capacity: float) -> float:
    """The greatest rate at which the expected queue of a node with a number of children is within the capacity
    (Eq. 5)."""
    return greatest_load(capacity) * service_rate(children, cost)
