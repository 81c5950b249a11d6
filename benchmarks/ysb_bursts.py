"""The Yahoo benchmark under two bursts (docs/papers.md: D7): queue, delay and paradigm over time, side by side.

Calm, burst, calm, burst, calm; the same events for all contestants, which take turns. The calm after a burst is long
enough for the slowest to work it off and come back to records:

- the bridge on, deciding by what it measures;
- the bridge on "as the paper sets it": K = 0.2 by hand, and nobody asks whether the switch pays;
- the bridge off;
- Spark Structured Streaming.

The job has one worker, so that a burst can be more than the record tasks take while Spark has a core to run beside
them; Spark has two cores in all contestants. A short run finds out what the record tasks take; the burst is so much
above it that by Eq. 6 and 7 its queue passes the paper's L_up when half of the burst has passed.

*Waiting* are events that are due and whose results have not come back from the record tasks' first chain or from
Spark, whether they are still in the source, in a queue, or in a micro-batch under way. The queue is back to normal
when no more wait than come in two seconds of calm, and stay so until the load changes. Delays: see ysb_load.py.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise, takewhile
from typing import Any

import numpy as np

from benchmarks import ysb_job, ysb_stream
from benchmarks.common import Bench, median
from benchmarks.ysb_job import CORES, Form, Sample
from benchmarks.ysb_load import NS, Load, Results, quantiles
from penstock.bridge.burst import BurstOptions, switch_length, thresholds
from penstock.bridge.cost import BatchCost, interval

AUTO, PAPER, OFF, STREAM = "bridge on", "bridge on, K = 0.2", "bridge off", "Structured Streaming"
K = 0.2
FORMS = {
    AUTO: Form(workers=1, dual="on"),
    PAPER: Form(workers=1, dual=f"on,k={K:g}"),
    OFF: Form(workers=1),
}
CALM = 5_000
_EVERY_S = 0.25
_NORMAL_S = 2.0
_SPARK = BatchCost(0.25, 400_000.0)  # about what it does on two cores; only to choose the burst

Point = tuple[float, float]


@dataclass(frozen=True)
class Peak:
    """What a switch to Spark does to the delay: by how much the p99 grows above what it was at the decision, and for
    how long it is above that. `switched_s`: from the decision until the last task gives its input to Spark."""

    height_ms: float
    length_s: float
    switched_s: float | None


@dataclass
class Story:
    """What one run did; all times in seconds since the start."""

    waiting: list[Point]
    delays: dict[str, list[Point]]  # p50 and p99 over the due times
    calm_ms: dict[str, float]  # p50 and p99 of the first calm step
    burst_ms: dict[str, float]  # and of the bursts
    recovered: list[float]  # seconds from each burst's end until the queue is back to normal
    in_time: list[bool]  # before the next burst
    paradigms: list[tuple[float, dict[str, str]]] = field(default_factory=list)
    first_answers: list[float | None] = field(default_factory=list)  # from each burst's begin to Spark's first answer
    back: list[float | None] = field(default_factory=list)  # from each burst's end to the record paradigm
    peaks: list[Peak] = field(default_factory=list)  # of the switches to Spark
    samples: list[dict[str, Any]] = field(default_factory=list)
    decision: tuple[str, dict[str, Any]] | None = None  # its reason and its figures

    def __str__(self) -> str:
        most = max(number for _, number in self.waiting)
        shown = ", ".join(f"{seconds:.1f} s" for seconds in self.recovered)
        answers = ", ".join("none" if at is None else f"{at:.1f} s" for at in self.first_answers)
        spark = f", Spark's first answers after {answers}" if self.first_answers else ""
        return f"at most {most:,.0f} wait, normal {shown} after the bursts{spark}"


def burst_rate(record_rate: float, seconds: float) -> float:
    """Events a second of which, after half of the burst, as many wait as the paper's L_up says."""
    options = BurstOptions()
    rate = record_rate
    for _ in range(50):
        gathered = interval(rate, _SPARK, longest_s=options.timing.interval_max_s)
        length = switch_length(rate, record_rate, _SPARK.rate, gathered, _SPARK.fixed_s, k=K)
        rate = record_rate + thresholds(length, options.delta)[0] / (seconds / 2)
    return round(rate, -4)


def bursts_of(load: Load) -> list[tuple[float, float, float]]:
    """(begin, end, begin of the next burst) of each; infinite when there is none."""
    found = [(begin, end) for begin, end, rate in load.times if rate > CALM]
    following = [begin for begin, _ in found[1:]] + [float("inf")]
    return [(begin, end, then) for (begin, end), then in zip(found, following, strict=True)]


def _story(load: Load, results: Results, waiting: list[Point]) -> Story:
    due, delay = results.delays()
    edges = np.arange(0.0, load.seconds + _EVERY_S, _EVERY_S)
    pieces = zip(edges.tolist(), pairwise(np.searchsorted(due, edges)), strict=False)
    bins = [(at, quantiles(delay[a:b])) for at, (a, b) in pieces if b > a]
    calm_end = load.times[0][1]
    hot = np.zeros(len(due), bool)
    recovered, in_time = [], []
    for begin, end, following in bursts_of(load):
        hot |= (due >= begin) & (due < end)
        upto = min(following, waiting[-1][0] + _EVERY_S)
        high = [at for at, number in waiting if end <= at < upto and number > _NORMAL_S * CALM]
        recovered.append(max(high) + _EVERY_S - end if high else 0.0)
        in_time.append(not high or max(high) + 2 * _EVERY_S < upto)
    return Story(
        waiting,
        {what: [(at, found[what]) for at, found in bins] for what in ("p50", "p99")},
        quantiles(delay[(due >= calm_end / 4) & (due < calm_end)]),
        quantiles(delay[hot]),
        recovered,
        in_time,
    )


def job(load: Load, form: Form) -> Story:
    """A Penstock job under the load."""
    run = ysb_job.play(load, form, every_s=_EVERY_S)
    samples = [sample for sample in run.samples if sample.status["state"] in ("RUNNING", "STOPPING")]
    events = load.events
    due = [min(load.number, events.count_due(int(sample.at * NS))) for sample in samples]
    waiting = [(sample.at, max(0.0, n - sample.done)) for sample, n in zip(samples, due, strict=True)]
    story = _story(load, run.results, waiting)
    story.paradigms = [(sample.at, sample.paradigms()) for sample in samples]
    story.samples = [
        {
            "at": sample.at,
            "waiting": number,
            "in_spark": sample.in_spark,
            "ranges": [one.plain() for one in sample.ranges],
            "operators": {
                name: {what: operator[what] for what in ("queued", "busy", "latency_ms")}
                for name, operator in sample.status.plain()["operators"].items()
            },
        }
        for sample, (_, number) in zip(samples, waiting, strict=True)
    ]
    if form.dual == "off":
        return story
    for begin, end, following in bursts_of(load):
        before = max((sample.in_spark for sample in samples if sample.at < begin), default=0)
        answered = [sample.at for sample in samples if begin <= sample.at < following and sample.in_spark > before]
        story.first_answers.append(answered[0] - begin if answered else None)
        if answered:
            since = max(end, answered[0])
            back = [sample.at for sample in samples if since <= sample.at < following and _is_record(sample)]
            story.back.append(back[0] - end if back else None)
        story.peaks += _peaks(story.delays["p99"], samples, begin, following)
    story.decision = _decision([one for sample in samples if sample.at >= load.times[0][1] for one in sample.ranges])
    return story


def _peaks(p99: list[Point], samples: list[Sample], begin: float, following: float) -> list[Peak]:
    """The peak of the first switch to Spark between two times."""
    switches = [
        (sample.at, one)
        for sample in samples
        if begin <= sample.at < following
        for one in sample.ranges
        if one["state"] in ("SWITCHING", "OPERATION")
    ]
    if not switches:
        return []
    decided = switches[0][0]
    steps = [at - decided for at, one in switches if one["state"] == "OPERATION"]
    return [Peak(*peak_of(p99, decided), steps[0] if steps else None)]


def peak_of(p99: list[Point], decided: float) -> tuple[float, float]:
    """Height in ms and length in s of what is above the delay at a time, from then on until it is reached again."""
    before = max((delay for at, delay in p99 if decided - 2 * _EVERY_S <= at < decided), default=0.0)
    above = list(takewhile(lambda point: point[1] > before, (point for point in p99 if point[0] >= decided)))
    if not above:
        return 0.0, 0.0
    return max(delay for _, delay in above) - before, above[-1][0] + _EVERY_S - decided


def _decision(ranges: list[dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """The first that says yes or no to a switch, with its reason and figures; else that at the longest queue."""
    ranges = [one for one in ranges if one["state"] in ("RECORD", "PREPARING", "SWITCHING") and one["figures"]]
    decided = [one for one in ranges if one["reason"].startswith(("not switched", "burst"))]
    longest = sorted(ranges, key=lambda one: -float(one["figures"]["queue"]))
    one = next(iter(decided + longest), None)
    return None if one is None else (one["reason"], one["figures"])


def _is_record(sample: Sample) -> bool:
    return all(one["state"] == "RECORD" for one in sample.ranges)


def stream(load: Load) -> Story:
    """Structured Streaming under the same load."""
    run = ysb_stream.play(load)
    events = load.events
    ended = [batch.ended for batch in run.batches]
    done = [0, *accumulate(batch.rows for batch in run.batches)]
    waiting = []
    for at in np.arange(0.0, max(load.seconds, ended[-1]) + _EVERY_S, _EVERY_S).tolist():
        due = min(load.number, events.count_due(int(at * NS)))
        waiting.append((at, max(0.0, float(due - done[bisect_right(ended, at)]))))
    return _story(load, run.results, waiting)


# --- what is shown -------------------------------------------------------------------------------------------------


def _figures(load: Load, story: Story) -> dict[str, tuple[float, str]]:
    """Name -> figure and unit, of what every contestant has."""
    found = {"most that wait": (max(number for _, number in story.waiting), "events")}
    for (_, end, _), seconds in zip(bursts_of(load), story.recovered, strict=True):
        found[f"end of a burst, at {end:g} s, to a normal queue"] = seconds, "s"
    for what in ("p50", "p99"):
        found[f"{what} delay when calm"] = story.calm_ms[what], "ms"
        found[f"{what} delay in the bursts"] = story.burst_ms[what], "ms"
    return found


def _cases(bench: Bench, load: Load, results: dict[str, list[Story]], peer: str) -> None:
    config = {**{who: str(form) for who, form in FORMS.items()}, STREAM: f"{CORES} cores, default trigger"}
    figures = {who: [_figures(load, story) for story in stories] for who, stories in results.items()}
    for who, stories in results.items():
        late = "" if all(map(all, (story.in_time for story in stories))) else "not before the load changed again"
        for name, (_, unit) in figures[who][0].items():
            runs, theirs = ([found[name][0] for found in figures[one]] for one in (who, peer))
            beside: dict[str, Any] = {}
            if who != peer:
                beside = {"peer": peer, "peer_runs": theirs, "peer_figure": median(theirs), "peer_config": config[peer]}
            note = late if late and "normal queue" in name else None
            bench.case(f"{who}: {name}", median(runs), unit, config=config[who], note=note, runs=runs, **beside)
        if who in FORMS and FORMS[who].dual != "off":
            _spark_cases(bench, who, stories, config[who])


def _spark_cases(bench: Bench, who: str, stories: list[Story], config: str) -> None:
    answers = [at for story in stories for at in story.first_answers]
    came = [at for at in answers if at is not None]
    bench.case(f"{who}: bursts that went to Spark", len(came), f"of {len(answers)} bursts", config=config)
    if came:
        name = f"{who}: begin of a burst to Spark's first answer"
        bench.case(name, median(came), "s", goal="<= 4", config=config, runs=came)
        for number in range(max(len(story.peaks) for story in stories)):
            peaks = [story.peaks[number] for story in stories if number < len(story.peaks)]
            heights, lengths = [peak.height_ms for peak in peaks], [peak.length_s for peak in peaks]
            steps = [peak.switched_s for peak in peaks if peak.switched_s is not None]
            which = f"{who}: switch {number + 1} to Spark"
            bench.case(
                f"{which}: height of the peak of the p99 delay", median(heights), "ms", config=config, runs=heights
            )
            bench.case(f"{which}: length of this peak", median(lengths), "s", config=config, runs=lengths)
            if steps:
                bench.case(f"{which}: decision to last task", median(steps), "s", goal="< 1", config=config, runs=steps)
        back = [at for story in stories for at in story.back]
        returned = [at for at in back if at is not None]
        goal = f">= {len(came)}"
        bench.case(f"{who}: bursts after which records came back", len(returned), "bursts", goal=goal, config=config)
        if returned:
            name = f"{who}: end of a burst to the record paradigm"
            bench.case(name, median(returned), "s", config=config, runs=returned)
    decision = next((story.decision for story in stories if story.decision is not None), None)
    if decision is not None:
        reason, figures = decision
        bench.case(
            f"{who}: Spark's capacity by what was known, beside the record tasks'",
            figures["operation_capacity"] or 0.0,
            "events/s",
            peer="record tasks",
            peer_figure=figures["record_rate"],
            config=config,
            note=reason,
        )


def _plot(bench: Bench, load: Load, stories: dict[str, Story]) -> None:
    if (plt := bench.pyplot("ysb_bursts.png")) is None:
        return
    operators = next(list(story.paradigms[0][1]) for story in stories.values() if story.paradigms)
    last = max(load.seconds, *(story.waiting[-1][0] for story in stories.values()))
    figure, rows = plt.subplots(
        3, len(stories), figsize=(4.2 * len(stories), 9), sharex=True, sharey="row", squeeze=False
    )
    for (who, story), (queue, delay, paradigm) in zip(stories.items(), rows.T, strict=True):
        for begin, end, _ in bursts_of(load):
            for axes in (queue, delay, paradigm):
                axes.axvspan(begin, end, color="orange", alpha=0.15)
        queue.plot(*zip(*story.waiting, strict=True))
        queue.set(title=who, ylabel="events waiting" if queue is rows[0][0] else "", yscale="symlog")
        for what, points in story.delays.items():
            delay.plot(*zip(*points, strict=True), label=what)
        delay.set(ylabel="ms from due to result" if delay is rows[1][0] else "", yscale="log")
        delay.legend()
        everything = dict.fromkeys(operators, "operation")  # where no status says otherwise
        seen = story.paradigms or [(at, everything) for at, _ in story.waiting]
        times = [at for at, _ in seen]
        spark = [[float(now[name] == "operation") for _, now in seen] for name in operators]
        paradigm.pcolormesh(
            times, range(len(operators)), spark, vmin=0, vmax=1, cmap="coolwarm", shading="nearest", alpha=0.5
        )
        paradigm.set(xlabel="s since the start", xlim=(0, last))
        paradigm.set_yticks(range(len(operators)), operators)
        paradigm.set_ylim(len(operators) - 0.5, -0.5)
        for axes in (queue, delay):
            axes.grid(visible=True, alpha=0.3)
    figure.suptitle(f"Yahoo benchmark, {load.steps}\nbelow: blue as records, red in micro-batches", fontsize=10)
    figure.tight_layout()
    figure.savefig(bench.path("ysb_bursts.png"), dpi=110)
    plt.close(figure)


def run(bench: Bench) -> None:
    """See the module."""
    calm_s, burst_s, after_s = bench.pick((20, 15, 45), (1, 1, 1))
    short = Load("20000:600s", paced=False, limit=bench.pick(2_000_000, 400_000))
    taken = ysb_job.play(short, FORMS[OFF]).results
    record_rate = short.number / taken.seconds
    rate = bench.pick(burst_rate(record_rate, burst_s), 20_000.0)
    bench.say(f"the record tasks take {record_rate:,.0f} events/s; a burst has {rate:,.0f}/s")
    calm, burst, after = f"{CALM}:{calm_s}s", f"{rate:.0f}:{burst_s}s", f"{CALM}:{after_s}s"
    load = Load(",".join([calm, burst, after, burst, after]))
    contestants: dict[str, Callable[[], Story]] = {who: partial(job, load, form) for who, form in FORMS.items()}
    contestants[STREAM] = partial(stream, load)
    if bench.quick:
        contestants = {OFF: contestants[OFF]}
    results = bench.take_turns(contestants, runs=max(1, bench.runs // 2))
    bench.case("what one worker takes", record_rate, "events/s", config=str(FORMS[OFF]))
    bench.case("the bursts", rate, "events/s", note=load.steps)
    _cases(bench, load, results, OFF)
    _plot(bench, load, {who: stories[-1] for who, stories in results.items()})
    with bench.path("ysb_bursts-samples.jsonl").open("w") as file:
        for who, stories in results.items():
            for number, story in enumerate(stories):
                for sample in story.samples:
                    file.write(json.dumps({"contestant": who, "run": number, **sample}) + "\n")
