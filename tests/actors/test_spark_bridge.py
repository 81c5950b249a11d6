"""The process that holds Spark: what Spark writes does not go where the job's own messages are shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, os, subprocess, sys
from penstock.actors.spark_bridge import write_apart
print("before")
path = write_apart(sys.argv[1])
os.write(2, b"native code\\n")
print("python code", flush=True)
subprocess.run("echo a child; echo its errors >&2", shell=True, check=True)
logging.getLogger("py4j").error("a library")
logging.getLogger("penstock.bridge.session").warning("a warning of %s", "Penstock")
logging.getLogger("penstock.bridge.session").info("no warning")
sys.stderr.write(path)
"""


def test_what_spark_and_its_libraries_write_goes_to_a_file_of_its_own(tmp_path: Path) -> None:
    out, err = tmp_path / "worker-1.out", tmp_path / "worker-1.err"
    with out.open("w") as stdout, err.open("w") as stderr:
        subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=stdout, stderr=stderr, check=True)
    assert out.read_text() == "before\n"
    assert err.read_text() == "a warning of Penstock\n"
    (log,) = tmp_path.glob("penstock-spark-*.log")
    lines = set(log.read_text().splitlines())
    assert lines == {"native code", "python code", "a child", "its errors", "a library", str(log)}
    assert log.stat().st_mode & 0o777 == 0o600
