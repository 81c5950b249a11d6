"""The states of a job."""

from __future__ import annotations

import pytest

from penstock.host.decide.job_state import ENDED, JobLife, JobState
from penstock.runtime.lifecycle import InvalidTransition


def test_a_job_starts_recovers_moves_stops_and_finishes() -> None:
    life = JobLife("job 'words'")
    assert life.state == "STARTING"
    life.removed(planned=False)  # a worker dies before any task ran: the job is starting still
    assert life.state == "STARTING"
    assert life.connected()
    assert life.state == "RUNNING"
    life.removed(planned=True)
    assert life.state == "MOVING"
    life.removed(planned=False)
    assert life.state == "RECOVERING"
    assert life.stop()
    assert life.state == "RECOVERING"
    assert not life.connected()
    assert life.state == "STOPPING"
    assert not life.ended
    life.end("FINISHED")
    assert life.ended
    assert not life.stop()
    assert life.state == "FINISHED"


def test_a_stop_before_the_start_is_kept() -> None:
    life = JobLife("job")
    life.stop()
    assert life.connected()
    assert life.state == "STOPPING"


@pytest.mark.parametrize("state", ENDED)
def test_a_job_ends_once(state: JobState) -> None:
    life = JobLife("job")
    life.connected()
    life.end(state)
    assert life.state is state
    with pytest.raises(InvalidTransition, match=f"'fail' came in state {state}"):
        life.end("FAILED")


def test_tasks_that_run_are_not_connected_again_and_tasks_that_move_do_not_move() -> None:
    life = JobLife("job")
    life.connected()
    with pytest.raises(InvalidTransition):
        life.connected()
    life.removed(planned=True)
    with pytest.raises(InvalidTransition):
        life.removed(planned=True)
