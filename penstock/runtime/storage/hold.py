"""Holding a directory: one process at a time may use it, here a job's JobMaster its store and the folders it fills.

The kernel frees the lock when the holder's process ends, however it ends, and nothing is left in the directory. What
must never happen: that a directory stays locked by a child of a holder that is gone (the descriptor is closed by exec),
or that a holder has locked a directory that no longer has its name.

A file system without such locks, as some network file systems are, refuses nobody.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from penstock.runtime.errors import PenstockError

_TRIES = 1000  # to lock a directory while others look at it


class Held(PenstockError):
    """Another process holds the directory; it may let go of it later."""


class Hold:
    """A directory that is held until `close`, or until this process ends."""

    def __init__(self, directory: str) -> None:
        """The directory must exist. Raises Held; OSError when it cannot be opened, FileNotFoundError also when it was
        removed meanwhile."""
        self._directory = directory
        self._descriptor: int | None = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(self._descriptor, directory, fcntl.LOCK_EX)
            # Whoever held it before may have removed it between the two calls.
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(directory)):
                raise FileNotFoundError(directory)
        except BaseException:
            self.close()
            raise

    def remove(self) -> None:
        """Remove the directory if it is empty, and let go of it: in this order, so that it is nobody else's yet."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.rmdir(self._directory)
        self.close()

    def close(self) -> None:
        """Let go of the directory."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_held(directory: str) -> bool:
    """Whether a process holds the directory now; one that does not exist, or cannot be opened, is held by nobody."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        _lock(descriptor, directory, fcntl.LOCK_SH)
    except Held:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, directory: str, kind: int) -> None:
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError:
            return  # the file system has no locks, or none of directories
        # A process that only looks whether the directory is held has a shared lock for a moment. That lock keeps a
        # holder out, but it is no holder's: a second shared lock beside it is granted.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            break
    raise Held(f"another process holds {directory!r}")
