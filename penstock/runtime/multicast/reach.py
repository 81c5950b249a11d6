"""How many nodes a non-blocking tree reaches in how many time units: the recurrence L(t) of docs/papers.md: W3.

In each time unit, every node that has the record and has sent fewer copies than the out-degree limit d sends one. The
nodes that have sent all d copies are those that had the record d + 1 units ago. So L(t) = 2 L(t-1) - L(t-d-1), with
L(0) = 1 for the root, and 0 before. L counts the root; destinations are L - 1.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def reaches(limit: int) -> Iterator[int]:
    """Yields L(0), L(1), L(2) and so on, without end."""
    if limit < 1:
        raise ValueError(f"an out-degree limit of {limit} is below 1")
    reached: list[int] = []
    while True:
        full = reached[-limit - 1] if len(reached) > limit else 0
        reached.append(2 * reached[-1] - full if reached else 1)
        yield reached[-1]


def reach(units: int, limit: int) -> int:
    """Returns L(t): the nodes, the root among them, that can have a record after so many time units."""
    return 0 if units < 0 else next(islice(reaches(limit), units, None))


def units_to_reach(destinations: int, limit: int) -> int:
    """Returns the fewest time units in which all destinations can have a record. It is the last layer of a non-blocking
    tree."""
    return next(units for units, reached in enumerate(reaches(limit)) if reached > destinations)


def binomial_degree(destinations: int) -> int:
    """Returns the number of children that the root of a binomial tree has. A higher limit changes no tree."""
    return destinations.bit_length()  # the logarithm of n + 1 to the base 2, rounded up
