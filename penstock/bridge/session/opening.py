"""Opens a Spark session, from any provider, and tests it (docs/papers.md: D1, D4).

`open_session` runs a real micro-batch through a session before handing it out, which also warms it up: the prepare step
of D4 must not find out about a wrong Java in the middle of a burst. Whatever goes wrong comes out as one
SparkUnavailable that names the cause and the remedy; the job then stays in the data stream.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import TimeoutError as TooLate

from penstock.bridge.session.diagnosis import (
    SparkUnavailable,
    find_java,
    installed_versions,
    require,
    text_of,
    unavailable,
)
from penstock.bridge.session.in_time import in_time
from penstock.bridge.session.jvm import refuse_second
from penstock.bridge.session.local_session import start_pyspark
from penstock.bridge.session.options import SparkOptions
from penstock.bridge.session.raydp_session import start_raydp
from penstock.bridge.session.session import Session
from penstock.runtime.errors import shorten

logger = logging.getLogger(__name__)
_pause = threading.Event()  # never set


def open_session(options: SparkOptions | None = None) -> Session:
    """Starts a session, and tests it. Raises SparkUnavailable when there is none."""
    options = options or SparkOptions()
    if options.kind == "raydp":
        return _tested(start_raydp(options), options)
    if options.kind == "pyspark":
        return _tested(start_pyspark(options), options)
    require({"pyspark": installed_versions()["pyspark"]}, find_java())  # neither way can do without
    refuse_second()
    try:
        return _tested(start_raydp(options), options)
    except SparkUnavailable as error:
        reason = str(error)
    logger.warning("plain PySpark runs the operation stream: %s", reason)
    try:
        session = _tested(start_pyspark(options), options)
    except SparkUnavailable as error:
        raise SparkUnavailable(f"{error} RayDP was tried before: {reason}") from error
    session.fallback_reason = reason
    return session


def executor_needs(options: SparkOptions) -> dict[str, float] | None:
    """Returns the resources that an executor of RayDP asks of Ray, or None when there is no RayDP, or its memory is no
    amount."""
    try:
        from raydp.utils import parse_memory_size

        memory = float(parse_memory_size(options.memory))
    except Exception:  # what is wrong is said when the session is started
        return None
    return {"CPU": float(options.cores) if options.cpus is None else options.cpus, "memory": memory}


def self_test(session: Session, seconds: float = 60.0) -> None:
    """Runs a small real micro-batch through the session: Arrow in, a shuffle, Arrow out. Raises SparkUnavailable if it
    fails.

    It loads the code that all micro-batches need, so it takes seconds in a new session and says nothing about their
    speed.
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
        answer = in_time(seconds, work, lambda: context.cancelJobGroup(group))
    except TooLate:
        raise unavailable(session.kind, f"timed out: a test batch had not come back after {seconds:g} s") from None
    except Exception as error:  # Spark's and py4j's errors have no class of their own in common
        raise unavailable(session.kind, f"{text_of(error)}\n{session.said()}") from None
    if answer != [(1, 1), (2, 2)]:
        raise unavailable(session.kind, f"a test batch came back wrong: {shorten(answer)}")


def _tested(session: Session, options: SparkOptions) -> Session:
    """Waits for the session's executors, and tests the session. Stops the session if it does not work."""
    try:
        _await_executors(session, options)
        self_test(session, options.start_s)
    except BaseException:
        session.stop()
        raise
    logger.info("Spark is ready: %s", session.describe())
    return session


def _await_executors(session: Session, options: SparkOptions) -> None:
    local = str(session.spark.sparkContext.master).startswith("local")
    wanted = 1 if local else options.executors
    deadline = time.monotonic() + options.start_s
    while True:
        try:
            up = len(session.executors())
        except Exception as error:  # its JVM has gone
            raise unavailable(session.kind, f"{text_of(error)}\n{session.said()}") from None
        if up >= wanted:
            return
        if time.monotonic() > deadline:
            raise unavailable(session.kind, f"{up} of {wanted} executors came up\n{session.said()}")
        _pause.wait(0.05)
