"""Files as a sink: part files, of which each appears under its name when it is whole.

A writer must never leave a half-written file under a part file's name, nor touch a file that it has not made unless
the user said so. Without epochs a task writes one part, which it names at its end; how a job with epochs
writes parts that are final epoch by epoch is in `parts.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from penstock.runtime.errors import FlowError
from penstock.runtime.sinks.append import AppendFile, failed_write
from penstock.runtime.sinks.base import Guarantee, Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.parts import PartNames, PartsWriter
from penstock.runtime.sinks.text import Formatter, formatted, json_lines, text_lines
from penstock.runtime.userfunc import check_function

_PART = re.compile(r"part-(\d{5,})(?:-\d{10,})?\..*")

Format = Literal["text", "jsonl"] | Callable[[Any], "str | bytes"]


class Files(Sink):
    """Files in a directory, one or more a task: part-00000.txt, part-00001.txt, ...

        stream.write(ps.sinks.Files("counts/"))
        stream.write(ps.sinks.Files("events/", format="jsonl", compression="gzip"))

    `directory`: made when it is missing. All nodes that run tasks of the sink must share it, or each keeps its parts.
    `format`: "text" writes a str as it is, a tuple or list with tabs between its items, anything else by str();
    "jsonl" writes one JSON value a line; a function returns the line of a record as str, or bytes that are written
    exactly as they are. Text is UTF-8, lines end with "\\n".
    `compression`: "gzip" or None. `suffix`: of the file names (None: .txt or .jsonl, and .gz).
    `overwrite`: delete the part files that are in the directory when the job starts.
    `part_bytes`, `part_seconds`: in a job with epochs a part is closed at the end of the epoch in which it has become
    this large (on the disk) or this old; 0 seconds makes a part an epoch. Without epochs a task writes one part.

    A task writes to a hidden file (".part-00000.txt.inprogress") and gives it its name when it has written all, so
    readers see whole parts only. The parts of a failed job are deleted.

    In a job with epochs records reach a part exactly once, whatever fails: parts appear while the job runs, each when
    the epoch is complete in which it was closed. A task that makes only one part has "part-00000.txt"; else their names
    are "part-00000-0000000001.txt", "part-00000-0000000061.txt" and so on, by the epoch in which they were begun, in
    the order in which they were written. A failure ends the part that was being written early. When the
    job fails for good its parts stay, and hidden files with what it has saved since; they are deleted when another job
    starts to write there. Do not change or delete parts in a running job's directory before the next one has appeared,
    or a recovery may miss them.

    Errors: FlowError before the start when the directory holds part files, cannot be made or cannot be written to. A
    record that cannot be written is a failed record: in text one with a line end in it, which would become two lines
    (write such records as "jsonl"), in JSON lines one of a type that JSON has no form for. PenstockError when the disk
    is full or fails, or when files that a job goes on from are gone.
    """

    guarantee: Guarantee = "exactly once"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: Format = "text",
        compression: Literal["gzip"] | None = None,
        overwrite: bool = False,
        suffix: str | None = None,
        part_bytes: int = 128 << 20,
        part_seconds: float = 60.0,
    ) -> None:
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise FlowError(f"Files needs a directory, got {directory!r}")
        if not callable(format) and format not in ("text", "jsonl"):
            raise FlowError(f"Files: format must be 'text', 'jsonl' or a function, got {format!r}")
        if compression not in (None, "gzip"):
            raise FlowError(f"Files: compression must be 'gzip' or None, got {compression!r}")
        if callable(format):
            check_function(format, "Files(format=...)")
        if suffix is None:
            suffix = (".jsonl" if format == "jsonl" else ".txt") + (".gz" if compression else "")
        if not suffix.startswith(".") or "/" in suffix:
            raise FlowError(f"Files: suffix must start with a dot, such as '.csv', got {suffix!r}")
        if not isinstance(part_bytes, int) or isinstance(part_bytes, bool) or part_bytes < 1:
            raise FlowError(
                f"Files: part_bytes must be a number of bytes above 0, such as 64 << 20, got {part_bytes!r}"
            )
        if not isinstance(part_seconds, (int, float)) or isinstance(part_seconds, bool) or not part_seconds >= 0:
            raise FlowError(
                f"Files: part_seconds must be a number of seconds, 0 or more, got {part_seconds!r}; "
                "float('inf') closes parts by their size only"
            )
        self.directory = os.path.abspath(os.path.expanduser(os.fspath(directory)))
        self.format = format
        self.compression = compression
        self.overwrite = overwrite
        self.suffix = suffix
        self.part_bytes = part_bytes
        self.part_seconds = part_seconds

    def check(self) -> None:
        place = self.directory
        if os.path.exists(place) and not os.path.isdir(place):
            raise FlowError(f"Files: {place!r} is a file; give a directory, in which each task writes a part")
        parts = self._parts() if os.path.isdir(place) else []
        if parts and not self.overwrite:
            raise FlowError(
                f"Files: {place!r} already holds {len(parts)} part files ({parts[0]}, ...). "
                "Write to another directory, delete them, or give overwrite=True to have them deleted at the start."
            )
        while not os.path.exists(place):
            place = os.path.dirname(place)
        if not os.path.isdir(place) or not os.access(place, os.W_OK | os.X_OK):
            raise FlowError(
                f"Files: cannot write in {place!r}, so {self.directory!r} cannot be written. "
                "Give the user that runs the job the right to, or another directory."
            )

    def writer(self, context: SinkContext) -> SinkWriter:
        formatter: Formatter
        if self.format == "jsonl":
            formatter = json_lines
        elif self.format == "text":
            formatter = text_lines
        else:
            assert callable(self.format)
            formatter = partial(formatted, self.format)
        try:
            os.makedirs(self.directory, exist_ok=True)
            if not context.restoring:  # else there are parts of the same job
                self._delete_old(context)
            if context.epochs:
                return PartsWriter(
                    self._names(),
                    formatter,
                    self.compression is not None,
                    context,
                    part_bytes=self.part_bytes,
                    part_seconds=self.part_seconds,
                    delete_old=partial(self._delete_old, context),
                )
            return _WholeWriter(
                self._names().path(self._names().plain(context.index)),
                formatter,
                self.compression is not None,
                context,
            )
        except OSError as error:
            raise failed_write(self.directory, error, context.epochs) from error

    def describe(self) -> str:
        name = self.format if isinstance(self.format, str) else getattr(self.format, "__name__", "function")
        extra = ", gzip" if self.compression else ""
        return f"Files({self.directory!r}, {name}{extra})"

    def __repr__(self) -> str:
        return self.describe()

    def _parts(self) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if _PART.fullmatch(name))

    def _names(self) -> PartNames:
        return PartNames(self.directory, self.suffix)

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
            old.append((_hidden(names.plain(context.index)), context.index))
        for name, index in old:
            if index == context.index or (context.index == 0 and index >= context.parallelism):
                names.remove(name)


def _hidden(name: str) -> str:
    return f".{name}.inprogress"


class _WholeWriter(SinkWriter):
    """One part, for jobs without epochs."""

    def __init__(self, path: str, formatter: Formatter, compress: bool, context: SinkContext) -> None:
        self._path = path
        head, tail = os.path.split(path)
        self._format = formatter
        self._errors = context.errors
        self._file = AppendFile(os.path.join(head, _hidden(tail)), compress=compress)
        self._leftover: str | None = self._file.path  # to be deleted unless the job goes well
        self._finished = False

    def write(self, records: list[Any]) -> None:
        if records:
            self._file.append(self._format(records, self._errors))

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._file.end_member(last=True)
        self._file.sync()
        try:
            os.replace(self._file.path, self._path)
        except OSError as error:
            raise failed_write(self._path, error) from error
        self._leftover = self._path
        self._finished = True

    def close(self, failed: bool) -> None:
        self._file.close()
        # A writer that did not finish has only part of its output, whatever the job's end.
        if self._leftover is not None and (failed or not self._finished):
            with contextlib.suppress(OSError):
                os.unlink(self._leftover)
        self._leftover = None
