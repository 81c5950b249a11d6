"""A job's workers in one thread, stepped in an order that a seed decides.

The tasks, channels, codecs and run loops are the real ones; only who runs next, for how long a worker stalls, and what
time it is come from the seed. A `Cluster` keeps account of all that passes, so that after each action it can say
whether memory is bounded, and at the end whether every channel carried everything once, in order, and then its end.

    cluster = Cluster(flow, {0: 0, 1: 1}, seed=7, capacity=4096, window=100)
    outputs = cluster.run()       # raises Stuck when no task can continue, with a dump

A worker whose tasks have all finished is gone, as its run loop returns then: nothing empties its inbox any more.
"""

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

from penstock.host.decide import relay_keeper
from penstock.runtime.event_time.watermark import Watermark
from penstock.runtime.exchange import output
from penstock.runtime.exchange import output_cache as output_caches
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.operators import aggregated, pieces, processing, stateless, step_size, windowing
from penstock.runtime.program.flow import Flow
from penstock.runtime.records.batch import Batch, KeyedBatch
from penstock.runtime.relaying import root as root_module
from penstock.runtime.sources.base import Reader, Source, SourceContext, Split
from penstock.runtime.state import keyed as state
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker import task as task_module
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Task
from penstock.runtime.worker.wiring import build

# Small, so that a flow of some hundred records meets every bound.
LIMIT_RECORDS = 24
EXPAND_RECORDS = 16
COMBINED_KEYS = 8


class Stuck(AssertionError):
    """No task can continue, but not all tasks have finished."""


@contextlib.contextmanager
def small_steps(seed: int) -> Iterator[None]:
    """The runtime's step sizes made small, and its stop-watch one of the seed's choosing."""
    rng = random.Random(seed)
    now = 0

    def stopwatch() -> int:
        nonlocal now
        now += rng.choice((1_000, 100_000, 3_000_000))
        return now

    with (
        mock.patch.object(task_module, "perf_counter_ns", stopwatch),
        mock.patch.object(step_size, "LIMIT_FIRST", rng.choice((1, 4, LIMIT_RECORDS))),
        mock.patch.object(step_size, "LIMIT_MAX", LIMIT_RECORDS),
        mock.patch.object(aggregated, "EXPAND_RECORDS_MAX", EXPAND_RECORDS),
        mock.patch.object(processing, "EXPAND_RECORDS_MAX", EXPAND_RECORDS),
        mock.patch.object(stateless, "EXPAND_RECORDS_MAX", EXPAND_RECORDS),
        mock.patch.object(windowing, "EXPAND_RECORDS_MAX", EXPAND_RECORDS),
        mock.patch.object(pieces, "EXPAND_RECORDS_MAX", EXPAND_RECORDS),
        mock.patch.object(output, "COMBINED_KEYS_MAX", COMBINED_KEYS),
        mock.patch.object(output_caches, "SLAB_MESSAGE", 1),
        mock.patch.object(output_caches, "_SLAB_LEAST", 32),
        mock.patch.object(output_caches, "_SLAB_MOST", 256),
        mock.patch.object(state, "_CHUNK_RECORDS", 6),
        mock.patch.object(state, "_BLIND_EPOCHS", 3),
        mock.patch.object(relay_keeper, "_AGAIN_FIRST_S", 0.002),
        mock.patch.object(relay_keeper, "_AGAIN_MAX_S", 0.05),
        mock.patch.object(root_module, "_CONNECT_NS", 5_000_000),
    ):
        yield


class Trickle(Source):
    """Lists of records, one a split, of which a read hands out a few, or none although there are more."""

    def __init__(self, parts: list[list[Any]], seed: int) -> None:
        self.parts = parts
        self.seed = seed

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(str(i), i) for i in range(len(self.parts))]

    def reader(self, splits: list[Split], context: SourceContext) -> Reader:
        return _TrickleReader(
            {split.name: (self.parts[split.payload], split.offset or 0) for split in splits},
            random.Random(f"{self.seed}/{context.operator}/{context.index}"),
        )


class _TrickleReader(Reader):
    def __init__(self, splits: dict[str, tuple[list[Any], int]], rng: random.Random) -> None:
        self._parts = {name: part for name, (part, _) in splits.items()}
        self._offsets = {name: offset for name, (_, offset) in splits.items()}
        self._rng = rng
        self._look()

    def _look(self) -> None:
        self._left = [name for name, part in self._parts.items() if self._offsets[name] < len(part)]
        self.finished = not self._left

    def read(self, limit: int) -> list[Any]:
        if self.finished:
            return []
        n = min(limit, self._rng.choice((0, 1, 3, limit)))
        name = self._left[0]
        start = self._offsets[name]
        records = self._parts[name][start : start + n]
        self._offsets[name] = start + len(records)
        self._look()
        return records

    def offsets(self) -> dict[str, Any]:
        return dict(self._offsets)


class Cluster:
    """The workers of one job; see the module's docstring. `placed` maps task numbers to workers 0, 1, ..."""

    def __init__(self, flow: Flow, placed: dict[int, int], *, seed: int, capacity: int, window: int) -> None:
        self.seed = seed
        self.window = window
        self.rng = random.Random(seed)
        self.now = 0
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        workers = max(placed.values()) + 1
        self.plan = flow.plan(workers)
        network = MemoryNetwork(workers, capacity)
        self.loops: list[RunLoop] = []
        for worker in range(workers):
            transport = network.transport(worker)
            wiring = build(
                self.plan,
                placed,
                worker,
                transport,
                clock=self.clock,
                report=lambda reported: self.outputs[reported.channel].extend(reported.records),
                credit_window=window,
            )
            self.loops.append(RunLoop(wiring, transport, self.clock))
        self.capacity = capacity
        self.placed = placed
        self.steps = 0
        self._ledger = Ledger(self)

    def clock(self) -> int:
        self.now += 1000
        return self.now

    @property
    def tasks(self) -> list[Task]:
        return [task for loop in self.loops for task in loop.tasks]

    def run(self) -> dict[str, list[Any]]:
        """Until all tasks have finished; what reached each Collect sink, by its channel name."""
        for task in self.tasks:
            task.open()
        alive = [loop for loop in self.loops if loop.tasks]
        stalled: dict[RunLoop, int] = {}
        idle = 0
        while alive:
            loop = self.rng.choice(alive)
            if stalled.get(loop, 0) > 0 and idle < 3 * len(alive):
                stalled[loop] -= 1
                continue
            if self.rng.random() < 0.02:
                stalled[loop] = self.rng.randrange(60)
            if self._turn(loop, idle >= 20 * len(alive)):
                idle = 0
            else:
                idle += 1
                if idle > 40 * len(alive) and sum(self._turn(other, True) for other in alive) == 0:
                    raise Stuck(f"no progress after {self.steps} steps\n{self.dump()}")
            if all(task.finished for task in loop.tasks):
                alive.remove(loop)
        for task in self.tasks:
            task.close(False)
        self._ledger.check_end()
        return self.outputs

    def _turn(self, loop: RunLoop, whole: bool) -> bool:
        """Some of what a run loop does in a pass, or all of it; whether that changed anything."""
        moved = False
        if whole or self.rng.random() < 0.7:
            messages = loop.transport.receive(0)
            due = len(loop.wiring.delivery.grants_due)
            loop.deliver(messages)
            moved = bool(messages) or len(loop.wiring.delivery.grants_due) < due
        # A pass takes the tasks in order; one alone is what other threads and slow functions make of it.
        chosen = loop.tasks if whole or self.rng.random() < 0.5 else [self.rng.choice(loop.tasks)]
        for task in chosen:
            unsent = _unsent(task)
            if task.runnable():
                task.step()
                self.steps += 1
                moved = True
            moved = moved or _unsent(task) != unsent
        if moved:
            self._ledger.check_bounds(loop.tasks)
        else:
            for task in loop.tasks:
                task.idle()
        return moved

    def dump(self) -> str:
        """Where everything stands, for a failing test."""
        lines = [f"seed {self.seed}, window {self.window}, capacity {self.capacity}, placed {self.placed}"]
        for worker, loop in enumerate(self.loops):
            due = sorted(loop.wiring.delivery.grants_due)
            lines.append(f"worker {worker}: inbox {loop.transport._inbox.used} bytes, grants due {due}")
            for task in loop.tasks:
                lines.append(
                    f"  {task.name}: finished {task.finished}, blocked {task.blocked}, queued {task.input.queued}, "
                    f"open inputs {task.input.is_read or task.input.inbox.open}, {task.state}"
                )
                lines += [
                    f"    -> {'local' if channel.local else 'remote'} {channel.number}: outstanding "
                    f"{channel.outstanding}, queued {log.unsent(channel)}, ended {log.ended}"
                    for log in task.logs
                    for channel in log.channels
                ]
        return "\n".join(lines)


def _unsent(task: Task) -> list[int]:
    """What waits in a blocked task's channels."""
    if not task.blocked:
        return []
    return [2 * len(log.queue) + log.stopped_by_room + sum(2 * out.next for out in log.channels) for log in task.logs]


class Ledger:
    """What went into each channel and what came out of it; hooks on the channels and tasks of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.pushed: dict[int, list[Any]] = defaultdict(list)
        self.received: dict[int, list[Any]] = defaultdict(list)
        self.largest: dict[int, int] = defaultdict(int)  # cost of a channel's largest message
        self.ended: list[int] = []
        for task in cluster.tasks:
            self._watch_task(task)
            for log in task.logs:
                self._watch_log(log)

    def _watch_log(self, log: OutLog) -> None:
        push, watermark = log.push, log.watermark
        numbers = [channel.number for channel in log.channels]

        def watched(batch: Batch, stamp: int) -> None:
            assert len(batch), f"channels {numbers}: an empty batch was pushed"
            assert not log.ended, f"channels {numbers}: a batch was pushed after the end"
            for number in numbers:
                self.pushed[number] += _records(batch)
            push(batch, stamp)

        def watched_watermark(value: int) -> None:
            assert not log.ended, f"channels {numbers}: a watermark was pushed after the end"
            for number in numbers:
                self.pushed[number].append(("watermark", value))
            watermark(value)

        log.push = watched  # type: ignore[method-assign]
        log.watermark = watched_watermark  # type: ignore[method-assign]

    def _watch_task(self, task: Task) -> None:
        into = task.input
        if into.is_read:
            return
        receive, receive_watermark, receive_end = into.receive, into.receive_watermark, into.receive_end

        def watched(channel: int, batch: Batch, stamp: int, cost: int) -> None:
            assert channel not in self.ended, f"channel {channel}: records came after its end"
            self.received[channel] += _records(batch)
            self.largest[channel] = max(self.largest[channel], cost)
            receive(channel, batch, stamp, cost)

        def watched_watermark(channel: int, value: int) -> None:
            assert channel not in self.ended, f"channel {channel}: a watermark came after its end"
            self.received[channel].append(("watermark", value))
            receive_watermark(channel, value)

        def watched_end(channel: int) -> None:
            self.ended.append(channel)
            receive_end(channel)

        into.receive = watched  # type: ignore[method-assign]
        into.receive_watermark = watched_watermark  # type: ignore[method-assign]
        into.receive_end = watched_end  # type: ignore[method-assign]

    def check_bounds(self, tasks: list[Task]) -> None:
        """No channel holds more than a window and a message, no sender more than a step made."""
        for task in tasks:
            held: dict[int, int] = defaultdict(int)
            rests = 0
            for channel, batch, _, cost in () if task.input.is_read else task.input.inbox.ready:
                held[channel] += cost
                rests += cost == 0 and not isinstance(batch, Watermark)
            for channel, cost in held.items():
                bound = self._cluster.window + self.largest[channel]
                assert cost <= bound, f"{task.name}: channel {channel} holds {cost} bytes, more than {bound}"
            assert rests <= 1, f"{task.name}: {rests} rests of taken batches, at most one is accounted for"
            # Of a step: a piece or a batch, what was combined, and side outputs of the same records.
            bound = 2 * LIMIT_RECORDS + EXPAND_RECORDS + COMBINED_KEYS
            for log in task.logs:
                queued = max(log.unsent(channel) for channel in log.channels) if log.queue else 0
                assert queued <= bound, f"{task.name}: {queued} records wait in channel {log.channels[0].number}"

    def check_end(self) -> None:
        """Every channel carried what was pushed, watermarks too, once and in order, and then ended."""
        channels = {channel.number for task in self._cluster.tasks for channel in task.outputs.channels}
        assert sorted(self.ended) == sorted(channels), "each channel must end exactly once"
        for number in channels:
            assert self.received[number] == self.pushed[number], f"channel {number} changed its records or their order"
        for task in self._cluster.tasks:
            assert task.input.queued == 0, f"{task.name}: {task.input.queued} records counted in an empty inbox"
            assert task.input.is_read or not task.input.inbox.ready


def _records(batch: Batch) -> list[Any]:
    if isinstance(batch, KeyedBatch):
        return list(zip(batch.keys, batch.values, [batch.partial] * len(batch), strict=True))
    return batch
