"""Flows of other shapes: order, back-pressure, side outputs, dead letters, all groupings."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import penstock as ps
from tests.e2e.processes import LIMIT_S, wait_until


class OrderCheck(ps.ProcessFunction):
    """Emits, at the end, how many records came from each sender and whether any came out of order."""

    def open(self, ctx: ps.ProcessContext) -> None:
        self.last: dict[int, int] = {}
        self.wrong = 0
        self.seen = 0

    def process(self, ctx: ps.ProcessContext, key: Any, record: tuple[int, int]) -> None:
        sender, number = record
        self.seen += 1
        if number <= self.last.get(sender, -1):
            self.wrong += 1
        self.last[sender] = number

    def finish(self, ctx: ps.ProcessContext) -> list[tuple[int, int]]:
        return [(self.seen, self.wrong)]


def rss_bytes(pid: int) -> int:
    """Memory of a process that is not shared with others."""
    uss: int = psutil.Process(pid).memory_full_info().uss
    return uss


def test_interleaved_stages_small_rings_slow_end() -> None:
    """A-B-A-B over two workers, rings and windows at their smallest, a slow last stage: no deadlock, order kept,
    memory flat. The last stage is slow by work a record, so the others wait for it all the time. What is kept to be
    sent again may take 1 MiB of memory, so that the time at which an epoch completes does not matter."""
    records = 200_000
    flow = ps.Flow("interleaved", parallelism=1)
    result = ps.sinks.Collect()

    def slow(record: tuple[int, int]) -> tuple[int, int]:
        for _ in range(20):
            pass
        return record

    stream = flow.read(ps.sources.Generator(lambda i: (i % 3, i), limit=records), name="a1")
    for name in ("b1", "a2"):
        stream = stream.rebalance().map(lambda record: record, name=name)
    stream = stream.rebalance().map(slow, name="b2")
    stream.key_by(0).process(OrderCheck()).write(result)
    small: dict[str, Any] = {"ring_bytes": 4096, "window_bytes": 1024, "cache_bytes": 1024 * 1024}
    job = ps.run(flow, workers=2, placement="round-robin", local=True, **small)
    wait_until(lambda: job.status().get("records_read", 0) > records // 20, "the job is well under way", 3 * LIMIT_S)
    early = job.status()
    before = [rss_bytes(worker["pid"]) for worker in early["workers"]]
    assert {task["worker"] for task in early["tasks"] if task["name"].startswith(("a1", "a2"))} == {0}
    assert {task["worker"] for task in early["tasks"] if task["name"].startswith("b1")} == {1}
    wait_until(lambda: job.status()["records_read"] > records * 4 // 5, "most is read", 10 * LIMIT_S)
    after = [rss_bytes(worker["pid"]) for worker in job.status()["workers"]]
    assert max(b - a for a, b in zip(before, after, strict=True)) < 6 * 1024 * 1024
    job.wait(10 * LIMIT_S, progress=False)
    assert result.records() == [(records, 0)]


def test_every_grouping(fresh_name: Callable[[], str]) -> None:
    """What each task of the receiver got, by grouping, with three senders and four receivers on three workers."""
    n = 3_000

    def where(ctx: ps.ProcessContext, key: Any, record: Any) -> list[Any]:
        return [(os.getpid(), record)]

    flow = ps.Flow(fresh_name(), parallelism=4)
    source = flow.read(ps.sources.Memory(range(n)), parallelism=3)
    sinks: dict[str, ps.sinks.Collect] = {}

    def tap(name: str, stream: ps.Stream) -> None:
        sinks[name] = ps.sinks.Collect()
        tag = iter(())  # only names the tasks: every task of the map has its own list object
        del tag
        stream.map_batches(lambda records: records, name=f"{name}-map").write(sinks[name], name=name)

    tap("rebalance", source.rebalance())
    tap("shuffle", source.shuffle())
    tap("broadcast", source.broadcast())
    tap("first", source.to_first())
    tap("custom", source.partition_by(lambda record, tasks: record % tasks))
    job = ps.run(flow, workers=3, local=True)
    status = job.wait(5 * LIMIT_S, progress=False)
    for name in ("rebalance", "shuffle", "first", "custom"):
        assert Counter(sinks[name].records()) == Counter(range(n)), name
    assert Counter(sinks["broadcast"].records()) == Counter(dict.fromkeys(range(n), 4))
    shares: dict[str, list[int]] = defaultdict(list)
    for task in status["tasks"]:
        shares[task["name"].split("-map")[0]].append(task["records_in"])
    assert shares["first"] == [n, 0, 0, 0]
    assert shares["broadcast"] == [n] * 4
    assert shares["custom"] == [n // 4] * 4
    assert max(shares["rebalance"]) - min(shares["rebalance"]) <= 3
    assert min(shares["shuffle"]) > 0


def test_side_outputs_and_dead_letters_across_workers(fresh_name: Callable[[], str]) -> None:
    def late(ctx: ps.ProcessContext, key: int, record: int) -> list[tuple[int, int]]:
        if record == 777:
            raise ValueError("unlucky")
        if record % 10 == 0:
            ctx.output("tens", record)
        ctx.set(ctx.get(0) + 1)
        return [(key, ctx.get())]

    flow = ps.Flow(fresh_name())
    main, tens, dead = ps.sinks.Collect(), ps.sinks.Collect(), ps.sinks.Collect()
    stream = (
        flow.read(ps.sources.Memory(range(1000)))
        .key_by(lambda record: (10 // (record - 500) and 0) or record % 7)
        .process(late, outputs=("tens",), on_error="dead_letter")
    )
    stream.write(main)
    stream.side_output("tens").write(tens)
    stream.dead_letters().write(dead)
    status = ps.run(flow, workers=2, parallelism=2, local=True).wait(5 * LIMIT_S, progress=False)
    assert len(main.records()) == 998
    assert sorted(tens.records()) == [i for i in range(0, 1000, 10) if i != 500]
    assert sorted(letter.record for letter in dead.records()) == [500, 777]
    assert {letter.error for letter in dead.records()} == {
        "ValueError: unlucky",
        "ZeroDivisionError: integer division or modulo by zero",
    }
    assert status["skipped"] == 2


def test_live_progress(capfd: pytest.CaptureFixture[str], fresh_name: Callable[[], str]) -> None:
    flow = ps.Flow(fresh_name())
    # A job that is over within a second shows no progress.
    lines = flow.read(ps.sources.Generator(lambda i: "the quick brown fox", 2_000, limit=6_000))
    lines.flat_map(str.split).key_by(str.lower).count(emit="final").write(ps.sinks.Null())
    status = ps.run(flow, workers=2, local=True).wait(5 * LIMIT_S)
    assert status["records_read"] == 6_000
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith(flow.name)]
    assert shown, "a line of progress"
    assert "read " in shown[-1]
    assert "latency p50" in shown[-1]


def test_status_is_plain_data(cluster: str, fresh_name: Callable[[], str]) -> None:
    import json

    flow = ps.Flow(fresh_name())
    flow.read(ps.sources.Generator(lambda i: i, rate=2000)).map(str).write(ps.sinks.Null())
    job = ps.run(flow, workers=2)
    wait_until(lambda: job.status().get("read_per_s", 0) > 0, "a rate is known")
    status = json.loads(json.dumps(job.status().plain()))
    for worker in status["workers"]:
        assert psutil.pid_exists(worker["pid"])
    job.cancel()
    job.wait(progress=False)
    assert status["state"] == "RUNNING"
    assert set(status["operators"]) == {"read", "map", "write"}
    for operator in status["operators"].values():
        assert {"records_in", "records_out", "in_per_s", "out_per_s", "queued", "latency_ms"} <= set(operator)
    assert [worker["index"] for worker in status["workers"]] == [0, 1]
    for worker in status["workers"]:
        assert len(worker["node_id"]) == 56
    assert len(status["tasks"]) == 2
    assert status["latency_ms"]["p50"] > 0
    assert job.status()["state"] == "CANCELLED"
