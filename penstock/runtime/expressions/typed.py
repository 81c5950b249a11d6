"""Defines the types of expressions' values, and the rules by which an operation's type follows from the types of its
operands.

Types are written as Spark writes them: boolean, bigint, double, string, timestamp, date, decimal(p,s), array<string>,
and null for what is always null. None stands for a type that is not known: fields have types only where a schema says
so. Types of fields that expressions cannot work with (struct<...>, binary) may be passed on and tested for null.

The rules are Spark's wherever both paradigms can follow them. They refuse, when the flow is built, what would come out
differently: above all decimals whose exact result would need more than 38 digits, which Spark rounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.expressions.tree import DECIMAL_DIGITS, Call, Expr, Literal

Type = str | None
Schema = Mapping[str, str]

BOOLEAN, BIGINT, DOUBLE, STRING = "boolean", "bigint", "double", "string"
TIMESTAMP, DATE, STRINGS, NULL = "timestamp", "date", "array<string>", "null"

Rule = Callable[[Call, list[Type]], Type]

_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_BIGINT_AS_DECIMAL = (20, 0)

# What may be cast to what, besides null and the type itself. "int" is a bigint that fits 32 bits.
_CASTS: dict[str, frozenset[str]] = {
    "int": frozenset({BOOLEAN, BIGINT, DOUBLE, STRING, "decimal"}),
    BIGINT: frozenset({BOOLEAN, DOUBLE, STRING, TIMESTAMP, "decimal"}),
    DOUBLE: frozenset({BOOLEAN, BIGINT, STRING, "decimal"}),
    "decimal": frozenset({BOOLEAN, BIGINT, DOUBLE, STRING, "decimal"}),
    BOOLEAN: frozenset({BIGINT, DOUBLE, STRING, "decimal"}),
    STRING: frozenset({BOOLEAN, BIGINT, "decimal", TIMESTAMP, DATE}),
    TIMESTAMP: frozenset({STRING, DATE}),
    DATE: frozenset({STRING, TIMESTAMP}),
}
_CAST_HINTS = {
    (DOUBLE, STRING): "; Python and Java write doubles differently: cast to decimal(p,s) first",
    (BIGINT, TIMESTAMP): "; use .dt.from_epoch_ms()",
    (TIMESTAMP, DOUBLE): "; use .dt.epoch_ms()",
    (TIMESTAMP, "int"): "; use bigint",
}


def cast_target(target: object, where: str) -> str:
    """Returns a type's name as casts know it, in its one spelling."""
    if isinstance(target, str):
        if target in _CASTS and target != "decimal":
            return target
        size = decimal_size(target)
        if size and 1 <= size[0] <= DECIMAL_DIGITS and size[1] <= size[0]:
            return decimal_type(*size)
    raise FlowError(
        f"{where}({target!r}): cast to int, bigint, double, string, boolean, timestamp, date or decimal(p,s) "
        f"with p up to {DECIMAL_DIGITS} and s up to p"
    )


def decimal_size(name: Type) -> tuple[int, int] | None:
    """Returns (precision, scale) of a decimal type, or None for other types."""
    found = _DECIMAL.fullmatch(name) if name else None
    return (int(found[1]), int(found[2])) if found else None


def decimal_type(precision: int, scale: int) -> str:
    """Returns the name of a decimal type."""
    return f"decimal({precision},{scale})"


def kind(name: Type) -> Type:
    """Returns a type without its size: all decimals are of one kind."""
    return "decimal" if name is not None and name.startswith("decimal(") else name


def literal_type(value: Any) -> str:
    """Returns the type of a literal's value."""
    if value is None:
        return NULL
    if isinstance(value, Decimal):
        _, digits, exponent = value.as_tuple()
        assert isinstance(exponent, int)
        scale = max(-exponent, 0)
        return decimal_type(max(len(digits) + max(exponent, 0), scale), scale)
    for types, name in ((bool, BOOLEAN), (int, BIGINT), (float, DOUBLE), (str, STRING), (datetime, TIMESTAMP)):
        if isinstance(value, types):
            return name
    assert isinstance(value, date)
    return DATE


def unify(call: Call, types: Iterable[Type]) -> Type:
    """Returns the one type that values of several types are brought to, or None when one of them is not known."""
    found: Type = NULL
    for each in types:
        if each is None or found is None:
            found = None
        elif found in (NULL, each):
            found = each
        elif each != NULL:
            found = _wider(call, found, each)
    return found


def isin_type(call: Call, types: list[Type]) -> Type:
    """Returns the type of a membership test."""
    for value in call.params:
        if value.value is not None:
            _comparable(call, types[0], literal_type(value.value))
    unify(call, [literal_type(value.value) for value in call.params])
    return BOOLEAN


def cast_type(call: Call, types: list[Type]) -> Type:
    """Returns the type of a cast."""
    target, source = call.params[0], types[0]
    to, of = kind(target), kind(source)
    result = BIGINT if target == "int" else target
    if source is None or source in (NULL, target):
        return str(result)
    assert to is not None
    assert of is not None
    if of not in _CASTS[to]:
        raise FlowError(f"{call!r}: a {source} cannot be cast to {target}{_CAST_HINTS.get((of, to), '')}")
    return str(result)


def when_type(call: Call, types: list[Type]) -> Type:
    """Returns the one type of all values between which conditions decide."""
    for condition in types[:-1:2]:
        need(call, condition, BOOLEAN)
    return unify(call, [*types[1::2], types[-1]])


def need(call: Call, found: Type, *kinds: str) -> None:
    """Raises FlowError unless an operand is of one of some kinds, null, or of unknown type. Without kinds all are."""
    if kinds and found is not None and found != NULL and kind(found) not in kinds:
        raise FlowError(f"{call!r}: {call.op} takes {' or '.join(kinds)}, not {found}; cast it, or take another field")


def _wider(call: Call, a: str, b: str) -> str:
    kinds = {kind(a), kind(b)}
    if kinds <= {BIGINT, DOUBLE, "decimal"}:
        if DOUBLE in kinds:
            return DOUBLE
        (p1, s1), (p2, s2) = _size(a), _size(b)
        scale = max(s1, s2)
        return _exact(call, max(p1 - s1, p2 - s2) + scale, scale, a, b)
    raise FlowError(f"{call!r}: {a} and {b} have no common type; cast one of them")


def comparison_type(call: Call, types: list[Type]) -> Type:
    """Returns the type of a comparison of the first operand with each of the others."""
    for other in types[1:]:
        _comparable(call, types[0], other)
    return BOOLEAN


def _comparable(call: Call, a: Type, b: Type) -> None:
    for each in (a, b):
        if each is not None and each != NULL and kind(each) not in _CASTS:
            raise FlowError(f"{call!r}: a {each} cannot be compared")
    if a is not None and b is not None and NULL not in (a, b) and a != b:
        _wider(call, a, b)


def arithmetic_type(call: Call, types: list[Type]) -> Type:
    """Returns the type of a sum, difference, product, quotient or remainder of two numbers."""
    op, (a, b) = call.op, types
    kinds = {kind(a), kind(b)}
    if DOUBLE in kinds or (op == "div" and "decimal" not in kinds):
        return DOUBLE
    if op in ("div", "mod") and "decimal" in kinds:
        if None in kinds:
            return None
        raise FlowError(f"{call!r}: decimals have no {op} that is exact; cast both to double")
    if None in kinds:
        return None
    if "decimal" not in kinds:
        return NULL if kinds == {NULL} else BIGINT
    if NULL in kinds:
        raise FlowError(f"{call!r}: a null has no precision; cast it to a decimal(p,s)")
    (p1, s1), (p2, s2) = _size(a, call.args[0]), _size(b, call.args[1])
    if op == "mul":
        return _exact(call, p1 + p2 + 1, s1 + s2, a, b)
    scale = max(s1, s2)
    return _exact(call, max(p1 - s1, p2 - s2) + scale + 1, scale, a, b)


def _size(name: Type, expr: Expr | None = None) -> tuple[int, int]:
    if isinstance(expr, Literal) and isinstance(expr.value, int):
        return len(str(abs(expr.value))), 0  # Spark, too, gives an integer literal beside a decimal no more digits
    return decimal_size(name) or _BIGINT_AS_DECIMAL


def _exact(call: Call, precision: int, scale: int, a: Type, b: Type) -> str:
    if precision > DECIMAL_DIGITS:
        raise FlowError(
            f"{call!r}: of {a} and {b} the exact result needs {precision} digits, and decimals hold {DECIMAL_DIGITS}; "
            "cast them to smaller ones first"
        )
    return decimal_type(precision, scale)
