"""The one door to Spark: all other code asks here for a session, whatever provides it (docs/papers.md: D1, D4).

The operation stream runs its micro-batches as DataFrame work in a Spark session. Three things can provide one:

- RayDP, on the Ray cluster that the caller is connected to: executors are Ray actors, and data goes to them through
  Ray's object store;
- plain PySpark, on cores of this machine (`local[N]`) or on a standalone master;
- a session that the user has already, which is adopted: used as it is, never changed, never stopped.

`open_session` starts one and runs a real micro-batch through it before handing it out, which also warms it up: the
prepare step of D4 must not find out about a wrong Java in the middle of a burst. Whatever goes wrong comes out as one
SparkUnavailable that names the cause and the remedy; the job then stays in the data stream.

What must never happen:

- A wait without an end: starting, testing and stopping are bounded, and what a start that was given up has left behind
  is ended, by process id.
- A Ray cluster started by accident: RayDP would do so; the caller connects first.
- A JVM that outlives `stop`. PySpark keeps its JVM for the next session, with the options of the first: RayDP's
  classes would be missing in it. A JVM that was there before is not ours to end.
- pyspark or raydp loaded by those who do not use Spark: both are imported inside functions.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.bridge.columns import SESSION_SETTINGS
from penstock.runtime.errors import PenstockError, shorten
from penstock.runtime.units import Seconds, above_zero

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: What every session of ours gets, before the caller's own settings. Those of Spark SQL also go to adopted sessions.
SETTINGS: dict[str, str] = {
    # Fixed costs of a micro-batch.
    "spark.sql.adaptive.enabled": "false",  # re-planning between stages costs more than such batches can win by it
    "spark.locality.wait": "0",  # a free core elsewhere now is better than the right one in three seconds
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",  # of results; the default of 10,000 makes more messages
    # Input becomes partitions of Arrow batches. Below the default of 48 MB the driver would turn it into rows by
    # itself: five times as slow at 100,000 rows, and out of memory at a million.
    "spark.sql.execution.arrow.localRelationThreshold": "0",
    # Several micro-batches may be under way, of ranges that differ in size: a large one must not hold up a small one.
    "spark.scheduler.mode": "FAIR",
    **SESSION_SETTINGS,  # the same answers as from the data stream
    # A stream runs for weeks: what Spark remembers of finished jobs is bounded, and the shuffle files of a finished
    # micro-batch go when the driver's garbage collector has found it, for which it may have no other reason to run.
    "spark.cleaner.periodicGC.interval": "2min",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "500",
    "spark.sql.ui.retainedExecutions": "50",
    # Quiet, and no port that nobody asked for.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}

#: RayDP's app master speaks with Ray through Java serialisation, which Java 17 keeps out of its own classes. Spark
#: opens what it needs itself, but not in that process, and not these two in its driver.
_APP_MASTER_OPENS = ("java.lang", "java.math", "java.util", "java.util.concurrent", "java.net", "java.text")
_DRIVER_OPENS = ("java.math", "java.text")
_APP_MASTER_OPTIONS = "spark.ray.raydp_app_master.extraJavaOptions"
_DRIVER_OPTIONS = "spark.driver.extraJavaOptions"
_EXECUTOR_CPUS = "spark.ray.raydp_spark_executor.actor.resource.cpu"

_OLDEST_JAVA, _NEWEST_JAVA = 11, 23  # Spark 3.5 uses what Java 24 has removed
_STOP_SECONDS = 20.0  # after which the JVM is killed
_GIVE_UP_SECONDS = 3.0
_TAIL = 80  # lines of the JVM's output that are kept for the diagnosis

_pause = threading.Event()  # never set


class SparkUnavailable(PenstockError):
    """There is no Spark session to be had, or it does not work; the message names the cause and the remedy."""


class _DidNotStart(Exception):
    """A start failed; the text is all that is known."""


@dataclass(frozen=True, kw_only=True)
class SparkOptions:
    """What session is wanted.

    `kind` "auto" is RayDP, and plain PySpark where that cannot be had. `existing` is a session to adopt; it wins over
    `kind`. With `master`, plain PySpark uses that instead of cores of this machine. `memory` is an executor's. `conf`
    wins over SETTINGS; an adopted session takes of both what Spark SQL can change. `put` is `ray.put`, which RayDP
    needs, with Ray connected; the executors go to the bundles of `placement_group` that `bundle_indexes` names, or to
    all. `cpus`: what of Ray's CPUs an executor of RayDP takes up; None: its cores, reserved for it; less, and it uses
    those that idle record tasks leave free. `python` is the interpreter for executors that run Python functions, this
    one unless named. `start_seconds` (or a timedelta) bounds the start, then the wait for executors, then the test.
    `prepare_seconds` bounds all that a job does before its first micro-batch: room on the cluster, the session, and a
    trial of the job's operators; ten times `start_seconds` unless given.
    """

    kind: Literal["auto", "raydp", "pyspark"] = "auto"
    cores: int = 2
    executors: int = 1
    memory: str = "2g"
    conf: Mapping[str, str] = field(default_factory=dict)
    put: Callable[[bytes], Any] | None = None
    placement_group: Any = None
    bundle_indexes: Sequence[int] | None = None
    cpus: float | None = None
    existing: SparkSession | None = None
    master: str | None = None
    name: str = "penstock"
    python: str | None = None
    start_seconds: Seconds = Seconds(60.0)
    prepare_seconds: float | timedelta | None = None

    @property
    def prepare_limit_s(self) -> float:
        """After so many seconds a job gives up the Spark that it prepares."""
        given = self.prepare_seconds
        return 10 * self.start_seconds if given is None else above_zero(given, "prepare_seconds")

    def __post_init__(self) -> None:
        if self.cores < 1 or self.executors < 1:
            raise ValueError(f"a Spark session needs executors and cores, got {self.executors} of {self.cores}")
        if self.cpus is not None and self.cpus < 0:
            raise ValueError(f"cpus={self.cpus}; an executor takes up 0 of Ray's CPUs or more")
        _ = self.prepare_limit_s  # raises what is wrong with it


@dataclass(frozen=True)
class Executor:
    """A process that runs tasks. `pid` is known where it runs on this machine, as this user."""

    id: str
    host: str
    pid: int | None


class Session:
    """A Spark session that has passed the test, and how to end it. Use open_session; a `with` block stops it."""

    def __init__(
        self,
        spark: SparkSession,
        kind: Literal["raydp", "pyspark", "adopted"],
        cores: int,
        end: Callable[[], None],
        *,
        put: Callable[[bytes], Any] | None = None,
        said: Callable[[], str] = lambda: "",
    ) -> None:
        self.spark = spark
        self.kind = kind
        self.cores = cores  # of all executors: into how many parts a large batch is cut
        self.put = put  # None: batches do not go through Ray's object store
        self.fallback_reason: str | None = None  # why this is not the RayDP session that "auto" would rather have
        self.owner: bytes | None = None  # Ray's address of this process, for the executors; see arrow.py
        self.said = said  # the last lines that the JVM wrote
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Session {self.kind}, {self.cores} cores>"

    def stop(self) -> None:
        """End the session and its processes, unless it was adopted. May be called more than once."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end()

    def executors(self) -> list[Executor]:
        """The executors that are up: of `local[N]` that is the driver itself."""
        context: Any = self.spark.sparkContext
        found = context._jsc.sc().statusStore().executorList(True)
        summaries = [found.apply(i) for i in range(found.size())]
        alone = len(summaries) == 1 and context.master.startswith("local")
        addresses = {s.id(): s.hostPort().rpartition(":") for s in summaries if alone or s.id() != "driver"}
        addresses = {id: address for id, address in addresses.items() if address[1]}  # no port yet: not ready
        pids = _listeners({int(port) for _, _, port in addresses.values()})
        local = {"localhost", "127.0.0.1", context.getConf().get("spark.driver.host")}
        return [
            Executor(id, host, pids.get(int(port)) if host in local else None)
            for id, (host, _, port) in addresses.items()
        ]

    def describe(self) -> str:
        """One line for people and logs."""
        context = self.spark.sparkContext
        java = context._jvm.java.lang.System.getProperty("java.version")
        names = {"raydp": "RayDP", "pyspark": "PySpark", "adopted": "the user's own session"}
        text = f"{names[self.kind]} on {context.master}, {self.cores} cores, Spark {context.version}, Java {java}"
        return f"{text} (not RayDP: {self.fallback_reason})" if self.fallback_reason else text


def open_session(options: SparkOptions | None = None) -> Session:
    """Start or adopt a session and test it. SparkUnavailable when there is none to be had."""
    options = options or SparkOptions()
    if options.existing is not None:
        return _tested(_adopt(options.existing, options), options)
    if options.kind == "raydp":
        return _tested(_start_raydp(options), options)
    if options.kind == "pyspark":
        return _tested(_start_pyspark(options), options)
    _require({"pyspark": _versions()["pyspark"]}, _find_java())  # neither way can do without
    _refuse_second()
    try:
        return _tested(_start_raydp(options), options)
    except SparkUnavailable as error:
        reason = str(error)
    logger.warning("plain PySpark runs the operation stream: %s", reason)
    try:
        session = _tested(_start_pyspark(options), options)
    except SparkUnavailable as error:
        raise SparkUnavailable(f"{error} RayDP was tried before: {reason}") from error
    session.fallback_reason = reason
    return session


def executor_needs(options: SparkOptions) -> dict[str, float] | None:
    """What an executor of RayDP asks of Ray; None where there is no RayDP, or its memory is no amount."""
    try:
        from raydp.utils import parse_memory_size

        memory = float(parse_memory_size(options.memory))
    except Exception:
        return None
    return {"CPU": float(options.cores) if options.cpus is None else options.cpus, "memory": memory}


def self_test(session: Session, seconds: float = 60.0) -> None:
    """Run a small real micro-batch through the session: Arrow in, a shuffle, Arrow out. SparkUnavailable if it fails.

    It loads the code that all others need, so it takes seconds in a new session and says nothing about their speed.
    """
    group = f"penstock-self-test-{id(session)}"
    context = session.spark.sparkContext

    def work() -> list[tuple[int, int]]:
        import pyarrow as pa

        from penstock.bridge.arrow import micro_batch, to_arrow

        context.setJobGroup(group, "Penstock's self-test", True)
        batch = pa.table({"key": pa.array([1, 2, 2, None], pa.int64()), "text": ["a", "b", "c", "d"]})
        with micro_batch(session, batch) as frame:
            counts = to_arrow(frame.filter("key is not null").groupBy("key").count())
        return sorted(zip(counts["key"].to_pylist(), counts["count"].to_pylist(), strict=True))

    try:
        answer = _in_time(seconds, work, lambda: context.cancelJobGroup(group))
    except TooLate:
        raise _unavailable(session.kind, f"timed out: a test batch had not come back after {seconds:g} s") from None
    except Exception as error:
        raise _unavailable(session.kind, f"{_text(error)}\n{session.said()}") from None
    if answer != [(1, 1), (2, 2)]:
        raise _unavailable(session.kind, f"a test batch came back wrong: {shorten(answer)}")


@dataclass(frozen=True)
class Java:
    """The java program that would run: `origin` says what chose it, `major` is None when it does not answer."""

    origin: Literal["JAVA_HOME", "PATH"]
    path: str | None
    major: int | None


def diagnose(versions: Mapping[str, str | None], java: Java | None, error_text: str) -> str:
    """Why Spark cannot be used, and what to do; "" when nothing speaks against it and `error_text` is empty.

    `versions` has the packages that are needed: None for one that is not installed, no key where it does not matter.
    """
    cause = _wrong_packages(versions) or (_wrong_java(java) if java else "")
    if not cause and error_text:
        for pattern, explanation in _SYMPTOMS:
            if found := re.search(pattern, error_text, re.DOTALL):
                cause = explanation.format(*found.groups())
                break
        else:
            cause = f"{_essence(error_text)}."
            if java and java.major and java.major > 17:
                cause += f" Java {java.major} may be the reason: Spark 3.5 is made for 11 and 17."
    if not cause:
        return ""
    found_here = [f"{name} {version or 'missing'}" for name, version in versions.items()]
    if java and java.major:
        found_here.append(f"Java {java.major} at {java.path}")
    return f"Spark cannot be used: {cause} (Found: {', '.join(found_here)}.)"


def _wrong_packages(versions: Mapping[str, str | None]) -> str:
    if "pyspark" in versions and versions["pyspark"] is None:
        return "PySpark is not installed; install it with: pip install 'penstock[spark]'."
    if "raydp" not in versions:
        return ""
    if versions["raydp"] is None:
        return "RayDP is not installed; install it with: pip install 'penstock[spark]'."
    if "ray" in versions and versions["ray"] is None:
        return "RayDP needs Ray, which is not installed; install it with: pip install ray."
    raydp, pyspark, ray = (_numbers(versions.get(name)) for name in ("raydp", "pyspark", "ray"))
    if raydp < (1, 7) and pyspark > (3, 5, 7):
        return (
            f"RayDP {versions['raydp']} works with PySpark up to 3.5.7, not with {versions['pyspark']}; "
            "install it with: pip install 'pyspark==3.5.7'."
        )
    if ray and ray < (2, 37):
        return f"RayDP {versions['raydp']} needs Ray 2.37 or newer; upgrade Ray."
    return ""


def _wrong_java(java: Java) -> str:
    which = f"{java.origin} points to {java.path}" if java.origin == "JAVA_HOME" else f"the PATH leads to {java.path}"
    remedy = "Install Java 17 and let JAVA_HOME, or the PATH without it, lead to it."
    if java.path is None:
        return f"there is no java on the PATH and JAVA_HOME is not set. {remedy}"
    if java.major is None:
        return f"{which}, which is not a Java that runs. {remedy}"
    if java.major < _OLDEST_JAVA:
        return f"{which}, which is Java {java.major}, too old. {remedy}"
    if java.major > _NEWEST_JAVA:
        return f"{which}, which is Java {java.major}, too new for Spark 3.5. {remedy}"
    return ""


#: What errors say, and what that means. The first that is found counts.
_SYMPTOMS: tuple[tuple[str, str], ...] = (
    (
        r"InaccessibleObjectException.{0,300}?module ([\w.]+) does not \"opens ([\w.]+)",
        "Java refuses access to {1}: the option --add-opens={0}/{1}=ALL-UNNAMED is missing. A `conf` that sets "
        f"{_APP_MASTER_OPTIONS} or {_DRIVER_OPTIONS} replaces Penstock's: add the option there.",
    ),
    (
        r"InaccessibleObjectException",
        "Java refuses access to its own classes: an option --add-opens is missing. A `conf` that sets "
        f"{_APP_MASTER_OPTIONS} or {_DRIVER_OPTIONS} replaces Penstock's: add the option there.",
    ),
    (
        r"(?:Executor|System) memory (\d+) must be at least (\d+)",
        "the executors' memory is too small: {0} bytes, and Spark needs at least {1}. Ask for more with `memory`, "
        'such as "1g".',
    ),
    (
        r"(?:Invalid maximum heap size|Too small (?:initial|maximum) heap|Could not reserve enough space)[^\n]*",
        'Java takes no such heap. Ask for another amount with `memory`, such as "1g".',
    ),
    (
        r"OutOfMemoryError: ([^\n]*)",
        "the JVM ran out of memory ({0}). Ask for more with `memory`, or spark.driver.memory in `conf`.",
    ),
    (
        r"UnsupportedClassVersionError",
        "some JVM is too old for the classes it was given. Let JAVA_HOME and the PATH of every node lead to the same "
        "Java 17.",
    ),
    (
        r"getSubject is (?:not supported|supported only)|Security Manager",
        "the JVM is too new for Spark 3.5. Install Java 17 and let JAVA_HOME lead to it.",
    ),
    (
        r"'JavaPackage' object is not callable|NoSuchMethodError|NoClassDefFoundError|ClassNotFoundException"
        r"|No shim|py4j\.Py4JException: Method",
        "the versions of PySpark, RayDP and Ray do not fit each other, or SPARK_HOME leads to another Spark. "
        "PySpark 3.5.7 with RayDP 1.6.5 is known to work: pip install 'penstock[spark]', and unset SPARK_HOME.",
    ),
    (
        r"No module named '?(pyspark|py4j|pyarrow)|Python in worker has different version",
        "the executors run another Python than this one. Unset spark.pyspark.python, or set `python`.",
    ),
    (
        r"(\d+ of \d+) executors came up",
        "timed out: {0} executors came up. The cluster has no free cores or memory for more, or cannot be reached: "
        "ask for fewer or smaller ones, or give a busy cluster more time with `start_seconds`.",
    ),
    (
        r"All masters are unresponsive|Could not parse Master URL|Failed to connect to master|Invalid master URL",
        "no Spark master answers at `master`. Check its address, and that it runs the same version of Spark.",
    ),
    (
        r"(timed out: [^\n]*)",
        "{0}. Give a busy machine more time with `start_seconds`, and look for other causes with "
        'conf={{"spark.log.level": "INFO"}} and logging at DEBUG.',
    ),
    (
        r"UnknownHostException|BindException|Cannot assign requested address",
        "the driver cannot use its own host name. Set SPARK_LOCAL_IP to an address of this machine.",
    ),
    (r"No space left on device", "there is no space left on a disk that Spark writes to. See spark.local.dir."),
    (r"JAVA_GATEWAY_EXITED|Java gateway process exited", "its JVM ended as soon as it was started."),
)


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])


def _essence(text: str) -> str:
    """The line of a long error text that says most: the innermost cause, or the last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by: ")]
    raised = [line for line in lines if re.match(r"(?:: )?[\w.]+(?:Error|Exception)\b", line)]
    best = (causes or raised or lines)[-1]
    return best.removeprefix("Caused by: ").lstrip(": ")[:400].rstrip(".")


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # py4j's errors ask the JVM for their text, and it may be the JVM that has gone
        return f"{type(error).__name__}: the JVM has ended"


def _versions() -> dict[str, str | None]:
    """What is installed, without loading any of it."""
    versions: dict[str, str | None] = {}
    for name in ("pyspark", "raydp", "ray"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _find_java(*, path_only: bool = False) -> Java:
    """The java that Spark's scripts would run; `path_only`: that of RayDP's own processes, which know no JAVA_HOME."""
    home = "" if path_only else os.environ.get("JAVA_HOME", "")
    path = f"{home}/bin/java" if home else shutil.which("java")
    origin: Literal["JAVA_HOME", "PATH"] = "JAVA_HOME" if home else "PATH"
    if path is None:
        return Java(origin, None, None)
    try:
        out = subprocess.run(
            [path, "-version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20, check=False
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return Java(origin, path, None)
    found = re.search(r'version "(?:1\.)?(\d+)', out)
    return Java(origin, path, int(found[1]) if found else None)


def _require(versions: Mapping[str, str | None], *javas: Java) -> None:
    for java in javas:
        if problem := diagnose(versions, java, ""):
            raise SparkUnavailable(problem)


def _unavailable(kind: str, error_text: str) -> SparkUnavailable:
    """The error for what went wrong in a session of this kind.

    It is not chained to Spark's own: this would be asked for its text when there is no JVM left that knows it.
    """
    logger.debug("Spark failed: %s", error_text)
    versions = _versions()
    if kind != "raydp":
        versions = {"pyspark": versions["pyspark"]}
    return SparkUnavailable(diagnose(versions, None if kind == "adopted" else _find_java(), error_text))


def _in_time(
    seconds: float,
    work: Callable[[], T],
    give_up: Callable[[], None] = lambda: None,
    undo: Callable[[T], None] = lambda _: None,
) -> T:
    """work(), in a thread of its own. TooLate after `seconds`, when `give_up` is called, which should make it fail;
    should it succeed after that, `undo` is called with what it returned."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):
                outcome.set_exception(error)
            return
        try:
            outcome.set_result(value)
        except InvalidStateError:
            undo(value)

    thread = threading.Thread(target=run, name="penstock-spark", daemon=True)
    thread.start()
    try:
        return outcome.result(seconds)
    except TooLate:
        if not outcome.cancel():  # it has just ended
            return outcome.result()
        give_up()
        thread.join(_GIVE_UP_SECONDS)  # what it takes away itself is gone, as a rule, when the caller tries again
        raise


def _tested(session: Session, options: SparkOptions) -> Session:
    """Wait for its executors and try it out; stop it if it does not work."""
    try:
        if session.kind != "adopted":
            _await_executors(session, options)
        self_test(session, options.start_seconds)
    except BaseException:
        session.stop()
        raise
    logger.info("Spark is ready: %s", session.describe())
    return session


def _await_executors(session: Session, options: SparkOptions) -> None:
    local = str(session.spark.sparkContext.master).startswith("local")
    wanted = 1 if local else options.executors
    deadline = time.monotonic() + options.start_seconds
    while True:
        try:
            up = len(session.executors())
        except Exception as error:  # its JVM has gone
            raise _unavailable(session.kind, f"{_text(error)}\n{session.said()}") from None
        if up >= wanted:
            return
        if time.monotonic() > deadline:
            raise _unavailable(session.kind, f"{up} of {wanted} executors came up\n{session.said()}")
        _pause.wait(0.05)


def _settings(options: SparkOptions) -> dict[str, str]:
    cores = str(options.cores * options.executors)
    own = {
        "spark.sql.shuffle.partitions": cores,  # each further one is a task to schedule, and there is no core for it
        "spark.default.parallelism": cores,
        "spark.executor.memory": options.memory,
        "spark.executor.cores": str(options.cores),
        "spark.executor.instances": str(options.executors),
        "spark.cores.max": cores,  # a standalone master would give all it has
    }
    return {**SETTINGS, **own, **{key: str(value) for key, value in options.conf.items()}}


# --- a session that is there already ----------------------------------------------------------------------------------


def _adopt(spark: SparkSession, options: SparkOptions) -> Session:
    """A session beside the user's, in the same SparkContext: our SQL settings do not touch theirs."""
    jsc = getattr(getattr(spark, "_sc", None), "_jsc", None)
    if jsc is None:
        raise SparkUnavailable(
            "Spark cannot be used: the session to adopt has been stopped, or is one of Spark Connect, which has no JVM "
            "in this process. Give one that runs here, or none."
        )
    context: Any = spark.sparkContext
    cores = max(1, int(context.defaultParallelism))
    own = spark.newSession()
    wanted = {**SETTINGS, "spark.sql.shuffle.partitions": str(cores), **options.conf}
    for key, value in wanted.items():
        if key.startswith("spark.sql.") and not key.startswith("spark.sql.ui."):  # others cannot change any more
            own.conf.set(key, str(value))
    # RayDP's master: its executors can take batches from Ray's object store, if we can put them there.
    put = options.put if context.master.startswith("ray://") else None
    return Session(own, "adopted", cores, lambda: None, put=put)


# --- plain PySpark ----------------------------------------------------------------------------------------------------


def _start_pyspark(options: SparkOptions) -> Session:
    _require({"pyspark": _versions()["pyspark"]}, _find_java())
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    _refuse_second()
    os.environ["PYSPARK_PYTHON"] = options.python or sys.executable  # a bare python3 would lack what this one has
    settings = {
        "spark.driver.memory": options.memory if options.master is None else "1g",  # there the driver is the executor
        **_settings(options),
        "spark.master": options.master or f"local[{options.cores * options.executors}]",
        "spark.app.name": options.name,
    }
    jvm = _Jvm()

    def work() -> SparkSession:
        try:
            if SparkContext._gateway is None:
                SparkContext._gateway = jvm.launch(settings)
                SparkContext._jvm = SparkContext._gateway.jvm
            conf = SparkConf()
            for key, value in settings.items():
                conf.set(key, value)
            return SparkSession(SparkContext(conf=conf))
        except BaseException as error:
            text = _text(error)  # as long as there is a JVM to ask
            jvm.kill()
            raise _DidNotStart(text) from None

    def end(spark: SparkSession) -> None:
        with contextlib.suppress(TooLate, Exception):
            _in_time(_STOP_SECONDS, spark.stop)
        jvm.kill()

    try:
        spark = _in_time(options.start_seconds, work, jvm.kill, end)
    except TooLate:
        late = f"timed out: no session after {options.start_seconds:g} s"
        raise _unavailable("pyspark", f"{jvm.said()}\n{late}") from None
    except _DidNotStart as error:
        raise _unavailable("pyspark", f"{error}\n{jvm.said()}") from None
    cores = options.cores * options.executors
    return Session(spark, "pyspark", cores, lambda: end(spark), said=jvm.said)


class _Jvm:
    """The driver's JVM, started here rather than by PySpark, which waits without a limit, holds a lock while it does,
    and shows all that the JVM writes. `launch` may be interrupted by `kill` at any time."""

    def __init__(self) -> None:
        self.gateway: Any = None  # ours, and only then ours to end
        self._lines: deque[str] = deque(maxlen=_TAIL)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()

    def said(self) -> str:
        return "\n".join(self._lines)

    def launch(self, settings: Mapping[str, str]) -> Any:
        from pyspark.find_spark_home import _find_spark_home  # noqa: PLC2701
        from pyspark.java_gateway import launch_gateway
        from pyspark.serializers import UTF8Deserializer, read_int

        command = [os.path.join(_find_spark_home(), "bin", "spark-submit")]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        with tempfile.TemporaryDirectory(prefix="penstock-spark-") as folder:
            file = Path(folder, "port")
            with self._lock:
                if self._killed:
                    raise RuntimeError("given up")
                self._process = process = subprocess.Popen(
                    [*command, "pyspark-shell"],
                    stdin=subprocess.PIPE,  # it ends when this pipe does, so also when this process is killed
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "_PYSPARK_DRIVER_CONN_INFO_PATH": str(file)},
                    start_new_session=True,  # Ctrl-C is for this process, which then stops Spark in order
                )
            listener = threading.Thread(target=self._listen, args=(process,), name="penstock-spark-log", daemon=True)
            listener.start()
            while not file.exists():
                if process.poll() is not None:
                    listener.join(5)
                    raise RuntimeError("JAVA_GATEWAY_EXITED")
                _pause.wait(0.02)
            with file.open("rb") as stream:  # it appears under this name when it is whole
                port, secret = read_int(stream), UTF8Deserializer().loads(stream)
        # PySpark's own way of joining a JVM that somebody else has started.
        names = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
        os.environ.update(names)
        try:
            self.gateway = launch_gateway()
        finally:
            for name in names:
                os.environ.pop(name, None)
        return self.gateway

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            logger.debug("Spark: %s", text)
        process.stdout.close()

    def kill(self) -> None:
        """End it and what it has started, if it was launched."""
        with self._lock:
            self._killed = True
            process = self._process
        if self.gateway is not None:
            with contextlib.suppress(Exception):
                self.gateway.shutdown()
        if process is not None:
            self._end(process)
        if self.gateway is not None:
            _forget(self.gateway)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        if self.gateway is not None:  # it leaves by itself, and takes its temporary files away
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the group is its own, with what the start script has started
            process.wait()


def _forget(gateway: Any) -> None:
    """Let PySpark have another JVM next time: this one has ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._gateway is not gateway:
        return
    if SparkContext._active_spark_context is not None:  # it could not be stopped in order
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SparkContext._active_spark_context.stop()
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkSession._instantiatedSession = None
    SparkSession._activeSession = None


def _refuse_second() -> None:
    from pyspark import SparkContext

    active = SparkContext._active_spark_context
    if active is not None:
        raise SparkUnavailable(
            f"Spark cannot be used: this process has a Spark session already ({active.appName} on {active.master}), "
            "and can have one only. Give it as `existing`, or stop it first."
        )


# --- RayDP ------------------------------------------------------------------------------------------------------------


def _start_raydp(options: SparkOptions) -> Session:
    versions = _versions()
    _require(versions, _find_java(), _find_java(path_only=True))
    if options.put is None:
        raise SparkUnavailable(
            "Spark cannot be used: RayDP needs a connected Ray and its `put`. Connect to a cluster first and give "
            "put=ray.put."
        )
    try:
        import pyspark
        import raydp.context
    except Exception as error:
        raise _unavailable("raydp", _text(error)) from error
    if not raydp.context.ray.is_initialized():
        raise SparkUnavailable("Spark cannot be used: Ray is not connected, which RayDP needs. Connect to a cluster.")
    _refuse_second()
    if pyspark.SparkContext._jvm is not None:
        raise SparkUnavailable(
            "Spark cannot be used: a JVM of an earlier Spark session is still in this process, and lacks RayDP's "
            "classes. Use RayDP in a process that has had no session, or only sessions of Penstock."
        )
    os.environ["PYSPARK_PYTHON"] = options.python or sys.executable
    settings = _RevocableSettings(
        {
            _APP_MASTER_OPTIONS: _opens(_APP_MASTER_OPENS),
            _DRIVER_OPTIONS: _opens(_DRIVER_OPENS),
            **({} if options.cpus is None else {_EXECUTOR_CPUS: str(options.cpus)}),
            **_settings(options),
        }
    )

    before = _spark_children()

    def work() -> SparkSession:
        # The name is also that of an actor: two jobs of a cluster must not share it.
        try:
            started: SparkSession = raydp.init_spark(
                f"{options.name}-{os.urandom(4).hex()}",
                options.executors,
                options.cores,
                options.memory,
                placement_group=options.placement_group,
                placement_group_bundle_indexes=None if options.bundle_indexes is None else list(options.bundle_indexes),
                configs=settings,
            )
        except BaseException as error:
            text = _text(error)
            _end_raydp()
            raise _DidNotStart(text) from None
        return started

    def give_up() -> None:
        settings.revoked = True
        # The thread holds RayDP's lock for as long as Ray keeps it waiting, and RayDP would want it when Python ends.
        atexit.unregister(raydp.context.stop_spark)
        for pid in _spark_children() - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    try:
        spark = _in_time(options.start_seconds, work, give_up, lambda _: _end_raydp())
    except TooLate:
        raise _unavailable("raydp", f"timed out: RayDP had not started after {options.start_seconds:g} s") from None
    except _DidNotStart as error:
        raise _unavailable("raydp", str(error)) from None
    return Session(spark, "raydp", options.cores * options.executors, _end_raydp, put=options.put)


class _RevocableSettings(dict[str, str]):
    """Settings that cannot be read once the start that they are for has been given up.

    RayDP reads them after it has waited for Ray, just before it makes a session, or takes the one that there is by then
    in this process: that of the plain PySpark which was started instead, and which it would stop later.
    """

    revoked = False

    def items(self) -> Any:
        if self.revoked:
            raise _DidNotStart("given up")
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _opens(packages: Sequence[str]) -> str:
    return " ".join(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in packages)


def _end_raydp() -> None:
    import raydp.context
    from pyspark import SparkContext

    with contextlib.suppress(TooLate, Exception):
        _in_time(_STOP_SECONDS, raydp.context.stop_spark)
    gateway: Any = SparkContext._gateway
    if gateway is not None:
        with contextlib.suppress(Exception):
            gateway.shutdown()
        process = gateway.proc
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _forget(gateway)


# --- processes --------------------------------------------------------------------------------------------------------


def _spark_children() -> set[int]:
    """The JVMs of PySpark, or the scripts that start them, that are children of this process."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"pyspark-shell" in (process / "cmdline").read_bytes():
                found.add(int(process.name))
    return found


def _listeners(ports: set[int]) -> dict[int, int]:
    """The process that listens at each port of this machine, as far as this user may know.

    Spark knows its executors by address only, and its own way to learn more is to run a task.
    """
    inodes: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                port = int(fields[1].rpartition(":")[2], 16)
                if fields[3] == "0A" and port in ports:
                    inodes[f"socket:[{fields[9]}]"] = port
    return {inodes[link]: pid for pid, link in _open_files() if link in inodes} if inodes else {}


def _open_files() -> Iterator[tuple[int, str]]:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield int(process.name), str(file.readlink())
