"""A PySpark batch job over text files, in a process of its own: what Spark alone does with the same lines.

Settings: query ("ysb", "wordcount", "grep"), files, cores, memory, forms, warm, repeats, result (a file), and for "ysb"
campaigns (a file of JSON). The forms take turns, `warm` times unmeasured, then `repeats` times. Prints {form:
[seconds]}; the result file has the rows of the last run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.spark_parts import counted, joined, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def _query(spark: SparkSession, lines: DataFrame, form: str, settings: dict[str, Any]) -> DataFrame:
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    if settings["query"] == "ysb":
        return counted(joined(spark, lines, form, json.loads(Path(settings["campaigns"]).read_text())))
    if settings["query"] == "grep":
        return lines.filter(F.col("value").rlike(settings["needle"]))
    words = lines.select(F.explode(F.split(F.lower("value"), " ")).alias("word"))
    return words.groupBy("word").count()


def main(settings: dict[str, Any]) -> None:
    """See the module."""
    spark = session(settings["cores"], settings["memory"])
    seconds: dict[str, list[float]] = {form: [] for form in settings["forms"]}
    rows: list[list[Any]] = []
    for number in range(settings["warm"] + settings["repeats"]):
        for form, times in seconds.items():
            began = time.perf_counter()
            # A query of its own: the same one would find what its last run has shuffled.
            query = _query(spark, spark.read.text(settings["files"]), form, settings)
            rows = [list(row) for row in query.collect()]
            if number >= settings["warm"]:
                times.append(time.perf_counter() - began)
    spark.stop()
    Path(settings["result"]).write_text(json.dumps(rows))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
