"""The end of a job in the runner: no later life of a JobMaster runs a job anew whose drivers have its results."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.carry.job_runner import JobRunner
from penstock.host.carry.notes import Notes
from penstock.host.carry.requests import Cancel, Outcome, Ping, Release
from penstock.host.process import linger
from penstock.host.process.linger import Driver
from penstock.host.process.worker_process import WorkerOptions
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import NotEnoughResources
from penstock.runtime.records.pickling import Program
from penstock.runtime.status import PlacementStatus

LIMIT_S = 60.0


class Carrier:
    """A carrier whose job ends when it asks for room. `room`: it asks no further before this is set."""

    def __init__(self, memory: dict[str, bytes], again: bool) -> None:
        self.again = again
        self.notes = Notes("job", "actor", memory)
        self.asked = False
        self.room = threading.Event()
        self.has_left = threading.Event()

    def reserve(self, cancelled: Any, known: str = "") -> Any:
        self.asked = True
        self.room.wait(LIMIT_S)
        raise NotEnoughResources("there is no room")

    def placement_status(self) -> PlacementStatus:
        return PlacementStatus()

    def waits_for(self) -> str:
        return "room"

    def driver_lives(self, driver: Driver) -> bool:
        return True

    def leave(self) -> None:
        self.has_left.set()


def runner_of(carrier: Carrier, folder: Path, store: Store | None = None) -> JobRunner:
    flow = ps.Flow("job")
    flow.read(ps.sources.Memory([1])).write(ps.sinks.Files(folder))
    options = CarrierOptions(1, 60.0, WorkerOptions(None, 1 << 20, 1 << 20), store=store)
    return JobRunner(flow.plan(1), options, carrier, Program())  # type: ignore[arg-type]


def test_a_job_that_has_ended_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job may write into the folders of its sinks by now."""
    monkeypatch.setattr(linger, "_LINGER_S", 0.0)
    monkeypatch.setattr(linger, "_LOOK_S", 0.01)
    memory: dict[str, bytes] = {}
    Notes("job", "actor", memory).note("ended")
    carrier = Carrier(memory, again=True)
    carrier.room.set()
    runner_of(carrier, tmp_path / "out").start()
    assert carrier.has_left.wait(LIMIT_S)
    assert not carrier.asked
    assert not (tmp_path / "out").exists()


def test_that_the_job_has_ended_is_noted_before_its_epochs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[str, bytes] = {}
    carrier = Carrier(memory, again=False)
    store = Store.open(str(tmp_path / "epochs"), "job")
    noted: list[bool] = []
    destroy = store.destroy
    monkeypatch.setattr(Store, "destroy", lambda store: (noted.append(carrier.notes.noted("ended")), destroy()))
    runner = runner_of(carrier, tmp_path / "out", store)
    driver = Driver.here("node")
    runner.ask(Ping(driver))
    runner.ask(Cancel())
    noted.clear()
    runner.start()
    assert runner.ask(Outcome(driver)).state == "CANCELLED"
    noted.clear()
    runner.ask(Release(driver))
    assert carrier.has_left.wait(LIMIT_S)
    assert noted
    assert all(noted)


def test_a_driver_is_not_released_before_the_end(tmp_path: Path) -> None:
    """A JobMaster that was started again comes to the end of the job first."""
    carrier = Carrier({}, again=False)
    runner = runner_of(carrier, tmp_path / "out")
    driver = Driver.here("node")
    runner.ask(Ping(driver))
    runner.start()
    releasing = threading.Thread(target=runner.ask, args=(Release(driver),), daemon=True)
    releasing.start()
    releasing.join(0.2)
    assert releasing.is_alive()
    carrier.room.set()
    releasing.join(LIMIT_S)
    assert runner.ended.is_set()
    assert carrier.has_left.wait(LIMIT_S)
