"""The operation stream's own side: compiles ranges for Spark, and answers micro-batches (docs/papers.md: D1, D4).

`Operations` has a session and the forms of a job's ranges. `answer` takes a micro-batch as Arrow and returns the
range's results. Several threads may call it at once, each with a micro-batch of its own. It keeps nothing between two
micro-batches: whatever is lost here is asked for again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pyarrow as pa

from penstock.bridge.arrow import micro_batch
from penstock.bridge.burst import Timing
from penstock.bridge.cost import BatchCost, BatchSpeed, MicroBatch
from penstock.bridge.forms import (
    ANSWER_SCHEMA,
    ENCODED,
    RangeForm,
    RangeRun,
    answer_of,
    answer_rows,
    as_columns,
    as_records,
)
from penstock.bridge.native import NativeRange, NotTheSame, native
from penstock.bridge.python_range import PythonRange, take_in_pieces
from penstock.bridge.session import Session
from penstock.runtime.operators.fields import TEXT
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.records.pickling import Program, join
from penstock.runtime.sources.base import Source
from penstock.runtime.worker.sample import RecordSample

# The number of rows on which a range is tried: enough to distinguish the cost of rows from that of a micro-batch, and
# not so many that a burst would have to wait.
_SAMPLE_ROWS = 100_000

# A small micro-batch has this share of them, but so many for each core of Spark that all cores get some: what a
# micro-batch costs that fewer cores work on says nothing of others.
_SOME_SHARE = 50
_FEWEST_ROWS = 32

# Of a slow function, a large micro-batch has so many rows that they take about so many seconds, but not less than this
# many times as many as a small one. A function is not tried for which this would take too long: a burst may come.
_ROWS_S = 2.0
_LARGER = 4
_TOO_LONG_S = 10.0

# How often a way of a range is measured, and the time after which it is not measured again: a slow function of the
# user's must not hold up Spark's start.
_ROUNDS_MAX = 3
_ENOUGH_S = 1.0

# A way of which a micro-batch of the sample takes less is quick, and runs more often: what Java compiles counts for
# more in such a way than what a function does.
_QUICK_S = 2.5

# The way that is kept runs on, for so long at the most, until so many rounds in a row were not quicker than this share
# of the quickest one. Java compiles what runs often, in two steps: until the first one a small micro-batch costs
# several times as much, and until the second one, after some millions of rows, a row costs twice as much. Of several
# ranges each has its part of the time.
_WARM_S = 20.0
_WARM_OF_ONE_S = (3.0, 10.0)  # at least, and at most
_WARM_SHARE = 0.95
_WARM_ROUNDS = 3

# The interval at which a burst is processed, for which the ways of a range are compared.
_INTERVAL_S = Timing().interval_max_s


Way = Literal["columns", "parsed", "python"]

WAYS: dict[Way, str] = {
    "columns": "as columns of Spark as far as they go, then in Python",
    "parsed": "expressions at its beginning as columns of Spark, the rest in Python",
    "python": "in Spark's Python workers, as in the record tasks",
}


@dataclass(frozen=True)
class Trial:
    """The result of trying a range: the way that is kept, and what a micro-batch costs in each way that works."""

    way: Way
    costs: dict[Way, BatchCost]

    @property
    def cost(self) -> BatchCost | None:
        """The cost of a micro-batch in the way that is kept, if that is known."""
        return self.costs.get(self.way)

    def describe(self) -> str:
        """Says which way is kept and why, in one line."""
        figures = ", ".join(
            f"{way}: {cost.fixed_s:.3f} s and {cost.rate:,.0f} records/s" for way, cost in self.costs.items()
        )
        return f"{WAYS[self.way]} ({figures or 'nothing to measure it by'})"


class Disturbed(Exception):
    """A trial was given up, because a micro-batch of the job came meanwhile: neither must slow down the other."""


@dataclass(frozen=True)
class Sample:
    """Records on which a range is tried: as micro-batches of `some` and of `many` rows."""

    some: int
    many: int
    first: Callable[[int], pa.RecordBatch]
    names: tuple[str, ...]  # of the columns

    @classmethod
    def of_columns(cls, columns: pa.RecordBatch, some: int = _SAMPLE_ROWS // _SOME_SHARE) -> Sample:
        """Returns a sample of these columns."""
        rows = columns.num_rows
        return cls(min(some, rows), rows, partial(columns.slice, 0), tuple(columns.schema.names))

    @classmethod
    def of_records(cls, taken: RecordSample, source: Source | None, cores: int) -> Sample | None:
        """Returns a sample of records that record tasks have taken, as their micro-batches have them, or None when it
        would take too long to run them on the session's cores. `source` is that of the chain. The records are repeated
        until there are enough."""
        fewest = _FEWEST_ROWS * cores
        if _LARGER * _FEWEST_ROWS * taken.each_s > _TOO_LONG_S:
            return None
        many = max(_LARGER * fewest, int(min(_SAMPLE_ROWS, _ROWS_S * cores / max(taken.each_s, 1e-9))))
        some = max(fewest, many // _SOME_SHARE)
        records = taken.records()
        records = (records * -(-many // len(records)))[:many]
        if source is not None and source.hands_columns:
            texts = all(isinstance(record, str) for record in records)
            columns = pa.RecordBatch.from_pydict({TEXT: records}) if texts else pa.RecordBatch.from_pylist(records)
            return cls.of_columns(columns, some)
        return cls(some, many, lambda rows: as_columns(records[:rows]), (ENCODED,))


class Operations:
    """Runs the ranges of a job in a Spark session; see the module's docstring."""

    def __init__(self, session: Session, forms: Iterable[RangeForm], program: Program | None = None) -> None:
        """`program`: the program whose classes the records of the micro-batches may have."""
        self.session = session
        self._program = program or Program()
        self._forms = {form.chain: form for form in forms}
        self._ways: dict[int, Way] = {}
        self._compiled: dict[tuple[int, int, tuple[str, ...], Way], _Compiled] = {}
        self._asked = 0  # how many micro-batches of the job have come

    def answer(self, chain: int, position: int, batch: pa.RecordBatch, way: Way | None = None) -> MicroBatchResult:
        """Returns the results of a micro-batch, from the range of a chain that ends before a position. `way`: how the
        range runs. Without it, the range runs in the way that `prepare` has kept, and in Python when this micro-batch
        has values for which the answer might differ from that of the record tasks."""
        self._asked += 1
        return self._answer_any(chain, position, batch, way)

    def _answer_any(self, chain: int, position: int, batch: pa.RecordBatch, way: Way | None) -> MicroBatchResult:
        if not batch.num_rows:
            return MicroBatchResult([])
        if way is not None:
            return self._answer(chain, position, batch, way)
        try:
            return self._answer(chain, position, batch, self._ways.get(chain, "columns"))
        except NotTheSame:
            return self._answer(chain, position, batch, "python")

    def _answer(self, chain: int, position: int, batch: pa.RecordBatch, way: Way) -> MicroBatchResult:
        names = tuple(batch.schema.names)
        key = (chain, position, names, way)
        known = self._compiled.get(key)
        if known is None:
            known = self._compiled[key] = self._compile(self._forms[chain].before(position), names, way)
        if isinstance(known, PythonRange):
            return known.answer(batch)
        # There are few rows of encoded lists, so each core gets a part, however few rows there are.
        parts = min(self.session.cores, batch.num_rows)
        with micro_batch(self.session, batch, parts=parts) as frame:
            return known.answer(frame, batch.schema)

    def prepare(self, chain: int, taken: RecordSample | None = None) -> Trial:
        """Has the code of a range compiled and loaded in every core, by running it on a sample of its source's records,
        or on records that record tasks have taken lately, if they are given, or on nothing when there are neither.
        Every way in which the range can run is tried, and the way that carries the most records is kept and run until
        it gets no quicker. What the range makes of these records goes nowhere. Raises Disturbed when a micro-batch of
        the job has come meanwhile."""
        form = self._forms[chain]
        sample = self._sample(form, taken)
        if sample is None:
            nothing = pa.Table.from_batches([as_columns([])] * self.session.cores).combine_chunks().to_batches()[0]
            for _ in range(2):
                self._answer_any(chain, form.position, nothing, None)
            return Trial("columns", {})
        costs: dict[Way, BatchCost] = {}
        failure: Exception | None = None
        ways = self.ways(form, sample.names)
        for way in ways:
            try:
                if (cost := self._try(form, sample, way)) is not None:
                    costs[way] = cost
            except Disturbed:
                raise
            except Exception as error:  # whatever the way cannot do, another way may
                failure = error
        if len(costs) > 1 and all(cost.seconds(sample.many) < _QUICK_S for cost in costs.values()):
            # The first way that was tried has had the least of Spark's own code compiled.
            costs = {way: self._try(form, sample, way) or cost for way, cost in costs.items()}
        if not costs:
            if failure is not None:
                raise failure
            return Trial(self._ways.get(chain, "columns"), {})
        best = max(costs, key=lambda way: (costs[way].capacity(_INTERVAL_S), -costs[way].seconds(_SAMPLE_ROWS)))
        self._ways[chain] = best
        costs[best] = self._warm(form, sample, best, costs[best])
        return Trial(best, costs)

    def _sample(self, form: RangeForm, taken: RecordSample | None) -> Sample | None:
        if taken is not None:
            return Sample.of_records(taken, form.source, self.session.cores)
        columns = None if form.source is None else form.source.sample(_SAMPLE_ROWS)
        return Sample.of_columns(columns) if columns is not None and columns.num_rows else None

    def _warm(self, form: RangeForm, sample: Sample, way: Way, cost: BatchCost) -> BatchCost:
        """Runs a way until it gets no quicker. Returns what a micro-batch costs then. Of a slow way, only micro-batches
        of hardly any records run often."""
        if sample.many < _SAMPLE_ROWS and _ENOUGH_S <= cost.seconds(sample.many) < _TOO_LONG_S:
            self._run_small(form, sample, way)
            return self._try(form, sample, way) or cost
        least_s, most_s = _WARM_OF_ONE_S
        until = time.perf_counter() + min(max(least_s, _WARM_S / len(self._forms)), most_s)
        best, slower = cost, 0
        while (best_s := best.seconds(_SAMPLE_ROWS)) < _QUICK_S and time.perf_counter() < until:
            cost = self._try(form, sample, way) or cost
            slower = 0 if cost.seconds(_SAMPLE_ROWS) < _WARM_SHARE * best_s else slower + 1
            if slower == _WARM_ROUNDS:
                break
            best = min(best, cost, key=lambda one: one.seconds(_SAMPLE_ROWS))
        return best

    def _run_small(self, form: RangeForm, sample: Sample, way: Way) -> None:
        """Runs a way on micro-batches of hardly any records for a while."""
        run = self._runner(form, sample, way)
        until = time.perf_counter() + _WARM_OF_ONE_S[0]
        while time.perf_counter() < until:
            run(sample.some)

    def _runner(self, form: RangeForm, sample: Sample, way: Way) -> Callable[[int], float]:
        """Returns the function that runs a way on a number of rows of a sample, and says how long that has taken."""
        asked = self._asked

        def run(rows: int) -> float:
            batch = sample.first(rows)
            began = time.perf_counter()
            self._answer_any(form.chain, form.position, batch, way)
            took_s = time.perf_counter() - began
            if self._asked != asked:
                raise Disturbed
            return took_s

        return run

    def _try(self, form: RangeForm, sample: Sample, way: Way) -> BatchCost | None:
        """Returns the cost of a micro-batch in a way, or None when it is not known."""
        speed = BatchSpeed()
        run = self._runner(form, sample, way)
        for rows in (sample.some, sample.many):  # what is measured must not include loading and compiling
            run(rows)
        first = time.perf_counter()
        for _ in range(_ROUNDS_MAX):
            for rows in (sample.some, sample.many):
                speed.add([MicroBatch(rows, run(rows))])
            if time.perf_counter() - first > _ENOUGH_S:
                break
        return speed.cost

    def ways(self, form: RangeForm, names: tuple[str, ...]) -> list[Way]:
        """Returns the ways in which a range can run that differ from each other."""
        whole = native(form, self.session, list(names))
        if whole is None:
            return ["python"]
        parsed = native(form, self.session, list(names), parsing_only=True)
        if parsed is None or (whole.rest is not None and len(parsed.steps) == len(whole.steps)):
            return ["columns", "python"]
        return ["columns", "parsed", "python"]

    def _compile(self, form: RangeForm, names: tuple[str, ...], way: Way) -> _Compiled:
        prefix = None
        if way != "python":
            prefix = native(form, self.session, list(names), parsing_only=way == "parsed")
        if prefix is None:
            return PythonRange(self.session, self._program.dumps(form))
        if prefix.rest is None:
            return prefix
        in_python = partial(_run_partition, self._program.dumps(prefix.rest), prefix.texts)
        return NativeRange(
            [*prefix.steps, lambda frame: frame.mapInArrow(in_python, ANSWER_SCHEMA)], None, prefix.texts, answer_of
        )


_Compiled = PythonRange | NativeRange


def _run_partition(form: bytes, texts: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in an executor's Python worker. `texts`: rows of the single column "value" are texts, not dicts."""
    run = RangeRun(join(form))
    for batch in batches:
        take_in_pieces(run, batch, as_records if texts else pa.RecordBatch.to_pylist)
    yield answer_rows(run.answer())
