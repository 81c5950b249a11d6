"""What a plain session is, until its JVM is killed. First here, because a process has one session at a time."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.bridge.session import Session, SparkOptions, SparkUnavailable, open_session
from penstock.bridge.session.opening import self_test
from tests.bridge.test_session import wait_until, without
from tests.e2e.processes import alive

pytest.importorskip("pyspark", reason="PySpark is not installed")

pytestmark = pytest.mark.skipif(
    shutil.which("java") is None and not os.environ.get("JAVA_HOME"), reason="there is no Java here"
)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """What "auto" makes of a place without RayDP."""
    with pytest.MonkeyPatch.context() as patch:
        without(patch, "raydp")
        opened = open_session(SparkOptions(cores=2, conf={"spark.penstock.mark": "7"}))
    yield opened
    pids = [executor.pid for executor in opened.executors()] if opened.spark.sparkContext._jsc else []
    opened.stop()
    opened.stop()
    assert wait_until(lambda: not any(alive(pid) for pid in pids if pid)), "the JVM has outlived its session"


def test_auto_without_raydp_falls_back_and_says_why(session: Session) -> None:
    assert session.kind == "pyspark"
    assert session.fallback_reason is not None
    assert "RayDP is not installed" in session.fallback_reason
    assert "local[2]" in session.describe()
    assert "not RayDP: Spark cannot be used: RayDP is not installed" in session.describe()


def test_settings(session: Session) -> None:
    for key, value in {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        "spark.scheduler.mode": "FAIR",
        "spark.penstock.mark": "7",
    }.items():
        assert session.spark.conf.get(key) == value, key
    assert session.spark.sparkContext.uiWebUrl is None


def test_the_executor_of_a_local_session_is_its_jvm(session: Session) -> None:
    (executor,) = session.executors()
    assert executor.pid is not None
    assert Path(f"/proc/{executor.pid}/comm").read_text().strip() == "java"


def test_a_second_session_is_refused(session: Session) -> None:
    for kind in ("pyspark", "auto"):
        with pytest.raises(SparkUnavailable, match="has a Spark session already"):
            open_session(SparkOptions(kind=kind))  # type: ignore[arg-type]


def test_a_test_that_takes_too_long_is_cancelled(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = threading.Event()

    def never(_: object) -> pa.Table:
        asleep.wait(60)
        raise RuntimeError("woken")

    monkeypatch.setattr("penstock.bridge.arrow.to_arrow", never)
    with pytest.raises(SparkUnavailable, match=r"timed out: a test batch had not come back after 0\.2 s"):
        self_test(session, 0.2)
    asleep.set()
    monkeypatch.undo()
    self_test(session)


def test_a_wrong_answer_is_noticed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bridge.arrow.to_arrow", lambda _: pa.table({"key": [1], "count": [1]}))
    with pytest.raises(SparkUnavailable, match="came back wrong"):
        self_test(session)


def test_a_jvm_that_was_killed_is_noticed_and_can_be_replaced(session: Session, request: pytest.FixtureRequest) -> None:
    """Kept last: the folder's session follows."""
    (executor,) = session.executors()
    assert executor.pid is not None
    os.kill(executor.pid, signal.SIGKILL)
    with pytest.raises(SparkUnavailable, match="Spark cannot be used"):
        self_test(session)
    session.stop()
    other: Session = request.getfixturevalue("spark_session")
    assert other.executors()[0].pid != executor.pid
