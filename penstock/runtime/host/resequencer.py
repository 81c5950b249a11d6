"""Puts numbered messages of several senders back into each sender's order.

Ray runs the calls of an actor that has several threads in whatever order their arguments become ready, also within a
concurrency group of one thread. What must keep its order is therefore numbered by its sender.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Sender = TypeVar("Sender", bound=Hashable)
Item = TypeVar("Item")


class Resequencer(Generic[Sender, Item]):
    """Not for use by several threads at a time."""

    def __init__(self) -> None:
        self._next: dict[Sender, int] = {}
        self._early: dict[Sender, dict[int, Item]] = {}

    def take(self, sender: Sender, number: int, item: Item) -> list[Item]:
        """Take message `number` (0, 1, 2 ...) of a sender; the messages whose turn it is now."""
        early = self._early.setdefault(sender, {})
        early[number] = item
        ready: list[Item] = []
        turn = self._next.get(sender, 0)
        while turn in early:
            ready.append(early.pop(turn))
            turn += 1
        self._next[sender] = turn
        return ready
