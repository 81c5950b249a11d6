"""Files in memory, for stores that tests change without the stores noticing."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from penstock.runtime.epochs.files import NotAsWritten


def accepted(name: str) -> None:
    return None


class DictFiles:
    """Files in memory, quick enough for thousands of histories. `broken`: names that cannot be deleted. `room`:
    for so many bytes, and when there is no more, they fail as on a full disk. `read_only`: nothing can be written or
    deleted. `remote`: they are those of an object store."""

    place = "nowhere"

    def __init__(self) -> None:
        self.remote = False
        self.files: dict[str, bytes] = {}
        self.broken: Callable[[str], Exception | None] = accepted
        self.asked: list[str] = []
        self.room = sys.maxsize
        self.read_only = False

    @property
    def used(self) -> int:
        """The number of bytes of all files."""
        return sum(map(len, self.files.values()))

    def write(self, name: str, parts: Any, flush: bool) -> None:
        self._may_change()
        data = b"".join(parts)
        if self.room < sys.maxsize and self.used - len(self.files.get(name, b"")) + len(data) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.files[name] = data

    def read(self, name: str, most: int) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        if len(self.files[name]) > most:
            raise NotAsWritten(f"has {len(self.files[name]):,} bytes")
        return self.files[name]

    def pieces(self, name: str, most: int) -> Iterator[bytes]:
        data = self.read(name, most)
        for at in range(0, len(data), 100):
            yield data[at : at + 100]

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: len(self.files[name]) for name in self.names(folder)}

    def names(self, folder: str) -> list[str]:
        return [name for name in self.files if name.startswith(f"{folder}/")]

    def delete(self, name: str) -> None:
        self.asked.append(name)
        self._may_change()
        error = self.broken(name)
        if error is not None:
            raise error
        self.files.pop(name, None)

    def _may_change(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def lock(self) -> None: ...

    def release(self) -> None: ...

    def is_locked(self) -> bool:
        return False

    def destroy(self, folders: Any, ours: Any) -> None:
        for name in [name for folder in folders for name in self.names(folder) if ours(name)]:
            self.delete(name)
