"""Divides outputs into pieces of limited size, for stages that expand. A piece must never be empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from penstock.runtime.operators.base import EXPAND_RECORDS_MAX


def in_pieces(outputs: Iterable[Any]) -> Iterator[list[Any]]:
    """Yields outputs in pieces of at most EXPAND_RECORDS_MAX records."""
    left = iter(outputs)
    while piece := list(islice(left, EXPAND_RECORDS_MAX)):
        yield piece
