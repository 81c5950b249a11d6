"""Memory into which one micro-batch after the other is written (docs/papers.md: D4).

The kernel hands out new memory page by page, so writing to it takes two to five times as long as writing to memory that
has been written to before. While a micro-batch is being written, the cores of Spark wait.

It must never give out memory that somebody still reads. So memory is given back only when the micro-batch has been
answered. Memory of a micro-batch that has failed is let go, because a task of Spark may still read it.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

# Memory of so many bytes is kept from one micro-batch to the next.
KEPT_BYTES = 128 << 20

_Buffer = TypeVar("_Buffer", io.BufferedWriter, io.BytesIO)


class ReusedMemory(Generic[_Buffer]):
    """Buffers that can be written again. Several threads may use it at once. `make`: returns a new buffer. `limit`: so
    many bytes of all buffers that nobody uses are kept."""

    def __init__(self, make: Callable[[], _Buffer], limit: int = KEPT_BYTES) -> None:
        self._make: Callable[[], _Buffer] = make
        self._limit = limit
        self._lock = threading.Lock()
        self._spare: list[_Buffer] = []  # each stands at its end

    @contextlib.contextmanager
    def lend(self) -> Iterator[_Buffer]:
        """Gives a buffer, as `take` does, which is given back at the end of the block, and let go when the block
        fails."""
        buffer = self.take()
        try:
            yield buffer
        except BaseException:
            buffer.close()
            raise
        self.give_back(buffer)

    def take(self) -> _Buffer:
        """Returns a buffer that stands at its beginning. Call its `truncate()` when all is written: the buffer may hold
        an older micro-batch, which may be longer."""
        with self._lock:
            if not self._spare:
                return self._make()
            buffer = self._spare.pop()
        buffer.seek(0)
        return buffer

    def give_back(self, buffer: _Buffer) -> None:
        """Keeps a buffer without readers, up to where it stands, for the next micro-batch."""
        with self._lock:
            kept = min(buffer.tell(), self._limit - sum(spare.tell() for spare in self._spare))
            if kept > 0:
                buffer.seek(kept)
                buffer.truncate()
                self._spare.append(buffer)
                return
        buffer.close()

    def close(self) -> None:
        """Lets go of the unused buffers."""
        with self._lock:
            spare, self._spare = self._spare, []
        for buffer in spare:
            buffer.close()


def shared_file(name: str) -> io.BufferedWriter:
    """Returns a file in shared memory, which other processes of this user can open at its path. It goes when nobody has
    it open any more. What is written must be flushed before others read it."""
    return os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "wb")


def path_of(file: io.BufferedWriter) -> str:
    """Returns the path at which other processes can open the file, as long as it is open here."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"
