"""Locks on directories that only one process at a time may use: a job's checkpoint store, and the folders that its
sinks fill.

The kernel releases a lock when the process that has it ends, however it ends, and nothing is left in the directory. A
directory must never stay locked by a child of a process that is gone, so exec closes the descriptor, and so does a
child that is forked without exec, as multiprocessing does. And a process must never believe that it has locked a
directory when another directory has taken the name since.

A file system without such locks, for example a network file system, refuses nobody.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress

from penstock.runtime.errors import PenstockError

_TRIES = 1000  # tries to lock a directory while others look at it


class DirectoryLocked(PenstockError):
    """Another process has locked the directory. It may release the lock later."""


class DirectoryLock:
    """A lock on a directory, until `close` or until this process ends."""

    def __init__(self, directory: str) -> None:
        """Locks the directory, which must exist. Raises DirectoryLocked when another process has locked it, OSError
        when it cannot be opened, and FileNotFoundError also when it was removed meanwhile."""
        self._directory = directory
        self._descriptor: int | None = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _open.add(self)
        try:
            _lock(self._descriptor, directory, fcntl.LOCK_EX)
            # The process that had the lock before may have removed the directory between the two calls.
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(directory)):
                raise FileNotFoundError(directory)
        except BaseException:
            self.close()
            raise

    def remove(self) -> None:
        """Removes the directory if it is empty, and then releases the lock, so that no other process has the lock when
        the directory is removed."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.rmdir(self._directory)
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


#: The locks of this process. A forked child has their descriptors too.
_open: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Closes a forked child's descriptors. The parent's descriptors keep the locks, which end with the last of both."""
    for lock in list(_open):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def is_locked(directory: str) -> bool:
    """Whether a process has locked the directory now. A directory that does not exist, or cannot be opened, is not
    locked."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        _lock(descriptor, directory, fcntl.LOCK_SH)
    except DirectoryLocked:
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
        # A process that only looks whether the directory is locked has a shared lock for a moment. That lock keeps an
        # exclusive one out, but a second shared lock beside it is granted.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            break
    raise DirectoryLocked(f"another process has locked {directory!r}")
