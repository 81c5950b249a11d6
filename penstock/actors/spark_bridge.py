"""SparkBridge: the Ray actor that holds a job's Spark session, and a worker's end of it (docs/papers.md: D1, D4).

One actor a job, on the side of the JobMaster, which owns it. Workers hand it micro-batches as Arrow streams and get
answers. On one node a stream lies in memory without a name, which the bridge maps: Ray's object store would hold it a
second time, and a worker would wait there for room. From another node it comes through the object store. It keeps
nothing that would be missed: when it dies, what was under way is run by the record tasks, and the JobMaster starts
another.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group

from penstock.actors import cluster
from penstock.bridge.cost import BatchCost
from penstock.bridge.forms import RangeForm, as_columns
from penstock.bridge.operation import Operations
from penstock.bridge.session import SparkOptions, SparkUnavailable, executor_needs, open_session
from penstock.bridge.session.diagnosis import essence
from penstock.bridge.spark_life import SparkFacts
from penstock.runtime.errors import PenstockError
from penstock.runtime.operators.micro_batch import Bridge, MicroBatchResult
from penstock.runtime.records.pickling import join, program

logger = logging.getLogger(__name__)

_HAS_DIED = "the process that holds the Spark session has died"

# How many micro-batches it works on at a time; more wait in Ray.
_AT_A_TIME = 8


class SparkBridge:
    """See the module's docstring."""

    def __init__(self, options: SparkOptions, forms: bytes) -> None:
        self._options = options
        self._forms: list[RangeForm] = join(forms)
        self._operations: Operations | None = None
        self._group: Any = None
        self._log = write_apart(_log_folder())

    def prepare(self) -> SparkFacts:
        """Start Spark, and try each range, so that all its code is compiled and loaded before the switch."""
        options = replace(self._options, put=ray.put)
        if options.kind != "pyspark" and options.existing is None and options.placement_group is None:
            self._group = _reserve(options)
            options = replace(options, placement_group=self._group)
        try:
            session = open_session(options)
        except BaseException as error:
            self._release()
            if isinstance(error, SparkUnavailable) and os.path.getsize(self._log):
                raise SparkUnavailable(f"{error} What Spark wrote is in {self._log}.") from None
            raise
        if session.kind != "raydp":
            self._release()
        self._operations = Operations(session, self._forms, program())
        costs: dict[int, BatchCost | None] = {}
        for form in self._forms:
            try:
                costs[form.chain] = self._operations.prepare(form.chain)
            except Exception as error:  # a record that fails there, or that Spark would not treat alike
                logger.info("the range %s could not be tried in Spark: %s", ", ".join(form.names), error)
        return SparkFacts(
            session=session.describe(),
            costs=costs,
            bridge=os.getpid(),
            log=self._log,
            executors=dict(self.executors()),
            node=ray.get_runtime_context().get_node_id(),
        )

    def answer(self, chain: int, position: int, batch: pa.Buffer | str) -> MicroBatchResult:
        """What the range of a chain before a position makes of a micro-batch: an Arrow stream, or the path by which it
        can be mapped."""
        assert self._operations is not None
        with pa.memory_map(batch) if isinstance(batch, str) else pa.BufferReader(batch) as source:
            (columns,) = pa.ipc.open_stream(source)
            return self._operations.answer(chain, position, columns)

    # In a group of its own, so that it does not wait for micro-batches: the JobMaster asks by it whether Spark lives.
    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def executors(self) -> list[tuple[str, int | None]]:
        """(id, process) of each executor, those on this machine with their process."""
        assert self._operations is not None
        return [(executor.id, executor.pid) for executor in self._operations.session.executors()]

    def stop(self) -> None:
        """End the session."""
        if self._operations is not None:
            self._operations.session.stop()
        self._release()

    def _release(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def _log_folder() -> str:
    """Where Ray keeps the logs of this node's processes."""
    node = ray._private.worker._global_node
    return tempfile.gettempdir() if node is None else str(node.get_logs_dir_path())


def write_apart(folder: str) -> str:
    """Have all that this process and those that it starts write to their output put into a file of this folder, instead
    of into that of which Ray shows each line in the middle of the program's own output: Spark's driver, py4j and
    PySpark write pages. Penstock's warnings still go there. The file's path."""
    sys.stdout.flush()
    sys.stderr.flush()
    path = os.path.join(folder, f"penstock-spark-{os.getpid()}.log")
    told = logging.StreamHandler(os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace"))
    told.setLevel(logging.WARNING)
    penstock = logging.getLogger("penstock")
    penstock.addHandler(told)
    penstock.propagate = False
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return path


def _reserve(options: SparkOptions) -> Any:
    """A bundle for each executor, which nobody else is given then; Ray takes it back when this process ends. None where
    no executors will be: what is wrong is said by the session that is to be started."""
    needs = executor_needs(options)
    return None if needs is None else placement_group([needs] * options.executors, strategy="PACK")


class BridgeHandle:
    """The JobMaster's end of a bridge: calls return at once, with a future of the answer."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    def prepare(self) -> Future[SparkFacts]:
        """See SparkBridge."""
        return self._actor.prepare.remote().future()  # type: ignore[no-any-return]

    def check(self) -> Future[Any]:
        """The answer comes when the process and its session live."""
        return self._actor.executors.remote().future()  # type: ignore[no-any-return]

    def stop(self) -> Future[Any]:
        """See SparkBridge."""
        return self._actor.stop.remote().future()  # type: ignore[no-any-return]

    def kill(self) -> None:
        """End the process, if it lives."""
        ray.kill(self._actor)


def start(name: str, options: SparkOptions, forms: list[RangeForm]) -> BridgeHandle:
    """Start the actor under a name by which workers find it."""
    actor = ray.remote(concurrency_groups={"life": 1})(SparkBridge).options(
        name=name, namespace=cluster.NAMESPACE, num_cpus=0, max_concurrency=_AT_A_TIME
    )
    return BridgeHandle(name, actor.remote(options, program().dumps(forms)))


def why(error: BaseException) -> str:
    """What has gone wrong in the bridge, in a few words where Ray has many."""
    if isinstance(error, RayActorError):
        return _HAS_DIED
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return str(getattr(error, "cause", None) or error).strip()


class NotAnswered(PenstockError):
    """Spark has not answered a micro-batch; the message says why, in one line."""


class BridgeLink(Bridge):
    """A worker's end of the bridge of this name on this node; NotAnswered when there is none any more."""

    def __init__(self, name: str, node: str) -> None:
        try:
            self._actor = ray.get_actor(name, namespace=cluster.NAMESPACE)
        except ValueError:
            raise NotAnswered(_HAS_DIED) from None
        self._is_near = node == ray.get_runtime_context().get_node_id()

    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        """See Bridge."""
        columns = as_columns(input_)
        if not self._is_near:
            out = pa.BufferOutputStream()
            _write(columns, out)
            return _in_short(self._actor.answer.remote(chain, position, out.getvalue()).future())
        # The kernel frees it with the last descriptor or mapping, whoever dies; the bridge needs the path only until it
        # has mapped it, and has when it answers.
        fd = os.memfd_create("penstock-micro-batch", os.MFD_CLOEXEC)
        try:
            with pa.OSFile(f"/proc/self/fd/{fd}", "wb") as file:
                _write(columns, file)
            path = f"/proc/{os.getpid()}/fd/{fd}"
            future: Future[MicroBatchResult] = self._actor.answer.remote(chain, position, path).future()
        except BaseException:
            os.close(fd)
            raise
        future.add_done_callback(lambda _: os.close(fd))
        return _in_short(future)


def _in_short(answer: Future[MicroBatchResult]) -> Future[MicroBatchResult]:
    """The same answer, or NotAnswered: Ray's errors are pages long. Their cause is not asked for its text, because an
    error of py4j would ask a JVM that is in another process."""
    short: Future[MicroBatchResult] = Future()

    def done(answer: Future[MicroBatchResult]) -> None:
        error = answer.exception()
        if error is None:
            short.set_result(answer.result())
        else:
            text = f"{type(error).__name__}: {error}"  # never empty
            short.set_exception(NotAnswered(_HAS_DIED if isinstance(error, RayActorError) else essence(text)))

    answer.add_done_callback(done)
    return short


def _write(columns: pa.RecordBatch, out: Any) -> None:
    with pa.ipc.new_stream(out, columns.schema) as stream:
        stream.write_batch(columns)
