"""A directory of part files as a sink, whatever their format: what Files and Parquet have in common.

It must never touch a file that the sink has not made, unless the user said so.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod

from penstock.runtime.errors import FlowError
from penstock.runtime.sinks.append import failed_write
from penstock.runtime.sinks.base import Guarantee, Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.parts import PartFile, PartNames, PartsWriter
from penstock.runtime.sinks.text import Formatter
from penstock.runtime.sinks.whole import WholeWriter, hidden_name

_PART = re.compile(r"part-(\d{5,})(?:-\d{10,})?\..*")


class PartFolder(Sink):
    """A description of part files in a directory. `taken_away`: somebody may delete committed parts at any time."""

    title: str  # what error messages begin with
    guarantee: Guarantee = "exactly once"
    by_epoch = False  # in a job with epochs a part is the records of one, and named after it
    taken_away = False
    part_bytes = 1
    part_seconds = 0.0

    def __init__(self, directory: str | os.PathLike[str], suffix: str, overwrite: bool) -> None:
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise FlowError(f"{self.title} needs a directory, got {directory!r}")
        self.directory = os.path.abspath(os.path.expanduser(os.fspath(directory)))
        self.suffix = suffix
        self.overwrite = overwrite

    @abstractmethod
    def formatter(self) -> Formatter:
        """What makes of records what a part file takes; for one task."""

    @abstractmethod
    def open_part(self, path: str, *, epochs: bool) -> PartFile:
        """A new part file; in a job with epochs there must be none of this name."""

    def check(self) -> None:
        place = self.directory
        if os.path.exists(place) and not os.path.isdir(place):
            raise FlowError(f"{self.title}: {place!r} is a file; give a directory, in which each task writes a part")
        parts = self._parts() if os.path.isdir(place) else []
        if parts and not self.overwrite:
            raise FlowError(
                f"{self.title}: {place!r} already holds {len(parts)} part files ({parts[0]}, ...). "
                "Write to another directory, delete them, or give overwrite=True to have them deleted at the start."
            )
        while not os.path.exists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place) or not os.access(place, os.W_OK | os.X_OK):
            raise FlowError(
                f"{self.title}: cannot write in {place!r}, so {self.directory!r} cannot be written. "
                "Give the user that runs the job the right to, or another directory."
            )

    def writer(self, context: SinkContext) -> SinkWriter:
        names = self._names()

        def open_part(path: str) -> PartFile:
            return self.open_part(path, epochs=context.epochs)

        try:
            os.makedirs(self.directory, exist_ok=True)
            if not context.restoring:  # else there are parts of the same job
                self.begin(context)
            if context.epochs:
                return PartsWriter(
                    names,
                    self.formatter(),
                    open_part,
                    context,
                    gone_back=lambda epoch: self.gone_back(context, epoch),
                    part_bytes=self.part_bytes,
                    part_seconds=self.part_seconds,
                    by_epoch=self.by_epoch,
                    taken_away=self.taken_away,
                )
            return WholeWriter(
                names.path(names.plain(context.index)),
                self.formatter(),
                open_part,
                context,
                empty=not self.by_epoch,
                sink=self.title,
            )
        except OSError as error:
            raise failed_write(self.directory, error, context.epochs, self.title) from error

    def begin(self, context: SinkContext) -> None:
        """A task of a new job is made: no task of it has written yet."""
        self._delete_old(context)

    def gone_back(self, context: SinkContext, epoch: int) -> None:
        """A task has gone back to an epoch."""
        if epoch == 0:  # the first writer may have died before it did so
            self._delete_old(context)

    def _parts(self) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if _PART.fullmatch(name))

    def _names(self) -> PartNames:
        return PartNames(self.directory, self.suffix, self.title)

    def _delete_old(self, context: SinkContext) -> None:
        """Each task deletes what there is of its own index from an earlier job, task 0 also what is of no task now:
        parts when told to, hidden files as they would be in the way."""
        names = self._names()
        old: list[tuple[str, int]] = []
        if self.overwrite:
            old += [(name, int(match.group(1))) for name in self._parts() if (match := _PART.fullmatch(name))]
        if self.overwrite or context.epochs:
            old += [(name, index) for name, index, _ in names.hidden_ones()]
        if context.epochs:
            old.append((hidden_name(names.plain(context.index)), context.index))
        for name, index in old:
            if index == context.index or (context.index == 0 and index >= context.parallelism):
                names.remove(name)
