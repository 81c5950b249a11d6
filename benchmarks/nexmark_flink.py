"""A Nexmark query in Flink SQL: `python -m benchmarks.nexmark_flink JSON`. Prints the seconds of the job, by Flink.

The statements mean what the suite that is published with the benchmark means by them (nexmark/nexmark on GitHub). They
run in a JVM of its own, with Flink's cluster in it, which py4j drives: the Java packages alone have no SQL client. The
job runs twice in this JVM, and the second run counts, so that the JVM has compiled what it needs.

With a port, the query reads the lines of nexmark_load.py from a socket, and each result says when it was due and when
it was there. Watermarks and network buffers then wait 5 ms at most, which is far below Flink's defaults: it would
otherwise be late by 100 to 200 ms at each exchange.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.nexmark_load import FIELDS, NUMBERS

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


def _part(number: int, type_: str = "") -> str:
    """Returns the SQL of a part of a line."""
    part = f"SPLIT_INDEX(f0, '|', {number})"
    return f"CAST({part} AS {type_})" if type_ else part


def _fields(kind: str) -> str:
    """Returns the SQL of all fields of a kind of lines."""
    parts = [
        f"TO_TIMESTAMP_LTZ({_part(i, 'BIGINT')}, 3) AS ends"
        if field == "expires"
        else f"{_part(i, 'BIGINT' if field in NUMBERS else '')} AS {field}"
        for i, field in enumerate(FIELDS[kind], 2)
    ]
    return f"SELECT ts, {', '.join(parts)} FROM events WHERE kind = '{kind}'"


_LINE_VIEWS = tuple(f"CREATE VIEW {kind}s AS {_fields(kind)}" for kind in FIELDS)

#: For each query: when a result was due, a value of it, and the same statement as above without its columns.
_DELAYS: dict[str, tuple[str, str, str]] = {
    "q1": ("ts", "CAST(CAST(0.908 AS DOUBLE) * price AS BIGINT)", "FROM bids"),
    "q2": ("ts", "price", "FROM bids WHERE MOD(auction, 123) = 0"),
    "q4": (
        "MAX(newest)",
        "AVG(price)",
        """FROM (
            SELECT MAX(b.price) AS price, MAX(b.ts) AS newest, a.category FROM auctions a, bids b
            WHERE a.id = b.auction AND b.ts BETWEEN a.ts AND a.ends GROUP BY a.id, a.category
        ) GROUP BY category""",
    ),
    "q5": ("counts.ended", "counts.bids", QUERIES["q5"][1].split("counts.bids", 1)[1]),
    "q7": ("best.ended", "b.price", QUERIES["q7"][1].split("b.extra", 1)[1]),
    "q8": ("p.ended", "p.id", QUERIES["q8"][1].split("p.began", 1)[1]),
    "q11": ("window_end", "COUNT(*)", QUERIES["q11"][1].split("window_end", 1)[1]),
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
    options = [f"-Dlog4j.configurationFile={settings}", f"-Djava.io.tmpdir={folder}", "-Xmx4g"]
    options += [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPEN]
    with (folder / "stdout").open("w") as printed:
        port, process = launch_gateway(
            jarpath=str(_py4j_jar()),
            classpath=f"{home}/lib/*:{home}/opt/*",
            javaopts=options,
            die_on_exit=True,
            redirect_stdout=printed,
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


def _settings(jvm: Any, folder: str, more: dict[str, str]) -> Any:
    settings = jvm.org.apache.flink.configuration.Configuration()
    for key, value in {
        "execution.target": "local",
        "parallelism.default": str(_SLOTS),
        "taskmanager.numberOfTaskSlots": str(_SLOTS),
        "execution.checkpointing.interval": "1s",
        "execution.checkpointing.dir": f"file://{folder}/checkpoints",
        "io.tmp.dirs": folder,
        "table.local-time-zone": "UTC",
        **more,
    }.items():
        settings.setString(key, value)
    return settings


def _run(jvm: Any, asked: dict[str, Any], name: str) -> dict[str, float]:
    columns, statement = QUERIES[asked["query"]]
    made = jvm.org.apache.flink.table.api.EnvironmentSettings.newInstance().inStreamingMode()
    tables = jvm.org.apache.flink.table.api.TableEnvironment.create(
        made.withConfiguration(_settings(jvm, name, {})).build()
    )
    for each in (_EVENTS.format(folder=asked["folder"]), *_VIEWS):
        tables.executeSql(each)
    out = Path(name, "out")
    where = f"'connector' = 'filesystem', 'path' = '{out}', 'format' = 'csv'"
    if not asked["check"]:
        where = "'connector' = 'blackhole'"
    tables.executeSql(f"CREATE TABLE results ({columns}) WITH ({where})")
    took_ms = 0
    for _ in range(1 if asked["check"] else 2):
        inserted = tables.executeSql(f"INSERT INTO results {statement}")
        getattr(inserted, "await")()
        took_ms = inserted.getJobClient().get().getJobExecutionResult().get().getNetRuntime()
    results = -1
    if asked["check"]:
        results = sum(len(file.read_bytes().splitlines()) for file in out.rglob("*") if file.is_file())
    return {"seconds": took_ms / 1000, "results": results}


def _run_delayed(jvm: Any, asked: dict[str, Any], name: str) -> dict[str, float]:
    due, value, rest = _DELAYS[asked["query"]]
    quick = {"execution.buffer-timeout.interval": "5ms", "pipeline.auto-watermark-interval": "5ms"}
    streaming = jvm.org.apache.flink.streaming.api.environment.StreamExecutionEnvironment
    environment = streaming.getExecutionEnvironment(_settings(jvm, name, quick))
    tables = jvm.org.apache.flink.table.api.bridge.java.StreamTableEnvironment.create(environment)
    schema = jvm.org.apache.flink.table.api.Schema.newBuilder().column("f0", "STRING")
    schema = schema.columnByExpression("kind", _part(0))
    schema = schema.columnByExpression("ts", f"TO_TIMESTAMP_LTZ({_part(1, 'BIGINT')}, 3)").watermark("ts", "ts")
    lines = environment.socketTextStream("127.0.0.1", asked["port"])
    tables.createTemporaryView("events", lines, schema.build())
    for each in _LINE_VIEWS:
        tables.executeSql(each)
    where = f"'connector' = 'filesystem', 'path' = '{asked['out']}', 'format' = 'csv'"
    if asked["query"] == "q4":  # files cannot be corrected
        where = "'connector' = 'print'"
    tables.executeSql(f"CREATE TABLE results (due STRING, there STRING, v BIGINT) WITH ({where})")
    columns = f"CAST({due} AS STRING), CAST(CURRENT_TIMESTAMP AS STRING), {value}"
    getattr(tables.executeSql(f"INSERT INTO results SELECT {columns} {rest}"), "await")()
    if asked["query"] == "q4":
        printed = Path(name, "stdout").read_text().splitlines()
        rows = [line.split("[", 1)[1].rstrip("]").replace(", ", ",") for line in printed if line.count(", ") == 2]
        Path(asked["out"], "printed").write_text("".join(f"{row}\n" for row in rows))
    return {}


def main(asked: dict[str, Any]) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as name, jvm_with_flink(Path(asked["home"]), Path(name)) as jvm:
        found = (_run_delayed if "port" in asked else _run)(jvm, asked, name)
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
