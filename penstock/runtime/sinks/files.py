"""A sink that writes part files. Each part file appears under its name when it is whole.

A writer must never leave a half-written file under a part file's name. Without epochs a task writes one part, which it
names at its end (`whole.py`); how a job with epochs writes parts that are final epoch by epoch is in `parts.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from penstock.runtime.errors import FlowError
from penstock.runtime.records.userfunc import check_function
from penstock.runtime.sinks.append import AppendFile
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sinks.folder import PartFolder
from penstock.runtime.sinks.parts import PartFile
from penstock.runtime.sinks.places import Place
from penstock.runtime.sinks.text import Formatter, formatted, json_lines, text_lines
from penstock.runtime.units import seconds

Format = Literal["text", "jsonl"] | Callable[[Any], "str | bytes"]


class Files(PartFolder):
    """Writes files in a directory, one or more for each task: part-00000.txt, part-00001.txt, ...

        stream.write(ps.sinks.Files("counts/"))
        stream.write(ps.sinks.Files("events/", format="jsonl", compression="gzip"))

    `directory`: a directory, which is made if it does not exist, or a URL such as s3://bucket/prefix, as for
    `run(checkpoints=)`; see below. All nodes that run tasks of the sink must share it, or each node keeps its
    own parts.
    `format`: "text" writes a str as it is, a tuple or list with tabs between its items, anything else by str();
    "jsonl" writes one JSON value a line; a function returns the line of a record as str, or bytes that are written
    exactly as they are. Text is UTF-8, lines end with "\\n".
    `compression`: "gzip" or None. `suffix`: of the file names (None: .txt or .jsonl, and .gz).
    `overwrite`: delete the part files that are in the directory when the job starts.
    `part_bytes`, `part_s`: in a job with epochs, a part is closed at the end of the epoch in which it has reached this
    size (on the disk) or this age; with `part_s=0` each epoch makes a part. Without epochs a task writes one part.

    A task writes to a hidden file (".part-00000.txt.inprogress") and gives the file its name when it is complete, so
    readers see only complete parts. Without epochs, the parts of a failed job are deleted.

    In a job with epochs each record is in the parts exactly once, whatever fails. A part appears while the job runs,
    when the epoch in which it was closed is complete. A task that makes only one part names it "part-00000.txt".
    Otherwise the names contain the epoch in which the part began: "part-00000-0000000001.txt",
    "part-00000-0000000061.txt" and so on; the order of the names is the order of the records. A failure ends a part
    early, and so does a cancel, after which the parts have the records of all complete epochs. When the job fails for
    good, its parts stay, and so do hidden files with the records that it has saved since, which `penstock.resume`
    needs: another job does not start to write there without overwrite=True. While a job runs, do not change or delete a
    part before the next one has appeared, or a recovery may not find it.

    At a URL other than file://, a part has the records of one epoch, whatever `part_bytes` and `part_s` say:
    "part-00000-0000000061.txt" is the part of epoch 61. It is written as ".part-...inprogress". When the epoch is
    complete it is moved, which in an object store is a copy. There, too, each record is in the parts exactly once.

    Errors: FlowError before the start when the directory holds part files or hidden ones, cannot be made or cannot be
    written to. A record that cannot be written is a failed record: in text one with a line end in it, which would
    become two lines, or with "\\r" at its end, which would be read as part of the line end (write such records as
    "jsonl"), in JSON lines one of a type that JSON has no form for. PenstockError when the disk is
    full or fails, or when files from which a job continues are gone.
    """

    title = "Files"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: Format = "text",
        compression: Literal["gzip"] | None = None,
        overwrite: bool = False,
        suffix: str | None = None,
        part_bytes: int = 128 << 20,
        part_s: float | timedelta = 60.0,
    ) -> None:
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
        super().__init__(directory, suffix, overwrite)
        self.format = format
        self.compression = compression
        self.part_bytes = part_bytes
        self.part_s = seconds(part_s, "Files: part_s")

    def formatter(self) -> Formatter:
        if self.format == "jsonl":
            return json_lines
        if self.format == "text":
            return text_lines
        assert callable(self.format)
        return partial(formatted, self.format)

    def open_part(self, path: str, context: SinkContext, *, place: Place) -> PartFile:
        return AppendFile(
            path,
            compress=self.compression is not None,
            exclusive=context.epochs,
            epochs=context.epochs,
            place=place,
            patiently=partial(context.patiently, "writing"),
        )

    def describe(self) -> str:
        name = self.format if isinstance(self.format, str) else getattr(self.format, "__name__", "function")
        extra = ", gzip" if self.compression else ""
        return f"Files({self.directory!r}, {name}{extra})"

    def __repr__(self) -> str:
        return self.describe()
