"""Accesses the place of part files: a directory of this machine, or a place in an object store or another remote file
system.

A part file is written under a hidden name, and is given its own when it is whole and may be seen. In a directory that
is one step. In an object store a file cannot be appended to, is there as soon as it is closed, and gets another name by
being copied and deleted: the copy appears as a whole, and who is killed between the two steps, or makes both again,
leaves the same. So what holds of a directory holds of these, as long as a file is closed before it is needed.

What must never happen: that a file whose writing has failed is taken for one that was written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator
from typing import Any, Protocol

from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.storage import filesystems

_ATTEMPTS = 5  # of a request to S3: a commit that fails ends the job


class RawFile(Protocol):
    """A file that is being written. Dropping or closing it without `sync` may leave any part of it."""

    @property
    def closed(self) -> bool: ...

    def write(self, data: Any, /) -> Any:
        """Writes bytes, and returns how many were taken."""

    def tell(self) -> int: ...

    def sync(self) -> None:
        """Makes sure that everything written outlives the machine, and closes the file."""

    def deleted(self) -> bool:
        """Tells whether the path no longer leads to this file, because somebody has deleted or moved the file or its
        directory."""

    def truncate(self, size: int | None = None, /) -> int: ...

    def close(self) -> None: ...


class Place(Protocol):
    """The operations that part files need of a file system, on whole paths. All methods raise OSError."""

    remote: bool  # files must be closed to be kept

    def create(self, path: str, exclusive: bool) -> RawFile:
        """Creates a file. With `exclusive`, no file of this name may exist, as far as the file system can tell."""

    def replace(self, path: str, new: str) -> None:
        """Gives a closed file another name. Raises FileNotFoundError when there is no such file."""

    def remove(self, path: str) -> None:
        """Deletes a file, if it exists."""

    def names(self, directory: str) -> list[str]:
        """Returns the names of the files in a directory."""

    def size(self, path: str) -> int | None:
        """Returns the size of a file, or None when there is no such file."""

    def make(self, directory: str) -> None:
        """Makes a directory, unless it exists."""

    def sync_directory(self, directory: str) -> None:
        """Makes sure that the names in a directory outlive the machine."""


class LocalFile(io.FileIO):
    """A file of this machine. It holds nothing back."""

    def sync(self) -> None:
        """See RawFile."""
        os.fsync(self.fileno())
        self.close()

    def deleted(self) -> bool:
        """See RawFile."""
        try:
            return not os.path.samestat(os.fstat(self.fileno()), os.stat(self.name))
        except FileNotFoundError:
            return True


class LocalPlace:
    """The file system of this machine, by plain system calls."""

    remote = False

    def create(self, path: str, exclusive: bool) -> RawFile:
        return LocalFile(path, "xb" if exclusive else "wb")

    def replace(self, path: str, new: str) -> None:
        os.replace(path, new)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def names(self, directory: str) -> list[str]:
        return os.listdir(directory)

    def size(self, path: str) -> int | None:
        try:
            return os.path.getsize(path)
        except FileNotFoundError:
            return None

    def make(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)

    def sync_directory(self, directory: str) -> None:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise failed_write(directory, error, True) from error


LOCAL = LocalPlace()


class RemoteFile(io.RawIOBase):
    """A file of a remote file system. The file exists there when it is closed."""

    def __init__(self, stream: Any, path: str) -> None:
        super().__init__()
        self._stream = stream
        self._path = path
        self._written = 0
        self._broken: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        with self._noting():
            self._stream.write(data)
        self._written += size
        return size

    def tell(self) -> int:
        return self._written

    def truncate(self, size: int | None = None, /) -> int:
        """Does nothing: what was written cannot be taken back, and nobody takes a hidden file for a whole one."""
        return self._written

    def sync(self) -> None:
        """See RawFile."""
        with self._noting():
            self._stream.close()
        super().close()

    def deleted(self) -> bool:
        """Returns False: the file does not exist before it is closed."""
        return False

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(Exception):  # of the library; what was written is given up anyway
                self._stream.close()
            super().close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Notes an error, because it is unknown then which bytes have arrived, and later calls must fail too."""
        if self._broken is not None:
            raise self._broken
        try:
            with _as_os_error(self._path):
                yield
        except OSError as error:
            self._broken = error
            raise


class RemotePlace:
    """A place of pyarrow.fs. Paths begin with its URL as people see it, without keys."""

    remote = True

    def __init__(self, found: filesystems.Remote) -> None:
        self.place = found.place
        self._root = found.root
        self._system = found.system
        self._rename = found.rename
        self._refresh = found.refresh

    def create(self, path: str, exclusive: bool) -> RawFile:
        with _as_os_error(path):
            try:
                stream = self._system.open_output_stream(self._path(path))
            except FileNotFoundError:
                self._system.create_dir(self._path(path).rpartition("/")[0], recursive=True)
                stream = self._system.open_output_stream(self._path(path))
        return RemoteFile(stream, path)

    def replace(self, path: str, new: str) -> None:
        if self.size(path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        with _as_os_error(path):
            if self._rename is not None:
                self._rename(self._path(path), self._path(new))
            else:
                self._system.copy_file(self._path(path), self._path(new))
        if self._rename is None:
            self.remove(path)

    def remove(self, path: str) -> None:
        with _as_os_error(path), contextlib.suppress(FileNotFoundError):
            self._system.delete_file(self._path(path))

    def names(self, directory: str) -> list[str]:
        from pyarrow.fs import FileSelector, FileType

        with _as_os_error(directory):
            if self._refresh is not None:
                self._refresh()
            found = self._system.get_file_info(FileSelector(self._path(directory), allow_not_found=True))
        return [entry.base_name for entry in found if entry.type == FileType.File]

    def size(self, path: str) -> int | None:
        from pyarrow.fs import FileType

        with _as_os_error(path):
            if self._refresh is not None:
                self._refresh()
            found = self._system.get_file_info(self._path(path))
        return None if found.type == FileType.NotFound else int(found.size or 0)

    def make(self, directory: str) -> None:
        """Does nothing: a directory is made together with its first file, where there are directories."""

    def sync_directory(self, directory: str) -> None:
        """Does nothing: a remote file system keeps what it has confirmed."""

    def check(self) -> None:
        """Writes a small file and deletes it. Raises OSError when that fails."""
        path = f"{self.place}/.penstock-{secrets.token_hex(6)}"
        file = self.create(path, True)
        file.write(b"Penstock was here")
        file.sync()
        self.remove(path)

    def _path(self, path: str) -> str:
        assert path.startswith(self.place), f"{path!r} is not in {self.place!r}"
        return self._root + path[len(self.place) :]


def open_place(url: str, sink: str, *, look: bool = False) -> RemotePlace:
    """Opens the place of a URL that is not on this machine. With `look`, it makes sure that the place can be written
    to. Raises FlowError for a URL that cannot be used, and PenstockError when the file system fails."""
    try:
        return RemotePlace(filesystems.open_remote(url, look=look, attempts=_ATTEMPTS))
    except filesystems.BadPlace as error:
        raise FlowError(f"{sink}: {error}") from None
    except OSError as error:
        raise failed_write(filesystems.shown(url), error, sink=sink) from None


def failed_write(path: str, error: OSError, epochs: bool = False, sink: str = "Files") -> PenstockError:
    """Returns the error for an OSError that occurred while `path` was written."""
    reason = filesystems.one_line(error.strerror or str(error) or type(error).__name__)
    remote = filesystems.is_url(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        left = "committed stays" if epochs else "wrote so far is removed"
        remedy = f"Free some space, or write to another disk; what the job {left}."
    elif remote and (isinstance(error, PermissionError) or filesystems.refuses(reason)):
        remedy = "Give the keys that run the job's workers the right to list, read, write and delete there."
    elif error.errno == errno.EROFS:
        remedy = f"{filesystems.MOUNT_IT}, or write to another directory."
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = "Give the user that runs the job's workers the right to write there."
    elif remote:
        remedy = "Look whether it is up and can be reached from the node that runs the task."
    else:
        remedy = "Check the disk or the mount on the node that runs the task."
    return PenstockError(f"{sink}: cannot write {path!r}: {reason}. {remedy}")


@contextlib.contextmanager
def _as_os_error(path: str) -> Iterator[None]:
    """Raises any error of a file system as an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # file systems of other machines raise what their libraries raise
        raise OSError(f"{type(error).__name__}: {error}") from error
