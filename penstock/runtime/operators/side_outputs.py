"""The side outputs that a user's function declares with `outputs=`, and sends records to with `ctx.output`.

A record for a side output that was not declared must never be lost silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.runtime.errors import FlowError, PenstockError, shorten


def declared(outputs: Any, reserved: Iterable[str], where: str) -> tuple[str, ...]:
    """Returns the names that the parameter `outputs` declares. `reserved`: the side outputs that the operator has or
    may have anyway. Raises FlowError when these are not unique names."""
    if isinstance(outputs, str):
        raise FlowError(f"{where}: outputs={outputs!r}; give a tuple of names: ({outputs!r},)")
    names: tuple[Any, ...] | None = tuple(outputs) if isinstance(outputs, Iterable) else None
    if names is None or not all(isinstance(tag, str) for tag in names):
        raise FlowError(f"{where}: outputs={shorten(outputs)}; give a tuple of names, which are texts")
    taken = set(names) & set(reserved)
    if taken:
        raise FlowError(f"{where}: outputs={names}: the operator has an output {min(taken)!r} of its own; rename yours")
    if len(set(names)) != len(names):
        raise FlowError(f"{where}: outputs={names}: each name must appear once")
    return names


def send(side: Mapping[str, list[Any]], tag: str, records: Iterable[Any], operator: str) -> None:
    """Sends records to a side output of the operator of this name. Raises PenstockError when it has no such output."""
    if (output := side.get(tag)) is None:
        known = ", ".join(map(repr, side)) or "none"
        raise PenstockError(
            f"operator {operator!r} has no side output {tag!r} (it has: {known}); declare it: "
            f"process(..., outputs=({tag!r},))"
        )
    output.extend(records)
