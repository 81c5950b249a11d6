"""The files of a checkpoint store: local files, which are flushed to the disk, and those of object stores. A reader
must never see half of a file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from typing import Any, Protocol

from penstock.runtime.errors import StoreError, StoreUnreachable
from penstock.runtime.records.codec import Buffer
from penstock.runtime.storage import filesystems
from penstock.runtime.storage.directory_lock import DirectoryLock, is_locked

PIECE_BYTES = 1 << 20  # of a file, read at a time


def store_error(what: str, error: Exception) -> StoreError:
    """Returns Penstock's error for an error that a file system has raised."""
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    reason = filesystems.one_line(reason)
    what = f"the checkpoint store {what}: {reason}."
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnreachable(f"{what} Free some space or raise the quota there; the epoch is lost, the next may do.")
    by_system = isinstance(error, OSError)
    if number in (errno.EMFILE, errno.ENFILE):
        return StoreUnreachable(f"{what} Raise the limit on open files (ulimit -n) of the job's processes.")
    if number == errno.EFBIG:
        remedy = "Raise the limit on the size of files (ulimit -f), or use another file system."
        return StoreError(f"{what} {remedy}", may_pass=by_system)
    if number == errno.EROFS:
        return StoreError(f"{what} {filesystems.MOUNT_IT}, or use another directory.", may_pass=by_system)
    if isinstance(error, PermissionError) or filesystems.refuses(reason):
        remedy = "Give the user or the keys that run the job the right to read, write and delete there."
        return StoreError(f"{what} {remedy}", may_pass=by_system)
    if number in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return StoreError(f"{what} Something else has that name; use another directory.", may_pass=by_system)
    return StoreUnreachable(f"{what} Look whether it is up and can be reached from this node; a later try may work.")


class NotAsWritten(FileNotFoundError):
    """The file of this name is certainly not the file that was written. The message says what it is."""


class Files(Protocol):
    """The operations of a file system that a store needs: files in folders of the job's directory, whose names have one
    '/'. It raises whatever the file system raises, and FileNotFoundError for a file that does not exist."""

    place: str  # for messages
    remote: bool  # whether waiting is most of what a call takes

    def write(self, name: str, parts: Iterable[Buffer], flush: bool) -> None:
        """Writes a file so that no reader ever sees half of it."""

    def read(self, name: str, most: int) -> bytes:
        """Returns a file's bytes. Raises NotAsWritten, without reading, when it has more than `most`, and when reading
        could wait for ever because the name is that of a pipe or a device."""

    def pieces(self, name: str, most: int) -> Iterator[bytes]:
        """Yields a file's bytes piece by piece. Raises NotAsWritten as `read` does."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the files in a folder with their sizes, also hidden files. Empty when the folder does not exist."""

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files in a folder, also of hidden files. Empty when the folder does not exist."""

    def delete(self, name: str) -> None:
        """Deletes a file. It is no error if the file does not exist."""

    def destroy(self, folders: Sequence[str], ours: Callable[[str], bool]) -> None:
        """Deletes the files in these folders that are ours, and then the empty directories. The job's own directory
        stays while it is locked."""

    def lock(self) -> None:
        """Lock the job's directory, if the file system can do so. Raises DirectoryLocked."""

    def release(self) -> None:
        """Releases the lock, and removes the directory if it is empty."""

    def is_locked(self) -> bool: ...


class LocalFiles:
    """A directory, by plain system calls. They name the reason of a failure, and pyarrow need not be loaded."""

    remote = False

    def __init__(self, root: str, durable: bool) -> None:
        self.place = self._root = root
        self._durable = durable
        self._directory_lock: DirectoryLock | None = None

    def write(self, name: str, parts: Iterable[Buffer], flush: bool) -> None:
        target = f"{self._root}/{name}"
        folder, _, last = target.rpartition("/")
        hidden = f"{folder}/.{last}.{os.urandom(6).hex()}.tmp"
        flush = flush or self._durable
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        made: list[str] = []
        try:
            descriptor = os.open(hidden, flags, 0o600)
        except FileNotFoundError:
            made = self._make(folder)
            descriptor = os.open(hidden, flags, 0o600)
        try:
            try:
                for part in parts:
                    rest = memoryview(part)
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                if flush:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            try:
                os.replace(hidden, target)
            except IsADirectoryError:
                _set_aside(target)
                os.replace(hidden, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(hidden)
            raise
        for directory in {*map(os.path.dirname, made), *([folder] if flush else [])}:
            _flush_directory(directory)

    def read(self, name: str, most: int) -> bytes:
        with self._open(name, most) as file:
            return file.read()

    def pieces(self, name: str, most: int) -> Iterator[bytes]:
        with self._open(name, most) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def _open(self, name: str, most: int) -> FileIO:
        # Opening a pipe for reading waits for somebody who writes to it, except with O_NONBLOCK.
        try:
            descriptor = os.open(f"{self._root}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise NotAsWritten("is a link that leads nowhere, or a socket, and no file") from error
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise NotAsWritten("is a pipe, a device or a directory, and no file")
            _refuse_more(found.st_size, most)
            return FileIO(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        for name in self.names(folder):
            try:
                found[name] = os.stat(f"{self._root}/{name}").st_size
            except OSError as error:
                # Somebody has just deleted it, or it is a link that leads nowhere.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
        return found

    def names(self, folder: str) -> list[str]:
        try:
            with os.scandir(f"{self._root}/{folder}") as entries:
                return [f"{folder}/{entry.name}" for entry in entries if not entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(f"{self._root}/{name}")

    def destroy(self, folders: Sequence[str], ours: Callable[[str], bool]) -> None:
        for folder in folders:
            for name in filter(ours, self.names(folder)):
                self.delete(name)
            with suppress(OSError):  # the directory is not empty, or does not exist
                os.rmdir(f"{self._root}/{folder}")
        if self._directory_lock is None:
            with suppress(OSError):
                os.rmdir(self._root)

    def lock(self) -> None:
        while self._directory_lock is None:
            self._make(self._root)
            with suppress(FileNotFoundError):  # the last process that had the lock has just removed the directory
                self._directory_lock = DirectoryLock(self._root)

    def release(self) -> None:
        lock, self._directory_lock = self._directory_lock, None
        if lock is not None:
            lock.remove()

    def is_locked(self) -> bool:
        return is_locked(self._root)

    def _make(self, folder: str) -> list[str]:
        """Creates a directory and the directories above it. Returns those that were missing."""
        missing = self._missing(folder)
        for directory in reversed(missing):
            with suppress(FileExistsError):  # another process is creating it too
                os.mkdir(directory, 0o700)
        return missing

    def _missing(self, folder: str) -> list[str]:
        """Returns the directories that would have to be created for a folder to exist."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        return missing


def _refuse_more(size: int, most: int) -> None:
    if size > most:
        raise NotAsWritten(f"has {size:,} bytes")


def _set_aside(directory: str) -> None:
    """Frees the name of a file that somebody has given to a directory. What is in the directory stays in another."""
    try:
        os.rmdir(directory)
    except OSError:
        os.rename(directory, f"{directory}.set-aside-{os.urandom(6).hex()}")


def _flush_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that answers so has nothing to flush
            raise
    finally:
        os.close(descriptor)


class ArrowFiles:
    """A file system of pyarrow.fs. `rename` moves a file, if readers can see a file that is still being written."""

    remote = True

    def __init__(
        self,
        system: Any,
        root: str,
        place: str,
        rename: Callable[[str, str], object] | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> None:
        self.place = place
        self._system = system
        self._root = root
        self._rename = rename
        self._refresh = refresh

    def write(self, name: str, parts: Iterable[Buffer], flush: bool) -> None:
        target = f"{self._root}/{name}"
        if self._rename is None:
            self._write(target, parts)
            return
        folder, _, last = target.rpartition("/")
        hidden = f"{folder}/.{last}.{os.urandom(6).hex()}.tmp"
        try:
            self._write(hidden, parts)
            self._rename(hidden, target)
        except BaseException:
            with suppress(Exception):  # the first error tells more
                self._system.delete_file(hidden)
            raise

    def read(self, name: str, most: int) -> bytes:
        with self._system.open_input_file(f"{self._root}/{name}") as file:
            _refuse_more(file.size(), most)
            data: bytes = file.read()
        return data

    def pieces(self, name: str, most: int) -> Iterator[bytes]:
        with self._system.open_input_file(f"{self._root}/{name}") as file:
            _refuse_more(file.size(), most)
            while piece := file.read(PIECE_BYTES):
                yield piece

    def sizes(self, folder: str) -> dict[str, int]:
        from pyarrow.fs import FileType

        found = self._list(folder)
        return {f"{folder}/{entry.base_name}": entry.size for entry in found if entry.type == FileType.File}

    def names(self, folder: str) -> list[str]:
        from pyarrow.fs import FileType

        return [f"{folder}/{entry.base_name}" for entry in self._list(folder) if entry.type == FileType.File]

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.delete_file(f"{self._root}/{name}")

    def destroy(self, folders: Sequence[str], ours: Callable[[str], bool]) -> None:
        for folder in folders:
            names = [f"{folder}/{entry.base_name}" for entry in self._list(folder)]
            if names and all(map(ours, names)):
                self._delete_directory(f"/{folder}")  # an object store deletes a thousand files with one request
            else:
                for name in filter(ours, names):
                    self.delete(name)
        if not self._list(""):
            self._delete_directory("")

    def lock(self) -> None:
        """Does nothing, because such file systems have no locks."""

    def release(self) -> None: ...

    def is_locked(self) -> bool:
        return False

    def _delete_directory(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._system.delete_dir(self._root + folder)

    def _list(self, folder: str) -> list[Any]:
        from pyarrow.fs import FileSelector

        if self._refresh is not None:
            self._refresh()
        base = f"{self._root}/{folder}".rstrip("/")
        found = self._system.get_file_info(FileSelector(base, allow_not_found=True))
        # An object store that marks a directory by an empty object may list this object too.
        return [entry for entry in found if entry.path.strip("/") != base.strip("/")]

    def _write(self, path: str, parts: Iterable[Buffer]) -> None:
        try:
            stream = self._system.open_output_stream(path)
        except FileNotFoundError:
            self._system.create_dir(path.rpartition("/")[0], recursive=True)
            stream = self._system.open_output_stream(path)
        # Closing a stream publishes what it has, and so does dropping it: after a failed write some file systems may
        # show a part. Nobody reads that: a blob's name gets into a manifest only when this has returned, and a
        # manifest, which is one write, is not accepted without its last byte.
        with stream:
            for part in parts:
                stream.write(part)


def open_files(url: str, job: str, durable: bool, look: bool) -> Files:
    """Opens the files of a job. `look`: also checks whether they can be used, as far as this can be seen."""
    try:
        path = filesystems.local_path(url)
        if path is not None:
            return _open_local(path, job, durable, look)
        found = filesystems.open_remote(url, job, look=look)
    except filesystems.BadPlace as error:
        raise StoreError(f"checkpoint store {error}") from None
    except OSError as error:
        raise store_error(f"cannot open {filesystems.shown(url, job)}", error) from None
    return ArrowFiles(found.system, found.root, found.place, found.rename, found.refresh)


def _open_local(path: str, job: str, durable: bool, look: bool) -> Files:
    if "\0" in path:
        raise StoreError(f"checkpoint store {path!r}: no path can have a zero byte in it")
    root = os.path.join(os.path.abspath(os.path.expanduser(path)), job)
    if not look:
        return LocalFiles(root, durable)
    there = root
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise StoreError(f"checkpoint store {root}: {there} is not a directory; give one, or a path that is free")
    if reason := filesystems.not_writable(there):
        raise StoreError(f"checkpoint store {root}: {reason}, or use another directory.")
    return LocalFiles(root, durable)
