"""Starts a session of RayDP, on the Ray cluster that the caller is connected to. Executors are Ray actors, and data
reaches them through Ray's object store.

RayDP would start a Ray cluster by accident, which must never happen: the caller connects first. Processes that an
abandoned start has left running are ended by process id.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import TimeoutError as TooLate
from typing import TYPE_CHECKING, Any

from penstock.bridge.session.diagnosis import (
    SparkUnavailable,
    find_java,
    installed_versions,
    require,
    text_of,
    unavailable,
)
from penstock.bridge.session.in_time import in_time
from penstock.bridge.session.jvm import STOP_SECONDS, DidNotStart, forget, refuse_second
from penstock.bridge.session.options import SparkOptions
from penstock.bridge.session.processes import spark_children
from penstock.bridge.session.session import Session
from penstock.bridge.session.settings import APP_MASTER_OPTIONS, DRIVER_OPTIONS, settings_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: RayDP's app master speaks with Ray through Java serialisation, which Java 17 keeps out of its own classes. Spark
#: opens what it needs itself, but not in that process, and not these two in its driver.
_APP_MASTER_OPENS = ("java.lang", "java.math", "java.util", "java.util.concurrent", "java.net", "java.text")
_DRIVER_OPENS = ("java.math", "java.text")

# The driver's JVM runs no records. With the quick one of Java's two compilers it takes 6.2 s of CPU for its first 50
# micro-batches of 1,000 Yahoo events, on cores that may be the record tasks', and 14.5 s with both. Its own work takes
# as long.
_DRIVER_COMPILER = "-XX:TieredStopAtLevel=1"
_EXECUTOR_CPUS = "spark.ray.raydp_spark_executor.actor.resource.cpu"


def start_raydp(options: SparkOptions) -> Session:
    """Starts a session of RayDP. Raises SparkUnavailable when that fails."""
    versions = installed_versions()
    require(versions, find_java(), find_java(path_only=True))
    if options.put is None:
        raise SparkUnavailable(
            "Spark cannot be used: RayDP needs a connected Ray and its `put`. Connect to a cluster first and give "
            "put=ray.put."
        )
    try:
        import pyspark
        import raydp.context
    except Exception as error:  # whatever loading code of others raises
        raise unavailable("raydp", text_of(error)) from error
    if not raydp.context.ray.is_initialized():
        raise SparkUnavailable("Spark cannot be used: Ray is not connected, which RayDP needs. Connect to a cluster.")
    refuse_second()
    if pyspark.SparkContext._jvm is not None:
        raise SparkUnavailable(
            "Spark cannot be used: a JVM of an earlier Spark session is still in this process, and lacks RayDP's "
            "classes. Use RayDP in a process that has had no session, or only sessions of Penstock."
        )
    os.environ["PYSPARK_PYTHON"] = options.python or sys.executable
    settings = RevocableSettings(
        {
            APP_MASTER_OPTIONS: _opens(_APP_MASTER_OPENS),
            DRIVER_OPTIONS: f"{_opens(_DRIVER_OPENS)} {_DRIVER_COMPILER}",
            **({} if options.cpus is None else {_EXECUTOR_CPUS: str(options.cpus)}),
            **settings_for(options),
        }
    )

    before = spark_children()

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
            text = text_of(error)
            _end_raydp()
            raise DidNotStart(text) from None
        return started

    def give_up() -> None:
        settings.revoked = True
        # The thread holds RayDP's lock for as long as Ray keeps it waiting, and RayDP would want it when Python ends.
        atexit.unregister(raydp.context.stop_spark)
        for pid in spark_children() - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    try:
        spark = in_time(options.start_s, work, give_up, lambda _: _end_raydp())
    except TooLate:
        raise unavailable("raydp", f"timed out: RayDP had not started after {options.start_s:g} s") from None
    except DidNotStart as error:
        raise unavailable("raydp", str(error)) from None
    return Session(spark, "raydp", options.cores * options.executors, _end_raydp, put=options.put)


class RevocableSettings(dict[str, str]):
    """Settings that cannot be read any more once their start was given up.

    RayDP reads them after it has waited for Ray, just before it makes a session or takes the one that this process has
    by then. That one may be a session of plain PySpark that was started instead, and RayDP would stop it later.
    """

    revoked = False

    def items(self) -> Any:
        if self.revoked:
            raise DidNotStart("given up")
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _opens(packages: Sequence[str]) -> str:
    return " ".join(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in packages)


def _end_raydp() -> None:
    import raydp.context
    from pyspark import SparkContext

    with contextlib.suppress(Exception):  # what it leaves is ended below
        in_time(STOP_SECONDS, raydp.context.stop_spark)
    gateway: Any = SparkContext._gateway
    if gateway is not None:
        with contextlib.suppress(Exception):  # its JVM may have gone
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
        forget(gateway)
