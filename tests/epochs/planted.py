"""Faults to plant into the runtime that the simulated cluster must find: entries of the table of tests/planting.py."""

from __future__ import annotations

import contextlib
import errno
import zlib
from collections.abc import Container, Generator, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from penstock.host.carry import store_keeper
from penstock.host.carry.store_keeper import StoreKeeper
from penstock.runtime.epochs import restore, store
from penstock.runtime.epochs.coordinator import Complete, ConnectTasks, Coordinator, tasks_on
from penstock.runtime.epochs.files import store_error
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.participant import Acknowledged, Participant
from penstock.runtime.epochs.snapshot import encode_snapshot
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import StoreError
from penstock.runtime.event_time.watermark import Watermark
from penstock.runtime.exchange import log as log_module
from penstock.runtime.exchange.channel import InChannel, OutChannel
from penstock.runtime.exchange.inbox import Inbox
from penstock.runtime.exchange.log import OutLog
from penstock.runtime.exchange.message import BARRIER, CREDIT, DATA, END, WATERMARK, decode_payload, read_head
from penstock.runtime.exchange.output_cache import Entry, OutputCache
from penstock.runtime.operators.calls_in_flight import CallsInFlight
from penstock.runtime.operators.windowing import _Windowing, _WindowMap
from penstock.runtime.state.keyed import (
    KeyedDelta,
    KeyedLog,
    KeyedMap,
    KeyedValues,
    KeyedWhole,
    LoggedMap,
    SavedState,
)
from penstock.runtime.state.timers import Timers
from penstock.runtime.worker.diversion import Diverted
from penstock.runtime.worker.passage import Passage
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.task import Task
from penstock.runtime.worker.wiring import Wiring
from tests.epochs.sim import Faults, MemoryStore
from tests.planting import Seeds, Test, planted_fault


def _somebody_dies(faults: Faults) -> bool:
    return faults.kills + faults.master_kills > 0


def _several_epochs(faults: Faults) -> bool:
    return _somebody_dies(faults) and faults.interval_s < 0.1


def _moves(faults: Faults) -> bool:
    return faults.migrations > 0 and faults.rescales == 0


def _patch(owner: Any, name: str, new: Any) -> Any:
    return mock.patch.object(owner, name, new)


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


# --- tasks and channels ----------------------------------------------------------------------------------------------


@planted_fault("penstock/runtime/exchange/inbox.py", Seeds(22, _several_epochs))
def _skip_alignment() -> Any:
    """A task takes up records that come after a barrier before the other channels have brought it."""

    def put(self: Inbox, channel: int, batch: Any, stamp: int, cost: int) -> None:
        self.ready.append((channel, batch, stamp, cost))

    return _patch(Inbox, "put", put)


@planted_fault("penstock/runtime/exchange/log.py", Seeds(2, _several_epochs))
def _drop_at_barrier() -> Any:
    """A log drops what is before a barrier when all have been sent it, not when the epoch is complete."""
    flush = OutLog.flush

    def early(self: OutLog) -> bool:
        free = flush(self)
        last = self.cache.entries[-1] if self.cache.entries else None
        if last is not None and last[0] == BARRIER and all(channel.next == self.cache.end for channel in self.channels):
            self.complete(last[1])
        return free

    return _patch(OutLog, "flush", early)


@planted_fault("penstock/runtime/epochs/participant.py", Seeds(2, _several_epochs))
def _drop_at_acknowledgement() -> Any:
    """A task's channels drop what is before a barrier when its own snapshot is written."""
    write = Participant._write

    def early(self: Participant, snapshot: Any, parts: Any) -> bool:
        done = write(self, snapshot, parts)
        task = self.loop.wiring.tasks.get(snapshot.task.number)
        if done and task is not None and task.generation == snapshot.generation:
            for log in task.logs:
                log.complete(snapshot.epoch)
        return done

    return _patch(Participant, "_write", early)


@planted_fault("penstock/runtime/exchange/channel.py", Seeds(29, _somebody_dies))
def _no_second_end() -> Any:
    """What a channel sends again leaves out its end, which its receiver had before."""
    connect = OutLog.connect

    def connect_(self: OutLog, channel: OutChannel, generation: int) -> None:
        cache = self.cache
        if cache.entries and cache.entries[-1][0] == END and len(self.channels) == 1:
            cache.entries.pop()
            cache.end -= 1
        connect(self, channel, generation)

    return _patch(OutLog, "connect", connect_)


# On one node, because it takes nothing apart that relays and sorted channels have put together.
@planted_fault(
    "penstock/runtime/exchange/delivery.py",
    Seeds(197, lambda faults: faults.kills >= 3 and faults.workers > 1 and faults.nodes == 1),
)
def _old_generations() -> Any:
    """Messages are taken from whoever sent them, also from a task that was taken back."""

    def deliver(self: RunLoop, messages: Any) -> None:
        for _, message in messages:
            head = read_head(message)
            for channel, _ in head.destinations:
                task, _ = self.wiring.delivery.inputs.get(channel, (None, None))
                if head.kind == CREDIT:
                    if (out := self.wiring.out.get(channel, (None, None))[1]) is not None:
                        out.outstanding -= head.stamp
                elif task is None:
                    continue
                elif head.kind == DATA:
                    task.receive(channel, decode_payload(message, head), head.stamp, head.body_bytes)
                elif head.kind == BARRIER:
                    task.receive_barrier(channel, head.stamp)
                elif head.kind == WATERMARK:
                    task.receive_watermark(channel, head.stamp)
                else:
                    task.receive_end(channel)
        for due in list(self.wiring.delivery.grants_due.values()):
            due.grant()

    return _patch(RunLoop, "deliver", deliver)


@planted_fault(
    "penstock/runtime/exchange/delivery.py",
    Test("tests/worker/test_loop.py::test_credit_of_another_generation_has_no_effect"),
)
def _old_credit() -> Any:
    """A grant is taken from a receiver that was taken back."""
    deliver = RunLoop.deliver

    def careless(self: RunLoop, messages: Any) -> None:
        others = []
        for number, message in messages:
            head = read_head(message)
            _, out = self.wiring.out.get(head.destinations[0][0], (None, None))
            if head.kind != CREDIT:
                others.append((number, message))
            elif out is not None:
                out.outstanding -= head.stamp
        deliver(self, others)

    return _patch(RunLoop, "deliver", careless)


@planted_fault("penstock/runtime/exchange/channel.py", Seeds(2, _somebody_dies))
def _held_up() -> Any:
    """A task whose receiver is being taken back waits for it."""
    return _patch(OutChannel, "catching_up", property(lambda self: self.connected and self.next < self.until))


@planted_fault(
    "penstock/runtime/exchange/channel.py",
    Seeds(
        141,
        lambda faults: (
            faults.kills > 0 and faults.workers > 1 and faults.memory_bytes >= 2000 and faults.interval_s >= 0.1
        ),
    ),
)
def _kept_records_shared() -> Any:
    """What a channel inside a worker keeps is what its receiver got, and may change."""

    def append(self: OutLog, batch: Any, *rest: Any) -> None:
        kept[id(self.cache), self.cache.end] = batch
        append_(self, batch, *rest)

    def hand_over(self: OutLog, to: list[OutChannel], number: int, entry: Entry) -> None:
        if (id(self.cache), number) in kept:
            self._made, self._made_number, self._made_cost = kept[id(self.cache), number], number, entry[3]
        hand_over_(self, to, number, entry)

    kept: dict[tuple[int, int], Any] = {}
    append_, hand_over_ = OutLog._append, OutLog._hand_over
    stack = contextlib.ExitStack()
    stack.enter_context(_patch(OutLog, "_append", append))
    stack.enter_context(_patch(OutLog, "_hand_over", hand_over))
    return stack


@planted_fault("penstock/runtime/exchange/output_cache.py", Seeds(1))
def _no_limit_on_memory() -> Any:
    """Caches do not go to disk."""

    def append(self: OutputCache, entry: Any) -> None:
        self.entries.append(entry)
        self.end += 1
        if self._output_caches is not None:
            self.in_memory += entry[3]
            self._output_caches.used += entry[3]

    return _patch(OutputCache, "append", append)


@planted_fault("penstock/runtime/exchange/output_cache.py", Seeds(27, _several_epochs))
def _slabs_too_soon() -> Any:
    """A slab is written to again while a message in it may still be sent again."""
    free = OutputCache._free_slabs
    return _patch(OutputCache, "_free_slabs", lambda self, first: free(self, first + 1))


@planted_fault("penstock/runtime/exchange/log.py", Seeds(40))
def _one_left_out() -> Any:
    """A message for several tasks of a worker does not name the last of them."""

    def address(destinations: Any, *rest: Any) -> bytes:
        return logs_address(destinations[:-1] if len(destinations) > 1 else destinations, *rest)

    logs_address = log_module.address
    return _patch(log_module, "address", address)


@planted_fault("penstock/runtime/exchange/channel.py", Seeds(13, _somebody_dies))
def _siblings_go_back() -> Any:
    """When a receiver goes back, the cursors of its siblings go back too."""
    connect = OutLog.connect

    def all_of_them(self: OutLog, channel: OutChannel, generation: int) -> None:
        connect(self, channel, generation)
        for each in self.channels:
            each.next = self.cache.first

    return _patch(OutLog, "connect", all_of_them)


@planted_fault(
    "penstock/runtime/exchange/log.py",
    Test("tests/exchange/test_log.py::test_entries_that_nobody_needs_are_passed_over"),
)
def _cursors_not_renumbered() -> Any:
    """When an epoch is complete, cursors stay where they were, although a watermark that is kept has another number."""

    def complete(self: OutLog, epoch: int) -> None:
        self.cache.complete(BARRIER, END, WATERMARK, epoch)

    return _patch(OutLog, "complete", complete)


@planted_fault("penstock/runtime/exchange/log.py", Seeds(52, _somebody_dies))
def _behind_is_with_the_others() -> Any:
    """Who catches up gets what its siblings are sent, and nothing of what it has missed."""

    def together(self: OutLog, channels: list[OutChannel]) -> None:
        front = max(channel.next for channel in self.channels if channel.connected)
        for channel in channels:
            if channel.catching_up and len(self.channels) > 1:
                channel.next = min(front, self.cache.end)
                channel.passed()
        send(self, channels)

    send = OutLog._send_together
    return _patch(OutLog, "_send_together", together)


@planted_fault(
    "penstock/runtime/exchange/log.py",
    Test("tests/exchange/test_log.py::test_siblings_run_a_window_ahead_of_the_slowest_and_no_further"),
)
def _the_quickest_decides() -> Any:
    """A sender goes on while any of its receivers has credit."""

    def has_credit(self: OutLog) -> bool:
        return any(channel.outstanding < channel.credit_window for channel in self.channels)

    return _both(_patch(OutLog, "_has_credit", has_credit), _patch(OutLog, "_send_to_all", _sends_and_goes_on))


def _sends_and_goes_on(self: OutLog) -> bool:
    for channel in self.channels:
        if channel.next != self.cache.end:
            self._send_together([channel])
    return True


@planted_fault(
    "penstock/runtime/exchange/log.py",
    Test("tests/exchange/test_log.py::test_a_batch_is_encoded_once_and_sent_once_to_each_worker"),
)
def _one_message_a_task() -> Any:
    """Tasks of one worker get a message each."""
    send = OutLog._send_together

    def alone(self: OutLog, channels: list[OutChannel]) -> None:
        for channel in channels:
            send(self, [channel])

    return _patch(OutLog, "_send_together", alone)


@planted_fault(
    "penstock/runtime/exchange/channel.py",
    Test("tests/exchange/test_log.py::test_a_receiver_that_moves_gets_large_entries_in_pieces"),
)
def _numbers_not_looked_at() -> Any:
    """A receiver takes messages whatever their number."""
    return _patch(InChannel, "accept", lambda self, head: True)


@planted_fault("penstock/runtime/exchange/channel.py", Seeds(251, _moves))
def _local_as_before() -> Any:
    """A channel to a receiver that has moved goes where it went before."""

    return _patch(OutChannel, "move", lambda self, worker, *, local: None)


@planted_fault("penstock/runtime/worker/wiring.py", Seeds(26, lambda faults: faults.kills > 0))
def _too_much_goes_back() -> Any:
    """A worker takes out all of its tasks."""
    remove_tasks = Wiring.remove_tasks
    return _patch(Wiring, "remove_tasks", lambda self, numbers: remove_tasks(self, numbers | self.tasks.keys()))


# --- state -----------------------------------------------------------------------------------------------------------


@planted_fault("penstock/runtime/state/keyed.py", Seeds(47))
def _no_gone_keys() -> Any:
    """A delta does not tell of keys that are gone."""
    delta = KeyedMap.delta

    def without(self: KeyedMap, whole: bool) -> KeyedDelta | KeyedWhole | KeyedValues:
        found = delta(self, whole)
        return replace(found, gone=[]) if isinstance(found, KeyedDelta) else found

    return _patch(KeyedMap, "delta", without)


@planted_fault("penstock/runtime/state/keyed.py", Seeds(4))
def _log_twice() -> Any:
    """A log of what was merged begins with what the one before it had."""
    delta = LoggedMap.delta

    def again(self: LoggedMap, whole: bool) -> Any:
        given = delta(self, whole)
        if isinstance(given, KeyedLog):
            self._chunks = given.chunks[-1:]
        return given

    return _patch(LoggedMap, "delta", again)


@planted_fault("penstock/runtime/state/keyed.py", Seeds(78))
def _values_out_of_order() -> Any:
    """The values of a map come in another order than its keys did."""
    delta = LoggedMap.delta

    def sorted_values(self: LoggedMap, whole: bool) -> Any:
        given = delta(self, whole)
        if isinstance(given, KeyedValues):
            return replace(given, values=dict(enumerate(list(given.values.values())[::-1])))
        return given

    return _patch(LoggedMap, "delta", sorted_values)


@planted_fault("penstock/runtime/state/keyed.py", Seeds(432, _several_epochs))
def _places_of_removed_keys() -> Any:
    """A key that was removed and came back is taken to be where it was."""
    return _patch(KeyedMap, "removed", lambda self: None)


@planted_fault("penstock/runtime/state/timers.py", Seeds(90, _several_epochs))
def _no_timers_back() -> Any:
    """Timers come back into the map of what is saved, but will not fire."""
    return _patch(Timers, "restore", lambda self, saved: self.saved.restore(saved))


@planted_fault("penstock/runtime/state/timers.py", Seeds(11))
def _timer_not_touched() -> Any:
    """A timer that has fired is not noted as a change."""

    def take(self: Timers, key: Any, at: float) -> bool:
        times = self._times.get(key, ())
        if at not in times:
            return False
        self._times[key] = tuple(time for time in times if time != at)
        if not self._times[key]:
            del self._times[key]
        return True

    return _patch(Timers, "take", take)


@planted_fault(
    "penstock/runtime/epochs/participant.py",
    Test("tests/epochs/test_simulated.py::test_after_a_snapshot_that_could_not_be_written_the_next_one_is_whole"),
)
def _builds_on_what_was_lost() -> Any:
    """The snapshot after one that could not be written holds changes only, so epochs wait for one that does not."""
    write = Participant._write

    def careless(self: Participant, snapshot: Any, parts: Any) -> bool:
        with mock.patch.object(self.loop, "call"):
            return write(self, snapshot, parts)

    return _patch(Participant, "_write", careless)


# --- event time ------------------------------------------------------------------------------------------------------


@planted_fault("penstock/runtime/exchange/log.py", Seeds(85))
def _watermark_overtakes() -> Any:
    """A watermark, which needs no credit, does not wait for the records that do."""
    return _patch(OutLog, "watermark", lambda self, value: self.queue.appendleft((Watermark(value), 0)))


@planted_fault("penstock/runtime/worker/passage.py", Seeds(4))
def _end_of_time_before_the_end() -> Any:
    """A task whose inputs have ended says so before it says its last records."""

    def advance_to(self: Passage, mark: Any) -> Any:
        self.mark_in = mark
        return self.advance()

    return _patch(Passage, "advance_to", advance_to)


@planted_fault(
    "penstock/runtime/exchange/output_cache.py",
    Test(
        "tests/exchange/test_output_caches.py::test_the_last_watermark_before_a_complete_epoch_stays_until_there_is_a_later_one"
    ),
)
def _watermark_forgotten() -> Any:
    """When an epoch is complete a channel drops all that is before its barrier, the last watermark too."""
    complete = OutputCache.complete

    def forgetful(self: OutputCache, barrier: int, end: int, watermark: int, epoch: int) -> int | None:
        return complete(self, barrier, end, -1, epoch)

    return _patch(OutputCache, "complete", forgetful)


@planted_fault("penstock/runtime/operators/windowing.py", Seeds(387, _several_epochs))
def _windows_fire_again() -> Any:
    """A task of windows that goes back does not know which have said their results."""
    restore_ = _Windowing.restore

    def forgetful(self: _Windowing, epoch: int, saved: Any) -> None:
        restore_(self, epoch, saved)
        self._watermark = self._fired = None

    return _patch(_Windowing, "restore", forgetful)


@planted_fault("penstock/runtime/operators/windowing.py", Seeds(1))
def _windows_stay() -> Any:
    """A window that is closed takes no records, but its state stays."""
    return _patch(_WindowMap, "close", lambda self, start: None)


@planted_fault("penstock/runtime/operators/windowing.py", Seeds(16))
def _closed_windows_stay_saved() -> Any:
    """That a window is closed is not noted as a change."""
    return _patch(_WindowMap, "close", lambda self, start: self.windows.pop(start))


# --- rescale ---------------------------------------------------------------------------------------------------------


def _rescales(faults: Faults) -> bool:
    return faults.rescales > 0


@planted_fault("penstock/runtime/epochs/restore.py", Seeds(27, _rescales))
def _group_of_another() -> Any:
    """A task of a changed plan gets the state of a key group that is not its own as well."""
    keyed = restore._keyed

    def more(operator: Any, savers: Any, get: Any, groups: set[int], *rest: Any) -> Any:
        return keyed(operator, savers, get, groups | {min(groups) - 1}, *rest)

    return _patch(restore, "_keyed", more)


@planted_fault("penstock/runtime/exchange/log.py", Seeds(21, _rescales))
def _nothing_dealt() -> Any:
    """Who sends to tasks of a changed plan does not send them what it has kept."""
    return _patch(OutLog, "kept", lambda self: iter(()))


@planted_fault(
    "penstock/runtime/exchange/delivery.py",
    Test("tests/worker/test_loop.py::test_messages_of_channels_that_the_plan_has_no_more_are_dropped"),
)
def _old_channels_fail() -> Any:
    """A message by a channel that the plan has no more ends its receiver's process."""
    deliver = RunLoop.deliver

    def strict(self: RunLoop, messages: Any) -> None:
        for number, message in messages:
            head = read_head(message)
            if number in self.wiring.tasks and head.kind != CREDIT:
                self.wiring.tasks[number].input.channels[head.destinations[0][0]]
        deliver(self, messages)

    return _patch(RunLoop, "deliver", strict)


# --- coordinator and participants ------------------------------------------------------------------------------------


@planted_fault("penstock/runtime/epochs/coordinator.py", Seeds(1))
def _early_commit() -> Any:
    """Commits are told when all have acknowledged, before the manifest is written."""
    save, saved = Coordinator._save, Coordinator.saved

    def early(self: Coordinator, epoch: int, acknowledged: Any, final: bool) -> Any:
        return [Complete(epoch, False), *save(self, epoch, acknowledged, final)]

    def late(self: Coordinator, epoch: int) -> Any:
        return [command for command in saved(self, epoch) if not isinstance(command, Complete) or command.final]

    return _both(_patch(Coordinator, "_save", early), _patch(Coordinator, "saved", late))


@planted_fault("penstock/runtime/epochs/participant.py", Seeds(26))
def _acknowledge_before_written() -> Any:
    """A snapshot is acknowledged when it is made; it is written later."""

    def on_snapshot(self: Participant, snapshot: Any) -> None:
        parts = encode_snapshot(snapshot.states, self._key_groups)
        number = snapshot.task.number
        name = f"snapshots/{snapshot.epoch:08d}-{number}-{snapshot.generation}"
        blob = Blob(name, sum(map(len, parts)), zlib.crc32(b"".join(parts)))
        self._send(Acknowledged(number, snapshot.generation, snapshot.epoch, snapshot.finished, snapshot.whole, blob))

        def write() -> bool:
            with contextlib.suppress(Exception):
                self._store.put(name, parts)
            return True

        self._later(write)

    return _patch(Participant, "on_snapshot", on_snapshot)


@planted_fault("penstock/runtime/epochs/coordinator.py", Seeds(11, _several_epochs))
def _no_triggers_again() -> Any:
    """Sources that went back are not told to begin the epochs that are under way again."""
    made = Coordinator.built

    def forgetful(self: Coordinator, worker: int, generation: int, now: float) -> Any:
        commands = made(self, worker, generation, now)
        return [replace(command, triggers=()) if isinstance(command, ConnectTasks) else command for command in commands]

    return _patch(Coordinator, "built", forgetful)


@planted_fault("penstock/runtime/epochs/coordinator.py", Seeds(2, lambda faults: faults.kills > 0))
def _only_the_lost_go_back() -> Any:
    """Tasks downstream of lost tasks do not go back."""
    again = Coordinator._again

    def careless(self: Coordinator, lost: Any, *rest: Any) -> Any:
        with mock.patch.object(self, "_downstream", dict.fromkeys(self._downstream, frozenset())):
            return again(self, lost, *rest)

    return _patch(Coordinator, "_again", careless)


@planted_fault(
    "penstock/runtime/epochs/coordinator.py",
    Seeds(128, lambda faults: faults.kills > 0 and faults.timeout_s < 0.5 and faults.interval_s < 0.01),
)
def _old_acknowledgements() -> Any:
    """What a task acknowledged counts although it has gone back since."""
    again = Coordinator._again

    def forgetful(self: Coordinator, *arguments: Any) -> Any:
        entries = {epoch: dict(pending.entries) for epoch, pending in self._pending.items()}
        commands = again(self, *arguments)
        for epoch, kept in entries.items():
            self._pending[epoch].entries = kept
        return commands

    return _patch(Coordinator, "_again", forgetful)


@planted_fault(
    "penstock/host/carry/store_keeper.py",
    Seeds(85, lambda faults: faults.unknown > 0 and faults.kills > 0 and "doubt" in faults.moments),
)
def _unknown_is_no() -> Any:
    """A manifest that may have been written is taken for one that was not."""
    return _both(
        _patch(StoreKeeper, "_certainly_not_there", lambda self, manifest: True), _patch(store_keeper, "_TRIES", 1)
    )


@planted_fault(
    "penstock/runtime/epochs/coordinator.py", Seeds(132, lambda faults: faults.kills > 2 and "save" in faults.moments)
)
def _lost_while_saving() -> Any:
    """A worker that dies while a manifest is being written is dealt with at once."""
    lost = Coordinator.worker_lost

    def at_once(self: Coordinator, worker: int, now: float, reason: str = "") -> Any:
        if self._saving is None:
            return lost(self, worker, now, reason)
        self._missing.add(worker)
        return self._again(tasks_on(self.placed, (worker,)), [worker], now, reason)

    return _patch(Coordinator, "worker_lost", at_once)


@planted_fault("penstock/runtime/epochs/coordinator.py", Seeds(1))
def _ends_before_commits() -> Any:
    """The job ends when the last manifest is written; the last commits are left to luck."""
    saved = Coordinator.saved

    def at_once(self: Coordinator, epoch: int) -> Any:
        commands = saved(self, epoch)
        if self.state == "FINISHING":
            return [*commands, *[c for worker in list(self._committing) for c in self.committed(worker, epoch)]]
        return commands

    return _patch(Coordinator, "saved", at_once)


# --- states ----------------------------------------------------------------------------------------------------------


@planted_fault("penstock/runtime/epochs/coordinator.py", Seeds(28, lambda faults: faults.kills > 1))
def _late_answer_counts() -> Any:
    """A worker's answer to an order to build tasks that was given up is taken for the answer to the present one."""
    built = Coordinator.built

    def any_generation(self: Coordinator, worker: int, generation: int, now: float) -> Any:
        return built(self, worker, self.generation, now)

    return _patch(Coordinator, "built", any_generation)


@planted_fault("penstock/runtime/worker/task.py", Seeds(11, _several_epochs))
def _an_end_is_forgotten() -> Any:
    """A task that had ended in the epoch from which it continues takes up its input again."""
    restore_task = Task.restore

    def goes_on(self: Task, epoch: int, saved: Any, *, finished: bool, whole_next: bool) -> None:
        restore_task(self, epoch, saved, finished=False, whole_next=whole_next)

    return _patch(Task, "restore", goes_on)


@planted_fault(
    "penstock/runtime/worker/task.py", Seeds(34, lambda faults: faults.diversions > 0 and _several_epochs(faults))
)
def _returns_too_early() -> Any:
    """A task takes up its input as records again while Spark still has micro-batches of it."""

    def undivert(self: Task) -> None:
        if self.life.move("undivert"):
            self.all_answered()

    return _patch(Task, "undivert", undivert)


# --- the operation stream --------------------------------------------------------------------------------------------


def _diverts(faults: Faults) -> bool:
    return faults.diversions > 0


@planted_fault(
    "penstock/runtime/worker/diversion.py", Seeds(33, lambda faults: _diverts(faults) and faults.unanswered > 0)
)
def _unanswered_is_forgotten() -> Any:
    """What the bridge did not answer is not run as records."""

    return _patch(Diverted, "run_as_records", lambda self, input_: iter(()))


# --- migration -------------------------------------------------------------------------------------------------------


@planted_fault("penstock/runtime/worker/task.py", Seeds(52, _moves))
def _says_that_it_stops() -> Any:
    """A task that is to migrate continues after its barrier."""
    save = Task._save

    def goes_on(self: Task, epoch: int, own: Any = None, *, finished: bool) -> None:
        save(self, epoch, own, finished=finished)
        self.life.move("unpark")

    return _patch(Task, "_save", goes_on)


@planted_fault(
    "penstock/runtime/epochs/coordinator.py",
    Test("tests/epochs/test_coordinator.py::test_a_task_that_has_not_stopped_takes_downstream_tasks_along"),
)
def _all_have_stopped() -> Any:
    """Tasks move alone, whether they have stopped or not."""
    move = Coordinator._migrate_now

    def alone(self: Coordinator, placed: dict[int, int], parked: set[int]) -> Any:
        return move(self, placed, set(placed))

    return _patch(Coordinator, "_migrate_now", alone)


@planted_fault("penstock/runtime/worker/run_loop.py", Seeds(5, _moves))
def _stays_stopped() -> Any:
    """A task that does not migrate after all does not continue."""
    return _patch(RunLoop, "unpark", lambda self: None)


@planted_fault("penstock/runtime/exchange/channel.py", Seeds(251, _moves))
def _nothing_redirected() -> Any:
    """What was kept for a task that moves to or from this worker is forgotten."""
    move, connect = OutChannel.move, OutChannel.connect

    def moved(self: OutChannel, worker: int, *, local: bool) -> None:
        move(self, worker, local=local)
        moving.add(id(self))

    def connected(self: OutChannel, generation: int, first: int, end: int) -> None:
        connect(self, generation, end if id(self) in moving else first, end)
        moving.discard(id(self))

    moving: set[int] = set()
    return _both(_patch(OutChannel, "move", moved), _patch(OutChannel, "connect", connected))


@planted_fault("penstock/runtime/worker/wiring.py", Seeds(52, _moves))
def _old_ends() -> Any:
    """Receivers that stay still wait for the sender in its old place."""
    connect = Wiring._connect_receiver

    def once(self: Wiring, exchange: Any, sender: Any, receiver: Any, generation: int) -> None:
        if exchange.channel(sender.index, receiver.index) not in self.tasks[receiver.number].input.channels:
            connect(self, exchange, sender, receiver, generation)

    return _patch(Wiring, "_connect_receiver", once)


@planted_fault("penstock/runtime/worker/wiring.py", Seeds(793, _moves))
def _moved_senders_wait() -> Any:
    """Only those who send to tasks that were made again are told to send, not these themselves."""

    def connect_tasks(self: Wiring, numbers: set[int], generation: int) -> None:
        for channel, target in self._targets.items():
            if target in numbers and channel in self.out:
                log, out = self.catching_up[channel] = self.out[channel]
                log.connect(out, generation)

    return _patch(Wiring, "connect_tasks", connect_tasks)


@planted_fault("penstock/runtime/epochs/coordinator.py", Seeds(110, _moves))
def _placed_as_before() -> Any:
    """After a move, a death takes back the tasks that used to be there."""
    move = Coordinator._migrate_now

    def forgets(self: Coordinator, placed: dict[int, int], parked: set[int]) -> Any:
        before = self.placed
        commands = move(self, placed, parked)
        self.placed = before
        return commands

    return _patch(Coordinator, "_migrate_now", forgets)


@planted_fault(
    "penstock/runtime/worker/run_loop.py",
    Test("tests/worker/test_loop.py::test_a_source_that_is_being_made_hears_of_a_stop"),
)
def _stopped_while_made() -> Any:
    """A source that was made before its worker was told to stop, and joins after, reads on."""
    make, renew = RunLoop.build_tasks, RunLoop._renew_tasks

    def told_when_made(self: RunLoop, numbers: set[int], *saved: Any) -> None:
        make(self, numbers, *saved)
        for task in self.wiring.tasks.values():
            if self._stopping and task.input.is_read:
                task.input.stop()

    def not_when_joined(self: RunLoop) -> None:
        stopping, self._stopping = getattr(self, "_stopping", False), False
        renew(self)
        self._stopping = stopping

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with _patch(RunLoop, "build_tasks", told_when_made), _patch(RunLoop, "_renew_tasks", not_when_joined):
            yield

    return both()


# --- the store -------------------------------------------------------------------------------------------------------


@planted_fault(
    "penstock/runtime/epochs/files.py",
    Seeds(12, lambda faults: faults.read_only > 0 and faults.interval_s < 0.1),
)
def _read_only_for_good() -> Any:
    """A store that is read-only is taken for one that will always be, and the job ends."""

    def for_good(what: str, error: Exception) -> StoreError:
        found = store_error(what, error)
        found.may_pass = found.may_pass and getattr(error, "errno", None) != errno.EROFS
        return found

    return _patch(store, "store_error", for_good)


@planted_fault(
    "penstock/host/carry/store_keeper.py",
    Seeds(21, lambda faults: faults.full > 0 and not faults.put and faults.interval_s < 0.1),
)
def _room_of_what_is_not_complete() -> Any:
    """Whoever makes room in a full store deletes all snapshots that no manifest refers to, also those of the epoch that
    is about to complete."""

    def collect(self: StoreKeeper) -> None:
        self._room_wanted.clear()
        needed = {blob.name.partition("/")[2] for manifest in self._kept for blob in manifest.blobs()}
        names = [name for name in self.store.sizes() if not name.endswith(".json")]
        self.store._delete([name for name in names if name.partition("/")[2] not in needed])

    return _patch(StoreKeeper, "_collect", collect)


@planted_fault(
    "penstock/host/carry/store_keeper.py",
    Test("tests/epochs/test_simulated.py::test_a_dead_worker_is_replaced_before_the_store_takes_anything"),
)
def _never_given_up() -> Any:
    """An epoch that a directory does not take is tried until it does, and nothing else is done meanwhile."""
    return _patch(StoreKeeper, "_certainly_not_there", lambda self, manifest: False)


@planted_fault(
    "penstock/runtime/epochs/store.py", Seeds(19, lambda faults: faults.scratches > 4 and _several_epochs(faults))
)
def _copies_are_not_read() -> Any:
    """Who finds a file damaged does not look at its copy."""

    def get(self: MemoryStore, blob: Blob) -> bytes:
        return blob.data if blob.data is not None else self._get(blob, blob.name)

    return _patch(MemoryStore, "get", get)


@planted_fault(
    "penstock/runtime/epochs/store.py",
    Seeds(19, lambda faults: faults.scratches > 4 and faults.looks > 0 and _several_epochs(faults)),
)
def _mended_from_what_is_damaged() -> Any:
    """Whoever finds that a file and its copy differ takes the file for the right one, without a look at it."""

    def examine(self: Store, blob: Blob) -> Generator[int, None, str | None]:
        name, copy = blob.name, f"copies/{blob.name.partition('/')[2]}"
        files: Any = self._files
        found = files.files
        if name in found and found.get(copy) != found[name]:
            files.write(copy, [found[name]], False)
        yield blob.size
        return None

    return _patch(Store, "examine", examine)


@planted_fault(
    "penstock/host/carry/store_keeper.py",
    Seeds(29, lambda faults: faults.damages + faults.wipes > 0 and faults.looks > 0 and faults.interval_s < 0.1),
)
def _losses_are_not_told() -> Any:
    """What the keeper finds to be lost is not told, and epochs build on it."""

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with _patch(StoreKeeper, "check", lambda self, manifest: None), _patch(Coordinator, "lost", lambda *told: []):
            yield

    return both()


@planted_fault(
    "penstock/runtime/epochs/coordinator.py",
    Test(
        "tests/epochs/test_coordinator.py::"
        "test_losses_that_are_found_one_after_the_other_begin_no_epochs_beside_each_other"
    ),
)
def _an_epoch_for_each_loss() -> Any:
    """Each loss begins an epoch, whatever epochs are under way."""
    lost = Coordinator.lost

    def another(self: Coordinator, names: Any, reason: str, now: float) -> Any:
        begun = self.begun
        commands = lost(self, names, reason, now)
        return [*commands, *self.begin(now)] if commands and self.begun == begun else commands

    return _patch(Coordinator, "lost", another)


@planted_fault(
    "penstock/host/carry/store_keeper.py",
    Test("tests/host/test_store_keeper.py::test_what_is_written_again_is_told_to_be_lost_no_more"),
)
def _spoiled_once_and_for_all() -> Any:
    """What was read and found damaged counts as lost at every look, although it may have been written again."""
    mend = StoreKeeper._mend

    def believe(self: StoreKeeper, blob: Blob, there: Any, lost: dict[str, str]) -> None:
        if blob.name in self._spoiled:
            lost[blob.name] = self._spoiled[blob.name]
        else:
            mend(self, blob, there, lost)

    return _patch(StoreKeeper, "_mend", believe)


@planted_fault(
    "penstock/runtime/epochs/coordinator.py", Seeds(138, lambda faults: faults.merges > 0 and _several_epochs(faults))
)
def _merged_for_all_that_follows() -> Any:
    """When snapshots have been put together, those that were saved meanwhile are taken to be in the result."""

    def replace_chain(self: Coordinator, task: int, old: list[Blob], new: Blob) -> None:
        for chain in (self._chains.get(task), self._entries[task].blobs if task in self._entries else None):
            if chain is not None and old[0] in chain:
                chain[chain.index(old[0]) :] = [new]

    return _patch(Coordinator, "replace_chain", replace_chain)


@planted_fault(
    "penstock/runtime/epochs/store.py", Seeds(11, lambda faults: faults.collects > 0 and _several_epochs(faults))
)
def _bases_are_deleted() -> Any:
    """What is deleted is decided by the last snapshot of each task alone, not by those that it builds on."""
    collect = Store._collect

    def forgetful(self: Store, keep: int, spare: Container[str]) -> int:
        with mock.patch.object(Manifest, "blobs", lambda self: (task.blobs[-1] for task in self.tasks)):
            return collect(self, keep, spare)

    return _patch(Store, "_collect", forgetful)


@planted_fault(
    "penstock/runtime/operators/calls_in_flight.py",
    Test("tests/operators/test_map_async.py::test_records_that_two_epochs_have_saved_are_counted_once"),
)
def _taken_off_when_they_come_back() -> Any:
    """Records whose calls are to be made again leave the counter when they come back, not when they are given again."""
    restore, take_returned = CallsInFlight.restore, CallsInFlight.take_returned

    def restore_(self: CallsInFlight, epoch: int, saved: SavedState) -> None:
        restore(self, epoch, saved)
        self.records_in -= self.returned

    def take(self: CallsInFlight, most: int) -> Any:
        taken = take_returned(self, most)
        self.records_in += len(taken)
        return taken

    return _both(_patch(CallsInFlight, "restore", restore_), _patch(CallsInFlight, "take_returned", take))
