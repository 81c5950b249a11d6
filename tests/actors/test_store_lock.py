"""Two programs that want one job, or two jobs that want one folder: the second is told, and nothing is touched."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.actors import cluster as joined
from penstock.host.carry import opening
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.opening import Opening
from penstock.host.carry.store_keeper import StoreKeeper
from penstock.host.decide.job_host import Found
from penstock.host.process.collected import Collected
from penstock.host.process.worker_process import WorkerOptions
from penstock.runtime.epochs.manifest import Manifest
from penstock.runtime.epochs.store import Store
from penstock.runtime.records.pickling import Program, dumps
from penstock.runtime.storage.directory_lock import DirectoryLocked
from tests.e2e.processes import LIMIT_S, wait_until

running: Any = importlib.import_module("penstock.actors.on_ray")


def flow_to(sink: ps.sinks.Sink, name: str = "job") -> ps.Flow:
    flow = ps.Flow(name)
    flow.read(ps.sources.Memory([1])).write(sink)
    return flow


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Of the job "job", which has failed after its first epoch."""
    store = Store.open(tmp_path, "job")
    flow = flow_to(ps.sinks.Null())
    options = CarrierOptions(1, 60.0, WorkerOptions(None, 1 << 20, 1 << 20), store=store, flow=flow)
    program = store.put("snapshots/00000001-program", [Program().dumps((flow, options))])
    store.write_manifest(
        Manifest(job="job", epoch=1, created=1.5, final=False, key_groups=8, tasks=[], program=program)
    )
    return store


def test_who_wants_a_store_that_a_running_job_holds_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "is_ending", lambda job: False)
    other = Store.open(Path(store.place).parent, "job")
    running.wait_for_store("job", other)  # nobody holds it
    store.lock()
    with pytest.raises(ps.JobExists, match=r"a job named 'job' is running .*use another checkpoint store"):
        running.wait_for_store("job", other)
    store.release()
    running.wait_for_store("job", other)


def test_a_job_that_is_ending_may_let_go_of_its_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []

    def ending(job: str) -> bool:
        looks.append(job)
        if len(looks) == 3:
            store.release()
        return True

    monkeypatch.setattr(joined, "is_ending", ending)
    store.lock()
    running.wait_for_store("job", Store.open(Path(store.place).parent, "job"))
    assert looks == ["job"] * 3


def test_a_store_that_nobody_lets_go_of(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "is_ending", lambda job: True)
    monkeypatch.setattr(running, "_HELD_S", -1.0)
    store.lock()
    with pytest.raises(ps.JobExists, match="maybe on another cluster"):
        running.wait_for_store("job", Store.open(Path(store.place).parent, "job"))


@pytest.mark.parametrize("how", ["removed", "noted"])
def test_a_job_that_ends_while_it_is_to_be_resumed(store: Store, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Another program had resumed it, and let go of the store when it had ended."""

    def ends(name: str, found: Store) -> None:
        if how == "removed":
            store.destroy()
        else:
            store.end("FINISHED")

    monkeypatch.setattr(running, "connect", lambda *arguments: None)
    monkeypatch.setattr(running, "wait_for_store", ends)
    monkeypatch.setattr(running, "start", lambda *arguments: "started")
    with pytest.raises(ps.JobNotFound, match=r"the job 'job' of .* has ended just now"):
        ps.resume("job", checkpoints=Path(store.place).parent)
    monkeypatch.setattr(running, "wait_for_store", lambda *arguments: None)
    with pytest.raises(ps.JobNotFound, match="there is no epoch of a job 'job'"):
        ps.resume("job", checkpoints=Path(store.place).parent)


def test_a_job_whose_module_is_not_here_cannot_be_resumed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(data: bytes) -> None:
        raise ModuleNotFoundError("No module named 'orders'")

    monkeypatch.setattr(Program, "loads", missing)
    with pytest.raises(ps.StoreError, match=r"a module of its program cannot be imported: .*'orders'.*PYTHONPATH"):
        ps.resume("job", checkpoints=Path(store.place).parent)
    assert store.epochs() == [1]


def opening_of(sink: ps.sinks.Sink) -> Opening:
    """What is about to lock the places of a job without epochs."""
    plan = flow_to(sink).plan(1, check_sinks=False)
    return Opening(plan, None, again=False, resume=False, savepoint=None, cancelled=lambda: False)


def test_of_two_jobs_that_write_to_one_folder_the_second_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_LOCK_S", -1.0)
    first, second = opening_of(ps.sinks.Files(tmp_path)), opening_of(ps.sinks.Files(tmp_path, overwrite=True))
    assert first.lock_places()
    with pytest.raises(DirectoryLocked, match=r"another job.*writes to .*another directory"):
        second.lock_places()
    (lock,) = first.locks
    lock.close()
    assert second.lock_places()


def test_a_job_says_that_it_waits_for_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = opening_of(ps.sinks.Files(tmp_path)), opening_of(ps.sinks.Files(tmp_path, overwrite=True))
    assert first.lock_places()
    waiting = threading.Thread(target=second.lock_places)
    waiting.start()
    wait_until(lambda: caplog.text != "", "it waits")
    (lock,) = first.locks
    lock.close()
    waiting.join(LIMIT_S)
    assert len(second.locks) == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert "waits for up to 30 s: Files: another job" in said


def test_a_folder_that_was_filled_until_it_came_free_is_looked_at_again(tmp_path: Path) -> None:
    found = opening_of(ps.sinks.Files(tmp_path))  # its driver has looked, when there was nothing
    (tmp_path / "part-00000.txt").touch()
    with pytest.raises(ps.FlowError, match="already holds 1 part files"):
        found.lock_places()


def test_a_job_whose_collected_records_are_lost_continues_from_the_epoch_before(tmp_path: Path) -> None:
    store = Store.open(tmp_path, "job")
    for epoch in (1, 2):
        blob = store.put(f"snapshots/{epoch:08d}-collected-x", [dumps({"out": []}) + bytes(10_000)])
        store.write_manifest(
            Manifest(job="job", epoch=epoch, created=1.5, final=False, key_groups=8, tasks=[], collected=[blob])
        )
    for folder in ("snapshots", "copies"):
        (tmp_path / "job" / folder / "00000002-collected-x").unlink()
    keeper = StoreKeeper(store, Collected(True), lambda trouble: None, thread=False)
    runner: Any = SimpleNamespace(store=store, keeper=keeper)
    plan = flow_to(ps.sinks.Null()).plan(1)
    found = Opening(plan, runner, again=False, resume=True, savepoint=None, cancelled=lambda: False).find()
    assert isinstance(found, Found)
    assert found.manifest is not None
    assert found.manifest.epoch == 1
    assert found.begun == 2
    assert store.epochs() == [1]


@pytest.mark.ray
def test_a_job_of_that_name_that_runs_elsewhere(
    cluster: str, fresh_name: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This cluster knows of none, but its store is held."""
    monkeypatch.setattr(running, "_HELD_S", 0.5)
    name = fresh_name()
    elsewhere = Store.open(tmp_path, name)
    elsewhere.lock()
    with pytest.raises(ps.JobExists, match="maybe on another cluster"):
        ps.run(flow_to(ps.sinks.Null(), name), checkpoints=tmp_path)
    elsewhere.release()
    job = ps.run(flow_to(ps.sinks.Null(), name), checkpoints=tmp_path)
    assert job.wait(60, progress=False)["state"] == "FINISHED"
