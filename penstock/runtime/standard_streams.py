"""The standard output and error of a process that was started without them (`>&-`, `2>&-`, some service managers).

Python has None in their place, on which programs and libraries stumble, and the next file that is opened gets the
descriptor 1 or 2, into which native code then writes its messages.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any


def open_closed() -> None:
    """Drops the text that is written to a standard stream that is closed."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        with suppress(OSError):
            os.fstat(number)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            continue
        null = os.open(os.devnull, os.O_WRONLY)
        if null == number:
            os.set_inheritable(number, True)
        else:
            os.dup2(null, number)
            os.close(null)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


class _Written(io.FileIO):
    """A file descriptor whose reader may go (`| head`): what is written afterwards goes nowhere."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def outlive_readers() -> None:
    """Let a standard stream whose reader has gone be no error of the function that prints."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream.fileno() != number:
            continue  # `open_closed` has put the null device there, and the number is another file's
        buffered = io.BufferedWriter(_Written(number, "w", closefd=False))
        text = io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=True)
        setattr(sys, name, text)
