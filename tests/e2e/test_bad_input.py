"""Bad input in a running job: a clear error, or the chosen policy."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from tests.e2e.processes import LIMIT_S

Name = Callable[[], str]


def lines_job(
    name: str, source: ps.sources.Source, workers: int = 1, **options: str
) -> tuple[ps.Job, ps.sinks.Collect]:
    flow = ps.Flow(name)
    taken = ps.sinks.Collect()
    flow.read(source, **options).rebalance().map(lambda line: line).write(taken)  # type: ignore[arg-type]
    return ps.run(flow, workers=workers, local=True), taken


@pytest.mark.parametrize(("pattern", "words"), [("missing.txt", "missing.txt"), ("nothing-*.txt", "nothing-")])
def test_missing_input_is_known_before_the_job_starts(
    fresh_name: Name, tmp_path: Path, pattern: str, words: str
) -> None:
    with pytest.raises(ps.SourceError, match=words):
        lines_job(fresh_name(), ps.sources.TextFiles(str(tmp_path / pattern)))


def broken_gzip(directory: Path) -> Path:
    whole = gzip.compress("\n".join(f"line {i}" for i in range(50_000)).encode())
    (directory / "broken.gz").write_bytes(whole[: len(whole) // 2])
    return directory / "broken.gz"


def test_broken_gzip_fails_with_its_name(fresh_name: Name, tmp_path: Path) -> None:
    job, _ = lines_job(fresh_name(), ps.sources.TextFiles(str(broken_gzip(tmp_path))))
    with pytest.raises(ps.JobFailed, match=r"broken\.gz"):
        job.wait(LIMIT_S, progress=False)


def test_broken_gzip_skipped_and_counted(fresh_name: Name, tmp_path: Path) -> None:
    broken_gzip(tmp_path)
    (tmp_path / "good.txt").write_text("good\n" * 10)
    job, taken = lines_job(fresh_name(), ps.sources.TextFiles(str(tmp_path / "*")), on_error="skip")
    status = job.wait(LIMIT_S, progress=False)
    assert status["skipped"] == 1
    assert taken.records().count("good") == 10


def test_invalid_utf8(fresh_name: Name, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\xff\xfe broken\nfine too\n")
    source = ps.sources.TextFiles(str(tmp_path / "a.txt"))
    job, _ = lines_job(fresh_name(), source)
    with pytest.raises(ps.JobFailed, match=r"a\.txt"):
        job.wait(LIMIT_S, progress=False)
    job, taken = lines_job(fresh_name(), source, on_error="skip")
    assert job.wait(LIMIT_S, progress=False)["skipped"] == 1
    assert sorted(taken.records()) == ["fine", "fine too"]


def test_malformed_json_to_dead_letters(fresh_name: Name, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n{"n": 3}\n')
    flow = ps.Flow(fresh_name())
    good, bad = ps.sinks.Collect(), ps.sinks.Collect()
    stream = flow.read(ps.sources.JsonLines(str(tmp_path / "a.jsonl")), on_error="dead_letter")
    stream.write(good)
    stream.dead_letters().write(bad)
    ps.run(flow, local=True).wait(LIMIT_S, progress=False)
    assert sorted(record["n"] for record in good.records()) == [1, 3]
    (letter,) = bad.records()
    assert letter.operator == "read"
    assert "a.jsonl" in letter.error


def test_record_larger_than_the_ring_allows(fresh_name: Name) -> None:
    def big(i: int) -> bytes:
        return bytes(100_000 if i == 5 else 10)

    def job(policy: str) -> tuple[ps.Job, ps.sinks.Collect]:
        flow = ps.Flow(fresh_name(), parallelism=1)
        taken = ps.sinks.Collect()
        source = flow.read(ps.sources.Generator(big, limit=10))
        source.rebalance().map(len, name="len", on_error=policy).write(taken)  # type: ignore[arg-type]
        return ps.run(flow, workers=2, ring_bytes=65536, local=True), taken

    failing, _ = job("fail")
    with pytest.raises(ps.JobFailed, match=r"record takes 100,0\d\d bytes encoded.*ring_bytes=524288"):
        failing.wait(LIMIT_S, progress=False)
    skipping, taken = job("skip")
    assert skipping.wait(LIMIT_S, progress=False)["skipped"] == 1
    assert taken.records() == [10] * 9


def test_records_that_cannot_be_pickled(fresh_name: Name) -> None:
    def make(i: int) -> object:
        import threading

        return threading.Lock() if i == 3 else i

    flow = ps.Flow(fresh_name(), parallelism=1)
    flow.read(ps.sources.Generator(lambda i: i, limit=10)).map(make).rebalance().map(str).write(ps.sinks.Null())
    with pytest.raises(ps.JobFailed, match=r"cannot be (pickled|encoded)|lock"):
        ps.run(flow, workers=2, local=True).wait(LIMIT_S, progress=False)


SMALL_SHM_DRIVER = """
import penstock as ps

flow = ps.Flow("full")
flow.read(ps.sources.Memory(["a"])).rebalance().map(str).write(ps.sinks.Null())
try:
    ps.run(flow, workers=2, local=True).wait(progress=False)
except ps.JobFailed as error:
    print("JobFailed:", error)
"""


def test_full_shared_memory(tmp_path: Path) -> None:
    """In a mount namespace of its own with a /dev/shm of 3 MB, which has room for the ring of one worker only."""
    enter = ["unshare", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=3M none /dev/shm"
    if subprocess.run([*enter, mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to make a mount namespace")
    (tmp_path / "driver.py").write_text(SMALL_SHM_DRIVER)
    command = f"{mount} && exec {sys.executable} {tmp_path / 'driver.py'}"
    run = subprocess.run([*enter, command], capture_output=True, text=True, check=True, cwd=tmp_path)
    told = r"JobFailed: job 'full' failed: worker [01] cannot start: RingNoSpace: .*/dev/shm has \d+ free"
    assert re.search(told, run.stdout), run.stdout + run.stderr


def test_a_function_that_calls_sys_exit(fresh_name: Callable[[], str]) -> None:
    """It ends no process: its record fails, by the operator's policy."""

    def leave(word: str) -> str:
        if word == "w77":
            sys.exit()
        return word

    flow = ps.Flow(fresh_name(), parallelism=2)
    words = flow.read(ps.sources.Memory([f"w{i}" for i in range(100)])).rebalance()
    words.map(leave, name="skipping", on_error="skip").map(leave, name="failing").write(ps.sinks.Null())
    words.map(leave, name="leaving").write(ps.sinks.Null())
    job = ps.run(flow, workers=2, local=True)
    with pytest.raises(ps.JobFailed, match=r"operator 'leaving' failed: called sys\.exit\(\)\n +record: 'w77'\n +at "):
        job.wait(LIMIT_S, progress=False)
    assert job.status()["epochs"]["restarts"] == 0


@pytest.mark.parametrize("policy", ["dead_letter", "fail"])
def test_a_record_that_kills_its_worker(fresh_name: Callable[[], str], policy: Any) -> None:
    """It is found out by the worker's deaths, and then fails by the operator's policy."""

    def crash(word: str) -> str:
        if word == "w77":
            os._exit(1)
        return word

    flow = ps.Flow(fresh_name(), parallelism=2)
    out, letters = ps.sinks.Collect(), ps.sinks.Collect()
    words = flow.read(ps.sources.Memory([f"w{i}" for i in range(300)])).rebalance()
    words = words.map(crash, name="crash", on_error=policy)
    words.write(out)
    if policy == "dead_letter":
        words.dead_letters().write(letters)
    job = ps.run(flow, workers=2, max_attempts=2, local=True)
    if policy == "fail":
        with pytest.raises(ps.JobFailed, match=r"'crash' failed: Poison: .* killed the worker's process 2 times"):
            job.wait(LIMIT_S, progress=False)
        return
    job.wait(LIMIT_S, progress=False)
    assert sorted(out.records()) == sorted(f"w{i}" for i in range(300) if i != 77)
    (letter,) = letters.records()
    assert (letter.operator, letter.record) == ("crash", "w77")


class Killing(ps.ProcessFunction):
    def __init__(self, where: str) -> None:
        self.where = where

    def open(self, ctx: ps.ProcessContext) -> None:
        self._kill("open")

    def process(self, ctx: ps.ProcessContext, key: Any, record: Any) -> None:
        ctx.emit(record)

    def finish(self, ctx: ps.ProcessContext) -> None:
        self._kill("finish")

    def _kill(self, where: str) -> None:
        if where == self.where:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("where", ["open", "finish"])
def test_a_job_whose_worker_dies_in_a_hook_each_time_says_in_which(fresh_name: Callable[[], str], where: str) -> None:
    flow = ps.Flow(fresh_name(), parallelism=1)
    flow.read(ps.sources.Memory(range(10))).key_by(str).process(Killing(where), name="kills").write(ps.sinks.Null())
    message = (
        rf"died in {where}\(\) of operator 'kills': .*restarted 2 times in the last 600 s, "
        rf"each time after a worker had died in {where}\(\) of operator 'kills', which is all that max_restarts=2"
    )
    with pytest.raises(ps.JobFailed, match=message):
        ps.run(flow, max_restarts=2, local=True).wait(LIMIT_S, progress=False)


class Deadly:
    """State that kills any other process than the test's that reads it."""

    def __init__(self, driver: int) -> None:
        self.driver = driver

    def __reduce__(self) -> Any:
        return read_deadly, (self.driver,)


def read_deadly(driver: int) -> Deadly:
    if os.getpid() != driver:
        os.kill(os.getpid(), signal.SIGKILL)
    return Deadly(driver)


def test_a_job_whose_state_kills_those_who_read_it_says_whose_state_it_was(fresh_name: Name, tmp_path: Path) -> None:
    driver, died = os.getpid(), tmp_path / "died"

    def keep(ctx: ps.ProcessContext, key: Any, record: int) -> None:
        ctx.set(Deadly(driver))
        if record == 400 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    flow = ps.Flow(fresh_name(), parallelism=1)
    numbers = flow.read(ps.sources.Generator(lambda i: i, rate=500, limit=2000))
    numbers.key_by(lambda i: i % 3).process(keep, name="keeps").write(ps.sinks.Null())
    with pytest.raises(ps.JobFailed, match=r"died while it read the saved state of task '.*keeps"):
        ps.run(flow, max_restarts=1, epoch_interval_s=0.1, local=True).wait(LIMIT_S, progress=False)


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_a_record_whose_call_kills_the_worker(fresh_name: Callable[[], str], kind: str) -> None:
    """It is found although the run loop rests while calls are under way."""

    def crash(word: str) -> str:
        time.sleep(0.002)
        if word == "w77":
            os._exit(1)
        return word

    async def crash_later(word: str) -> str:
        await asyncio.sleep(0.002)
        return crash(word)

    flow = ps.Flow(fresh_name(), parallelism=2)
    out, letters = ps.sinks.Collect(), ps.sinks.Collect()
    words = flow.read(ps.sources.Memory([f"w{i}" for i in range(150)])).rebalance()
    fn: Any = crash_later if kind == "coroutine" else crash
    called = words.map_async(fn, concurrency=20, name="crash", on_error="dead_letter")
    called.write(out)
    called.dead_letters().write(letters)
    ps.run(flow, workers=2, max_attempts=2, max_restarts=20, local=True).wait(LIMIT_S, progress=False)
    assert sorted(out.records()) == sorted(f"w{i}" for i in range(150) if i != 77)
    (letter,) = letters.records()
    assert (letter.operator, letter.record) == ("crash", "w77")
