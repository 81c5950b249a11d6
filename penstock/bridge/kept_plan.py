"""The physical plan of a range, which is made once and runs every micro-batch in one stage (docs/papers.md: D4).

Spark SQL makes a plan in three steps: it looks up types, optimizes, and chooses how to run the result. For a small
micro-batch this takes longer than the work. Then it sends the table of each lookup to the executors. A `KeptPlan` does
all this once. For the next micro-batch it puts another input below the same plan, which takes a few round trips to the
JVM, and runs it.

Spark would also shuffle the records, so that one task merges what others have found for a key. Here each partition
answers with what it has found, because the record tasks merge partial results anyway. So a micro-batch is one stage, no
task waits for another, and the records of a single key are divided among all cores.

It must never run on an input of another schema than that of the frame that it was made for: nothing looks at types any
more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.bridge.arrow import plain_types

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_INPUT, _SHUFFLE = "RDDScanExec", "ShuffleExchangeExec"

# What has nothing of the input below it: tables of lookups, which executors get as a whole.
_TABLES = frozenset({"BroadcastExchangeExec", "ReusedExchangeExec"})


class KeptPlan:
    """A plan that can be run on one input after the other; see the module's docstring."""

    def __init__(self, frame: DataFrame, source: Any, nodes: list[_Above]) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._frame = frame
        self._schema = to_arrow_schema(frame.schema)
        self._nodes = nodes
        self._source = source
        # They do not change with the input.
        self._input = source.output(), source.name(), source.outputPartitioning(), source.outputOrdering()
        self._jvm: Any = frame.sparkSession.sparkContext._jvm
        self._nothing = self._jvm.scala.collection.immutable.List.empty()

    @classmethod
    def of(cls, frame: DataFrame) -> KeptPlan | None:
        """Returns the plan of a frame that is made of a single micro-batch and tables of lookups, or None when Spark
        has planned the frame in a way that cannot be kept."""
        inputs = _inputs(frame._jdf.queryExecution().executedPlan())
        return cls(frame, *inputs[0]) if len(inputs) == 1 else None

    def run(self, frame: DataFrame) -> pa.Table:
        """Returns the rows that the plan makes of a micro-batch, separately for each partition."""
        return self.collect(self.above(frame))

    def above(self, frame: DataFrame) -> Any:
        """Returns the JVM's plan with the rows of a micro-batch as its input."""
        # Nodes of a plan belong to the session of the thread that makes them.
        self._jvm.org.apache.spark.sql.SparkSession.setActiveSession(frame.sparkSession._jsparkSession)
        output, name, partitioning, ordering = self._input
        plan = self._source.copy(output, frame._jdf.logicalPlan().rdd(), name, partitioning, ordering)
        for node, before, after in self._nodes:
            children = self._nothing
            for child in (*reversed(after), plan, *reversed(before)):
                children = getattr(children, "$colon$colon")(child)
            plan = node.withNewChildren(children)
        return plan

    def collect(self, plan: Any) -> pa.Table:
        """Runs a plan that `above` has returned. Returns its rows."""
        from pyspark import rdd
        from pyspark.serializers import NoOpSerializer

        jframe: Any = self._frame._jdf
        found = self._jvm.PythonRDD.collectAndServe(jframe.toArrowBatchRdd(plan))
        module: Any = rdd
        batches = [
            pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema)
            for message in module._load_from_socket(found, NoOpSerializer())
        ]
        return plain_types(pa.Table.from_batches(batches, self._schema))


# A node of a plan above the input, and its other children: those before the one that leads to the input, and after it.
_Above = tuple[Any, tuple[Any, ...], tuple[Any, ...]]


def _inputs(node: Any) -> list[tuple[Any, list[_Above]]]:
    """Returns each input below a node, with the nodes from there up to this one, without shuffles."""
    kind = node.getClass().getSimpleName()
    if kind == _INPUT:
        return [(node, [])]
    if kind in _TABLES:
        return []
    found = node.children()
    children = tuple(found.apply(i) for i in range(found.size()))
    inputs = []
    for i, child in enumerate(children):
        for source, above in _inputs(child):
            if kind != _SHUFFLE:
                above.append((node, children[:i], children[i + 1 :]))
            inputs.append((source, above))
    return inputs
