"""Jobs over three guests, with a tree of relays over RDMA: python3 -m tests.guests.job PART..., in each guest.

The parts are "exact", "rdma" and "tcp". In the first one a relay and a worker are killed while records flow, and all
records that have arrived go to a file of the shared folder. The others measure how many records a second the tree
carries. Guest 0 prints what was found, as a line of JSON for each part.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import penstock as ps
from penstock.host.carry.carrier_options import CarrierOptions
from penstock.host.process.network import Network
from penstock.host.process.worker_process import WorkerOptions
from penstock.jobs.job import Job
from penstock.local import local_job
from penstock.placement.options import PlacementOptions
from penstock.runtime.epochs.coordinator import EpochOptions
from penstock.runtime.epochs.store import Store
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.records.pickling import Program
from penstock.runtime.relaying.tree_options import TreeOptions
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from tests.guests import carrier

PLACE = Path("/shared")
GATE = Path("/tmp/gate")
#: Of the source's records, those before the gate come in groups, with pauses, and the others as fast as they can.
GROUP, PAUSE_S = 20, 0.2
KEYS = 97


class Gated(Source[int]):
    """The numbers below `limit`; those from `gate` on come when the gate is open."""

    def __init__(self, gate: int, limit: int) -> None:
        self.gate, self.limit = gate, limit

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("all")]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _GatedReader(self, splits[0].offset or 0)


class _GatedReader(Reader):
    def __init__(self, source: Gated, offset: int) -> None:
        self._source, self._next, self._due = source, offset, 0.0
        self._open = False

    def read(self, limit: int) -> list[int]:
        source = self._source
        self._open = self._open or GATE.exists()
        if self._open:
            end = min(self._next + limit, source.limit)
        elif self.ready_in() > 0:
            return []
        else:
            self._due = time.monotonic() + PAUSE_S
            end = min(self._next + min(limit, GROUP), source.gate)
        numbers = list(range(self._next, end))
        self._next = end
        self.finished = end == source.limit
        return numbers

    def ready_in(self) -> float:
        return 0.0 if self._open else max(0.0, self._due - time.monotonic())

    def offsets(self) -> dict[str, Any]:
        return {"all": self._next}


def body(number: int) -> str:
    """Returns what travels with a number."""
    return hashlib.sha256(b"%d" % number).hexdigest() * 8


def arrived(record: tuple[int, str]) -> tuple[str, int, str]:
    """Returns the guest, the number, and a digest of what has travelled with it."""
    return os.environ["GUEST"], record[0], hashlib.md5(record[1].encode()).hexdigest()


class Running:
    """A job of a flow, with the tree that carries its broadcast."""

    def __init__(self, flow: ps.Flow, sinks: list[ps.sinks.Collect], *, tcp: bool = False) -> None:
        GATE.unlink(missing_ok=True)
        options = CarrierOptions(
            workers=3,
            start_timeout_s=carrier.PATIENCE_S,
            worker=WorkerOptions(None, CREDIT_WINDOW_BYTES, trees=TreeOptions(limit=1)),
            epochs=EpochOptions(interval_s=1.0, timeout_s=carrier.PATIENCE_S),
            store=Store.open(str(PLACE / "epochs"), flow.name),
            flow=flow,
            hang_timeout_s=carrier.PATIENCE_S,
            network=Network(node_timeout_s=carrier.PATIENCE_S),
            spares=False,
            placement=PlacementOptions("round-robin"),
        )
        program = Program()
        with patch.object(local_job, "LocalProcesses", partial(carrier.GuestProcesses, tcp)):
            self.host = carrier.GuestJob(flow.plan(3), options, program)
        self.job = Job(flow.name, self.host, {str(n): sink for n, sink in enumerate(sinks)}, program)

    def until(self, condition: Callable[[dict[str, Any]], Any], what: str) -> Any:
        """Waits until a condition of the status holds, and returns what the condition has returned."""
        until = time.monotonic() + carrier.PATIENCE_S
        while not (found := condition(status := self.job.status())):
            if time.monotonic() > until or status["state"] in ("FAILED", "FINISHED"):
                carrier.print_stacks()
                time.sleep(10)  # until they have been printed, of which nobody tells
                raise AssertionError(f"{what}: {json.dumps(status.plain(), default=str)}")
            time.sleep(0.5)
        print(f"{what}, after {time.monotonic():.0f} s", flush=True)
        return found

    def kill(self, what: dict[str, Any]) -> None:
        """Kills a worker or a relay, as the status tells it."""
        self.host.relays().kill(int(what["node_id"]), what["pid"])

    def end(self) -> dict[str, Any]:
        """Opens the gate, and waits for the end of the job."""
        GATE.touch()
        self.until(lambda status: status["records_read"] and self.job.state == "FINISHED", "the job has ended")
        return self.job.wait(progress=False)


def chain(status: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Returns the two relays in the order of the tree, when all that is sent to all goes along it."""
    relays = {relay["number"]: relay for relay in status["relays"] if relay["state"] == "ready"}
    source = next((worker for worker in status["workers"] if worker["index"] == 0), None)
    streams = [stream for stream in (source or {}).get("streams", []) if stream["members"] == 2]
    if not streams or streams[0]["switching"]:
        return None
    tree = {int(node): children for node, children in streams[0]["tree"].items()}
    order, at = [], tree.get(0)
    while at:
        order += at
        at = tree.get(at[0])
    return [relays[number] for number in order] if len(order) == 2 and set(order) <= set(relays) else None


def transports(status: dict[str, Any]) -> list[str]:
    return sorted({why for worker in status["workers"] for why in worker["transports"].values()})


def exact() -> dict[str, Any]:
    """Kills the relay that forwards, a worker that receives, and once more a relay, when records come as fast as they
    can. Everything arrives once nevertheless."""
    flow, gate, limit = ps.Flow("exact", parallelism=2), 4000, 8000
    numbers, sums = ps.sinks.Collect(), ps.sinks.Collect()
    source = flow.read(Gated(gate, limit), parallelism=1).map(lambda number: (number, body(number)), parallelism=1)
    at_all = source.broadcast().map(arrived)
    at_all.write(numbers)
    keyed = at_all.key_by(lambda record: record[1] % KEYS)
    keyed.sum(lambda record: record[1], emit="final").write(sums)
    running = Running(flow, [numbers, sums])
    relays = running.until(chain, "the tree stands")
    running.until(lambda status: status["epochs"]["complete"], "an epoch is complete")
    running.kill(relays[0])
    gone = relays[0]["number"]
    relays = running.until(lambda s: (now := chain(s)) and gone not in [r["number"] for r in now] and now, "a new tree")
    worker = next(one for one in running.job.status()["workers"] if one["index"] == 2)
    running.kill(worker)
    running.until(lambda status: status["epochs"]["restarts"], "the worker is lost")
    relays = running.until(lambda status: status["state"] == "RUNNING" and chain(status), "the tree stands again")
    epochs = running.job.status()["epochs"]["complete"]
    status = running.until(lambda status: status["epochs"]["complete"] > epochs and status, "the job goes on")
    read = status["records_read"]
    GATE.touch()
    fast = running.until(lambda status: status["records_read"] > read + GROUP and status, "records come fast")
    running.kill(relays[0])
    last = running.end()
    (PLACE / "exact.json").write_text(json.dumps([numbers.records(), sums.records()]))
    return {
        "limit": limit,
        "read": [read, fast["records_read"]],
        "restarts": last["epochs"]["restarts"],
        "transports": transports(status),
    }


def measured(tcp: bool) -> dict[str, Any]:
    """Measures how many records a second come through the tree, from the gate on, at the slower receiver."""
    flow, gate, limit = ps.Flow("tcp" if tcp else "rdma", parallelism=2), 2000, 10_000
    times = ps.sinks.Collect()
    source = flow.read(Gated(gate, limit), parallelism=1).map(lambda number: (number, body(number)), parallelism=1)
    at_all = source.broadcast().map(arrived).filter(lambda record: record[1] in (gate, limit - 1))
    at_all.map(lambda record: (*record[:2], time.monotonic())).write(times)
    running = Running(flow, [times], tcp=tcp)
    status = running.until(lambda status: chain(status) and status, "the tree stands")
    running.end()
    taken = [
        at - begun for guest, number, at in times.records() if number == limit - 1
        for other, first, begun in times.records() if other == guest and first == gate
    ]  # fmt: skip
    return {"records_per_s": round((limit - 1 - gate) / max(taken)), "transports": transports(status)}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "exact": exact,
    "rdma": partial(measured, False),
    "tcp": partial(measured, True),
}


def main(parts: list[str]) -> None:
    if os.environ["GUEST"] != "0" or not os.fork():
        carrier.serve()
        os._exit(0)
    try:
        for part in parts:
            begun = time.monotonic()
            found = PARTS[part]()
            print(json.dumps({"part": part, **found, "took_s": round(time.monotonic() - begun)}), flush=True)
    finally:
        carrier.end_all()


if __name__ == "__main__":
    from tests.guests import job  # so that workers find the source's class by its module's name

    job.main(sys.argv[1:])
