"""The Parquet sink against the model of the Files sink's test: whatever dies and when, each epoch's files hold its
records. And what a follower takes for ready is: all files up to there have their names.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.runtime import sinks
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sinks.follower import ready
from penstock.runtime.sinks.parts import PartNames
from tests.sinks.one_task import OneTask
from tests.sinks.test_files_sink_model import History, Job

BLOCKS = int(os.environ.get("PENSTOCK_FILES_BLOCKS", "2"))  # of 20 seeds
SCHEMA = pa.schema([("value", pa.string())])


class TableJob(Job):
    """Its sink is a table."""

    def __init__(self, seed: int, where: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, where, patch)

    def open(self, index: int, restoring: bool) -> OneTask:
        errors = ErrorHandler("out", policy="fail")
        context = SinkContext("out", index, self.parallelism, epochs=True, restoring=restoring, errors=errors)
        sink = sinks.Parquet(self.where, schema=SCHEMA, overwrite=self.rng.random() < 0.5)
        return OneTask(sink, context)

    def finals(self, last: int = 1 << 62) -> History:
        found: History = defaultdict(list)
        for name in sorted(os.listdir(self.where)):
            if name.startswith("part-") and int(name[11:21]) <= last:
                found[int(name[5:10])] += pq.read_table(self.where / name)["value"].to_pylist()
        return found

    def check_finals(self, exactly: History | None = None) -> None:
        super().check_finals(exactly)
        limit = ready(PartNames(str(self.where), ".parquet"), self.last.epoch)
        known = [complete for complete in self.done if complete.epoch <= limit]
        if known:
            found = self.finals(known[-1].epoch)
            assert {i: records for i, records in known[-1].history.items() if records} == found


@pytest.mark.parametrize("block", range(BLOCKS))
def test_parts_are_the_committed_history(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readies = 0
    for seed in range(20 * block, 20 * block + 20):
        where = tmp_path / str(seed)
        with monkeypatch.context() as patch:
            job: Any = TableJob(seed, where, patch)
            try:
                job.run()
                job.check_finals(job.history)
                assert [name for name in os.listdir(where) if not name.startswith("part-")] == []
                readies += ready(PartNames(str(where), ".parquet"), job.last.epoch) == job.last.epoch
            except BaseException:
                print(f"seed {seed}")
                raise
    assert readies == 20
