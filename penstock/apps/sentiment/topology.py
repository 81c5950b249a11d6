"""The sentiment analysis (docs/papers.md: A10): sixteen operators in a row, and a summary of what they find.

    tweets -> filter -> sentences -> tokens -> parts of speech -> custom nouns -> complex phrases -> negate
      -> base forms -> sentiment words -> attributes -> normalise -> stop words -> analyse -+-> html -> results
                                                            (by attribute, windows) summary <-+

The paper distributes all records anew between any two operators. Here neighbours run as one task, because no step needs
that. `shuffled=True` does as the paper.
"""

from __future__ import annotations

from collections.abc import Callable

import penstock as ps
from penstock.apps.sentiment import steps
from penstock.apps.sentiment.tweets import TIME_MS, Tweet
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Sink
from penstock.runtime.sources import Source

WINDOW_S = 60.0


def topology(
    source: Source,
    results: Sink,
    summaries: Sink,
    *,
    window_s: float = WINDOW_S,
    lateness_s: float = 0.0,
    shuffled: bool = False,
    parse: Callable[[str], Tweet] | None = None,
    name: str = "sentiment",
) -> Flow:
    """Builds the flow: tweets go in. To `results` goes each opinion, a dict with "tweet", "time_ms", "sentence",
    "attribute", "score" (from -1 to 1), "words" and "html". To `summaries` goes (attribute, start of the window, its
    end, {"opinions": how many, "score": their mean}). With `parse`, the source gives lines, of which it makes tweets;
    the source is then one file, which one task reads."""
    flow = Flow(name, chaining=not shuffled)

    def on(stream: ps.Stream) -> ps.Stream:
        return stream.shuffle() if shuffled else stream

    tasks = None if parse is None else 1
    tweets = flow.read(source, name="tweets", parallelism=tasks)
    if parse is not None:
        tweets = tweets.map(parse, name="parse", parallelism=1)
    timed = tweets.watermark(TIME_MS, out_of_orderness_s=lateness_s, name="watermark", parallelism=tasks)
    # The tweets of a file, which one task reads, go to all tasks.
    english = (timed if tasks is None and not shuffled else timed.shuffle()).flat_map(steps.Filter, name="filter")
    stream = on(english).flat_map(steps.Sentences, name="sentences")
    stream = on(stream).map(steps.Tokenise, name="tokens")
    stream = on(stream).map(steps.TagPartsOfSpeech, name="parts of speech")
    stream = on(stream).map(steps.custom_nouns, name="custom nouns")
    stream = on(stream).map(steps.complex_phrases, name="complex phrases")
    stream = on(stream).map(steps.negate, name="negate")
    stream = on(stream).map(steps.BaseForms, name="base forms")
    stream = on(stream).map(steps.SentimentWords, name="sentiment words")
    stream = on(stream).map(steps.attributes, name="attributes")
    stream = on(stream).map(steps.normalise, name="normalise")
    stream = on(stream).map(steps.stop_words, name="stop words")
    opinions = on(stream).flat_map(steps.analyse, name="analyse")
    on(opinions).map(steps.as_html, name="html").write(results, name="results")
    windows = opinions.key_by("attribute").window(ps.Tumbling(window_s), time="time_ms")
    windows.agg(opinions=ps.count(), score=ps.mean("score"), name="summary").write(summaries, name="summaries")
    return flow
