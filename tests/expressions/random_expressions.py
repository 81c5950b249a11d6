"""Random well-typed expressions and records for them, and a slow evaluator that shares no code with the closures.

`evaluate` goes through the tree for one record and computes by other means than `runtime.expressions.kernels`: integers
in 64-bit two's complement by `struct`, numbers and decimals as fractions, instants as microseconds since 1970.
"""

from __future__ import annotations

import json
import math
import operator
import random
import re
import struct
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

from penstock.runtime.errors import FlowError
from penstock.runtime.expressions import Expr, coalesce, col, concat, lit, when
from penstock.runtime.expressions.tree import UNITS, Alias, Call, Column, Literal

UTC = timezone.utc
SCHEMA = {
    "i": "bigint",
    "j": "bigint",
    "x": "double",
    "y": "double",
    "s": "string",
    "t": "string",
    "n": "string",
    "js": "string",
    "b": "boolean",
    "c": "boolean",
    "at": "timestamp",
    "until": "timestamp",
    "d": "date",
    "p": "decimal(10,2)",
    "q": "decimal(12,4)",
}

INTEGERS = [0, 1, -1, 2, 3, -7, 10, 60, 2**31 - 1, -(2**31), 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 1_711_846_800_123]
INTEGERS += [2**62, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1, 10**18, -62_135_596_800_000, 253_402_300_799_999]
DOUBLES = [0.0, -0.0, 1.0, -1.5, 2.5, 0.1, 0.3, -7.0, 1e-9, 1e10, 2.0**53, 2.0**63, -(2.0**63), 1e19, 1e300, 5e-324]
DOUBLES += [math.nan, math.inf, -math.inf]
STRINGS = [
    "",
    " ",
    "a",
    "A",
    "b",
    "ab",
    "abc",
    " ab\t",
    "\x0bx\x1f",
    "a,b,,c",
    ",",
    "ß",
    "İ",
    "Σας ΑΣ",
    "Ünï",
    "日本語",
]
STRINGS += ["😀x", "\uffff", "\U00010000", "e\u0301", "x\u2028y\n", "view", "click", "a.b", "$^\\E", "été\n", "\u00a0z"]
NUMBERS = [
    "12",
    " 42 ",
    "-7",
    "+3",
    "1.9",
    "-1.9",
    ".5",
    "5.",
    ".",
    "",
    "1e3",
    "-7.5e2",
    "1e400",
    "1e-400",
    "0x10",
    "1_0",
]
NUMBERS += ["9223372036854775807", "9223372036854775808", "-9223372036854775808", "2147483648", "nan", "-Inf", "+NaN"]
NUMBERS += [
    "Infinity",
    "1d",
    "1e1000",
    "\u0661",
    "\u00a01",
    "1\x7f",
    "\x001",
    "true",
    "F",
    " Yes",
    "no\n",
    "0",
    "1",
    "12,5",
]
NUMBERS += ["123456.785", "-0.005", "99999999.995", "9" * 40, "0." + "3" * 45, "2024-02-29", "2024-02-30", "0000-01-01"]
NUMBERS += ["2024-03-31 02:30:00", "2024-03-31T02:30:00.5+01:00", "0001-01-01 00:00:00+05:00", "2024-1-1", "2024-01"]
NUMBERS += [
    "9999-12-31 23:59:59.999999Z",
    "9999-12-31 23:59:59-18:00",
    "2024-01-01 24:00:00",
    "2024-01-01 00:00:00+19:00",
]
NUMBERS += [
    "2024-01-01 12:00",
    "12:00:00",
    "2024-01-01 00:00:00.1234567",
    "2024-01-01\n",
    "2024-01-01 10:00:00 Europe/Berlin",
]
TEXTS = [
    '{"a":"x","n":12,"o":{"k":"deep","e":null},"l":[1,2.5,"y"]}',
    '{"a":"x"} trailing',
    ' {"a":"\\u00e9\\n\\"","n":-5,"o":{"k":{"z":[true,false,null,{}]}}}',
    '{"a":"1","a":"2","n":true}',
    '{"a":null,"n":1e3,"o":"no"}',
    '{"A":"upper"}',
    '{"a":1.5,"n":0.0001,"o":{"k":-0.0}}',
    '{"a":123456789012345678901234567890,"n":-0,"o":[{"k":1}]}',
    '{"a":"\\ud800x","n":1e400}',
    '{"a":"\U0001f600\u2028\x7f"}',
    '{"a":{"q":"\\u001f\\u00e9\\/\\"","w":[]},"o":{"k":12345678.9}}',
    "{'a':1}",
    '{"a":NaN}',
    '{"a":"x","z":tru}',
    '{"a":"x\ty"}',
    '{"a":01}',
    '{"a":"x",}',
    '{"a":"x"',
    '[{"a":"x"}]',
    '"x"',
    "null",
    "",
    "  ",
    "{}",
    "\ufeff{}",
]
_BERLIN, _NEW_YORK = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York")
INSTANTS = [
    datetime(1970, 1, 1, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime(2024, 3, 31, 1, 30, tzinfo=_BERLIN),
    datetime(2024, 3, 31, 2, 30, tzinfo=_BERLIN),  # a time that the clocks jump over
    datetime(2024, 10, 27, 2, 30, tzinfo=_BERLIN),  # one that they show twice
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=_BERLIN),
    datetime(2024, 10, 27, 0, 30, tzinfo=UTC),
    datetime(2024, 11, 3, 1, 30, fold=1, tzinfo=_NEW_YORK),
    datetime(2024, 12, 31, 23, 0, tzinfo=_NEW_YORK),
    datetime(2024, 2, 29, 12, 0, 0, 120_000, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    datetime(1582, 10, 10, 1, 2, 3, 4, tzinfo=UTC),  # between the calendars
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
]
DATES = [date(1970, 1, 1), date(1969, 12, 31), date(2024, 2, 29), date(1582, 10, 10), date(1, 1, 1), date(9999, 12, 31)]
PATTERNS = [
    "a",
    "^a",
    "b$",
    r"\d+",
    r"[^a-c]",
    "(?:ab|x)+?y*",
    r"\s$",
    "^.$",
    r"\w{2,3}",
    r"[\-\]x]",
    "(?=a)(?!ab).",
    "é",
]
PATHS = ["a", "n", "o.k", "o.k.z", "l", "A", "o", "missing", "missing.deeper"]


def _cents(rng: random.Random, places: int, digits: int) -> Decimal:
    unscaled = rng.choice([0, 1, -1, 5, 10**digits - 1, -(10**digits) + 1, rng.randrange(10**digits)])
    return Decimal(unscaled).scaleb(-places)


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "bigint": lambda rng: rng.choice(INTEGERS) if rng.random() < 0.7 else rng.randrange(-20, 20),
    "double": lambda rng: rng.choice(DOUBLES) if rng.random() < 0.7 else rng.randrange(-20, 20) / 4,
    "string": lambda rng: rng.choice(STRINGS),
    "boolean": lambda rng: rng.random() < 0.5,
    "timestamp": lambda rng: rng.choice(INSTANTS),
    "date": lambda rng: rng.choice(DATES),
    "decimal": lambda rng: _cents(rng, 2, rng.choice([3, 8])),
}


def record(rng: random.Random) -> dict[str, Any]:
    """A record of SCHEMA; each field is null now and then."""
    values = {name: VALUES[kind.partition("(")[0]](rng) for name, kind in SCHEMA.items()}
    values["n"] = rng.choice(NUMBERS)
    values["js"] = rng.choice(TEXTS)
    values["q"] = _cents(rng, 4, rng.choice([3, 12]))
    if rng.random() < 0.3:  # make equal values likely
        values["j"], values["y"], values["t"], values["until"] = values["i"], values["x"], values["s"], values["at"]
    return {name: None if rng.random() < 0.12 else value for name, value in values.items()}


def expression(rng: random.Random, kind: str, depth: int) -> Expr:
    """A random expression of a type over the fields of SCHEMA."""
    while True:
        try:
            found = _expression(rng, kind, depth)
            found.type(SCHEMA)
        except FlowError as error:
            if "digits" not in str(error):  # decimals whose exact result would be too long
                raise
        else:
            return found


def _expression(rng: random.Random, kind: str, depth: int) -> Expr:
    def sub(of: str, less: int = 1) -> Expr:
        return _expression(rng, of, depth - less)

    def number() -> Expr:
        return sub(rng.choice(["bigint", "double", "decimal"]))

    if depth <= 0 or rng.random() < 0.1:
        if rng.random() < 0.3:
            return lit(VALUES[kind](rng)) if rng.random() < 0.95 else lit(None).cast(_sized(kind))
        return col(rng.choice([name for name, found in SCHEMA.items() if found.partition("(")[0] == kind]))
    if rng.random() < 0.12:
        made = when(sub("boolean"), sub(kind))
        if rng.random() < 0.5:
            made = made.when(sub("boolean"), sub(kind))
        return made.otherwise(sub(kind)) if rng.random() < 0.7 else made
    if rng.random() < 0.08:
        return coalesce(sub(kind), sub(kind), *([sub(kind)] if rng.random() < 0.3 else []))
    choices: dict[str, list[Callable[[], Expr]]] = {
        "bigint": [
            *[lambda: rng.choice(_ARITHMETIC)(sub("bigint"), sub("bigint"))] * 4,
            lambda: -sub("bigint"),
            lambda: rng.choice([sub("boolean"), sub("double"), sub("decimal"), col("n")]).cast("bigint"),
            lambda: rng.choice([sub("boolean"), sub("bigint"), sub("double"), sub("decimal"), col("n")]).cast("int"),
            lambda: sub("timestamp").cast("bigint"),
            sub("string").str.length,
            sub("string").str.split(rng.choice([",", ".", "$^", "b"])).list.len,
            getattr(sub("timestamp").dt, rng.choice(["year", "month", "day", "hour", "minute", "second"])),
            getattr(sub("date").dt, rng.choice(["year", "month", "day"])),
            sub("timestamp").dt.epoch_ms,
        ],
        "double": [
            lambda: rng.choice(_ARITHMETIC[:3])(sub("double"), number()),
            lambda: rng.choice(_ARITHMETIC[:3])(number(), sub("double")),
            lambda: sub("double") % rng.choice([sub("double"), sub("bigint")]),
            lambda: sub("bigint") / sub("bigint"),
            lambda: rng.choice([sub("double") / number(), number() / sub("double")]),
            lambda: -sub("double"),
            lambda: rng.choice([sub("boolean"), sub("bigint"), sub("decimal"), col("n")]).cast("double"),
            lambda: when(sub("boolean"), sub("bigint")).otherwise(sub("double")),
            lambda: coalesce(sub("double"), sub("bigint")),
        ],
        "decimal": [
            lambda: rng.choice(_ARITHMETIC[:3])(
                sub("decimal"), rng.choice([sub("decimal"), lit(rng.randrange(-9, 9))])
            ),
            lambda: sub("bigint") + sub("decimal"),
            lambda: -sub("decimal"),
            lambda: rng.choice(
                [sub("boolean"), sub("bigint"), sub("decimal"), col("n")],
            ).cast(rng.choice(["decimal(10,2)", "decimal(5,0)", "decimal(20,3)", "decimal(6,6)", "decimal(38,18)"])),
            # No more digits than every Java gets right; test_columns looks at the others.
            lambda: sub("double").cast(rng.choice(["decimal(10,2)", "decimal(5,0)", "decimal(6,6)"])),
        ],
        "string": [
            getattr(sub("string").str, rng.choice(["upper", "lower", "strip", "lstrip", "rstrip"])),
            lambda: getattr(sub("string").str, rng.choice(["strip", "lstrip", "rstrip"]))("a,\u00a0b"),
            lambda: sub("string").str.substr(rng.choice([1, 2, 3]), rng.choice([0, 1, 2, 2**31 - 1])),
            lambda: sub("string").str.replace(rng.choice(["a", "b", ",", "😀"]), rng.choice(["", "zz", "ü"])),
            lambda: sub("string").str.split(rng.choice([",", ".", "b", "😀"])).list[rng.choice([0, 1, 5])],
            lambda: concat(sub("string"), sub("string")),
            *[lambda: col("js").json(rng.choice(PATHS))] * 3,
            lambda: rng.choice([sub("boolean"), sub("bigint"), sub("timestamp"), sub("date")]).cast("string"),
            lambda: sub("decimal").cast(rng.choice(["decimal(10,2)", "decimal(12,10)"])).cast("string"),
        ],
        "boolean": [
            *[lambda: rng.choice(_COMPARISONS)(number(), number())] * 3,
            *[lambda: _alike(rng, sub)] * 3,
            *[lambda: rng.choice([operator.and_, operator.or_])(sub("boolean"), sub("boolean"))] * 3,
            lambda: ~sub("boolean"),
            lambda: rng.choice([sub("string").is_null(), number().is_not_null(), sub("boolean").is_null()]),
            lambda: number().between(number(), number()),
            lambda: _isin(rng, sub),
            lambda: rng.choice([sub("bigint"), sub("double"), sub("decimal"), col("n")]).cast("boolean"),
            lambda: getattr(sub("string").str, rng.choice(["contains", "startswith", "endswith"]))(sub("string")),
            lambda: sub("string").regexp_matches(rng.choice(PATTERNS)),
        ],
        "timestamp": [
            sub("bigint").dt.from_epoch_ms,
            lambda: sub("timestamp").dt.truncate(rng.choice(UNITS)),
            lambda: rng.choice([sub("date"), col("n")]).cast("timestamp"),
        ],
        "date": [lambda: rng.choice([sub("timestamp"), col("n")]).cast("date")],
    }
    return rng.choice(choices[kind])()


_ARITHMETIC: list[Callable[[Any, Any], Any]] = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
]
_COMPARISONS: list[Callable[[Any, Any], Any]] = [
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
]


def _sized(kind: str) -> str:
    return "decimal(10,2)" if kind == "decimal" else kind


def _alike(rng: random.Random, sub: Callable[..., Expr]) -> Expr:
    kind = rng.choice(["string", "timestamp", "date", "boolean", "bigint", "double"])
    return rng.choice(_COMPARISONS)(sub(kind), sub(kind))  # type: ignore[no-any-return]


def _isin(rng: random.Random, sub: Callable[..., Expr]) -> Expr:
    kind = rng.choice([kind for kind in VALUES if kind != "double"])
    values = [VALUES[kind](rng) for _ in range(rng.choice([1, 2, 5, 14]))]
    if rng.random() < 0.3:
        values.append(None)
    return sub("double" if kind == "bigint" and rng.random() < 0.3 else kind).isin(values)


# --- the slow evaluator -----------------------------------------------------------------------------------------

_MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros(value: datetime) -> int:
    """An instant's microseconds since 1970."""
    return (value.astimezone(UTC) - _EPOCH) // _MICROSECOND


def bits(value: int) -> int:
    """An integer in 64 bits."""
    return int(struct.unpack("<q", struct.pack("<Q", value & 0xFFFF_FFFF_FFFF_FFFF))[0])


def _rank(value: Any) -> Any:
    """Something that Python orders as the value is to be ordered."""
    if isinstance(value, float):
        return (1, 0) if math.isnan(value) else (0, value)
    if isinstance(value, datetime):
        return micros(value)
    if isinstance(value, str):
        return value.encode()
    return value


def _compare(op: str, a: Any, b: Any) -> bool | None:
    if a is None or b is None:
        return None
    if isinstance(a, float) or isinstance(b, float):
        a, b = float(a), float(b)
    a, b = _rank(a), _rank(b)
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[op]


def _trunc(value: Fraction) -> int:
    return math.trunc(value)


def _arithmetic(op: str, a: Any, b: Any) -> Any:
    if a is None or b is None or (op in ("div", "idiv", "mod") and b == 0):
        return None
    if isinstance(a, float) or isinstance(b, float) or op == "div":
        a, b = float(a), float(b)
        if op == "mod":
            if math.isnan(a) or math.isnan(b) or math.isinf(a):
                return math.nan
            return a if math.isinf(b) else math.fmod(a, b)
        return {"add": a.__add__, "sub": a.__sub__, "mul": a.__mul__, "div": a.__truediv__}[op](b)
    if isinstance(a, Decimal) or isinstance(b, Decimal):
        x, y = Fraction(a), Fraction(b)
        return _decimal({"add": x + y, "sub": x - y, "mul": x * y}[op] if op in ("add", "sub", "mul") else None)
    if op == "idiv":
        return bits(_trunc(Fraction(a, b)))
    if op == "mod":
        return a - b * _trunc(Fraction(a, b))
    return bits({"add": a + b, "sub": a - b, "mul": a * b}[op])


def _decimal(value: Fraction | None) -> Decimal:
    """An exact decimal of a fraction whose denominator is a power of ten."""
    assert value is not None
    for places in range(80):
        unscaled = value * 10**places
        if unscaled.denominator == 1:
            return Decimal(f"{unscaled.numerator}e-{places}")
    raise AssertionError(value)


_PLAIN_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]{1,3}))?")


def _read(text: str) -> Fraction | None:
    """The number that a text is, exactly."""
    found = _PLAIN_NUMBER.fullmatch(text)
    if found is None or not (found[2] or found[3]):
        return None
    whole = Fraction(int((found[2] or "") + (found[3] or "")), 10 ** len(found[3] or ""))
    return whole * Fraction(10) ** int(found[4] or 0) * (-1 if found[1] == "-" else 1)


def _nearest(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _cast(target: str, value: Any) -> Any:
    if value is None:
        return None
    if target in ("int", "bigint"):
        size = 2**31 if target == "int" else 2**63
        if isinstance(value, str):
            text = value.strip("".join(map(chr, [*range(33), 127])))
            if text in (".", "+.", "-."):  # what Spark makes of it
                return 0
            number = _read(text) if "e" not in text.lower() else None
            return None if number is None or not -size <= _trunc(number) < size else _trunc(number)
        if isinstance(value, float):
            if math.isnan(value):
                return 0
            return -size if value <= -size else size - 1 if value >= size else math.trunc(value)
        if isinstance(value, datetime):
            return micros(value) // 1_000_000
        whole = bits(math.trunc(value))
        return whole if target == "bigint" else struct.unpack("<i", struct.pack("<q", whole)[:4])[0]
    if target == "double":
        if not isinstance(value, str):
            return float(value)
        text = value.strip("".join(map(chr, range(33))))
        if text.lower().lstrip("+-") in ("inf", "infinity"):
            return -math.inf if text[0] == "-" else math.inf
        if text.lower() == "nan":
            return math.nan
        number = _read(text)
        return None if number is None else _nearest(number)
    if target == "boolean":
        if isinstance(value, str):
            text = value.strip("".join(map(chr, [*range(33), 127]))).lower()
            return {**dict.fromkeys("ty1", True), **dict.fromkeys("fn0", False)}.get(
                text, {"true": True, "yes": True, "false": False, "no": False}.get(text)
            )
        return bool(value != 0)
    if target == "string":
        return _string(value)
    if target == "timestamp":
        if isinstance(value, str):
            return _instant(value)
        return value if isinstance(value, datetime) else datetime.combine(value, datetime.min.time(), UTC)
    if target == "date":
        if isinstance(value, str):
            return _strptime(value, "%Y-%m-%d", 10)
        return value.astimezone(UTC).date() if isinstance(value, datetime) else value
    precision, scale = map(int, target[8:-1].split(","))
    if isinstance(value, str):
        number = _read(value.strip("".join(map(chr, range(33)))))
    elif isinstance(value, float):
        number = Fraction(repr(value)) if math.isfinite(value) else None
    else:
        number = Fraction(value)
    if number is None:
        return None
    unscaled = math.floor(abs(number) * 10**scale + Fraction(1, 2)) * (-1 if number < 0 else 1)
    return Decimal(f"{unscaled}e-{scale}") if abs(unscaled) < 10**precision else None


def _string(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        moment = value.astimezone(UTC)
        text = f"{moment.year:04}-{moment:%m-%d %H:%M:%S}"
        return f"{text}.{moment.microsecond:06}".rstrip("0") if moment.microsecond else text
    return str(value)


def _strptime(text: str, form: str, length: int) -> Any:
    if len(text) != length or not text.isascii():
        return None
    try:
        return datetime.strptime(text, form).date()
    except ValueError:
        return None


def _instant(text: str) -> datetime | None:
    found = re.fullmatch(r"(.{10})(?:[ T](\d\d):(\d\d):(\d\d)(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?)?", text, re.ASCII)
    day = found and _strptime(found[1], "%Y-%m-%d", 10)
    if not found or not day:
        return None
    h, m, s = (int(found[i] or 0) for i in (2, 3, 4))
    zone = found[6] or "Z"
    offset = 0 if zone == "Z" else int(zone[1:3]) * 60 + int(zone[4:])
    if h > 23 or m > 59 or s > 59 or offset > 18 * 60 or (zone != "Z" and int(zone[4:]) > 59):
        return None
    seconds = h * 3600 + m * 60 + s + (offset * 60 if zone[0] == "-" else -offset * 60)
    total = (day - date(1970, 1, 1)).days * 86_400_000_000 + seconds * 1_000_000 + int(Fraction(found[5] or 0) * 10**6)
    try:
        return _EPOCH + total * _MICROSECOND
    except OverflowError:
        return None


def _json(text: str | None, path: tuple[str, ...]) -> str | None:
    if text is None:
        return None

    def constant(name: str) -> None:
        raise ValueError(name)

    try:
        value, _ = json.JSONDecoder(parse_constant=constant).raw_decode(text.lstrip(" \t\r\n"))
    except ValueError:
        return None
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if value is None else _clean(value) if isinstance(value, str) else _dump(value)


def _clean(text: str) -> str:
    return "".join("?" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def _dump(value: Any) -> str:
    if isinstance(value, float):
        return '"Infinity"' if value == math.inf else _java(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dump(key)}:{_dump(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dump, value)) + "]"
    text = json.dumps(_clean(value) if isinstance(value, str) else value, ensure_ascii=False)
    return re.sub(r"\\u00..", lambda found: "\\u" + found[0][2:].upper(), text)


def _java(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return str(value)
    digits = 0
    while float(f"{value:.{digits}e}") != value:
        digits += 1
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}E{int(exponent)}"


def evaluate(expr: Expr, of: dict[str, Any], types: dict[str, str]) -> Any:
    """An expression's value for a record of a schema."""
    if isinstance(expr, Alias):
        return evaluate(expr.expr, of, types)
    if isinstance(expr, Literal):
        return expr.value
    if isinstance(expr, Column):
        return of[expr.field]
    assert isinstance(expr, Call)
    op, params = expr.op, expr.params
    if op in ("when", "coalesce"):
        value = None
        if op == "when":
            branches = [*zip(expr.args[:-1:2], expr.args[1::2], strict=False), (lit(True), expr.args[-1])]
            value = next(evaluate(v, of, types) for c, v in branches if evaluate(c, of, types) is True)
        else:
            value = next((v for v in (evaluate(arg, of, types) for arg in expr.args) if v is not None), None)
        return float(value) if value is not None and expr.type(types) == "double" else value
    args = [evaluate(arg, of, types) for arg in expr.args]
    a = args[0]
    b = args[1] if len(args) > 1 else None
    if op in ("eq", "ne", "lt", "le", "gt", "ge"):
        return _compare(op, a, b)
    if op in ("add", "sub", "mul", "div", "idiv", "mod"):
        return _arithmetic(op, a, b)
    if op == "and":
        return False if False in args else None if None in args else True
    if op == "or":
        return True if True in args else None if None in args else False
    if op == "between":
        low, high = _compare("le", args[1], a), _compare("le", a, args[2])
        return False if low is False or high is False else None if low is None or high is None else True
    if op in ("is_null", "is_not_null"):
        return (a is None) is (op == "is_null")
    if op == "isin":
        found = {_compare("eq", a, value.value) for value in params}
        return True if True in found else None if None in found else False
    if op == "concat":
        return None if None in args else "".join(args)
    if None in args:
        return None
    if op == "not":
        return not a
    if op == "neg":
        return bits(-a) if isinstance(a, int) else _decimal(-Fraction(a)) if isinstance(a, Decimal) else -a
    if op == "cast":
        found = _cast(params[0], a)
        size = re.fullmatch(r"decimal\((\d+),(\d+)\)", expr.args[0].type(types) or "")
        if params[0] == "string" and size:
            return format(_cast(size[0], a), "") if found is not None else None
        return found
    if op == "json":
        return _json(a, params[0])
    if op == "regexp_matches":
        return bool(re.search(params[0], a, re.ASCII))
    name = op.partition(".")[2]
    if op == "list.get":
        return dict(enumerate(a)).get(params[0])
    if name in ("length", "len"):
        return sum(1 for _ in a)
    if op == "str.substr":
        return "".join(c for i, c in enumerate(a, 1) if params[0] <= i < params[0] + params[1])
    if op == "str.contains":
        return any(a.startswith(b, i) for i in range(len(a) + 1))
    if op.startswith("str."):
        return getattr(a, name)(*args[1:], *params)
    if name == "from_epoch_ms":
        return None if not -62_135_596_800_000 <= a < 253_402_300_800_000 else _EPOCH + a * 1000 * _MICROSECOND
    if name == "epoch_ms":
        return micros(a) // 1000
    moment = a.astimezone(UTC) if isinstance(a, datetime) else a
    if name == "truncate":
        unit = params[0]
        day = moment.date()
        if unit == "week":
            day = date.fromordinal(day.toordinal() - (day.toordinal() - 1) % 7)
        first = {"year": (day.year, 1, 1), "month": (day.year, day.month, 1)}.get(unit, (day.year, day.month, day.day))
        clock = [moment.hour, moment.minute, moment.second][: {"hour": 1, "minute": 2, "second": 3}.get(unit, 0)]
        return datetime(*first, *clock, tzinfo=UTC)
    return getattr(moment, name)


def same_value(a: Any, b: Any) -> bool:
    """Whether two results are the same: of one type, NaN like NaN, instants whatever their zone."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Decimal) and isinstance(b, int) and not isinstance(b, bool):
        return a == b  # an integer where a decimal was asked for is the decimal
    if isinstance(a, int) and isinstance(b, Decimal) and not isinstance(a, bool):
        return a == b
    if isinstance(a, datetime) and isinstance(b, datetime):
        return micros(a) == micros(b)
    return type(a) is type(b) and bool(a == b)
