"""The native torture programs: with processes, and with threads under the sanitizers."""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def tool(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def build(kind: str, program: str) -> Path:
    """A program, in one build folder a kind of build, so that only changes are compiled."""
    cmake, compiler = tool("cmake"), os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if cmake is None or compiler is None:
        pytest.skip("needs cmake and a C++ compiler")
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("needs the source tree")
    folder = ROOT / "build" / f"stress-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    sanitize = "" if kind == "plain" else kind
    with open(folder / "lock", "w") as lock:  # another process of the suite may build in the same folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        for step in (
            [
                cmake,
                "-S",
                str(ROOT),
                "-B",
                str(folder),
                f"-DPENSTOCK_SANITIZE={sanitize}",
                "-DCMAKE_BUILD_TYPE=Release",
            ],
            [cmake, "--build", str(folder), "--target", program],
        ):
            done = subprocess.run(step, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(step)}\n{done.stdout}\n{done.stderr}"
    return next(path for path in folder.rglob(program) if path.is_file())


def run(program: Path, seconds: int) -> str:
    command = [str(program), "--seconds", str(seconds), "--producers", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr and (setarch := shutil.which("setarch")):
        # An older thread sanitizer on a kernel that randomises addresses more widely than it knows.
        done = subprocess.run([setarch, "-R", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return done.stdout.splitlines()[-1]


def counts(summary: str) -> dict[str, int]:
    assert summary.startswith("ok: ")
    words = summary[4:].replace(",", "").split()
    return {name: int(n) for n, name in itertools.pairwise(words) if n.isdigit()}


def test_a_consumer_looks_when_the_next_message_is_due_and_sleeps_else() -> None:
    done = subprocess.run([str(build("plain", "rhythm_check"))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n")


EVENTS = ("messages", "producers", "consumers", "graceful", "skips", "wraps", "redelivered", "held", "stopped")


def test_processes_killed_at_every_step_lose_nothing() -> None:
    """For two seconds, and then until everything has happened that may. `make campaign-ring` goes on for longer."""
    program = build("plain", "ring_torture")
    seen: Counter[str] = Counter()
    for _ in range(32):
        seen.update(counts(run(program, 2)))
        missing = [event for event in EVENTS if not seen[event]]
        if not missing:
            return
    raise AssertionError(f"the torture was too gentle: no {', '.join(missing)} in {dict(seen)}")


@pytest.mark.parametrize("kind", ["thread", "address"])
def test_threads_under_a_sanitizer(kind: str) -> None:
    run(build(kind, "ring_stress"), 1)


def test_processes_under_the_address_sanitizer() -> None:
    run(build("address", "ring_torture"), 2)
