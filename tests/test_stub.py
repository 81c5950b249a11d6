"""The committed type stub of the native core is what its generator makes of it today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_stub_is_up_to_date(tmp_path: Path) -> None:
    fresh = tmp_path / "_native.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-m", "penstock.runtime._native", "-o", str(fresh)]
    subprocess.run(command, check=True, capture_output=True)
    committed = Path(__file__).parent.parent / "penstock" / "runtime" / "_native.pyi"
    assert committed.read_text() == fresh.read_text(), "write it anew: make stubs"
