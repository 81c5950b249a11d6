"""Finds the files that a pattern names, before the job starts.

It must never return a directory, a file that cannot be opened, or one file twice, and never take "no file"
for an empty input: each of these is a SourceError that names the path and what to do.
"""

from __future__ import annotations

import glob
import os
import socket
import stat
from collections.abc import Iterable

from penstock.runtime.errors import FlowError, SourceError, shorten
from penstock.runtime.storage import filesystems

PathLike = str | os.PathLike[str]
Patterns = PathLike | Iterable[PathLike]


def as_patterns(patterns: Patterns, source: str) -> tuple[str, ...]:
    """Returns the patterns as a tuple of strings. Raises FlowError when there is none or one is not a path."""
    if isinstance(patterns, (str, os.PathLike)):
        patterns = (patterns,)
    try:
        names = tuple(os.fspath(pattern) for pattern in patterns)
    except TypeError:
        raise FlowError(f"{source} needs a path, a pattern or a list of them, got {shorten(patterns)}") from None
    if not names or not all(isinstance(name, str) and name for name in names):
        raise FlowError(f"{source} needs at least one path or pattern, none of them empty, got {shorten(names)}")
    return tuple(_path(name, source) for name in names)


def _path(name: str, source: str) -> str:
    """Returns a pattern as a path, also when it is written as a file:// URL."""
    try:
        path = filesystems.local_path(name)
    except filesystems.BadPlace as error:
        raise FlowError(f"{source}: {error}") from None
    if path is None:
        raise FlowError(
            f"{source}: {filesystems.shown(name)!r} is a URL, and this source reads files that every node sees under a "
            "path. Copy them to a directory that the nodes share, or mount the bucket there, and give its path."
        )
    return path


def find_files(patterns: tuple[str, ...], source: str) -> list[str]:
    """Returns the absolute paths of all files that the patterns name, sorted, each once.

    A name that exists is taken as it is, whatever `*?[` it contains; `**` goes through sub-folders; `~` is
    the user's home. A pattern passes over directories, a plain name must not be one.
    """
    found: set[str] = set()
    for pattern in patterns:
        path = os.path.abspath(os.path.expanduser(pattern))
        if os.path.lexists(path) or not glob.has_magic(path):
            check_file(path, source)
            found.add(path)
            continue
        matches = glob.glob(path, recursive=True)
        files = [match for match in matches if not os.path.isdir(match)]
        if not files:
            seen = f"; it matches {len(matches)} directories, which are not read" if matches else ""
            raise SourceError(
                f"{source}: no file matches {path!r}{seen}. "
                "Correct the pattern; a relative one starts at the directory that the program runs in."
            )
        for match in files:
            check_file(match, source)
        found.update(files)
    return sorted(found)


def check_file(path: str, source: str) -> None:
    """Raises SourceError unless `path` is a regular file that opens."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise SourceError(
                f"{source}: {path!r} is a directory. To read the files in it give "
                f"{os.path.join(path, '*')!r}, "
                f"to read those of its sub-folders too {os.path.join(path, '**', '*')!r}."
            )
        if not stat.S_ISREG(mode):
            raise SourceError(
                f"{source}: {path!r} is a pipe, a device or a socket. Such an input cannot be read again "
                "after "
                "a failure: write it to a file, or serve it over TCP for SocketLines."
            )
        with open(path, "rb"):
            pass
    except OSError as error:
        raise unreadable(path, source, error) from error


def unreadable(path: str, source: str, error: OSError) -> SourceError:
    """Returns the SourceError for an OSError that occurred while `path` was opened or read."""
    if isinstance(error, FileNotFoundError):
        remedy = (
            f"Check the name. Process {os.getpid()} on machine {socket.gethostname()} does not see the file: every "
            "machine that runs tasks of the source must see it under this path. Put it on a network file system that "
            "all machines have at the same place, or let all workers run on one machine."
        )
    elif isinstance(error, PermissionError):
        remedy = "Give the user that runs the job the right to read it."
    else:
        remedy = "Check the disk or the mount."
    return SourceError(f"{source}: cannot read {path!r}: {error.strerror or error}. {remedy}")
