"""Plain PySpark for the benchmarks, with no Penstock in it: a session, and the Yahoo topology in Spark's own words.

The parse step has several forms; each is tried where the best is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FIELDS = ("ad_id", "event_type", "event_time")
_WINDOW_MS = 10_000


def session(cores: int, memory: str, **conf: str) -> SparkSession:
    """A session on cores of this machine. A shuffle has a part for each core: as good as it gets for so few."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.master": f"local[{cores}]",
        "spark.driver.memory": memory,
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        **conf,
    }
    builder: Any = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    made: SparkSession = builder.getOrCreate()
    return made


def _from_json(lines: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    schema = ", ".join(f"{name} string" for name in _FIELDS)
    return lines.select(F.from_json("value", schema).alias("event")).select("event.*")


def _json_tuple(lines: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    return lines.select(F.json_tuple("value", *_FIELDS).alias(*_FIELDS))


def _get_json_object(lines: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    return lines.select(*(F.get_json_object("value", f"$.{name}").alias(name) for name in _FIELDS))


PARSERS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "from_json": _from_json,
    "json_tuple": _json_tuple,
    "get_json_object": _get_json_object,
}


def joined(spark: SparkSession, lines: DataFrame, parser: str, campaigns: list[dict[str, str]]) -> DataFrame:
    """(campaign_id, ms) of the views among lines of JSON."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    table = spark.createDataFrame(
        [(row["ad_id"], row["campaign_id"]) for row in campaigns], "ad_id string, campaign_id string"
    )
    views = PARSERS[parser](lines).filter("event_type = 'view'")
    projected = views.select("ad_id", F.col("event_time").cast("bigint").alias("ms"))
    return projected.join(F.broadcast(table), "ad_id").select("campaign_id", "ms")


def counted(views: DataFrame) -> DataFrame:
    """(campaign_id, start, views) by window."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    begin = (F.col("ms") - F.pmod("ms", F.lit(_WINDOW_MS))).alias("start")
    return views.groupBy("campaign_id", begin).agg(F.count(F.lit(1)).alias("views"))


def counted_as_stream(views: DataFrame, late_ms: int) -> DataFrame:
    """The same by Spark's own windows, with a watermark that lets no event of the load be too late."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    timed = views.withColumn("time", F.timestamp_millis("ms")).withWatermark("time", f"{late_ms} milliseconds")
    counts = timed.groupBy("campaign_id", F.window("time", f"{_WINDOW_MS} milliseconds")).count()
    return counts.select("campaign_id", F.unix_millis("window.start").alias("start"), F.col("count").alias("views"))
