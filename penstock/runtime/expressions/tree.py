"""Defines expressions: an immutable tree that the user's operators build, and nothing that can be run.

    (col("event_type") == "view") & col("price").is_not_null()

The user writes the logic once, and the tree is mapped to both paradigms (docs/papers.md: D1): `closure` makes a Python
function over lists of records of it, `bridge.columns` a Spark column. So a tree holds plain data only (names, values,
kinds of operations): it pickles, prints as the user wrote it, and compares by `same`, as `==` builds an expression.

It must never be true or false: `if col("a") == 1` would always take the first branch, so it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any, NoReturn

from penstock.runtime.errors import FlowError, shorten

BIGINT_MIN, BIGINT_MAX = -(2**63), 2**63 - 1
DECIMAL_DIGITS = 38  # as many as Spark's decimals have
UNITS = ("year", "month", "week", "day", "hour", "minute", "second")
_WHITESPACE = " \t\n\r\x0b\x0c"
Text = str  # inside Expr the name str is a property

BINARY = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "idiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
}
_PREFIX = {"neg": "-", "not": "~"}
_FREE = ("when", "coalesce", "concat")  # written as functions, not as methods


Binary = Callable[["Expr", object], "Expr"]


def _comparison(op: str) -> Binary:
    return lambda left, right: Call(op, (left, _operand(right, BINARY[op])))


def _both_ways(op: str) -> tuple[Binary, Binary]:
    """Returns the methods of an operator for an expression on the left, and for one on the right of a plain value."""
    return lambda left, right: Call(op, (left, lit(right))), lambda right, left: Call(op, (lit(left), right))


class Expr:
    """An expression over the fields of a record. See the package for what its operators mean."""

    __slots__ = ()

    # --- what it is made of ---------------------------------------------------------------------------------

    def children(self) -> tuple[Expr, ...]:
        """Returns the expressions that it is made of."""
        return ()

    @property
    def name(self) -> Text | None:
        """Returns the default name of the expression in a result: the name of a column or an alias."""
        return None

    def fields(self) -> tuple[Text, ...]:
        """Returns the record's fields that it reads, in the order in which it names them."""
        return tuple(dict.fromkeys(node.field for node in self.walk() if isinstance(node, Column)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]

    def walk(self) -> Iterator[Expr]:
        """Yields this expression and all expressions that it is made of, parents first."""
        stack: list[Expr] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children()))

    def same(self, other: object) -> bool:
        """Tells whether the other is the same expression, written the same way. `==` would build a third expression."""
        return isinstance(other, Expr) and key(self) == key(other)

    def type(self, schema: Mapping[Text, Text] | None = None) -> Text | None:
        """Returns the type of its values, given the types of the fields, or None where it depends on a field of unknown
        type. Raises FlowError when the types do not fit."""
        from penstock.runtime.expressions.operations import infer

        return infer(self, schema)

    # --- operators ------------------------------------------------------------------------------------------

    __eq__ = _comparison("eq")  # type: ignore[assignment]
    __ne__ = _comparison("ne")  # type: ignore[assignment]
    __lt__ = _comparison("lt")
    __le__ = _comparison("le")
    __gt__ = _comparison("gt")
    __ge__ = _comparison("ge")
    __add__, __radd__ = _both_ways("add")
    __sub__, __rsub__ = _both_ways("sub")
    __mul__, __rmul__ = _both_ways("mul")
    # As in SQL, a quotient is a double, `//` drops the fraction (-7 // 2 is -3, where Python gives -4), and a remainder
    # has the sign of the dividend (-7 % 2 is -1, not 1). All three are null where the divisor is zero.
    __truediv__, __rtruediv__ = _both_ways("div")
    __floordiv__, __rfloordiv__ = _both_ways("idiv")
    __mod__, __rmod__ = _both_ways("mod")
    __and__, __rand__ = _both_ways("and")
    __or__, __ror__ = _both_ways("or")

    def __neg__(self) -> Expr:
        return Call("neg", (self,))

    def __invert__(self) -> Expr:
        return Call("not", (self,))

    # --- traps ----------------------------------------------------------------------------------------------

    def __bool__(self) -> NoReturn:
        raise FlowError(
            f"{self!r} is an expression, which is neither true nor false before there is a record. Use & | ~ for "
            "and, or, not, with each comparison in brackets; between() for a < x < b; isin() for in; "
            ".same() to compare expressions"
        )

    def __hash__(self) -> int:
        raise TypeError(f"{self!r} is an expression, which has no hash as == builds another; compare with .same()")

    def __iter__(self) -> NoReturn:
        raise FlowError(f"{self!r} is an expression and cannot be iterated over; .list[i] is an element of an array")

    def __contains__(self, item: object) -> NoReturn:
        raise FlowError(f"{self!r} is an expression: write .isin([...]) or .str.contains(...) instead of in")

    # --- functions ------------------------------------------------------------------------------------------

    def is_null(self) -> Expr:
        """Tells whether the value is null. The result is never null itself."""
        return Call("is_null", (self,))

    def is_not_null(self) -> Expr:
        """Tells whether the value is not null. The result is never null itself."""
        return Call("is_not_null", (self,))

    def isin(self, values: Sequence[Any]) -> Expr:
        """Tells whether the value equals one of the given values. The result is null when the value is null, and when
        it equals none of them and one of them is null. Without any given values the result is false, also for null."""
        if isinstance(values, Text | Expr) or not hasattr(values, "__iter__"):
            raise FlowError(f"{self!r}.isin takes a list of values, got {shorten(values)}")
        literals = tuple(Literal(_plain(value)) for value in values)
        if any(isinstance(each.value, float) and each.value != each.value for each in literals):
            raise FlowError(f'{self!r}.isin: test for NaN by == float("nan")')
        return Call("isin", (self,), literals)

    is_in = isin  # Ray Data's name

    def between(self, low: object, high: object) -> Expr:
        """Tells whether low <= value <= high."""
        return Call("between", (self, _operand(low, "between"), _operand(high, "between")))

    def cast(self, target: Text) -> Expr:
        """Returns the value as another type: int, bigint, double, string, boolean, timestamp, date, decimal(p,s). The
        result is null where the value cannot be read as that type."""
        from penstock.runtime.expressions.typed import cast_target

        return Call("cast", (self,), (cast_target(target, f"{self!r}.cast"),))

    def alias(self, name: Text) -> Expr:
        """Returns the same expression under another name."""
        return Alias(self, _text(name, "alias", "a name"))

    def json(self, path: Text) -> Expr:
        """Returns the field of a JSON text at a path ("a" or "a.b"), as a string: the text of a string, anything else
        as JSON writes it. The result is null where the field is absent or null, and where the text is not a JSON
        object."""
        steps = tuple(_text(path, "json", "a path").split("."))
        if not all(steps):
            raise FlowError(f'{self!r}.json({path!r}): a path is field names with dots between them, such as "a.b"')
        return Call("json", (self,), (steps,))

    def regexp_matches(self, pattern: Text) -> Expr:
        """Tells whether a regular expression matches somewhere in a string; see `pattern` for its syntax."""
        from penstock.runtime.expressions.pattern import check_pattern

        check_pattern(_text(pattern, "regexp_matches", "a pattern"))
        return Call("regexp_matches", (self,), (pattern,))

    @property
    def str(self) -> StringFunctions:
        """Functions of strings."""
        return StringFunctions(self)

    @property
    def list(self) -> ListFunctions:
        """Functions of arrays."""
        return ListFunctions(self)

    @property
    def dt(self) -> TimeFunctions:
        """Functions of timestamps, and of dates where they make sense. Everything is in UTC."""
        return TimeFunctions(self)


@dataclass(frozen=True, eq=False, repr=False)
class Column(Expr):
    """A field of the record. With `optional`, a record without this field has null there, instead of an error."""

    __slots__ = ("field", "optional")
    field: str
    optional: bool

    @property
    def name(self) -> str:
        return self.field

    def __repr__(self) -> str:
        return f"col({quote(self.field)}{', optional=True' if self.optional else ''})"


@dataclass(frozen=True, eq=False, repr=False)
class Literal(Expr):
    """A value: None, bool, int, float, str, Decimal, datetime (in UTC) or date."""

    __slots__ = ("value",)
    value: Any

    def __repr__(self) -> str:
        return f"lit({quote(self.value)})"


@dataclass(frozen=True, eq=False, repr=False)
class Call(Expr):
    """An operation on expressions; `params` are plain values that are part of it (a path, a type, a separator)."""

    __slots__ = ("args", "op", "params")
    op: str
    args: tuple[Expr, ...]
    params: tuple[Any, ...]

    def __init__(self, op: str, args: tuple[Expr, ...], params: tuple[Any, ...] = ()) -> None:
        for name, value in (("op", op), ("args", args), ("params", params)):
            object.__setattr__(self, name, value)

    def children(self) -> tuple[Expr, ...]:
        return self.args

    def __repr__(self) -> str:
        args = [bare(arg) for arg in self.args]
        if self.op in BINARY:
            left, right = self.args
            # lit(1) == 2, as 1 == 2 would be no expression; and -a + b needs no brackets.
            texts = [repr(left) if _is_prefix(left) else operand(left, repr)]
            texts.append(repr(right) if _is_prefix(right) else operand(right))
            return f" {BINARY[self.op]} ".join(texts)
        if self.op in _PREFIX:
            return f"{_PREFIX[self.op]}{operand(self.args[0], literal=repr)}"
        if self.op == "when":
            pairs = zip(self.args[:-1:2], self.args[1::2], strict=False)
            text = ".".join(f"when({condition!r}, {bare(value)})" for condition, value in pairs)
            last = self.args[-1]
            return text if isinstance(last, Literal) and last.value is None else f"{text}.otherwise({bare(last)})"
        if self.op in _FREE:
            return f"{self.op}({', '.join(args)})"
        subject = operand(self.args[0], literal=repr)
        if self.op == "list.get":
            return f"{subject}.list[{self.params[0]}]"
        if self.op == "json":
            return f"{subject}.json({quote('.'.join(self.params[0]))})"
        if self.op == "isin":
            return f"{subject}.isin([{', '.join(map(bare, self.params))}])"
        return f"{subject}.{self.op}({', '.join([*args[1:], *map(quote, self.params)])})"


@dataclass(frozen=True, eq=False, repr=False)
class Alias(Expr):
    """An expression under a name."""

    __slots__ = ("called", "expr")
    expr: Expr
    called: str

    def children(self) -> tuple[Expr, ...]:
        return (self.expr,)

    @property
    def name(self) -> str:
        return self.called

    def __repr__(self) -> str:
        return f"{operand(self.expr, literal=repr)}.alias({quote(self.called)})"


class When(Call):
    """`when(...)` so far: null where no condition holds, until `otherwise` says more."""

    __slots__ = ()

    def when(self, condition: Expr, value: object) -> When:
        """Adds a condition: the value where this condition is true and none before it is."""
        return When("when", (*self.args[:-1], _condition(condition), lit(value), self.args[-1]))

    def otherwise(self, value: object) -> Expr:
        """Adds the value where no condition is true."""
        return Call("when", (*self.args[:-1], lit(value)))


class _Functions:
    __slots__ = ("_expr",)

    def __init__(self, expr: Expr) -> None:
        self._expr = expr


class StringFunctions(_Functions):
    """Functions of strings; characters are code points."""

    __slots__ = ()

    def upper(self) -> Expr:
        """Returns the string in capitals. Python and Java may know different versions of Unicode: where one of them
        does not know a character yet, it leaves the character as it is."""
        return Call("str.upper", (self._expr,))

    def lower(self) -> Expr:
        """Returns the string in small letters; see upper()."""
        return Call("str.lower", (self._expr,))

    def length(self) -> Expr:
        """Returns the number of characters."""
        return Call("str.length", (self._expr,))

    def strip(self, characters: str = _WHITESPACE) -> Expr:
        """Returns the string without these characters at both ends. By default these are ASCII white space, which is
        less than Python's strip removes."""
        return self._strip("str.strip", characters)

    def lstrip(self, characters: str = _WHITESPACE) -> Expr:
        """Returns the string without these characters at its start."""
        return self._strip("str.lstrip", characters)

    def rstrip(self, characters: str = _WHITESPACE) -> Expr:
        """Returns the string without these characters at its end."""
        return self._strip("str.rstrip", characters)

    def _strip(self, op: str, characters: str) -> Expr:
        if not _text(characters, op, "the characters to strip"):
            raise FlowError(f'{self._expr!r}.{op}(""): name the characters to strip')
        return Call(op, (self._expr,), (characters,))

    def contains(self, part: object) -> Expr:
        """Tells whether a string is somewhere in it."""
        return Call("str.contains", (self._expr, _operand(part, "str.contains")))

    def startswith(self, part: object) -> Expr:
        """Tells whether it starts with a string."""
        return Call("str.startswith", (self._expr, _operand(part, "str.startswith")))

    starts_with = startswith  # Ray Data's names

    def endswith(self, part: object) -> Expr:
        """Tells whether it ends with a string."""
        return Call("str.endswith", (self._expr, _operand(part, "str.endswith")))

    ends_with = endswith

    def substr(self, start: int, length: int) -> Expr:
        """Returns `length` characters from the `start`th on, or as many as there are. The first character is number 1,
        as in SQL."""
        _whole(start, "str.substr", "start", 1)
        _whole(length, "str.substr", "length", 0)
        return Call("str.substr", (self._expr,), (start, length))

    def replace(self, old: str, new: str) -> Expr:
        """Returns the string with every `old` replaced by `new`."""
        if not _text(old, "str.replace", "a text to look for"):
            raise FlowError(f'{self._expr!r}.str.replace("", ...): name a text to look for')
        return Call("str.replace", (self._expr,), (old, _text(new, "str.replace", "a replacement")))

    def split(self, separator: str) -> Expr:
        """Returns the array of its parts between separators. The separator is a plain text."""
        if not _text(separator, "str.split", "a separator"):
            raise FlowError(f'{self._expr!r}.str.split(""): name a separator')
        return Call("str.split", (self._expr,), (separator,))


class ListFunctions(_Functions):
    """Functions of arrays."""

    __slots__ = ()

    def get(self, index: int) -> Expr:
        """Returns the element at an index, from 0 on, or null where the array is shorter."""
        _whole(index, "list.get", "index", 0)
        return Call("list.get", (self._expr,), (index,))

    __getitem__ = get

    def __iter__(self) -> NoReturn:
        raise FlowError(f"{self._expr!r}.list cannot be iterated over: an expression has no length before it runs")

    def len(self) -> Expr:
        """Returns the number of elements."""
        return Call("list.len", (self._expr,))


class TimeFunctions(_Functions):
    """Functions of timestamps, in UTC."""

    __slots__ = ()

    def year(self) -> Expr:
        """Returns the year, of dates too."""
        return Call("dt.year", (self._expr,))

    def month(self) -> Expr:
        """Returns the month, 1 to 12, of dates too."""
        return Call("dt.month", (self._expr,))

    def day(self) -> Expr:
        """Returns the day of the month, of dates too."""
        return Call("dt.day", (self._expr,))

    def hour(self) -> Expr:
        """Returns the hour, 0 to 23."""
        return Call("dt.hour", (self._expr,))

    def minute(self) -> Expr:
        """Returns the minute."""
        return Call("dt.minute", (self._expr,))

    def second(self) -> Expr:
        """Returns the whole second."""
        return Call("dt.second", (self._expr,))

    def epoch_ms(self) -> Expr:
        """Returns the milliseconds since 1970, rounded down."""
        return Call("dt.epoch_ms", (self._expr,))

    def from_epoch_ms(self) -> Expr:
        """Returns the timestamp that is a number of milliseconds after the start of 1970, or null outside the years 1
        to 9999."""
        return Call("dt.from_epoch_ms", (self._expr,))

    def truncate(self, unit: str) -> Expr:
        """Returns the start of the year, month, week (Monday), day, hour, minute or second."""
        if unit not in UNITS:
            raise FlowError(f"{self._expr!r}.dt.truncate({unit!r}): the units are {', '.join(UNITS)}")
        return Call("dt.truncate", (self._expr,), (unit,))


# --- how users begin an expression --------------------------------------------------------------------------


def col(name: str, *, optional: bool = False) -> Expr:
    """Returns an expression for a field of the record. A record without this field is an error, or, with `optional`,
    has null there."""
    return Column(_text(name, "col", "a field name"), optional)


def lit(value: object) -> Expr:
    """Returns a value as an expression. An expression is returned as it is."""
    return value if isinstance(value, Expr) else Literal(_plain(value))


def when(condition: Expr, value: object) -> When:
    """Returns the value where the condition is true: `when(c, v).when(c2, v2).otherwise(w)`. Where no condition is true
    and `otherwise` is missing, the result is null."""
    return When("when", (_condition(condition), lit(value), Literal(None)))


def coalesce(*values: object) -> Expr:
    """Returns the first value that is not null."""
    if not values:
        raise FlowError("coalesce() needs at least one expression")
    return Call("coalesce", tuple(map(lit, values)))


def concat(*values: object) -> Expr:
    """Joins strings to one. The result is null where one of them is null."""
    if not values:
        raise FlowError("concat() needs at least one expression")
    return Call("concat", tuple(map(lit, values)))


def named(exprs: Mapping[str, Expr] | Sequence[Expr | str]) -> dict[str, Expr]:
    """Returns expressions by the names of their results, from a mapping, or from a list of columns, aliases and field
    names."""
    if isinstance(exprs, Mapping):
        pairs = [(name, lit(expr)) for name, expr in exprs.items()]
    else:
        found = [col(expr) if isinstance(expr, str) else expr for expr in exprs]
        pairs = []
        for expr in found:
            if callable(expr):
                raise FlowError(
                    f"{shorten(expr)} is a function and no expression; use map(fn) for what a function makes"
                )
            if not isinstance(expr, Expr) or expr.name is None:
                raise FlowError(f'{shorten(expr)} has no name of its own: give it one by .alias("name")')
            pairs.append((expr.name, expr))
    for name, _ in pairs:
        _text(name, "a result", "a name")
    if len(dict(pairs)) != len(pairs):
        raise FlowError(f"two results have the same name: {', '.join(name for name, _ in pairs)}")
    return dict(pairs)


# --- helpers ------------------------------------------------------------------------------------------------


def key(expr: Expr) -> tuple[Any, ...]:
    """Returns a hashable stand-in for an expression, which is equal for expressions that are the same."""
    if isinstance(expr, Column):
        return ("col", expr.field, expr.optional)
    if isinstance(expr, Literal):
        return ("lit", type(expr.value).__name__, repr(expr.value))
    if isinstance(expr, Alias):
        return ("alias", key(expr.expr), expr.called)
    assert isinstance(expr, Call)
    params = tuple(key(each) if isinstance(each, Literal) else each for each in expr.params)
    return (expr.op, tuple(map(key, expr.args)), params)


def quote(value: object) -> str:
    """Returns the repr of a value, with double quotes around strings where that needs no escapes."""
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text


def bare(expr: Expr) -> str:
    """Returns how an argument is written: a value without lit()."""
    return quote(expr.value) if isinstance(expr, Literal) else repr(expr)


def operand(expr: Expr, literal: Any = bare) -> str:
    """Returns how an operand is written: in brackets if it is made by operators itself."""
    if isinstance(expr, Literal):
        return str(literal(expr))
    if isinstance(expr, Call) and (expr.op in BINARY or expr.op in _PREFIX):
        return f"({expr!r})"
    return repr(expr)


def _is_prefix(expr: Expr) -> bool:
    return isinstance(expr, Call) and expr.op in _PREFIX


def _operand(value: object, where: str) -> Expr:
    if value is None:
        raise FlowError(f"{where} None is always null, never true: use is_null() or is_not_null()")
    return lit(value)


def _condition(condition: object) -> Expr:
    if not isinstance(condition, Expr):
        raise FlowError(f"when takes an expression as its condition, got {shorten(condition)}")
    return condition


def _plain(value: object) -> Any:
    """Returns a literal's value, checked and in its one form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not BIGINT_MIN <= value <= BIGINT_MAX:
            raise FlowError(f"{value} does not fit a bigint (64 bits); write it as a Decimal or a float")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(_text(value, "lit", "a string"))
    if isinstance(value, Decimal):
        digits, exponent = value.as_tuple().digits, value.as_tuple().exponent
        if not isinstance(exponent, int):
            raise FlowError(f"{value!r} is not a number that a decimal can hold")
        if max(len(digits) + max(exponent, 0), -exponent) > DECIMAL_DIGITS:
            raise FlowError(f"{value!r} has more than {DECIMAL_DIGITS} digits")
        return value
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise FlowError(
                f"{value!r} has no time zone, so it names no instant; give it one, such as tzinfo=timezone.utc"
            )
        return value.astimezone(timezone.utc)
    if isinstance(value, date):
        return value
    use = "use None, bool, int, float, str, Decimal, datetime or date"
    if callable(value):
        use = "what a function makes of a record is for map(fn)"
    raise FlowError(f"{shorten(value)} of type {type(value).__name__} cannot be part of an expression; {use}")


def _text(value: object, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise FlowError(f"{where} takes {what}, got {shorten(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FlowError(f"{where}: {value!r} holds half a surrogate pair, which is no text") from None
    return value


def _whole(value: object, where: str, what: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
        raise FlowError(f"{where}: {what}={value!r}; it must be a whole number, {least} or more")
