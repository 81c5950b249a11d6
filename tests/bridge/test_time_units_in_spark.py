"""Times in another unit than milliseconds are found in the operation stream too, where columns only have the greatest
time of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import penstock as ps
from penstock.runtime.errors import RecordError
from penstock.runtime.operators.watermarks import Marking
from tests.worker.test_diversion import IN_SPARK, run_diverted

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
Record = tuple[int, Any]


@pytest.fixture(autouse=True)
def as_columns_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for Spark looks at no single time."""
    check = Marking._check_unit
    monkeypatch.setattr(Marking, "_check_unit", lambda self, record: None if IN_SPARK else check(self, record))


def windows_in_spark(records: list[Record], seed: int) -> tuple[dict[tuple[int, int], int], int]:
    """The last counts of ten-second windows when all records go to Spark, and how many micro-batches were answered."""
    flow = ps.Flow("timed", parallelism=1)
    stream = flow.read(ps.sources.Memory([(0, 0)])).watermark(1, name="marks")
    counts = stream.key_by(0).window(ps.Tumbling(10)).count(name="count")
    counts.write(ps.sinks.Collect(), name="out")
    outputs, bridge = run_diverted(flow, seed, toggle=False, inputs=records)
    return {(key, start): n for key, start, _, n in outputs["out"]}, bridge.answered


@pytest.mark.parametrize("unit", [1, 10**6], ids=["seconds", "microseconds"])
def test_times_in_another_unit_end_a_job_that_is_in_spark_from_the_start(unit: int) -> None:
    records = [(i % 3, (1_700_000_000 + i) * unit) for i in range(500)]
    for seed in range(5):
        with pytest.raises(RecordError, match=r"most likely in (micro)?seconds since 1970") as failed:
            windows_in_spark(records, seed)
        assert failed.value.operator == "marks"
        assert failed.value.record == repr(records[0])


@pytest.mark.parametrize(
    "time",
    [
        lambda second: EPOCH + timedelta(days=20, seconds=second),
        lambda second: 1_700_000_000_000 + 1000 * second,
        lambda second: (
            10_000_000 * second
        ),  # of a simulation, which goes far beyond the first second of 2001 in seconds
        lambda second: second,
    ],
    ids=["datetimes of January 1970", "milliseconds", "a simulation of months", "a simulation of a second"],
)
def test_other_times_are_counted(time: Callable[[int], Any]) -> None:
    records = [(i % 3, time(i)) for i in range(500)]

    def ms(at: Any) -> int:
        return at if isinstance(at, int) else (at - EPOCH) // timedelta(milliseconds=1)

    expected = Counter((key, ms(at) - ms(at) % 10_000) for key, at in records)
    for seed in range(5):
        counts, answered = windows_in_spark(records, seed)
        assert counts == expected, seed
        assert answered
