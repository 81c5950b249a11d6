"""Notes on a job that outlive its JobMaster and its store.

They are in the memory of whoever starts a JobMaster again (with Ray, the cluster's head): as long as it can do so, the
notes are there. What must be known to the next life of a JobMaster, whatever has become of the store, is noted before
anybody acts upon it.
"""

from __future__ import annotations

from typing import Literal, Protocol

#: "epochs": one was complete, so sinks may have committed. "stop", "cancel": somebody has asked for it.
Note = Literal["epochs", "stop", "cancel"]
_ALL: tuple[Note, ...] = ("epochs", "stop", "cancel")


class Memory(Protocol):
    """Where notes are kept. All methods may raise whatever goes wrong."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes) -> None: ...

    def delete(self, key: str) -> None: ...


class Notes:
    """The notes on a job, by one actor in all of its lives; what another actor has noted on a job of the same name, and
    could not `forget` as it was killed, does not count."""

    def __init__(self, job: str, actor: str, memory: Memory) -> None:
        self._job = job
        self._actor = actor.encode()
        self._memory = memory

    def note(self, what: Note) -> None:
        """When this returns, later lives know it."""
        self._memory.put(self._key(what), self._actor)

    def noted(self, what: Note) -> bool:
        """Whether this life or an earlier one has noted it."""
        return self._memory.get(self._key(what)) == self._actor

    def forget(self) -> None:
        """There will be no later life."""
        for what in _ALL:
            self._memory.delete(self._key(what))

    def _key(self, what: Note) -> str:
        return f"{self._job}/{what}"
