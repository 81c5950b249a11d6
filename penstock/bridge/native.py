"""A range as Spark columns: between source and answer no row becomes a Python object (docs/papers.md: D1, D4).

As much of a range as can is native, from its beginning: operators of expressions, lookups as broadcast joins, and at
the end the partial aggregates by key and window where key, time and value are fields or expressions. What a Python
function needs runs in the executors' Python workers (operation.py). Results are those of the record form; where
that cannot be promised, the operator is not native.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.bridge.arrow import to_arrow, to_dataframe
from penstock.bridge.columns import (
    Compiled,
    column_types,
    compile_all,
    filter_rows,
    partial_columns,
    select_columns,
    to_column,
    with_columns,
)
from penstock.bridge.combining import combined
from penstock.bridge.forms import ENCODED, RangeForm
from penstock.bridge.kept_plan import KeptPlan
from penstock.bridge.session import Session
from penstock.runtime.errors import PenstockError
from penstock.runtime.expressions import Aggregation, Expr, col, count, lit, max_, tree, when
from penstock.runtime.expressions.aggregates import inputs_of
from penstock.runtime.expressions.operations import infer
from penstock.runtime.expressions.tree import DECIMAL_DIGITS
from penstock.runtime.expressions.typed import BIGINT, BOOLEAN, DATE, DOUBLE, STRING, TIMESTAMP, Schema, decimal_size
from penstock.runtime.operators.agg import Agg
from penstock.runtime.operators.base import Operator
from penstock.runtime.operators.columnar import Columnar, expression_of
from penstock.runtime.operators.fields import TEXT
from penstock.runtime.operators.lookup import Lookup
from penstock.runtime.operators.micro_batch import MicroBatchResult
from penstock.runtime.operators.watermarks import MakeWatermarks
from penstock.runtime.operators.windowing import Windowed
from penstock.runtime.records.batch import KeyedBatch
from penstock.runtime.state.aggregate import Aggregate, Count, Max, Mean, Min, Sum

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_KEY, _START, _TIME = "penstock:key", "penstock:start", "penstock:time"
_VALUE, _PART, _DOUBTS = "penstock:value", "penstock:part", "penstock:doubts"

# Integers up to here can be added a million times and more without leaving 64 bits.
_SAFE = 1 << 40

# Decimals of up to so many digits can be added ten billion times.
_SAFE_DIGITS = DECIMAL_DIGITS - 10

# The number of schemas of one input of which plans are kept.
_PLANS_MAX = 16


class NotTheSame(PenstockError):
    """Spark's answer might differ from that of the record tasks, so the tasks process this micro-batch themselves."""


Step = Callable[["DataFrame"], "DataFrame"]


@dataclass
class NativeRange:
    """The native beginning of a range: `steps` in order. `rest` is the part of the range that is still to be run in
    Python; None: the steps end in the range's answer, which `end` reads."""

    steps: list[Step]
    rest: RangeForm | None
    texts: bool  # whether a row is still a text after the steps
    end: Callable[[pa.Table], MicroBatchResult] | None = None
    plans: dict[pa.Schema, KeptPlan] = field(default_factory=dict)

    def answer(self, frame: DataFrame, schema: pa.Schema) -> MicroBatchResult:
        """Returns the results of a micro-batch of this schema. The plan of a schema is made once."""
        assert self.end is not None
        return self.end(self.run(frame, schema))

    def run(self, frame: DataFrame, schema: pa.Schema) -> pa.Table:
        """Returns the results of the steps for a micro-batch of this schema: what each partition has, by itself."""
        plan = self.plans.get(schema)
        if plan is None:
            made = self.apply(frame)
            plan = KeptPlan.of(made)
            if plan is None:
                return to_arrow(made)
            if len(self.plans) == _PLANS_MAX:
                self.plans.clear()
            self.plans[schema] = plan
        try:
            return plan.run(frame)
        except BaseException:  # what the plan keeps, such as the table of a lookup, may be what has failed
            self.plans.pop(schema, None)
            raise

    def apply(self, frame: DataFrame) -> DataFrame:
        """Returns the frame that the steps make of another frame."""
        for step in self.steps:
            frame = step(frame)
        return frame


def native(form: RangeForm, session: Session, names: list[str], *, parsing_only: bool = False) -> NativeRange | None:
    """Returns the native form of a range whose input has columns of these names, or None when none of its operators has
    one. `parsing_only`: only the operators of expressions at the beginning of the range are native."""
    if names == [ENCODED]:
        return None
    texts = names == [TEXT]
    steps: list[Step] = []
    at = 0
    for operator in form.operators:
        rest = _rest(form, at + 1)
        step: Step | None
        if parsing_only and not isinstance(operator, Columnar):
            break
        if isinstance(operator, MakeWatermarks):
            # The greatest time must be known with the answer: only partial aggregates say it.
            clock = expression_of(operator.time)
            step = None if clock is None or _partials(rest, texts) is None else _keeping(clock)
        else:
            step = _step(operator, session, texts)
        if step is None:
            break
        steps.append(step)
        texts = texts and isinstance(operator, Columnar) and operator.closure.shape == "filter"
        at += 1
    rest = _rest(form, at)
    if not parsing_only and (partials := _partials(rest, texts)) is not None:
        step, end = partials
        return NativeRange([*steps, step], None, texts, end)
    return NativeRange(steps, rest, texts) if at else None


def _rest(form: RangeForm, at: int) -> RangeForm:
    """Returns the rest of a range after a number of its operators."""
    return replace(form, operators=form.operators[at:], first=form.first + at)


def _step(operator: Operator, session: Session, texts: bool) -> Step | None:
    if isinstance(operator, Columnar):
        closure = operator.closure
        if closure.shape == "filter":
            return lambda frame: filter_rows(frame, closure.exprs[""])
        if closure.shape == "select":
            return lambda frame: select_columns(frame, closure.exprs)
        return lambda frame: with_columns(frame, closure.exprs)
    if isinstance(operator, Lookup) and not texts and operator.rows:
        return _join(operator, session)
    return None


def _join(operator: Lookup, session: Session) -> Step | None:
    """Makes a broadcast join. Null keys equal nothing in Spark either."""
    right = "penstock:" + operator.right
    try:
        table = pa.Table.from_pylist([{right: key, **row} for key, row in operator.rows.items()])
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None  # values of several kinds in one column, which only Python can look up
    rows = to_dataframe(session, table)

    def join(frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812  its usual name

        types = [frame.schema[operator.left].dataType.simpleString(), rows.schema[right].dataType.simpleString()]
        if types[0] != types[1]:
            raise NotTheSame(f"lookup {operator.name!r}: {operator.left} is {types[0]}, in the table {types[1]}")
        on = F.col(f"`{operator.left}`") == F.col(f"`{right}`")
        return frame.join(F.broadcast(rows), on, operator.how).drop(right)

    return join


def _keeping(clock: Expr) -> Step:
    """Keeps a record's time for the watermark."""
    return lambda frame: frame.withColumn(_TIME, _ms(clock, frame))


def _ms(time: Expr, frame: DataFrame) -> Column:
    """Returns a record's time in whole milliseconds, as `as_ms` computes it."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    kind = infer(time, column_types(frame.schema))
    column = to_column(time, frame.schema)
    if kind == BIGINT:
        return column
    if kind == TIMESTAMP:
        return F.unix_millis(column)
    raise NotTheSame(f"the time {time!r} is a {kind}; windows need milliseconds or timestamps")


def _partials(form: RangeForm, texts: bool) -> tuple[Step, Callable[[pa.Table], MicroBatchResult]] | None:
    """Returns the end of a range in partial aggregates, and how they are read, or None when columns cannot compute
    them."""
    combiner = form.combiner
    key = expression_of(form.selector)
    if combiner is None or key is None or texts or form.operators:
        return None
    inner = combiner.inner if isinstance(combiner, Windowed) else combiner
    aggregations = _aggregations(inner)
    if aggregations is None:
        return None
    time: Expr | None = None
    if isinstance(combiner, Windowed):
        time = expression_of(combiner.time)
        if time is None:
            return None
    values = {f"{_VALUE}{i}": value for i, value in enumerate(inputs_of(aggregations))}
    over = _over(aggregations, values)

    def aggregate(frame: DataFrame) -> DataFrame:
        types = column_types(frame.schema)
        for each in aggregations:
            each.type(types)
        compiled = compile_all({_KEY: key, **values}, frame.schema)
        columns = dict(compiled.columns)
        if time is not None:
            assert isinstance(combiner, Windowed)
            columns[_START] = _starts(combiner, _ms(time, frame))
        if _TIME in types:
            columns[_TIME] = to_column(col(_TIME), frame.schema)
        rows = Compiled(compiled.stages, columns).select(frame)
        keys = [f"`{name}`" for name in (_KEY, _START) if name in columns]
        return rows.groupBy(*keys).agg(*_parts(inner, over, column_types(rows.schema)))

    def read(rows: pa.Table) -> MicroBatchResult:
        return _read(rows, inner, over, time is not None)

    return aggregate, read


def _aggregations(inner: Aggregate) -> list[Aggregation] | None:
    """Returns the aggregations whose parts, side by side, are the aggregate's partial result, or None when the
    aggregate calls a function."""
    if isinstance(inner, Agg):
        return list(inner.aggregations.values())
    if type(inner) is Count:
        return [count()]
    value = expression_of(inner.selector)
    if value is None or type(inner) not in (Sum, Min, Max, Mean):
        return None
    return [Aggregation(kind, value) for kind in (("sum", "count") if isinstance(inner, Mean) else (inner.name,))]


def _over(aggregations: list[Aggregation], values: dict[str, Expr]) -> list[Aggregation]:
    """Returns the same aggregations over columns that have the values."""
    places = {tree.key(value): col(name) for name, value in values.items()}
    inputs = [None if each.input is None else places[tree.key(each.input)] for each in aggregations]
    return [Aggregation(each.kind, input_) for each, input_ in zip(aggregations, inputs, strict=True)]


def _parts(inner: Aggregate, over: list[Aggregation], types: Schema) -> list[Column]:
    """Returns the aggregate columns: the parts, the number of rows with a doubtful value, and the greatest time."""
    parts = [column for i, each in enumerate(over) for column in partial_columns(f"{_PART}{i}", each, types)]
    if isinstance(inner, Agg):
        sums = inputs_of(each for each in over if each.kind == "sum")
        doubts = [doubt for value in sums for doubt in _overflowing(value, types)]
    else:
        doubts = [doubt for value in inputs_of(over) for doubt in _differing(value, types)]
    if doubts:
        parts += partial_columns(_DOUBTS, count(when(reduce(or_, doubts), 1)), types)
    if _TIME in types:
        parts += partial_columns(_TIME, max_(_TIME), types)
    return parts


def _differing(value: Expr, types: Schema) -> list[Expr]:
    """Returns where Python and Spark would treat a value differently: in Python nulls are errors, NaN equals nothing,
    and integers have no limit."""
    kind = infer(value, types)
    if kind == DOUBLE:
        return [value.is_null(), value == lit(math.nan)]
    if kind == BIGINT:
        return [value.is_null(), ~value.between(-_SAFE, _SAFE)]
    return [value.is_null() if kind in (STRING, TIMESTAMP, DATE, BOOLEAN) else lit(True)]


def _overflowing(value: Expr, types: Schema) -> list[Expr]:
    """Returns where a sum of decimals might need more digits than there are, which is an error here and a null in
    Spark."""
    size = decimal_size(infer(value, types))
    if size is None or size[0] <= _SAFE_DIGITS:
        return []
    limit = Decimal(1).scaleb(_SAFE_DIGITS - size[1])
    return [~value.between(-limit, limit)]


def _starts(combiner: Windowed, time: Column) -> Column:
    """Returns the starts of the windows that a time belongs to, with a row for each of them."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    window = combiner.window
    last = time - F.pmod(time - F.lit(window.offset), F.lit(window.slide))
    if window.slide == window.size:
        return last
    # The last first, and as many as end after the time.
    return F.explode(F.sequence(last, time - F.lit(window.size) + F.lit(1), F.lit(-window.slide)))


def _read(rows: pa.Table, inner: Aggregate, over: list[Aggregation], windowed: bool) -> MicroBatchResult:
    for name in (_KEY, _START):
        if name in rows.column_names and rows.column(name).null_count:
            raise NotTheSame("a record without a key or a time")
    if _DOUBTS in rows.column_names and any(rows.column(_DOUBTS).to_pylist()):
        raise NotTheSame(
            "decimals whose sum may have more than 38 digits"
            if isinstance(inner, Agg)
            else "values that Python and Spark do not aggregate alike (null, NaN, integers past 2**40)"
        )
    groups = [name for name in (_KEY, _START) if name in rows.column_names]
    rows = combined(rows, groups, _ways_to_combine(over, rows.column_names))
    keys = rows.column(_KEY).to_pylist()
    names = [name for i, each in enumerate(over) for name in each.columns(f"{_PART}{i}")]
    columns = [rows.column(name).to_pylist() for name in names]
    partials = list(zip(*columns, strict=True)) if isinstance(inner, Agg | Mean) else columns[0]
    if windowed:
        partials = list(zip(rows.column(_START).to_pylist(), partials, strict=True))
    greatest = None
    if _TIME in rows.column_names:
        greatest = max((time for time in rows.column(_TIME).to_pylist() if time is not None), default=None)
    return MicroBatchResult([KeyedBatch(keys, partials, True)] if keys else [], greatest)


def _ways_to_combine(over: list[Aggregation], names: list[str]) -> dict[str, str]:
    """Returns how the rows of several partitions for one group become one row, by column."""
    ways = {
        name: part
        for i, each in enumerate(over)
        for name, part in zip(each.columns(f"{_PART}{i}"), each.parts, strict=True)
    }
    if _TIME in names:
        ways[_TIME] = "max"
    return ways
