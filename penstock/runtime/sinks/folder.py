"""A sink that writes a directory of part files, in any format: what Files and Parquet have in common.

It must never touch a file that the sink has not made, unless the user said so.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod

from penstock.runtime.errors import FlowError, UnfinishedFiles
from penstock.runtime.sinks.base import Guarantee, Sink, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.sinks.parts import PartFile, PartNames, PartsCommitter, PartsWriter
from penstock.runtime.sinks.places import LOCAL, Place, failed_write, open_place
from penstock.runtime.sinks.text import Formatter
from penstock.runtime.sinks.whole import WholeWriter, hidden_name
from penstock.runtime.storage import filesystems
from penstock.runtime.storage.directory_lock import DirectoryLock, DirectoryLocked
from penstock.runtime.units import flag

_PART = re.compile(r"part-(\d{5,})(?:-\d{10,})?\..*")


class PartFolder(Sink):
    """Describes part files in a directory. With `taken_away`, somebody may delete committed parts at any time."""

    title: str  # what error messages begin with
    guarantee: Guarantee = "exactly once"
    by_epoch = False  # in a job with epochs a part is the records of one, and named after it
    taken_away = False
    part_bytes = 1
    part_s = 0.0

    def __init__(self, directory: str | os.PathLike[str], suffix: str, overwrite: bool) -> None:
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise FlowError(f"{self.title} needs a directory, got {directory!r}")
        name = os.fspath(directory)
        try:
            path = filesystems.local_path(name)
        except filesystems.BadPlace as error:
            raise FlowError(f"{self.title}: {error}") from None
        self._url = name if path is None else None  # with keys, if it has some
        self.directory = filesystems.shown(name) if path is None else os.path.abspath(os.path.expanduser(path))
        self.fills = self.directory
        self.suffix = suffix
        self.overwrite = flag(overwrite, f"{self.title}: overwrite")

    @abstractmethod
    def formatter(self) -> Formatter:
        """Returns the function that turns records into the input of a part file, for one task."""

    @abstractmethod
    def open_part(self, path: str, context: SinkContext, *, place: Place) -> PartFile:
        """Opens a new part file. In a job with epochs no file of this name may exist."""

    def check(self) -> None:
        if self._url is not None:
            self._check_remote(self._url)
            return
        place = self.directory
        if os.path.exists(place) and not os.path.isdir(place):
            raise FlowError(f"{self.title}: {place!r} is a file; give a directory, in which each task writes a part")
        if os.path.isdir(place):
            self._check_free(LOCAL)
        while not os.path.exists(place):
            place = os.path.dirname(place)
        reason = filesystems.not_writable(place) if os.path.isdir(place) else f"{place!r} is no directory. Remove it"
        if reason:
            raise FlowError(
                f"{self.title}: {self.directory!r} cannot be written: {reason}, or write to another directory."
            )

    def _check_remote(self, url: str) -> None:
        place = open_place(url, self.title, look=True)
        try:
            self._check_free(place)
            place.check()
        except OSError as error:
            raise FlowError(str(failed_write(self.directory, error, sink=self.title))) from error

    def _check_free(self, place: Place) -> None:
        if self.overwrite:
            return
        if parts := self._parts(place):
            raise FlowError(
                f"{self.title}: {self.directory!r} already holds {len(parts)} part files ({parts[0]}, ...). Write to "
                "another directory, delete them, or give the sink overwrite=True to have them deleted at the start."
            )
        names = PartNames(self.directory, self.suffix, self.title, place)
        if hidden := sorted(name for name, _, _ in names.hidden_ones()):
            raise UnfinishedFiles(
                f"{self.title}: {self.directory!r} holds {len(hidden)} unfinished files ({hidden[0]}, ...) of a job "
                "that runs, has failed or was killed. They have records that it has committed, and later ones. As long "
                "as the checkpoint store has epochs of that job, penstock.resume() of it needs them. If the store has "
                "none, for example because the job was cancelled, nothing can resume it: rename the files to keep "
                "their records, or delete them. Or write to another directory, or give the sink overwrite=True to have "
                "them deleted at the start."
            )

    def lock(self) -> DirectoryLock | None:
        if self._url is not None:
            return None
        try:
            os.makedirs(self.directory, exist_ok=True)
            return DirectoryLock(self.directory)
        except DirectoryLocked:
            raise DirectoryLocked(
                f"{self.title}: another job, or another sink of this job under another name of the folder, writes to "
                f"{self.directory!r}, and the two would delete each other's files. Write to another directory, or stop "
                "the other job."
            ) from None
        except OSError:
            return None  # the tasks, which may be on other nodes, say what is wrong with it

    def left_by_cancel(self) -> str:
        if self._url is not None:  # an object store that does not answer must not hold up the end of the job
            return ""
        hidden = sorted(name for name, _, _ in PartNames(self.directory, self.suffix, self.title).hidden_ones())
        if not hidden:
            return ""
        return (
            f"{self.title}: {self.directory!r} still holds unfinished files ({len(hidden)}: {hidden[0]}, ...), because "
            "their workers ended before they could name them. They may have records of complete epochs, and later "
            "ones. Nothing can resume the job: rename the files to keep their records, or delete them."
        )

    def writer(self, context: SinkContext) -> SinkWriter:
        place: Place = LOCAL if self._url is None else open_place(self._url, self.title)
        names = PartNames(self.directory, self.suffix, self.title, place)

        def open_part(path: str) -> PartFile:
            return self.open_part(path, context, place=place)

        try:
            place.make(self.directory)
            if not context.restoring:  # else there are parts of the same job
                self.begin(context, place)
            if context.epochs:
                return PartsWriter(
                    names,
                    self.formatter(),
                    open_part,
                    context,
                    gone_back=lambda epoch: self.gone_back(context, epoch, place),
                    part_bytes=self.part_bytes,
                    part_s=0.0 if place.remote else self.part_s,
                    by_epoch=self.by_epoch or place.remote,
                )
            return WholeWriter(
                names.path(names.plain(context.index)),
                self.formatter(),
                open_part,
                context,
                empty=not self.by_epoch,
                sink=self.title,
                place=place,
            )
        except OSError as error:
            raise failed_write(self.directory, error, context.epochs, self.title) from error

    def committer(self, context: SinkContext) -> SinkCommitter:
        place: Place = LOCAL if self._url is None else open_place(self._url, self.title)
        names = PartNames(self.directory, self.suffix, self.title, place)
        return PartsCommitter(names, taken_away=self.taken_away)

    def begin(self, context: SinkContext, place: Place) -> None:
        """Prepares the directory for a task of a new job, before any task of the job has written."""
        self._delete_old(context, place)

    def gone_back(self, context: SinkContext, epoch: int, place: Place) -> None:
        """Cleans up after a task has gone back to an epoch."""
        if epoch == 0:  # the first writer may have died before it did so
            self._delete_old(context, place)

    def _parts(self, place: Place) -> list[str]:
        return sorted(name for name in place.names(self.directory) if _PART.fullmatch(name))

    def _delete_old(self, context: SinkContext, place: Place) -> None:
        """Deletes the files of an earlier job: parts if `overwrite` asks for it, and hidden files always, because they
        would be in the way. Each task deletes the files of its own index, and task 0 also the files of an index that no
        task has now."""
        names = PartNames(self.directory, self.suffix, self.title, place)
        old: list[tuple[str, int]] = []
        if self.overwrite:
            old += [(name, int(match.group(1))) for name in self._parts(place) if (match := _PART.fullmatch(name))]
        if self.overwrite or context.epochs:
            old += [(name, index) for name, index, _ in names.hidden_ones()]
        if context.epochs:
            old.append((hidden_name(names.plain(context.index)), context.index))
        for name, index in old:
            if index == context.index or (context.index == 0 and index >= context.parallelism):
                names.remove(name)
