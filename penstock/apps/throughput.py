"""The Throughput Test of the TurboStream paper (docs/papers.md: T13): how many records a second come across?

    source -> ack -> nothing          (shuffle between them)

Records are an id of five characters and a value of `size` letters from a to h.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace

from penstock.apps.app import App, Built, Cycle, add_load_options, described_rate
from penstock.apps.command_line import COUNT, Options
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Null
from penstock.runtime.sources import Generator, Source
from penstock.runtime.status import JobStatus

_LETTERS = "abcdefgh"
_POOL = 1_000  # records made beforehand, so that making them does not count
_DURATION_S = 10.0

Record = tuple[str, str]


def records(size: int, seed: int = 0) -> list[Record]:
    """Returns (id, value) records with distinct ids."""
    letters = random.Random(seed)
    ids = letters.sample(range(len(_LETTERS) ** 5), _POOL)
    return [(_id(number), "".join(letters.choices(_LETTERS, k=size))) for number in ids]


def _id(number: int) -> str:
    return "".join(_LETTERS[number // len(_LETTERS) ** place % len(_LETTERS)] for place in range(5))


def topology(source: Source, name: str = "throughput") -> Flow:
    """Builds the flow: records go in, and nothing comes out."""
    flow = Flow(name)
    flow.read(source, name="source").shuffle().map(ack, name="ack").write(Null(), name="sink")
    return flow


def ack(record: Record) -> Record:
    """Acknowledges a record."""
    return record


def _add_options(parser: Options) -> None:
    add_load_options(parser, rate="max", duration=f"{_DURATION_S:g}")
    parser.add("--size", metavar="B", type=COUNT, default=100, help="letters of each value (100)")


def _build(options: SimpleNamespace) -> Built:
    rate = None if options.rate == "max" else options.rate
    duration = _DURATION_S if options.duration is None else options.duration
    source = Generator(Cycle(records(options.size)), rate, duration_s=duration or None)

    def results(status: JobStatus, seconds: float) -> Iterable[str]:
        acked = status.operators["ack"].records_in
        yield f"{acked / seconds:,.0f} records/s, {acked * (options.size + 5) / seconds / 1e6:,.1f} MB/s of their text"

    return Built(
        topology(source, options.name),
        f"records with values of {options.size} letters, {described_rate(rate)}"
        + (f" for {duration:g} s" if duration else ", until you stop it with Ctrl-C"),
        results,
        ("penstock run throughput --size 1000", "penstock explain throughput"),
    )


APP = App("throughput", "measure records a second from sources to sinks, all to all", _add_options, _build)
