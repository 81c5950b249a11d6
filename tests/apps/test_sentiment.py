"""The sentiment analysis: it finds what the generated tweets are known to say, and its answers do not depend on tasks,
the order of arrival, failures and shuffles."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.apps import cli
from penstock.apps.app import packaged
from penstock.apps.sentiment import app, steps
from penstock.apps.sentiment.topology import topology
from penstock.apps.sentiment.tweets import TIME_MS, Tweet, Tweets
from penstock.runtime.errors import FlowError
from tests.apps.parsed import parsed

pytest.importorskip("textblob", reason="TextBlob is not installed (pip install 'penstock-streaming[sentiment]')")
pytest.importorskip("simplemma", reason="simplemma is not installed (pip install 'penstock-streaming[sentiment]')")

MADE = Tweets(7, rate=50)
TWEETS = list(map(MADE, range(600)))
SKEW_MS = 2_000
WINDOW_MS = 3_000


@cache
def analysis() -> list[Any]:
    """The steps, made once."""
    return [
        steps.Tokenise(),
        steps.TagPartsOfSpeech(),
        steps.custom_nouns,
        steps.complex_phrases,
        steps.negate,
        steps.BaseForms(),
        steps.SentimentWords(),
        steps.attributes,
        steps.normalise,
        steps.stop_words,
    ]


@cache
def ends() -> tuple[steps.Filter, steps.Sentences]:
    return steps.Filter(), steps.Sentences()


def opinions(tweet: Tweet) -> list[dict[str, Any]]:
    """The analysis of one tweet by itself, in a loop."""
    english, sentences = ends()
    found = []
    for passed in english(tweet):
        for sentence in sentences(passed):
            for step in analysis():
                sentence = step(sentence)  # noqa: PLW2901
            found += map(steps.as_html, steps.analyse(sentence))
    return found


def said(text: str) -> list[tuple[str, float]]:
    return [(opinion["attribute"], opinion["score"]) for opinion in opinions((0, 0, text))]


def test_nearly_all_tweets_are_understood() -> None:
    """The truth is known from how the tweets were made, not from the analysis."""
    right = 0
    for tweet in map(MADE, range(2_000)):
        found = [(opinion["attribute"], 1 if opinion["score"] > 0 else -1) for opinion in opinions(tweet)]
        right += found == MADE.truth(tweet[0])
    assert right >= 1_980
    assert any(MADE.truth(number) for number in range(20))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The battery is great.", [("battery", 0.8)]),
        ("The battery isn't great.", [("battery", -0.4)]),
        ("The batteries are not very good!", [("battery", -0.455)]),
        ("What a terrible display", [("screen", -1.0)]),
        ("The camera is good, but the speakers are bad.", [("camera", 0.7), ("speaker", -0.7)]),
        ("The camera is not good but the sound is.", [("camera", -0.35), ("sound", -0.35)]),
        ("The screen is a waste of money.", [("screen", -0.8)]),
        ("The Nova 5 has a great screen &amp; keyboard", [("screen", 0.8), ("keyboard", 0.8)]),
        ("The camera is sooooo amazing #wow https://t.co/great", [("camera", 0.6)]),
        ("@great_fan I bought it on Monday.", []),
        ("Der Akku ist leider sehr schlecht, aber die Kamera gefällt mir.", []),
        ("", []),
        ("\U0001f600 \U0001f600", []),
        ("#", []),
    ],
)
def test_what_a_sentence_says(text: str, found: list[tuple[str, float]]) -> None:
    assert [attribute for attribute, _ in said(text)] == [attribute for attribute, _ in found]
    assert [score for _, score in said(text)] == pytest.approx([score for _, score in found])


def test_an_opinion_is_safe_in_a_page() -> None:
    opinion = {"attribute": "<b>", "score": -0.5, "words": "not <great>"}
    assert steps.as_html(opinion)["html"] == ('<li class="blame">&lt;b&gt;: <b>not &lt;great&gt;</b> (-0.50)</li>')


def expected(tweets: list[Tweet]) -> tuple[list[dict[str, Any]], dict[tuple[str, int], tuple[int, float]]]:
    """The opinions of all tweets, and of each attribute and window how many there are and their mean."""
    found = [opinion for tweet in tweets for opinion in opinions(tweet)]
    windows: dict[tuple[str, int], list[float]] = defaultdict(list)
    for opinion in found:
        windows[opinion["attribute"], opinion["time_ms"] // WINDOW_MS * WINDOW_MS].append(opinion["score"])
    return found, {window: (len(scores), sum(scores) / len(scores)) for window, scores in windows.items()}


def run(tweets: list[Tweet], *, shuffled: bool = False, **options: Any) -> dict[str, list[Any]]:
    collect = ps.sinks.Collect
    flow = topology(
        *(ps.sources.Memory([]), collect(), collect()),
        window_s=WINDOW_MS / 1000,
        lateness_s=SKEW_MS / 1000,
        shuffled=shuffled,
    )
    for name in ("tweets", "watermark"):  # one task reads, so that the records are in the order that was given
        flow.graph.operators[name].parallelism = 1
    return ps.testing.run(flow, tweets, **options)


def check(out: dict[str, list[Any]], tweets: list[Tweet]) -> None:
    results, windows = expected(tweets)
    assert Counter(map(repr, out["results"])) == Counter(map(repr, results))
    found = {(key, start): (mean["opinions"], mean["score"]) for key, start, _, mean in out["summaries"]}
    assert len(found) == len(out["summaries"])
    assert found.keys() == windows.keys()
    for window, (count, score) in windows.items():
        assert found[window] == (count, pytest.approx(score))


def disordered(tweets: list[Tweet], seed: int) -> list[Tweet]:
    rng = random.Random(seed)
    return sorted(tweets, key=lambda tweet: tweet[TIME_MS] + rng.uniform(0, 0.99 * SKEW_MS))


@pytest.mark.parametrize("shuffled", [False, True], ids=["fused", "shuffled"])
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_opinions_and_summaries_are_those_of_a_loop(parallelism: int, shuffled: bool) -> None:
    tweets = disordered(TWEETS, parallelism)
    check(run(tweets, shuffled=shuffled, parallelism=parallelism, batch_size=1 + 11 * parallelism), TWEETS)


def test_the_answers_are_the_same_after_failures() -> None:
    check(run(disordered(TWEETS[:300], 1), parallelism=3, batch_size=7, fail_at=[60, 150, 290]), TWEETS[:300])


# --- the command -----------------------------------------------------------------------------------------------


def options(*arguments: str) -> SimpleNamespace:
    return parsed(app.APP, *arguments)


def test_the_packaged_file_is_what_the_generator_makes() -> None:
    lines = packaged("sentiment_tweets.jsonl").read_text(encoding="utf-8").splitlines()
    assert list(map(app.parse, lines)) == list(map(Tweets(1, rate=5), range(len(lines))))
    assert len(lines) >= 300


def test_the_command_runs_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "sentiment", "--local", "--sample"]) == 0
    out = capsys.readouterr().out
    tweets = [app.parse(line) for line in packaged("sentiment_tweets.jsonl").read_text("utf-8").splitlines()]
    assert f"{sum(len(opinions(tweet)) for tweet in tweets):,} opinions" in out
    assert "battery from " in out


def test_a_file_may_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tweets.jsonl"
    lines = [{"number": 1, "time_ms": 5, "text": "The battery is great."}, {"number": 2, "time_ms": 9, "text": "Bad."}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["run", "sentiment", "--local", "--input", str(file)]) == 0
    assert "battery from 0 to 60000: +0.80 on average of 1 opinions" in capsys.readouterr().out


def test_a_line_that_is_no_tweet_is_told() -> None:
    with pytest.raises(ValueError, match=r"""a line of tweets is .* this one is '\{"number": 1\}'"""):
        app.parse('{"number": 1}')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sample", "--input", "x"], "leave out --input"),
        (["--sample", "--tweets", "5"], "a file is read to its end"),
        (["--window", "0"], "must be above 0"),
        (["--tweets", "5", "--duration", "1"], "give one of them"),
        (["--rate", "5:1s,6:1s"], "give a number, or max"),
    ],
)
def test_options_that_contradict_each_other(arguments: list[str], message: str) -> None:
    with pytest.raises(FlowError, match=message):
        app.APP.build(options(*arguments))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tweets(rate=0), "rate must be above 0"),
        (lambda: Tweets(start_ms=-1), "must not be negative"),
        (lambda: Tweets(english_share=2), "between 0 and 1"),
    ],
)
def test_tweets_that_cannot_be_made(make: Any, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        make()


def test_without_its_libraries_the_application_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "simplemma", None)
    with pytest.raises(FlowError, match=r"needs simplemma, .* pip install 'penstock-streaming\[sentiment\]'"):
        steps._known()
