"""The Nexmark benchmark for the `penstock` command: one query of q0 to q22 over generated events.

    events -> watermark -> ... the operators of the query ... -> results

It is no application of the papers, but a common benchmark of stream processors. The queries are in `queries.py`, and
the events in `events.py`. What a run answers must depend on the seed and the number of events only, but for q12, which
counts by the clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import click

from penstock.apps.app import App, Built, add_load_options, described_rate
from penstock.apps.command_line import COUNT, Options
from penstock.apps.few import SHOWN, Few, told
from penstock.apps.nexmark.events import RATE, Events
from penstock.apps.nexmark.queries import QUERIES
from penstock.runtime.errors import FlowError
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Collect, Sink
from penstock.runtime.sources import Generator, Source
from penstock.runtime.status import JobStatus

_RATE = "5000"
_DURATION_S = 10.0


def topology(source: Source, query: str, sink: Sink, *, skew_ms: int = 0, name: str = "nexmark") -> Flow:
    """Builds the flow: events go in, and the results of a query come out."""
    flow = Flow(name)
    events = flow.read(source, name="events").watermark(
        "date_time", out_of_orderness_s=skew_ms / 1000, name="watermark"
    )
    QUERIES[query](events).write(sink, name="results")
    return flow


def _about(query: str) -> str:
    """Returns the question of a query, from the first line of its docstring."""
    return (QUERIES[query].__doc__ or "").splitlines()[0].rstrip(".")


def _add_options(parser: Options) -> None:
    parser.add("--query", metavar="Q", type=click.Choice(list(QUERIES)), default="q5", help="one of q0 to q22 (q5)")
    add_load_options(parser, rate=_RATE, duration=f"{_DURATION_S:g}")
    parser.add("--events", metavar="N", type=COUNT, help="end after so many events, instead of --duration")
    parser.add("--seed", metavar="N", type=int, default=0, help="seed of the random events (0)")
    parser.add(
        "--skew",
        metavar="MS",
        type=int,
        default=0,
        help="events are up to so many milliseconds before their turn (0)",
    )


def _build(options: SimpleNamespace) -> Built:
    if options.events is not None and options.duration is not None:
        raise FlowError("--events and --duration both say when to end; give one of them")
    rate = options.rate or _RATE
    paced = rate != "max"
    duration = _DURATION_S if options.duration is None and options.events is None else options.duration
    events = Events(options.seed, rate=rate if paced else RATE, skew_ms=options.skew)
    source = Generator(events, rate if paced else None, limit=options.events, duration_s=duration or None)
    some = Collect()

    def results(status: JobStatus, ran: float) -> Iterable[str]:
        yield from told(status, ran, "results", f"results of {options.query}")
        for result in some.records()[-SHOWN:]:
            yield f"  {result}"

    if options.events is not None:
        ends = f"{options.events:,} events"
    else:
        ends = f"for {duration:g} s" if duration else "until you stop it with Ctrl-C"
    return Built(
        topology(source, options.query, Few(some), skew_ms=options.skew, name=options.name),
        f"{options.query}, {_about(options.query)}, {ends}, {described_rate(rate)}",
        results,
        ("penstock run nexmark --query q4 --rate max --events 200000", "penstock explain nexmark --query q7"),
    )


APP = App("nexmark", "the Nexmark benchmark: 23 queries about an auction site", _add_options, _build)
