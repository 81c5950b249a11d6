"""What a job says of itself: its repr, and what is known of it while its JobMaster is silent."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from penstock.actors import cluster, ray_link
from penstock.actors.ray_link import RayLink
from penstock.host.decide.commands import JobEnd
from penstock.jobs import job as job_module
from penstock.jobs.job import Job, summary
from penstock.jobs.run import jobs
from penstock.runtime.records.pickling import Program
from penstock.runtime.status import DualStatus, JobStatus, RangeFigures, RangeStatus, WorkerStatus


def test_a_running_job_says_how_long_where_and_how_much() -> None:
    workers = [WorkerStatus(index=i, pid=i, state="RUNNING", node_id="a") for i in range(2)]
    status = JobStatus(
        name="one", state="RUNNING", uptime_s=12.4, workers=workers, records_read=12_345, records_written=67
    )
    assert summary(status) == "RUNNING for 12 s on 2 workers, 12,345 records read, 67 written"


def test_a_job_that_has_failed_says_why_in_a_line() -> None:
    status = JobStatus(name="one", state="FAILED", error="operator 'map' failed: ValueError\n  record: 1")
    assert summary(status) == "FAILED: operator 'map' failed: ValueError"


def test_a_silent_jobmaster_is_told() -> None:
    assert summary(JobStatus(name="one", state="STARTING", master_silent_s=7.0)) == "STARTING, JobMaster silent for 7 s"


def never(*_: Any, **__: Any) -> Any:
    raise GetTimeoutError("no answer")


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Any:
    """JobMasters that are there and do not answer; makes jobs of this program."""
    method = SimpleNamespace(remote=lambda request: object())
    master = SimpleNamespace(ask=method)
    monkeypatch.setattr(ray_link.ray, "get", never)
    monkeypatch.setattr(ray_link.ray, "wait", lambda references, timeout: ([], references))
    monkeypatch.setattr(cluster, "jobs", lambda address: [("127.0.0.1:1", ["one"])])
    monkeypatch.setattr(cluster, "find_master", lambda name: master)

    def make(program: Program | None, last: JobStatus | None = None) -> Job:
        job = Job.__new__(Job)
        link = RayLink.__new__(RayLink)
        link.handle, link.where, link._asking, link._answered = master, "", None, 0.0
        job.name, job._program, job._link, job._last_status = "one", program, link, last
        job._asks, job._over, job._end = threading.Lock(), threading.Event(), None
        job._lock = threading.Lock()
        job_module._known["one"] = job
        return job

    yield make
    job_module._known.pop("one", None)


def test_the_list_of_jobs_tells_of_a_silent_jobmaster_what_the_job_does(silence: Any) -> None:
    job = silence(Program(), JobStatus(name="one", state="RUNNING", records_read=5))
    (listed,) = jobs()
    told = job.status()
    assert (listed["state"], listed["records_read"], listed["cluster"]) == ("RUNNING", 5, "127.0.0.1:1")
    assert listed["master_silent_s"] > 0
    assert told.changed(master_silent_s=0, cluster="127.0.0.1:1") == listed.changed(master_silent_s=0)


def test_nothing_is_known_of_a_silent_job_that_another_program_has_started(silence: Any) -> None:
    assert jobs() == [JobStatus(name="one", state="UNKNOWN", cluster="127.0.0.1:1")]
    attached = silence(None)
    assert (attached.state, jobs()[0]["state"]) == ("UNKNOWN", "UNKNOWN")
    assert attached.status().changed(master_silent_s=0.0) == JobStatus(name="one", state="UNKNOWN")
    started = silence(Program())
    assert (started.state, jobs()[0]["state"]) == ("STARTING", "STARTING")


def test_an_answer_from_before_the_end_does_not_replace_the_last_status(
    silence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for the end takes the last status while another one waits for an earlier answer."""
    job = silence(Program())

    def answer(*_: Any, **__: Any) -> JobStatus:
        job._keep_status(JobStatus(name="one", state="FINISHED", records_read=10))
        return JobStatus(name="one", state="RUNNING", records_read=5)

    monkeypatch.setattr(ray_link.ray, "get", answer)
    job.status()
    assert (job.status()["state"], job.status()["records_read"]) == ("FINISHED", 10)


def ended(job: Any) -> None:
    job._end, job._sinks, job._trouble = JobEnd("FINISHED"), {}, None
    job._told_of_late = job._told_of_spark = False
    job._news = threading.Event()
    job._over.set()


@pytest.mark.parametrize(
    ("mode", "records", "lines"), [("toggle", 0, 1), ("spark-only", 0, 1), ("toggle", 5, 0), ("auto", 0, 0)]
)
def test_a_job_that_was_to_use_spark_and_did_not_says_so_once(
    silence: Any, caplog: pytest.LogCaptureFixture, mode: str, records: int, lines: int
) -> None:
    job = silence(Program())
    ended(job)
    ranges = [
        RangeStatus(
            chain=chain,
            operators=["map"],
            partials=False,
            extent="",
            state="RECORD",
            paradigm="record",
            burst=False,
            reason=reason,
            figures=RangeFigures(),
            switches=[],
            did_not_pay=[],
            records_in_spark=count,
            unprocessed=0,
            failed=None,
            way=None,
        )
        for chain, (reason, count) in enumerate([("Spark is starting", 0), ("", records)])
    ]
    job._last_status = JobStatus(name="one", state="FINISHED", dual=DualStatus(mode=mode, ranges=ranges))
    for _ in range(2):
        job.wait(progress=False)
    assert caplog.messages == ["job 'one': no record was processed in Spark (Spark is starting)"] * lines


def test_late_records_that_nobody_takes_are_told_once(silence: Any, caplog: pytest.LogCaptureFixture) -> None:
    for dropped, lines in (({}, 0), ({"counts": 1120}, 1)):
        job = silence(Program())
        ended(job)
        job._last_status = JobStatus(name="one", state="FINISHED", late_dropped=dropped)
        for _ in range(2):
            job.wait(progress=False)
        assert len(caplog.messages) == lines
    assert "dropped: 1,120 at operator 'counts'" in caplog.messages[0]
