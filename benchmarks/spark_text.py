"""WordCount and Grep beside Spark alone: the same text files, on the same cores (docs/papers.md: D7).

Penstock with records only, in the better of two forms, and Spark as a warm batch job that is run several times: it has
no state to keep and no micro-batches to pay for. Sentences are split at blanks, words counted by their lower case;
lines are found by a regular expression that 1 in 100 matches, and brought to the program. Checked as elsewhere.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import grep_throughput, text, wordcount_throughput
from benchmarks.common import Bench, WrongResult, best, median, run_script, scratch
from benchmarks.throughput import Input, penstock
from benchmarks.ysb_job import CORES, MEMORY

_FORMS = {"1 worker": (1, 1), "2 workers": (2, 2)}
_NOTE = "the paper has WordCount and Grep at fixed rates only, on a cluster"


def _spark(query: str, data: Input, folder: Path, warm: int, repeats: int) -> float:
    """Lines a second."""
    result = folder / "result.json"
    settings: dict[str, Any] = {
        "query": query,
        "needle": text.NEEDLE,
        "files": data.paths,
        "cores": CORES,
        "memory": MEMORY,
        "forms": ["plain"],
        "warm": warm,
        "repeats": repeats,
        "result": str(result),
    }
    seconds = json.loads(run_script("benchmarks.spark_batch_peer", settings, timeout=600))["plain"]
    rows = json.loads(result.read_text())
    right = Counter(dict(rows)) == data.counts if data.counts is not None else len(rows) == data.found
    if not right:
        raise WrongResult(f"Spark alone, {query}: its result is wrong")
    return data.lines / median(seconds)


def run(bench: Bench) -> None:
    """See the module."""
    builds = {"wordcount": wordcount_throughput.build("final"), "grep": grep_throughput.build}
    for query, build in builds.items():
        with scratch() as folder:
            lines = text.sentences(bench.pick(1_000_000, 20_000), marked=query == "grep")
            counts = text.count_words(lines) if query == "wordcount" else None
            found = sum(text.NEEDLE in line for line in lines) if query == "grep" else None
            data = Input(folder, text.write_text(folder, lines), len(lines), counts, found)
            del lines
            contestants: dict[str, Callable[[], float]] = {
                form: partial(penstock(build, workers, tasks), data) for form, (workers, tasks) in _FORMS.items()
            }
            contestants["Spark alone"] = partial(_spark, query, data, folder, *bench.pick((2, 3), (0, 1)))
            results = bench.take_turns(contestants, runs=(bench.runs + 1) // 2, unit="lines/s")
            form = best({form: results[form] for form in _FORMS})
            bench.case(
                f"{query} beside Spark alone",
                median(results[form]),
                "lines/s",
                peer="Spark alone",
                peer_figure=median(results["Spark alone"]),
                config=f"records only, {form}",
                peer_config=f"local[{CORES}], batch, warm",
                note=_NOTE,
                runs=results[form],
                peer_runs=results["Spark alone"],
            )
