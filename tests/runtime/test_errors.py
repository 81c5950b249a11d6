"""The tree of exceptions that the docstring of `errors` draws is that of the code."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "penstock"
ERRORS = PACKAGE / "runtime" / "errors.py"


def defined() -> dict[str, str]:
    """The first base of each exception class that is defined in the package, by name."""
    bases: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]

    def is_exception(name: str) -> bool:
        if name in bases:
            return any(map(is_exception, bases[name]))
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
