"""The checkpoint store: where a job's snapshots and manifests live.

    <url>/<job>/snapshots/000012-7-0          a blob: part of the state that task 7 saved for epoch 12
    <url>/<job>/manifests/0000000012.json     what epoch 12 consists of; see runtime/epochs/manifest.py

Epochs are numbered 1, 2, 3, ... Blobs are written first, by many processes, then the manifest, by one: the epoch is
complete exactly when its manifest is there and whole. Whoever is killed on the way leaves blobs without a manifest,
which nobody reads and `collect` takes away.

What must never happen:

- A half-written file under a name that somebody reads. A directory gets a hidden file first, which takes its name in
  one step when it is whole; an object store shows an object when all of it has arrived.
- Damaged bytes taken for a snapshot. Each blob's size and CRC-32 are in the manifest and are checked by every read.
- A store that does not answer taken for one that has nothing, or for a damaged one: the job would start from an older
  epoch than it must, or from nothing. StoreUnreachable and SnapshotDamaged are never mixed up.
- A file deleted that a kept manifest refers to, that belongs to an epoch in the making, or that is not ours: only
  files with names of the two patterns above are ever deleted, so the store may be a directory with other things in it.

Whoever can write to the store can make the job load what they like. Give it the rights that the program itself has.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from penstock.runtime.codec import Buffer
from penstock.runtime.epochs.manifest import Blob, Manifest, decode, encode
from penstock.runtime.errors import PenstockError, SnapshotDamaged, StoreError, StoreUnreachable

logger = logging.getLogger(__name__)

#: A blob of at most so many bytes is kept in the manifest: a file each would cost more than its bytes.
INLINE_BYTES = 4 << 10

_SNAPSHOTS = "snapshots"
_MANIFESTS = "manifests"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")  # as the names of flows
_BLOB = re.compile(r"snapshots/\d{6,}-[A-Za-z0-9_.\-]+")
_MANIFEST = re.compile(r"manifests/(\d{10})\.json")
#: Everything that a store writes, hidden files included, with the number of the epoch.
_OUR_BLOB = re.compile(r"snapshots/\.?(\d{6,})-[A-Za-z0-9_.\-]+")
_OUR_MANIFEST = re.compile(r"manifests/\.?(\d{10})\.json(\.[0-9a-f]{12}\.tmp)?")
_OUR_ENDED = re.compile(r"manifests/\.?ended(\.[0-9a-f]{12}\.tmp)?")
_ENDED = "manifests/ended"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)

# An S3 request is given up when a connection takes the first time or no byte moves for the second one, and is tried
# once more. A put to a server that takes connections and then says nothing takes about 4 times as long.
_CONNECT_SECONDS = 5.0
_REQUEST_SECONDS = 8.0
_ATTEMPTS = 2
_GCS_SECONDS = "30"  # all tries of one request; pyarrow's own limit is 15 minutes
_AT_ONCE = 8  # deletions: each is up to three requests to an object store

#: Schemes that pyarrow opens by their URL; it has S3 too, and all others are left to fsspec.
_ARROW = ("gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
#: fsspec's names of places where a file is visible when it is closed, and which copy in order to rename.
_OBJECTS = "s3 s3a gs gcs abfs abfss az adl wasb oci ocilake oss obs cos cosn tos r2 b2 swift hf memory"
#: What object stores say, in pyarrow's words, when another try will not help.
_REFUSALS = (
    "ACCESS_DENIED",
    "ACCOUNT_PROBLEM",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "INVALID_SIGNATURE",
    "MISSING_AUTHENTICATION_TOKEN",
    "NO_SUCH_BUCKET",
    "SIGNATURE_DOES_NOT_MATCH",
    "UNRECOGNIZED_CLIENT",
    "HTTP status 401",
    "HTTP status 403",
    "PermissionDenied",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "AuthenticationFailed",
    "AuthorizationFailure",
)


class Store:
    """The checkpoint store of one job; see the module's docstring. Use `Store.open`.

    Any number of processes and threads may have the same store open and put blobs; one at a time writes manifests and
    collects. A store can be pickled, and is then opened where it is unpickled, without a look at whether it can be used
    just then: a process may have to start while it cannot.

    All methods raise StoreUnreachable when the file system does not answer or has no room, within a minute or so where
    the file system lets us choose, and StoreError when it refuses for good.
    """

    def __init__(self, files: Files, job: str, again: tuple[Any, ...] | None = None) -> None:
        self.job = job
        self._files = files
        self._again = again
        self._complained = False

    @classmethod
    def open(cls, url: str | os.PathLike[str], job: str, durable: bool = False) -> Store:
        """The store of a job below `url`; nothing is made yet.

        `url` is a directory (all nodes must share it), or file://, s3://bucket/prefix, gs://, hdfs://, abfs://, or
        anything that the package fsspec opens where that is installed. For S3, keys come from the environment or as
        s3://key:secret@bucket/prefix, and the options of pyarrow.fs.S3FileSystem as ?region=...&endpoint_override=...

        `durable`: flush every blob to the disk before it counts as written. What a process wrote outlives its own
        death without that; only a machine that loses its power loses what the kernel had yet to write. Manifests are
        always flushed, so that even then the newest epochs are at worst found damaged and an older one is used.
        It means nothing to object stores, which answer when they have stored.

        Raises StoreError when the URL is wrong, a library is missing, or the place cannot be written to as far as can
        be seen without writing; `check` makes sure.
        """
        text = os.fspath(url)
        if not isinstance(text, str) or not text:
            raise StoreError(f"the checkpoint store needs a directory or a URL, got {url!r}")
        if not _JOB.fullmatch(job):
            raise StoreError(f"no job can be named {job!r}: letters, digits, '_', '.' and '-', at most 100")
        files = _open_files(text, job, durable, True)
        if _URL.fullmatch(text) is None:
            text = os.path.abspath(os.path.expanduser(text))  # other processes may be in other directories
        return cls(files, job, (text, job, durable))

    def __reduce__(self) -> tuple[Any, ...]:
        if self._again is None:
            raise TypeError("only a store from Store.open can be pickled")
        return _opened_before, self._again

    def __repr__(self) -> str:
        return f"Store({self.place!r})"

    @property
    def place(self) -> str:
        """Where it is, for people: without keys and options."""
        return self._files.place

    def check(self) -> None:
        """Write a small file and delete it: raises StoreError now rather than at the first epoch."""
        name = f"{_SNAPSHOTS}/000000-check-{os.urandom(6).hex()}"
        try:
            self._files.write(name, [memoryview(b"Penstock was here")], False)
            self._files.delete(name)
        except Exception as error:
            raise self._failed("write in", "", error) from error

    def put(self, name: str, parts: Sequence[Buffer]) -> Blob:
        """Write a blob: the parts one after the other. When this returns it is there, for all readers.

        `name` is "snapshots/<epoch>-<rest>", with at least 6 digits: collect() goes by the number. A blob of that name
        is replaced, so what may be written twice, such as the state of a task that is started again while an old
        process of it may still be at work, needs something in `rest` to tell the two apart.

        At most INLINE_BYTES are not written but become part of the Blob, and so of the manifest.
        """
        assert _BLOB.fullmatch(name), f"{name!r} is no name of a blob"
        views = [memoryview(part).cast("B") for part in parts]
        checksum = 0
        for view in views:
            checksum = zlib.crc32(view, checksum)
        size = sum(view.nbytes for view in views)
        if size <= INLINE_BYTES:
            return Blob(name, size, checksum, b"".join(views))
        try:
            self._files.write(name, views, False)
        except Exception as error:
            raise self._failed("write", name, error) from error
        return Blob(name, size, checksum)

    def get(self, blob: Blob) -> bytes:
        """The bytes of a blob. SnapshotDamaged when they are not those that were put."""
        data = blob.data
        if data is None:
            try:
                data = self._files.read(blob.name)
            except FileNotFoundError as error:
                raise SnapshotDamaged(
                    f"{self._path(blob.name)} is missing; {blob.size:,} bytes were written. {_OLDER}"
                ) from error
            except Exception as error:
                raise self._failed("read", blob.name, error) from error
        if len(data) != blob.size:
            raise SnapshotDamaged(
                f"{self._path(blob.name)} has {len(data):,} bytes; {blob.size:,} were written. {_OLDER}"
            )
        found = zlib.crc32(data)
        if found != blob.checksum:
            raise SnapshotDamaged(
                f"{self._path(blob.name)} has changed since it was written: its checksum is {found:08x} and was "
                f"{blob.checksum:08x}. {_OLDER}"
            )
        return data

    def write_manifest(self, manifest: Manifest) -> None:
        """Complete an epoch. Its blobs have been put, and epochs are completed in order.

        After StoreUnreachable nobody knows whether it is there: the request may have arrived, and may yet arrive.
        Write it again, which is fine however often, or go on with the next number, and be ready to start from either.

        StoreError when the epoch is complete with other contents: then two runs of the job write here. (Best effort:
        of two that do so in the same moment, the later one wins.)
        """
        assert manifest.job == self.job, f"a manifest of {manifest.job!r} in the store of {self.job!r}"
        assert manifest.epoch >= 1
        data = encode(manifest)
        name = _manifest_name(manifest.epoch)
        try:
            if not self._is_missing(name, manifest):
                return
            self._files.write(name, [memoryview(data)], True)
        except StoreError:
            raise
        except Exception as error:
            raise self._failed("write", name, error) from error

    def epochs(self) -> list[int]:
        """The epochs that have a manifest, whole or not, newest first.

        A job's next epoch is one more than the first of these, or than any that it has tried since.
        """
        try:
            names = self._files.names(_MANIFESTS)
        except Exception as error:
            raise self._failed("list", _MANIFESTS, error) from error
        found = map(_MANIFEST.fullmatch, names)
        return sorted((int(match.group(1)) for match in found if match), reverse=True)

    def read_manifest(self, epoch: int) -> Manifest:
        """SnapshotDamaged when there is none that can be trusted; StoreError when a newer release wrote it."""
        name = _manifest_name(epoch)
        where = self._path(name)
        try:
            data = self._files.read(name)
        except FileNotFoundError as error:
            raise SnapshotDamaged(f"{where} is missing: epoch {epoch} is not complete. {_OLDER}") from error
        except Exception as error:
            raise self._failed("read", name, error) from error
        manifest = decode(data, where)
        if (manifest.job, manifest.epoch) != (self.job, epoch):
            raise SnapshotDamaged(
                f"{where} is that of epoch {manifest.epoch} of job {manifest.job!r}: somebody renamed or copied it. "
                "A job's directory cannot be used under another name."
            )
        return manifest

    def forget_after(self, epoch: int) -> None:
        """Delete the manifests of all later epochs, so that nobody ever starts from them again."""
        for later in self.epochs():
            if later > epoch:
                name = _manifest_name(later)
                try:
                    self._files.delete(name)
                except FileNotFoundError:
                    continue
                except Exception as error:
                    raise self._failed("delete", name, error) from error

    def verify(self, manifest: Manifest) -> None:
        """Read all blobs of a manifest. SnapshotDamaged when one cannot be trusted."""
        for blob in dict.fromkeys(manifest.blobs()):
            self.get(blob)

    def latest(self, usable: Callable[[Manifest], None] | None = None) -> tuple[Manifest, list[str]] | None:
        """The newest epoch that is whole, and in words what was wrong with newer ones; None when there are none yet.

        `usable`, such as `verify`, may raise SnapshotDamaged for an epoch whose manifest is whole. SnapshotDamaged
        when there are epochs and none can be used: starting from nothing is not ours to decide.
        """
        passed: list[str] = []
        for epoch in self.epochs():
            try:
                manifest = self.read_manifest(epoch)
                if usable is not None:
                    usable(manifest)
            except SnapshotDamaged as error:
                passed.append(f"epoch {epoch}: {error}")
            else:
                return manifest, passed
        if passed:
            raise SnapshotDamaged(
                f"none of the {len(passed)} epochs in {self.place} can be used. {' '.join(passed)} "
                "Restore the directory from a backup, or start the job anew with another checkpoint store."
            )
        return None

    def collect(self, keep: int) -> int:
        """Delete all but the newest `keep` epochs that are whole, and the blobs that none of these needs.

        Blobs and hidden files of epochs after the newest whole one stay: they may be of a snapshot in the making. By
        number and not by age, because a blob can be older than the manifest of the epoch before it.

        Returns how many files it deleted. What cannot be deleted is left for the next time, and told once in the log;
        so is a store that does not answer.
        """
        assert keep >= 1, f"keep={keep}: without an epoch the job could not start again"
        try:
            return self._collect(keep)
        except StoreError as error:
            self._complain(error)
            return 0

    def end(self, state: str) -> None:
        """Note that the job has ended and that nobody shall go on from its epochs, although they are still there."""
        try:
            self._files.write(_ENDED, [memoryview(state.encode())], False)
        except Exception as error:
            raise self._failed("write", _ENDED, error) from error

    def ended(self) -> str | None:
        """The state in which the job ended, where `end` noted that and `destroy` was not called since."""
        try:
            return bytes(self._files.read(_ENDED)).decode()
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed("read", _ENDED, error) from error

    def destroy(self) -> None:
        """Delete all that the store has written for the job, the note that it has ended last. Gone already is fine."""
        try:
            self._files.destroy((_SNAPSHOTS, _MANIFESTS), _is_ours)
            self._files.destroy((_MANIFESTS,), lambda name: _OUR_ENDED.fullmatch(name) is not None)
        except Exception as error:
            raise self._failed("delete", "", error) from error

    def _is_missing(self, name: str, manifest: Manifest) -> bool:
        """Whether the epoch is yet to be written: it is not there, or damaged."""
        try:
            there = self.read_manifest(manifest.epoch)
        except SnapshotDamaged:
            return True
        if there == manifest:
            return False
        raise StoreError(
            f"{self._path(name)}: epoch {manifest.epoch} is complete already, with other contents. Two runs of job "
            f"{self.job!r} use one checkpoint store; end one of them, or give it another name or store."
        )

    def _collect(self, keep: int) -> int:
        kept: list[Manifest] = []
        old: list[int] = []
        for epoch in self.epochs():
            if len(kept) == keep:
                old.append(epoch)
                continue
            try:
                kept.append(self.read_manifest(epoch))
            except SnapshotDamaged:
                if kept:  # of no use to anyone; a newer one than all that are whole stays for people to look at
                    old.append(epoch)
        if not kept:
            return 0
        # Manifests first: who is stopped on the way leaves blobs without a manifest, never the other way round.
        deleted = self._delete([_manifest_name(epoch) for epoch in old])
        if deleted < len(old):
            return deleted
        needed = {blob.name for manifest in kept for blob in manifest.blobs()}
        newest = kept[0].epoch
        stale = []
        for name in self._ours():
            match = _OUR_BLOB.fullmatch(name) or _OUR_MANIFEST.fullmatch(name)
            assert match is not None
            if int(match.group(1)) <= newest and name not in needed and not _MANIFEST.fullmatch(name):
                stale.append(name)
        return deleted + self._delete(stale)

    def _ours(self) -> list[str]:
        """All files that the store has written, hidden ones too."""
        try:
            names = self._files.names(_SNAPSHOTS) + self._files.names(_MANIFESTS)
        except Exception as error:
            raise self._failed("list", "", error) from error
        return [name for name in names if _is_ours(name)]

    def _delete(self, names: list[str]) -> int:
        """Delete files, and return how many. A file system that does not answer is asked no further."""
        silent = False

        def delete(name: str) -> int:
            nonlocal silent
            if silent:
                return 0
            try:
                self._files.delete(name)
            except Exception as error:
                problem = self._failed("delete", name, error)
                silent = isinstance(problem, StoreUnreachable)
                self._complain(problem)
                return 0
            return 1

        if self._files.remote and len(names) > 1:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                return sum(pool.map(delete, names))
        return sum(map(delete, names))

    def _complain(self, error: StoreError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("old snapshots of job %s stay for now (told once): %s", self.job, error)

    def _path(self, name: str) -> str:
        return f"{self.place}/{name}" if name else self.place

    def _failed(self, doing: str, name: str, error: Exception) -> StoreError:
        return _store_error(f"cannot {doing} {self._path(name)}", error)


def _opened_before(text: str, job: str, durable: bool) -> Store:
    return Store(_open_files(text, job, durable, False), job, (text, job, durable))


def may_pass(error: StoreError) -> bool:
    """Whether it is the file system that fails or refuses: a disk that is full or read-only for a while may come
    back, and rights that were taken away may be given again. To a job that has long been running it matters."""
    if isinstance(error, SnapshotDamaged):
        return False
    return isinstance(error, StoreUnreachable) or isinstance(error.__cause__, OSError)


_OLDER = "Its epoch cannot be used; an older one may."


def _is_ours(name: str) -> bool:
    return bool(_OUR_BLOB.fullmatch(name) or _OUR_MANIFEST.fullmatch(name))


def _manifest_name(epoch: int) -> str:
    return f"{_MANIFESTS}/{epoch:010d}.json"


def _store_error(what: str, error: Exception) -> StoreError:
    """The error of ours for one that a file system raised."""
    if isinstance(error, PenstockError):
        assert isinstance(error, StoreError)
        return error
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    reason = _one_line(reason)
    what = f"the checkpoint store {what}: {reason}."
    if number in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnreachable(f"{what} Free some space or raise the quota there; the epoch is lost, the next may do.")
    if number == errno.EFBIG:
        return StoreError(f"{what} Raise the limit on the size of files (ulimit -f), or use another file system.")
    if isinstance(error, PermissionError) or number == errno.EROFS or any(word in reason for word in _REFUSALS):
        return StoreError(
            f"{what} Give the user or the keys that run the job the right to read, write and delete there."
        )
    if number in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
        return StoreError(f"{what} Something else has that name; use another directory.")
    return StoreUnreachable(f"{what} Look whether it is up and can be reached from this node; a later try may work.")


def _one_line(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= 500 else f"{text[:500]}..."


class Files(Protocol):
    """What a store needs of a file system: files in folders of the job's directory, by names with one '/'.

    It raises whatever the file system raises, FileNotFoundError for a file that is not there.
    """

    place: str  # for messages
    remote: bool  # waiting is most of what a call takes

    def write(self, name: str, parts: Sequence[memoryview], flush: bool) -> None:
        """Write a file so that nobody sees half of it."""

    def read(self, name: str) -> bytes: ...

    def names(self, folder: str) -> list[str]:
        """The files in a folder, hidden ones too; none when it does not exist."""

    def delete(self, name: str) -> None:
        """Gone is fine."""

    def destroy(self, folders: Sequence[str], ours: Callable[[str], bool]) -> None:
        """Delete the files in these folders that are ours, and the directories that this leaves empty."""


class LocalFiles:
    """A directory, by plain system calls: these name the reason of a failure, and pyarrow need not be loaded."""

    remote = False

    def __init__(self, root: str, durable: bool) -> None:
        self.place = self._root = root
        self._durable = durable

    def write(self, name: str, parts: Sequence[memoryview], flush: bool) -> None:
        target = f"{self._root}/{name}"
        folder, _, last = target.rpartition("/")
        hidden = f"{folder}/.{last}.{os.urandom(6).hex()}.tmp"
        flush = flush or self._durable
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        made: list[str] = []
        try:
            descriptor = os.open(hidden, flags, 0o666)
        except FileNotFoundError:
            made = self._missing(folder)
            os.makedirs(folder, exist_ok=True)
            descriptor = os.open(hidden, flags, 0o666)
        try:
            try:
                for part in parts:
                    rest = part
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                if flush:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(hidden, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(hidden)
            raise
        for directory in {*map(os.path.dirname, made), *([folder] if flush else [])}:
            _flush_directory(directory)

    def read(self, name: str) -> bytes:
        with open(f"{self._root}/{name}", "rb", buffering=0) as file:
            return file.read()

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
            with suppress(OSError):  # it has other things in it, or is gone
                os.rmdir(f"{self._root}/{folder}")
        with suppress(OSError):
            os.rmdir(self._root)

    def _missing(self, folder: str) -> list[str]:
        """The directories that would have to be made for a folder to be there."""
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        return missing


def _flush_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # what says so has nothing to flush
            raise
    finally:
        os.close(descriptor)


class ArrowFiles:
    """A file system of pyarrow.fs. `rename`: how to move a file, where one that is being written can be seen."""

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

    def write(self, name: str, parts: Sequence[memoryview], flush: bool) -> None:
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
            with suppress(Exception):
                self._system.delete_file(hidden)
            raise

    def read(self, name: str) -> bytes:
        with self._system.open_input_file(f"{self._root}/{name}") as file:
            data: bytes = file.read()
        return data

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
                self._delete_directory(f"/{folder}")  # object stores delete a thousand files in one request
            else:
                for name in filter(ours, names):
                    self.delete(name)
        if not self._list(""):
            self._delete_directory("")

    def _delete_directory(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._system.delete_dir(self._root + folder)

    def _list(self, folder: str) -> list[Any]:
        from pyarrow.fs import FileSelector

        if self._refresh is not None:
            self._refresh()
        base = f"{self._root}/{folder}".rstrip("/")
        found = self._system.get_file_info(FileSelector(base, allow_not_found=True))
        # A place that shows directories by an empty object may list that too.
        return [entry for entry in found if entry.path.strip("/") != base.strip("/")]

    def _write(self, path: str, parts: Sequence[memoryview]) -> None:
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


def _open_files(url: str, job: str, durable: bool, look: bool) -> Files:
    """`look`: whether it can be used, as far as can be seen."""
    match = _URL.fullmatch(url)
    if match is None:
        scheme, colon, _ = url.partition(":")
        if colon and scheme in ("file", "s3", "memory", *_ARROW):
            raise StoreError(f"checkpoint store {url!r}: a URL has '//' after {scheme}:, a directory has no {scheme}:")
        return _open_local(url, job, durable, look)
    scheme = match.group(1).lower()
    place = _place(url, job)
    try:
        if scheme == "file":
            return _open_local(_file_path(url), job, durable, look)
        if scheme == "s3":
            return _open_s3(url, job, place, look)
        if scheme in _ARROW:
            return _open_arrow(url, scheme, job, place)
        return _open_fsspec(url, scheme, job, place)
    except StoreError:
        raise
    except Exception as error:
        text = _one_line(str(error).replace(url, place))  # the URL may have keys in it
        if "libhdfs" in text or "libjvm" in text:
            raise StoreError(
                f"checkpoint store {place}: HDFS needs Java and Hadoop's native library on every node "
                f"(JAVA_HOME, HADOOP_HOME, CLASSPATH): {text}"
            ) from None
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise _store_error(f"cannot open {place}", OSError(text)) from None
        raise StoreError(f"checkpoint store {place} cannot be opened: {text}. Correct the URL.") from None


def _place(url: str, job: str) -> str:
    """A URL for people: keys and options left out."""
    scheme, _, rest = url.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".rstrip("/") + f"/{job}"


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path.startswith("/"):
        raise StoreError(f"checkpoint store {url!r}: write file:///path, with three slashes and nothing after the path")
    return unquote(parts.path)


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
    if not os.access(there, os.W_OK | os.X_OK):
        raise StoreError(
            f"checkpoint store {root}: no permission to write in {there}. "
            "Give the user that runs the job the right to, or use another directory."
        )
    return LocalFiles(root, durable)


def _open_s3(url: str, job: str, place: str, look: bool) -> Files:
    """pyarrow's own reading of S3 URLs takes neither timeouts nor retries, so this is ours."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, FileType, S3FileSystem, resolve_s3_region

    parts = urlsplit(url)
    keys, _, bucket = parts.netloc.rpartition("@")
    root = "/".join([bucket, *filter(None, unquote(parts.path).split("/"))])
    if not bucket:
        raise StoreError(f"checkpoint store {place}: the bucket is missing; write s3://bucket/prefix")
    options: dict[str, Any] = {"connect_timeout": _CONNECT_SECONDS, "request_timeout": _REQUEST_SECONDS}
    attempts = _ATTEMPTS
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "attempts":
            attempts = int(_number(place, name, value))
        elif name in ("connect_timeout", "request_timeout"):
            options[name] = _number(place, name, value)
        elif name in ("anonymous", "force_virtual_addressing"):
            options[name] = value.lower() in ("", "1", "true", "yes")
        elif name in _S3_OPTIONS:
            options[name] = value
        else:
            known = ", ".join(sorted({*_S3_OPTIONS, *_S3_MORE}))
            raise StoreError(f"checkpoint store {place}: S3 has no option {name!r}; it has {known}")
    if keys:
        key, _, secret = keys.partition(":")
        options |= {"access_key": unquote(key), "secret_key": unquote(secret)}
    located = "region" in options or "endpoint_override" in options
    if not located and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        options["region"] = resolve_s3_region(bucket)
    # Delayed: a small object is one request, instead of the three of an upload in parts.
    system = S3FileSystem(
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=attempts), allow_delayed_open=True, **options
    )
    try:
        missing = look and system.get_file_info(bucket).type == FileType.NotFound
    except OSError as error:
        problem = _store_error(f"cannot open {place}", error)
        if isinstance(problem, StoreUnreachable):
            raise problem from error
        missing = False  # keys that may not look at the bucket may still be good for what is in it
    if missing:
        raise StoreError(f"checkpoint store {place}: there is no bucket {bucket!r}; make it, or correct the URL")
    return ArrowFiles(system, f"{root}/{job}", place)


_S3_OPTIONS = frozenset(
    (
        "region",
        "scheme",
        "endpoint_override",
        "session_token",
        "role_arn",
        "session_name",
        "external_id",
        "tls_ca_file_path",
    )
)
_S3_MORE = (
    "anonymous",
    "attempts",
    "connect_timeout",
    "force_virtual_addressing",
    "request_timeout",
)


def _number(place: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise StoreError(f"checkpoint store {place}: {name}={value!r}; it must be a number from 1 to 3600")
    return number


def _open_arrow(url: str, scheme: str, job: str, place: str) -> Files:
    from pyarrow.fs import FileSystem

    if scheme in ("gs", "gcs"):
        parts = urlsplit(url)
        options = {"retry_limit_seconds": _GCS_SECONDS, **dict(parse_qsl(parts.query))}
        url = parts._replace(query=urlencode(options)).geturl()
    system, root = FileSystem.from_uri(url)
    root = root.rstrip("/")
    if not root and scheme not in ("hdfs", "viewfs"):
        raise StoreError(f"checkpoint store {place}: the bucket is missing; write {scheme}://bucket/prefix")
    rename = system.move if scheme in ("hdfs", "viewfs") else None
    return ArrowFiles(system, f"{root}/{job}", place, rename)


def _open_fsspec(url: str, scheme: str, job: str, place: str) -> Files:
    try:
        url_to_fs = import_module("fsspec.core").url_to_fs
    except ImportError:
        known = ", ".join(("file", "s3", *_ARROW))
        raise StoreError(
            f"checkpoint store {place}: {scheme}:// needs the package fsspec (pip install fsspec), on every node. "
            f"Without it Penstock knows directories and {known}."
        ) from None
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    try:
        system, root = url_to_fs(url)
    except ImportError as error:
        raise StoreError(f"checkpoint store {place}: {scheme}:// needs one more package: {error}") from None
    except ValueError as error:
        text = str(error).replace(url, place)
        raise StoreError(f"checkpoint store {place}: fsspec cannot open it: {text}. Correct the URL.") from None
    files = PyFileSystem(FSSpecHandler(system))
    rename = None if scheme in _OBJECTS.split() else system.mv
    return ArrowFiles(files, f"{root.rstrip('/')}/{job}", place, rename, system.invalidate_cache)
