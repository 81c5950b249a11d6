"""What a message costs from the output of a sender task to the inboxes of its receivers: by key, and to all tasks of
other workers; one process, core 0, without a run loop around it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any
from unittest import mock

import penstock as ps
from benchmarks.common import Bench, WrongResult, median, pinned
from penstock.runtime.exchange import message
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import build


class Exchange:
    """A sender task in worker 0, and `receivers` tasks in workers 1, 2, ..., to which it sends all records or divides
    them by key."""

    def __init__(self, receivers: int, workers: int, *, to_all: bool, epochs: bool) -> None:
        flow = ps.Flow("exchange", chaining=False)
        stream: Any = flow.read(ps.sources.Memory([]), parallelism=1, name="read")
        target: Any
        if to_all:
            target = stream.broadcast().map(len, parallelism=receivers)
        else:
            target = stream.key_by(lambda record: record).process(_nothing, parallelism=receivers)
        target.write(ps.sinks.Collect(), parallelism=1)
        plan = flow.plan(1)
        (chain,) = (chain.index for chain in plan.chains if chain.source is not None)
        (exchange,) = (exchange for exchange in plan.exchanges if exchange.source == chain)
        placed = {task.number: 1 + task.index % workers if task.chain == exchange.target else 0 for task in plan.tasks}
        self.sent_bytes = 0
        network = MemoryNetwork(workers + 1, capacity=1 << 24)
        self.loops = []
        for worker in range(workers + 1):
            transport = network.transport(worker)
            wiring = build(
                plan,
                placed,
                worker,
                transport,
                clock=perf_counter_ns,
                report=lambda reported: None,
                output_caches=OutputCaches() if epochs else None,
                on_snapshot=(lambda snapshot: None) if epochs else None,
            )
            self.loops.append(RunLoop(wiring, transport, perf_counter_ns))
        transport = self.loops[0].transport
        send = transport.send

        def counting(worker: int, task: int, parts: Any) -> bool:
            self.sent_bytes += sum(map(len, parts))
            return send(worker, task, parts)

        self._counting = mock.patch.object(transport, "send", counting)
        self.epoch = 0
        (self.sender,) = (task for task in self.loops[0].tasks if task.task.chain == chain)

    def pass_on(self, batches: list[list[Any]]) -> int:
        """Sends batches, each of them as a step of the task does. Returns how many records came."""
        came = 0
        sender, source = self.sender, self.loops[0]
        for batch in batches:
            sender.outputs.emit(batch)
            sender.outputs.flush_combiners()
            if sender.outputs.flush():
                raise WrongResult("the sender has no credit, although all that it sends is taken up")
            for loop in self.loops[1:]:
                loop.deliver(loop.transport.receive(0))
                for task in loop.tasks:
                    ready = task.input.inbox.ready
                    while ready:
                        channel, taken, _, cost = ready.popleft()
                        came += len(taken)
                        task.input.channels[channel].take(cost)
            source.deliver(source.transport.receive(0))
        if source.wiring.epochs:  # an epoch, so that the caches stay small
            self.epoch += 1
            for log in sender.logs:
                log.barrier(self.epoch)
                log.flush()
            for loop in self.loops[1:]:
                loop.deliver(loop.transport.receive(0))
                for task in loop.tasks:
                    if task.input.inbox.aligned:
                        task.input.inbox.release()
            sender.complete(self.epoch)
        return came

    def counted(self, batches: list[list[Any]]) -> tuple[float, float]:
        """Returns how often a batch is encoded, and the bytes that are sent for one."""
        encode, encodings = message.encode, []

        def counting(records: list[Any]) -> Any:
            encodings.append(1)
            return encode(records)

        self.sent_bytes = 0
        with mock.patch.object(message, "encode", counting), self._counting:
            self.pass_on(batches)
        return len(encodings) / len(batches), self.sent_bytes / len(batches)


def _nothing(ctx: Any, key: Any, record: Any) -> list[Any]:
    return []


def us_each(exchange: Exchange, batches: list[list[Any]], records: int, budget_ns: int) -> float:
    """The least us a batch in several lots."""
    if exchange.pass_on(batches) != records:
        raise WrongResult("records were lost")
    best = float("inf")
    until = perf_counter_ns() + budget_ns
    while perf_counter_ns() < until:
        started = perf_counter_ns()
        exchange.pass_on(batches)
        best = min(best, (perf_counter_ns() - started) / len(batches) / 1000)
    return best


def run(bench: Bench) -> None:
    """See the module."""
    budget = bench.pick(300_000_000, 3_000_000)
    contestants: dict[str, Callable[[], float]] = {}
    counts: dict[str, tuple[float, float]] = {}
    with pinned(0):
        for epochs in (False, True):
            kept = "kept for replay" if epochs else "not kept"
            for size in bench.pick([1, 100], [10]):
                batches = [[f"key {i % 50}" for i in range(at, at + size)] for at in range(20)]
                exchange = Exchange(1, 1, to_all=False, epochs=epochs)
                name = f"by key, 1 receiver, {size} records, {kept}"
                contestants[name] = lambda e=exchange, b=batches, n=20 * size: us_each(e, b, n, budget)  # type: ignore[misc]
            for receivers in bench.pick([1, 4, 16, 64], [4]):
                for workers in [1, 4] if receivers > 1 else [1]:
                    for size in (150, 16 * 1024):
                        batches = [["x" * size] for _ in range(20)]
                        exchange = Exchange(receivers, workers, to_all=True, epochs=epochs)
                        name = f"to {receivers} tasks in {workers} workers, {size} bytes, {kept}"
                        counts[name] = exchange.counted(batches)
                        contestants[name] = lambda e=exchange, b=batches, n=20 * receivers: us_each(e, b, n, budget)  # type: ignore[misc]
        results = bench.take_turns(contestants, unit="us")
    for name, figures in results.items():
        bench.case(name, median(figures), "us/batch", config="core 0", runs=figures)
        if name in counts:
            encodings, sent = counts[name]
            bench.case(f"encodings, {name}", encodings, "a batch", config="core 0")
            bench.case(f"sent, {name}", sent, "bytes/batch", config="core 0")
