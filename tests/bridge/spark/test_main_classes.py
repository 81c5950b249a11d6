"""Classes of the main script are one class also in Spark's Python workers, and in what these answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("main_script.py")


@pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")
def test_classes_of_the_main_script_go_through_sparks_python_workers() -> None:
    pytest.importorskip("pyspark", reason="PySpark is not installed")
    path = os.pathsep.join(filter(None, [str(SCRIPT.parents[3]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
