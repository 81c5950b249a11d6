"""What drivers hear of a job whose program cannot be loaded (on Ray: tests/e2e/test_ends.py)."""

from __future__ import annotations

import os
import threading

import pytest

from penstock.host.carry.requests import (
    Cancel,
    LastStatus,
    Lines,
    Migrate,
    Outcome,
    Ping,
    Records,
    Release,
    Rescale,
    Savepoint,
    Status,
    Stop,
    StopWithSavepoint,
    Traffic,
)
from penstock.host.carry.unloaded_runner import UnloadedRunner
from penstock.host.decide.commands import JobEnd
from penstock.host.process import linger
from penstock.host.process.linger import Driver
from penstock.runtime.errors import JobError, ProgramNotLoaded

LIMIT_S = 60.0


def unloaded(left: threading.Event) -> UnloadedRunner:
    return UnloadedRunner("job", ProgramNotLoaded("no module"), lambda driver: driver.pid == os.getpid(), left.set)


def test_drivers_hear_of_the_end_and_the_last_one_lets_it_leave() -> None:
    left = threading.Event()
    runner = unloaded(left)
    drivers = [Driver.here("node"), Driver.here("node")]
    for driver in drivers:
        runner.ask(Ping(driver))
    runner.start()
    for driver in drivers:
        assert runner.ask(Outcome(driver)) == JobEnd("FAILED", "no module")
        assert (runner.ask(Status())["state"], runner.ask(LastStatus())["error"]) == ("FAILED", "no module")
        assert (runner.ask(Records("out", last=True)), runner.ask(Lines(driver, 0, 10.0))) == ([], (0, []))
        runner.ask(Stop())
        runner.ask(Cancel())
        assert not left.is_set(), "a driver has not all yet"
        runner.ask(Release(driver))
    assert left.wait(LIMIT_S)


def test_it_leaves_when_its_drivers_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "_LINGER_S", 0.0)
    left = threading.Event()
    runner = unloaded(left)
    runner.ask(Ping(Driver("handle", "node", -1, None)))
    runner.start()
    assert left.wait(LIMIT_S)


def test_requests_are_refused_with_the_end() -> None:
    runner = unloaded(threading.Event())
    for request in (Savepoint("/tmp/x"), StopWithSavepoint("/tmp/x"), Rescale("map", 2), Migrate({}), Traffic()):
        with pytest.raises(JobError, match=rf"job 'job' has ended: failed; {request.verb} needs a running job"):
            runner.ask(request)
