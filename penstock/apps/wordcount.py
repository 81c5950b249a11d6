"""WordCount, as in every paper of the field: lines are split into words, words counted by key.

    lines -> words -> (by word, in lower case) -> count -> the newest count of each word

Words are what stands between white space, punctuation and all.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from heapq import nsmallest
from types import SimpleNamespace

from penstock.apps import text
from penstock.apps.app import App, Built
from penstock.apps.command_line import Options
from penstock.apps.latest import Latest
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks import Collect, Files, Sink
from penstock.runtime.sources import Source
from penstock.runtime.status import JobStatus
from penstock.runtime.storage import filesystems

TOP = 20
# Without options the text is paced, so that there is something to see: at full speed it is over in a blink.
_SHOW_LINES_PER_S = 5_000
_SHOW_S = 3.0


def topology(source: Source, sink: Sink, name: str = "wordcount") -> Flow:
    """Builds the flow: lines go in, and (word, count) comes out."""
    flow = Flow(name)
    (
        flow.read(source, name="lines")
        .flat_map(str.split, name="words")
        .key_by(str.lower)
        .count(name="count")
        .write(Latest(sink), name="counts")
    )
    return flow


def _add_options(parser: Options) -> None:
    text.add_options(
        parser, rate=f"{_SHOW_LINES_PER_S} when nothing is said, to have something to see; max with --input"
    )
    parser.add(
        "--output",
        metavar="DIR",
        help=f"write files of word<TAB>count lines to this directory (print the {TOP} most frequent words)",
    )


def _build(options: SimpleNamespace) -> Built:
    lines = text.open_text(options, show_rate=_SHOW_LINES_PER_S, show_s=_SHOW_S)
    if options.output:
        files = Files(options.output)
        place = filesystems.named(options.output)
        folder = filesystems.local_path(options.output)  # None: the shell cannot read there
        first = None if folder is None else shlex.quote(os.path.expanduser(folder))
        return Built(
            topology(lines.source, files, options.name),
            f"counting the words of {lines.about}",
            lambda status, seconds: [f"{_words(status):,} words; their counts are in {place}"],
            () if first is None else (f"sort -k2 -n -r {first}/part-* | head",),
        )
    counts = Collect()

    def results(status: JobStatus, seconds: float) -> Iterable[str]:
        found = counts.records()
        if not found:
            return
        width = len(f"{max(n for _, n in found):,}")
        for word, n in nsmallest(TOP, found, key=lambda item: (-item[1], item[0])):
            yield f"{n:>{width},}  {word}"
        yield f"{sum(n for _, n in found):,} words, {len(found):,} different"

    return Built(
        topology(lines.source, counts, options.name),
        f"counting the words of {lines.about}",
        results,
        ("penstock run wordcount --rate 20000 --duration 10", "penstock explain wordcount"),
    )


def _words(status: JobStatus) -> int:
    return status.operators["words"].records_out


APP = App("wordcount", "count the words of a text, with live progress", _add_options, _build)
