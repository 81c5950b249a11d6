"""Suspects: which tasks must run record by record, and which records are poison, as far as deaths of workers tell.

Not every death is the fault of the record. A death from outside, or for want of memory, counts half, and only until an
epoch completes. Another record than the one that kills must never be called poison at its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.runtime.worker.blackbox import Crash, Note, RecordPlace
from penstock.runtime.worker.record_by_record import CALM_EPOCHS, RecordByRecordMode, Spot

#: The same for a task in which crashes have proved that a record is poison, because equal records may be rare.
PROVEN_EPOCHS = 10_000

_Fact = TypeVar("_Fact")


@dataclass
class _Doubt:
    """The facts from the deaths of a worker while one task was running."""

    deaths: int = 0
    epochs_left: int = CALM_EPOCHS
    crashes: Counter[Spot] = field(default_factory=Counter)
    outside: Counter[Spot] = field(default_factory=Counter)  # since an epoch was completed
    equals: Counter[tuple[int, int]] = field(default_factory=Counter)  # crashes by (operator, digest), at all places
    places: dict[Spot, str] = field(default_factory=dict)  # poison at one place, and why
    values: dict[tuple[int, int], str] = field(default_factory=dict)  # poison at every place, and why

    def went_back(self, note: Note) -> None:
        """Renumbers the places of records from the same origin, because the task continues from the epoch from which
        `note.later` is counted. Other places are forgotten."""
        place, later = note.place, note.later
        if place.epoch == later.epoch:
            return
        fewer = place.sequence - later.sequence

        def moved(counts: Mapping[Spot, _Fact]) -> dict[Spot, _Fact]:
            return {
                (operator, digest, RecordPlace(later.epoch, at.origin, at.sequence - fewer, at.nth)): fact
                for (operator, digest, at), fact in counts.items()
                if at.epoch == place.epoch and at.origin == place.origin and at.sequence >= fewer
            }

        self.crashes, self.outside = Counter(moved(self.crashes)), Counter(moved(self.outside))
        self.places = moved(self.places)


class Suspects:
    """The facts that the watcher takes from deaths: which tasks must run record by record, and which records are poison
    to them.

    A record is poison at its place when it was at hand at `attempts` crashes. Two deaths from outside, without a
    complete epoch since, count as much as one crash. When records of one value were at hand at two crashes more than
    `attempts`, at whatever places, they are poison at every place: there may be many equal records, and their places
    may change. So records of one value can cause at most `attempts` + 2 crashes, after the two deaths that put their
    task into record-by-record mode.
    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._doubts: dict[int, _Doubt] = {}

    def modes(self) -> dict[int, RecordByRecordMode]:
        """Returns the tasks that must run record by record, and how each of them does."""
        return {
            task: RecordByRecordMode(doubt.epochs_left, dict(doubt.places), dict(doubt.values))
            for task, doubt in self._doubts.items()
            if doubt.deaths >= 2
        }

    def completed(self) -> None:
        """Notes that an epoch is complete."""
        for task, doubt in list(self._doubts.items()):
            doubt.epochs_left -= 1
            if not doubt.epochs_left:
                del self._doubts[task]
            # The job makes progress, so deaths from outside do not add up over its life. Crashes may still come.
            doubt.outside.clear()
            doubt.places = {spot: why for spot, why in doubt.places.items() if doubt.crashes[spot]}

    def died(self, note: Note | None, crash: Crash | None = None) -> None:
        """Notes that a worker has died while it was doing this. Without a crash, a signal from outside or the lack of
        memory has killed it."""
        if note is None:
            return
        doubt = self._doubts.setdefault(note.task, _Doubt())
        doubt.deaths += 1
        if note.digest:
            value = note.operator, note.digest
            doubt.went_back(note)
            spot = (*value, note.later)
            if crash is None or not crash.in_loop:
                doubt.outside[spot] += 1
            else:
                doubt.crashes[spot] += 1
                doubt.equals[value] += 1
            crashes, outside = doubt.crashes[spot], doubt.outside[spot]
            last = "" if crash is None else f"; the last time: {crash.what}"
            if 2 * crashes + outside >= 2 * self._attempts:
                doubt.places[spot] = (
                    f"this record has killed the worker's process {_times(crashes + outside)} while this operator had "
                    f"it, {_times(outside)} of these by a signal from outside or for want of memory{last}"
                    if outside
                    else _CRASHED.format(_times(crashes)) + last
                )
            if doubt.equals[value] >= self._attempts + 2:
                doubt.values[value] = _CRASHED.format(_times(doubt.equals[value])) + last
        doubt.epochs_left = PROVEN_EPOCHS if doubt.values or doubt.places else CALM_EPOCHS

    def forget(self) -> None:
        """Forgets everything, because the plan has changed and tasks have other numbers."""
        self._doubts.clear()


_CRASHED = "this record has killed the worker's process {} while this operator had it"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
