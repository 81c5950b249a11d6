"""Files as a sink: one part file a task.

A part file appears under its name only when its task has written all of it. A writer must never leave a half-written
file under a part file's name, nor touch a file that it has not made unless the user said so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.sinks.text import Formatter, formatted, json_lines, text_lines
from penstock.runtime.userfunc import check_function

_BUFFER = 256 << 10  # bytes held back for one write
_GZIP = 31  # zlib's window bits for the gzip format
_GZIP_LEVEL = 6
_PART = re.compile(r"part-(\d{5,})\..*")

Format = Literal["text", "jsonl"] | Callable[[Any], "str | bytes"]


class Files(Sink):
    """One file a task in a directory: part-00000.txt, part-00001.txt, ...

        stream.write(ps.sinks.Files("counts/"))
        stream.write(ps.sinks.Files("events/", format="jsonl", compression="gzip"))

    `directory`: made when it is missing. All nodes that run tasks of the sink must share it, or each keeps its parts.
    `format`: "text" writes a str as it is, a tuple or list with tabs between its items, anything else by str();
    "jsonl" writes one JSON value a line; a function returns the line of a record as str, or bytes that are written
    exactly as they are. Text is UTF-8, lines end with "\\n".
    `compression`: "gzip" or None. `suffix`: of the file names (None: .txt or .jsonl, and .gz).
    `overwrite`: delete the part files that are in the directory when the job starts.

    A task writes to a hidden file (".part-00000.txt.inprogress") and gives it its name when it has written all, so
    readers see whole parts only. The parts of a failed job are deleted.

    Errors: FlowError before the start when the directory holds part files, cannot be made or cannot be written to. A
    record that cannot be written is a failed record: in text one with a line end in it, which would become two lines
    (write such records as "jsonl"), in JSON lines one of a type that JSON has no form for. PenstockError when the disk
    is full or fails.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: Format = "text",
        compression: Literal["gzip"] | None = None,
        overwrite: bool = False,
        suffix: str | None = None,
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
        self.directory = os.path.abspath(os.path.expanduser(os.fspath(directory)))
        self.format = format
        self.compression = compression
        self.overwrite = overwrite
        self.suffix = suffix

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
            if self.overwrite:
                self._delete_old(context)
            path = os.path.join(self.directory, f"part-{context.index:05d}{self.suffix}")
            return _FileWriter(path, formatter, self.compression is not None, context)
        except OSError as error:
            raise failed_write(self.directory, error) from error

    def describe(self) -> str:
        name = self.format if isinstance(self.format, str) else getattr(self.format, "__name__", "function")
        extra = ", gzip" if self.compression else ""
        return f"Files({self.directory!r}, {name}{extra})"

    def __repr__(self) -> str:
        return self.describe()

    def _parts(self) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if _PART.fullmatch(name))

    def _delete_old(self, context: SinkContext) -> None:
        """Each task deletes its own part of an earlier run, task 0 also those that no task has now."""
        for name in self._parts():
            match = _PART.fullmatch(name)
            number = int(match.group(1)) if match else -1
            if number == context.index or (context.index == 0 and number >= context.parallelism):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.directory, name))


class _FileWriter(SinkWriter):
    def __init__(self, path: str, formatter: Formatter, compress: bool, context: SinkContext) -> None:
        self._path = path
        head, tail = os.path.split(path)
        self._hidden = os.path.join(head, f".{tail}.inprogress")
        self._format = formatter
        self._errors = context.errors
        self._deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP) if compress else None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._leftover: str | None = self._hidden  # to be deleted unless the job goes well
        self._finished = False
        self._file = open(self._hidden, "wb", buffering=0)  # noqa: SIM115  closed by close()

    def write(self, records: list[Any]) -> None:
        if not records:
            return
        data = self._format(records, self._errors)
        if self._deflate is not None:
            data = self._deflate.compress(data)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= _BUFFER:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        data = memoryview(b"".join(self._held))
        self._held.clear()
        self._held_bytes = 0
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise failed_write(self._hidden, error) from error

    def finish(self) -> None:
        if self._deflate is not None:
            self._held.append(self._deflate.flush())
        self.flush()
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._hidden, self._path)
            self._leftover = self._path
            self._finished = True
        except OSError as error:
            raise failed_write(self._path, error) from error

    def close(self, failed: bool) -> None:
        self._held.clear()
        with contextlib.suppress(OSError):
            self._file.close()
        # A writer that did not finish has only part of its output, whatever the job's end.
        if self._leftover is not None and (failed or not self._finished):
            with contextlib.suppress(OSError):
                os.unlink(self._leftover)
        self._leftover = None


def failed_write(path: str, error: OSError) -> PenstockError:
    """The error for an OSError on writing `path`."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Free some space, or write to another disk; what the job wrote so far is removed."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "Give the user that runs the job's workers the right to write there."
    else:
        remedy = "Check the disk or the mount on the node that runs the task."
    return PenstockError(f"Files: cannot write {path!r}: {reason}. {remedy}")
