"""A Spark session that works, its executors, and how it ends."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from penstock.bridge.reused_memory import ReusedMemory, shared_file
from penstock.bridge.session.processes import listeners

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Executor:
    """A process that runs tasks. `pid` is known when it runs on this machine, as this user."""

    id: str
    host: str
    pid: int | None


class Session:
    """A Spark session that has passed the test. open_session makes it, and a `with` block stops it."""

    def __init__(
        self,
        spark: SparkSession,
        kind: Literal["raydp", "pyspark"],
        cores: int,
        end: Callable[[], None],
        *,
        put: Callable[[bytes], Any] | None = None,
        said: Callable[[], str] = lambda: "",
    ) -> None:
        self.spark = spark
        self.kind = kind
        self.cores = cores  # of all executors: into how many parts a large batch is divided
        self.put = put  # None: batches do not go through Ray's object store
        self.fallback_reason: str | None = None  # why this is not the RayDP session that "auto" would rather have
        self.owner: bytes | None = None  # Ray's address of this process, for the executors; see arrow.py
        self.said = said  # the last lines that the JVM wrote
        self.files = ReusedMemory(partial(shared_file, "penstock-batch"))  # for micro-batches, in shared memory
        self.buffers = ReusedMemory(io.BytesIO)  # for what goes into Ray's object store
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Session {self.kind}, {self.cores} cores>"

    def stop(self) -> None:
        """Ends the session and its processes. May be called more than once."""
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            end()
        self.files.close()
        self.buffers.close()

    def executors(self) -> list[Executor]:
        """Returns the executors that are up. With `local[N]` the driver itself is the executor."""
        context: Any = self.spark.sparkContext
        found = context._jsc.sc().statusStore().executorList(True)
        summaries = [found.apply(i) for i in range(found.size())]
        alone = len(summaries) == 1 and context.master.startswith("local")
        addresses = {s.id(): s.hostPort().rpartition(":") for s in summaries if alone or s.id() != "driver"}
        addresses = {id: address for id, address in addresses.items() if address[1]}  # no port yet: not ready
        pids = listeners({int(port) for _, _, port in addresses.values()})
        local = {"localhost", "127.0.0.1", context.getConf().get("spark.driver.host")}
        return [
            Executor(id, host, pids.get(int(port)) if host in local else None)
            for id, (host, _, port) in addresses.items()
        ]

    def describe(self) -> str:
        """Describes the session in one line, for people and logs."""
        context = self.spark.sparkContext
        java = context._jvm.java.lang.System.getProperty("java.version")
        names = {"raydp": "RayDP", "pyspark": "PySpark"}
        text = f"{names[self.kind]} on {context.master}, {self.cores} cores, Spark {context.version}, Java {java}"
        return f"{text} (not RayDP: {self.fallback_reason})" if self.fallback_reason else text
