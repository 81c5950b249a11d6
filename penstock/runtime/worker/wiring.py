"""Builds the tasks of one worker from the plan, and connects them to each other and to the transport.

`Wiring` is one worker's part of a job. `build_tasks` builds all tasks at the start of the job, and after a failure
those that go back. These are built anew from their snapshots. The tasks upstream of them stay as they are, and only
their channels are connected to the new tasks. A wiring must never touch a task that it was not asked to change.

That only the affected tasks go back is docs/papers.md: D5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from time import time
from typing import Any

from penstock.runtime.exchange.channel import (
    CREDIT_WINDOW_BYTES,
    InChannel,
    LocalInChannel,
    OutChannel,
    RemoteInChannel,
)
from penstock.runtime.exchange.delivery import Delivery
from penstock.runtime.exchange.grouping import All
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import END, WATERMARK
from penstock.runtime.exchange.output import Output, make_output
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.operators.base import Stage, StageContext
from penstock.runtime.operators.fork import Forking
from penstock.runtime.program.plan import Chain, Exchange, Plan, TaskId, letters_of
from penstock.runtime.records.batch import Batch
from penstock.runtime.records.userfunc import DEAD_LETTERS, ErrorHandler
from penstock.runtime.relaying.root import MulticastRoot, RootStream
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sources.base import Reader, SourceContext, Split
from penstock.runtime.sources.threaded import ThreadReader
from penstock.runtime.transport.base import Buffer, Transport
from penstock.runtime.worker.channel_input import ChannelInput
from penstock.runtime.worker.passage import Passage
from penstock.runtime.worker.reader_input import ReaderInput
from penstock.runtime.worker.shared_batches import SharedBatches
from penstock.runtime.worker.task import Snapshot, Steps, Task, TaskOptions
from penstock.runtime.worker.task_input import TaskInput


@dataclass(frozen=True)
class SinkRecords:
    """Records that a sink's task sends towards the driver, and the epoch with which they will be committed."""

    channel: str
    records: list[Any]
    task: int
    generation: int
    epoch: int


Report = Callable[[SinkRecords], None]


@dataclass(frozen=True)
class WiringOptions:
    """How a worker's tasks are wired. `report` carries the records of sinks towards the driver. `wall` is the clock for
    timers, in seconds since 1970. `output_caches`, `on_snapshot` and `on_motion` are None in a job without epochs; the
    latter two are those of TaskOptions. `root` is None when all workers are on one node. With `apart`, records pass
    between two tasks of this worker as if the tasks ran in different workers. With `check_shared`, functions that
    change records of other tasks are found. With `aligned`, somebody tells sources how far the others are.
    `run` names this run of the job, for sinks."""

    clock: Callable[[], int]
    report: Report
    wall: Callable[[], float] = time
    credit_window: int = CREDIT_WINDOW_BYTES
    output_caches: OutputCaches | None = None
    on_snapshot: Callable[[Snapshot], None] | None = None
    on_motion: Callable[[TaskId, int], None] | None = None
    root: MulticastRoot | None = None
    steps: Steps = field(default_factory=Steps)
    apart: bool = False
    check_shared: bool = False
    aligned: bool = False
    run: str = ""


class Wiring:
    """One worker's part of a job: the tasks that `workers` (task number -> worker) assigns to `worker`."""

    def __init__(
        self, plan: Plan, workers: dict[int, int], worker: int, transport: Transport, options: WiringOptions
    ) -> None:
        self.plan = plan
        self.workers = workers
        self.worker = worker
        self.tasks: dict[int, Task] = {}  # by task number, in the plan's order
        self.out: dict[int, tuple[OutLog, OutChannel]] = {}  # by channel number
        # Channels that were catching up at the last look, or that repeat entries which a relay may not have delivered.
        self.catching_up: dict[int, tuple[OutLog, OutChannel]] = {}
        self.output_caches = options.output_caches
        self.root = root = options.root
        if root is not None:
            root.repeating = self.catching_up
        self._streams: dict[OutLog, RootStream] = {}
        self._transport = transport
        self._options = options
        self._clock = options.clock
        self.shared_batches = SharedBatches() if options.check_shared else None
        self._task_options = TaskOptions(
            plan.time_grain is not None,
            options.on_snapshot,
            options.on_motion,
            options.steps,
            transport.wake,
            self.shared_batches,
        )
        self.delivery = Delivery(
            transport,
            self.out,
            self._names,
            recovers=self.epochs,
            shared=self.shared_batches,
            from_relay=None if root is None else self._from_relay,
        )
        self._targets: dict[int, int] = {}  # by channel number: the number of the receiving task
        self._outputs: dict[tuple[int, int], Output] = {}  # by exchange and number of the sending task

    @property
    def epochs(self) -> bool:
        return self.output_caches is not None

    def mine(self, numbers: Iterable[int]) -> list[TaskId]:
        """Returns the tasks among the given ones that this worker runs, in the order of the plan."""
        return [self.plan.by_number[n] for n in sorted(numbers) if self.workers.get(n) == self.worker]

    def target_of(self, channel: int) -> int | None:
        """Returns the number of the task that a channel leads to, or None when the plan no longer has the channel."""
        return self._targets.get(channel)

    def _names(self, channel: int) -> tuple[str, str]:
        plan = self.plan
        for exchange in plan.exchanges:
            sender, receiver = divmod(channel - exchange.first_channel, exchange.receivers)
            if 0 <= sender < exchange.senders:
                tasks = plan.task(exchange.source, sender), plan.task(exchange.target, receiver)
                return plan.task_name(tasks[0]), plan.task_name(tasks[1])
        return "a task that is gone", "a task that is gone"

    def _from_relay(self, sender: int, message: Buffer) -> bool:
        """Takes a message about a stream of this worker. Returns False when the sender is no relay."""
        if sender < FIRST_RELAY:
            return False
        assert self.root is not None
        self.root.take(sender, message)
        return True

    def build_tasks(
        self,
        numbers: Iterable[int] | None = None,
        *,
        generation: int = 0,
        epoch: int = 0,
        splits: dict[int, list[Split]] | None = None,
    ) -> list[Task]:
        """Builds the tasks (None: all) that this worker runs, and connects them. Tasks of a `generation` above 0 send
        nothing before `connect_tasks`. `splits`, by task number, replaces the splits that the plan gives to sources."""
        numbers = {task.number for task in self.plan.tasks} if numbers is None else set(numbers)
        made = self.mine(numbers)
        plan = self.plan
        for task in made:
            given = (splits or {}).get(task.number)
            self.tasks[task.number] = self._make_task(task, generation, epoch, given)
        self.tasks = dict(sorted(self.tasks.items()))
        for exchange in self.plan.exchanges:
            for sender in (task for task in made if task.chain == exchange.source):
                self._connect_sender(exchange, sender, generation, epoch)
        for exchange in self.plan.exchanges:
            # This loop also covers tasks that stay where they are while a task that sends to them migrates.
            for receiver in (task.task for task in self.tasks.values() if task.task.chain == exchange.target):
                for sender in (plan.task(exchange.source, origin) for origin in exchange.origins(receiver.index)):
                    if receiver.number in numbers or sender.number in numbers:
                        self._connect_receiver(exchange, sender, receiver, generation)
        tasks = [self.tasks[task.number] for task in made]
        for built in tasks:
            built.connect()
        return tasks

    def remove_tasks(self, numbers: set[int]) -> list[Task]:
        """Removes the given tasks that run here, and disconnects the channels that lead to any of them. Returns the
        removed tasks, which the caller has to close."""
        for channel, target in self._targets.items():
            if target in numbers and channel in self.out:
                log, out = self.out[channel]
                log.disconnect(out)
        gone = [self.tasks.pop(task.number) for task in self.mine(numbers) if task.number in self.tasks]
        for task in gone:
            for log in task.logs:
                self._clear(log)
            for out in task.outputs.channels:
                self.out.pop(out.number, None)
                self.catching_up.pop(out.number, None)
            for number in task.input.channels:
                self.delivery.remove(number)
        return gone

    def connect_tasks(self, numbers: set[int], generation: int) -> None:
        """Connects the channels from and to these tasks, which have all been built again. The channels then send what
        the receivers have missed."""
        theirs = {
            out.number for number in numbers if number in self.tasks for out in self.tasks[number].outputs.channels
        }
        for channel, target in self._targets.items():
            if (target in numbers or channel in theirs) and channel in self.out:
                log, out = self.catching_up[channel] = self.out[channel]
                log.connect(out, generation)

    def _make_task(self, task: TaskId, generation: int, epoch: int, splits: list[Split] | None) -> Task:
        plan = self.plan
        chain = plan.chains[task.chain]
        built: Task
        name = plan.task_name(task)

        def report(channel: str, records: list[Any]) -> None:
            self._options.report(SinkRecords(channel, records, task.number, generation, built.epoch + 1))

        stages = [self._make_stage(operator, chain, task, generation, report) for operator in chain.operators]
        _name_failures(stages)
        for exchange in plan.exchanges:
            if exchange.source == chain.index and exchange.output is not None:
                stage = next(stage for stage in stages if stage.context.operator.name == exchange.operator)
                stage.context.side.setdefault(exchange.output, [])
        passage = Passage(stages, self._clock, self._options.wall)
        input_: TaskInput
        if chain.source is None:
            waits = self._options.steps.waits_for_more
            event_time = self._task_options.event_time
            input_ = ChannelInput(passage, self._clock, event_time=event_time, waits_for_more=waits)
        else:
            input_ = self._reader_input(passage, chain, chain.splits[task.index] if splits is None else splits)
        built = Task(task, name, input_, self._task_options, generation, epoch)
        return built

    def _reader_input(self, passage: Passage, chain: Chain, splits: list[Split]) -> ReaderInput:
        source, transport = chain.source, self._transport
        assert source is not None
        context = passage.stages[0].context

        def open_reader(splits: list[Split], wake_task: Callable[[], None]) -> Reader:
            threaded: ThreadReader | None = None

            def wake_loop() -> None:
                wake_task()
                transport.wake()

            def wake() -> None:
                if threaded is not None:
                    threaded.wake_reader()
                wake_loop()

            where = SourceContext(source.name, context.index, chain.parallelism, context.errors, wake, self._clock)
            reader = source.source.reader(splits, where)
            if reader.blocking:
                reader = threaded = ThreadReader(reader, wake_loop, f"{source.name} reader")
            return reader

        waits = self._options.steps.waits_for_more
        read = ReaderInput(passage, self._clock, splits, open_reader, self.output_caches, waits_for_more=waits)
        if self._options.aligned:
            read.await_alignment()
        return read

    def _make_stage(
        self,
        operator: Any,
        chain: Chain,
        task: TaskId,
        generation: int,
        report: Callable[[str, list[Any]], None],
    ) -> Stage:
        sink_context = self.sink_context(self.plan, operator, task, generation, restoring=generation > 1)
        sink_context.report = report
        context = StageContext(operator, task.index, chain.parallelism, sink_context, self.epochs, self._options.wall)
        context.time_grain = self.plan.time_grain or 1
        context.event_time = self.plan.time_grain is not None
        stage: Stage = operator.stage(context)
        if self.shared_batches is not None:
            self.shared_batches.watch(stage)
            if isinstance(stage, Forking):
                stage.on_shared = self.shared_batches.add
        return stage

    def sink_context(self, plan: Plan, operator: Any, task: TaskId, generation: int, *, restoring: bool) -> SinkContext:
        """Returns the context of an operator's task of this plan, if the operator is a sink."""
        return SinkContext(
            operator.name,
            task.index,
            plan.chains[task.chain].parallelism,
            epochs=self.epochs,
            restoring=restoring,
            errors=ErrorHandler(operator.name),
            job=plan.name,
            run=self._options.run,
            generation=generation,
        )

    def replan(self, plan: Plan, workers: dict[int, int]) -> None:
        """Continues with another plan. Tasks that are not in the new plan, or that it describes differently, have been
        removed already. Tasks that stay, and that send to an operator whose number of tasks has changed, repartition
        their cached messages among the operator's new tasks, which are built and connected afterwards."""
        before, self.plan = self.plan, plan
        there, self.workers = self.workers, workers
        for old, new in zip(before.exchanges, plan.exchanges, strict=False):
            if old.first_channel == new.first_channel and old.receivers == new.receivers:
                continue
            for sender in plan.tasks:
                if sender.chain == new.source and sender.number in self.tasks:
                    self._repartition(old, new, sender)
        for channel, target in list(self._targets.items()):
            if channel in self.out and target in workers and there.get(target, workers[target]) != workers[target]:
                # The receiver migrates, and the log stays as it is.
                log, out = self.out[channel]
                log.move(out, workers[target], local=self._is_here(workers[target]))
                self.catching_up.pop(channel, None)

    def _receiver(self, number: int) -> ChannelInput | None:
        """Returns the input of a task that receives from channels, or None when the task is not built here."""
        task = self.tasks.get(number)
        if task is None:
            return None
        assert isinstance(task.input, ChannelInput)
        return task.input

    def _is_here(self, worker: int) -> bool:
        """Whether records pass to a task of a worker as they are."""
        return worker == self.worker and not self._options.apart

    def _log(self, errors: ErrorHandler) -> OutLog:
        cache = self.output_caches.cache() if self.output_caches is not None else None
        log = OutLog(self._transport, errors, cache)
        if self.shared_batches is not None:
            log.on_shared = self.shared_batches.add
            if self._options.apart:
                log.on_entry = self.shared_batches.sends
        return log

    def _clear(self, log: OutLog) -> None:
        log.cache.clear()
        stream = self._streams.pop(log, None)
        if stream is not None and self.root is not None:
            self.root.close(stream)

    def _repartition(self, old: Exchange, new: Exchange, sender: TaskId) -> None:
        task = self.tasks[sender.number]
        output = self._outputs.pop((old.index, sender.number))
        output.flush()  # send what the combiner has kept from a step that was interrupted
        logs = output.logs
        parts = [deque(log.kept()) for log in logs]
        completed = max(log.cache.completed for log in logs)
        task.outputs.remove(logs)
        for log in logs:
            self._clear(log)
            for channel in log.channels:
                for where in (self.out, self.catching_up, self._targets):
                    where.pop(channel.number, None)
        fresh = self._connect_sender(new, sender, 1, completed, instead_of=output)
        # All logs have the same barriers and watermarks. So the records between two of them are repartitioned
        # first, and then the barrier or watermark is sent.
        while any(parts):
            mark: tuple[int, int, Batch | None] | None = None
            for part in parts:
                while part:
                    kind, stamp, batch = part.popleft()
                    if batch is None:
                        mark = (kind, stamp, None)
                        break
                    fresh.repartition(batch, stamp)
            fresh.flush()
            for log in fresh.logs:
                if mark is not None and mark[0] == END:
                    log.end()
                elif mark is not None and mark[0] == WATERMARK:
                    log.watermark(mark[1])
                elif mark is not None:
                    log.barrier(mark[1])
                log.flush()
        task.outputs.flush()

    def _connect_sender(
        self, exchange: Exchange, sender: TaskId, generation: int, epoch: int, instead_of: Output | None = None
    ) -> Output:
        plan = self.plan
        task = self.tasks[sender.number]
        target = plan.chains[exchange.target].operators[0]
        # When a record fails on the way (in a key function, a chooser or a codec), the failure counts for the operator
        # that receives the record.
        step = f" (on the way from {exchange.operator!r})"
        sides = [one.context.side for one in task.stages if one.context.operator.name == exchange.operator]
        letters = sides[0].get(letters_of(target.name)) if sides else None
        errors = ErrorHandler(target.name, target.on_error, target.declared_at, letters, step)
        logs: list[OutLog] = []
        targets = exchange.targets(sender.index)
        for index in targets:
            receiver = plan.task(exchange.target, index)
            number = exchange.channel(sender.index, index)
            worker = self.workers[receiver.number]
            if not logs or not isinstance(exchange.grouping, All):
                logs.append(self._log(errors))
                logs[-1].cache.completed = epoch
                if self.root is not None and isinstance(exchange.grouping, All) and len(targets) > 1:
                    logs[-1].stream = self._streams[logs[-1]] = self.root.stream(logs[-1])
            # While the plan changes, the receiver may not be built yet. It sets itself as the target when it is.
            channel = logs[-1].channel(
                number, receiver.number, worker, local=self._is_here(worker), credit_window=self._options.credit_window
            )
            channel.receiver = self._receiver(receiver.number) if channel.local else None
            if generation:
                logs[-1].disconnect(channel)
            self.out[number] = logs[-1], channel
            self._targets[number] = receiver.number
        output: Output = make_output(
            exchange.grouping,
            logs,
            sender=sender.index,
            combiner=exchange.combiner,
            errors=errors,
            table=plan.chains[exchange.target].table,
        )
        output.target = exchange.target
        task.outputs.add(exchange.operator, exchange.output, output, errors, instead_of)
        self._outputs[exchange.index, sender.number] = output
        return output

    def _connect_receiver(self, exchange: Exchange, sender: TaskId, receiver: TaskId, generation: int) -> None:
        into = self._receiver(receiver.number)
        assert into is not None
        number = exchange.channel(sender.index, receiver.index)
        worker = self.workers[sender.number]
        self.delivery.remove(number)
        if self._is_here(worker):
            _, channel = self.out[number]
            channel.deliver_to(into)
            input_: InChannel = LocalInChannel(channel, generation)
        else:
            due = self.delivery.grants_due
            input_ = remote = RemoteInChannel(
                number, worker, sender.number, self._transport, due, self._options.credit_window, generation
            )
            self.delivery.add(into, remote)
        input_.port = exchange.port
        into.add(input_)


def _name_failures(stages: list[Stage]) -> None:
    """Gives the failures of a fused key function the name of the keyed operator."""
    for key_by, keyed in pairwise(stages):
        if key_by.context.operator.kind == "key_by":
            key_by.errors.operator = keyed.context.operator.name
            key_by.errors.dead_letters = keyed.context.side.get(DEAD_LETTERS)


def build(plan: Plan, workers: dict[int, int], worker: int, transport: Transport, **options: Any) -> Wiring:
    """Returns a worker's wiring with all its tasks built. `options`: see WiringOptions."""
    wiring = Wiring(plan, workers, worker, transport, WiringOptions(**options))
    wiring.build_tasks()
    return wiring
