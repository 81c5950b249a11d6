"""The most Yahoo events a second: records only, everything in Spark, and Spark without Penstock.

A source that is never waited for hands over lines of JSON: to the record tasks as lists, to Spark as Arrow columns.
Penstock's figure is a steady rate: events of the windows whose counts have left, over the time between the first and
the last of these, without the first quarter (`Results.steady_rate`), so no start and no compiling is in it.

Spark alone is a batch job over the same lines in text files in memory: the same parse, filter, join and count, in the
form that is quickest in a short trial, run several times in a warm session; the median counts. It keeps no state, is
never interrupted, and pays no micro-batch: more than any streaming engine on it could do. All run on the same two
cores, and the counts of all are compared with what they must be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import ysb_job
from benchmarks.common import Bench, WrongResult, median, run_script, scratch
from benchmarks.spark_parts import PARSERS
from benchmarks.ysb_job import CORES, MEMORY, Form
from benchmarks.ysb_load import Expected, Load, write_lines

RECORDS, PYSPARK, RAYDP, ALONE = "records only", "everything in Spark", "everything in Spark, RayDP", "Spark alone"
FORMS = {
    RECORDS: Form(),
    PYSPARK: Form(dual="spark-only"),
    RAYDP: Form(dual="spark-only", kind="raydp"),
}
STEPS = "20000:1000000s"  # event time: a window has 200,000 events
_FILES = 8
_PAPER = "the paper: 1.14 times Spark Streaming, 2.1 times Flink, on a cluster"


@dataclass(frozen=True)
class Lines:
    """Events in text files."""

    load: Load
    files: list[str]
    campaigns: str
    result: Path

    @classmethod
    def write(cls, folder: Path, load: Load) -> Lines:
        """Write them."""
        folder.mkdir()
        share = load.number // _FILES
        files = [folder / f"{i}.txt" for i in range(_FILES)]
        for i, file in enumerate(files):
            write_lines(load.events, i * share, share, file)
        campaigns = folder / "campaigns.json"
        campaigns.write_text(json.dumps(load.events.campaigns()))
        return cls(load, [str(file) for file in files], str(campaigns), folder / "result.json")

    def spark_alone(self, forms: list[str], warm: int, repeats: int) -> dict[str, float]:
        """Events a second of each form: the median of the repeats. Checked."""
        settings = {
            "query": "ysb",
            "files": self.files,
            "campaigns": self.campaigns,
            "cores": CORES,
            "memory": MEMORY,
            "forms": forms,
            "warm": warm,
            "repeats": repeats,
            "result": str(self.result),
        }
        seconds = json.loads(run_script("benchmarks.spark_batch_peer", settings, timeout=600))
        counts = {(campaign, start): views for campaign, start, views in json.loads(self.result.read_text())}
        if counts != Expected.of(self.load).counts():
            raise WrongResult("Spark alone: the counts are wrong")
        return {form: self.load.number / median(times) for form, times in seconds.items()}


def job(load: Load, form: Form) -> float:
    """Events a second of a Penstock job."""
    return ysb_job.play(load, form, updates=False).results.steady_rate()


def run(bench: Bench) -> None:
    """See the module."""
    numbers = bench.pick(
        {RECORDS: 16_000_000, PYSPARK: 8_000_000, RAYDP: 8_000_000, ALONE: 2_000_000},
        {RECORDS: 2_400_000, ALONE: 400_000},
    )
    loads = {who: Load(STEPS, paced=False, limit=number) for who, number in numbers.items()}
    with scratch() as folder:
        full = Lines.write(folder / "full", loads[ALONE])
        parser = "from_json"
        if not bench.quick:
            trial = Lines.write(folder / "trial", Load(STEPS, paced=False, limit=400_000)).spark_alone([*PARSERS], 3, 3)
            parser = max(trial, key=lambda name: trial[name])
            for name, rate in trial.items():
                bench.say(f"trial of Spark alone, {name}: {rate:,.0f} events/s")
        contestants: dict[str, Callable[[], float]] = {
            who: partial(job, loads[who], form) for who, form in FORMS.items() if who in loads
        }
        contestants[ALONE] = lambda: full.spark_alone([parser], *bench.pick((2, 3), (0, 1)))[parser]
        results = bench.take_turns(contestants, runs=(bench.runs + 1) // 2, unit="events/s")
    peer_config = f"local[{CORES}], {parser}, {_FILES} files in memory"
    for who, form in FORMS.items():
        if who not in results:
            continue
        bench.case(
            f"{who}, beside {ALONE}",
            median(results[who]),
            "events/s",
            peer=ALONE,
            peer_figure=median(results[ALONE]),
            config=str(form),
            peer_config=peer_config,
            note=_PAPER,
            runs=results[who],
            peer_runs=results[ALONE],
        )
