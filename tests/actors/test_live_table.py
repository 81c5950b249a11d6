"""The live table on a terminal: what others write to standard error meanwhile does not run through it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading

PROGRAM = """
import logging, os, subprocess, sys
early = logging.StreamHandler()  # it keeps the stream of now, as Ray's does
log = logging.getLogger("early")
log.addHandler(early)
from penstock.jobs.progress import Progress
from penstock.runtime.status import JobStatus, OperatorStatus

def status(n):
    operator = OperatorStatus(parallelism=1, records_in=n, in_per_s=1.0, out_per_s=1.0)
    return JobStatus(name="job", state="RUNNING", uptime_s=n, operators={"map": operator, "sink": operator})

with Progress("job", shown=True) as shown:
    shown.update(status(1))
    os.write(2, b"from native code\\n")
    shown.update(status(2))
    log.warning("from a logger")
    late = "import sys; sys.stdin.read(); print('late', file=sys.stderr)"
    child = subprocess.Popen([sys.executable, "-c", late], stdin=subprocess.PIPE)
    print("from print", file=sys.stderr)
    shown.update(status(3))
    while len(sys.stdin.readline()) > 1:
        pass
    shown.finish(status(4))
    os.write(2, b"half a line")
print("after", file=sys.stderr)
child.communicate()
sys.stdin.readline()
sys.exit(child.returncode)
"""


def screen(written: str) -> list[str]:
    """The lines that a terminal shows of this: line feeds, carriage returns, the cursor going up, lines erased."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif found := re.fullmatch(r"\x1b\[(\d*)A", part):
            row -= int(found[1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_what_others_write_goes_above_the_table() -> None:
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(theirs)
    parts: list[bytes] = []
    shown, late = threading.Event(), threading.Event()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # nobody has the terminal any more
                break
            parts.append(part)
            written = b"".join(parts)
            if all(words in written for words in (b"from native code", b"from a logger", b"from print")):
                shown.set()
            if b"late" in written:
                late.set()
        shown.set()
        late.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert program.stdin is not None
    shown.wait()
    program.stdin.write(b"\n")
    program.stdin.flush()
    late.wait()
    program.communicate(b"\n")
    reader.join()
    os.close(ours)
    assert program.returncode == 0, b"".join(parts).decode()
    lines = screen(b"".join(parts).decode())
    (table,) = (number for number, line in enumerate(lines) if line.startswith("job  running"))
    assert lines[table].startswith("job  running  4 s"), "the newest, once"
    assert "\0" not in "".join(lines), "the mark that ends what is to be shown is never shown itself"
    above = [line for line in lines[:table] if line]
    assert above == ["from native code", "from a logger", "from print"]
    below = [line for line in lines[table:] if line]
    assert "half a lineafter" in below
    assert "late" in below
    assert sum("map" in line for line in lines) == 1
