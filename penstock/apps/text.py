"""The text that applications read: the user's files, a novel where it lies beside the project, or the packaged one.

As files it is read once, as fast as it goes. At a rate it becomes a source without an end of its own: its lines in
turn, over and over, so that a small text can load a job for as long as one likes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from penstock.apps.app import Cycle, add_load_options, described_rate, packaged
from penstock.apps.command_line import COUNT, Options
from penstock.runtime import testing
from penstock.runtime.errors import FlowError
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Null
from penstock.runtime.sources import Generator, Source, TextFiles

_NOVEL = Path("..", "shared", "data", "storm-benchmark", "A_Tale_of_Two_City.txt")
_BATCH = 8192


@dataclass(frozen=True)
class Text:
    """Holds a source of lines, a description of it, and how often it gives the whole text (None: unknown)."""

    source: Source
    about: str
    passes: int | None


def default_path() -> Path:
    """Returns the path of the novel of the storm-benchmark, if it lies beside the project or in the working directory,
    and otherwise the path of the packaged text."""
    project = Path(__file__).resolve().parents[2]
    for base in (Path.cwd(), project):
        if (base / _NOVEL).is_file():
            return (base / _NOVEL).resolve()
    return packaged_path()


def packaged_path() -> Path:
    """Returns the path of the public-domain text that is part of the package."""
    return packaged("public_domain.txt")


def read_lines(patterns: list[str]) -> list[str]:
    """Returns all lines, read by the same source that a job would use."""
    flow = Flow("lines")
    flow.read(TextFiles(patterns)).write(Null(), name="lines")
    return testing.run(flow, batch_size=_BATCH)["lines"]


def add_options(parser: Options, *, rate: str) -> None:
    """Adds the options for the input and its rate. `rate` says what happens without --rate."""
    parser.add(
        "--input",
        metavar="GLOB",
        multiple=True,
        help="text files to read, also .gz (a novel if one lies beside the project, else a small packaged text)",
    )
    add_load_options(parser, rate=rate, duration="with a --rate: until stopped, unless --passes says otherwise")
    parser.add(
        "--passes",
        metavar="N",
        type=COUNT,
        help="read the whole text N times; like --rate, this holds the text in memory",
    )


def open_text(options: SimpleNamespace, *, show_rate: int | None = None, show_s: float = 0.0) -> Text:
    """Opens the text that the options name.

    With no option at all and a `show_rate` it comes at that many lines a second, as many whole times as take
    `show_s` seconds: something to look at, and still a known number of each word.
    """
    patterns = list(options.input) or [str(default_path())]
    about = ", ".join(patterns if options.input else [os.path.basename(patterns[0])])
    rate, duration, passes = options.rate, options.duration, options.passes
    if passes is not None and duration is not None:
        raise FlowError("--passes and --duration both say when to end; give one of them")
    plain = rate is None and duration is None and passes is None
    if rate == "max" and duration is None and passes is None:
        return Text(TextFiles(patterns), about, 1)
    if plain and (options.input or show_rate is None):
        return Text(TextFiles(patterns), about, 1)
    lines = Cycle(read_lines(patterns))
    if plain and show_rate is not None:
        rate = str(show_rate)
        passes = max(1, math.ceil(show_s * show_rate / len(lines)))
    source = Generator(
        lines,
        None if rate == "max" else rate,
        limit=None if passes is None else passes * len(lines),
        duration_s=duration or None,
    )
    if passes is None:
        about += ", over and over" + (f" for {duration:g} s" if duration else ", until you stop it with Ctrl-C")
    elif passes > 1:
        about += f", {passes} times over"
    return Text(source, f"{about}, {described_rate(rate)}", passes)
