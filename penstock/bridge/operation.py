"""The operation stream's own side: compiles ranges for Spark, and answers micro-batches (docs/papers.md: D1, D4).

`Operations` has a session and the forms of a job's ranges. `answer` takes a micro-batch as Arrow and returns the
range's results. Several threads may call it at once, each with a micro-batch of its own. It keeps nothing between two
micro-batches: whatever is lost here is asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial

import pyarrow as pa

from penstock.bridge.arrow import micro_batch, to_arrow
from penstock.bridge.cost import BatchCost, BatchSpeed, MicroBatch
from penstock.bridge.forms import ANSWER_SCHEMA, RangeForm, RangeRun, answer_of, answer_rows, as_columns, as_records
from penstock.bridge.native import NativeRange, native
from penstock.bridge.session import Session
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.records.pickling import Program, join

# The number of rows on which a range is tried: enough to distinguish the cost of rows from that of a micro-batch, and
# not so many that a burst would have to wait.
_SAMPLE_ROWS = 40_000
_SOME_ROWS = 2_000


class Operations:
    """Runs the ranges of a job in a Spark session; see the module's docstring."""

    def __init__(self, session: Session, forms: Iterable[RangeForm], program: Program | None = None) -> None:
        """`program`: the program whose classes the records of the micro-batches may have."""
        self.session = session
        self._program = program or Program()
        self._forms = {form.chain: form for form in forms}
        self._compiled: dict[tuple[int, int, tuple[str, ...]], tuple[NativeRange | None, bytes]] = {}

    def answer(self, chain: int, position: int, batch: pa.RecordBatch) -> MicroBatchResult:
        """Returns the results of a micro-batch, from the range of a chain that ends before a position."""
        columns = tuple(batch.schema.names)
        known = self._compiled.get((chain, position, columns))
        if known is None:
            known = self._compiled[chain, position, columns] = self._compile(self._forms[chain].before(position), batch)
        prefix, rest = known
        # There are few rows of encoded lists, so each core gets a part, however few rows there are.
        parts = min(self.session.cores, batch.num_rows) or 1
        with micro_batch(self.session, batch, parts=parts) as frame:
            if prefix is not None:
                frame = prefix.apply(frame)  # noqa: PLW2901
            if prefix is not None and prefix.end is not None:
                return prefix.end(to_arrow(frame))
            texts = prefix is None or prefix.texts
            return answer_of(to_arrow(frame.mapInArrow(partial(_run_partition, rest, texts), ANSWER_SCHEMA)))

    def prepare(self, chain: int) -> BatchCost | None:
        """Has the code of a range compiled and loaded in every core, by running it on a sample of its source's records,
        or on nothing when there is no sample. Returns what a micro-batch costs, as far as the sample shows."""
        form = self._forms[chain]
        sample = None if form.source is None else form.source.sample(_SAMPLE_ROWS)
        if sample is None or not sample.num_rows:
            nothing = pa.Table.from_batches([as_columns([])] * self.session.cores).combine_chunks().to_batches()[0]
            for _ in range(2):
                self.answer(chain, form.position, nothing)
            return None
        speed = BatchSpeed()
        some = sample.slice(0, min(_SOME_ROWS, sample.num_rows))
        for rows in (some, sample):  # what is measured must not include loading and compiling
            self.answer(chain, form.position, rows)
        for rows in (some, sample):
            began = time.perf_counter()
            self.answer(chain, form.position, rows)
            speed.add([MicroBatch(rows.num_rows, time.perf_counter() - began)])
        return speed.cost

    def _compile(self, form: RangeForm, batch: pa.RecordBatch) -> tuple[NativeRange | None, bytes]:
        prefix = native(form, self.session, batch.schema.names)
        rest = form if prefix is None else prefix.rest
        return prefix, b"" if rest is None else self._program.dumps(rest)


def _run_partition(form: bytes, texts: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in an executor's Python worker. `texts`: rows of the single column "value" are texts, not dicts."""
    run = RangeRun(join(form))
    for batch in batches:
        run.take(as_records(batch) if texts else batch.to_pylist())
    yield answer_rows(run.answer())
