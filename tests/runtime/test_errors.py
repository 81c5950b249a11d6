"""The tree of exceptions that the docstring of `errors` draws is that of the code."""

from __future__ import annotations

import ast
import builtins
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.errors import shorten

PACKAGE = Path(__file__).parents[2] / "penstock"
ERRORS = PACKAGE / "runtime" / "errors.py"


def defined() -> dict[str, str]:
    """The first base of each exception class that is defined in the package, by name."""
    bases: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]

    def is_exception(name: str, below: tuple[str, ...] = ()) -> bool:
        if name in below:  # two classes that are no exceptions have the same name
            return False
        if name in bases:
            return any(is_exception(base, (*below, name)) for base in bases[name])
        known = getattr(builtins, name, None)
        return isinstance(known, type) and issubclass(known, BaseException)

    return {name: of[0] for name, of in bases.items() if is_exception(name)}


def drawn() -> dict[str, str]:
    """The parent of each name in the docstring's trees; of one that stands in brackets after a name: that."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (ast.get_docstring(ast.parse(ERRORS.read_text(encoding="utf-8")), clean=False) or "").splitlines():
        root = re.fullmatch(r"    (\w+)", line)
        if root is not None:
            path = [root[1]]
            continue
        entry = re.match(r"    ((?:│   |    )*)[├└]── (\w+) +\S.*?(?: \((\w+)\))?$", line)
        if entry is not None:
            del path[len(entry[1]) // 4 + 1 :]
            assert entry[2] not in parents, f"{entry[2]} is drawn twice"
            parents[entry[2]] = entry[3] or path[-1]
            path.append(entry[2])
    return parents


def test_the_tree_has_every_exception_of_the_package() -> None:
    in_code = defined()
    assert in_code.pop("PenstockError") == "Exception"
    assert drawn() == in_code, "correct the tree in the docstring of penstock/runtime/errors.py"


@pytest.mark.parametrize(
    "value",
    ["it's", b"a", bytearray(b"b"), [], (), (1,), {}, set(), {1}, [1, ("a", {"k": [b"x"]})], {"a": {2.5, None}}],
    ids=repr,
)
def test_a_short_value_is_told_by_its_repr(value: object) -> None:
    assert shorten(value) == repr(value)


def test_a_container_in_itself_is_told() -> None:
    value: list[Any] = [1]
    value.append({"again": value})
    assert shorten(value) == repr(value)


MANY = 4_000_000


@pytest.mark.parametrize(
    ("value", "begins"),
    [
        ("x" * MANY, "'xxx"),
        (b"x" * MANY, "b'xxx"),
        ({"blob": bytearray(MANY)}, "{'blob': bytearray(b'"),
        ((1, "x" * MANY), "(1, 'xxx"),
        ([0] * MANY, "[0, 0, "),
    ],
    ids=["text", "bytes", "field", "tuple", "items"],
)
def test_a_huge_value_is_told_without_its_whole_repr(value: object, begins: str) -> None:
    tracemalloc.start()
    try:
        told = shorten(value)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert told.startswith(begins)
    assert told.endswith("... (more than 20,000 characters)")
    assert len(told) <= 200
    assert most < MANY / 4
