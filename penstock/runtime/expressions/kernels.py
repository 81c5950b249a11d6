"""Applies operations to values, one value at a time, with the meaning that Spark gives them (ANSI mode off).

The functions that `closure` writes call these where the quick ways that it writes in line do not apply. None is null.
Integers are bigints: results wrap at 64 bits, as Spark's do. Doubles are IEEE 754, but NaN equals NaN and is greater
than every number. Decimals are exact. Timestamps are compared and taken apart in UTC, whatever zone they come in.

Nothing here may depend on the thread's decimal context, the locale or the machine's time zone.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import ROUND_DOWN, ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any, NoReturn, TypeVar

from penstock.runtime.errors import shorten
from penstock.runtime.expressions.tree import BIGINT_MAX, BIGINT_MIN, DECIMAL_DIGITS
from penstock.runtime.scalars import python_number

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH_MS_MIN = -62_135_596_800_000  # 0001-01-01, before which datetimes cannot go
EPOCH_MS_MAX = 253_402_300_799_999  # the last of 9999

_TWO_64 = 2**64
_SECOND = timedelta(seconds=1)
_MILLISECOND = timedelta(milliseconds=1)
_EXACT = Context(prec=1000, Emax=10_000, Emin=-10_000)  # more digits than any product of two decimals
REALS = frozenset({int, float})  # types that Python calculates with as Spark does, but for wrapping
_PLAIN = frozenset({int, str, bool, Decimal, date})  # types that Python compares as Spark does

_BLANK = "".join(map(chr, range(0x21)))  # what Java's trim() takes away
_BLANK_OR_CONTROL = _BLANK + "\x7f"  # what Spark takes away before it reads an integer or a boolean

# The texts that casts read. Spark reads more (hexadecimal doubles, dates without a day, zone names); both paradigms
# are held to these, `bridge.columns` by the same patterns, so they may only use what Java reads alike.
NUMBER = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?"
SPECIAL = r"[+-]?([iI][nN][fF]([iI][nN][iI][tT][yY])?)|[nN][aA][nN]"
DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
TIMESTAMP = DATE + r"([ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})?)?"

_NUMBER, _SPECIAL = re.compile(NUMBER), re.compile(SPECIAL)
_INTEGER = re.compile(r"([+-]?)([0-9]*)(?:\.[0-9]*)?")
_TIMESTAMP = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{1,6}))?(?:Z|([+-])([0-9]{2}):([0-9]{2}))?)?"
)
_TRUE = frozenset({"t", "true", "y", "yes", "1"})
_FALSE = frozenset({"f", "false", "n", "no", "0"})
_ZONE_MINUTES_MAX = 18 * 60


def _unfit(what: str, *values: Any) -> NoReturn:
    given = " and ".join(f"{shorten(value, 80)} ({type(value).__name__})" for value in values)
    raise TypeError(f"cannot {what} {given}")


_T = TypeVar("_T")


def _of_number(kernel: Callable[[Any], _T], what: str, value: Any) -> _T:
    """Returns a kernel's result for a NumPy number. Raises TypeError for everything else, which it cannot take."""
    number = python_number(value)
    if number is value:
        _unfit(what, value)
    return kernel(number)


# --- comparing ----------------------------------------------------------------------------------------------


def utc(value: Any) -> datetime:
    """Returns an instant as a datetime in UTC. Python compares datetimes of one zone by their clocks, not by their
    instants."""
    if not isinstance(value, datetime):
        _unfit("take as a timestamp", value)
    if value.tzinfo is UTC:
        return value
    if value.utcoffset() is None:
        raise ValueError(f"{value!r} has no time zone, so it names no instant; timestamps need one")
    return value.astimezone(UTC)


def eq(a: Any, b: Any) -> bool | None:
    """a == b"""
    if a is None or b is None:
        return None
    if type(a) is type(b) and type(a) in _PLAIN:
        return bool(a == b)
    a, b = _alike(a, b)
    return bool(a == b or (_is_nan(a) and _is_nan(b)))


def ne(a: Any, b: Any) -> bool | None:
    """a != b"""
    found = eq(a, b)
    return None if found is None else not found


def lt(a: Any, b: Any) -> bool | None:
    """a < b"""
    if a is None or b is None:
        return None
    if type(a) is type(b) and type(a) in _PLAIN:
        return bool(a < b)
    a, b = _alike(a, b)
    return bool(a < b or (_is_nan(b) and not _is_nan(a)))


def le(a: Any, b: Any) -> bool | None:
    """a <= b"""
    found = lt(b, a)
    return None if found is None else not found


def gt(a: Any, b: Any) -> bool | None:
    """a > b"""
    return lt(b, a)


def ge(a: Any, b: Any) -> bool | None:
    """a >= b"""
    found = lt(a, b)
    return None if found is None else not found


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns two values as Python can compare them in Spark's way."""
    a, b = python_number(a), python_number(b)
    if isinstance(a, datetime) and isinstance(b, datetime):
        return utc(a), utc(b)
    if _is_number(a) and _is_number(b):
        if isinstance(a, float) or isinstance(b, float):
            return float(a), float(b)  # Spark compares doubles then, Python would compare exactly
        return a, b
    if type(a) is type(b) and type(a) in _PLAIN:
        return a, b
    if isinstance(a, str) and isinstance(b, str):
        return a, b
    return _unfit("compare", a, b)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def isin(value: Any, values: tuple[Any, ...]) -> bool | None:
    """Tells whether a value equals one of several."""
    if value is None:
        return None
    found: bool | None = False
    for each in values:
        same = eq(value, each)
        if same:
            return True
        if same is None:
            found = None
    return found


def boolean(value: Any) -> bool | None:
    """Returns the value, which must be a boolean or null."""
    value = python_number(value)
    if value is None or value is True or value is False:
        return value
    return _unfit("take as a boolean", value)


# --- arithmetic ---------------------------------------------------------------------------------------------


def wrap(value: int) -> int:
    """Returns an integer's lowest 64 bits."""
    return ((value - BIGINT_MIN) % _TWO_64) + BIGINT_MIN


def _operands(a: Any, b: Any, what: str) -> tuple[Any, Any]:
    """Returns two numbers, brought to one type."""
    a, b = python_number(a), python_number(b)
    if not (_is_number(a) and _is_number(b)):
        _unfit(what, a, b)
    if isinstance(a, float) or isinstance(b, float):
        return float(a), float(b)
    if isinstance(a, int) and isinstance(b, int):
        return a, b
    return Decimal(a), Decimal(b)


def _decimal(value: Decimal) -> Decimal:
    digits, exponent = value.as_tuple().digits, value.as_tuple().exponent
    if not isinstance(exponent, int) or len(digits) + max(exponent, 0) > DECIMAL_DIGITS:
        raise OverflowError(f"{value} has more than the {DECIMAL_DIGITS} digits that decimals hold; cast before")
    return value


def _calculation(
    name: str, what: str, plain: Callable[[Any, Any], Any], exact: Callable[[Decimal, Decimal], Decimal]
) -> Callable[[Any, Any], Any]:
    def calculate(a: Any, b: Any) -> Any:
        if a is None or b is None:
            return None
        if type(a) is int and type(b) is int:
            found = plain(a, b)
            return found if BIGINT_MIN <= found <= BIGINT_MAX else wrap(found)
        if type(a) not in REALS or type(b) not in REALS:
            a, b = _operands(a, b, what)
            if isinstance(a, Decimal):
                return _decimal(exact(a, b))
            if isinstance(a, int):
                return wrap(plain(a, b))
        return plain(a, b)

    calculate.__name__ = name
    return calculate


add = _calculation("add", "add", operator.add, _EXACT.add)
sub = _calculation("sub", "subtract", operator.sub, _EXACT.subtract)
mul = _calculation("mul", "multiply", operator.mul, _EXACT.multiply)


def neg(value: Any) -> Any:
    """-value"""
    if value is None:
        return None
    value = python_number(value)
    if not _is_number(value):
        _unfit("negate", value)
    if isinstance(value, int):
        return wrap(-value)
    return value.copy_negate() if isinstance(value, Decimal) else -value


def div(a: Any, b: Any) -> float | None:
    """Returns a / b as a double."""
    if a is None or b is None:
        return None
    if type(a) is float and type(b) is float:
        return a / b if b else None
    a, b = python_number(a), python_number(b)
    if not isinstance(a, float) and not isinstance(b, float):
        if isinstance(a, Decimal) or isinstance(b, Decimal):
            raise TypeError("decimals have no division that is exact; cast both to double")
        if not (_is_number(a) and _is_number(b)):
            _unfit("divide", a, b)
    elif type(a) is not type(b):
        a, b = _operands(a, b, "divide")
    divisor = float(b)
    return float(a) / divisor if divisor else None


def idiv(a: Any, b: Any) -> int | None:
    """Returns the whole part of a / b."""
    if a is None or b is None:
        return None
    a, b = python_number(a), python_number(b)
    if not (isinstance(a, int) and isinstance(b, int)) or isinstance(a, bool) or isinstance(b, bool):
        _unfit("divide as integers", a, b)
    if not b:
        return None
    whole = abs(a) // abs(b)
    return whole if (a < 0) is (b < 0) and whole <= BIGINT_MAX else wrap(whole if (a < 0) is (b < 0) else -whole)


def mod(a: Any, b: Any) -> Any:
    """Returns the remainder of a / b, with the sign of a."""
    if a is None or b is None:
        return None
    a, b = _operands(a, b, "divide")
    if isinstance(a, Decimal):
        raise TypeError("decimals have no remainder that is exact; cast both to double")
    if not b:
        return None
    if isinstance(a, int):
        rest = abs(a) % abs(b)
        return -rest if a < 0 else rest
    return math.nan if math.isinf(a) else math.fmod(a, b)


# --- casts --------------------------------------------------------------------------------------------------


def to_bigint(value: Any) -> int | None:
    """cast("bigint")"""
    if value is None:
        return None
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, float):
        return _saturated(value, BIGINT_MIN, BIGINT_MAX)
    if isinstance(value, str):
        return _read_integer(value, BIGINT_MIN, BIGINT_MAX)
    if isinstance(value, Decimal):
        return wrap(int(value))
    if isinstance(value, datetime):
        return (utc(value) - EPOCH) // _SECOND
    return _of_number(to_bigint, "cast to bigint", value)


def to_int(value: Any) -> int | None:
    """cast("int"): a bigint that fits 32 bits; longer integers lose their upper bits, longer texts are null."""
    if isinstance(value, float):
        return _saturated(value, -(2**31), 2**31 - 1)
    if isinstance(value, str):
        return _read_integer(value, -(2**31), 2**31 - 1)
    if isinstance(value, datetime):
        _unfit("cast to int, use bigint for", value)
    whole = to_bigint(value)
    return None if whole is None else ((whole + 2**31) & 0xFFFFFFFF) - 2**31


def _saturated(value: float, least: int, greatest: int) -> int:
    if _is_nan(value):
        return 0
    return int(max(least, min(value, greatest)))


def _read_integer(text: str, least: int, greatest: int) -> int | None:
    """Reads a text as an integer, truncated at its decimal point. Spark takes a point without any digits for 0, and so
    does this function: to make Spark test for such a text would cost time for every text."""
    text = text.strip(_BLANK_OR_CONTROL)
    found = _INTEGER.fullmatch(text)
    if found is None or text in ("", "+", "-"):
        return None
    digits = found[2].lstrip("0")
    if len(digits) > 19:  # more than 64 bits
        return None
    whole = int(digits or 0) * (-1 if found[1] == "-" else 1)
    return whole if least <= whole <= greatest else None


def to_double(value: Any) -> float | None:
    """cast("double")"""
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip(_BLANK)
        return float(text) if _NUMBER.fullmatch(text) or _SPECIAL.fullmatch(text) else None
    if isinstance(value, int | float | Decimal):
        return float(value)
    return _of_number(to_double, "cast to double", value)


def to_boolean(value: Any) -> bool | None:
    """cast("boolean")"""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = value.strip(_BLANK_OR_CONTROL).lower()
        return True if text in _TRUE else False if text in _FALSE else None
    if isinstance(value, int | float | Decimal):
        return value != 0
    return _of_number(to_boolean, "cast to boolean", value)


def to_string(value: Any) -> str | None:
    """cast("string"); of decimals only columns whose number of decimal places is known, see `decimal_to_string`."""
    if value is None or isinstance(value, str):
        return value
    if value is True:
        return "true"
    if value is False:
        return "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, datetime):
        text = utc(value).replace(tzinfo=None).isoformat(" ")
        return text.rstrip("0") if value.microsecond else text
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        raise TypeError("a double is written differently by Python and Java; cast it to decimal(p,s), then to string")
    if isinstance(value, Decimal):
        raise TypeError("how many decimal places to write is not known; cast to decimal(p,s), then to string")
    return _of_number(to_string, "cast to string", value)


def to_decimal(precision: int, scale: int) -> Callable[[Any], Decimal | None]:
    """cast("decimal(p,s)"): rounded half up (away from zero); null where it has too many digits."""
    quantum = Decimal((0, (1,), -scale))
    limit = Decimal((0, (1,), precision - scale))
    context = Context(prec=DECIMAL_DIGITS + 12, rounding=ROUND_HALF_UP, Emax=10_000, Emin=-10_000)

    def cast(value: Any) -> Decimal | None:
        if value is None:
            return None
        if isinstance(value, str):
            text = value.strip(_BLANK)
            if not _NUMBER.fullmatch(text):
                return None
            number = Decimal(text)
        elif isinstance(value, float):
            number = Decimal(repr(float(value)))
        elif isinstance(value, int | Decimal):
            number = Decimal(value)
        else:
            return _of_number(cast, f"cast to decimal({precision},{scale})", value)
        if not number.is_finite() or (number and number.adjusted() > DECIMAL_DIGITS):
            return None
        try:
            rounded = number.quantize(quantum, context=context)
        except InvalidOperation:
            return None
        return rounded.copy_abs() if not rounded else rounded if abs(rounded) < limit else None

    return cast


def decimal_to_string(scale: int) -> Callable[[Any], str | None]:
    """cast("string") of decimals with `scale` decimal places."""
    quantum = Decimal((0, (1,), -scale))
    context = Context(prec=DECIMAL_DIGITS + 12, rounding=ROUND_DOWN)

    def cast(value: Any) -> str | None:
        if value is None:
            return None
        found = Decimal(value).quantize(quantum, context=context)
        return str(found if found else found.copy_abs())

    return cast


def to_timestamp(value: Any) -> datetime | None:
    """cast("timestamp"): a date's first instant, or a text "2024-02-29[ 12:30:00[.123456][Z|+01:00]]"."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return utc(value)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    if not isinstance(value, str):
        _unfit("cast to timestamp (of numbers use .dt.from_epoch_ms())", value)
    found = _TIMESTAMP.fullmatch(value)
    if found is None:
        return None
    *whole, fraction, sign, zone_hours, zone_minutes = found.groups()
    offset = 0
    if sign:
        offset = int(zone_hours) * 60 + int(zone_minutes)
        if offset > _ZONE_MINUTES_MAX or int(zone_minutes) > 59:
            return None
    year, month, day, hour, minute, second = (int(number or 0) for number in whole)
    try:
        local = datetime(year, month, day, hour, minute, second, int((fraction or "0").ljust(6, "0")), UTC)
        return local - timedelta(minutes=-offset if sign == "-" else offset)
    except (ValueError, OverflowError):
        return None


def to_date(value: Any) -> date | None:
    """cast("date"): a timestamp's day in UTC, or a text "2024-02-29"."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return utc(value).date()
    if isinstance(value, date):
        return value
    if not isinstance(value, str):
        _unfit("cast to date", value)
    if not _DATE.fullmatch(value):
        return None
    try:
        return date(int(value[:4]), int(value[5:7]), int(value[8:]))
    except ValueError:
        return None


_DATE = re.compile(DATE)


# --- strings, arrays, times ---------------------------------------------------------------------------------


def element(values: Any, index: int) -> Any:
    """Returns the element of an array, and null where there is none."""
    return None if values is None or index >= len(values) else values[index]


def concat(*values: Any) -> str | None:
    """Joins strings to one."""
    return None if None in values else "".join(values)


def calendar(value: Any) -> Any:
    """Returns a timestamp or a date as an object with the attributes year, month and day in UTC."""
    return value if type(value) is date else utc(value)


def epoch_ms(value: Any) -> int | None:
    """Returns the milliseconds since 1970, rounded down."""
    return None if value is None else (utc(value) - EPOCH) // _MILLISECOND


def from_epoch_ms(value: Any) -> datetime | None:
    """Returns the timestamp of milliseconds since 1970."""
    if value is None:
        return None
    value = python_number(value)
    if not isinstance(value, int) or isinstance(value, bool):
        _unfit("take as milliseconds", value)
    return EPOCH + timedelta(milliseconds=value) if EPOCH_MS_MIN <= value <= EPOCH_MS_MAX else None


def truncate(value: Any, unit: str) -> datetime | None:
    """Returns the start of the unit of time that a timestamp is in."""
    if value is None:
        return None
    moment = utc(value)
    if unit == "second":
        return moment.replace(microsecond=0)
    if unit == "minute":
        return moment.replace(second=0, microsecond=0)
    if unit == "hour":
        return moment.replace(minute=0, second=0, microsecond=0)
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if unit == "week":
        return day - timedelta(days=day.weekday())
    if unit == "month":
        return day.replace(day=1)
    if unit == "year":
        return day.replace(month=1, day=1)
    return day
