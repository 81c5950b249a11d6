"""Splits that several tasks were reading come to one task, and no record becomes late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from tests.local.test_local_job import LIMIT_S, wait_until

COUNT = 1500
RATE = 1500.0  # records a second of each task
SIZE_MS = 100


class Logs(Source):
    """Two logs of the same time. A task reads one after the other, at a pace."""

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("a"), Split("b")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return LogReader(splits, context)


class LogReader(Reader):
    def __init__(self, splits: list[Split], context: SourceContext) -> None:
        self._at = {split.name: split.offset or 0 for split in splits}
        self._context = context
        self._began: int | None = None
        self._given = 0
        self.finished = not splits

    def read(self, limit: int) -> list[Any]:
        now = self._context.clock()
        self._began = now if self._began is None else self._began
        limit = min(limit, int((now - self._began) / 1e9 * RATE) - self._given)
        for name, at in self._at.items():
            if at < COUNT:
                numbers = range(at, min(COUNT, at + limit))
                self._at[name] = at + len(numbers)
                self._given += len(numbers)
                self.split = name
                self.finished = all(map(self.has_ended, self._at))
                return [(name, number) for number in numbers]
        return []

    def has_ended(self, split: str) -> bool:
        return self._at[split] >= COUNT

    def ready_in(self) -> float:
        return 0.002

    def offsets(self) -> dict[str, Any]:
        return dict(self._at)


@pytest.mark.parametrize("how", ["rescale", "savepoint"])
def test_no_record_is_late_when_two_splits_come_to_one_task(
    how: str, fresh_name: Callable[[], str], tmp_path: Any
) -> None:
    def flow(parallelism: int) -> ps.Flow:
        flow = ps.Flow(name)
        logs = flow.read(Logs(), name="logs", parallelism=parallelism).watermark(1, name="watermark")
        logs.key_by(0).window(ps.Tumbling(SIZE_MS / 1000)).count(name="count").write(ps.sinks.Collect(), name="out")
        return flow

    name = fresh_name()
    job = ps.run(flow(2), workers=2, local=True, epoch_interval_s=0.1)
    wait_until(lambda: job.status().get("records_written", 0) > 0, "windows have closed")
    records = []
    if how == "rescale":
        job.rescale("logs", 1)
    else:
        job.savepoint(tmp_path / "saved")
        job.cancel()
        job.wait(LIMIT_S, progress=False)
        records = job.records("out")
        job = ps.run(flow(1), workers=2, local=True, epoch_interval_s=0.1, savepoint=tmp_path / "saved")
    status = job.wait(LIMIT_S, progress=False)
    assert status["operators"]["count"]["late"] == 0
    assert status["operators"]["watermark"]["records_in"] == 2 * COUNT
    starts = range(0, COUNT, SIZE_MS)
    assert set(records) | set(job.records("out")) == {(k, s, s + SIZE_MS, SIZE_MS) for k in "ab" for s in starts}
