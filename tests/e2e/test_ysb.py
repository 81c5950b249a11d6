"""The Yahoo benchmark on processes: its counts are a plain loop's, its rows are stamped when their window has ended."""

from __future__ import annotations

import time
from functools import partial

import pytest

import penstock as ps
from penstock.apps import cli, ysb
from penstock.apps.ysb_events import START_MS, Events, EventSource
from tests.e2e import jobs
from tests.e2e.processes import wait_until


@pytest.fixture(scope="module")
def disordered() -> tuple[Events, int, ysb.Counts]:
    events, n = Events(4, rate="500:10s,2000:10s", late_share=0.001), 60_000
    return events, n, ysb.recount(events, n)


@pytest.mark.parametrize(("parallelism", "every_s"), [(2, 0.1), (4, 0.0)])
def test_counts_equal_the_recount(disordered: tuple[Events, int, ysb.Counts], parallelism: int, every_s: float) -> None:
    events, n, right = disordered
    rows = ps.sinks.Collect()
    flow = ysb.topology(
        EventSource(events, limit=n),
        events.campaigns(),
        ysb.Store(rows, every_s),
        updates=every_s > 0,
        name=f"ysb-{parallelism}-{every_s:g}",
    )
    began = time.time() * 1000
    status = jobs.run(flow, workers=2, parallelism=parallelism, local=True).wait(progress=False)
    assert ysb.stored(rows.records()) == right
    assert all(began - 1 <= updated <= time.time() * 1000 for *_, updated in rows.records())
    assert status["records_read"] == n
    assert status["operators"]["join"]["records_out"] == sum(right.values())


def shifted(by_ns: int, scale: float = 1) -> float:
    """A clock that is wrong by this."""
    return (time.time_ns() + by_ns) * scale


def test_rows_follow_their_window_s_end() -> None:
    """The load begins two seconds before a window's end, by a clock that is set so, and lasts until the window's rows
    are there."""
    events = Events(4, rate=2_000, start_ms=START_MS + ysb.WINDOW_MS - 2_000)
    by_ns = (events.start_ms - 1_500) * 1_000_000 - time.time_ns()
    rows = ps.sinks.Collect()
    source = EventSource(events, paced=True, clock=partial(shifted, by_ns))  # type: ignore[arg-type]
    flow = ysb.topology(
        source, events.campaigns(), ysb.Store(rows, clock=partial(shifted, by_ns, 1e-9)), name="ysb-paced"
    )
    job = jobs.run(flow, workers=2, parallelism=2, local=True)
    right = {key: views for key, views in ysb.recount(events, 10_000).items() if key[1] == START_MS}

    def counted() -> bool:
        return {key: views for key, views in ysb.stored(rows.records()).items() if key[1] == START_MS} == right

    wait_until(counted, "the rows of the window that has ended are there")
    assert job.status()["state"] == "RUNNING", "and the load has not ended"
    job.stop()
    job.wait(progress=False)
    assert counted()
    first = ysb.latencies(rows.records(), first=True)
    assert len(first) >= len(right)
    assert first[0] >= 50, "events may come 100 ms after others that are 50 ms early"


def test_the_command_checks_its_counts(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "ysb", "--rate", "max", "--events", "30000", "--check", "--no-progress", "--seed", "2"]
    assert cli.main([*command, "--store-every", "1", "--parallelism", "3", "--no-skew"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "100 counts of 1 windows"
    assert out[1].startswith("30,000 events, ")
    assert "not the clock's" in out[2]
    assert out[3] == "0 views came too late for their window"
    assert out[4].startswith("check: all ")
    assert out[4].endswith("counts equal those of a plain loop over the same 30,000 events")
