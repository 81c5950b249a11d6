"""Describes applications to the `penstock` command, and has the options that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from penstock.apps.command_line import SECONDS, Options
from penstock.runtime.errors import FlowError
from penstock.runtime.program.flow import Flow
from penstock.runtime.sources import parse_rate
from penstock.runtime.status import JobStatus


def _nothing(status: JobStatus, seconds: float) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Built:
    """Holds an application whose options are settled, with its flow.

    `intro` says in one line what it is about to do; `results` makes the lines to print of the last status and the
    seconds that the job ran; `next_steps` are commands worth trying afterwards.
    """

    flow: Flow
    intro: str
    results: Callable[[JobStatus, float], Iterable[str]] = _nothing
    next_steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class App:
    """Describes one application: its name on the command line, one line about it, its own options, and how it is built.

    `default_name`: of its job, where that is not the application's.
    """

    name: str
    about: str
    add_options: Callable[[Options], None]
    build: Callable[[SimpleNamespace], Built]
    default_name: str | None = None


class Cycle:
    """Repeats the records of a list without end, by number. This load costs almost nothing to make."""

    def __init__(self, records: Sequence[Any]) -> None:
        if not records:
            raise FlowError("there are no records to repeat: the input is empty")
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __call__(self, index: int) -> Any:
        return self._records[index % len(self._records)]


def add_load_options(options: Options, *, rate: str, duration: str) -> None:
    """Adds the options --rate and --duration. The texts say what happens without them."""
    options.add(
        "--rate",
        metavar="R",
        type=rate_option,
        help=f"records a second over all source tasks, or steps such as 5000:10s,60000:10s, which start over; "
        f"'max' for as fast as possible ({rate})",
    )
    options.add(
        "--duration",
        metavar="S",
        type=SECONDS,
        help=f"seconds during which records are read; 0: until Ctrl-C ({duration})",
    )


def rate_option(text: str) -> str:
    """Returns the text of a --rate after checking it."""
    if text != "max":
        try:
            parse_rate(text)
        except FlowError as error:
            raise click.BadParameter(str(error)) from None
    return text


def above_zero_or_max(what: str) -> Callable[[str], float | None]:
    """Returns the function that reads a number above 0 from the command line, or 'max', which is None. `what` is named
    in errors."""

    def read(text: str) -> float | None:
        if text == "max":
            return None
        value: float = SECONDS(text)
        if not value:
            raise click.BadParameter(f"a {what} must be above 0")
        return value

    return read


def packaged(name: str) -> Path:
    """Returns the path of a data file that is part of the package. data/README.md describes them."""
    return Path(str(resources.files("penstock.apps") / "data" / name))


def described_rate(rate: str | None) -> str:
    """Describes a rate for people: "5,000 records/s", "as fast as possible"."""
    if rate is None or rate == "max":
        return "as fast as possible"
    steps = parse_rate(rate)
    return ", then ".join(f"{r:,.6g} records/s" + ("" if s is None else f" for {s:g} s") for r, s in steps)
