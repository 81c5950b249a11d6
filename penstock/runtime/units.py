"""One rule for times and durations in all that users call, and checks of the other numbers that users give.

A *duration* is a number of seconds or a timedelta, in a parameter whose name ends in `_s`. A *time* is a whole number
of milliseconds since 1970, UTC: in a parameter or result whose name ends in `_ms`, in a record's field, as a window's
start and end. Where a time is taken, a datetime with a time zone will do as well.
"""

from __future__ import annotations

import math
from datetime import timedelta
from numbers import Integral, Real

from penstock.runtime.errors import WrongValue, shorten


def seconds(duration: float | timedelta, what: str) -> float:
    """Returns a duration in seconds. Raises WrongValue when it is no number and no timedelta, or NaN, or negative."""
    found = any_seconds(duration, what)
    if not found >= 0:  # also NaN
        raise WrongValue(f"{what}={shorten(duration)}; it must be 0 seconds or more")
    return found


def any_seconds(duration: float | timedelta, what: str) -> float:
    """Returns a duration in seconds, for callers that check its bounds: it may be negative, and NaN. Raises WrongValue
    when it is no number and no timedelta."""
    if isinstance(duration, timedelta):
        duration = duration.total_seconds()
    if not isinstance(duration, int | float) or isinstance(duration, bool):
        raise WrongValue(f"{what}={shorten(duration)}; give seconds or a timedelta")
    try:
        return float(duration)
    except OverflowError:  # an int of hundreds of digits
        return math.inf if duration > 0 else -math.inf


def above_zero(duration: float | timedelta, what: str, otherwise: str = "") -> float:
    """Returns a duration in seconds that is above 0. Raises WrongValue for anything else. `otherwise`: what else may be
    given."""
    found = any_seconds(duration, what)
    if not found > 0:  # also NaN
        raise WrongValue(f"{what}={shorten(duration)}; it must be above 0{otherwise}")
    return found


def whole(value: object, what: str, least: int = 1) -> int:
    """Returns a whole number of `least` or more. Raises WrongValue for anything else."""
    if not is_whole(value) or value < least:  # type: ignore[operator]  # is_whole has looked at the type
        raise WrongValue(f"{what}={shorten(value)}; it must be a whole number, {least:,} or more")
    return int(value)  # type: ignore[call-overload,no-any-return]


def number(value: object, what: str, *, infinite: bool = False) -> float:
    """Returns a number of 0 or more, and infinity only if `infinite`. Raises WrongValue for anything else."""
    found = _number(value)
    if not 0 <= found < math.inf and not (infinite and found == math.inf):
        raise WrongValue(f"{what}={shorten(value)}; it must be a number, 0 or more")
    return found


def number_above_zero(value: object, what: str, otherwise: str = "") -> float:
    """Returns a finite number above 0. Raises WrongValue for anything else. `otherwise`: what else may be given."""
    found = _number(value)
    if not 0 < found < math.inf:
        raise WrongValue(f"{what}={shorten(value)}; it must be a number above 0{otherwise}")
    return found


def part_of_one(value: object, what: str, *, zero: bool = False, one: bool = False) -> float:
    """Returns a number between 0 and 1, and the bounds themselves if `zero` or `one`. Raises WrongValue for anything
    else."""
    found = _number(value)
    if not (0 < found < 1 or (zero and found == 0) or (one and found == 1)):
        least, most = "0 or more" if zero else "above 0", "1 at most" if one else "below 1"
        raise WrongValue(f"{what}={shorten(value)}; it must be a number, {least} and {most}")
    return found


def _number(value: object) -> float:
    """Returns a number as a float, and NaN for everything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int of hundreds of digits
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # mypy: a Real has no order with ints


def choice(value: object, what: str, choices: tuple[str, ...], hint: str = "") -> None:
    """Raises WrongValue when a value is none of the choices. `hint` ends the message."""
    if not isinstance(value, str) or value not in choices:
        *others, last = map(repr, choices)
        raise WrongValue(f"{what}={shorten(value)}; it must be {', '.join(others)} or {last}{hint}")


def in_order(least: float, least_name: str, most: float, most_name: str) -> None:
    """Raises WrongValue when the first of two numbers is greater than the second one."""
    if least > most:
        raise WrongValue(
            f"{least_name}={least:g} is above {most_name}={most:g}; lower {least_name} or raise {most_name}"
        )


def flag(value: object, what: str) -> bool:
    """Returns True or False. Raises WrongValue for anything else, because every text is true, also "no" and "false"."""
    if not isinstance(value, bool):
        raise WrongValue(f"{what}={shorten(value)}; it must be True or False")
    return value


def is_whole(number: object) -> bool:
    """Returns whether it is an int, also one of numpy. A bool is none, although Python counts it among the ints."""
    return isinstance(number, Integral) and not isinstance(number, bool)


class Seconds:
    """A field of a dataclass that is a duration: it is given in seconds or as a timedelta, and read in seconds.

    It must be 0 or more, above 0 if `above`, and not infinite if `finite`.
    """

    def __init__(self, default: float, *, above: bool = False, finite: bool = False) -> None:
        self._default = default
        self._above = above
        self._finite = finite

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> float:
        return self._default if instance is None else float(instance.__dict__[self._name])

    def __set__(self, instance: object, value: float | timedelta) -> None:
        found = (above_zero if self._above else seconds)(value, self._name)
        if self._finite and found == math.inf:
            raise WrongValue(f"{self._name}={shorten(value)}; it must be finite")
        instance.__dict__[self._name] = found
