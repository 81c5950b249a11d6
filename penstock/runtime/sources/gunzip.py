"""Decompresses a gzip file piece by piece.

What gzip.open cannot do: hand out every byte that comes before the place where a file ends early or is damaged, and
only then say so. It must never take a file that stops early for a whole one, and must always stop at the same byte,
however it is read. Damage shows where the data stop making sense, which may be some lines after the first wrong byte.
"""

from __future__ import annotations

import zlib

from penstock.runtime.errors import CodecError

_CHUNK = 64 << 10  # compressed bytes read at a time
_GZIP = 31  # zlib's window bits for the gzip format


class CorruptGzip(CodecError):
    """The gzip file is damaged or ends early. The message says where."""


class Gunzip:
    """Reads the decompressed bytes of a gzip file of one or more members."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by close()
        self._inflate = zlib.decompressobj(_GZIP)
        self._input = b""
        self._fed = False  # this member has had input
        self._given = 0
        self._failure: CorruptGzip | None = None

    def read(self, limit: int) -> bytes:
        """Returns about `limit` bytes or fewer, and at least one unless the file is at its end. Raises CorruptGzip."""
        if self._failure is not None:
            raise self._failure
        while True:
            if self._inflate.eof:
                self._next_member()
            chunk = self._input or self._file.read(_CHUNK)
            if not chunk and not self._fed:
                return b""
            self._fed = True
            before = self._inflate.copy()
            try:
                data = self._inflate.decompress(chunk, limit)
                self._input = self._inflate.unconsumed_tail
                if not (data or chunk or self._inflate.eof):
                    self._failure = self._corrupt("the file ends in the middle: it is truncated")
                    raise self._failure
            except zlib.error as error:
                self._failure = self._corrupt(str(error))
                data = _salvage(before, chunk)
                if not data:
                    raise self._failure from error
            if data:
                self._given += len(data)
                return data

    def _next_member(self) -> None:
        """Goes to the beginning of the next member. Zeros between members are padding."""
        rest = self._inflate.unused_data.lstrip(b"\0")
        while not rest:
            more = self._file.read(_CHUNK)
            if not more:
                break
            rest = more.lstrip(b"\0")
        self._inflate = zlib.decompressobj(_GZIP)
        self._input = rest
        self._fed = False

    def _corrupt(self, reason: str) -> CorruptGzip:
        return CorruptGzip(
            f"gzip file {self._path!r} is damaged before its byte {self._file.tell()}, "
            f"{self._given} bytes into its content: {reason}"
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _salvage(inflate: zlib._Decompress, chunk: bytes) -> bytes:
    """Returns the bytes before the damage. The result is the same however the file was divided into chunks."""
    out = bytearray()
    try:
        for i in range(len(chunk)):
            out += inflate.decompress(chunk[i : i + 1])
    except zlib.error:
        pass
    return bytes(out)
