"""The first sentences of docstrings name their things: a reader understands them without looking for a noun.

A sentence with one of the words below makes its reader search for the thing that the word stands for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(
    r"\b(anew|for ever|in vain|nobody|so many|so much|those|to and fro|told|what|whatever|whoever|whom)\b",
    re.IGNORECASE,
)


def first_sentence(docstring: str) -> str:
    """Returns the first sentence, which a colon ends too."""
    return re.split(r"(?<=[.:!?])\s", " ".join(docstring.split()), maxsplit=1)[0]


def sentences() -> Iterator[tuple[Path, int, str]]:
    """Yields the place and the first sentence of each docstring."""
    for path in sorted((ROOT / "penstock").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                docstring := ast.get_docstring(node)
            ):
                yield path, getattr(node, "lineno", 1), first_sentence(docstring)


def test_first_sentences_name_their_things() -> None:
    assert not [f"{path}:{line}: {text}" for path, line, text in sentences() if WORDS.search(text)]


def test_a_sentence_without_a_noun_is_found() -> None:
    assert WORDS.search(first_sentence("Returns what is wrong with words. The rest may say anything."))
    assert not WORDS.search(first_sentence("Returns the error for unknown arguments. It says what to do."))
