"""Recognises a file: whether the file at a path is still the file that was listed, and read up to an offset.

A job that goes back reads its files again from saved offsets. A file may have been replaced meanwhile by another that
is as large, as logs are rotated, and an offset in the one says nothing of the other. So what a source lists has a
`FileMark`, of the file's first bytes and, where a format has its index at the end, of its last ones; and an offset is a
`FilePosition`, with the bytes before it.

It must never take another file for the one that was read, nor refuse one that was only appended to, moved to another
disk or copied back: what counts is what is in it. The inode is only where to look for a file that was renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.runtime.errors import SourceError
from penstock.runtime.sources.paths import unreadable

logger = logging.getLogger(__name__)

_HEAD = 4096  # bytes at the beginning that are compared
_TAIL = 64 << 10  # and at the end, where an index is: it holds the sizes and places of all that is in the file
BEFORE = 256  # and before an offset


@dataclass(frozen=True)
class FileMark:
    """Describes a file as it was when it was listed."""

    size: int
    inode: tuple[int, int]  # device and number
    head: bytes
    tail: bytes | None = None  # None: the file may grow


class FilePosition(int):
    """A position in bytes in a file's content, with the bytes before it."""

    before: bytes = b""

    @classmethod
    def after(cls, position: int, before: bytes) -> FilePosition:
        """Returns the position after these bytes, and keeps the last of them."""
        made = cls(position)
        made.before = before[-BEFORE:]
        return made


def mark_of(path: str, source: str, *, indexed: bool = False) -> FileMark:
    """Makes the mark of a file. With `indexed`, the file has its index at the end and is never appended to."""
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            head = _digest(os.pread(file.fileno(), min(_HEAD, status.st_size), 0))
            tail = _tail(file.fileno(), status.st_size) if indexed else None
    except OSError as error:
        raise unreadable(path, source, error) from error
    return FileMark(status.st_size, (status.st_dev, status.st_ino), head, tail)


def find_again(path: str, mark: FileMark | None, source: str) -> str:
    """Returns the path of the file of this mark: its old path, or another name in its directory. A file that has become
    shorter may still be at its path; the reader then finds out. Raises SourceError when there is another file, or none.
    """
    if mark is None:
        return path
    try:
        if _fits(path, mark):
            return path
        there = True
    except FileNotFoundError:
        there = False
    except OSError as error:
        raise unreadable(path, source, error) from error
    for renamed in _of_inode(os.path.dirname(path), mark.inode):
        with contextlib.suppress(OSError):
            if renamed != path and _fits(renamed, mark):
                logger.warning("%s: %r was renamed to %r, and is read on there", source, path, renamed)
                return renamed
    if not there:
        raise unreadable(path, source, FileNotFoundError(2, os.strerror(2)))
    if mark.tail is None and os.path.getsize(path) < mark.size:
        return path
    raise replaced(path, source, "it begins with other bytes" if mark.tail is None else "it has other contents")


def replaced(path: str, source: str, found: str) -> SourceError:
    """Returns the error for another file at the path of a file that was listed."""
    return SourceError(
        f"{source}: {path!r} is not the file any more that it was when the job began: {found}. It was replaced or "
        "written anew, as logs are when they are rotated, so the records that are still to be read cannot be found. "
        "Put the file back, or start the job anew; give sources files that nobody changes but by appending to them."
    )


def _fits(path: str, mark: FileMark) -> bool:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < mark.size or (mark.tail is not None and size != mark.size):
            return False
        if _digest(os.pread(file.fileno(), min(_HEAD, mark.size), 0)) != mark.head:
            return False
        return mark.tail is None or _tail(file.fileno(), size) == mark.tail


def _of_inode(directory: str, inode: tuple[int, int]) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.inode() == inode[1] and entry.is_file(follow_symlinks=False):
                yield entry.path


def _tail(descriptor: int, size: int) -> bytes:
    return _digest(os.pread(descriptor, _TAIL, max(0, size - _TAIL)))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
