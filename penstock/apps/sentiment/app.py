"""The sentiment analysis for the `penstock` command (docs/papers.md: A10), of generated tweets or a file of them.

A file has a JSON object in each line, with "number", "time_ms" and "text", in the order of their times. The flow is in
`topology.py`, and what a run finds must be the same for every number of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import click
import msgspec

from penstock.apps.app import App, Built, above_zero_or_max, add_load_options, described_rate, packaged
from penstock.apps.command_line import COUNT, SECONDS, Options
from penstock.apps.few import Few, told
from penstock.apps.sentiment.topology import WINDOW_S, topology
from penstock.apps.sentiment.tweets import ENGLISH_SHARE, RATE, Tweet, Tweets
from penstock.runtime.errors import FlowError
from penstock.runtime.sinks import Collect, Null
from penstock.runtime.sources import Generator, Source, TextFiles
from penstock.runtime.status import JobStatus

_RATE = "500"
_DURATION_S = 10.0


class _Line(msgspec.Struct):
    """A line of a file of tweets."""

    number: int
    time_ms: int
    text: str


_decode = msgspec.json.Decoder(_Line).decode


def parse(line: str) -> Tweet:
    """Returns the tweet of a line of a file."""
    try:
        tweet = _decode(line)
    except msgspec.MsgspecError as error:
        raise ValueError(
            'a line of tweets is {"number": 1, "time_ms": 1700000000000, "text": "..."}; this one is '
            f"{line[:200]!r}: {error}"
        ) from None
    return tweet.number, tweet.time_ms, tweet.text


def _add_options(parser: Options) -> None:
    add_load_options(parser, rate=_RATE, duration=f"{_DURATION_S:g}")
    parser.add("--tweets", metavar="N", type=COUNT, help="end after so many tweets, instead of --duration")
    parser.add("--seed", metavar="N", type=int, default=0, help="seed of the random tweets (0)")
    parser.add("--sample", is_flag=True, help="read the small file that is part of the package")
    parser.add("--input", metavar="FILE", help="read tweets from this file, a JSON object in each line")
    parser.add("--window", metavar="S", type=SECONDS, default=WINDOW_S, help=f"seconds of each summary ({WINDOW_S:g})")
    parser.add(
        "--lateness",
        metavar="S",
        type=SECONDS,
        default=0.0,
        help="seconds by which lines of a file may be out of order (0)",
    )
    parser.add(
        "--shuffled",
        is_flag=True,
        help="distribute all records anew between any two steps, as in the paper; without it neighbours run as one",
    )


def _build(options: SimpleNamespace) -> Built:
    if options.sample and options.input is not None:
        raise FlowError("--sample reads the file of the package; leave out --input")
    if not options.window:
        raise FlowError("--window must be above 0 seconds")
    path = str(packaged("sentiment_tweets.jsonl")) if options.sample else options.input
    if path is None:
        source, about = _generated(options)
    else:
        if options.rate is not None or options.duration is not None or options.tweets is not None:
            raise FlowError("--rate, --duration and --tweets are for generated tweets; a file is read to its end")
        source = TextFiles(path, parallel=False)
        about = "the tweets of the package" if options.sample else f"the tweets of {path}"
    shown = Collect()
    flow = topology(
        source,
        Null(),
        Few(shown),
        window_s=options.window,
        lateness_s=options.lateness,
        shuffled=options.shuffled,
        parse=None if path is None else parse,
        name=options.name,
    )

    def results(status: JobStatus, ran: float) -> Iterable[str]:
        yield from told(status, ran, "results", "opinions")
        for attribute, start, end, mean in sorted(shown.records(), key=lambda one: (one[1], one[0])):
            opinions = mean["opinions"]
            yield f"  {attribute} from {start} to {end}: {mean['score']:+.2f} on average of {opinions:,} opinions"

    return Built(
        flow,
        f"what {about} say about the attributes of products",
        results,
        (
            "penstock run sentiment --sample",
            "penstock run sentiment --rate max --tweets 20000",
            "penstock explain sentiment",
        ),
    )


def _generated(options: SimpleNamespace) -> tuple[Source, str]:
    if options.tweets is not None and options.duration is not None:
        raise FlowError("--tweets and --duration both say when to end; give one of them")
    rate = options.rate or _RATE
    duration = _DURATION_S if options.duration is None and options.tweets is None else options.duration
    try:
        event_rate = above_zero_or_max("rate")(rate) or RATE
    except click.BadParameter:
        raise FlowError(f"--rate {rate}: the times of tweets follow one rate; give a number, or max") from None
    tweets = Tweets(options.seed, rate=event_rate)
    source = Generator(tweets, None if rate == "max" else rate, limit=options.tweets, duration_s=duration or None)
    if options.tweets is not None:
        ends = f"{options.tweets:,} generated tweets"
    else:
        ends = f"generated tweets for {duration:g} s" if duration else "generated tweets until you stop it with Ctrl-C"
    return source, f"{ends}, {ENGLISH_SHARE:.0%} of them in English, {described_rate(rate)},"


APP = App(
    "sentiment",
    "sentiment analysis: sixteen steps from tweets to opinions about the attributes of products",
    _add_options,
    _build,
)
