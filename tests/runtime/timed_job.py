"""A whole job in virtual time, in one thread: only functions that call `takes` need any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import penstock as ps
from penstock.host.decide.status import StatusBuilder
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Steps
from penstock.runtime.worker.wiring import build

S = 1_000_000_000
LOOK_NS = S // 4


class Job:
    """The workers of a job, which take turns in virtual time: only functions that call `takes` need any."""

    def __init__(
        self, make: Callable[[Callable[[int], None]], ps.Flow], workers: int, output_caches: OutputCaches | None = None
    ) -> None:
        self.now = 0
        self.flow = make(self._takes)
        self.plan = self.flow.plan(workers)
        network = MemoryNetwork(workers)
        self.loops = []
        for worker in range(workers):
            placed = {task.number: task.chain % workers for task in self.plan.tasks}
            transport = network.transport(worker)
            wiring = build(
                self.plan,
                placed,
                worker,
                transport,
                clock=lambda: self.now,
                report=lambda _: None,
                steps=Steps(stopwatch=lambda: self.now),
                output_caches=output_caches,
            )
            self.loops.append(RunLoop(wiring, transport, lambda: self.now))
        for loop in self.loops:
            for task in loop.tasks:
                task.open()
        self.placed = placed
        self.status = StatusBuilder(self.plan)
        self.status.place(placed, [])

    def _takes(self, ns: int) -> None:
        self.now += ns

    def looks(self, seconds: float) -> Iterator[dict[str, int]]:
        """How many records wait for each operator, at a look every quarter of a second."""
        end, next_look = self.now + int(seconds * S), self.now + LOOK_NS
        while self.now < end:
            ran = False
            for loop in self.loops:
                loop.deliver(loop.transport.receive(0))
                for task in loop.tasks:
                    if task.runnable():
                        task.step()
                        ran = True
            if not ran:
                self.now += 100_000
            if self.now >= next_look:
                next_look += LOOK_NS
                yield self.look()

    def queued(self, operator: str) -> int:
        """How many records lie in the inboxes of an operator's tasks."""
        return sum(task.input.queued for loop in self.loops for task in loop.tasks if task.name.startswith(operator))

    def look(self) -> dict[str, int]:
        """How many records wait for each operator."""
        reports = [
            {"index": worker, "time_ns": self.now, "tasks": loop.load(), "ring_bytes": 0}
            for worker, loop in enumerate(self.loops)
        ]
        operators = self.status.build("RUNNING", reports, self.now / S)["operators"]
        return {name: operator["waiting"] for name, operator in operators.items()}


RATE, EACH_NS = 1_000, 100_000  # records of the world a second; what each takes in the slow operator: 10,000/s at most
BURST = range(1_000, 4_000)  # from 1 s to 4 s
OF_ONE = 20  # in the burst: 20,000 records/s come to the slow operator


def slowly(takes: Callable[[int], None]) -> Callable[[Any], Any]:
    """A function that takes EACH_NS for a record, and returns it."""

    def slow(record: Any) -> Any:
        takes(EACH_NS)
        return record

    return slow


def burst_inside(takes: Callable[[int], None], apart: bool) -> ps.Flow:
    """A source that is quiet all the time; an operator that suddenly makes many records of one; a slow operator."""

    def several(i: int) -> list[str]:
        return [f"{i} {n:0100}" for n in range(OF_ONE if i in BURST else 1)]

    flow = ps.Flow("inside", parallelism=1)
    numbers = flow.read(ps.sources.Generator(lambda i: i, rate=RATE), name="numbers")
    if apart:
        numbers = numbers.rebalance()
    numbers.flat_map(several, name="several").rebalance().map(slowly(takes), name="slow").write(
        ps.sinks.Null(), name="out"
    )
    return flow
