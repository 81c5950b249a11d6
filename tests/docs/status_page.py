"""Writes docs/status.md from the structs of the status: `make status`. A test says when the page is old."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

from penstock.runtime.status import JobStatus, Part

PAGE = Path(__file__).parents[2] / "docs" / "status.md"

INTRO = """\
# The status of a job

`job.status()` returns a `JobStatus`, a struct that cannot be changed, and so do `job.wait()` and `job.wait_for()`;
`penstock.jobs()` returns a list of them. Each field can be read as an attribute or by its key:
`job.status().records_read` is `job.status()["records_read"]`. `plain()` makes dicts and lists of a status and of each
part of it, which `penstock status NAME --json` prints.

Every status has the same fields, whatever the state of the job and whatever the job uses: before the job has answered
for the first time they have zeros, empty lists and None, so `job.status().records_written < 100` is safe at any time.
Names of fields end with their units; a field without a unit is a count, a share from 0 to 1, or a text.

This page is made from `penstock/runtime/status.py` (`make status`).
"""


def parts() -> list[type[Part]]:
    """Returns the classes of the parts, each before those of its fields."""
    found: list[type[Part]] = []

    def look(one: object) -> None:
        if isinstance(one, type) and issubclass(one, Part) and one not in found:
            found.append(one)
            for kind in get_type_hints(one).values():
                look(kind)
        for kind in get_args(one):
            look(kind)

    look(JobStatus)
    return found


def described(part: type[Part]) -> tuple[str, dict[str, str]]:
    """Returns the docstring of a part, without its entries and with them by key."""
    intro, *entries = re.split(r"\n(?=`\w+`: )", inspect.getdoc(part) or "")
    found = [re.fullmatch(r"`(\w+)`: (.+)", " ".join(entry.split())) for entry in entries]
    return " ".join(intro.split()), {entry[1]: entry[2] for entry in found if entry}


def kind_of(part: type[Part], field: str) -> str:
    """Returns the type of a field in words, with a link where it is a part."""
    kind = str(part.__annotations__[field]).replace("|", "\\|")
    return re.sub(r"\b[A-Z]\w+", lambda name: name[0] if name[0] == "None" else linked(name[0]), kind)


def linked(name: str) -> str:
    """Returns the name of a part with a link to it."""
    return f"[{name}](#{name.lower()})"


def sections() -> Iterator[str]:
    """Yields a section for each part."""
    for part in parts():
        intro, entries = described(part)
        lines = [f"## {part.__name__}", "", intro, "", "| field | type | meaning |", "|---|---|---|"]
        for field, key in zip(part.__struct_fields__, part.__struct_encode_fields__, strict=True):
            lines.append(f"| `{key}` | {kind_of(part, field)} | {entries[key]} |")
        yield "\n".join(lines) + "\n"


def page() -> str:
    """Returns the page."""
    return "\n".join([INTRO, *sections()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
