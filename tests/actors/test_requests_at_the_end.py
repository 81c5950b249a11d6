"""What a driver is told whose request is under way when the JobMaster goes: that the job has ended, if it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from penstock.actors import ray_link
from penstock.actors.job import Job
from penstock.actors.ray_link import RayLink
from penstock.runtime.errors import JobError
from penstock.runtime.host.commands import JobEnd

REQUEST, OUTCOME = object(), object()


class Gone:
    """An actor that goes while a request is under way, as Ray shows it. `outcome`: the answer to the call that waits
    for the job's end, or its error; None: the actor starts again, and the call still waits."""

    def __init__(self, outcome: JobEnd | Exception | None) -> None:
        self.outcome = outcome
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> object:
            self.asked.append((name, *arguments))
            return REQUEST

        return SimpleNamespace(options=lambda max_task_retries: SimpleNamespace(remote=remote))

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
    ("request_", "method", "arguments"),
    [
        (lambda job: job.rescale("count", 2), "rescale", ("count", 2)),
        (lambda job: job.migrate({"count[0]": 1}), "migrate", ({"count[0]": 1},)),
        (lambda job: job.savepoint("s3://bucket/x"), "savepoint", ("s3://bucket/x",)),
        (lambda job: job.traffic(), "traffic", ()),
    ],
    ids=["rescale", "migrate", "savepoint", "traffic"],
)
def test_a_request_that_the_end_of_the_job_has_interrupted(
    outcome: JobEnd | Exception | None,
    message: str,
    request_: Any,
    method: str,
    arguments: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = Gone(outcome)
    monkeypatch.setattr(ray_link.ray, "get", gone.get)
    monkeypatch.setattr(ray_link.ray, "wait", gone.wait)
    link = RayLink.__new__(RayLink)
    link.handle, link._outcome, link._name = gone, OUTCOME, "ending"
    monkeypatch.setattr(Job, "_finish", lambda self: None)  # the program has not noticed the end yet
    job = Job("ending", link, {})
    with pytest.raises(JobError, match=message.format(method)):
        request_(job)
    assert gone.asked == [(method, *arguments)]
