"""From a plan to the tasks of one worker, connected to each other and to the transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from penstock.runtime.channel import (
    WINDOW_BYTES,
    LocalChannel,
    LocalInChannel,
    OutChannel,
    RemoteChannel,
    RemoteInChannel,
)
from penstock.runtime.operators import Stage, StageContext
from penstock.runtime.output import Output, make_output
from penstock.runtime.partition import KeyGroups
from penstock.runtime.plan import Chain, Exchange, Plan, TaskId, letters_of
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sources.base import SourceContext
from penstock.runtime.task import SourceTask, Task
from penstock.runtime.transport.base import Transport
from penstock.runtime.userfunc import DEAD_LETTERS, ErrorHandler

Report = Callable[[str, list[Any]], None]


@dataclass
class Wiring:
    """One worker's part of a job."""

    tasks: dict[int, Task] = field(default_factory=dict)  # by task number, in the plan's order
    remote_out: dict[int, RemoteChannel] = field(default_factory=dict)  # by channel number
    grants_due: dict[int, RemoteInChannel] = field(default_factory=dict)


def build(
    plan: Plan,
    workers: dict[int, int],
    worker: int,
    transport: Transport,
    *,
    clock: Callable[[], int],
    report: Report,
    window: int = WINDOW_BYTES,
) -> Wiring:
    """The tasks that `workers` (task number -> worker) gives to `worker`."""
    wiring = Wiring()
    mine = [task for task in plan.tasks if workers[task.number] == worker]
    for task in mine:
        wiring.tasks[task.number] = _make_task(plan, task, clock, report, transport)
    for exchange in plan.exchanges:
        for sender in (task for task in mine if task.chain == exchange.source):
            _connect_sender(plan, exchange, sender, workers, worker, transport, wiring, window)
        for receiver in (task for task in mine if task.chain == exchange.target):
            for origin in exchange.origins(receiver.index):
                sender = plan.task(exchange.source, origin)
                if workers[sender.number] != worker:
                    number = exchange.channel(origin, receiver.index)
                    wiring.tasks[receiver.number].inputs[number] = RemoteInChannel(
                        number, workers[sender.number], sender.number, transport, wiring.grants_due, window
                    )
    for built in wiring.tasks.values():
        built.connect()
    return wiring


def _make_task(plan: Plan, task: TaskId, clock: Callable[[], int], report: Report, transport: Transport) -> Task:
    chain = plan.chains[task.chain]
    stages = [_make_stage(operator, chain, task, report) for operator in chain.operators]
    _share_dead_letters(stages)
    for exchange in plan.exchanges:
        if exchange.source == chain.index and exchange.output is not None:
            stage = next(stage for stage in stages if stage.context.operator.name == exchange.operator)
            stage.context.side.setdefault(exchange.output, [])
    name = plan.task_name(task)
    if chain.source is None:
        return Task(task, name, stages, clock)

    def wake() -> None:
        source.wake()
        transport.wake()

    context = SourceContext(chain.source.name, task.index, chain.parallelism, stages[0].errors, wake)
    source = SourceTask(task, name, stages, clock)
    source.reader = chain.source.source.reader(chain.splits[task.index], context)
    return source


def _make_stage(operator: Any, chain: Chain, task: TaskId, report: Report) -> Stage:
    sink_context = SinkContext(operator.name, task.index, chain.parallelism, report)
    stage: Stage = operator.stage(StageContext(operator, task.index, chain.parallelism, sink_context))
    return stage


def _share_dead_letters(stages: list[Stage]) -> None:
    """A fused key function's failures are the keyed operator's dead letters."""
    for key_by, keyed in pairwise(stages):
        if key_by.context.operator.kind == "key_by":
            key_by.errors.dead_letters = keyed.context.side.get(DEAD_LETTERS)


def _side(task: Task, exchange: Exchange, tag: str) -> list[Any] | None:
    """The records of a side output of the operator that an exchange leaves; None when nobody takes them."""
    for stage in task.stages:
        if stage.context.operator.name == exchange.operator:
            return stage.context.side.get(tag)
    return None


def _connect_sender(
    plan: Plan,
    exchange: Exchange,
    sender: TaskId,
    workers: dict[int, int],
    worker: int,
    transport: Transport,
    wiring: Wiring,
    window: int,
) -> None:
    task = wiring.tasks[sender.number]
    target = plan.chains[exchange.target].operators[0]
    # What fails on the way (key functions, choosers, codecs) fails by the policy of the operator it goes to.
    step = f"{target.name}.key_by" if target.keyed else f"{exchange.operator} -> {target.name}"
    errors = ErrorHandler(step, target.on_error, target.declared_at, _side(task, exchange, letters_of(target.name)))
    task.edge_errors.append(errors)
    channels: list[OutChannel] = []
    for index in exchange.targets(sender.index):
        receiver = plan.task(exchange.target, index)
        number = exchange.channel(sender.index, index)
        if workers[receiver.number] == worker:
            local = LocalChannel(number, wiring.tasks[receiver.number], window)
            wiring.tasks[receiver.number].inputs[number] = LocalInChannel(local)
            channels.append(local)
        else:
            remote = RemoteChannel(number, workers[receiver.number], receiver.number, transport, errors, window)
            wiring.remote_out[number] = remote
            channels.append(remote)
    task.channels += channels
    output: Output = make_output(
        exchange.grouping,
        channels,
        sender=sender.index,
        groups=KeyGroups(plan.key_groups),
        combiner=exchange.combiner,
        errors=errors,
    )
    task.outputs.setdefault((exchange.operator, exchange.output), []).append(output)
