"""Writes the tables of options in docs/running.md from their definition: `make options`. A test says when it is old."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.jobs.options import described

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
BEGIN, END = "<!-- options: made by `make options` -->\n", "<!-- end of the options -->\n"
HEAD = "| parameter | default | meaning |\n|---|---|---|\n"


def tables() -> str:
    """Returns the options as tables, one for each group."""
    found: dict[str, str] = {}
    for each in described():
        row = f"| `{each.name}` | {each.default_words} | {each.text} |\n"
        found[each.heading] = found.get(each.heading, HEAD) + row
    return "\n".join(f"### {heading}\n\n{table}" for heading, table in found.items())


def page() -> str:
    """Returns the page with the tables as they must be."""
    old = PAGE.read_text(encoding="utf-8")
    return re.sub(f"(?s){re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{tables()}\n{END}", old)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
