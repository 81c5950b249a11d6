"""The committed type stub of the native core is what its generator makes of it today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the stub is written with Python 3.11")
def test_the_stub_is_up_to_date(tmp_path: Path) -> None:
    fresh = tmp_path / "_native.pyi"
    runtime = Path(__file__).parent.parent / "penstock" / "runtime"
    generator = [sys.executable, "-m", "nanobind.stubgen", "-m", "penstock.runtime._native"]
    subprocess.run(
        [*generator, "-p", str(runtime / "native" / "stub.pat"), "-o", str(fresh)], check=True, capture_output=True
    )
    committed = runtime / "_native.pyi"
    assert committed.read_text() == fresh.read_text(), "write it anew: make stubs"
