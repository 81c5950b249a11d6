"""What must hold all the time in a simulated job with epochs (tests/epochs/sim.py), and what at its end.

- Who goes back is exactly who was lost and all downstream of them, worked out here anew; nobody else is touched, and
nobody
  who sends to them is held up.
- Epochs complete in order, each from snapshots of all tasks; what a task's snapshots say together is what the task had
  in memory, and a task that is made again has that in memory. It is told again the watermarks that it knew, and keeps
  no window that is closed.
- The caches' memory is bounded and rightly counted; an inbox holds a window and a message of each channel. Stamps are
  of the clock of the receiver's node.
- At the end nothing is left anywhere, and outputs and keyed state are those of a run without faults.
"""

from __future__ import annotations

import itertools
import pickle
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any

from penstock.runtime.epochs import coordinator as protocol
from penstock.runtime.epochs.manifest import Blob, Manifest, TaskEntry
from penstock.runtime.epochs.participant import Acknowledged
from penstock.runtime.epochs.snapshot import Chain
from penstock.runtime.event_time.watermark import IDLE, Watermark
from penstock.runtime.exchange.channel import LINKS_MAX
from penstock.runtime.exchange.inbox import Inbox
from penstock.runtime.exchange.message import END, WATERMARK
from penstock.runtime.exchange.output_cache import OnDisk
from penstock.runtime.operators.base import KeyedStage
from penstock.runtime.operators.connected import _BroadcastStage
from penstock.runtime.operators.processing import ProcessStage
from penstock.runtime.operators.windowing import _Windowing, _WindowMap
from penstock.runtime.program.plan import Plan, TaskId
from penstock.runtime.records.key_groups import key_groups
from penstock.runtime.state.broadcast import BroadcastState
from penstock.runtime.state.keyed import NESTED, SHARED, KeyedMap, LoggedMap, SavedState, StateMap
from penstock.runtime.state.nested import NestedMap
from penstock.runtime.state.timers import Timers
from penstock.runtime.state.window_records import WindowRecords
from penstock.runtime.transport.memory import MemoryNetwork
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Snapshot, Task
from penstock.runtime.worker.task_state import AT_END
from penstock.runtime.worker.wiring import build
from tests.epochs.flows import Tallies
from tests.program.random_flows import added

if TYPE_CHECKING:
    from tests.epochs.sim import EpochCluster, Process

#: Keyed state: operator -> map -> key -> value.
States = dict[str, dict[str, dict[Any, Any]]]


class Checks:
    """The account of one simulated job; the cluster calls it wherever something happens."""

    def __init__(self, cluster: EpochCluster) -> None:
        self._cluster = cluster
        self.completed: list[int] = []  # epochs whose manifest was written
        self._look_at(cluster.plan)
        self._to_remove: frozenset[int] | None = None  # as the plan has just changed
        self._remade: frozenset[int] = frozenset()  # by the change of plan, or the move, that is under way
        self._wanted: dict[int, int] | None = None  # where tasks are to move to
        self._all_back = True
        self._damaged = 0  # no epoch up to this one counts, but the one that the job went back to
        self._lost: list[int] = []  # workers, since tasks were last joined
        self._triggered = 0
        self._memory: dict[str, bytes] = {}  # keyed state in memory when a snapshot of this name was taken
        self._at_end: dict[int, bytes] = {}  # and at the task's end
        self._ended: list[bytes] = []  # at the end of tasks that are in the plan no more
        self._decoded: dict[int, tuple[list[str], Chain]] = {}
        self._made_at: dict[int, int] = {}  # the epoch from which a task last continued
        self._made_ended: set[int] = set()  # tasks that were made again after their ends, and need no input
        self._marks: dict[str, set[int]] = {}  # channels whose watermark the task knew when it took a snapshot
        self._passes = 0

    def _look_at(self, plan: Plan) -> None:
        self._downstream = downstream(plan)
        self._everybody = frozenset(task.number for task in plan.tasks)

    # --- what the coordinator says -------------------------------------------------------------------------------

    def new_master(self) -> None:
        self._look_at(self._cluster.plan)
        self._all_back = True
        self._to_remove, self._remade, self._wanted = None, frozenset(), None
        self._lost = []
        self._triggered = self._cluster.coordinator.begun

    def passed_over(self) -> None:
        """The last epoch is damaged: all go back."""
        self._all_back = True
        self._damaged = max(self._cluster.store.manifests)

    def lost(self, worker: int) -> None:
        self._lost.append(worker)

    def replanned(self, before: Plan, after: Plan, operator: str) -> None:
        """An operator is about to get another number of tasks."""
        self._to_remove = self._with_downstream(before, operator)
        self._look_at(after)
        self._remade = self._with_downstream(after, operator)
        if [chain.operators for chain in before.chains] != [chain.operators for chain in after.chains]:
            self._to_remove = frozenset(task.number for task in before.tasks)
            self._remade = self._everybody
        entries = self._cluster.coordinator.entries()
        for number in self._to_remove:
            memory = self._at_end.pop(number, None)
            if memory is not None and entries[number].finished:
                self._ended.append(memory)

    def _with_downstream(self, plan: Plan, operator: str) -> frozenset[int]:
        chain = plan.chain_of(operator).index
        tasks = {task.number for task in plan.tasks if task.chain == chain}
        return frozenset(tasks.union(*(self._downstream[task] for task in tasks)))

    def _back(self, workers: list[int]) -> frozenset[int]:
        placed = self._cluster.placed
        tasks = {task for task, worker in placed.items() if worker in workers}
        return frozenset(tasks.union(*(self._downstream[task] for task in tasks))) | self._remade

    def to_move(self, placed: dict[int, int]) -> None:
        """Tasks are to run elsewhere, from an epoch that has just begun."""
        self._wanted = placed

    def _moves(self) -> list[frozenset[int]]:
        """What may be removed when tasks migrate: they alone, or, if they could not stop, with all downstream tasks."""
        assert self._wanted is not None
        entries = self._cluster.coordinator.entries()
        moved = frozenset(
            task
            for task, worker in self._wanted.items()
            if worker != self._cluster.placed[task] and not entries[task].finished
        )
        return [moved, moved.union(*(self._downstream[task] for task in moved))]

    def command(self, command: protocol.Command) -> None:
        """The coordinator has given a command."""
        if isinstance(command, protocol.RemoveTasks):
            lost = self._lost
            possible = [self._back(lost[:n]) for n in range(0 if self._remade else 1, len(lost) + 1)]
            if self._cluster.coordinator.halted_for is not None:  # the others have stopped, and must not run on
                self._all_back = True
            if self._all_back:
                possible = [self._everybody]
            if self._to_remove is not None:
                possible, self._to_remove = [self._to_remove], None
            elif self._wanted is not None and not lost and not self._all_back:
                possible = self._moves()
                self._remade = command.tasks
                self._cluster.counts[
                    "moves" if command.tasks == possible[0] else "migrations with those downstream"
                ] += 1
            elif self._remade and command.tasks not in possible:  # a move that has failed: a recovery like any other
                self._remade = self._remade.union(*(self._downstream[task] for task in self._remade))
                possible = [self._back(lost[:n]) for n in range(len(lost) + 1)]
            self._wanted = None
            assert command.epoch or not self.completed, "the job begins anew, and its sinks have committed"
            assert command.tasks in possible, f"{sorted(command.tasks)} go back when workers {lost} are lost"
            newest = max(self._cluster.store.manifests, default=0)
            assert command.epoch == newest or newest <= self._damaged, f"{newest} is complete, and {command}"
        elif isinstance(command, protocol.BuildTasks | protocol.ConnectTasks):
            expected = self._everybody if self._all_back else self._back(self._lost)
            assert command.tasks == expected, f"{sorted(command.tasks)} are made when workers {self._lost} are lost"
            if isinstance(command, protocol.ConnectTasks):
                self._all_back, self._lost, self._remade = False, [], frozenset()
        elif isinstance(command, protocol.Unpark):
            self._wanted = None
        elif isinstance(command, protocol.Trigger):
            assert command.epoch > self._triggered
            self._triggered = command.epoch
        elif isinstance(command, protocol.Complete):
            assert command.epoch in self._cluster.store.manifests, f"epoch {command.epoch} has no manifest"

    def written(self, manifest: Manifest) -> None:
        """A manifest is written."""
        epoch = manifest.epoch
        if self.completed:
            assert epoch > self.completed[-1], f"epoch {epoch} is complete after {self.completed[-1]}"
        self.completed.append(epoch)
        assert {entry.number for entry in manifest.tasks} == self._everybody
        for entry in manifest.tasks:
            last = entry.blobs[-1].name
            assert last in self._memory, f"task {entry.number} never made {last}"
            generation = self._cluster.coordinator._generations[entry.number]
            assert entry.finished or last == _name(epoch, entry.number, generation), f"epoch {epoch} has {last}"
            lost = [blob.name for blob in entry.blobs if blob.name in self._cluster.keeper._lost]
            assert not lost, f"epoch {epoch} builds on {lost}, which are known to be lost"
        if manifest.final:
            assert all(entry.finished for entry in manifest.tasks)

    # --- what workers do -----------------------------------------------------------------------------------------

    def snapshot(self, process: Process, snapshot: Snapshot) -> None:
        """A task saves its part of an epoch."""
        task = process.loop.wiring.tasks[snapshot.task.number]
        assert not task._work, "a snapshot of a step that is half done"
        memory = pickle.dumps(in_memory(task))
        self._memory[_name(snapshot.epoch, task.task.number, snapshot.generation)] = memory
        had_ended = any("restore its end" in line for line in task.life.story())
        if snapshot.finished and not had_ended:
            self._at_end[task.task.number] = memory
        # A diverted task passes the barrier when Spark has answered what came before it, and has taken more meanwhile.
        known = {number for number, mark in task.input.marks._of.items() if mark != IDLE and task.diversion is None}
        self._marks[_name(snapshot.epoch, task.task.number, snapshot.generation)] = known
        for stage in task.stages:
            if isinstance(stage, _Windowing):
                self._windows(task, stage, snapshot.finished)

    def _windows(self, task: Task, stage: _Windowing, finished: bool) -> None:
        """A task saves its windows, or has ended."""
        windows = stage._map.windows
        assert not finished or not windows, f"{task.name} has ended with open windows: {sorted(windows)}"
        if windows and stage._fired is not None:
            until = min(windows) + stage._size + stage._lateness
            assert until > stage._fired, f"{task.name} keeps a window until {until}, and is at {stage._fired}"

    def acknowledged(self, event: Acknowledged) -> None:
        """A snapshot has come to the coordinator, which has yet to look at it."""
        master = self._cluster.coordinator
        if event.task not in self._everybody or event.generation != master._generations[event.task]:
            return
        expected = self._memory.get(event.blob.name)
        assert expected is not None, f"{event.blob.name} was never made"
        chain = [] if event.whole or event.finished else master._chains.get(event.task, [])
        if chain is not None:
            found = decoded(self._decode(event.task, [*chain, event.blob]))
            wanted = pickle.loads(expected)
            if event.finished:
                wanted = shared_only(wanted)
            assert found == wanted, f"{event.blob.name} says {found}, not {wanted}"

    def _decode(self, task: int, chain: list[Blob]) -> dict[str, SavedState]:
        names = [blob.name for blob in chain]
        key_groups = self._cluster.plan.key_groups
        done, state = self._decoded.get(task, ([], Chain(key_groups, complete=True)))
        if names[: len(done)] != done:
            done, state = [], Chain(key_groups, complete=True)
        files = self._cluster.store.written
        for blob in chain[len(done) :]:
            data = blob.data if blob.data is not None else files[blob.name]
            state.add(data)
        self._decoded[task] = (names, state)
        return state.states()

    def merged(self, last: str, new: str) -> None:
        """Snapshots of a task, the last one of this name, were put together into a new one, which says the same."""
        self._memory[new] = self._memory[last]
        self._marks[new] = self._marks[last]

    def built(self, process: Process, command: protocol.BuildTasks) -> None:
        """A process has made its tasks again."""
        self._made_at.update(dict.fromkeys(command.tasks, command.epoch))
        for task in process.loop.wiring.mine(command.tasks):
            entry = command.entries.get(task.number)
            ended = self._had_ended(task, command)
            assert (process.loop.wiring.tasks[task.number].state in AT_END) == ended, (
                f"task {task.number} continues from {'its end' if ended else 'before its end'}, and does not know it"
            )
            (self._made_ended.add if ended else self._made_ended.discard)(task.number)
            if entry is not None and not entry.finished and not command.changed:
                remade = process.loop.wiring.tasks[task.number]
                again = {number for number, epoch in self._made_at.items() if epoch == command.epoch}
                self._must_learn(remade, set(self._marks[entry.blobs[-1].name]), again)
            self._share(process.loop.wiring.tasks[task.number], command)
            found = in_memory(process.loop.wiring.tasks[task.number])
            if command.changed and command.entries:
                expected = self._dealt(task, list(command.entries.values()))
            elif ended:
                continue  # it continues from nothing but its end, and from what it keeps for others
            else:
                expected = {} if entry is None else pickle.loads(self._memory[entry.blobs[-1].name])
            assert _filled(found) == _filled(expected), f"task {task.number} continues from {found}, not {expected}"
            for stage in process.loop.wiring.tasks[task.number].timed:
                if not hasattr(stage, "_timers"):
                    continue
                times = [at for kept in stage._timers.saved.values.values() for at in kept]
                assert stage.next_timer() == min(times, default=None), f"task {task.number} forgets its timers"

    def _had_ended(self, task: TaskId, command: protocol.BuildTasks) -> bool:
        """Whether a task continues from its end: of a changed plan, from the ends of all whose part it takes over."""
        entries = command.entries
        if not command.changed:
            return task.number in entries and entries[task.number].finished
        names = {operator.name for operator in self._cluster.plan.chains[task.chain].operators}
        before = [entry for entry in entries.values() if not names.isdisjoint(entry.operators)]
        return bool(before) and all(entry.finished for entry in before)

    def _share(self, task: Task, command: protocol.BuildTasks) -> None:
        """Each task knows what the first task has saved for all."""
        for stage in task.stages:
            if not isinstance(stage, _BroadcastStage) or not command.entries:
                continue
            name = stage.context.operator.name
            savers = [entry for entry in command.entries.values() if name in entry.operators and entry.index == 0]
            if not savers:
                continue
            saved = pickle.loads(self._memory[savers[0].blobs[-1].name]).get(name, {})
            shared = stage.user.broadcast
            assert shared._values == saved.get(shared.title, {}), f"{task.name} does not know what all tasks know"

    def _must_learn(self, task: Task, channels: set[int], remade: set[int]) -> None:
        """A task that was made again is told the last watermark of these channels again, before anything else. Not by
        senders that were made again too, now or before at the same epoch: one that was idle is not at once, and another
        has first to be told."""
        plan = self._cluster.plan
        for exchange in plan.exchanges:
            if exchange.target == task.task.chain:
                for origin in exchange.origins(task.task.index):
                    if plan.task(exchange.source, origin).number in remade:
                        channels.discard(exchange.channel(origin, task.task.index))
        if task.input.is_read:
            return
        receive, receive_barrier = task.input.receive, task.input.receive_barrier
        receive_watermark, receive_end = task.input.receive_watermark, task.input.receive_end

        def told(channel: int) -> None:
            assert channel not in channels, f"{task.name} is not told the watermark of channel {channel} again"

        def watched(channel: int, batch: Any, stamp: int, cost: int) -> None:
            told(channel)
            receive(channel, batch, stamp, cost)

        def watched_barrier(channel: int, epoch: int) -> None:
            told(channel)
            receive_barrier(channel, epoch)

        def watched_watermark(channel: int, value: int) -> None:
            channels.discard(channel)
            receive_watermark(channel, value)

        def watched_end(channel: int) -> None:
            channels.discard(channel)
            receive_end(channel)

        task.input.receive = watched  # type: ignore[method-assign]
        task.input.receive_barrier = watched_barrier  # type: ignore[method-assign]
        task.input.receive_watermark = watched_watermark  # type: ignore[method-assign]
        task.input.receive_end = watched_end  # type: ignore[method-assign]

    def _dealt(self, task: TaskId, entries: list[TaskEntry]) -> States:
        """The state with which a task of a changed plan continues: of its key groups, whoever had them."""
        plan = self._cluster.plan
        states: States = {}
        groups = plan.groups(task)
        for operator in plan.chains[task.chain].operators:
            for entry in entries:
                if groups is None or operator.name not in entry.operators or entry.finished:
                    continue  # of what has ended the results are out
                for title, kept in pickle.loads(self._memory[entry.blobs[-1].name]).get(operator.name, {}).items():
                    if title.startswith(SHARED):
                        continue
                    keys = [key for key, _ in kept] if title.startswith(NESTED) else list(kept)
                    of_keys = array("H", key_groups(keys, plan.key_groups))
                    mine = {key: kept[key] for key, group in zip(kept, of_keys, strict=True) if group in groups}
                    there = states.setdefault(operator.name, {}).setdefault(title, {})
                    assert not there.keys() & mine.keys(), "two tasks had the same key"
                    there.update(mine)
            for entry in entries if operator.shares and task.index == 0 else ():
                if operator.name in entry.operators and entry.index == 0:
                    memory = shared_only(pickle.loads(self._memory[entry.blobs[-1].name]))
                    states.setdefault(operator.name, {}).update(memory.get(operator.name, {}))
        return states

    def others_stay(self, process: Process, command: protocol.Command, before: dict[int, Task]) -> None:
        """A command has been carried out."""
        tasks = process.loop.wiring.tasks
        numbers: frozenset[int] = frozenset()
        if isinstance(command, protocol.RemoveTasks | protocol.BuildTasks):
            numbers = command.tasks
        for number, task in before.items():
            if number not in numbers:
                assert tasks.get(number) is task, f"{command} touches task {number}"
        mine = {task.number for task in process.loop.wiring.mine(numbers)}
        if isinstance(command, protocol.RemoveTasks):
            assert not mine & tasks.keys()
        elif isinstance(command, protocol.BuildTasks):
            assert mine <= tasks.keys()
            assert all(tasks[number] is not before.get(number) for number in mine)

    def not_held_up(self, task: Task) -> None:
        """A task that has just tried to send is blocked."""
        for log in task.outputs.waiting:
            assert any(channel.connected for channel in log.channels), (
                f"{task.name} is held up by one that is taken back"
            )
            assert any(not channel.catching_up for channel in log.channels if channel.connected), (
                f"{task.name} is held up by one that has been taken back"
            )

    def delivered(self, process: Process) -> None:
        """A process has taken in messages."""
        for _, channel in process.loop.wiring.out.values():
            assert channel.outstanding >= 0, f"channel {channel.number} was granted more than it has sent"

    def after(self, process: Process) -> None:
        """A process has done something."""
        output_caches = process.output_caches
        assert output_caches.used <= output_caches.memory_bytes, (
            f"caches hold {output_caches.used} bytes, more than {output_caches.memory_bytes}"
        )
        self._passes += 1
        if self._passes % 16:
            return
        caches = [log.cache for task in process.loop.tasks for log in task.logs]
        assert output_caches.used == sum(cache.in_memory for cache in caches)
        assert output_caches.spilled == sum(
            entry[3] for cache in caches for entry in cache.entries if isinstance(entry[4], OnDisk)
        )
        free = {id(slab) for slabs in output_caches._slabs.values() for slab in slabs}
        for cache in caches:
            for entry in cache.entries:
                assert not entry[3] or id(entry[4]) not in free, "a slab is free while a message in it is kept"
        window = self._cluster.faults.window
        now, ahead_ns = self._cluster.now, process.node.ahead_ns
        for task in process.loop.tasks:
            if task.input.is_read:
                continue
            costs: dict[int, list[int]] = {}
            for number, batch, stamp, cost in task.input.inbox.ready:
                costs.setdefault(number, []).append(cost)
                if not isinstance(batch, Watermark):
                    age_s = now - (stamp - ahead_ns) / 1e9
                    assert -1e-6 <= age_s <= now, f"{task.name} has records of an age of {age_s} s at {now} s"
            for number, entries in task.input.inbox._held.items():
                costs.setdefault(number, []).extend(cost for _, _, cost in entries)
            for number, sizes in costs.items():
                held = sum([size for size in sizes if size][:-1])
                assert held < window or held < window * self._most_windows(number), (
                    f"{task.name}: {held} bytes wait by channel {number} before its last message"
                )

    def _most_windows(self, number: int) -> int:
        """How many credit windows a channel may have outstanding: one for each link on the way of its entries, if its
        log has a stream. A channel whose sender is not there may have had one."""
        logs = [
            log
            for process in self._cluster.processes.values()
            for task in process.loop.tasks
            for log in task.logs
            if any(channel.number == number for channel in log.channels)
        ]
        return 1 if logs and all(log.stream is None for log in logs) else LINKS_MAX

    # --- the end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The coordinator says that the job has ended."""
        halted = self._cluster.coordinator.halted_for is not None
        for process in () if halted else self._cluster.live:
            for task in process.loop.tasks:
                assert task.finished, f"{task.name} has not finished"
                inbox = Inbox() if task.input.is_read else task.input.inbox
                assert not inbox.ready, f"{task.name} has taken something in after its end"
                assert not inbox._held, f"{task.name} has taken something in after its end"
                assert not task.input.queued, f"{task.name}: {task.input.queued} records counted in an empty inbox"
                for log in task.logs:
                    kinds = [entry[0] for entry in log.cache.entries]
                    assert kinds in ([END], [WATERMARK, END]), f"{task.name} still keeps {kinds}"
                    assert not log.queue, f"{task.name} has something left to send"
                    behind = [channel.task for channel in log.channels if channel.next != log.cache.end]
                    more = set(behind) - self._made_ended  # of others the ends were not saved, so they need all of it
                    assert not more, f"{task.name} has not sent everything to the tasks {more}"
            assert process.output_caches.used == process.output_caches.spilled == 0
        outside = self._cluster.outside
        left = {key: records for key, records in outside.open.items() if key not in outside.stale}
        assert not left, f"never committed: {left}"

    def starts_from(self, savepoint: Manifest, last: Manifest | None) -> None:
        """The job has ended with a savepoint of its last epoch, and another one starts from it."""
        assert last is not None
        assert savepoint.epoch == last.epoch
        assert "stop" not in savepoint.extra
        for saved, entry in zip(savepoint.tasks, last.tasks, strict=True):
            self._memory[saved.blobs[-1].name] = self._memory[entry.blobs[-1].name]
            self._marks[saved.blobs[-1].name] = self._marks[entry.blobs[-1].name]
            memory = self._at_end.pop(entry.number, None)
            if memory is not None and entry.finished:
                self._ended.append(memory)

    def stopped(self, outputs: dict[str, list[Any]]) -> None:
        """The job was stopped: read what its sources have read as all that there is."""
        plan, store = self._cluster.plan, self._cluster.store
        for entry in store.manifests[max(store.manifests)].tasks:
            source = plan.chains[plan.by_number[entry.number].chain].source
            if source is not None:
                state = Chain(plan.key_groups, complete=True)
                blob = entry.blobs[-1]
                state.add(blob.data if blob.data is not None else store.written[blob.name])
                for own in state.states()[source.name].own:
                    for split in own:
                        parts: list[list[Any]] = source.source.parts  # type: ignore[attr-defined]
                        parts[split.payload] = parts[split.payload][: split.offset or 0]

    def compare(self, other: tuple[dict[str, list[Any]], States], outputs: dict[str, list[Any]]) -> None:
        """Outputs and final states are those of a run without faults."""
        theirs, their_states = other
        made = self._cluster.made
        for channel, (name, _) in made.expected.items():
            got, expected = Counter(outputs.get(channel, ())), Counter(theirs.get(channel, ()))
            assert got == expected, f"{name}: lost {expected - got}, too much {got - expected}"
        for channel, (name, _) in made.last.items():
            assert _greatest(outputs.get(channel, [])) == _greatest(theirs.get(channel, [])), name
        for channel, (name, _) in made.sums.items():
            assert added(outputs.get(channel, [])) == added(theirs.get(channel, [])), name
        states: States = {}
        for memory in [*self._ended, *self._at_end.values()]:
            merge(states, pickle.loads(memory))
        for operator, maps in their_states.items():
            assert states.get(operator) == maps, f"{operator}: {states.get(operator)}, not {maps}"


def _name(epoch: int, task: int, generation: int) -> str:
    return f"snapshots/{epoch:08d}-{task}-{generation}"


def _greatest(records: list[Any]) -> dict[Any, int]:
    greatest: dict[Any, int] = {}
    for key, count in records:
        greatest[key] = max(count, greatest.get(key, 0))
    return greatest


def downstream(plan: Plan) -> dict[int, frozenset[int]]:
    """Of each task all that its records can reach: by walking along the channels."""
    ahead: dict[int, list[int]] = {task.number: [] for task in plan.tasks}
    for exchange in plan.exchanges:
        for sender in range(exchange.senders):
            for receiver in exchange.targets(sender):
                sent = plan.task(exchange.source, sender).number
                ahead[sent].append(plan.task(exchange.target, receiver).number)
    found = {}
    for task in ahead:
        seen: set[int] = set()
        look = [task]
        while look:
            for target in ahead[look.pop()]:
                if target not in seen:
                    seen.add(target)
                    look.append(target)
        found[task] = frozenset(seen)
    return found


def in_memory(task: Task) -> States:
    """The keyed state of a task's stages."""
    states: States = {}
    for stage in task.stages:
        if isinstance(stage, KeyedStage):
            maps = states[stage.context.operator.name] = {title: _entries(each) for title, each in stage.maps.items()}
            if isinstance(stage, ProcessStage):
                named = stage.user.named
                maps.update(named._saved)
                for kept, _ in named._states.values():
                    maps.update({each.title: _entries(each) for each in (kept.entries, kept.deadlines)})
    return states


def _entries(of: StateMap) -> dict[Any, Any]:
    """What a whole snapshot has of a map."""
    entries: dict[Any, Any] = {}
    if isinstance(of, _WindowMap):
        for start, window in of.windows.items():
            for key, partial in window.items():
                entries.setdefault(key, {})[start] = partial
    elif isinstance(of, NestedMap | WindowRecords):
        for key, parts in of.values.items():
            for part, value in parts.items():
                if isinstance(of, WindowRecords):
                    entries.update({(key, (part, number)): record for number, record in enumerate(value)})
                else:
                    entries[key, part] = value
    elif isinstance(of, BroadcastState):
        return of._values
    else:
        assert isinstance(of, KeyedMap | LoggedMap | Timers)
        return of.saved.values if isinstance(of, Timers) else of.values
    return entries


def shared_only(states: States) -> States:
    """What a task still saves when it has ended: what its first task keeps for others."""
    kept = {
        name: {title: each for title, each in maps.items() if title.startswith(SHARED)} for name, maps in states.items()
    }
    return {name: maps for name, maps in kept.items() if maps}


def decoded(states: dict[str, SavedState]) -> States:
    """The keyed state of what was saved."""
    return {name: state.maps for name, state in states.items() if state.maps}


def _filled(states: States) -> States:
    """Without maps that hold nothing: a task that never saved may have them or not."""
    filled = {name: {title: kept for title, kept in maps.items() if kept} for name, maps in states.items()}
    return {name: maps for name, maps in filled.items() if maps}


def merge(states: States, more: States) -> None:
    """Add the state of another task."""
    for operator, maps in more.items():
        for title, entries in maps.items():
            states.setdefault(operator, {}).setdefault(title, {}).update(entries)


def reference(cluster: EpochCluster) -> tuple[dict[str, list[Any]], States]:
    """What the cluster's flow does in one process without faults and epochs: outputs by sink, and the final state of
    the operators for which the time does not matter."""
    outside = type(cluster.outside)()
    for sink in cluster.sinks:
        sink.outside = outside
    plan = cluster.first_plan
    ticks = itertools.count(1)
    transport = MemoryNetwork(1).transport(0)
    clock = lambda: next(ticks) * 1000
    wiring = build(
        plan,
        {task.number: 0 for task in plan.tasks},
        0,
        transport,
        clock=clock,
        report=lambda reported: None,
        wall=lambda: next(ticks) * 1e-6,
    )
    RunLoop(wiring, transport, clock).run()
    states: States = {}
    for task in wiring.tasks.values():
        own = in_memory(task)
        for stage in task.stages:
            # The order in which records of two inputs come is not determined, nor is what depends on it.
            if isinstance(getattr(stage, "_process", None), Tallies) or stage.context.operator.inputs > 1:
                own.pop(stage.context.operator.name)
        merge(states, own)
    return outside.uncommitted(), states
