"""A program that a process of the job cannot load, and what drivers hear of it (on Ray: tests/e2e/test_ends.py)."""

from __future__ import annotations

import os
import pickle
import threading

import pytest

from penstock.host.decide.commands import JobEnd
from penstock.host.process import linger
from penstock.host.process.linger import Driver
from penstock.host.process.loading import UnloadedRunner, load_program
from penstock.runtime.errors import JobError, ProgramNotLoaded

LIMIT_S = 60.0


class Failing:
    """What raises when it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        return _fail, (self.error,)


def _fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("No module named 'theirs'"), "ImportError: No module named 'theirs'"),
        (SystemExit(3), "called sys.exit(3)"),
    ],
)
def test_a_program_that_cannot_be_loaded_is_told_with_the_line(error: BaseException, said: str) -> None:
    with pytest.raises(ProgramNotLoaded) as failed:
        load_program(pickle.dumps(Failing(error)), "worker 3")
    assert str(failed.value).startswith("the job's program cannot be loaded in worker 3: ")
    assert said in str(failed.value)
    assert "test_loading.py:" in str(failed.value)
    assert failed.value.__cause__ is not None


def test_ctrl_c_is_no_failure_of_the_program() -> None:
    with pytest.raises(KeyboardInterrupt):
        load_program(pickle.dumps(Failing(KeyboardInterrupt())), "worker 3")


def unloaded(left: threading.Event) -> UnloadedRunner:
    return UnloadedRunner("job", ProgramNotLoaded("no module"), lambda driver: driver.pid == os.getpid(), left.set)


def test_drivers_hear_of_the_end_and_the_last_one_lets_it_leave() -> None:
    left = threading.Event()
    runner = unloaded(left)
    drivers = [Driver.here("node"), Driver.here("node")]
    for driver in drivers:
        runner.ping(driver)
    runner.start()
    for driver in drivers:
        assert runner.outcome(driver) == JobEnd("FAILED", "no module")
        assert (runner.status()["state"], runner.last_status()["error"]) == ("FAILED", "no module")
        assert (runner.collected("out", last=True), runner.console(Driver.here(""), 0, 10.0)) == ([], (0, []))
        runner.stop()
        runner.cancel()
        assert not left.is_set(), "a driver has not all yet"
        runner.release(driver)
    assert left.wait(LIMIT_S)


def test_it_leaves_when_its_drivers_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "_LINGER_S", 0.0)
    left = threading.Event()
    runner = unloaded(left)
    runner.ping(Driver("handle", "node", -1, None))
    runner.start()
    assert left.wait(LIMIT_S)


def test_requests_are_refused_with_the_end() -> None:
    runner = unloaded(threading.Event())
    for request in (
        lambda: runner.savepoint("/tmp/x"),
        lambda: runner.rescale("map", 2),
        lambda: runner.migrate({"map[0]": 1}),
        runner.traffic,
    ):
        with pytest.raises(JobError, match=r"job 'job' has ended: failed; .* needs a running job"):
            request()
