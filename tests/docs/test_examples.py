"""The documents are true: their examples run as printed, their links lead somewhere, their commands exist."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.apps import cli
from penstock.apps.command_line import Command

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def blocks(document: Path) -> list[tuple[int, str]]:
    """(line, text) of the document's Python examples."""
    text = document.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(1)), found[1])
        for found in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


#: The jobs of this document run on Ray. All others, and those of its examples but the first, run on local processes,
#: which start faster.
ON_RAY = "README.md"
#: The examples of this document need a Spark session (test_spark_examples.py).
ON_SPARK = "spark.md"
#: The examples of this document need servers (tests/connectors/test_examples.py).
ON_SERVERS = "connectors.md"
WITH_EXAMPLES = [
    pytest.param(document, marks=pytest.mark.ray if document.name == ON_RAY else [])
    for document in DOCUMENTS
    if blocks(document) and document.name not in (ON_SPARK, ON_SERVERS)
]


def run_examples(document: Path, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs all examples of a document in order, in one namespace, on local processes."""
    monkeypatch.setattr(penstock, "run", partial(penstock.run, local=True))
    monkeypatch.setattr(penstock, "resume", partial(penstock.resume, local=True))
    for line, block in blocks(document):
        exec(compile("\n" * line + block, str(document), "exec"), namespace)


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda document: document.name)
def test_examples(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """All examples of a document run in order, in an empty directory. The first one of the README is a newcomer's: it
    runs by itself, on Ray, and again."""
    monkeypatch.chdir(tmp_path)
    if document.name == ON_RAY:
        request.getfixturevalue("cluster")
        line, block = blocks(document)[0]
        exec(compile("\n" * line + block, str(document), "exec"), {"__name__": "__main__"})
    run_examples(document, {"__name__": "__main__"}, monkeypatch)
    if document.name == ON_RAY:
        counted = [line.split("\t") for part in Path("counts").iterdir() for line in part.read_text().splitlines()]
        texts = [path.read_text() for path in Path("corpus").iterdir()]
        expected = Counter(word.lower() for text in texts for word in text.split())
        assert expected["be"] == 2
        assert {word: int(count) for word, count in counted} == expected  # of each word the last one stays


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", document.read_text(encoding="utf-8")):
        path = (document.parent / target) if target else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_commands_parse(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every indented `penstock ...` line is one that the command takes, where there is a flow in orders.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Command, "invoke", lambda command, context: None)
    Path("orders.py").write_text(
        "import penstock as ps\nflow = ps.Flow('orders')\nflow.read(ps.sources.Memory([])).write(ps.sinks.Null())\n"
    )
    for command in re.findall(r"^ {4}penstock (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE):
        assert cli.main(shlex.split(command, comments=True)) in (0, None), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^ {4}|`)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= targets
