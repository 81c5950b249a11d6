"""Writes one part for each task of a job without epochs: a hidden file that gets its name when the input has ended.

What a job that did not end well has written must never be left under a part's name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from penstock.runtime.sinks.base import SinkContext, SinkWriter
from penstock.runtime.sinks.parts import PartFile
from penstock.runtime.sinks.places import LOCAL, Place, failed_write
from penstock.runtime.sinks.text import Formatter


def hidden_name(name: str) -> str:
    """Returns the hidden name of a part that is being written."""
    return f".{name}.inprogress"


class WholeWriter(SinkWriter):
    """Writes one part; see the module's docstring. With `empty`, a task without records has a part too."""

    def __init__(
        self,
        path: str,
        formatter: Formatter,
        open_part: Callable[[str], PartFile],
        context: SinkContext,
        *,
        empty: bool,
        sink: str,
        place: Place = LOCAL,
    ) -> None:
        self._path = path
        head, tail = os.path.split(path)
        self._hidden = os.path.join(head, hidden_name(tail))
        self._format = formatter
        self._open_part = open_part
        self._errors = context.errors
        self._sink = sink
        self._place = place
        self._file: PartFile | None = None
        self._leftover: str | None = None  # to be deleted unless the job goes well
        self._finished = False
        if empty:
            self._begin()

    def write(self, records: list[Any]) -> None:
        if not records:
            return
        data = self._format(records, self._errors)
        if len(data):
            self._begin().append(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finish(self) -> None:
        if self._file is not None:
            self._file.end_member(last=True)
            self._file.sync()
            try:
                self._place.replace(self._hidden, self._path)
            except OSError as error:
                raise failed_write(self._path, error, sink=self._sink) from error
            self._leftover = self._path
        self._finished = True

    def close(self, failed: bool) -> None:
        if self._file is not None:
            self._file.close()
        # A writer that did not finish has only part of its output, whatever the job's end.
        if self._leftover is not None and (failed or not self._finished):
            with contextlib.suppress(OSError):
                self._place.remove(self._leftover)
        self._leftover = None

    def _begin(self) -> PartFile:
        if self._file is None:
            self._file = self._open_part(self._hidden)
            self._leftover = self._hidden
        return self._file
