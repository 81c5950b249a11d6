"""The Yahoo topology in Spark Structured Streaming, in a process of its own.

A feeder thread writes the events that have fallen due as a text file every `every_s` seconds into a folder in memory,
from which the query reads: what a connector to a message queue would do, with less overhead. Update mode, default
trigger: a micro-batch begins as soon as the one before has ended. Results are emitted when foreachBatch has collected
them in the driver. A first query over other events loads and compiles all code before the start.

Settings: steps, seed, folder, cores, memory, parser, every_s. Leaves the updates in the folder, and in "stream.json"
the start and each micro-batch: when it began and ended, in seconds since the start, its rows, and what Spark says it
was doing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.spark_parts import counted_as_stream, joined, session
from benchmarks.ysb_load import NS, Load, Updates, start, write_lines
from penstock.apps.ysb_events import LATE_MS, SKEW_MS, Events

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

_WARM_FILES, _WARM_LINES = 40, 20_000  # of the first query; until then the JVM has compiled what it will
_END_S = 300.0  # after the last event, for a query that has fallen behind


def _query(
    spark: SparkSession, settings: dict[str, Any], name: str, campaigns: list[dict[str, str]], updates: Updates
) -> StreamingQuery:
    folder = Path(settings["folder"])
    (folder / name).mkdir()
    lines = spark.readStream.text(str(folder / name))
    counts = counted_as_stream(joined(spark, lines, settings["parser"], campaigns), LATE_MS + 2 * SKEW_MS)

    def emit(frame: DataFrame, _: int) -> None:
        updates.note([tuple(row) for row in frame.collect()])

    writer = counts.writeStream.outputMode("update").foreachBatch(emit)
    return writer.option("checkpointLocation", str(folder / f"{name}-checkpoints")).start()


def _read(query: StreamingQuery) -> int:
    return sum(int(progress["numInputRows"]) for progress in query.recentProgress)


def _await(query: StreamingQuery, rows: int, limit_s: float) -> None:
    """Until so many rows have been read and answered."""
    deadline = time.monotonic() + limit_s
    while _read(query) < rows:
        if not query.isActive or time.monotonic() > deadline:
            raise RuntimeError(f"{_read(query)} of {rows} rows read: {query.exception() or 'not in time'}")
        time.sleep(0.2)


def _feed(load: Load, folder: Path, every_s: float, start_ns: int) -> None:
    """Write what has fallen due, until nothing is left."""
    events, number, made, part = load.events, load.number, 0, 0
    while made < number:
        part += 1
        time.sleep(max(0.0, start_ns / NS + part * every_s - time.time()))
        upto = min(number, events.count_due(time.time_ns() - start_ns, made))
        if upto > made:
            write_lines(events, made, upto - made, folder / f"{part:06d}.txt")
        made = max(made, upto)


def _story(query: StreamingQuery, start_ns: int) -> list[dict[str, Any]]:
    story = []
    for progress in query.recentProgress:
        if not progress["numInputRows"]:
            continue
        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp() - start_ns / NS
        took = progress["durationMs"]
        end = began + took["triggerExecution"] / 1e3
        story.append({"began": began, "ended": end, "rows": progress["numInputRows"], "ms": dict(took)})
    return story


def main(settings: dict[str, Any]) -> None:
    """See the module."""
    folder = Path(settings["folder"])
    load = Load(settings["steps"], seed=settings["seed"])
    events = load.events
    spark = session(
        settings["cores"],
        settings["memory"],
        **{
            "spark.sql.streaming.numRecentProgressUpdates": "100000",
            "spark.sql.streaming.noDataMicroBatches.enabled": "false",  # they would only clear state away
            # In a folder of this machine it is 0.1 s a micro-batch quicker than the default.
            "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming."
            "FileSystemBasedCheckpointFileManager",
        },
    )
    other = Events(load.seed + 1, start_ms=events.start_ms)
    warm = _query(spark, settings, "warm", other.campaigns(), Updates(str(folder)))
    for part in range(_WARM_FILES):
        write_lines(other, part * _WARM_LINES, _WARM_LINES, folder / "warm" / f"{part}.txt")
        _await(warm, (part + 1) * _WARM_LINES, 120)
    warm.stop()
    updates = Updates(str(folder))
    query = _query(spark, settings, "lines", events.campaigns(), updates)
    start_ns = start(folder, 2.0)  # the query has started by then
    feeder = threading.Thread(target=_feed, args=(load, folder / "lines", settings["every_s"], start_ns), daemon=True)
    feeder.start()
    feeder.join()
    _await(query, load.number, _END_S)
    story = _story(query, start_ns)
    query.stop()
    spark.stop()
    updates.save()
    (folder / "stream.json").write_text(json.dumps({"start_ns": start_ns, "batches": story}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
