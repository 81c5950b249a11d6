"""SparkBridge: the Ray actor that holds a job's Spark session, and a worker's end of it (PAPERS rows D1, D4).

One actor a job, on the side of the JobMaster, which owns it. Workers hand it micro-batches as Arrow bytes through Ray's
object store and get answers. It keeps nothing that would be missed: when it dies, what was under way is run by the
record tasks, and the JobMaster starts another.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import cloudpickle
import pyarrow as pa
import ray

from penstock.actors import cluster
from penstock.bridge.forms import RangeForm, as_columns
from penstock.bridge.operation import Operations
from penstock.bridge.session import SparkOptions, open_session
from penstock.runtime.diversion import Answer, Bridge

# How many micro-batches it works on at a time; more wait in Ray.
_AT_A_TIME = 8


class SparkBridge:
    """See the module's docstring."""

    def __init__(self, options: SparkOptions, forms: bytes) -> None:
        self._options = options
        self._forms: list[RangeForm] = cloudpickle.loads(forms)
        self._operations: Operations | None = None

    def prepare(self) -> dict[str, Any]:
        """Start Spark, and run each range once on nothing: what loads and compiles is done before the switch."""
        session = open_session(replace(self._options, put=ray.put))
        self._operations = Operations(session, self._forms)
        for form in self._forms:
            self._operations.warm(form.chain)
        return {"session": session.describe(), "bridge": os.getpid(), "executors": dict(self.executors())}

    def answer(self, chain: int, batch: pa.Buffer) -> Answer:
        """What the range of a chain makes of a micro-batch, an Arrow stream."""
        assert self._operations is not None
        with pa.ipc.open_stream(batch) as stream:
            (columns,) = stream
        return self._operations.answer(chain, columns)

    def executors(self) -> list[tuple[str, int | None]]:
        """(id, process) of each executor, those on this machine with their process."""
        assert self._operations is not None
        return [(executor.id, executor.pid) for executor in self._operations.session.executors()]

    def stop(self) -> None:
        """End the session."""
        if self._operations is not None:
            self._operations.session.stop()


def start(name: str, options: SparkOptions, forms: list[RangeForm]) -> Any:
    """Start the actor under a name by which workers find it."""
    actor = ray.remote(SparkBridge).options(
        name=name, namespace=cluster.NAMESPACE, num_cpus=0, max_concurrency=_AT_A_TIME
    )
    return actor.remote(options, cloudpickle.dumps(forms))


class BridgeLink(Bridge):
    """A worker's end of the bridge of this name; PenstockError when there is none any more."""

    def __init__(self, name: str) -> None:
        self._actor = ray.get_actor(name, namespace=cluster.NAMESPACE)

    def submit(self, chain: int, input_: Any) -> Future[Answer]:
        """See Bridge."""
        columns = as_columns(input_)
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, columns.schema) as stream:
            stream.write_batch(columns)
        future: Future[Answer] = self._actor.answer.remote(chain, out.getvalue()).future()
        return future
