"""The Yahoo streaming benchmark (docs/papers.md: D7): how often is each campaign's advertising seen in ten seconds?

    receive -> parse -> filter -> project -> join -> watermark -> (by campaign) -> count -> store

Lines of JSON are parsed, views kept, of which only (ad_id, event_time) matter; each gets its campaign from a static
table, and campaigns are counted in windows of event time. Every step is an operator of its own, as the paper's table
has them. `ysb_events.py` makes the events.

The store keeps rows (campaign_id, window_start, seen_count, time_updated), like the hashes that the benchmark has in
Redis. It can be the benchmark's own, which takes what has changed once a second, so that a perfect engine shows a
median of 500 ms after the window's end; or one that stamps each result as it is emitted, which shows the engine alone.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from penstock.apps.app import App, Built, add_load_options, described_rate, rate_option
from penstock.apps.command_line import COUNT, SECONDS, Options
from penstock.apps.ysb_events import LATE_MS, LATE_SHARE, RATE, SKEW_MS, START_MS, Events, EventSource
from penstock.runtime.errors import FlowError, PenstockError
from penstock.runtime.event_time.windows import Tumbling
from penstock.runtime.expressions import col
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Collect, Sink, SinkCommitter, SinkContext, SinkWriter
from penstock.runtime.sources import Source, parse_rate
from penstock.runtime.status import JobStatus

WINDOW_MS = 10_000
BURST = "5000:10s,60000:10s,5000:20s"
_RATE = "5000"
_DURATION_S = 30.0
_LEAD_MS = 3_000  # from the command to the first event, at least: the job starts meanwhile

Row = tuple[str, int, int, int]
"""(campaign_id, window_start, seen_count, time_updated), the times in milliseconds since 1970."""

Counts = dict[tuple[str, int], int]
"""(campaign_id, window_start) -> views."""


# --- the topology ----------------------------------------------------------------------------------------------


# Of the seven fields of an event, those that anything comes of: an expression decodes no others.
PARSED = [col("value").json(name).alias(name) for name in ("ad_id", "event_type", "event_time")]
IS_VIEW = col("event_type") == "view"
PROJECTED = [col("ad_id"), col("event_time").cast("bigint").alias("event_time")]


def topology(
    source: Source,
    campaigns: Iterable[Mapping[str, str]],
    sink: Sink,
    *,
    updates: bool = False,
    name: str = "ysb",
) -> Flow:
    """Builds the flow: lines go in, and (campaign_id, start, end, views) comes out. A count leaves when its window has
    ended, and again when a late event changes it. With `updates`, it leaves whenever it has changed."""
    flow = Flow(name)
    (
        flow.read(source, name="receive")
        .select(*PARSED, name="parse")
        .filter(IS_VIEW, name="filter")
        .select(*PROJECTED, name="project")
        .lookup(campaigns, on="ad_id", name="join")
        .watermark("event_time", out_of_orderness_s=2 * SKEW_MS / 1000, name="watermark")
        .key_by("campaign_id")
        .window(Tumbling(WINDOW_MS / 1000), lateness_s=LATE_MS / 1000)
        .count(emit="latest" if updates else "final", name="count")
        .write(sink, name="store")
    )
    return flow


# --- the store -------------------------------------------------------------------------------------------------


class Store(Sink):
    """Passes counts as rows to another sink, stamped with the time at which they leave.

    `every_s`: rows leave so long after the last ones, of each window that has changed the newest; 0: each count at
    once. A row replaces the earlier one of its campaign and window, so writing one again does no harm. `clock`: seconds
    since 1970, for tests.

    Rows leave when results come, or the task falls idle; without either they wait. The tasks' turns are spread over
    `every_s`, and drift slowly as the benchmark's do: in a run of minutes a median says more about that than about the
    engine, which is what 0 is for.
    """

    def __init__(self, sink: Sink, every_s: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        self.sink = sink
        self.every_s = every_s
        self.clock = clock
        self.channel = sink.channel
        self.prints = sink.prints
        self.guarantee = "idempotent" if sink.guarantee == "at least once" else sink.guarantee
        self.takes_back = sink.takes_back
        self.commit_interval_s = sink.commit_interval_s
        self.patience_s = sink.patience_s

    def bind(self, fetch: Callable[[], list[Any]]) -> None:
        self.sink.bind(fetch)

    def check(self) -> None:
        self.sink.check()

    def committer(self, context: SinkContext) -> SinkCommitter | None:
        return self.sink.committer(context)

    def writer(self, context: SinkContext) -> SinkWriter:
        first_s = self.every_s * (context.index + 1) / context.parallelism
        return _StoreWriter(self.sink.writer(context), self.every_s, first_s, self.clock)

    def describe(self) -> str:
        how = f"every {self.every_s:g} s" if self.every_s else "as they are emitted"
        return f"rows {how} to {self.sink.describe()}"


class _StoreWriter(SinkWriter):
    def __init__(self, writer: SinkWriter, every_s: float, first_s: float, clock: Callable[[], float]) -> None:
        self._writer = writer
        self._every_s = every_s
        self._clock = clock
        self._changed: Counts = {}
        self._next = clock() + first_s

    def write(self, records: list[Any]) -> None:
        if self._every_s:
            self._changed.update(((campaign, start), views) for campaign, start, _, views in records)
            self._write_if_due()
        else:
            now = int(self._clock() * 1000)
            self._writer.write([(campaign, start, views, now) for campaign, start, _, views in records])

    def flush(self) -> None:
        self._write_if_due()
        self._writer.flush()

    def finish(self) -> None:
        self._write_changed()
        self._writer.finish()

    def _write_if_due(self) -> None:
        if self._every_s and (now := self._clock()) >= self._next:
            self._write_changed()
            self._next = now + self._every_s

    def _write_changed(self) -> None:
        now = int(self._clock() * 1000)
        if self._changed:
            self._writer.write([(campaign, start, views, now) for (campaign, start), views in self._changed.items()])
            self._changed = {}

    def prepare(self, epoch: int) -> Any:
        return self._writer.prepare(epoch)

    def state(self) -> Any:
        return self._writer.state(), list(self._changed.items())

    def committed(self, epoch: int) -> None:
        self._writer.committed(epoch)

    def restore(self, epoch: int, states: list[Any]) -> None:
        self._writer.restore(epoch, [inner for inner, _ in states if inner is not None])
        for _, changed in states:
            self._changed.update(changed)

    def close(self, failed: bool) -> None:
        self._writer.close(failed)


# --- what the rows say -----------------------------------------------------------------------------------------


def stored(rows: Iterable[Row]) -> Counts:
    """Returns the content of the store after all these rows have been written in order."""
    return {(campaign, start): views for campaign, start, views, _ in rows}


def latencies(rows: Sequence[Row], *, first: bool, since_ms: float = 0.0) -> list[int]:
    """Returns, sorted, how many milliseconds after its window's end each count was written, which is time_updated -
    window_start - 10,000. Leaves out windows that began before `since_ms`, and windows that the end of the input has
    closed early. With `first`, the first write of a count is taken; otherwise, as in the benchmark, the last write,
    which may be for an event that came late."""
    times: dict[tuple[str, int], int] = {}
    for campaign, start, _, updated in reversed(rows) if first else rows:
        if start < since_ms:
            continue
        times[campaign, start] = updated - start - WINDOW_MS
    return sorted(ms for ms in times.values() if ms >= 0)


def recount(events: Events, number: int) -> Counter[tuple[str, int]]:
    """Computes the right counts of the first events by a loop that shares no code with the topology."""
    campaign_of = {row["ad_id"]: row["campaign_id"] for row in events.campaigns()}
    counts: Counter[tuple[str, int]] = Counter()
    for first in range(0, number, 4096):
        for line in events.events(first, min(4096, number - first)):
            event = json.loads(line)
            if event["event_type"] == "view":
                ms = int(event["event_time"])
                counts[campaign_of[event["ad_id"]], ms - ms % WINDOW_MS] += 1
    return counts


def compared(counts: Counts, right: Mapping[tuple[str, int], int], number: int) -> str:
    """Returns one line that says that the counts are right, or raises PenstockError."""
    wrong = sorted(key for key in counts.keys() | right.keys() if counts.get(key, 0) != right.get(key, 0))
    if wrong:
        campaign, start = wrong[0]
        raise PenstockError(
            f"check: {len(wrong):,} of {len(right):,} counts differ from those of a plain loop over the same "
            f"{number:,} events; the first: campaign {campaign}, window {start}: {counts.get((campaign, start), 0):,}, "
            f"and {right.get((campaign, start), 0):,} would be right"
        )
    return f"check: all {len(right):,} counts equal those of a plain loop over the same {number:,} events"


# --- the command -----------------------------------------------------------------------------------------------


def _add_options(parser: Options) -> None:
    add_load_options(parser, rate=_RATE, duration=f"{_DURATION_S:g}, and with --burst its steps once")
    parser.add(
        "--burst",
        metavar="STEPS",
        is_flag=False,
        flag_value=BURST,
        type=rate_option,
        help=f"a burst: these steps of the rate, once ({BURST})",
    )
    parser.add("--events", metavar="N", type=COUNT, help="end after so many events, instead of --duration")
    parser.add("--seed", metavar="N", type=int, default=0, help="seed of the random events (0)")
    parser.add(
        "--no-skew skew",
        is_flag=True,
        flag_value=False,
        default=True,
        help=f"events in order; without it they are up to {SKEW_MS} ms early or late, and 1 in "
        f"{1 / LATE_SHARE:,.0f} up to {LATE_MS // 1000} s late",
    )
    parser.add(
        "--store-every",
        metavar="S",
        type=SECONDS,
        default=0.0,
        help="write results to the store every S seconds (the published runs: 1); 0: as soon as they are emitted (0)",
    )
    parser.add("--check", is_flag=True, help="at the end, count the same events again and compare the results")


def _build(options: SimpleNamespace) -> Built:
    if options.rate is not None and options.burst is not None:
        raise FlowError("--rate and --burst both say how fast; give one of them")
    if options.events is not None and options.duration is not None:
        raise FlowError("--events and --duration both say when to end; give one of them")
    paced = options.rate != "max"
    rate = options.burst or options.rate or _RATE
    duration = options.duration
    if duration is None and options.events is None:
        duration = _DURATION_S if options.burst is None else _once(options.burst)
    now = time.time() * 1000
    # A paced job begins with a window, so that the counts of two runs can be compared.
    start_ms = int(-(-(now + _LEAD_MS) // WINDOW_MS) * WINDOW_MS) if paced else START_MS
    events = Events(
        options.seed,
        rate=rate if paced else RATE,
        start_ms=start_ms,
        skew=options.skew,
        late_share=LATE_SHARE if options.skew else 0.0,
    )
    source = EventSource(events, limit=options.events, duration_s=duration or None, paced=paced)
    rows = Collect()
    flow = topology(
        source,
        events.campaigns(),
        Store(rows, options.store_every),
        updates=options.store_every > 0,
        name=options.name,
    )

    def results(status: JobStatus, ran: float) -> Iterable[str]:
        yield from _results(status, rows.records(), source, options)

    ends = "until you stop it with Ctrl-C" if source.limit is None else f"{source.limit:,} events"
    begins = f", from the next window on, in {(start_ms - now) / 1000:.0f} s" if paced else ""
    return Built(
        flow,
        f"views of each campaign in {WINDOW_MS // 1000} s, {ends}, {described_rate(rate)}{begins}",
        results,
        ("penstock run ysb --burst --check", "penstock run ysb --rate max --check", "penstock explain ysb"),
    )


def _once(steps: str) -> float:
    """Returns the total number of seconds of these steps."""
    times = [time for _, time in parse_rate(steps)]
    if None in times:
        raise FlowError(f"--burst {steps}: its last step holds for ever; give it a time, or give --duration")
    return sum(time for time in times if time is not None)


def _latency(status: JobStatus, rows: list[Row], source: EventSource, options: SimpleNamespace) -> str:
    """Returns the line about the latency of the windows that began while the job ran. Events that were due earlier
    waited for Ray to start, and this wait does not measure the engine."""
    if not source.paced:
        return "latency: none, as the events' times are not the clock's at --rate max"
    ran_from_ms = status.started_ms + (status.uptime_s - status.running_s) * 1000
    late_s = (ran_from_ms - source.events.start_ms) / 1000
    if found := latencies(rows, first=not options.store_every, since_ms=ran_from_ms):
        p50, p99 = (found[min(len(found) - 1, int(len(found) * q))] for q in (0.5, 0.99))
        line = f"latency after the window's end: p50 {p50:,} ms, p99 {p99:,} ms, of {len(found):,} counts"
        if late_s > 0:
            line += f", without the windows that began before the job ran, {late_s:.1f} s after its schedule"
        return line
    if late_s > 0:
        return (
            f"latency: none, as the job ran only {late_s:.1f} s after its schedule had begun, and no window that began "
            "later has ended; a longer --duration has some, or start Ray beforehand (ray start --head)"
        )
    return "latency: none, as no window has ended"


def _results(status: JobStatus, rows: list[Row], source: EventSource, options: SimpleNamespace) -> Iterable[str]:
    counts = stored(rows)
    seen, joined = sum(counts.values()), status.operators["join"].records_out
    read = status.records_read
    yield f"{len(counts):,} counts of {len({start for _, start in counts}):,} windows"
    yield f"{read:,} events, {joined:,} views"
    yield _latency(status, rows, source, options)
    yield f"{joined - seen:,} views came too late for their window"
    if options.check:
        if source.limit is None or read < source.limit:
            yield "check: left out, as the job was stopped before its end"
        else:
            yield compared(counts, recount(source.events, read), read)


APP = App("ysb", "the Yahoo streaming benchmark: views of campaigns, in windows", _add_options, _build)
