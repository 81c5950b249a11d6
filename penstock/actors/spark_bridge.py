"""SparkBridge: the Ray actor that holds a job's Spark session, and the workers' link to it (docs/papers.md: D1, D4).

A job has one such actor, on the node of the JobMaster, which owns it. Workers send it micro-batches as Arrow streams,
and it returns Spark's answers. On one node a stream lies in memory without a name, which the bridge maps. In Ray's
object store the stream would be a second time, and a worker would wait there for room. From another node a stream comes
through the object store. The actor keeps nothing that another one would need: when it dies, the tasks process the
unanswered micro-batches as records, and the JobMaster starts another bridge.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import cluster
from penstock.bridge.forms import RangeForm, as_columns
from penstock.bridge.operation import Disturbed, Operations, Trial
from penstock.bridge.reused_memory import ReusedMemory, path_of, shared_file
from penstock.bridge.session import SparkOptions, SparkUnavailable, executor_needs, open_session
from penstock.bridge.session.diagnosis import essence
from penstock.bridge.session.session import Executor
from penstock.bridge.spark_life import RangeTrial, SparkFacts
from penstock.host.carry.spark_runner import BridgeHandle
from penstock.runtime.errors import PenstockError
from penstock.runtime.operators.micro_batch import Bridge, MicroBatchResult
from penstock.runtime.records.pickling import join, program
from penstock.runtime.worker.sample import RecordSample

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_HAS_DIED = "the process that holds the Spark session has died"

# How many micro-batches the bridge works on at a time. More of them wait in Ray.
_AT_A_TIME = 8

# For how long a worker waits that connects before it has anything to send.
_GREET_S = 30.0


class _Session(Protocol):
    """See `penstock.bridge.session.Session`."""

    cores: int

    def describe(self) -> str: ...

    def executors(self) -> list[Executor]: ...

    def stop(self) -> None: ...


class _Answers(Protocol):
    """The part that answers micro-batches: Operations, or what stands in for Spark (`SparkOptions.stand_in`)."""

    @property
    def session(self) -> _Session: ...

    def prepare(self, chain: int, taken: RecordSample | None = None) -> Trial: ...

    def answer(self, chain: int, position: int, batch: pa.RecordBatch) -> MicroBatchResult: ...


class SparkBridge:
    """Holds a Spark session; see the module's docstring."""

    def __init__(self, options: SparkOptions, forms: bytes) -> None:
        self._options = options
        self._forms: list[RangeForm] = join(forms)
        self._operations: _Answers | None = None
        self._is_ready = False
        self._samples: dict[int, RecordSample] = {}  # by chain; those that have come while Spark was starting
        self._lock = threading.Lock()  # of the two above
        self._trying = threading.Lock()  # one range at a time
        self._group: Any = None
        ray_node = ray._private.worker._global_node
        folder = tempfile.gettempdir() if ray_node is None else str(ray_node.get_logs_dir_path())
        self._log = write_apart(folder)
        # This process may be killed while Spark is starting. What it leaves then lies beside its log, not in TMPDIR.
        tempfile.tempdir = folder

    def prepare(self) -> SparkFacts:
        """Starts Spark, and tries each range, so that all code is compiled and loaded before the first switch."""
        self._operations = self._open() if self._options.stand_in is None else self._options.stand_in(self._forms)
        trials: dict[int, Trial | None] = {}
        with self._trying:
            for form in self._forms:
                trials[form.chain] = self._try(form)
            while (given := self._next_sample()) is not None:  # they have come since
                form, sample = given
                if _is_without_records(trials[form.chain]):
                    trials[form.chain] = self._try(form, sample)
        done = {chain: trial for chain, trial in trials.items() if trial is not None}
        return SparkFacts(
            session=self._operations.session.describe(),
            costs={chain: trial.cost for chain, trial in done.items()},
            bridge=os.getpid(),
            log=self._log,
            executors=dict(self.executors()),
            name=ray.get_runtime_context().get_actor_name() or "",
            node=ray.get_runtime_context().get_node_id(),
            ways={chain: trial.describe() for chain, trial in done.items()},
            cores=self._operations.session.cores,
            untried=frozenset(chain for chain, trial in done.items() if _is_without_records(trial)),
        )

    def try_range(self, chain: int, sample: RecordSample) -> RangeTrial:
        """Tries the range of a chain on a sample of its records. While Spark is starting, this only keeps the sample,
        and returns at once: `prepare` tries the range, and tells what came of it."""
        with self._lock:
            if not self._is_ready:
                self._samples[chain] = sample
                return RangeTrial()
        form = next(form for form in self._forms if form.chain == chain)
        with self._trying:
            try:
                trial = self._try(form, sample)
            except Disturbed:
                return RangeTrial(again=True)
        return RangeTrial() if trial is None else RangeTrial(trial.cost, trial.describe())

    def _next_sample(self) -> tuple[RangeForm, RecordSample] | None:
        """Returns a range with a sample of its records that has come while Spark was starting. When there is none,
        Spark is ready."""
        with self._lock:
            for form in self._forms:
                if (sample := self._samples.pop(form.chain, None)) is not None:
                    return form, sample
            self._is_ready = True
            return None

    def _try(self, form: RangeForm, sample: RecordSample | None = None) -> Trial | None:
        """Tries a range. Returns None when it cannot be tried. Raises Disturbed when the job needs Spark meanwhile."""
        assert self._operations is not None
        try:
            trial = self._operations.prepare(form.chain, sample)
        except Disturbed:
            raise
        except Exception as error:  # a record fails there, or Spark would treat it differently from the tasks
            logger.info("the range %s could not be tried in Spark: %s", ", ".join(form.names), error)
            return None
        logger.info("the range %s runs %s", ", ".join(form.names), trial.describe())
        return trial

    def _open(self) -> Operations:
        """Starts a Spark session."""
        options = replace(self._options, put=ray.put)
        if options.kind != "pyspark" and options.placement_group is None:
            # A bundle for each executor; None when there can be no executors, and then the session says why.
            needs = executor_needs(options)
            self._group = None if needs is None else placement_group([needs] * options.executors, strategy="PACK")
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
        return Operations(session, self._forms, program())

    def answer(self, chain: int, position: int, batch: pa.Buffer | str) -> MicroBatchResult:
        """Returns Spark's answer for a micro-batch of a range of a chain: an Arrow stream, or the path by which the
        stream can be mapped."""
        assert self._operations is not None
        with pa.memory_map(batch) if isinstance(batch, str) else pa.BufferReader(batch) as source:
            (columns,) = pa.ipc.open_stream(source)
            began = time.perf_counter()
            answer = self._operations.answer(chain, position, columns)
            answer.spark_s = time.perf_counter() - began
            return answer

    def greet(self, batch: pa.Buffer | str) -> MicroBatchResult:
        """Returns nothing, in the way of an answer. By this call a worker connects, and loads what it takes, before the
        first micro-batch is due."""
        with pa.memory_map(batch) if isinstance(batch, str) else pa.BufferReader(batch) as source:
            list(pa.ipc.open_stream(source))
        return MicroBatchResult([])

    # This call has a concurrency group of its own, so that it does not wait for micro-batches: by it the JobMaster asks
    # whether Spark lives.
    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def executors(self) -> list[tuple[str, int | None]]:
        """Returns (id, process) of each executor; the process is known only for executors of this machine."""
        assert self._operations is not None
        return [(executor.id, executor.pid) for executor in self._operations.session.executors()]

    def stop(self) -> None:
        """Ends the session."""
        if self._operations is not None:
            self._operations.session.stop()
        self._release()

    def _release(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def _is_without_records(trial: Trial | None) -> bool:
    """Whether a range was not tried because there was nothing to try it on."""
    return trial is not None and not trial.costs


def write_apart(folder: str) -> str:
    """Redirects the output of this process, and of the processes that it starts, into a file of this folder, and
    returns the file's path. Spark's driver, py4j and PySpark write pages, which Ray would show in the middle of the
    program's own output. Penstock's warnings still go to Ray."""
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


class ActorHandle(BridgeHandle):
    """The JobMaster's end of a bridge."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def prepare(self) -> Future[SparkFacts]:
        return _in_short(self._actor.prepare.remote().future(), why)

    def try_range(self, chain: int, sample: RecordSample) -> Future[RangeTrial]:
        return _in_short(self._actor.try_range.remote(chain, sample).future(), why)

    def check(self) -> Future[Any]:
        """Returns a future, which is done when the bridge's process and its session have answered."""
        return _in_short(self._actor.executors.remote().future(), why)

    def stop(self) -> Future[Any]:
        return _in_short(self._actor.stop.remote().future(), why)

    def kill(self) -> None:
        """Ends the process, if it lives."""
        ray.kill(self._actor)


def start(name: str, options: SparkOptions, forms: list[RangeForm]) -> ActorHandle:
    """Starts the actor on this node, under a name by which workers find it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(concurrency_groups={"life": 1})(SparkBridge).options(
        name=name, namespace=cluster.NAMESPACE, num_cpus=0, max_concurrency=_AT_A_TIME, scheduling_strategy=here
    )
    return ActorHandle(actor.remote(options, program().dumps(forms)))


def why(error: BaseException) -> str:
    """Describes in a few words the failure in the bridge. Ray's own text has pages."""
    if isinstance(error, RayActorError):
        return _HAS_DIED
    return str(getattr(error, "cause", None) or error).strip()


class NotAnswered(PenstockError):
    """The bridge has not answered; the message says why, in a few words."""


class BridgeLink(Bridge):
    """A worker's end of the bridge of this name on this node. Raises NotAnswered when there is none any more."""

    def __init__(self, name: str, node: str) -> None:
        try:
            self._actor = ray.get_actor(name, namespace=cluster.NAMESPACE)
        except ValueError:
            raise NotAnswered(_HAS_DIED) from None
        self._is_near = node == ray.get_runtime_context().get_node_id()
        self._files = ReusedMemory(partial(shared_file, "penstock-micro-batch"))

    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        """See Bridge."""
        return self._send(partial(self._actor.answer.remote, chain, position), as_columns(input_))

    def greet(self) -> None:
        """Sends a micro-batch without records, which is not processed, and waits for the answer. The first one takes
        much longer than those that follow."""
        self._send(self._actor.greet.remote, as_columns([])).result(_GREET_S)

    def _send(self, call: Callable[[Any], Any], columns: pa.RecordBatch) -> Future[MicroBatchResult]:
        if not self._is_near:
            out = pa.BufferOutputStream()
            _write(columns, out)
            return _in_short(call(out.getvalue()).future(), _why_in_a_line)
        # The kernel frees the memory with the last descriptor or mapping, whoever dies. The bridge needs the path only
        # until it has mapped the memory, which it has done when it answers.
        file = self._files.take()
        try:
            _write(columns, file)
            file.truncate()
            future: Future[MicroBatchResult] = call(path_of(file)).future()
        except BaseException:
            file.close()
            raise

        def done(answer: Future[MicroBatchResult]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                file.close()  # the bridge may still read it
            else:
                self._files.give_back(file)

        future.add_done_callback(done)
        return _in_short(future, _why_in_a_line)


def _why_in_a_line(error: BaseException) -> str:
    """Says why a micro-batch has failed. The text of the error's cause is not used, because an error of py4j would ask
    a JVM of another process for it."""
    return _HAS_DIED if isinstance(error, RayActorError) else essence(f"{type(error).__name__}: {error}")


def _in_short(answer: Future[_T], words: Callable[[BaseException], str]) -> Future[_T]:
    """Returns the same answer, or NotAnswered with these words, because Ray's errors are pages long."""
    short: Future[_T] = Future()

    def done(answer: Future[_T]) -> None:
        error = answer.exception()
        if error is None:
            short.set_result(answer.result())
        else:
            short.set_exception(NotAnswered(words(error)))

    answer.add_done_callback(done)
    return short


def _write(columns: pa.RecordBatch, out: Any) -> None:
    with pa.ipc.new_stream(out, columns.schema) as stream:
        stream.write_batch(columns)
