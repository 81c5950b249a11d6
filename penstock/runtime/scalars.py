"""NumPy's numbers as Python's: one rule for values that are added and compared, and for keys.

A NumPy number counts as the Python number that it equals. NumPy's own arithmetic must never make a result: its small
integers wrap (six times the uint8 200 would be 176), and the sum of two of its truth values is a truth value. Nor must
its comparisons decide which keys are equal: NumPy's integers raise an error beside a Decimal, in a dict too.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any

_PLAIN = frozenset({str, int, float, bytes, bool, type(None)})
_NESTED = frozenset({tuple, frozenset})


def python_number(value: Any) -> Any:
    """Returns a NumPy number as a number of Python, and everything else unchanged, also NumPy's times."""
    numpy = sys.modules.get("numpy")  # NumPy scalars exist only when NumPy is loaded
    if numpy is None or not isinstance(value, numpy.generic) or isinstance(value, numpy.timedelta64):
        return value
    if isinstance(value, numpy.bool_):
        return bool(value)
    if isinstance(value, numpy.integer):
        return int(value)
    if isinstance(value, numpy.floating):
        return float(value)
    return complex(value) if isinstance(value, numpy.complexfloating) else value


def python_keys(keys: list[Any]) -> list[Any]:
    """Returns keys with the numbers of Python in place of NumPy's, also in tuples and frozensets. NumPy's long doubles
    stay as they are, because Python's numbers are less exact."""
    numpy = sys.modules.get("numpy")
    return keys if numpy is None or not _has_any(numpy.generic, keys) else list(map(_python_key, keys))


def _has_any(wanted: type, values: list[Any]) -> bool:
    """Whether there is an object of this type among values, or in tuples and frozensets among them."""
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return False
    if any(issubclass(kind, wanted) for kind in kinds):
        return True
    if kinds.isdisjoint(_NESTED):
        return False
    nested = values if kinds <= _NESTED else [value for value in values if type(value) in _NESTED]
    if set(map(type, chain.from_iterable(nested))) <= _PLAIN:
        return False
    return _has_any(wanted, list(chain.from_iterable(nested)))


def _python_key(key: Any) -> Any:
    kind = type(key)
    if kind in _NESTED:
        return kind(map(_python_key, key))
    return key if kind.__name__ in ("longdouble", "clongdouble") else python_number(key)
