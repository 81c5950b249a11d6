"""Writes part files in a job with epochs: the records of a task as a sequence of files, in which each record is once.

A task writes to one hidden file. `prepare` writes out everything and notes the length of the file. When the file is old
or large enough, or the input has ended, it is also closed, and `commit` of that epoch gives it its name. So an endless
job shows results while it runs, and a short epoch makes no more files than a long one.

    .part-00002-0000000061.9f3c07d1.txt.inprogress   written by task 2 since epoch 61 began, by one writer (9f3c07d1)
    part-00002-0000000061.txt                        the same, committed
    part-00002.txt                                   all of a task whose records made only one part

A file that cannot be continued later (Parquet has its index at the end, and an object store cannot append) is closed in
every epoch, and its part has the number of the epoch in which it was closed:

    part-00002-0000000061.parquet                    the records of epoch 61

When an epoch is complete and committed, each of its records must be in exactly one part, and no name may ever be used
for two contents. These rules ensure it:

- The number of a part is the epoch of its first record, or of all its records. The numbers of a task only grow, and no
  two tasks share a name, whatever the parallelism was before. The number also shows what came after epoch 60:
  `restore(60)` deletes higher numbers, also of committed parts, because the job goes back before the last epoch when a
  snapshot is damaged. So nobody needs to know how far a dead writer had come.
- A writer never continues the file of another one, because the other process may be slow rather than dead, and still
  append to the file. `restore` copies the file up to the noted length, which such a *stale* writer has passed already,
  and makes the copy a part at once, because its records belong to complete epochs. This costs one more part for each
  failure. In return each file has one writer, and restoring twice has the same result. A stale writer is never told to
  commit, so it names nothing, and what it has written is deleted when the job has ended well.
- Only the first writers of a job give the plain name, to the first part of a task. A second part would sort before it,
  because "-" comes before ".".
- Each state is given to one task, which finishes what the state describes. Files that no state describes are deleted by
  the task of their index, or by task 0 if no task has this index now. Hidden files up to the restored epoch are deleted
  by the task that has the state of their index. So two tasks that restore at the same time never touch the same file.

Epochs survive the end of a process. When a machine loses power, what is noted but not closed may be lost, and `restore`
then says so. To wait for the disk in each epoch would stop the other tasks of the worker too. Closed parts are on the
disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict

from penstock.runtime.errors import PenstockError
from penstock.runtime.sinks.append import AppendFile
from penstock.runtime.sinks.base import Committable, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.sinks.places import LOCAL, Place, failed_write
from penstock.runtime.sinks.text import Formatter

_COPY = 1 << 20  # bytes read at a time


class PartFile(Protocol):
    """A part file that is being written, of any format."""

    length: int

    def append(self, data: Any) -> None:
        """Adds the formatted form of a list of records."""

    def end_member(self, last: bool = False) -> None:
        """Makes sure that the file is whole if it is truncated after the records that it has now."""

    def flush(self) -> None:
        """Writes the records that are held back."""

    def deleted(self) -> bool:
        """Tells whether somebody has deleted or moved the file, or its folder."""

    def sync(self) -> None:
        """Makes sure that everything is on the disk, and closes the file."""

    def close(self) -> None:
        """Closes the file, and forgets the records that were not written."""


class Begun(TypedDict):
    """Describes a file that is being written, and how much of it belongs to the epoch."""

    hidden: str
    number: int
    length: int


class Closed(TypedDict):
    """The committable: a closed file, which gets its final name."""

    hidden: str
    final: str


class PartsState(TypedDict):
    """The state that `state` returns."""

    epoch: int
    index: int
    suffix: str
    begun: Begun | None
    first: bool  # of the job's first writer of this index: it may use the plain name
    plain: bool  # and has done so
    parts: bool  # the index has parts, or will have when all that is prepared is committed
    finished: bool


@dataclass(frozen=True)
class PartNames:
    """Makes and reads the names of a sink's files."""

    directory: str
    suffix: str
    sink: str = "Files"  # which kind of sink, for the error messages
    place: Place = LOCAL

    def plain(self, index: int) -> str:
        """Returns the name of a task's only part."""
        return f"part-{index:05d}{self.suffix}"

    def numbered(self, index: int, number: int) -> str:
        """Returns the name of one of several parts. The order of the names is the order of the numbers, for as long as
        a job is likely to run."""
        return f"part-{index:05d}-{number:010d}{self.suffix}"

    def hidden(self, index: int, number: int, writer: str) -> str:
        """Returns the hidden name of a part that is being written."""
        return f".part-{index:05d}-{number:010d}.{writer}{self.suffix}.inprogress"

    def path(self, name: str) -> str:
        """Returns the path of a file."""
        return os.path.join(self.directory, name)

    def parts(self) -> Iterator[tuple[str, int, int | None]]:
        """Returns name, index and number (None: a plain name) of each part."""
        matches = re.compile(rf"part-(\d{{5,}})(?:-(\d{{10,}}))?{re.escape(self.suffix)}").fullmatch
        for name in self.place.names(self.directory):
            if match := matches(name):
                yield name, int(match.group(1)), None if match.group(2) is None else int(match.group(2))

    def hidden_ones(self) -> Iterator[tuple[str, int, int]]:
        """Returns name, index and number of each hidden file."""
        matches = re.compile(rf"\.part-(\d{{5,}})-(\d{{10,}})\.[0-9a-f]+{re.escape(self.suffix)}\.inprogress").fullmatch
        for name in self.place.names(self.directory):
            if match := matches(name):
                yield name, int(match.group(1)), int(match.group(2))

    def remove(self, name: str) -> None:
        """Deletes a file, if it exists."""
        self.place.remove(self.path(name))

    def size(self, name: str) -> int | None:
        """Returns the size of a file, or None when there is no such file."""
        return self.place.size(self.path(name))

    def rename(self, name: str, new: str) -> None:
        """Gives a closed file another name."""
        self.place.replace(self.path(name), self.path(new))

    def sync(self) -> None:
        """Makes sure that the names are on the disk."""
        self.place.sync_directory(self.directory)


class PartsWriter(SinkWriter):
    """Writes the parts of one task; see the module's docstring. `open_part(path)` opens a new file. `gone_back(epoch)`
    is called at the end of each `restore`. With `by_epoch`, a part has the records of one epoch and is named after it,
    and a task without records has no part."""

    def __init__(
        self,
        names: PartNames,
        formatter: Formatter,
        open_part: Callable[[str], PartFile],
        context: SinkContext,
        *,
        gone_back: Callable[[int], None],
        part_bytes: int = 1,
        part_s: float = 0.0,
        by_epoch: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = names
        self._format = formatter
        self._open_part = open_part
        self._by_epoch = by_epoch
        self._errors = context.errors
        self._index = context.index
        self._parallelism = context.parallelism
        self._part_bytes = part_bytes
        self._part_s = part_s
        self._gone_back = gone_back
        self._clock = clock
        self._writer = secrets.token_hex(4)  # in the names of its hidden files, which so are no other writer's
        self._awaits_restore = context.restoring
        self._number = 1  # the epoch that is being written
        self._file: PartFile | None = None
        self._file_name = ""
        self._file_number = 0
        self._file_since = 0.0
        self._promised = False  # the file is in a state that `prepare` has returned
        self._pending: list[tuple[int, str]] = []  # epoch and hidden name of closed files that are not committed
        self._now_begun: Begun | None = None  # at the last `prepare`
        self._begun: list[tuple[int, Begun]] = []  # by epoch, from the last that is known to be complete on
        self._first = not context.restoring
        self._plain = False
        self._parts = False
        self._finished = False

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, records: list[Any]) -> None:
        self._check_restored()
        if not records:
            return
        data = self._format(records, self._errors)
        if data:
            self._begin().append(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finish(self) -> None:
        self._check_restored()
        self._finished = True
        if not self._parts and not self._by_epoch:  # a task without records has a part, too
            self._begin()
        self.flush()

    def close(self, failed: bool) -> None:
        # Whatever became of the job, what `prepare` promised may be needed: by a later writer when this one's failed,
        # and when this one is closed between the last prepare and its commit. It is no part yet, so it is not renamed
        # either. What was written since is needed by nobody.
        file, self._file = self._file, None
        if file is not None:
            file.close()
            if not self._promised:
                with contextlib.suppress(OSError):
                    self._names.remove(self._file_name)
        elif self._finished and not self._pending and not failed:
            # All that counts has its name: what there is are files of stale writers.
            with contextlib.suppress(OSError):
                for name, index, _ in self._names.hidden_ones():
                    if self._mine(index):
                        self._names.remove(name)

    def _begin(self) -> PartFile:
        """Returns the file that is being written, and opens one if there is none."""
        if self._file is None:
            self._file_number = self._number
            self._file_name = self._names.hidden(self._index, self._number, self._writer)
            self._file_since = self._clock()
            self._promised = False
            self._file = self._open_part(self._names.path(self._file_name))
        return self._file

    # --- the two phases ------------------------------------------------------------------------------------------

    def prepare(self, epoch: int) -> Closed | None:
        self._check_restored()
        closed: Closed | None = None
        self._now_begun = None
        file = self._file
        if file is not None:
            file.end_member(last=self._finished)
            file.flush()
            if file.deleted():  # the epoch must not count on what nobody could commit
                raise PenstockError(
                    f"{self._names.sink}: {self._names.path(self._file_name)!r}, to which the job was writing, is no "
                    "longer there: somebody, maybe another program that writes there, deleted or moved it, or the "
                    f"folder {self._names.directory!r}. Its records are lost to the job: put the folder and its files "
                    "back as they were and resume the job, or run it anew with overwrite=True in the sink."
                )
            old = self._clock() - self._file_since >= self._part_s
            if self._finished or old or file.length >= self._part_bytes:
                self._names.sync()
                file.sync()
                closed = Closed(hidden=self._file_name, final=self._final_name(epoch))
                self._pending.append((epoch, closed["hidden"]))
                self._parts = True
                self._file = None
            else:
                self._now_begun = Begun(hidden=self._file_name, number=self._file_number, length=file.length)
                self._promised = True
                self._begun.append((epoch, self._now_begun))
        self._number = epoch + 1
        return closed

    def state(self) -> PartsState:
        return PartsState(
            epoch=self._number - 1,
            index=self._index,
            suffix=self._names.suffix,
            begun=self._now_begun,
            first=self._first,
            plain=self._plain,
            parts=self._parts,
            finished=self._finished,
        )

    def _final_name(self, epoch: int) -> str:
        if self._by_epoch:
            return self._names.numbered(self._index, epoch)
        if self._first and self._finished and not self._parts:
            self._plain = True
            return self._names.plain(self._index)
        return self._names.numbered(self._index, self._file_number)

    def committed(self, epoch: int) -> None:
        self._pending = [entry for entry in self._pending if entry[0] > epoch]
        self._begun = self._begun_up_to(epoch)[-1:] + [one for one in self._begun if one[0] > epoch]

    def _begun_up_to(self, epoch: int) -> list[tuple[int, Begun]]:
        return [one for one in self._begun if one[0] <= epoch]

    def cancel(self, epoch: int) -> None:
        if self._awaits_restore:
            return
        try:
            file, self._file = self._file, None
            if file is not None:
                file.close()
            unnamed = {hidden for _, hidden in self._pending} | ({self._file_name} if file is not None else set())
            for _, begun in self._begun_up_to(epoch)[-1:]:
                if begun["hidden"] in unnamed:
                    # No epoch from which a job could still continue has less of this file.
                    _cut(self._names.path(begun["hidden"]), begun["length"])
                    self._names.rename(begun["hidden"], self._names.numbered(self._index, begun["number"]))
            self._names.sync()
            self._pending = []
            for name, index, _ in list(self._names.hidden_ones()):
                if self._mine(index):
                    self._names.remove(name)
        except OSError as error:
            raise failed_write(error.filename or self._names.directory, error, True, self._names.sink) from error

    # --- going back ----------------------------------------------------------------------------------------------

    def restore(self, epoch: int, states: list[PartsState]) -> None:
        late = max((state["epoch"] for state in states), default=epoch)
        if late > epoch:
            raise RuntimeError(f"restore({epoch}) was given the state of epoch {late}")
        self._awaits_restore = False
        self._number = epoch + 1
        self._first = epoch == 0  # nothing is left of earlier writers then
        try:
            for state in states:
                self._finish_what(state, epoch)
            self._delete_later_than(epoch)
            self._gone_back(epoch)
        except OSError as error:
            raise failed_write(error.filename or self._names.directory, error, True, self._names.sink) from error
        self._names.sync()
        for state in states:
            if state["index"] == self._index:
                self._parts = state["parts"] or state["begun"] is not None
                self._finished = state["finished"] and len(states) == 1

    def _finish_what(self, state: PartsState, epoch: int) -> None:
        """Makes a part of the file that a state describes, and deletes all other files that its writer, and stale
        writers of the same index, had begun until then. Those that it had closed have their names already."""
        names = replace(self._names, suffix=state["suffix"])
        plain = names.plain(state["index"])
        may_be_plain = state["first"] and not state["plain"]  # it got the plain name after this epoch, if at all
        begun = state["begun"]
        if begun is not None:
            sources = [begun["hidden"], names.numbered(state["index"], begun["number"])]
            self._truncate(names, state["index"], begun, [*sources, plain] if may_be_plain else sources, epoch)
        if may_be_plain:
            names.remove(plain)
        for name, index, number in list(names.hidden_ones()):
            if index == state["index"] and number <= epoch:
                names.remove(name)

    def _truncate(self, names: PartNames, index: int, begun: Begun, sources: list[str], epoch: int) -> None:
        """Makes a part of the first `length` bytes of a file that was being written at the epoch.

        The file may have become a part since: when this very restore was made before, and then it has this length, or
        when the job had come further than to the epoch to which it goes back now.
        """
        length = begun["length"]
        final = names.numbered(index, begun["number"])
        sizes = {name: size for name in sources if (size := names.size(name)) is not None}
        if sizes.get(final) == length:
            return
        source = max(sizes, key=lambda name: sizes[name], default=None)  # up to that length they are the same
        if source is None or sizes[source] < length:
            found = f"has only {sizes[source]:,} bytes" if source is not None else "is not there"
            raise PenstockError(
                f"Files: {names.path(begun['hidden'])!r} {found}, and epoch {epoch} counts on {length:,} bytes of it. "
                "Records are lost to the job: somebody deleted or changed the file, or the machine stopped before they "
                "were on its disk. Put the file back, or run the job anew with overwrite=True in the sink."
            )
        copy = names.hidden(index, begun["number"], self._writer)
        _copy(names.path(source), names.path(copy), length)
        names.rename(copy, final)
        names.sync()  # before the source is deleted

    def _delete_later_than(self, epoch: int) -> None:
        for name, index, number in [*self._names.parts(), *self._names.hidden_ones()]:
            later = epoch == 0 if number is None else number > epoch  # of other plain names states know
            if later and self._mine(index):
                self._names.remove(name)

    def _mine(self, index: int) -> bool:
        """Tells whether this task looks after the files of an index. A task looks after its own index, and task 0 also
        after every index that no task has now."""
        return index == self._index or (self._index == 0 and index >= self._parallelism)

    def _check_restored(self) -> None:
        if self._awaits_restore:
            raise RuntimeError("the writer of a job that continues was used before restore()")


class PartsCommitter(SinkCommitter):
    """Gives closed files their final names. With `taken_away`, somebody may delete committed parts at any time."""

    def __init__(self, names: PartNames, *, taken_away: bool) -> None:
        self._names = names
        self._taken_away = taken_away

    def commit(self, committables: list[Committable]) -> None:
        for one in committables:
            self._publish(one.data["hidden"], one.data["final"], one.epoch)
        # No later state mentions them, so that they have their names must outlast the machine.
        self._names.sync()

    def _publish(self, hidden: str, final: str, epoch: int) -> None:
        """Gives a closed file its final name, unless it has this name already."""
        names = self._names
        try:
            names.rename(hidden, final)
        except FileNotFoundError as error:
            if not self._taken_away and names.size(final) is None:
                raise PenstockError(
                    f"{names.sink}: the part {names.path(final)!r} of epoch {epoch} is lost: neither it nor the hidden "
                    f"file {hidden!r}, which was to become it, is in the directory. Somebody deleted or moved "
                    "them, or another job has written to this directory. Put the file back under one of these names, "
                    "or run the job anew with overwrite=True in the sink."
                ) from error
        except OSError as error:
            raise failed_write(names.path(final), error, True, names.sink) from error


def _cut(path: str, length: int) -> None:
    """Shortens a file to `length` bytes, and makes sure that these are on the disk."""
    with open(path, "r+b", buffering=0) as file:
        file.truncate(length)
        os.fsync(file.fileno())


def _copy(source: str, target: str, length: int) -> None:
    """Copies the first `length` bytes of a file, and makes sure that they are on the disk."""
    with open(source, "rb", buffering=0) as reading:
        copy = AppendFile(target, compress=False, epochs=True)
        try:
            while copy.length < length:
                data = reading.read(min(_COPY, length - copy.length))
                if not data:
                    raise PenstockError(f"Files: {source!r} became shorter than {length:,} bytes while it was copied")
                copy.append(data)
                copy.flush()
            copy.sync()
        except BaseException:
            copy.close()
            with contextlib.suppress(OSError):
                os.unlink(target)
            raise
