from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.runtime.transport.ring import Ring

Child = subprocess.Popen[str]


@pytest.fixture
def ring() -> Iterator[Ring]:
    with Ring.create(64 * 1024) as r:
        yield r


@pytest.fixture
def python() -> Iterator[Callable[..., Child]]:
    """Starts a Python process with `ring` attached; it and the test talk by lines. Ends those left over."""
    children: list[Child] = []

    def start(ring: Ring, code: str) -> Child:
        head = (
            "import os, signal, sys\nfrom penstock.runtime.transport.ring import *\n"
            "ring = Ring.attach(sys.argv[1])\n"
            "def say(x): print(x, flush=True)\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", head + code, ring.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A shared-memory file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)
