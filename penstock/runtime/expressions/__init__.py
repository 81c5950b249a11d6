"""Defines expressions over the fields of dict records. They run in both paradigms (docs/papers.md: D1).

    from penstock.runtime.expressions import col, compile_filter

    wanted = (col("event_type") == "view") & (col("price") > 5)
    keep = compile_filter(wanted)           # the data stream: a function over lists of records
    keep([{"event_type": "view", "price": 7}])

`penstock.bridge.columns` makes Spark columns of the same expressions. Both give the same answers, which are Spark's
with ANSI mode off:

- A null operand makes the result null. & and | know three values: null & False is False, null | True is True. A filter
  keeps the records for which its expression is true.
- Integers are bigints, 64 bits, and results wrap. `/` divides doubles; `//` and `%` truncate towards zero, as SQL's
  do (-7 // 2 is -3, -7 % 2 is -1). By zero, all three give null.
- Doubles are IEEE 754, but NaN equals NaN and is greater than every number. An integer or a decimal beside a double
  becomes one.
- Decimals add, subtract, multiply and compare exactly, to 38 digits; results that might need more are refused when the
  flow is built, where the types are known, and else when a value has more. They have no `/`, `//` or `%`: cast to
  double. A cast to decimal(p,s) rounds half up, and gives null for what does not fit. The decimal of a double is the
  shortest number that stands for the double; Java before 19 does not always find it, so there Spark's decimals may
  differ after the 15th digit.
- Strings are compared by code points.
- Timestamps are instants: datetimes with any time zone, never without one. Their parts, their text and their days are
  those of UTC. Results are in UTC.
- Casts of texts that cannot be read give null. Numbers are read as in SQL, without underscores, in ASCII digits, with
  exponents of at most three digits; timestamps as 2024-02-29[ 12:30:00[.123456][Z|+01:00]]; dates as 2024-02-29.

Records are taken to hold what the schema says, if one is given. Aggregations for `agg` are in `aggregates`.

This package must never import pyspark or Ray, and must never evaluate text that came with the data.
"""

from __future__ import annotations

from penstock.runtime.expressions.aggregates import AGGREGATIONS, Aggregation, count, max_, mean, min_, sum_
from penstock.runtime.expressions.closure import (
    Closure,
    EvaluationError,
    MissingField,
    compile_filter,
    compile_select,
    compile_value,
    compile_with_columns,
)
from penstock.runtime.expressions.tree import Expr, When, coalesce, col, concat, lit, named, when

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "Closure",
    "EvaluationError",
    "Expr",
    "MissingField",
    "When",
    "coalesce",
    "col",
    "compile_filter",
    "compile_select",
    "compile_value",
    "compile_with_columns",
    "concat",
    "count",
    "lit",
    "max_",
    "mean",
    "min_",
    "named",
    "sum_",
    "when",
]
