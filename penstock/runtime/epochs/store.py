"""The checkpoint store: the files in which a job's snapshots and manifests are kept.

    <url>/<job>/snapshots/000012-7-0          a blob: part of the state that task 7 saved for epoch 12
    <url>/<job>/manifests/0000000012.json     what epoch 12 consists of; see runtime/epochs/manifest.py
    <url>/<job>/copies/                       manifests, and blobs in a directory, a second time under their own names

Epochs are numbered 1, 2, 3, ... Many processes first write blobs, and then one process writes the manifest: the epoch
is complete exactly when its manifest is there and undamaged. A process that is killed on the way leaves blobs without a
manifest. Nobody reads them, and `collect` deletes them.

In a directory, the job loses nothing whatever happens to any single file. All epochs that are kept build on the same
older snapshots, so that an older epoch is no way out, and sinks could not take back what they have committed. So each
file is there twice. A reader that finds one file missing or damaged reads the other, and the missing one is written
again. Object stores keep several copies of each object themselves, so blobs are there once.

What must never happen:

- A half-written file has a name that somebody reads. In a directory, a hidden file is written first, and gets its name
  in one step when it is complete. An object store shows an object when all of it has arrived.
- Damaged bytes are taken for a snapshot. The manifest has the size and CRC-32 of each blob, and every read checks them.
- A store that does not answer is taken for an empty or a damaged one. The job would then start from an older epoch than
  it must, or from the beginning. So StoreUnreachable and SnapshotDamaged are strictly distinguished.
- A file is deleted although a manifest that is kept refers to it, or it belongs to an epoch that is not complete yet,
  or it is not ours. Only files whose names have the two patterns above are ever deleted, so the directory may contain
  other files.
- Two runs of a job use one store, and each deletes what the other needs. Whoever runs the job locks its directory
  before anything is read, written or deleted. Object stores have no such lock.
- Other users can read a file. The directories that are created are open to their owner alone (0700), and so are the
  files (0600).

Whoever can write to the store can make the job load any code. Give it the same rights as the program itself. The
manifest that completes an epoch is this project's own; the caches of docs/papers.md: D5 keep only what came since.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain as one_after_the_other
from tempfile import TemporaryFile, gettempdir
from typing import IO, Any, TypeVar

from penstock.runtime.epochs.files import PIECE_BYTES, Files, NotAsWritten, open_files, store_error
from penstock.runtime.epochs.manifest import MANIFEST_BYTES_MAX, Blob, Manifest, decode, encode
from penstock.runtime.errors import PenstockError, SnapshotDamaged, StoreError, StoreUnreachable
from penstock.runtime.records.codec import Buffer
from penstock.runtime.storage import filesystems
from penstock.runtime.storage.directory_lock import DirectoryLocked

logger = logging.getLogger(__name__)

_Found = TypeVar("_Found")

#: A blob of at most this many bytes is kept in the manifest, because a file for it would cost more than its bytes.
INLINE_BYTES = 4 << 10

_SNAPSHOTS = "snapshots"
_MANIFESTS = "manifests"
_COPIES = "copies"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}")  # the same as for the names of flows
_BLOB = re.compile(r"snapshots/\d{6,}-[A-Za-z0-9_.\-]+")
_MANIFEST = re.compile(r"(?:manifests|copies)/(\d{10})\.json")
#: The names of all files that a store writes, hidden ones included, with the number of the epoch.
_OUR_BLOB = re.compile(r"(?:snapshots|copies)/\.?(\d{6,})-[A-Za-z0-9_.\-]+")
_OUR_MANIFEST = re.compile(r"(?:manifests|copies)/\.?(\d{10})\.json(\.[0-9a-f]{12}\.tmp)?")
_HIDDEN = re.compile(r"^\.(.+)\.[0-9a-f]{12}\.tmp$")  # the name of a file while it is written
_OUR_ENDED = re.compile(r"manifests/\.?ended(\.[0-9a-f]{12}\.tmp)?")
_ENDED = "manifests/ended"
_ENDED_BYTES_MAX = 100  # of the note that the job has ended, which is one word
_SMALL_BYTES = 4 << 20  # blobs up to this size are read at once
_AT_ONCE = 8  # deletions at the same time; each takes up to three requests to an object store


class Store:
    """The checkpoint store of one job; see the module's docstring. Use `Store.open`.

    Any number of processes and threads may open the same store and put blobs. Only one at a time may write manifests
    and collect. A store can be pickled. It is opened where it is unpickled, without a check whether it can be used at
    that moment, because a process may have to start while the store does not answer.

    All methods raise StoreUnreachable when the file system does not answer or has no room, within about a minute if the
    file system allows a choice, and StoreError when it refuses for good.
    """

    def __init__(self, files: Files, job: str, again: tuple[Any, ...] | None = None) -> None:
        self.job = job
        self._files = files
        self._again = again
        self._complained = False
        self.inline_bytes = INLINE_BYTES
        #: Called with a description when a second copy had to be read, besides the warning in the log.
        self.second_copy_read: Callable[[str], None] = lambda problem: None

    @classmethod
    def open(cls, url: str | os.PathLike[str], job: str, durable: bool = False) -> Store:
        """Opens the store of a job below `url`. Nothing is created yet.

        `url` is a directory (which all nodes must share), or file://, s3://bucket/prefix, gs://, hdfs://, abfs://, or
        anything that the package fsspec opens, if that is installed. For S3, the keys come from the environment or are
        given as s3://key:secret@bucket/prefix, and the options of pyarrow.fs.S3FileSystem as
        ?region=...&endpoint_override=...

        `durable`: flush every blob to the disk before it counts as written. Without this, what a process has written
        still outlives the death of the process. Only a machine that loses its power loses what the kernel has not
        written yet. Manifests are always flushed, so in that case the newest epochs are at worst found damaged, and an
        older one is used. Object stores answer only when they have stored a blob, whatever `durable` says.

        Raises StoreError when the URL is wrong, a library is missing, or the place cannot be written to, as far as this
        can be seen without writing. `check` makes sure.
        """
        text = os.fspath(url)
        if not isinstance(text, str) or not text:
            raise StoreError(f"the checkpoint store needs a directory or a URL, got {url!r}")
        if not _JOB.fullmatch(job):
            raise StoreError(f"no job can be named {job!r}: use up to 100 letters, digits, '_', '.' and '-'")
        files = open_files(text, job, durable, True)
        if not filesystems.is_url(text):
            text = os.path.abspath(os.path.expanduser(text))  # other processes may have other working directories
        return cls(files, job, (text, job, durable))

    def flushed(self) -> Store:
        """Returns the same store, which flushes every blob: it is `durable`."""
        assert self._again is not None, "only a store from Store.open"
        text, job, _ = self._again
        return _opened_before(text, job, True)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._again is None:
            raise TypeError("only a store from Store.open can be pickled")
        return _opened_before, self._again

    def __repr__(self) -> str:
        return f"Store({self.place!r})"

    @property
    def place(self) -> str:
        """The place for people to read, without keys and options."""
        return self._files.place

    @property
    def remote(self) -> bool:
        """Whether the store is not a directory. Then most of the time of a call is waiting, and reading may cost
        money."""
        return self._files.remote

    def lock(self) -> None:
        """Lock this store against other jobs until `release`, or until this process ends. An object store cannot be
        locked. Raises DirectoryLocked while another process has the lock."""
        try:
            with self._trying("lock"):
                self._files.lock()
        except DirectoryLocked:
            raise DirectoryLocked(self.locked_by_another()) from None

    def release(self) -> None:
        """Releases the lock, if there is one."""
        self._files.release()

    def is_locked(self) -> bool:
        """Whether a process, perhaps this one, has locked it now. Nothing is created or changed."""
        return self._files.is_locked()

    def locked_by_another(self) -> str:
        """Returns the message for a user who cannot have the store."""
        return (
            f"a job named {self.job!r} is running and uses the checkpoint store {self.place}, maybe on another cluster "
            f"or from another program; stop that job (penstock.attach({self.job!r}).stop(), or penstock stop "
            f"{self.job}; a local job only in the program that runs it), use another checkpoint store "
            "(checkpoints=..., or --checkpoints), or give the flow another name"
        )

    def check(self) -> None:
        """Writes a small file and deletes it, to raise StoreError now and not at the first epoch."""
        name = f"{_SNAPSHOTS}/000000-check-{os.urandom(6).hex()}"
        with self._trying("write in"):
            for again in (True, False):
                try:
                    self._files.write(name, [memoryview(b"Penstock was here")], False)
                    self._files.delete(name)
                    return
                except FileNotFoundError:  # a job of this name that just begins has removed the directory
                    if not again:
                        raise

    def tidy(self) -> None:
        """Removes the directories that `check` has made for a job that was then not started, if they are empty. Nothing
        happens while a job uses the store."""
        if not self._files.remote and not self._files.is_locked():
            with self._trying("delete"):
                self._files.destroy((_SNAPSHOTS,), lambda name: False)

    def put(self, name: str, parts: Sequence[Buffer]) -> Blob:
        """Writes a blob that consists of these parts. When this returns, all readers find the blob.

        `name` is "snapshots/<epoch>-<rest>", with at least 6 digits, because `collect` decides by the number. A blob of
        the same name is replaced. The state of a task may be written twice, when the task is started again while an old
        process of it is still running, so `rest` must distinguish the two.

        A blob of at most `inline_bytes` is not written. It becomes part of the Blob, and so of the manifest.
        """
        assert _BLOB.fullmatch(name), f"{name!r} is no name of a blob"
        views = [memoryview(part).cast("B") for part in parts]
        checksum = 0
        for view in views:
            checksum = zlib.crc32(view, checksum)
        size = sum(view.nbytes for view in views)
        if size <= self.inline_bytes:
            return Blob(name, size, checksum, b"".join(views))
        self._write(name, views, False)
        return Blob(name, size, checksum)

    def _write(self, name: str, views: Sequence[memoryview], flush: bool) -> None:
        """Writes a file, and its copy if it has one. With `flush`, the file itself is flushed to the disk."""

        def write(one: str) -> None:
            with self._trying("write", one):
                self._files.write(one, views, flush and one == name)

        names = self._files_of(name)
        if self._files.remote and len(names) > 1:  # at the same time, because most of a request's time is waiting
            with ThreadPoolExecutor(len(names)) as pool:
                list(pool.map(write, names))
        else:
            for one in names:
                write(one)

    def _files_of(self, name: str) -> tuple[str, ...]:
        """Returns the names of a file and of its copy. A blob of an object store has no copy."""
        return (name,) if self._files.remote and name.startswith(_SNAPSHOTS) else _both(name)

    def get(self, blob: Blob) -> bytes:
        """Returns the bytes of a blob, or of its copy. Raises SnapshotDamaged when no file has the bytes that were
        put."""
        if blob.data is not None:
            return self._checked(blob, blob.name, blob.data)
        return self._of_either(blob.name, lambda name: self._get(blob, name))

    def pieces(self, blob: Blob) -> Iterator[Buffer]:
        """Yields the bytes of a blob, or of its copy, in pieces, so that only few of them are in memory at a time.

        All bytes are read and checked before the first piece is yielded, so this raises the errors of `get` before
        anybody has used a piece. If the file changes after that check, SnapshotDamaged follows the last piece. A blob
        of another machine is fetched once, and waits in a temporary file.
        """
        if blob.data is not None or blob.size <= _SMALL_BYTES:
            yield self.get(blob)
            return
        with TemporaryFile() if self.remote else nullcontext() as spool:
            name = self._of_either(blob.name, lambda name: self._looked_through(blob, name, spool))
            yield from self._verified(
                blob, name, self._files.pieces(name, blob.size) if spool is None else _pieces_of(spool)
            )

    def _looked_through(self, blob: Blob, name: str, spool: IO[bytes] | None) -> str:
        """Returns the name of the file or copy of a blob whose bytes are all as they were put. These bytes are then in
        the spool."""
        if spool is None:
            deque(self._read_through(blob, name), maxlen=0)
            return name
        spool.seek(0)
        spool.truncate()
        for piece in self._read_through(blob, name):
            try:
                spool.write(piece)
            except OSError as error:
                raise StoreUnreachable(
                    f"{self._path(name)} has {blob.size:,} bytes, which have no room in {gettempdir()} while they are "
                    f"read: {error.strerror}. Free some space there, or set TMPDIR to another directory."
                ) from error
        spool.seek(0)
        return name

    def _of_either(self, name: str, read: Callable[[str], _Found]) -> _Found:
        """Reads a file, or else its copy. When neither can be read and one of the two did not answer, nobody knows
        whether that one is damaged. Then the error of that one is raised, and not SnapshotDamaged."""
        errors: list[StoreError] = []
        for one in self._files_of(name):
            try:
                found = read(one)
            except StoreError as error:
                errors.append(error)
                continue
            if errors:
                logger.warning(
                    "job %s reads the second copy of a file in its checkpoint store: %s", self.job, errors[0]
                )
                self.second_copy_read(str(errors[0]))
            return found
        raise _of_neither(errors)

    def put_pieces(self, name: str, pieces: Iterable[Buffer]) -> Blob:
        """Writes a blob as `put` does, from pieces that need not all be in memory at once. Errors of producing the
        pieces are raised unchanged, because they say nothing about the store."""
        assert _BLOB.fullmatch(name), f"{name!r} is no name of a blob"
        first: list[bytes] = []
        size = checksum = 0
        pieces = iter(pieces)
        for piece in pieces:
            first.append(bytes(piece))
            size += len(first[-1])
            if size > _SMALL_BYTES:
                break
        else:
            return self.put(name, first)
        size = 0
        not_made: list[Exception] = []

        def counted() -> Iterator[Buffer]:
            nonlocal size, checksum
            try:
                for piece in one_after_the_other(first, pieces):
                    size += memoryview(piece).nbytes
                    checksum = zlib.crc32(piece, checksum)
                    yield piece
            except Exception as error:  # whatever it is, because a file system may raise another error in its place
                not_made.append(error)
                raise

        try:
            with self._trying("write", name):
                self._files.write(name, counted(), False)
        except StoreError:
            if not_made:
                raise not_made[0] from not_made[0].__cause__
            raise
        blob = Blob(name, size, checksum)
        for copy in self._files_of(name)[1:]:
            self._write_again(blob, name, copy)
        return blob

    def _write_again(self, blob: Blob, source: str, target: str) -> None:
        """Writes one file of a blob again from the other file, which is checked on the way."""
        with self._trying("write", target):
            self._files.write(target, self._read_through(blob, source), False)

    def _get(self, blob: Blob, name: str) -> bytes:
        with self._trying("read", name, missing=f"; {blob.size:,} bytes were written."):
            data = self._files.read(name, blob.size)
        return self._checked(blob, name, data)

    def _checked(self, blob: Blob, name: str, data: bytes) -> bytes:
        if len(data) != blob.size:
            raise SnapshotDamaged(f"{self._path(name)} has {len(data):,} bytes; {blob.size:,} were written.")
        self._check_sum(blob, name, zlib.crc32(data))
        return data

    def _check_sum(self, blob: Blob, name: str, found: int) -> None:
        if found != blob.checksum:
            raise SnapshotDamaged(
                f"{self._path(name)} has changed since it was written: its checksum is {found:08x} and was "
                f"{blob.checksum:08x}."
            )

    # --- looking after what there is -----------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the files of blobs and manifests, and of their copies, by name."""
        with self._trying("list"):
            return {
                name: size
                for folder in (_SNAPSHOTS, _MANIFESTS, _COPIES)
                for name, size in self._files.sizes(folder).items()
            }

    def mend(self, blob: Blob, there: Mapping[str, int]) -> str | None:
        """Examines a blob if its files are not among the files that are `there`, with the right sizes. `there` has
        names and sizes.

        A list of names alone never proves that a blob is lost: a shared file system may show a list that is some
        seconds old, but whoever opens a file gets the file.
        """
        if blob.data is not None or all(there.get(name) == blob.size for name in self._files_of(blob.name)):
            return None
        return result_of(self.examine(blob))

    def examine(self, blob: Blob) -> Generator[int, None, str | None]:
        """Reads the file of a blob and its copy. When one of them cannot be read, or is damaged, it is written again
        from the other.

        It yields the size of each piece that it reads. It returns a description of what was wrong, or None, also when
        only the copy was missing: that is no damage, because whoever writes both may die in between. It raises
        SnapshotDamaged when both are damaged, and the error of reading when nobody knows whether they are.
        """
        if blob.data is not None:
            return None
        errors: dict[str, StoreError] = {}
        for name in self._files_of(blob.name):
            try:
                for piece in self._read_through(blob, name):
                    yield len(piece)
            except StoreError as error:
                errors[name] = error
        if not errors:
            return None
        whole = [name for name in self._files_of(blob.name) if name not in errors]
        if not whole:
            raise _of_neither(list(errors.values()))
        ((damaged, problem),) = errors.items()
        self._write_again(blob, whole[0], damaged)
        if _is_missing_copy(damaged, problem.__cause__):
            self._note_copy(damaged)
            return None
        return f"{problem} It was written again from {self._path(whole[0])}."

    def _read_through(self, blob: Blob, name: str) -> Iterator[bytes]:
        """Yields the pieces of a file of a blob. Raises SnapshotDamaged after the last one when they are not what was
        put."""
        return self._verified(blob, name, self._files.pieces(name, blob.size))

    def _verified(self, blob: Blob, name: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yields these pieces of a blob, which came from the file of this name. Raises SnapshotDamaged after the last
        one when they are not what was put."""
        size = checksum = 0
        with self._trying("read", name, missing=f"; {blob.size:,} bytes were written."):
            for piece in pieces:
                size += len(piece)
                checksum = zlib.crc32(piece, checksum)
                yield piece
        if size != blob.size:
            raise SnapshotDamaged(f"{self._path(name)} has {size:,} bytes; {blob.size:,} were written.")
        self._check_sum(blob, name, checksum)

    def _note_copy(self, name: str) -> None:
        logger.warning(
            "job %s: in its checkpoint store, the second copy %s of a file was missing, and was written again. Nothing "
            "was lost.",
            self.job,
            self._path(name),
        )

    def mend_manifest(self, manifest: Manifest) -> str | None:
        """Writes the file of a complete epoch's manifest again, or its copy, if it is not as it was written. Returns
        what `examine` returns."""
        data = encode(manifest)
        problems = []
        for name in _both(_manifest_name(manifest.epoch)):
            problem: str | None = "is damaged"
            with self._trying("read", name):
                try:
                    if self._files.read(name, len(data)) == data:
                        continue
                except FileNotFoundError as error:
                    problem = None if _is_missing_copy(name, error) else _not_there(error)
            with self._trying("write", name):
                self._files.write(name, [memoryview(data)], True)
            if problem is None:
                self._note_copy(name)
            else:
                problems.append(f"{self._path(name)} {problem}.")
        return f"{' '.join(problems)} It was written again." if problems else None

    # --- manifests -----------------------------------------------------------------------------------------------

    def write_manifest(self, manifest: Manifest) -> None:
        """Writes the manifest of an epoch, which makes the epoch complete. Its blobs have been put already, and epochs
        are completed in order.

        After StoreUnreachable nobody knows whether the manifest is there: the request may have arrived, or may still
        arrive. Then write it again, as often as necessary, or continue with the next number and be ready to start from
        either.

        Raises StoreError when the epoch is complete with other contents, because then two runs of the job write here.
        (This is best effort: when two do so at the same moment, the later one wins.)
        """
        assert manifest.job == self.job, f"a manifest of {manifest.job!r} in the store of {self.job!r}"
        assert manifest.epoch >= 1
        data = encode(manifest)
        name = _manifest_name(manifest.epoch)
        if self._is_missing(name, manifest):
            self._write(name, [memoryview(data)], True)

    def epochs(self) -> list[int]:
        """Returns the epochs that have a manifest, undamaged or not, newest first.

        The next epoch of a job has a higher number than all of these, and than any that the job has tried since.
        """
        with self._trying("list", _MANIFESTS):
            names = self._files.names(_MANIFESTS) + self._files.names(_COPIES)
        found = map(_MANIFEST.fullmatch, names)
        return sorted({int(match.group(1)) for match in found if match}, reverse=True)

    def read_manifest(self, epoch: int) -> Manifest:
        """Reads a manifest, or its copy. Raises SnapshotDamaged when both are damaged, and StoreError when a release
        with another format wrote it."""
        return self._of_either(_manifest_name(epoch), lambda name: self._read_manifest(epoch, name))

    def _read_manifest(self, epoch: int, name: str) -> Manifest:
        where = self._path(name)
        with self._trying("read", name, missing=f": epoch {epoch} is not complete."):
            data = self._files.read(name, MANIFEST_BYTES_MAX)
        manifest = decode(data, where)
        if (manifest.job, manifest.epoch) != (self.job, epoch):
            raise SnapshotDamaged(
                f"{where} is the manifest of epoch {manifest.epoch} of job {manifest.job!r}: somebody renamed or "
                "copied it. A job's directory cannot be used under another name."
            )
        return manifest

    def forget_after(self, epoch: int) -> None:
        """Deletes the manifests of all later epochs, so that no job ever starts from them again."""
        for later in self.epochs():
            if later > epoch:
                for name in _both(_manifest_name(later)):
                    with self._trying("delete", name), suppress(FileNotFoundError):
                        self._files.delete(name)

    def verify(self, manifest: Manifest) -> None:
        """Reads all blobs of a manifest, in pieces. Raises SnapshotDamaged when a blob and its copy are damaged."""

        def read(blob: Blob, name: str) -> None:
            deque(self._read_through(blob, name), maxlen=0)

        for blob in dict.fromkeys(manifest.blobs()):
            if blob.data is not None:
                self._checked(blob, blob.name, blob.data)
            else:
                self._of_either(blob.name, partial(read, blob))

    def latest(self, usable: Callable[[Manifest], None] | None = None) -> tuple[Manifest, list[str]] | None:
        """Returns the newest usable epoch, with descriptions of the faults of newer ones, or None when there are no
        epochs yet.

        `usable`, for example `verify`, may raise SnapshotDamaged for an epoch whose manifest is undamaged. This method
        raises SnapshotDamaged when there are epochs and none of them is usable: it is the user who decides to start
        from the beginning.
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

    def collect(self, keep: int, spare: Container[str] = ()) -> int:
        """Deletes all epochs but the newest `keep` usable ones, and the blobs that none of these needs. The blobs of
        the names in `spare` stay, also while they are being written: a later manifest may refer to them. Another thread
        may add a name before it writes the blob, because `spare` is asked about files that are there.

        Blobs and hidden files of epochs after the newest usable one stay, because they may belong to an epoch that is
        not complete yet. The number decides and not the age, because a blob can be older than the manifest of the epoch
        before it.

        Returns how many files it has deleted. What cannot be deleted is left for the next time, and the log says so
        once. The same holds when the store does not answer.
        """
        assert keep >= 1, f"keep={keep}: without an epoch the job could not start again"
        try:
            return self._collect(keep, spare)
        except StoreError as error:
            self._complain(error)
            return 0

    def end(self, state: str) -> None:
        """Notes that the job has ended, and that no job may continue from its epochs although they are still there."""
        with self._trying("write", _ENDED):
            self._files.write(_ENDED, [memoryview(state.encode())], False)

    def ended(self) -> str | None:
        """Returns the state in which the job ended, if `end` has noted it and `destroy` was not called since."""
        with self._trying("read", _ENDED), suppress(FileNotFoundError):
            return bytes(self._files.read(_ENDED, _ENDED_BYTES_MAX)).decode()
        return None

    def check_format(self) -> None:
        """Raises StoreError when another release has written here, in a format that this release does not read."""
        for epoch in self.epochs():
            with suppress(SnapshotDamaged):
                self.read_manifest(epoch)

    def destroy(self) -> None:
        """Deletes everything that the store has written for the job, last of all the note that the job has ended. It is
        no error if nothing is there."""
        with self._trying("delete"):
            self._files.destroy((_SNAPSHOTS, _COPIES, _MANIFESTS), _is_ours)
            self._files.destroy((_MANIFESTS,), lambda name: _OUR_ENDED.fullmatch(name) is not None)

    def _is_missing(self, name: str, manifest: Manifest) -> bool:
        """Whether the manifest of the epoch must be written, because it is missing or damaged."""
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

    def _collect(self, keep: int, spare: Container[str]) -> int:
        kept: list[Manifest] = []
        old: list[int] = []
        for epoch in self.epochs():
            if len(kept) == keep:
                old.append(epoch)
                continue
            try:
                kept.append(self.read_manifest(epoch))
            except SnapshotDamaged:
                # An older damaged manifest is of no use; one that is newer than all usable ones stays for people to
                # look at.
                if kept:
                    old.append(epoch)
        if not kept:
            return 0
        # Manifests come first. A process that dies on the way leaves blobs without a manifest, and never a manifest
        # without blobs.
        deleted = self._delete([name for epoch in old for name in _both(_manifest_name(epoch))])
        if deleted < 2 * len(old):
            return deleted
        needed = {name for manifest in kept for blob in manifest.blobs() for name in self._files_of(blob.name)}
        newest = kept[0].epoch
        stale = []
        for name in self._ours():
            match = _OUR_BLOB.fullmatch(name) or _OUR_MANIFEST.fullmatch(name)
            assert match is not None
            if int(match.group(1)) > newest or name in needed or _MANIFEST.fullmatch(name):
                continue
            blob = _HIDDEN.sub(r"\1", name.rpartition("/")[2])
            if f"{_SNAPSHOTS}/{blob}" not in spare:
                stale.append(name)
        return deleted + self._delete(stale)

    def _ours(self) -> list[str]:
        """Returns all files that the store has written, also hidden ones."""
        with self._trying("list"):
            names = [name for folder in (_SNAPSHOTS, _COPIES, _MANIFESTS) for name in self._files.names(folder)]
        return [name for name in names if _is_ours(name)]

    def _delete(self, names: list[str]) -> int:
        """Deletes files, and returns how many. It stops when the file system does not answer."""
        silent = False

        def delete(name: str) -> int:
            nonlocal silent
            if silent:
                return 0
            try:
                with self._trying("delete", name):
                    self._files.delete(name)
            except StoreError as error:
                silent = isinstance(error, StoreUnreachable)
                self._complain(error)
                return 0
            return 1

        if self._files.remote and len(names) > 1:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                return sum(pool.map(delete, names))
        return sum(map(delete, names))

    def _complain(self, error: StoreError) -> None:
        if not self._complained:
            self._complained = True
            logger.warning(
                "job %s: old snapshots could not be deleted, and are deleted later (further failures are not "
                "logged): %s",
                self.job,
                error,
            )

    def _path(self, name: str) -> str:
        return f"{self.place}/{name}" if name else self.place

    @contextmanager
    def _trying(self, what: str, name: str = "", *, missing: str | None = None) -> Iterator[None]:
        """Raises StoreError in place of an error of a file system. When a file is missing that must be there, it raises
        SnapshotDamaged, and `missing` says what follows from that."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:  # a file system of another machine raises what its libraries raise
            if missing is not None and isinstance(error, FileNotFoundError):
                raise SnapshotDamaged(f"{self._path(name)} {_not_there(error)}{missing}") from error
            raise store_error(f"cannot {what} {self._path(name)}", error) from error


def _opened_before(text: str, job: str, durable: bool) -> Store:
    return Store(open_files(text, job, durable, False), job, (text, job, durable))


def _pieces_of(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE_BYTES):
        yield piece


def _is_missing_copy(name: str, error: BaseException | None) -> bool:
    """Whether a file that could not be read is a second copy that is not there at all."""
    return (
        name.startswith(f"{_COPIES}/") and isinstance(error, FileNotFoundError) and not isinstance(error, NotAsWritten)
    )


def _not_there(error: FileNotFoundError) -> str:
    """Describes the thing in place of a file."""
    return str(error) if isinstance(error, NotAsWritten) else "is missing"


def _is_ours(name: str) -> bool:
    return bool(_OUR_BLOB.fullmatch(name) or _OUR_MANIFEST.fullmatch(name))


def _both(name: str) -> tuple[str, str]:
    """Returns a file and its copy."""
    return name, f"{_COPIES}/{name.rpartition('/')[2]}"


def manifest_files(epoch: int) -> tuple[str, str]:
    """Returns the names of a manifest and of its copy."""
    return _both(_manifest_name(epoch))


def _of_neither(errors: Sequence[StoreError]) -> StoreError:
    """Returns the error for a blob or manifest of which neither the file nor the copy can be read."""
    for error in errors:
        if not isinstance(error, SnapshotDamaged):
            return error
    return SnapshotDamaged(" ".join(map(str, errors)))


def result_of(steps: Generator[object, None, _Found]) -> _Found:
    """Runs a generator to its end, and returns its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: _Found = end.value
            return found


def _manifest_name(epoch: int) -> str:
    return f"{_MANIFESTS}/{epoch:010d}.json"
