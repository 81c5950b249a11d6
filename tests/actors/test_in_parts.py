"""A JobMaster's arguments: none so large that Ray would keep it where it can be lost."""

from __future__ import annotations

import penstock as ps
from penstock.actors.job_master import in_parts
from penstock.actors.worker import WorkerOptions
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.records.pickling import Program, loads

RAY_INLINES = 100 * 1024  # bytes of an argument


def test_arguments_are_small_and_make_up_the_whole() -> None:
    table = {f"w{i}": f"{i:01000d}" for i in range(500)}
    flow = ps.Flow("large")
    flow.read(ps.sources.Memory(["w1"])).map(lambda word: table[word]).write(ps.sinks.Null())
    options = CarrierOptions(1, 10.0, WorkerOptions(None, 1 << 20), EpochOptions())
    parts = in_parts(Program().dumps((flow.plan(1), options)))
    assert len(parts) > 5
    assert max(map(len, parts)) < RAY_INLINES
    plan, again = loads(b"".join(parts))
    assert plan.chains[0].operators[1].fn("w7") == f"{7:01000d}"
    assert again == options
