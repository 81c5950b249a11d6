"""Faults of operators with two inputs, joins, sessions and named states that the simulated cluster must find."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any
from unittest import mock

from penstock.runtime.epochs import snapshot
from penstock.runtime.epochs.snapshot import Merged
from penstock.runtime.event_time.windows import Session
from penstock.runtime.operators import window_functions
from penstock.runtime.operators.joins import IntervalJoin, _IntervalJoining, _Side, _TemporalJoining
from penstock.runtime.operators.windows import Windows, _Windows
from penstock.runtime.state.nested import NestedMap
from penstock.runtime.state.window_records import WindowRecords
from penstock.runtime.worker.channel_input import ChannelInput
from tests.epochs.sim import Faults
from tests.planting import Seeds, Test, planted_fault


def _somebody_dies(faults: Faults) -> bool:
    return faults.kills + faults.master_kills > 0


def _rescales(faults: Faults) -> bool:
    return faults.rescales > 0


def _is_of_sessions(operator: Any) -> bool:
    return isinstance(operator, Windows) and isinstance(operator.window, Session)


def _keeps_records(operator: Any) -> bool:
    return isinstance(operator, Windows) and operator.kind in ("window_collect", "window_process", "window_join")


def _is_outer(operator: Any) -> bool:
    return isinstance(operator, IntervalJoin) and operator.how != "inner"


@planted_fault("penstock/runtime/worker/channel_input.py", Seeds(61001))
def _inputs_taken_together() -> Any:
    """A step takes records of both inputs for records of the first one."""
    take = ChannelInput._take_records

    def taken(self: ChannelInput, limit: int) -> Any:
        several, self._several = self._several, False
        batch = take(self, limit)
        self._several = several
        return batch

    return mock.patch.object(ChannelInput, "_take_records", taken)


@planted_fault(
    "penstock/runtime/epochs/restore.py",
    Seeds(61160, _somebody_dies, lambda operator: getattr(operator, "broadcast", False)),
)
def _shared_state_forgotten() -> Any:
    """A task that goes back does not get what the first task has saved for all."""
    return mock.patch.object(Merged, "add_shared", lambda self, snapshots, operators: list(snapshots))


@planted_fault("penstock/runtime/epochs/snapshot.py", Seeds(61003, _rescales))
def _entries_by_their_parts() -> Any:
    """After a rescale an entry of a key's list goes to the task that its number says, and not to the task of the
    key."""
    those = snapshot._those_of
    return mock.patch.object(
        snapshot, "_those_of", lambda groups, key_groups, entries, nested=False: those(groups, key_groups, entries)
    )


@planted_fault("penstock/runtime/state/nested.py", Seeds(61004, _somebody_dies))
def _removed_entries_stay_saved() -> Any:
    """That an entry was removed is not noted as a change."""
    remove = NestedMap.remove

    def removed(self: NestedMap, key: Any, part: Any) -> Any:
        value = remove(self, key, part)
        self._changed.pop((key, part), None)
        return value

    return mock.patch.object(NestedMap, "remove", removed)


@planted_fault("penstock/runtime/state/window_records.py", Seeds(61175, _somebody_dies, _keeps_records))
def _window_records_saved_once_only() -> Any:
    """Records that come to a window which was saved before are taken for saved."""
    delta = WindowRecords.delta

    def short(self: WindowRecords, whole: bool) -> Any:
        for place in list(self._grown):
            if place in self._saved:
                self._saved[place] = len(self.values[place[0]][place[1]])
        return delta(self, whole)

    return mock.patch.object(WindowRecords, "delta", short)


@planted_fault(
    "penstock/runtime/operators/joins.py",
    Test(
        "tests/event_time/test_event_time_sql.py::test_an_interval_join_keeps_a_record_until_the_last_time_that_matches"
    ),
)
def _joins_drop_too_early() -> Any:
    """A record of a join is dropped when the watermark has reached the last time that it matches, and not passed it."""

    def released(self: _IntervalJoining, watermark: int) -> Iterator[Any]:
        until = self._until
        while until and until[0][0] <= watermark + 1:
            _, _, port, key, number = heapq.heappop(until)
            _, record, matched = self._sides[port].remove(key, number)
            if not matched and self._keeps[port]:
                yield from self._alone(port, key, record)

    return mock.patch.object(_IntervalJoining, "_released", released)


@planted_fault("penstock/runtime/operators/joins.py", Seeds(443, _somebody_dies, _is_outer))
def _matches_not_noted() -> Any:
    """That a record has found another one is not noted as a change, so an outer join says later that it has not."""
    return mock.patch.object(_Side, "restore", _restored_unmatched)


def _restored_unmatched(self: _Side, saved: dict[Any, Any]) -> None:
    NestedMap.restore(self, {place: [time, record, False] for place, (time, record, _) in saved.items()})
    for (key, number), (time, *_) in saved.items():
        self.order.setdefault(key, []).append((time, number))
        self._next = max(self._next, number + 1)
    for order in self.order.values():
        order.sort()


@planted_fault("penstock/runtime/operators/joins.py", Seeds(61008))
def _versions_dropped_before_they_are_old() -> Any:
    """Of the versions of a key only the last one is kept, although records of earlier times may still come."""

    def forget(self: _TemporalJoining, key: Any) -> None:
        for _, number in self._right.between(key, -(1 << 62), 1 << 62)[:-1]:
            self._right.remove(key, number)

    return mock.patch.object(_TemporalJoining, "_forget_old", forget)


@planted_fault("penstock/runtime/operators/window_functions.py", Seeds(61383, operator=_is_of_sessions))
def _sessions_lose_what_they_join() -> Any:
    """When sessions become one, only the first of them counts."""

    def merge(self: Any, key: Any, windows: list[Any], into: Any) -> None:
        state = self._aggregate.new_state()
        partials = [self._map.remove(key, window) for window in windows][:1]
        self._aggregate.merge(state, iter([into]), iter(partials))
        self._map.set(key, into, state[into])

    return mock.patch.object(window_functions._Accumulated, "merge", merge)


@planted_fault(
    "penstock/runtime/operators/windows.py",
    Seeds(22, _somebody_dies, lambda operator: isinstance(operator, Windows)),
)
def _ends_forgotten_after_a_failure() -> Any:
    """A task that goes back does not know when its windows end, so they end with the input."""
    restore = _Windows.restore

    def restored(self: _Windows, epoch: int, saved: Any) -> None:
        restore(self, epoch, saved)
        self._ends.clear()

    return mock.patch.object(_Windows, "restore", restored)
