"""Starts a session of plain PySpark, on cores of this machine (`local[N]`) or on a standalone master."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from concurrent.futures import TimeoutError as TooLate
from typing import TYPE_CHECKING

from penstock.bridge.session.diagnosis import (
    SparkUnavailable,
    find_java,
    installed_versions,
    require,
    text_of,
    unavailable,
)
from penstock.bridge.session.in_time import in_time
from penstock.bridge.session.jvm import STOP_SECONDS, DidNotStart, Jvm, refuse_second
from penstock.bridge.session.options import SparkOptions
from penstock.bridge.session.session import Session
from penstock.bridge.session.settings import settings_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def start_pyspark(options: SparkOptions) -> Session:
    """Starts a session of plain PySpark. Raises SparkUnavailable when that fails."""
    require({"pyspark": installed_versions()["pyspark"]}, find_java())
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    refuse_second()
    if options.python is not None and options.master is None and shutil.which(options.python) is None:
        raise SparkUnavailable(
            f"Spark cannot be used: SparkOptions has python={options.python!r}, and this machine has no such program. "
            "Give the path of a Python interpreter, or leave python out."
        )
    os.environ["PYSPARK_PYTHON"] = options.python or sys.executable  # a bare python3 would lack what this one has
    settings = {
        "spark.driver.memory": options.memory if options.master is None else "1g",  # there the driver is the executor
        **settings_for(options),
        "spark.master": options.master or f"local[{options.cores * options.executors}]",
        "spark.app.name": options.name,
    }
    jvm = Jvm()

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
            text = text_of(error)  # as long as there is a JVM to ask
            jvm.kill()
            raise DidNotStart(text) from None

    def end(spark: SparkSession) -> None:
        with contextlib.suppress(Exception):  # its JVM is killed whatever it answers
            in_time(STOP_SECONDS, spark.stop)
        jvm.kill()

    try:
        spark = in_time(options.start_s, work, jvm.kill, end)
    except TooLate:
        late = f"timed out: no session after {options.start_s:g} s"
        raise unavailable("pyspark", f"{jvm.said()}\n{late}") from None
    except DidNotStart as error:
        raise unavailable("pyspark", f"{error}\n{jvm.said()}") from None
    cores = options.cores * options.executors
    return Session(spark, "pyspark", cores, lambda: end(spark), said=jvm.said)
