"""The first sentences of docstrings name their things: a reader understands them without looking for a noun.

A sentence with one of the words below makes its reader search for the thing that the word stands for. The rooms that
still have such sentences are listed with their number, which may only fall.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(
    r"\b(anew|for ever|in vain|nobody|so many|so much|those|to and fro|told|what|whatever|whoever|whom)\b",
    re.IGNORECASE,
)
#: How many first sentences of each room have such a word.
LEFT = {
    "actors/job_master": 3,
    "actors/ray_link": 1,
    "actors/spark_bridge": 3,
    "apps/cli": 1,
    "apps/nexmark": 1,
    "bridge/burst": 15,
    "bridge/commands": 2,
    "bridge/cost": 4,
    "bridge/operation": 5,
    "bridge/paradigm_scheduler": 9,
    "bridge/switch_outcome": 5,
    "host/carry": 31,
    "host/decide": 37,
    "host/process": 30,
    "jobs/farewell": 1,
    "jobs/job": 3,
    "jobs/progress": 4,
    "placement/refinement": 7,
    "runtime/errors": 1,
    "runtime/lifecycle": 1,
    "runtime/program": 1,
    "runtime/records": 22,
    "runtime/testing": 1,
    "runtime/transport": 1,
    "runtime/worker": 50,
}


def first_sentence(docstring: str) -> str:
    """Returns the first sentence, which a colon ends too."""
    return re.split(r"(?<=[.:!?])\s", " ".join(docstring.split()), maxsplit=1)[0]


def room(path: Path) -> str:
    """Returns the room of a module: its folder below `penstock`, or its own name."""
    return "/".join(path.relative_to(ROOT / "penstock").with_suffix("").parts[:2])


def sentences() -> Iterator[tuple[Path, int, str]]:
    """Yields the place and the first sentence of each docstring."""
    for path in sorted((ROOT / "penstock").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                docstring := ast.get_docstring(node)
            ):
                yield path, getattr(node, "lineno", 1), first_sentence(docstring)


def test_first_sentences_name_their_things() -> None:
    found = [(room(path), f"{path}:{line}: {text}") for path, line, text in sentences() if WORDS.search(text)]
    counted = Counter(name for name, _ in found)
    more = {name: count for name, count in counted.items() if count > LEFT.get(name, 0)}
    assert not more, "\n".join(text for name, text in found if name in more)


def test_a_sentence_without_a_noun_is_found() -> None:
    assert WORDS.search(first_sentence("Returns what is wrong with words. The rest may say anything."))
    assert not WORDS.search(first_sentence("Returns the error for unknown arguments. It says what to do."))
