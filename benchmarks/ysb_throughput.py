"""The most Yahoo events a second: records only, everything in Spark, and Spark without Penstock.

All read the same lines of JSON from text files in memory; Penstock hands them to the record tasks as lists and to Spark
as Arrow columns. Its figure is a steady rate: events of the windows whose counts have left, over the time between the
first and the last of these, without the first half (`Results.steady_rate`): no start and next to no compiling is in it.

Spark alone is a batch job over the first of these files: the same parse, filter, join and count, in the form that is
quickest in a short trial, run several times in a session that is as warm; the median counts. It keeps no state, is
never interrupted, and pays no micro-batch: more than any streaming engine on it could do. All run on the same two
cores, and the counts of all are compared with what they must be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
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
_FILE = 250_000  # events
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
        files = []
        for first in range(0, load.number, _FILE):
            files.append(folder / f"{first:010}.txt")
            write_lines(load.events, first, min(_FILE, load.number - first), files[-1])
        campaigns = folder / "campaigns.json"
        campaigns.write_text(json.dumps(load.events.campaigns()))
        return cls(load, [str(file) for file in files], str(campaigns), folder / "result.json")

    def beginning(self, number: int) -> Lines:
        """The first `number` events, whole files."""
        load = replace(self.load, limit=number)
        return Lines(load, self.files[: number // _FILE], self.campaigns, self.result)

    def job(self, form: Form) -> float:
        """Events a second of a Penstock job."""
        return ysb_job.play(self.load, form, updates=False, files=self.files).results.steady_rate()

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


def run(bench: Bench) -> None:
    """See the module."""
    number, alone, short = bench.pick((8_000_000, 2_000_000, 500_000), (2_500_000, 500_000, 0))
    with scratch() as folder:
        lines = Lines.write(folder / "lines", Load(STEPS, paced=False, limit=number))
        parser = "from_json"
        if short:
            trial = lines.beginning(short).spark_alone([*PARSERS], 3, 3)
            parser = max(trial, key=lambda name: trial[name])
            for name, rate in trial.items():
                bench.say(f"trial of Spark alone, {name}: {rate:,.0f} events/s")
        forms = {RECORDS: FORMS[RECORDS]} if bench.quick else FORMS
        contestants: dict[str, Callable[[], float]] = {who: partial(lines.job, form) for who, form in forms.items()}
        part = lines.beginning(alone)
        contestants[ALONE] = lambda: part.spark_alone([parser], *bench.pick((2, 3), (0, 1)))[parser]
        results = bench.take_turns(contestants, runs=(bench.runs + 1) // 2, unit="events/s")
    peer_config = f"local[{CORES}], {parser}, {alone // _FILE} of the files"
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
