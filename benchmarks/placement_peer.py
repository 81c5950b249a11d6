"""A driver on a host of the tests, with a job of so many records: `python -m benchmarks.placement_peer JSON`. It prints
one line of JSON: the bytes that workers have sent to other hosts, what the plan expects in units of what a source
emits, and the bytes of the records."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import penstock as ps
from penstock.apps import sol, throughput
from penstock.apps.app import Cycle
from penstock.apps.rides.city import Locations, Requests
from penstock.apps.rides.topology import topology as rides
from penstock.placement.placement import Placement
from penstock.placement.topology import of_plan
from penstock.placement.traffic import Node

_BODY = 4096


def flow_of(app: str, records: int) -> ps.Flow:
    """The flow of an application that reads so many records."""
    if app == "sol":
        return sol.topology(_memory(Cycle(sol.messages(100)), records), levels=5, tasks=5)
    if app == "throughput":
        return throughput.topology(_memory(Cycle(throughput.records(100)), records))
    if app == "rides":
        located, asked = _memory(Locations(drivers=100), records), _memory(Requests(), records // 20)
        return rides(located, asked, ps.sinks.Null())
    flow = ps.Flow("broadcast")
    bodies = [number.to_bytes(8, "little") + bytes(_BODY - 8) for number in range(records)]
    flow.read(ps.sources.Memory(bodies), parallelism=1).broadcast().write(ps.sinks.Null())
    return flow


def _memory(make: Callable[[int], Any], records: int) -> ps.sources.Source:
    return ps.sources.Memory([make(number) for number in range(records)])


def main(settings: dict[str, Any]) -> None:
    """Runs it."""
    hosts, records = settings["hosts"], settings["records"]
    flow = flow_of(settings["app"], records)
    flow.parallelism = hosts
    job = ps.run(flow, workers=hosts, nodes=hosts, placement=settings["placement"], epoch_interval_s=None)
    status = job.wait(300.0, progress=False)
    placed = tuple(task["worker"] for task in status["tasks"])
    nodes = tuple(Node(str(number)) for number in range(hosts))
    planned = Placement(nodes, tuple(range(hosts)), placed)
    print(
        json.dumps(
            {
                "sent": sum(sum(worker["sent_bytes"].values()) for worker in status["workers"]),
                "planned": planned.between_nodes(of_plan(flow.plan(hosts)).graph),
                "made": records * _BODY,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
