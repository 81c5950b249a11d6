"""Puts numbered messages of several senders back into the order of each sender.

Ray runs the calls of an actor with several threads in the order in which their arguments become ready, also within a
concurrency group of one thread. So a sender numbers the messages whose order must be kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Sender = TypeVar("Sender", bound=Hashable)
Item = TypeVar("Item")


class Resequencer(Generic[Sender, Item]):
    """The messages that have come too early, by sender. Only one thread at a time may use this."""

    def __init__(self) -> None:
        self._next: dict[Sender, int] = {}
        self._early: dict[Sender, dict[int, Item]] = {}

    def take(self, sender: Sender, number: int, item: Item) -> list[Item]:
        """Takes message `number` (0, 1, 2 ...) of a sender. Returns the messages whose turn has come."""
        early = self._early.setdefault(sender, {})
        early[number] = item
        ready: list[Item] = []
        turn = self._next.get(sender, 0)
        while turn in early:
            ready.append(early.pop(turn))
            turn += 1
        self._next[sender] = turn
        return ready
