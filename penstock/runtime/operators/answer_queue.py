"""A queue of answers that come in any order, with markers between them: watermarks, barriers.

Whoever waits for others (a diversion for Spark, `map_async` for a user's calls) puts an entry here for each question.
The head of the queue is taken when it is answered; a marker at the head is taken at once. So answers leave in the order
of their questions, and no marker ever overtakes a question that was asked before it. Whoever needs no order removes an
answered entry wherever it stands; the markers keep their places all the same.

One thread uses a queue. Other threads may only ask for `answers` and `waiting`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar


class Answer:
    """An entry of the queue."""

    __slots__ = ()

    def done(self) -> bool:
        """Whether it is answered."""
        raise NotImplementedError


A = TypeVar("A", bound=Answer)
M = TypeVar("M")


class AnswerQueue(Generic[A, M]):
    """See the module's docstring. `waiting` is the number of entries in the queue, answered or not."""

    def __init__(self) -> None:
        self.waiting = 0
        # By place. Unlike a deque, it gives up an entry in its midst, and its head, at the same low cost.
        self._items: OrderedDict[int, A | M] = OrderedDict()
        self._places = 0

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[A | M]:
        return iter(self._items.values())

    def put(self, answer: A) -> int:
        """Adds an entry at the end. Returns its place, for `remove`."""
        self._places += 1
        self._items[self._places] = answer
        self.waiting += 1
        return self._places

    def mark(self, marker: M) -> None:
        """Adds a marker at the end."""
        self._places += 1
        self._items[self._places] = marker

    def ready(self) -> bool:
        """Whether `take` would return something."""
        if not self._items:
            return False
        head = next(iter(self._items.values()))
        return not isinstance(head, Answer) or head.done()

    def take(self) -> A | M | None:
        """Removes and returns the head, if it is a marker or answered."""
        if not self.ready():
            return None
        _, head = self._items.popitem(last=False)
        if isinstance(head, Answer):
            self.waiting -= 1
        return head

    def remove(self, place: int) -> None:
        """Removes an entry, wherever it stands."""
        del self._items[place]
        self.waiting -= 1

    def last(self) -> A | M | None:
        """Returns the newest answer, if it is still there."""
        return next(reversed(self._items.values()), None)

    def answers(self) -> list[A]:
        """Returns the entries, in order."""
        return [item for item in tuple(self._items.values()) if isinstance(item, Answer)]  # type: ignore[misc]
