"""The door to Spark: what it says when Spark cannot be had, and that it leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as TooLate
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from penstock.bridge.session import SparkOptions, SparkUnavailable, open_session
from penstock.bridge.session.diagnosis import Java, diagnose, essence
from penstock.bridge.session.in_time import in_time
from penstock.bridge.session.jvm import DidNotStart, Jvm
from penstock.bridge.session.raydp_session import RevocableSettings
from tests.e2e.processes import alive

pytest.importorskip("pyspark", reason="PySpark is not installed")

needs_java = pytest.mark.skipif(
    shutil.which("java") is None and not os.environ.get("JAVA_HOME"), reason="there is no Java here"
)

GOOD = {"pyspark": "3.5.7", "raydp": "1.6.5", "ray": "2.60.0"}
JAVA = Java("PATH", "/bin/java", 17)


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    never = threading.Event()
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        never.wait(0.02)
    return True


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """As if these packages were not installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.fixture
def fake_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts a `java` first on the PATH that claims a version, and does something else when asked for more."""

    def install(version: str, otherwise: str = "exit 1") -> Path:
        java = tmp_path / "java"
        answer = f"echo 'openjdk version \"{version}\"' >&2; exit 0"
        java.write_text(f'#!/bin/sh\nif [ "$1" = -version ]; then {answer}; fi\n{otherwise}\n')
        java.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("JAVA_HOME", raising=False)
        return tmp_path

    return install


@pytest.mark.parametrize(
    ("versions", "java", "error", "cause", "remedy"),
    [
        ({**GOOD, "pyspark": None}, JAVA, "", "PySpark is not installed", "pip install"),
        ({**GOOD, "raydp": None}, JAVA, "", "RayDP is not installed", "pip install"),
        ({**GOOD, "ray": None}, JAVA, "", "Ray, which is not installed", "pip install ray"),
        ({**GOOD, "pyspark": "4.0.1"}, JAVA, "", "up to 3.5.7, not with 4.0.1", "pyspark==3.5.7"),
        ({**GOOD, "ray": "2.36.1"}, JAVA, "", "needs Ray 2.37", "upgrade Ray"),
        (GOOD, Java("PATH", None, None), "", "no java on the PATH", "Install Java 17"),
        (GOOD, Java("JAVA_HOME", "/no/bin/java", None), "", "JAVA_HOME points to /no/bin/java", "Install Java 17"),
        (GOOD, Java("PATH", "/bin/java", 8), "", "Java 8, too old", "Install Java 17"),
        (GOOD, Java("JAVA_HOME", "/j/bin/java", 25), "", "Java 25, too new", "Install Java 17"),
        (
            GOOD,
            JAVA,
            "java.lang.reflect.InaccessibleObjectException: Unable to make field private final byte[] "
            'java.math.BigInteger.mag accessible: module java.base does not "opens java.math" to unnamed module @1b',
            "access to java.math",
            "--add-opens=java.base/java.math=ALL-UNNAMED",
        ),
        (GOOD, JAVA, "caused by InaccessibleObjectException", "its own classes", "spark.driver.extraJavaOptions"),
        (
            GOOD,
            JAVA,
            "Executor memory 104857600 must be at least 471859200. Please increase executor memory",
            "104857600 bytes, and Spark needs at least 471859200",
            "`memory`",
        ),
        (GOOD, JAVA, "Invalid maximum heap size: -Xmx1x\n", "no such heap", "`memory`"),
        (GOOD, JAVA, "java.lang.OutOfMemoryError: Java heap space\n", "ran out of memory", "`memory`"),
        (GOOD, JAVA, "java.lang.UnsupportedClassVersionError: a/B", "too old for the classes", "same Java 17"),
        (GOOD, JAVA, "UnsupportedOperationException: getSubject is not supported", "too new", "JAVA_HOME"),
        (GOOD, JAVA, "TypeError: 'JavaPackage' object is not callable", "do not fit", "unset SPARK_HOME"),
        (GOOD, JAVA, "ModuleNotFoundError: No module named 'pyspark'", "another Python", "spark.pyspark.python"),
        (GOOD, JAVA, "1 of 2 executors came up", "1 of 2 executors", "fewer or smaller"),
        (GOOD, JAVA, "All masters are unresponsive! Giving up.", "no Spark master", "`master`"),
        (GOOD, JAVA, "timed out: no session after 60 s", "no session after 60 s", "`start_s`"),
        (GOOD, JAVA, "java.net.BindException: Cannot assign requested address", "host name", "SPARK_LOCAL_IP"),
        (GOOD, JAVA, "java.io.IOException: No space left on device", "no space left", "spark.local.dir"),
        (GOOD, JAVA, "RuntimeError: JAVA_GATEWAY_EXITED", "ended as soon as it was started", "Java 17"),
        (GOOD, JAVA, "Error: a\n\tat b.c(D.java)\nCaused by: java.x.Odd: no luck\n\tat e", "java.x.Odd: no luck", ""),
        (GOOD, Java("PATH", "/bin/java", 21), "java.x.Odd: no luck", "Java 21 may be the reason", "11 and 17"),
    ],
)
def test_the_diagnosis(versions: dict[str, str | None], java: Java, error: str, cause: str, remedy: str) -> None:
    text = diagnose(versions, java, error)
    assert text.startswith("Spark cannot be used: ")
    assert cause in text
    assert remedy in text


def test_nothing_speaks_against_what_is_known_to_work() -> None:
    assert diagnose(GOOD, JAVA, "") == ""
    assert diagnose({"pyspark": "4.0.1"}, None, "") == "", "RayDP's limits do not count without RayDP"


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="cores=0; it must be a whole number, 1 or more"):
        SparkOptions(cores=0)


# Faults that are found before anything is started, or by a start that fails. They need a process without a session.


def test_java_8_is_refused_before_anything_starts(fake_java: Any) -> None:
    fake_java("1.8.0_392", "touch $(dirname $0)/started")
    with pytest.raises(SparkUnavailable, match=r"Java 8, too old.*Install Java 17") as caught:
        open_session()
    assert "RayDP was tried" not in str(caught.value)
    assert not list(Path(os.environ["PATH"].split(":")[0]).glob("started"))


def test_java_home_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnavailable, match=f"JAVA_HOME points to {tmp_path}/bin/java, which is not a Java"):
        open_session(SparkOptions(kind="pyspark"))


def test_no_java_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkUnavailable, match="no java on the PATH"):
        open_session()


def test_pyspark_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "pyspark")
    with pytest.raises(SparkUnavailable, match="PySpark is not installed"):
        open_session()


@needs_java
def test_raydp_without_ray_is_refused() -> None:
    pytest.importorskip("raydp", reason="RayDP is not installed")
    with pytest.raises(SparkUnavailable, match="needs a connected Ray"):
        open_session(SparkOptions(kind="raydp"))
    import ray

    if not ray.is_initialized():
        with pytest.raises(SparkUnavailable, match="Ray is not connected"):
            open_session(SparkOptions(kind="raydp", put=ray.put))
        assert not ray.is_initialized(), "RayDP has started a Ray of its own"


def test_a_start_that_hangs_is_ended(fake_java: Any) -> None:
    folder = fake_java("17.0.1", "echo $$ > $(dirname $0)/pid; exec sleep 600")
    with pytest.raises(SparkUnavailable, match=r"timed out: no session after 2 s.*`start_s`"):
        open_session(SparkOptions(kind="pyspark", start_s=2))
    assert wait_until(lambda: not alive(int((folder / "pid").read_text()))), "the fake java still runs"


def test_what_java_says_as_it_fails_is_heard(fake_java: Any) -> None:
    fake_java("17.0.1", "echo 'Error: java.lang.UnsupportedClassVersionError: org/apache/spark/launcher/Main'; exit 1")
    with pytest.raises(SparkUnavailable, match="too old for the classes"):
        open_session(SparkOptions(kind="pyspark"))


@needs_java
def test_too_little_memory() -> None:
    """Also: after a start that failed in its JVM another one can follow, as the tests below show."""
    with pytest.raises(SparkUnavailable, match=r"memory is too small: \d+ bytes, and Spark needs at least 471859200"):
        open_session(SparkOptions(kind="pyspark", memory="100m"))


@needs_java
def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(SparkUnavailable, match="python='/no/such', and this machine has no such program"):
        open_session(SparkOptions(kind="pyspark", python="/no/such"))


def test_late_success_is_undone() -> None:
    go = threading.Event()
    undone: list[str] = []
    with pytest.raises(TooLate):
        in_time(0.05, lambda: "late" if go.wait(20) else "never", go.set, undone.append)
    assert undone == ["late"]


def test_a_jvm_that_is_given_up_while_it_starts_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that launches may never run again after `kill`, because the process ends."""
    home, folders = tmp_path / "spark", tmp_path / "tmp"
    (home / "bin").mkdir(parents=True)
    folders.mkdir()
    submit = home / "bin" / "spark-submit"
    submit.write_text("#!/bin/sh\nexec cat\n")  # it never says its port
    submit.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    jvm = Jvm()
    outcome: list[str] = []

    def launch() -> None:
        try:
            jvm.launch({})
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=launch)
    thread.start()
    assert wait_until(lambda: list(folders.iterdir()) != [])
    jvm.kill()
    assert list(folders.iterdir()) == []
    thread.join(20)
    assert outcome in (["JAVA_GATEWAY_EXITED"], ["given up"])
    assert list(folders.iterdir()) == []


def test_revoked_settings_cannot_be_read() -> None:
    settings = RevocableSettings({"a": "b"})
    assert dict(settings.items()) == {"a": "b"}
    assert type(pickle.loads(pickle.dumps(settings))) is dict
    settings.revoked = True
    with pytest.raises(DidNotStart):
        settings.items()


def test_the_essence_of_an_error_of_the_bridge_is_what_happened_in_spark() -> None:
    """The first line of Ray's text names the actor and its address, in colours."""
    text = (
        "RayTaskError(RangeFailed): \x1b[36mray::SparkBridge.answer()\x1b[39m (pid=13322, ip=192.0.2.2, "
        "repr=<penstock.actors.spark_bridge.SparkBridge object at 0x7f0d98febe90>)\n"
        '  File "python_range.py", line 133, in _run\n'
        "    raise RangeFailed(str(error.java_exception.getMessage())) from None\n"
        "penstock.bridge.python_range.RangeFailed: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 time,"
        " most recent failure: Lost task 0.0: org.apache.spark.SparkException: Python worker exited unexpectedly\n"
        "\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:612)\n"
        "\n"
        "Driver stacktrace:"
    )
    found = essence(text)
    assert found.startswith("penstock.bridge.python_range.RangeFailed: Job aborted")
    assert found.endswith("Python worker exited unexpectedly")
