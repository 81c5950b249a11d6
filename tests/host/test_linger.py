"""A JobMaster stays for drivers that have not fetched what they want, and what is said of one that has gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from penstock.actors.ray_link import why_it_died
from penstock.host.decide.commands import JobEnd
from penstock.host.process.linger import Driver, Drivers
from penstock.jobs.job import end_without_records
from penstock.runtime.errors import ClusterGone

SLOW, OTHER = Driver("a", "node", 1, 10), Driver("b", "node", 2, 20)


def drivers(*came: Driver, dead: tuple[Driver, ...] = (), hang_timeout_s: float = 60.0) -> Drivers:
    known = Drivers(lambda driver: driver not in dead, hang_timeout_s)
    for driver in came:
        known.came(driver)
    return known


def test_a_driver_that_lives_holds_the_jobmaster_until_it_has_all() -> None:
    known = drivers(SLOW)
    known.came(SLOW)  # Ray has asked again for it
    assert not known.may_go(59.0)
    assert known.has_all(SLOW)
    assert known.may_go(0.0)


def test_a_call_of_a_driver_that_arrives_after_it_had_all_does_not_hold_the_jobmaster() -> None:
    known = drivers(SLOW)
    known.has_all(SLOW)
    known.came(SLOW)
    assert known.may_go(0.0)


@pytest.mark.parametrize(("hang_timeout_s", "limit_s"), [(1.0, 60.0), (90.0, 90.0)])
def test_no_driver_holds_it_for_ever(hang_timeout_s: float, limit_s: float) -> None:
    known = drivers(SLOW, hang_timeout_s=hang_timeout_s)
    assert not known.may_go(limit_s - 0.1)
    assert known.may_go(limit_s)


def test_it_stays_for_the_slowest_of_several() -> None:
    known = drivers(SLOW, OTHER)
    assert not known.has_all(OTHER)
    assert not known.may_go(30.0)
    assert known.has_all(SLOW)
    assert known.may_go(30.0)


def test_dead_and_unknown_drivers_hold_it_for_seconds() -> None:
    for known in (drivers(), drivers(SLOW, OTHER, dead=(SLOW, OTHER))):
        assert not known.may_go(4.9)
        assert known.may_go(5.0)


def test_the_last_that_lives_lets_it_go_though_others_have_died() -> None:
    known = drivers(SLOW, OTHER, dead=(SLOW,))
    assert known.has_all(OTHER)
    assert known.may_go(0.0)


def test_the_wait_ends_when_the_driver_has_all() -> None:
    known = drivers(SLOW)
    waiting = threading.Thread(target=known.wait, daemon=True)
    waiting.start()
    known.has_all(SLOW)
    known.wake()
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_time_in_which_the_jobmaster_was_paused_does_not_count() -> None:
    times = iter([0.0, 1000.0])  # one look, and there was a long pause before it

    def clock() -> float:
        now = next(times, None)
        if now is None:
            known.has_all(SLOW)
        looked.append(now)
        return now or 1000.0

    looked: list[float | None] = []
    known = Drivers(lambda _: True, 60.0, clock)
    known.came(SLOW)
    known.wait()
    assert looked == [0.0, 1000.0, None]


def test_whether_a_driver_lives() -> None:
    here = Driver.here("node")
    assert here.lives()
    assert here.pid == os.getpid()
    assert here != Driver.here("node")  # a process may have several handles of a job
    assert not replace(here, started=(here.started or 0) - 1).lives()  # another process has its id now
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert not replace(here, pid=child.pid).lives()


def test_a_known_end_stands_when_nothing_is_missing() -> None:
    error = RuntimeError("the actor is dead")
    for state in ("FINISHED", "CANCELLED"):
        end = JobEnd(state)  # type: ignore[arg-type]
        assert end_without_records(end, False, error) is end
        cut = end_without_records(end, True, error)
        assert cut.state == "FAILED"
        assert "killed" not in str(cut.error)
        assert f"its JobMaster has gone after the job had ended as {state}" in str(cut.error)
        assert "the actor is dead" in str(cut.error)
    failed = JobEnd("FAILED", "a record", "map")
    assert end_without_records(failed, True, error) is failed
    assert end_without_records(JobEnd("FINISHED"), True, ClusterGone("no head")).kind == "cluster"


@pytest.mark.parametrize("hang_timeout_s", [60.0, None])
def test_a_kill_is_told_only_after_a_silence_for_which_one_is_killed(hang_timeout_s: float | None) -> None:
    assert why_it_died("gone", True, 3.0, hang_timeout_s) == "gone"
    assert why_it_died("gone", False, 90.0, hang_timeout_s) == "gone"
    assert why_it_died("gone", True, 7.0, hang_timeout_s) == "it had not answered for 7 s: gone"
    assert ("was killed" in why_it_died("gone", True, 61.0, hang_timeout_s)) is (hang_timeout_s is not None)
