"""Defines the meaning of each operation in one row: the types that it takes and gives, the Python code that computes it
for `closure`, and the Spark column that does for `bridge.columns` (docs/papers.md: D1).

To add an operation, add a row to OPERATIONS, and to `tree` the method by which users write it.

This module must never import pyspark: a row gets Spark's functions from the bridge, which calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from penstock.runtime.errors import FlowError
from penstock.runtime.expressions import kernels, pattern
from penstock.runtime.expressions.tree import BINARY, Alias, Call, Column, Expr, Literal, key
from penstock.runtime.expressions.typed import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    NULL,
    STRING,
    STRINGS,
    TIMESTAMP,
    Rule,
    Schema,
    Type,
    arithmetic_type,
    cast_type,
    comparison_type,
    decimal_size,
    isin_type,
    literal_type,
    need,
    unify,
    when_type,
)

if TYPE_CHECKING:
    from penstock.runtime.expressions.closure import Writer

Code = Callable[["Writer", Call], str]

_EXACT_AS_DOUBLE = 2**53  # integers up to here are doubles, so comparing exactly and as doubles is the same
_WHEN_PAIRS_MAX = 12  # conditions in one Python expression, each of which is a bracket more
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_NUMBERS = (BIGINT, DOUBLE, "decimal")


@dataclass(frozen=True)
class Operation:
    """Holds the meaning of one operation.

    `takes`: the kinds of its operands; none for any. `gives`: the type of its result, or the rule that finds it.
    `code`: writes the Python code of its value. As a text, {0} and {1} stand for operands, {p} for the parameters; it
    is for operands that are not null, beside a null the result is null. `spark`: makes the column of Spark's functions,
    the operands' columns and the parameters; None where the bridge has to know more. `truth`: writes code that is true
    where the value is the wanted one, and false where it is the opposite or null, if that has a shorter way.
    """

    takes: tuple[str, ...]
    gives: str | Rule
    code: str | Code
    spark: Callable[..., Any] | None
    truth: Callable[[Writer, Call, bool], str] | None = None

    def type(self, call: Call, types: list[Type]) -> Type:
        """Returns the type of an operation's values, from the types of its operands. Raises FlowError when they do not
        fit."""
        for found in types:
            need(call, found, *self.takes)
        return self.gives if isinstance(self.gives, str) else self.gives(call, types)


def infer(expr: Expr, schema: Schema | None = None) -> Type:
    """Returns the type of an expression's values. Raises FlowError when the types of its parts do not fit."""
    if isinstance(expr, Literal):
        return literal_type(expr.value)
    if isinstance(expr, Column):
        if schema is None:
            return None
        if expr.field in schema:
            return schema[expr.field]
        if expr.optional:
            return NULL
        raise FlowError(
            f"{expr!r}: there is no field {expr.field!r}; there are: {', '.join(map(str, schema)) or 'none'}. "
            "Write optional=True if it may be absent"
        )
    if isinstance(expr, Alias):
        return infer(expr.expr, schema)
    assert isinstance(expr, Call)
    return OPERATIONS[expr.op].type(expr, [infer(arg, schema) for arg in expr.args])


# --- the Python code of operations that have quick ways --------------------------------------------------------


def _kernel(function: Callable[..., Any]) -> Code:
    """Returns the code that calls a kernel with all operands, null or not, and with the parameters."""
    return lambda w, call: w.kernel(function, *map(w.value, call.args), *map(repr, call.params))


def _arithmetic(w: Writer, call: Call) -> str:
    op, args, sign = call.op, call.args, BINARY[call.op]
    kinds = [w.kind(arg) for arg in args]
    kernel = getattr(kernels, op)
    numbers = DOUBLE in kinds and set(kinds) <= {DOUBLE, BIGINT}
    if op == "div":
        if numbers:
            return w.unless_null(args, lambda t: f"({t[0]} / {t[1]} if {t[1]} else None)")
        return w.kernel(kernel, *map(w.value, args))
    if numbers:
        return w.unless_null(args, lambda t: f"{t[0]} {sign} {t[1]}")
    if set(kinds) == {BIGINT}:
        return w.unless_null(args, lambda t: w.wrapped(f"{t[0]} {sign} {t[1]}"))
    whole = [isinstance(arg, Literal) and kinds[i] == BIGINT for i, arg in enumerate(args)]
    if kinds.count(None) == 1 and any(whole):
        other = args[whole.index(False)]
        t = w.temp()
        a, b = (w.value(arg) if whole[i] else t for i, arg in enumerate(args))
        return (
            f"({w.wrapped(f'{a} {sign} {b}')} if ({t} := {w.value(other)}).__class__ is int "
            f"else {w.kernel(kernel, a, b)})"
        )
    if None in kinds and set(kinds) <= {None, DOUBLE}:
        # Beside a double an integer becomes one, as in Spark; two fields may be integers that wrap.
        test = "in REALS" if DOUBLE in kinds else "is float"
        (a, b), tests = w.operands(args)
        # Not `and`: the kernel takes both operands.
        real = " & ".join(f"({t}.__class__ {test})" for t in tests)
        return f"({a} {sign} {b} if {real} else {w.kernel(kernel, a, b)})"
    return w.kernel(kernel, *map(w.value, args))


def _junction(w: Writer, call: Call) -> str:
    """Returns the code of a & b or a | b with three values: one `decisive` operand decides; otherwise a null makes the
    result null."""
    decisive = call.op == "or"
    left, right = (w.checked(arg, w.value(arg)) for arg in call.args)
    a, b = w.temp(), w.temp()
    return (
        f"({decisive} if ({a} := {left}) is {decisive} or ({b} := {right}) is {decisive} "
        f"else None if {a} is None or {b} is None else {not decisive})"
    )


def _joint(w: Writer, call: Call, want: bool) -> str:
    joint = " and " if (call.op == "and") is want else " or "
    return f"({joint.join(w.truth(part, want) for part in _flat(call, call.op))})"


def _flat(expr: Expr, op: str) -> Iterator[Expr]:
    """Returns the operands of a chain of one operation, such as a & b & c, in their order."""
    stack = [expr]
    while stack:
        node = stack.pop()
        if isinstance(node, Call) and node.op == op:
            stack.extend(reversed(node.args))
        else:
            yield node


def _not(w: Writer, call: Call) -> str:
    return w.unless_null(call.args, lambda t: f"not {w.checked(call.args[0], t[0])}")


def _null(w: Writer, call: Call, want: bool = True) -> str:
    want = (call.op == "is_null") is want
    if isinstance(call.args[0], Literal):  # Python warns of literals beside `is`
        return str((call.args[0].value is None) is want)
    return f"({w.value(call.args[0])} is {'' if want else 'not '}None)"


def _comparison(w: Writer, op: str, left: Expr, right: Expr, truth: bool) -> str:
    """Returns the code of a == b and so on. With `truth` only being true counts, so that null may be false."""
    if isinstance(left, Literal) and not isinstance(right, Literal):
        return _comparison(w, _MIRRORED[op], right, left, truth)
    how = _how(w, op, left, right)
    if how is None:
        code = w.kernel(getattr(kernels, op), w.value(left), w.value(right))
        return f"({code} is True)" if truth else code
    if truth and op == "eq" and how == "{0} == {1}" and isinstance(right, Literal):
        return f"({w.value(left)} == {w.value(right)})"  # None equals no literal
    if not truth:
        return w.unless_null((left, right), lambda t: how.format(*t))
    operands, tests = w.operands((left, right))
    return f"({''.join(f'{test} is not None and ' for test in tests)}{how.format(*operands)})"


def _how(w: Writer, op: str, left: Expr, right: Expr) -> str | None:
    """Returns the Python code of a comparison of {0} and {1}, neither of them null, or None if only a kernel can
    compare them."""
    sign, a, b = BINARY[op], w.kind(left), w.kind(right)
    plain = f"{{0}} {sign} {{1}}"
    with_nan = f"({plain} or {{0}} != {{0}})" if op in ("gt", "ge") else plain
    if isinstance(right, Literal) and right.value is not None:
        value = right.value
        if b in (STRING, BOOLEAN):
            return plain if a in (None, b) else None
        if b == TIMESTAMP:
            return f"utc({{0}}) {sign} {{1}}"
        if b == BIGINT and abs(value) <= _EXACT_AS_DOUBLE:
            return plain if a in (BIGINT, "decimal") else with_nan if a in (None, DOUBLE) else None
        if b == DOUBLE and abs(value) < _EXACT_AS_DOUBLE:  # at 2**53 itself, 2**53 + 1 as a double is equal
            if a in (BIGINT, DOUBLE):
                return with_nan
            return f"({with_nan} if {{0}}.__class__ is float else {op}({{0}}, {{1}}))" if a is None else None
    if a == b and a in (BIGINT, STRING, BOOLEAN, DATE, "decimal"):
        return plain
    if a == b == TIMESTAMP:
        return f"utc({{0}}) {sign} utc({{1}})"
    return None


def _as_two(call: Call) -> Call:
    """Returns between(value, low, high) as two comparisons."""
    value, low, high = call.args
    return Call("and", (Call("ge", (value, low)), Call("le", (value, high))))


def _isin(w: Writer, call: Call, want: bool | None = None) -> str:
    """Returns the code of a membership test. `want` is as for `truth`; None asks for the value."""
    values = [param.value for param in call.params if param.value is not None]
    has_null = len(values) < len(call.params)
    if not call.params:
        return str(want is False)
    subject = call.args[0]
    quick = {literal_type(value) for value in values} in ({STRING}, {BOOLEAN}, {BIGINT}, {TIMESTAMP}) and all(
        not isinstance(value, int) or abs(value) <= _EXACT_AS_DOUBLE for value in values
    )
    if not quick:
        several = w.constant(("values", key(call)), lambda: tuple(param.value for param in call.params))
        code = w.kernel(kernels.isin, w.value(subject), several)
        return code if want is None else f"({code} is {want})"
    members = w.constant(("set", key(call)), lambda: frozenset(values))
    instants = isinstance(values[0], datetime)
    if want is False and has_null:
        return "False"
    if want and not instants:
        return f"({w.value(subject)} in {members})"
    t = w.temp()
    inside = f"{f'utc({t})' if instants else t} {'not in' if want is False else 'in'} {members}"
    if want is not None:
        return f"(({t} := {w.value(subject)}) is not None and {inside})"
    return f"(None if ({t} := {w.value(subject)}) is None else {inside}{' or None' if has_null else ''})"


def _cast(w: Writer, call: Call) -> str:
    target, source = call.params[0], w.type(call.args[0])
    code = w.value(call.args[0])
    size = decimal_size(target)
    if size is not None:
        return f"{w.constant(('decimal', size), lambda: kernels.to_decimal(*size))}({code})"
    if source is not None and source in (target, NULL):
        return code
    places = decimal_size(source)
    if target == STRING and places is not None:
        return f"{w.constant(('places', places), lambda: kernels.decimal_to_string(places[1]))}({code})"
    return w.kernel(getattr(kernels, f"to_{target}"), code)


def _when(w: Writer, call: Call) -> str:
    whole = w.type(call)
    code = _as(w, whole, call.args[-1])
    pairs = list(zip(call.args[:-1:2], call.args[1::2], strict=False))
    if len(pairs) > _WHEN_PAIRS_MAX:
        lines = [f"    if {w.truth(test, True)}:\n        return {_as(w, whole, value)}\n" for test, value in pairs]
        return w.function(f"{''.join(lines)}    return {code}\n")
    for condition, value in reversed(pairs):
        code = f"({_as(w, whole, value)} if {w.truth(condition, True)} else {code})"
    return code


def _coalesce(w: Writer, call: Call) -> str:
    whole = w.type(call)
    *firsts, last = (_as(w, whole, arg) for arg in call.args)
    t = w.temp()
    return "(" + "".join(f"{t} if ({t} := {first}) is not None else " for first in firsts) + f"{last})"


def _as(w: Writer, whole: Type, expr: Expr) -> str:
    """Returns the code of a value of `when` or `coalesce`, as a double if the other values make it one."""
    code = w.value(expr)
    return w.kernel(kernels.to_double, code) if whole == DOUBLE and w.kind(expr) in (BIGINT, "decimal") else code


def _substr(w: Writer, call: Call) -> str:
    start, length = call.params
    return w.unless_null(call.args, lambda t: f"{t[0]}[{start - 1}:{start - 1 + length}]")


def _regexp_matches(w: Writer, call: Call) -> str:
    search = w.constant(("re", call.params[0]), lambda: pattern.searcher(call.params[0]))
    return w.unless_null(call.args, lambda t: f"{search}({t[0]}) is not None")


# --- the columns of operations that take more than a line -----------------------------------------------------


def _when_column(f: Any, *args: Any) -> Any:
    chain = f.when(*args[:2])
    for i in range(2, len(args) - 1, 2):
        chain = chain.when(*args[i : i + 2])
    return chain.otherwise(args[-1])


def _from_epoch_ms_column(f: Any, a: Any) -> Any:
    least, greatest = (f.expr(f"{n}L") for n in (kernels.EPOCH_MS_MIN, kernels.EPOCH_MS_MAX))
    return f.when((a >= least) & (a <= greatest), f.timestamp_millis(a))


# --- the table ------------------------------------------------------------------------------------------------


def _compares(spark: Callable[..., Any]) -> Operation:
    def code(w: Writer, call: Call) -> str:
        return _comparison(w, call.op, call.args[0], call.args[1], False)

    def truth(w: Writer, call: Call, want: bool) -> str:
        return _comparison(w, call.op if want else _OPPOSITE[call.op], call.args[0], call.args[1], True)

    return Operation((), comparison_type, code, spark, truth)


def _text(gives: str, code: str | Code, spark: Callable[..., Any]) -> Operation:
    return Operation((STRING,), gives, code, spark)


def _time_part(code: str, spark: Callable[..., Any], *takes: str) -> Operation:
    return Operation((TIMESTAMP, *takes), BIGINT, code, lambda f, a: spark(f, a).cast(BIGINT))


OPERATIONS: dict[str, Operation] = {
    "eq": _compares(lambda f, a, b: a == b),
    "ne": _compares(lambda f, a, b: a != b),
    "lt": _compares(lambda f, a, b: a < b),
    "le": _compares(lambda f, a, b: a <= b),
    "gt": _compares(lambda f, a, b: a > b),
    "ge": _compares(lambda f, a, b: a >= b),
    "between": Operation(
        (),
        comparison_type,
        lambda w, call: w.value(_as_two(call)),
        lambda f, a, low, high: (a >= low) & (a <= high),
        lambda w, call, want: w.truth(_as_two(call), want),
    ),
    "isin": Operation(
        (), isin_type, _isin, lambda f, a, *values: a.isin(list(values)) if values else f.lit(False), _isin
    ),
    "is_null": Operation((), BOOLEAN, _null, lambda f, a: a.isNull(), _null),
    "is_not_null": Operation((), BOOLEAN, _null, lambda f, a: a.isNotNull(), _null),
    "and": Operation((BOOLEAN,), BOOLEAN, _junction, lambda f, a, b: a & b, _joint),
    "or": Operation((BOOLEAN,), BOOLEAN, _junction, lambda f, a, b: a | b, _joint),
    "not": Operation((BOOLEAN,), BOOLEAN, _not, lambda f, a: ~a, lambda w, call, want: w.truth(call.args[0], not want)),
    "add": Operation(_NUMBERS, arithmetic_type, _arithmetic, lambda f, a, b: a + b),
    "sub": Operation(_NUMBERS, arithmetic_type, _arithmetic, lambda f, a, b: a - b),
    "mul": Operation(_NUMBERS, arithmetic_type, _arithmetic, lambda f, a, b: a * b),
    "div": Operation(_NUMBERS, arithmetic_type, _arithmetic, lambda f, a, b: a.cast(DOUBLE) / b.cast(DOUBLE)),
    "idiv": Operation((BIGINT,), BIGINT, _kernel(kernels.idiv), lambda f, a, b: f.call_function("div", a, b)),
    "mod": Operation(_NUMBERS, arithmetic_type, _kernel(kernels.mod), lambda f, a, b: a % b),
    "neg": Operation(_NUMBERS, lambda call, types: types[0], _kernel(kernels.neg), lambda f, a: -a),
    "cast": Operation((), cast_type, _cast, None),
    "when": Operation((), when_type, _when, _when_column),
    "coalesce": Operation((), unify, _coalesce, lambda f, *args: f.coalesce(*args)),
    "json": Operation((STRING,), STRING, lambda w, call: w.json(call), None),
    "regexp_matches": _text(BOOLEAN, _regexp_matches, lambda f, a, p: a.rlike(pattern.JAVA_FLAGS + p)),
    "concat": _text(STRING, _kernel(kernels.concat), lambda f, *args: f.concat(*args)),
    "str.upper": _text(STRING, "{0}.upper()", lambda f, a: f.upper(a)),
    "str.lower": _text(STRING, "{0}.lower()", lambda f, a: f.lower(a)),
    "str.length": _text(BIGINT, "len({0})", lambda f, a: f.length(a).cast(BIGINT)),
    "str.strip": _text(STRING, "{0}.strip({p[0]})", lambda f, a, c: f.call_function("btrim", a, f.lit(c))),
    "str.lstrip": _text(STRING, "{0}.lstrip({p[0]})", lambda f, a, c: f.call_function("ltrim", f.lit(c), a)),
    "str.rstrip": _text(STRING, "{0}.rstrip({p[0]})", lambda f, a, c: f.call_function("rtrim", f.lit(c), a)),
    "str.contains": _text(BOOLEAN, "({1} in {0})", lambda f, a, b: a.contains(b)),
    "str.startswith": _text(BOOLEAN, "{0}.startswith({1})", lambda f, a, b: a.startswith(b)),
    "str.endswith": _text(BOOLEAN, "{0}.endswith({1})", lambda f, a, b: a.endswith(b)),
    "str.substr": _text(STRING, _substr, lambda f, a, start, length: a.substr(start, length)),
    "str.replace": _text(STRING, "{0}.replace({p[0]}, {p[1]})", lambda f, a, *p: f.replace(a, *map(f.lit, p))),
    "str.split": _text(
        STRINGS, "{0}.split({p[0]})", lambda f, a, p: f.split(a, "".join(f"\\x{{{ord(c):x}}}" for c in p), -1)
    ),
    "list.get": Operation((STRINGS,), STRING, _kernel(kernels.element), lambda f, a, i: f.get(a, f.lit(i))),
    "list.len": Operation((STRINGS,), BIGINT, "len({0})", lambda f, a: f.array_size(a).cast(BIGINT)),
    "dt.year": _time_part("calendar({0}).year", lambda f, a: f.year(a), DATE),
    "dt.month": _time_part("calendar({0}).month", lambda f, a: f.month(a), DATE),
    "dt.day": _time_part("calendar({0}).day", lambda f, a: f.dayofmonth(a), DATE),
    "dt.hour": _time_part("utc({0}).hour", lambda f, a: f.hour(a)),
    "dt.minute": _time_part("utc({0}).minute", lambda f, a: f.minute(a)),
    "dt.second": _time_part("utc({0}).second", lambda f, a: f.second(a)),
    "dt.epoch_ms": Operation((TIMESTAMP,), BIGINT, _kernel(kernels.epoch_ms), lambda f, a: f.unix_millis(a)),
    "dt.from_epoch_ms": Operation((BIGINT,), TIMESTAMP, _kernel(kernels.from_epoch_ms), _from_epoch_ms_column),
    "dt.truncate": Operation(
        (TIMESTAMP,), TIMESTAMP, _kernel(kernels.truncate), lambda f, a, unit: f.date_trunc(unit, a)
    ),
}
