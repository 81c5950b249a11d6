"""Uses a session that the user has already: never changes or stops it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.bridge.session.diagnosis import SparkUnavailable
from penstock.bridge.session.options import SparkOptions
from penstock.bridge.session.session import Session
from penstock.bridge.session.settings import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def adopt(spark: SparkSession, options: SparkOptions) -> Session:
    """Returns a session beside the user's, in the same SparkContext, so that our SQL settings do not change the
    user's."""
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
