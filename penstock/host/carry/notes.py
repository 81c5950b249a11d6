"""Notes on a job that outlive its JobMaster and its store.

They are kept by whatever would start the JobMaster again (with Ray, the head of the cluster). As long as it can do so,
the notes are there. What the next life of a JobMaster must know, whatever has become of the store, must be noted before
anybody acts on it.
"""

from __future__ import annotations

from typing import Literal, Protocol

#: "epochs": an epoch was complete, so sinks may have committed. "stop", "cancel": somebody has asked for this. "ended":
#: the job has ended and its drivers have what they want, so a later life must do nothing. Another job may use the
#: folders of its sinks by then.
Note = Literal["epochs", "stop", "cancel", "ended"]
_FORGOTTEN: tuple[Note, ...] = ("epochs", "stop", "cancel")


class Memory(Protocol):
    """Where notes are kept, such as a dict. All methods may raise whatever goes wrong."""

    def get(self, key: str, /) -> bytes | None: ...

    def __setitem__(self, key: str, value: bytes, /) -> None: ...

    def pop(self, key: str, default: None, /) -> bytes | None: ...


class Notes:
    """The notes on a job, of one actor in all its lives. Notes of another actor on a job of the same name do not count.
    It was killed before it could `forget` them."""

    def __init__(self, job: str, actor: str, memory: Memory) -> None:
        self._job = job
        self._actor = actor.encode()
        self._memory = memory

    def note(self, what: Note) -> None:
        """Makes a note. When this returns, later lives know it."""
        self._memory[self._key(what)] = self._actor

    def noted(self, what: Note) -> bool:
        """Whether this life or an earlier one has made this note."""
        return self._memory.get(self._key(what)) == self._actor

    def forget(self) -> None:
        """Removes all notes but "ended", because there should be no later life. If this process is killed before it
        has left, there is one, and it must not find that nothing was ever done. The next job of this name replaces the
        note."""
        for what in _FORGOTTEN:
            self._memory.pop(self._key(what), None)

    def _key(self, what: Note) -> str:
        return f"{self._job}/{what}"
