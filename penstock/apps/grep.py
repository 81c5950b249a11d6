"""Grep: find the lines that match a pattern, and count them.

    lines -> find -+-> matches
                   +-> one -> (by the constant 1) -> count -> number

As in the storm-benchmark every match becomes the constant 1, which is also the key: one hot task counts them all.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from penstock.apps import text
from penstock.apps.app import App, Built
from penstock.apps.command_line import Options
from penstock.apps.latest import Latest
from penstock.runtime.errors import FlowError
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Collect, Console, Files, Sink
from penstock.runtime.sources import Source
from penstock.runtime.status import JobStatus
from penstock.runtime.storage import filesystems

PATTERN = "string"


def topology(source: Source, pattern: str, matches: Sink, number: Sink, name: str = "grep") -> Flow:
    """Builds the flow: lines go in, matching lines go to `matches`, and (1, number of matches) goes to `number`."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise FlowError(f"{pattern!r} is not a regular expression: {error}") from None
    flow = Flow(name)
    found = flow.read(source, name="lines").filter(search, name="find")
    found.write(matches, name="matches")
    found.map(one, name="one").key_by(itself).count(name="count").write(Latest(number), name="number")
    return flow


def one(line: str) -> int:
    """Returns the same value for every match, so that all of them have one key."""
    return 1


def itself(value: Any) -> Any:
    """Returns the record, which is its own key."""
    return value


def _add_options(parser: Options) -> None:
    parser.add(
        "--pattern", metavar="P", default=PATTERN, help=f"a regular expression, searched in every line ({PATTERN})"
    )
    text.add_options(parser, rate="max")
    parser.add("--output", metavar="DIR", help="write the matching lines to files in this directory (print them)")


def _build(options: SimpleNamespace) -> Built:
    lines = text.open_text(options)
    number = Collect()
    matches: Sink = Files(options.output) if options.output else Console()

    def results(status: JobStatus, seconds: float) -> list[str]:
        count = sum(n for _, n in number.records())
        where = f"; they are in {filesystems.named(options.output)}" if options.output else ""
        return [f"{count:,} of {status.records_read:,} lines match {options.pattern!r}{where}"]

    return Built(
        topology(lines.source, options.pattern, matches, number, options.name),
        f"looking for {options.pattern!r} in {lines.about}",
        results,
        ("penstock run grep --pattern 'king|queen' --rate 50000 --duration 10",),
    )


APP = App("grep", "find and count the lines that match a pattern", _add_options, _build)
