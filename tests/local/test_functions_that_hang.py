"""Functions, stores and places that never answer: the status says what the job waits for, and a savepoint need not be
waited for. What hangs is let go, or the job is cancelled."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.host.carry import job_runner, store_runner
from penstock.host.carry.savepoints import Savepoints
from penstock.jobs import progress
from penstock.local.local_job import LocalJob
from penstock.runtime.epochs.files import LocalFiles
from penstock.runtime.epochs.store import Store
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.sinks.base import Sink, SinkContext, SinkWriter
from penstock.runtime.status import JobStatus
from tests.e2e.processes import LIMIT_S, alive, wait_until
from tests.local.workers import workers_here


def hang(until: Path) -> None:
    """Return when somebody has made this file, in whichever process."""
    while not until.exists():
        time.sleep(0.02)


class Mapping:
    def __init__(self, until: Path) -> None:
        self.until = until

    def __call__(self, record: int) -> int:
        return record

    def close(self) -> None:
        hang(self.until)


class FailingMapping(Mapping):
    def __call__(self, record: int) -> int:
        raise ValueError(f"of {record}")


class Process(ps.ProcessFunction):
    def __init__(self, until: Path) -> None:
        self.until = until

    def process(self, ctx: ps.ProcessContext, key: Any, record: int) -> list[int]:
        return [record]

    def close(self) -> None:
        hang(self.until)


class HangingSink(Sink):
    def __init__(self, until: Path) -> None:
        self.until = until

    def writer(self, context: SinkContext) -> SinkWriter:
        return HangingWriter(self.until)


class HangingWriter(SinkWriter):
    def __init__(self, until: Path) -> None:
        self.until = until

    def write(self, records: list[Any]) -> None:
        pass

    def close(self, failed: bool) -> None:
        hang(self.until)


class HangingSource(ps.sources.Source):
    def __init__(self, until: Path) -> None:
        self.until = until

    def splits(self, parallelism: int) -> list[ps.sources.Split]:
        return [ps.sources.Split("all")]

    def reader(self, splits: list[ps.sources.Split], context: ps.sources.SourceContext) -> ps.sources.Reader:
        return HangingReader(self.until)


class HangingReader(ps.sources.Reader):
    def __init__(self, until: Path) -> None:
        self.until = until

    def read(self, limit: int) -> list[Any]:
        self.finished = True
        return [1]

    def offsets(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        hang(self.until)


def numbers(flow: ps.Flow) -> Any:
    return flow.read(ps.sources.Memory([1, 2, 3]))


HANGING: dict[str, Callable[[ps.Flow, Path], Any]] = {
    "map": lambda flow, until: numbers(flow).map(Mapping(until), name="it").write(ps.sinks.Null()),
    "process": lambda flow, until: (
        numbers(flow).key_by(lambda n: n).process(Process(until), name="it").write(ps.sinks.Null())
    ),
    "sink": lambda flow, until: numbers(flow).map(lambda n: n).write(HangingSink(until), name="it"),
    "reader": lambda flow, until: flow.read(HangingSource(until), name="it").write(ps.sinks.Null()),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "_HOOK_S", 0.2)


def says(job: ps.Job, words: str) -> JobStatus:
    """The first status whose `waits_for` matches these words."""
    found: list[JobStatus] = []

    def said() -> bool:
        found[:] = [job.status()]
        return re.match(words, found[0].waits_for or "") is not None

    wait_until(said, words)
    return found[0]


@pytest.mark.parametrize("epoch_interval_s", [0.1, None], ids=["epochs", "no epochs"])
@pytest.mark.parametrize("kind", HANGING)
def test_the_status_says_whose_close_does_not_return(
    kind: str, epoch_interval_s: float | None, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow = ps.Flow(fresh_name(), parallelism=1)
    HANGING[kind](flow, tmp_path / "go")
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=epoch_interval_s, checkpoints=tmp_path / "epochs")
    try:
        status = says(job, r"close\(\) of operator 'it', which has not returned for \d+ s in worker 0 \(process \d+\)")
        assert status["state"] == "RUNNING"
        assert f"(process {status['workers'][0]['pid']})" in status["waits_for"]
        assert "cancel the job" in status["waits_for"]
        assert "waits for close() of operator 'it'" in progress.line(status)
    finally:
        (tmp_path / "go").touch()
    status = job.wait(LIMIT_S, progress=False)
    assert (status["state"], status["waits_for"]) == ("FINISHED", None)
    assert not workers_here()


class Opening:
    def __init__(self, until: Path) -> None:
        self.until = until

    def open(self) -> None:
        hang(self.until)

    def __call__(self, record: int) -> int:
        return record


class Loading(Opening):
    """What takes long is the constructor, which the worker calls."""

    def __init__(self, until: Path) -> None:
        hang(until)

    def open(self) -> None:
        pass


@pytest.mark.parametrize("epoch_interval_s", [0.1, None], ids=["epochs", "no epochs"])
@pytest.mark.parametrize("by_class", [False, True])
def test_the_status_says_whose_open_does_not_return(
    by_class: bool, epoch_interval_s: float | None, fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow = ps.Flow(fresh_name(), parallelism=1)
    until = tmp_path / "go"
    if by_class:
        mapped = numbers(flow).map(Loading, fn_constructor_args=(until,), name="it")
    else:
        mapped = numbers(flow).map(Opening(until), name="it")
    mapped.write(ps.sinks.Null())
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=epoch_interval_s, checkpoints=tmp_path / "epochs")
    try:
        says(job, r"open\(\) of operator 'it', which has not returned for \d+ s in worker 0 \(process \d+\)")
    finally:
        until.touch()
    status = job.wait(LIMIT_S, progress=False)
    assert (status["state"], status["waits_for"]) == ("FINISHED", None)


def test_a_job_whose_close_does_not_return_can_be_cancelled(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow = ps.Flow(fresh_name(), parallelism=1)
    HANGING["map"](flow, tmp_path / "never")
    job = ps.run(flow, workers=1, local=True, epoch_interval_s=0.1, checkpoints=tmp_path / "epochs")
    says(job, r"close\(\) of operator 'it'")
    job.cancel()
    status = job.wait(LIMIT_S, progress=False)
    assert (status["state"], status["waits_for"]) == ("CANCELLED", None)
    assert not workers_here()


def test_a_failure_is_told_though_a_close_after_it_does_not_return(
    fresh_name: Callable[[], str], tmp_path: Path
) -> None:
    flow = ps.Flow(fresh_name(), parallelism=1)
    numbers(flow).map(FailingMapping(tmp_path / "go"), name="it").write(ps.sinks.Null())
    job = ps.run(flow, workers=1, local=True, checkpoints=tmp_path / "epochs")
    try:
        says(job, r"close\(\) of operator 'it', .*; what failed before: .*operator 'it' failed: ValueError: of 1\.")
    finally:
        (tmp_path / "go").touch()
    with pytest.raises(ps.JobFailed, match="operator 'it' failed: ValueError: of 1"):
        job.wait(LIMIT_S, progress=False)


def test_the_status_says_whose_close_keeps_tasks_from_going_back(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow = ps.Flow(fresh_name(), parallelism=2)
    numbers = flow.read(ps.sources.Generator(lambda number: number, 500.0))
    numbers.key_by(lambda number: number % 10).process(Process(tmp_path / "go"), name="it").write(ps.sinks.Null())
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=0.1, checkpoints=tmp_path / "epochs", spares=False)
    wait_until(lambda: job.status()["epochs"]["complete"] > 0, "an epoch is complete")
    try:
        os.kill(job.status()["workers"][0]["pid"], signal.SIGKILL)
        status = says(job, r"close\(\) of operator 'it', which has not returned for \d+ s in worker 1 ")
        assert status["state"] == "RECOVERING"
    finally:
        (tmp_path / "go").touch()
    wait_until(lambda: job.state == "RUNNING" and job.status()["waits_for"] is None, "the tasks have gone back")
    job.cancel()
    job.wait(LIMIT_S, progress=False)


# --- savepoints with a time limit -----------------------------------------------------------------------------


def counting(name: str, until: Path | None = None) -> ps.Flow:
    """Numbers that are counted. `until`: every number waits for this file."""

    def wait(number: int) -> int:
        if until is not None:
            hang(until)
        return number

    flow = ps.Flow(name, parallelism=1)
    numbers = flow.read(ps.sources.Generator(lambda number: number, 500.0))
    numbers.map(wait, name="wait").key_by(lambda number: number % 10).count(name="count").write(ps.sinks.Null())
    return flow


def is_there(place: Path) -> bool:
    return bool(Store.open(place, SAVEPOINT).epochs())


def runner_of(job: ps.Job) -> Any:
    return job._link._runner  # type: ignore[attr-defined]


def waits_for_an_epoch(job: ps.Job) -> bool:
    host = runner_of(job)._host
    return host is not None and bool(host.requests.at_epoch)


def given_up(job: ps.Job, place: Path, when: Callable[[], object]) -> str:
    """What the error of a savepoint says whose time is over as soon as this holds."""
    begin = Savepoints._begin

    def begun(*arguments: Any) -> Any:
        place_answers = begin(*arguments)
        wait_until(when, "what the savepoint is to wait for")
        return place_answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Savepoints, "_begin", begun)
        with pytest.raises(TimeoutError) as error:
            job.savepoint(place, timeout_s=0.01)
    said = str(error.value)
    assert said.startswith(f"job '{job.name}' has made no savepoint in {place} within 0.01 s. It waits for ")
    assert said.endswith(". The savepoint is given up, and the job goes on.")
    return said


def check_that_it_goes_on(job: ps.Job, place: Path) -> None:
    """Epochs complete, and a savepoint can be made in the place."""
    complete = job.status()["epochs"]["complete"]
    wait_until(lambda: job.status()["epochs"]["complete"] > complete, "a later epoch is complete")
    assert not is_there(place)
    assert job.savepoint(place, timeout_s=LIMIT_S) == str(place)
    assert is_there(place)
    job.cancel()
    assert job.wait(LIMIT_S, progress=False)["state"] == "CANCELLED"


def test_a_savepoint_that_waits_for_a_task_is_given_up(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    flow, place = counting(fresh_name(), tmp_path / "go"), tmp_path / "saved"
    job = ps.run(flow, local=True, epoch_interval_s=0.1, checkpoints=tmp_path / "epochs")
    try:
        wait_until(lambda: job.status()["records_read"] > 0, "the task hangs in its function")
        said = given_up(job, place, lambda: waits_for_an_epoch(job))
        assert re.search(r"It waits for epoch \d+, which waits for [^.]*wait", said)
        assert not runner_of(job)._host.requests.at_epoch
    finally:
        (tmp_path / "go").touch()
    check_that_it_goes_on(job, place)


class Holding:
    """Holds up what this process writes to a place, as a network mount does whose server is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = ""
        self.names = ""
        self.held = threading.Event()  # something is being held
        self.go = threading.Event()
        write = LocalFiles.write

        def written(files: LocalFiles, name: str, *rest: Any) -> None:
            if self.place and files.place.startswith(self.place) and name.startswith(self.names):
                self.held.set()
                self.go.wait(4 * LIMIT_S)
            write(files, name, *rest)

        monkeypatch.setattr(LocalFiles, "write", written)

    def hold(self, place: Path, names: str) -> None:
        self.names, self.place = names, str(place)

    def release(self) -> None:
        self.place = ""
        self.go.set()


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Any:
    holding = Holding(monkeypatch)
    yield holding
    holding.release()


def with_an_epoch(name: str, epochs: Path) -> LocalJob:
    """A job that runs, of which an epoch is complete."""
    job = ps.run(counting(name), local=True, epoch_interval_s=0.1, checkpoints=epochs)
    wait_until(lambda: job.status()["epochs"]["complete"] > 0, "an epoch is complete")
    return job


def test_a_savepoint_that_waits_for_the_store_is_given_up(
    fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holding: Holding
) -> None:
    monkeypatch.setattr(store_runner, "_SILENT_S", 0.2)
    place = tmp_path / "saved"
    job = with_an_epoch(fresh_name(), tmp_path / "epochs")
    holding.hold(tmp_path / "epochs", "manifests/")

    def is_silent() -> bool:
        return waits_for_an_epoch(job) and "not answered" in str(job.status()["epochs"]["last_failure"])

    said = given_up(job, place, is_silent)
    assert re.search(r"It waits for epoch \d+, which waits for ", said)
    assert f"The status says: the checkpoint store {tmp_path / 'epochs'}/{job.name} has not answered for " in said
    holding.release()
    check_that_it_goes_on(job, place)


def test_a_savepoint_whose_place_does_not_answer_is_given_up(
    fresh_name: Callable[[], str], tmp_path: Path, holding: Holding
) -> None:
    place = tmp_path / "saved"
    job = with_an_epoch(fresh_name(), tmp_path / "epochs")
    holding.hold(place, "snapshots/")
    assert f"It waits for an answer of {place}. The savepoint" in given_up(job, place, holding.held.is_set)
    complete = job.status()["epochs"]["complete"]
    wait_until(lambda: job.status()["epochs"]["complete"] > complete, "epochs complete meanwhile")
    holding.release()
    check_that_it_goes_on(job, place)


def test_a_savepoint_whose_copying_does_not_end_is_given_up(
    fresh_name: Callable[[], str], tmp_path: Path, holding: Holding
) -> None:
    place = tmp_path / "saved"
    job = with_an_epoch(fresh_name(), tmp_path / "epochs")
    holding.hold(place, "manifests/")
    said = given_up(job, place, holding.held.is_set)
    assert f"It waits for its files to be copied to {place}. Until the last of them is written, " in said
    holding.release()
    wait_until(lambda: is_there(place), "its last file was under way")
    check_that_it_goes_on(job, tmp_path / "other")


def test_a_savepoint_of_a_job_that_does_not_start_is_given_up(
    fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, reserve = threading.Event(), LocalJob.reserve

    def reserved(job: LocalJob, *arguments: Any) -> Any:
        go.wait(4 * LIMIT_S)
        return reserve(job, *arguments)

    monkeypatch.setattr(LocalJob, "reserve", reserved)
    place = tmp_path / "saved"
    job = ps.run(counting(fresh_name()), local=True, epoch_interval_s=0.1, checkpoints=tmp_path / "epochs")
    try:
        said = given_up(job, place, lambda: not runner_of(job)._events._events.empty())
        assert "It waits for the job to start. The status says: the job waits for its worker processes. The" in said
    finally:
        go.set()
    check_that_it_goes_on(job, place)


def test_the_time_limit_of_a_savepoint_is_a_duration(fresh_name: Callable[[], str], tmp_path: Path) -> None:
    job = ps.run(counting(fresh_name()), local=True, checkpoints=tmp_path / "epochs")
    with pytest.raises(ps.FlowError, match="savepoint: timeout_s=-1; it must be 0 seconds or more"):
        job.savepoint(tmp_path / "saved", timeout_s=-1)
    job.cancel()
    job.wait(LIMIT_S, progress=False)


class SlowToClose:
    """In the worker that closes it first, close() says in which process it is, and waits."""

    def __init__(self, closing: Path, until: Path) -> None:
        self.closing, self.until = closing, until

    def __call__(self, record: int) -> int:
        return record

    def close(self) -> None:
        try:
            own = os.open(self.closing, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(own, str(os.getpid()).encode())
        os.close(own)
        hang(self.until)


@pytest.mark.parametrize(("epoch_interval_s", "itself"), [(0.2, False), (None, False), (0.2, True)])
def test_a_worker_that_dies_when_all_is_done_neither_delays_the_end_nor_takes_its_counts_with_it(
    fresh_name: Callable[[], str], tmp_path: Path, epoch_interval_s: float | None, itself: bool
) -> None:
    """The worker whose run has ended dies, or, with `itself`, the one that still closes its operator."""
    closing, until = tmp_path / "closing", tmp_path / "until"
    flow, out = ps.Flow(fresh_name(), parallelism=2), ps.sinks.Collect()
    numbers = flow.read(ps.sources.Generator(lambda number: number, rate=2000, limit=1000))
    numbers.map(SlowToClose, name="slow", fn_constructor_args=(closing, until)).write(out)
    # A limit longer than the test is: nobody may wait for a dead worker.
    job = ps.run(flow, workers=2, local=True, epoch_interval_s=epoch_interval_s, hang_timeout_s=2 * LIMIT_S)
    pids = {worker["pid"] for worker in job.wait_for(lambda status: len(status["workers"]) == 2, LIMIT_S)["workers"]}
    wait_until(lambda: closing.exists() and closing.read_text(), "a worker closes its operator")
    slow = int(closing.read_text())
    if not itself:
        ended = lambda status: any(row["state"] == "NONE" and row["pid"] != slow for row in status["workers"])
        job.wait_for(ended, LIMIT_S)
    (victim,) = {slow} if itself else pids - {slow}
    os.kill(victim, signal.SIGKILL)
    if not itself:
        wait_until(lambda: not alive(victim), "the worker is dead")
        assert job.status()["state"] == "RUNNING", "the other one still closes its operator"
        until.touch()
    status = job.wait(LIMIT_S, progress=False)
    assert status["state"] == "FINISHED"
    assert sorted(out.records()) == list(range(1000))
    assert (status["records_read"], status["records_written"]) == (1000, 1000)
