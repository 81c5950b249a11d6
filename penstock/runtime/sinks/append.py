"""A file that only grows, of lines or of gzip members.

What was handed over and not written must never be taken for written: `length` counts the bytes that the system has
taken, and after an error the file takes nothing more, as nobody knows what became of the bytes on their way (after a
failed fsync the next one succeeds, though the data is gone).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from functools import partial

from penstock.runtime.sinks.places import LOCAL, Place, failed_write

_BUFFER = 256 << 10  # bytes held back for one write
_GZIP = 31  # zlib's window bits for the gzip format
_GZIP_LEVEL = 6


def _once(step: Callable[[], int]) -> int:
    return step()


class AppendFile:
    """Appends bytes to a file. With `exclusive` the file must be new. `epochs` says what a failure leaves, for the
    error messages. `patiently` takes a step again while its errors may pass: the system has taken nothing of a write
    that has failed. Of a remote file nobody knows that."""

    def __init__(
        self,
        path: str,
        *,
        compress: bool,
        exclusive: bool = False,
        epochs: bool = False,
        place: Place = LOCAL,
        patiently: Callable[[Callable[[], int]], int] = _once,
    ) -> None:
        self.path = path
        self.length = 0
        self._compress = compress
        self._epochs = epochs
        self._deflate: zlib._Compress | None = None  # of the gzip member that was begun
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._broken: OSError | None = None
        self._patiently = _once if place.remote else patiently
        try:
            self._file = place.create(path, exclusive)
        except OSError as error:
            raise failed_write(path, error, epochs) from error

    def append(self, data: bytes) -> None:
        """Takes bytes, which may be held back until `flush`, or for gzip until `end_member` and `flush`."""
        if self._compress:
            if self._deflate is None:
                self._deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP)
            data = self._deflate.compress(data)
        self._hold(data)
        if self._held_bytes >= _BUFFER:
            self.flush()

    def end_member(self, last: bool = False) -> None:
        """Ends the gzip member that was begun, if any: a file that is truncated after it is whole. With `last`, nothing
        more comes: an empty file then gets an empty member, because a gzip file must have one."""
        if self._compress and self._deflate is None and last and not self.length and not self._held:
            self._deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP)
        if self._deflate is not None:
            self._hold(self._deflate.flush())
            self._deflate = None

    def flush(self) -> None:
        """Writes the records that are held back."""
        if not self._held and self._broken is None:
            return
        data = memoryview(b"".join(self._held))
        self._held.clear()
        self._held_bytes = 0
        try:
            if self._broken is not None:
                raise self._broken
            while data:
                written = self._patiently(partial(self._file.write, data))
                self.length += written
                data = data[written:]
        except OSError as error:
            self._broken = error
            raise failed_write(self.path, error, self._epochs) from error

    def deleted(self) -> bool:
        """Tells whether somebody has deleted or moved the file."""
        return self._file.deleted()

    def sync(self) -> None:
        """Makes sure that everything written is on the disk, and closes the file."""
        self.flush()
        try:
            if self._broken is not None:
                raise self._broken
            self._file.sync()
        except OSError as error:
            self._broken = error
            raise failed_write(self.path, error, self._epochs) from error

    def close(self) -> None:
        """Closes the file, and forgets the records that were not written."""
        self._held.clear()
        self._held_bytes = 0
        self._deflate = None
        with contextlib.suppress(OSError):
            self._file.close()

    def _hold(self, data: bytes) -> None:
        if data:
            self._held.append(data)
            self._held_bytes += len(data)
