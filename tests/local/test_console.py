"""The lines of Console sinks reach the program that started the job, however slowly it prints them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LINES = 40_000  # several times as many as are kept

PROGRAM = """
import sys
import penstock as ps

flow = ps.Flow("console-lines", parallelism=2)
flow.read(ps.sources.Generator(lambda i: f"line {i}", limit=int(sys.argv[1]))).write(ps.sinks.Console())
status = ps.run(flow, workers=2, local=True, checkpoints=sys.argv[2]).wait(progress=False)
print(status["state"], status["records_written"], file=sys.stderr)
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(program), str(LINES), str(tmp_path / "checkpoints")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_no_line_is_dropped(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = process.stdout.read().splitlines()
        said = process.stderr.read()
    assert sorted(lines) == sorted(f"line {i}" for i in range(LINES)), said
    assert f"FINISHED {LINES}" in said


def test_a_reader_of_the_output_that_goes_does_not_hold_up_the_job(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("line ")
        process.stdout.close()
        said = process.stderr.read()
    assert f"FINISHED {LINES}" in said
