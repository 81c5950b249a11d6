"""Expressions as Spark columns: the operation stream's half (docs/papers.md: D1).

Every column gives what `runtime.expressions.closure` gives for the same record, in a session with SESSION_SETTINGS. So
a column is not always the function of the same name: casts of texts read only the texts that Python reads, too,
integers of every width become bigints, and patterns end lines as Python does.

The types of the table's columns decide whether an expression has a meaning, so give the schema wherever there is one.
Without it nothing is checked, and columns are taken to be of the types that Penstock's records have: bigint, double,
string, boolean, timestamp, date, decimal. Casts and arithmetic are then Spark's own.

A JSON text of which several fields are taken is parsed once a row: the functions on DataFrames put the parsed text into
a column first, which Spark does not fold back as it costs more than a reference. Columns by themselves cannot do this;
`compile_all` says what has to be selected before them.

It must never make a Python function run in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any

from penstock.runtime.errors import FlowError
from penstock.runtime.expressions import Aggregation, Expr, kernels, named, tree
from penstock.runtime.expressions.operations import OPERATIONS, infer
from penstock.runtime.expressions.tree import Alias, Call, Column
from penstock.runtime.expressions.typed import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    NULL,
    STRING,
    TIMESTAMP,
    Type,
    kind,
    literal_type,
)

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

#: What a session must be set to for columns to mean what closures mean.
SESSION_SETTINGS: dict[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "false",  # null where there is no value, and integers that wrap
    "spark.sql.caseSensitive": "true",  # fields of records and of JSON texts that differ in case only
    "spark.sql.json.enablePartialResults": "true",  # one field of another kind does not hide the others
    # It would make of one parser for several fields one parser for each of them.
    "spark.sql.optimizer.enableJsonExpressionOptimization": "false",
    "spark.sql.decimalOperations.allowPrecisionLoss": "true",  # as the types of results assume; none is ever lost
}

_JSON_OPTIONS = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}  # JSON, and no more
_BLANK = r"[\x00-\x20]*"
_TEXT_CASTS = {
    DOUBLE: rf"^{_BLANK}(?:{kernels.NUMBER}|{kernels.SPECIAL}){_BLANK}\z",
    "decimal": rf"^{_BLANK}(?:{kernels.NUMBER}){_BLANK}\z",
    TIMESTAMP: rf"^(?!0000)(?:{kernels.TIMESTAMP})\z",
    DATE: rf"^(?!0000)(?:{kernels.DATE})\z",
}
_MICROSECOND = timedelta(microseconds=1)
_EPOCH_DAY = date(1970, 1, 1)

Exprs = Mapping[str, Expr] | Sequence[Expr | str]


@dataclass(frozen=True)
class Compiled:
    """Columns for a table, and the columns that must be selected before them in addition to the table's own columns,
    stage by stage."""

    stages: tuple[dict[str, SparkColumn], ...]
    columns: dict[str, SparkColumn]

    def prepare(self, frame: DataFrame) -> DataFrame:
        """Returns the table with the columns of all stages added. `columns` are columns of this table."""
        for stage in self.stages:
            frame = frame.select("*", *(_once(column).alias(name) for name, column in stage.items()))
        return frame

    def select(self, frame: DataFrame) -> DataFrame:
        """Returns the table of the columns, and of nothing else."""
        return self.prepare(frame).select(*(column.alias(name) for name, column in self.columns.items()))


def _once(column: SparkColumn) -> SparkColumn:
    """Returns a column that is computed once for each row. Spark would otherwise move a filter before the column, and
    compute it there once for each condition of the filter. It moves nothing past a column that is not deterministic."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    return F.when(F.monotonically_increasing_id() >= F.lit(0), column)


def column_types(schema: StructType | Mapping[str, str]) -> dict[str, str]:
    """Returns a table's columns as expressions see them: {name: type}."""
    if isinstance(schema, Mapping):
        return dict(schema)
    return {field.name: _type_name(field.dataType) for field in schema.fields}


def to_column(expr: Expr, schema: StructType | Mapping[str, str] | None = None) -> SparkColumn:
    """Returns the Spark column of one expression over a table of a schema. Raises FlowError when the types do not
    fit."""
    return _Writer(schema).column(expr)


def compile_all(exprs: Exprs, schema: StructType | Mapping[str, str] | None = None) -> Compiled:
    """Returns the Spark columns of several expressions, which share the parsing of JSON texts."""
    writer = _Writer(schema)
    wanted = named(exprs)
    stages = writer.share_parsing(wanted.values())
    return Compiled(tuple(stages), {name: writer.column(expr) for name, expr in wanted.items()})


def select_columns(frame: DataFrame, exprs: Exprs) -> DataFrame:
    """Returns the same as `compile_select` does for records."""
    return compile_all(exprs, frame.schema).select(frame)


def with_columns(frame: DataFrame, exprs: Exprs) -> DataFrame:
    """Returns the same as `compile_with_columns` does for records. New columns come last."""
    wanted = named(exprs)
    whole: dict[str, Expr] = {field.name: tree.col(field.name) for field in frame.schema.fields}
    compiled = compile_all(wanted, frame.schema)
    columns = {name: _field(name) for name in whole} | compiled.columns
    return Compiled(compiled.stages, columns).select(frame)


def filter_rows(frame: DataFrame, expr: Expr) -> DataFrame:
    """Returns the same as `compile_filter` does for records. Spark moves a condition before all that is selected, so
    each JSON field in it is parsed by itself. Select a field first when it is needed twice."""
    _check_condition(expr, column_types(frame.schema))
    return frame.filter(to_column(expr, frame.schema))


def partial_columns(
    name: str, aggregation: Aggregation, schema: StructType | Mapping[str, str] | None = None
) -> list[SparkColumn]:
    """Returns the aggregate columns whose values are an aggregation's parts, under the names of
    `Aggregation.columns`."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    aggregation.type(None if schema is None else column_types(schema))
    if aggregation.input is None:
        return [F.count(F.lit(1)).alias(name)]
    value = to_column(aggregation.input, schema)
    functions: dict[str, Callable[[SparkColumn], SparkColumn]] = {
        "count": F.count,
        "sum": F.sum,
        "min": F.min,
        "max": F.max,
    }
    if aggregation.kind == "mean":
        found = [F.sum(value.cast(DOUBLE)), F.count(value)]
    else:
        found = [functions[aggregation.kind](value)]
    return [column.alias(part) for column, part in zip(found, aggregation.columns(name), strict=True)]


def _check_condition(expr: Expr, types: Mapping[str, str]) -> None:
    found = infer(expr, types)
    if found not in (BOOLEAN, NULL):
        raise FlowError(f"filter({expr!r}): the expression is a {found}; a filter needs a condition")


def _field(name: str) -> SparkColumn:
    from pyspark.sql import functions as F  # noqa: N812

    return F.col("`" + name.replace("`", "``") + "`")


def _type_name(spark: DataType) -> str:
    from pyspark.sql import types as T  # noqa: N812

    if isinstance(spark, T.IntegralType):
        return BIGINT
    if isinstance(spark, T.FractionalType) and not isinstance(spark, T.DecimalType):
        return DOUBLE
    return NULL if isinstance(spark, T.NullType) else str(spark.simpleString())


class _Writer:
    """Makes the columns of expressions over one table."""

    def __init__(self, schema: StructType | Mapping[str, str] | None) -> None:
        self.types = None if schema is None else column_types(schema)
        # Columns that Spark has in other widths than expressions know.
        self.widths: dict[str, str] = {}
        if schema is not None and not isinstance(schema, Mapping):
            exact = {field.name: field.dataType.simpleString() for field in schema.fields}
            self.widths = {
                name: found
                for name, found in (self.types or {}).items()
                if found in (BIGINT, DOUBLE) and exact[name] != found
            }
        self.parsed: dict[tuple[Any, ...], Callable[[tuple[str, ...]], SparkColumn]] = {}

    def share_parsing(self, exprs: Iterable[Expr]) -> list[dict[str, SparkColumn]]:
        """Returns the stages that parse the JSON texts of which several fields are taken."""
        texts: dict[tuple[Any, ...], tuple[Expr, list[tuple[str, ...]]]] = {}
        for expr in exprs:
            for node in expr.walk():
                if isinstance(node, Call) and node.op == "json":
                    paths = texts.setdefault(tree.key(node.args[0]), (node.args[0], []))[1]
                    if node.params[0] not in paths:
                        paths.append(node.params[0])
        stages: list[dict[str, SparkColumn]] = []
        taken = set(self.types or ())
        for text, (expr, paths) in sorted(texts.items(), key=lambda item: _json_depth(item[1][0])):
            if len(paths) < 2:
                continue
            depth = _json_depth(expr)
            while len(stages) <= depth:
                stages.append({})
            places: dict[tuple[str, ...], SparkColumn] = {}
            for group in _compatible(paths):
                name = f"__json{sum(map(len, stages))}"
                while name in taken:
                    name = f"_{name}"
                stages[depth][name] = self._parse(self.column(expr), group)
                places |= {path: _inside(_field(name), path) for path in group}
            self.parsed[text] = places.__getitem__
        return [stage for stage in stages if stage]

    def _parse(self, text: SparkColumn, paths: Sequence[tuple[str, ...]]) -> SparkColumn:
        from pyspark.sql import functions as F  # noqa: N812

        return F.from_json(text, _struct(paths), _JSON_OPTIONS)

    def type(self, expr: Expr) -> Type:
        return infer(expr, self.types)

    def column(self, expr: Expr) -> SparkColumn:
        return self._column(expr)[0]

    def _column(self, expr: Expr) -> tuple[SparkColumn, Type]:
        from pyspark.sql import functions as F  # noqa: N812

        if isinstance(expr, Alias):
            return self._column(expr.expr)
        if isinstance(expr, tree.Literal):
            return self._literal(expr.value), literal_type(expr.value)
        if isinstance(expr, Column):
            found = self.type(expr)
            if self.types is not None and expr.field not in self.types:
                return F.lit(None), NULL
            column = _field(expr.field)
            return (column.cast(self.widths[expr.field]) if expr.field in self.widths else column), found
        assert isinstance(expr, Call)
        parts = [self._column(arg) for arg in expr.args]
        types = [found for _, found in parts]
        operation = OPERATIONS[expr.op]
        found = operation.type(expr, types)
        args = [
            column.cast(wanted) if of == NULL and (wanted := _null_type(expr, i)) else column
            for i, (column, of) in enumerate(parts)
        ]
        if operation.spark is None:
            return WRITTEN_HERE[expr.op](self, expr, args[0], types[0]), found
        params = [self._literal(each.value) if isinstance(each, tree.Literal) else each for each in expr.params]
        made: SparkColumn = operation.spark(F, *args, *params)
        return made, found

    def _literal(self, value: Any) -> SparkColumn:
        from pyspark.sql import functions as F  # noqa: N812

        if isinstance(value, bool) or value is None or isinstance(value, str | float):
            return F.lit(value)
        if isinstance(value, int):
            return F.expr(f"{value}L")
        if isinstance(value, Decimal):
            return F.lit(format(value, "f")).cast(literal_type(value))
        if isinstance(value, datetime):  # by its number, as Spark reads old datetimes by another calendar
            return F.timestamp_micros(F.expr(f"{(value - kernels.EPOCH) // _MICROSECOND}L"))
        assert isinstance(value, date)
        return F.date_from_unix_date(F.lit((value - _EPOCH_DAY).days))

    def json(self, expr: Call, text: SparkColumn, _: Type) -> SparkColumn:
        """Returns the column of a field of a JSON text."""
        found = self.parsed.get(tree.key(expr.args[0]))
        return found(expr.params[0]) if found else _inside(self._parse(text, expr.params), expr.params[0])

    def cast(self, expr: Call, column: SparkColumn, source: Type) -> SparkColumn:
        """Returns the column of a cast."""
        from pyspark.sql import functions as F  # noqa: N812

        target = expr.params[0]
        if target == "int":
            return column.cast("int").cast(BIGINT)
        plain = column.cast(target)
        guard = _TEXT_CASTS.get(kind(target) or "") if source == STRING else None
        if guard is None:
            return plain
        found = F.when(column.rlike(guard), plain)
        if target != TIMESTAMP:
            return found
        least = self._literal(kernels.EPOCH + timedelta(milliseconds=kernels.EPOCH_MS_MIN))
        greatest = self._literal(kernels.EPOCH + timedelta(milliseconds=kernels.EPOCH_MS_MAX, microseconds=999))
        return F.when((found >= least) & (found <= greatest), found)  # a zone can lead out of the years 1 to 9999


#: The operations whose columns need more than the operands' columns.
WRITTEN_HERE: dict[str, Callable[[_Writer, Call, SparkColumn, Type], SparkColumn]] = {
    "cast": _Writer.cast,
    "json": _Writer.json,
}


def _null_type(call: Call, i: int) -> str | None:
    """Returns the type that a null as the i-th operand must have, as Spark could not use an untyped one."""
    if call.op == "when" and i % 2 == 0 and i < len(call.args) - 1:
        return BOOLEAN
    return next(iter(OPERATIONS[call.op].takes), None)


def _json_depth(expr: Expr) -> int:
    """Returns how many JSON texts lie inside each other in an expression."""
    inner = max(map(_json_depth, expr.children()), default=0)
    return inner + (isinstance(expr, Call) and expr.op == "json")


def _compatible(paths: Sequence[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Divides paths into groups that one parser can read: within a group, no path leads through the end of another."""
    groups: list[list[tuple[str, ...]]] = []
    for path in sorted(paths, key=len, reverse=True):
        for group in groups:
            if not any(other[: len(path)] == path for other in group):
                group.append(path)
                break
        else:
            groups.append([path])
    return groups


def _struct(paths: Iterable[tuple[str, ...]]) -> StructType:
    from pyspark.sql.types import StringType, StructField, StructType

    below: dict[str, list[tuple[str, ...]]] = {}
    for first, *rest in paths:
        below.setdefault(first, []).append(tuple(rest))
    return StructType(
        [StructField(name, _struct(rests) if rests[0] else StringType()) for name, rests in below.items()]
    )


def _inside(struct: SparkColumn, path: tuple[str, ...]) -> SparkColumn:
    return reduce(lambda column, name: column.getField(name), path, struct)
