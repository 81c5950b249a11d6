"""docs/papers.md explains every idea of a paper that the code cites by its id, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
IDS = {
    f"{letter}{number}" for letter, last in (("T", 13), ("A", 10), ("D", 7), ("W", 10)) for number in range(1, last + 1)
}

# Alone in a text, an id is a citation too: "(T8)".
ID = re.compile(r"\b[TADW][1-9]\d?\b")
RANGE = re.compile(r"\b([TADW])([1-9]\d?)(?: to |-)\1([1-9]\d?)\b")


def cited(text: str) -> set[str]:
    """The ids in a text; of a range such as "T9 to T12", all that are in it."""
    within = {
        f"{letter}{number}" for letter, low, high in RANGE.findall(text) for number in range(int(low), int(high) + 1)
    }
    return within | set(ID.findall(text))


def anchored() -> list[str]:
    """The ids to which docs/papers.md has an anchor: a heading, or one in a table."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^### ({ID.pattern})$", text, re.MULTILINE) + [
        shown for anchor, shown in re.findall(r'<a id="(\w+)"></a>(\w+)', text) if shown.lower() == anchor
    ]


def texts() -> list[Path]:
    code = [path for kind in ("py", "hpp", "cpp") for path in sorted((ROOT / "penstock").rglob(f"*.{kind}"))]
    return [
        *code,
        *sorted((ROOT / "benchmarks").glob("*.py")),
        ROOT / "ARCHITECTURE.md",
        *sorted(ROOT.glob("docs/**/*.md")),
    ]


def test_every_idea_has_one_anchor() -> None:
    assert sorted(anchored()) == sorted(IDS)


def test_every_id_that_is_cited_has_an_anchor() -> None:
    anchors = set(anchored())
    missing = {
        str(path.relative_to(ROOT)): sorted(unknown)
        for path in texts()
        if (unknown := cited(path.read_text(encoding="utf-8")) - anchors)
    }
    assert not missing, f"no section of docs/papers.md has these ids: {missing}"


def test_citations_say_what_to_open() -> None:
    """In each module of the package the page stands before the first id, always in the same form."""
    for path in sorted((ROOT / "penstock").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        first = ID.search(text)
        assert first is None or text[: first.start()].endswith("docs/papers.md: "), (
            f"{path.relative_to(ROOT)} cites {first[0]}: write 'docs/papers.md: {first[0]}' where the first id stands"
        )


@pytest.mark.parametrize(
    "named", sorted(set(re.findall(r"`(\w+(?:/\w+)*(?:\.(?:py|hpp|cpp|md)|/\w+))`", PAGE.read_text(encoding="utf-8"))))
)
def test_named_files_exist(named: str) -> None:
    assert (ROOT / "penstock" / named).exists() or (ROOT / named).exists(), f"docs/papers.md names {named}"
