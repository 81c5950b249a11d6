"""NumPy's numbers as Python's: one rule for values that are added and compared, and for keys.

A NumPy number counts as the Python number that it equals. NumPy's own arithmetic must never make a result: its small
integers wrap (six times the uint8 200 would be 176), and the sum of two of its truth values is a truth value.
"""

from __future__ import annotations

import sys
from typing import Any


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
