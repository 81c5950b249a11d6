"""A Nexmark query in Flink SQL: `python -m benchmarks.nexmark_flink JSON`. Prints the seconds of the job, by Flink.

The statements mean what the suite that is published with the benchmark means by them (nexmark/nexmark on GitHub). They
run in a JVM of its own, with Flink's cluster in it, which py4j drives: the Java packages alone have no SQL client.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OPEN = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.text"),
    *("java.time", "java.util", "java.util.concurrent", "java.util.concurrent.atomic", "java.util.concurrent.locks"),
)
_SLOTS = 2

_EVENTS = """
CREATE TABLE events (
    kind STRING, auction BIGINT, bidder BIGINT, price BIGINT, channel STRING, url STRING, date_time BIGINT,
    extra STRING, id BIGINT, name STRING, item_name STRING, initial_bid BIGINT, reserve BIGINT, expires BIGINT,
    seller BIGINT, category BIGINT, city STRING, state STRING,
    ts AS TO_TIMESTAMP_LTZ(date_time, 3), WATERMARK FOR ts AS ts
) WITH ('connector' = 'filesystem', 'path' = '{folder}', 'format' = 'json')
"""
_VIEWS = (
    "CREATE VIEW bids AS SELECT auction, bidder, price, channel, url, ts, extra FROM events WHERE kind = 'bid'",
    "CREATE VIEW persons AS SELECT id, name, city, state, ts FROM events WHERE kind = 'person'",
    "CREATE VIEW auctions AS SELECT id, item_name, seller, category, reserve, ts, "
    "TO_TIMESTAMP_LTZ(expires, 3) AS ends FROM events WHERE kind = 'auction'",
)

#: For each query: the columns of its results, and the statement.
QUERIES: dict[str, tuple[str, str]] = {
    "q1": (
        "auction BIGINT, bidder BIGINT, price DOUBLE, ts TIMESTAMP_LTZ(3), extra STRING",
        "SELECT auction, bidder, CAST(0.908 AS DOUBLE) * price, ts, extra FROM bids",
    ),
    "q2": ("auction BIGINT, price BIGINT", "SELECT auction, price FROM bids WHERE MOD(auction, 123) = 0"),
    "q4": (
        "category BIGINT, price BIGINT, PRIMARY KEY (category) NOT ENFORCED",
        """SELECT category, AVG(price) FROM (
            SELECT MAX(b.price) AS price, a.category FROM auctions a, bids b
            WHERE a.id = b.auction AND b.ts BETWEEN a.ts AND a.ends GROUP BY a.id, a.category
        ) GROUP BY category""",
    ),
    "q5": (
        "auction BIGINT, bids BIGINT",
        """SELECT counts.auction, counts.bids FROM (
            SELECT auction, COUNT(*) AS bids, window_start AS began, window_end AS ended
            FROM TABLE(HOP(TABLE bids, DESCRIPTOR(ts), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
            GROUP BY auction, window_start, window_end
        ) counts JOIN (
            SELECT MAX(bids) AS most, began, ended FROM (
                SELECT COUNT(*) AS bids, window_start AS began, window_end AS ended
                FROM TABLE(HOP(TABLE bids, DESCRIPTOR(ts), INTERVAL '2' SECOND, INTERVAL '10' SECOND))
                GROUP BY auction, window_start, window_end
            ) GROUP BY began, ended
        ) best ON counts.began = best.began AND counts.ended = best.ended AND counts.bids >= best.most""",
    ),
    "q7": (
        "auction BIGINT, price BIGINT, bidder BIGINT, ts TIMESTAMP_LTZ(3), extra STRING",
        """SELECT b.auction, b.price, b.bidder, b.ts, b.extra FROM bids b JOIN (
            SELECT MAX(price) AS price, window_start AS began, window_end AS ended
            FROM TABLE(TUMBLE(TABLE bids, DESCRIPTOR(ts), INTERVAL '10' SECOND)) GROUP BY window_start, window_end
        ) best ON b.price = best.price AND b.ts >= best.began AND b.ts < best.ended""",
    ),
    "q8": (
        "id BIGINT, name STRING, began TIMESTAMP(3)",
        """SELECT p.id, p.name, p.began FROM (
            SELECT id, name, window_start AS began, window_end AS ended
            FROM TABLE(TUMBLE(TABLE persons, DESCRIPTOR(ts), INTERVAL '10' SECOND))
            GROUP BY id, name, window_start, window_end
        ) p JOIN (
            SELECT seller, window_start AS began, window_end AS ended
            FROM TABLE(TUMBLE(TABLE auctions, DESCRIPTOR(ts), INTERVAL '10' SECOND))
            GROUP BY seller, window_start, window_end
        ) a ON p.id = a.seller AND p.began = a.began AND p.ended = a.ended""",
    ),
    "q11": (
        "bidder BIGINT, bids BIGINT, began TIMESTAMP(3), ended TIMESTAMP(3)",
        """SELECT bidder, COUNT(*), window_start, window_end
        FROM TABLE(SESSION(TABLE bids PARTITION BY bidder, DESCRIPTOR(ts), INTERVAL '10' SECOND))
        GROUP BY bidder, window_start, window_end""",
    ),
}


@contextmanager
def jvm_with_flink(home: Path, folder: Path) -> Iterator[Any]:
    """Starts a JVM with Flink in it, for the length of the block."""
    from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

    settings = folder / "log4j.properties"
    settings.write_text(
        "rootLogger.level = WARN\nrootLogger.appenderRef.c.ref = C\nappender.c.name = C\nappender.c.type = CONSOLE\n"
        "appender.c.target = SYSTEM_ERR\nappender.c.layout.type = PatternLayout\n"
    )
    options = [f"-Dlog4j.configurationFile={settings}", "-Xmx4g"]
    options += [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPEN]
    port, process = launch_gateway(
        jarpath=str(_py4j_jar()),
        classpath=f"{home}/lib/*:{home}/opt/*",
        javaopts=options,
        die_on_exit=True,
        redirect_stderr=sys.stderr,
        return_proc=True,
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auto_convert=True))
    try:
        yield gateway.jvm
    finally:
        gateway.shutdown()
        process.kill()
        process.wait()


def _py4j_jar() -> Path:
    """Returns the Java half of py4j, which PySpark brings along."""
    import pyspark

    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("py4j*.jar")
    return jar


def main(asked: dict[str, Any]) -> None:
    """See the module."""
    columns, statement = QUERIES[asked["query"]]
    with tempfile.TemporaryDirectory() as name, jvm_with_flink(Path(asked["home"]), Path(name)) as jvm:
        settings = jvm.org.apache.flink.configuration.Configuration()
        for key, value in {
            "execution.target": "local",
            "parallelism.default": str(_SLOTS),
            "taskmanager.numberOfTaskSlots": str(_SLOTS),
            "execution.checkpointing.interval": "1s",
            "execution.checkpointing.dir": f"file://{name}/checkpoints",
            "table.local-time-zone": "UTC",
        }.items():
            settings.setString(key, value)
        made = jvm.org.apache.flink.table.api.EnvironmentSettings.newInstance().inStreamingMode()
        tables = jvm.org.apache.flink.table.api.TableEnvironment.create(made.withConfiguration(settings).build())
        for each in (_EVENTS.format(folder=asked["folder"]), *_VIEWS):
            tables.executeSql(each)
        out = Path(name, "out")
        where = f"'connector' = 'filesystem', 'path' = '{out}', 'format' = 'csv'"
        if not asked["check"]:
            where = "'connector' = 'blackhole'"
        tables.executeSql(f"CREATE TABLE results ({columns}) WITH ({where})")
        inserted = tables.executeSql(f"INSERT INTO results {statement}")
        getattr(inserted, "await")()
        took_ms = inserted.getJobClient().get().getJobExecutionResult().get().getNetRuntime()
        results = -1
        if asked["check"]:
            results = sum(len(file.read_bytes().splitlines()) for file in out.rglob("*") if file.is_file())
    print(json.dumps({"seconds": took_ms / 1000, "results": results}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
