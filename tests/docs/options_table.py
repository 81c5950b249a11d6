"""Writes the table of options in docs/running.md from their definition: `make options`. A test says when it is old."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.jobs.options import groups, shown_default

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
BEGIN, END = "<!-- options: made by `make options` -->\n", "<!-- end of the options -->\n"


def table() -> str:
    """Returns the options as tables, one for each group."""
    found = []
    for heading, options in groups().items():
        sizes = any(about.too_small for _, _, about in options)
        columns = ["parameter", "meaning (default)", *["when it is too small", "when it is too large"] * sizes]
        rows = [columns, ["---"] * len(columns)]
        for name, default, about in options:
            unit = " s" if about.unit == "seconds" and about.default is None else ""
            rest = about.text[len(about.sentence) + 1 :]
            meaning = f"{about.sentence} ({shown_default(default, about)}{unit}).{rest}"
            rows.append([f"`{name}`", meaning, *[about.too_small, about.too_large] * sizes])
        found.append(f"### {heading}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "\n".join(found)


def page() -> str:
    """Returns the page with the table as it must be."""
    old = PAGE.read_text(encoding="utf-8")
    return re.sub(f"(?s){re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n{table()}\n{END}", old)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
