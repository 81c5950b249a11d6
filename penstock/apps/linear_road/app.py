"""Linear Road for the `penstock` command (docs/papers.md: A10): answers to the cars of expressways, within 5 seconds.

The flow is in `topology.py`, and what a run answers must be the same for every number of tasks. In generated traffic
each second comes at its time, by the clock and a factor, so that the delay of an answer can be told: the time from the
second in which the car has reported or asked. Files have the format of the benchmark, and are read at once.
"""

from __future__ import annotations

import glob
import time
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import click

from penstock.apps.app import App, Built, above_zero_or_max, packaged
from penstock.apps.command_line import COUNT, SECONDS, Options
from penstock.apps.few import SHOWN, Few
from penstock.apps.latest import Latest
from penstock.apps.linear_road.source import TrafficSource
from penstock.apps.linear_road.topology import TOLL, Answer, topology
from penstock.apps.linear_road.traffic import DURATION_S, PACES, History, Traffic, parse
from penstock.runtime.errors import FlowError
from penstock.runtime.program.flow import Stream
from penstock.runtime.sinks import Collect, Sink
from penstock.runtime.sources import Source, TextFiles
from penstock.runtime.status import JobStatus

LIMIT_S = 5.0  # within which the benchmark wants its answers
UNKNOWN = -1

_SECONDS, _SPEED, _PACE = 600, 30.0, "slow"  # twenty seconds with tolls and accidents
_LEAD_MS = 3_000  # from the command to second 0: the job starts meanwhile
_EARLY_S = 60  # for so long the delays of each second are kept apart

Delay = tuple[str, int, int]
"""(kind of answer, its delay in milliseconds or UNKNOWN, after how many seconds it was due, 60 at most)."""


class Delays:
    """Says for each answer how late it is. `clock`: seconds since 1970, for tests."""

    def __init__(self, speed: float | None, start_ms: float, clock: Any = time.time) -> None:
        self.speed = speed
        self.start_ms = start_ms
        self.clock = clock

    def __call__(self, answer: Answer) -> Delay:
        kind = f"{answer[0]} above 0" if answer[0] == TOLL and answer[4] else answer[0]
        if self.speed is None:
            return kind, UNKNOWN, 0
        due_s = answer[2] / self.speed
        # Rounded up, so that no delay is told as less than it was.
        delay_ms = -int((self.start_ms + due_s * 1000 - self.clock() * 1000) // 1)
        return kind, max(0, delay_ms), min(int(due_s), _EARLY_S)


class Histogram:
    """Adds the operators that count the answers by their kinds and delays."""

    def __init__(self, delays: Delays, sink: Sink) -> None:
        self.delays = delays
        self.sink = sink

    def __call__(self, answers: Stream) -> None:
        counted = answers.map(self.delays, name="delays").key_by(_itself).count(name="counts")
        counted.write(Latest(self.sink), name="histogram")


def _itself(delay: Delay) -> Delay:
    return delay


def about_delays(found: Iterable[tuple[Delay, int]], ran_s: float) -> Iterable[str]:
    """Makes the lines about the delays. `ran_s`: so long after second 0 the job began to run. Answers that were due
    before then are left out, because their delay says nothing of the engine."""
    delays: Counter[int] = Counter()
    for (_, delay_ms, due_s), number in found:
        if delay_ms != UNKNOWN and due_s + 1 > ran_s:
            delays[delay_ms] += number
    total = delays.total()
    if not total:
        yield "delay of answers: unknown, as the records were read as fast as possible"
        return
    p50, p99 = (_quantile(delays, share) for share in (0.5, 0.99))
    late = sum(number for delay_ms, number in delays.items() if delay_ms > LIMIT_S * 1000)
    yield f"delay of answers: p50 {p50:,} ms, p99 {p99:,} ms, max {max(delays):,} ms, of {total:,}"
    yield f"{late:,} answers were later than {LIMIT_S:g} s"
    if ran_s > 0:
        yield f"answers that were due before the job ran, {ran_s:.1f} s after its schedule, are left out of these"


def _quantile(delays: Counter[int], share: float) -> int:
    """Returns the delay that this share of all answers does not exceed."""
    left = share * delays.total()
    for delay_ms in sorted(delays):
        left -= delays[delay_ms]
        if left <= 0:
            return delay_ms
    return max(delays)


def _add_options(parser: Options) -> None:
    parser.add("--xways", metavar="N", type=COUNT, default=1, help="number of expressways (1)")
    parser.add(
        "--seconds",
        metavar="S",
        type=COUNT,
        default=_SECONDS,
        help=f"seconds of traffic ({_SECONDS}); the benchmark has {DURATION_S}",
    )
    parser.add(
        "--speed",
        metavar="F",
        type=above_zero_or_max("speed"),
        default=_SPEED,
        help=f"seconds of traffic in a second, or 'max' ({_SPEED:g}); the benchmark has 1",
    )
    parser.add(
        "--pace",
        type=click.Choice(sorted(PACES)),
        default=_PACE,
        help=f"of the traffic ({_PACE}); the benchmark has default",
    )
    parser.add("--seed", metavar="N", type=int, default=0, help="seed of the random traffic (0)")
    parser.add("--sample", is_flag=True, help="read the small file that is part of the package")
    parser.add(
        "--input", metavar="GLOB", help="read files of the benchmark's format, each of which is in order of time"
    )
    parser.add(
        "--lateness",
        metavar="S",
        type=SECONDS,
        default=0.0,
        help="seconds by which lines of files may be out of order (0)",
    )


def _build(options: SimpleNamespace) -> Built:
    if options.sample and options.input is not None:
        raise FlowError("--sample reads the file of the package; leave out --input")
    pattern = str(packaged("linear_road.dat")) if options.sample else options.input
    files = 1
    speed, start_ms = None, 0.0
    source: Source
    if pattern is not None:
        files = len(glob.glob(pattern, recursive=True))
        if not files:
            raise FlowError(f"--input {pattern}: there is no such file")
        source = TextFiles(pattern, parallel=False)
        about = "the records of the package" if options.sample else f"the records of {pattern}"
    else:
        speed = options.speed
        start_ms = time.time() * 1000 + _LEAD_MS
        traffic = Traffic(options.seed, xways=options.xways, seconds=options.seconds, pace=options.pace)
        source = TrafficSource(traffic, speed=speed, start_ms=start_ms)
        pace = "as fast as possible" if speed is None else f"at {speed:g} times the speed of the clock"
        about = f"{options.seconds:,} s of traffic ({options.pace}) on {options.xways} expressways, {pace}"
    some, counted = Collect(), Collect()
    flow = topology(
        source,
        Few(some),
        History(options.seed),
        lateness_s=options.lateness,
        parse=None if pattern is None else parse,
        files=files,
        stamp=Histogram(Delays(speed, start_ms), counted),
        name=options.name,
    )

    def results(status: JobStatus, ran: float) -> Iterable[str]:
        found: list[tuple[Delay, int]] = counted.records()
        kinds: Counter[str] = Counter()
        for (kind, _, _), number in found:
            kinds[kind] += number
        yield f"{kinds.total():,} answers, {kinds.total() / ran if ran else 0.0:,.0f} a second"
        yield ", ".join(f"{kind}: {number:,}" for kind, number in sorted(kinds.items()))
        began_ms = status.started_ms + (status.uptime_s - status.running_s) * 1000
        yield from about_delays(found, 0.0 if speed is None else (began_ms - start_ms) / 1000)
        for answer in some.records()[-SHOWN:]:
            yield f"  {answer}"

    return Built(
        flow,
        f"tolls, alerts and accounts for {about}",
        results,
        (
            "penstock run linear-road --sample",
            f"penstock run linear-road --speed 1 --pace default --seconds {DURATION_S}",
            "penstock explain linear-road",
        ),
    )


APP = App("linear-road", "the Linear Road benchmark: tolls and accidents of expressways", _add_options, _build)
