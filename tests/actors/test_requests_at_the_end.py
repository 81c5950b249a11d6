"""What a driver is told whose request is under way when the JobMaster goes, that the job has ended, if it has; and when
the time of the request is over."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from penstock.actors import cluster, ray_link
from penstock.actors.ray_link import RayLink
from penstock.apps import cli
from penstock.host.carry.requests import Migrate, Request, Rescale, Savepoint, Traffic
from penstock.host.decide.commands import JobEnd
from penstock.jobs.job import Job
from penstock.runtime.errors import JobError

REQUEST, OUTCOME = object(), object()


class Gone:
    """An actor that goes while a request is under way, as Ray shows it. `outcome`: the answer to the call that waits
    for the job's end, or its error; None: the actor starts again, and the call still waits."""

    def __init__(self, outcome: JobEnd | Exception | None) -> None:
        self.outcome = outcome
        self.asked: list[Request[Any]] = []
        self.ask = SimpleNamespace(options=lambda max_task_retries: SimpleNamespace(remote=self._asked))

    def _asked(self, request: Request[Any]) -> object:
        self.asked.append(request)
        return REQUEST

    def get(self, reference: object, timeout: float | None = None) -> Any:
        """As ray.get."""
        if reference is REQUEST:
            raise ActorDiedError
        assert reference is OUTCOME
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def wait(self, references: list[object], timeout: float) -> tuple[list[object], list[object]]:
        """As ray.wait."""
        assert references == [OUTCOME]
        return ([], references) if self.outcome is None else (references, [])


def job_of(actor: Gone, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The handle of a job that has this actor for its JobMaster."""
    monkeypatch.setattr(cluster, "_connection", None)  # an earlier test of this process may have made one
    monkeypatch.setattr(ray_link.ray, "get", actor.get)
    monkeypatch.setattr(ray_link.ray, "wait", actor.wait)
    link = RayLink.__new__(RayLink)
    link.handle, link._outcome, link._name = actor, OUTCOME, "ending"
    monkeypatch.setattr(Job, "_finish", lambda self: None)  # the program has not noticed the end yet
    return Job("ending", link, {})


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (JobEnd("FINISHED"), r"^job 'ending' has ended: finished; {} needs a running job$"),
        (JobEnd("CANCELLED"), r"^job 'ending' has ended: cancelled; {} needs a running job$"),
        (JobEnd("FAILED", "it was full"), r"^job 'ending' has ended: failed; {} needs a running job$"),
        (ActorDiedError(), r"^job 'ending' has ended: failed; {} needs a running job$"),
        (None, r"^{} was interrupted, because the job's JobMaster died; try again$"),
    ],
    ids=["finished", "cancelled", "failed", "died", "starts again"],
)
@pytest.mark.parametrize(
    ("request_", "verb", "asked"),
    [
        (lambda job: job.rescale("count", 2), "rescale", Rescale("count", 2)),
        (lambda job: job.migrate({"count[0]": 1}), "migrate", Migrate({"count[0]": 1})),
        (lambda job: job.savepoint("s3://bucket/x"), "savepoint", Savepoint("s3://bucket/x")),
        (lambda job: job.traffic(), "traffic", Traffic()),
    ],
    ids=["rescale", "migrate", "savepoint", "traffic"],
)
def test_a_request_that_the_end_of_the_job_has_interrupted(
    outcome: JobEnd | Exception | None,
    message: str,
    request_: Any,
    verb: str,
    asked: Request[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = Gone(outcome)
    job = job_of(gone, monkeypatch)
    with pytest.raises(JobError, match=message.format(verb)):
        request_(job)
    assert gone.asked == [asked]


class Late(Gone):
    """A JobMaster that gives a request up in time, or does not answer at all."""

    def __init__(self, error: Exception) -> None:
        super().__init__(None)
        self.error = error
        self.limits: list[float | None] = []  # threads of other tests may ask too, because ray.get is everybody's

    def get(self, reference: object, timeout: float | None = None) -> Any:
        """As ray.get."""
        assert reference is REQUEST
        self.limits.append(timeout)
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RayTaskError("savepoint", "", TimeoutError("it waits for a task")), "^it waits for a task$"),
        (GetTimeoutError(), "^job 'ending': its JobMaster has not answered savepoint within 3 s, nor 15 s later; "),
    ],
    ids=["given up", "silent"],
)
def test_a_savepoint_with_a_time_limit(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(error)
    job = job_of(late, monkeypatch)
    with pytest.raises(TimeoutError, match=message):
        job.savepoint("s3://bucket/x", timeout_s=timedelta(seconds=3))
    assert late.asked == [Savepoint("s3://bucket/x", 3.0)]
    assert 18 in late.limits


def test_the_time_limit_of_a_savepoint_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = Late(RayTaskError("savepoint", "", TimeoutError("it waits for a task")))
    job = job_of(late, monkeypatch)
    monkeypatch.setattr(cli, "_attach", lambda options: job)
    assert cli.main(["savepoint", "ending", "s3://bucket/x", "--timeout", "3"]) == 1
    assert late.asked == [Savepoint("s3://bucket/x", 3.0)]
    assert "it waits for a task" in capsys.readouterr().err
