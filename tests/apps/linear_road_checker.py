"""An oracle for Linear Road (docs/papers.md: A10): all answers to a list of records, slowly, by the rules.

It shares no code with the application, and reads no clock: every answer follows from the records alone. A program is
right when its answers are the same multisets; both directions count, an answer that is missing and one too many.

Minutes count from 1: the minute of a time is time // 60 + 1. A segment is a (xway, dir, seg). The rules:

- **Entering.** A report in the lanes 0 to 3 enters a segment when the car's last report was from another segment, when
  it is the car's first one, or when the last one was in lane 4, which ends a journey. Each entering report has one toll
  notification, and one accident alert if it has an accident ahead.
- **LAV** of a segment in minute m: the mean of all speeds that cars reported in it in the minutes m-5 to m-1, rounded
  to whole miles with halves up; 0 when there are none. Lanes make no difference.
- **NOV** of a segment in minute m: the number of different cars that reported from it in minute m-1.
- **Toll** of a segment in minute m: 2 * (50 - NOV) ** 2 if NOV > 50 and LAV < 40 and no accident is ahead, else 0.
- **Stopped.** A car is stopped from the fourth equal report in a row on: equal in (xway, dir, lane, pos).
- **Accident.** When two cars are stopped at one place, (xway, dir, lane, pos), there is an accident in its segment. It
  is announced from the minute after the one in which the second car was found to be stopped. It is cleared by the first
  report that leaves fewer than two cars stopped at the place; the minute of this report is the last one in which the
  accident is announced. Each place has accidents of its own, any number of them, one after the other or at one time.
- **Ahead.** An accident is ahead of a segment if it is announced in the minute and lies in this segment or in one of
  the next four in the direction of travel (dir 0: seg to seg + 4, dir 1: seg to seg - 4) on the same expressway.
- **Charge.** The toll of a notification is charged by the car's next report from another segment, also if that one is
  in lane 4. It is never charged if the car leaves the expressway in the same segment, or its reports end there.
- **Balance.** The answer has what was charged to the car by the records before the question, in the order of the list.
- **Expenses.** The answer has what the history says for (vid, day, xway).

Where the public validator does otherwise, this oracle does not follow it: there, an accident of a segment is kept for
ever, so that a second one is never seen, and neither missing answers nor the LAV are compared.

The records of a minute may come in any order but for those of one car, and so may be mixed as several sources mix them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Place = tuple[int, int, int, int]
"""(xway, dir, lane, pos)."""

Segment = tuple[int, int, int]
"""(xway, dir, seg)."""


class Toll(NamedTuple):
    """A toll notification: type 0 of the benchmark. `time`: of the report that entered the segment."""

    vid: int
    time: int
    lav: int
    toll: int


class Alert(NamedTuple):
    """An accident alert: type 1. `seg`: of the nearest accident ahead."""

    vid: int
    time: int
    seg: int


class Balance(NamedTuple):
    """The answer to a record of type 2. `charged_at`: the time of the report by which the car was last charged a toll
    above 0; 0 if there was none."""

    qid: int
    time: int
    charged_at: int
    balance: int


class Expense(NamedTuple):
    """The answer to a record of type 3."""

    qid: int
    time: int
    toll: int


@dataclass
class Accident:
    """An accident, for tests: where it is, and in which minutes it is announced (`last` None: not cleared)."""

    place: Place
    seg: int
    first: int
    last: int | None = None


@dataclass
class Answers:
    """All answers, as multisets. The elements are equal to plain tuples of the same fields."""

    tolls: Counter[Toll] = field(default_factory=Counter)
    alerts: Counter[Alert] = field(default_factory=Counter)
    balances: Counter[Balance] = field(default_factory=Counter)
    expenses: Counter[Expense] = field(default_factory=Counter)
    accidents: list[Accident] = field(default_factory=list)


def no_history(vid: int, day: int, xway: int) -> int:
    raise AssertionError(f"the records ask for the expenses of car {vid} on day {day}, and no history was given")


def expected(records: Iterable[tuple[int, ...]], history: Callable[[int, int, int], int] = no_history) -> Answers:
    """Returns the answers to the records, whose minutes must not decrease. `history`: (vid, day, xway) -> toll."""
    records = list(records)
    minutes = [record[1] // 60 + 1 for record in records]
    assert minutes == sorted(minutes), "the records are not in the order of their minutes"
    answers = Answers(accidents=accidents_of(records))
    speeds, cars = statistics_of(records)
    last: dict[int, tuple[Segment, int]] = {}  # of a car on its journey: the segment of its last report, and its toll
    lavs: dict[tuple[Segment, int], int] = {}
    account: dict[int, tuple[int, int]] = {}  # of a car: what it was charged, and when last
    for record, minute in zip(records, minutes, strict=True):
        kind, time, vid = record[:3]
        if kind == 2:
            balance, charged_at = account.get(vid, (0, 0))
            answers.balances[Balance(record[9], time, charged_at, balance)] += 1
        elif kind == 3:
            answers.expenses[Expense(record[9], time, history(vid, record[14], record[4]))] += 1
        elif kind == 0:
            xway, lane, way, seg = record[4:8]
            segment = xway, way, seg
            before = last.get(vid)
            if before is not None and before[0] == segment:
                if lane == 4:
                    del last[vid]
                continue
            if before is not None and before[1]:
                account[vid] = account.get(vid, (0, 0))[0] + before[1], time
            if lane == 4:
                last.pop(vid, None)
                continue
            if (segment, minute) not in lavs:
                lavs[segment, minute] = lav_of(segment, minute, speeds)
            lav = lavs[segment, minute]
            nov = len(cars.get((segment, minute - 1), ()))
            ahead = accident_ahead(segment, minute, answers.accidents)
            toll = 2 * (50 - nov) ** 2 if nov > 50 and lav < 40 and ahead is None else 0
            last[vid] = segment, toll
            answers.tolls[Toll(vid, time, lav, toll)] += 1
            if ahead is not None:
                answers.alerts[Alert(vid, time, ahead)] += 1
        else:
            raise AssertionError(f"no rule for a record of type {kind}: {record}")
    return answers


Speeds = dict[tuple[Segment, int], list[int]]
Cars = dict[tuple[Segment, int], set[int]]


def statistics_of(records: list[tuple[int, ...]]) -> tuple[Speeds, Cars]:
    """Returns the speeds reported and the cars that were there, for each segment and minute."""
    speeds: Speeds = defaultdict(list)
    cars: Cars = defaultdict(set)
    for record in records:
        if record[0] == 0:
            _, time, vid, speed, xway, _, way, seg = record[:8]
            speeds[(xway, way, seg), time // 60 + 1].append(speed)
            cars[(xway, way, seg), time // 60 + 1].add(vid)
    return speeds, cars


def lav_of(segment: Segment, minute: int, speeds: Speeds) -> int:
    read = [speed for m in range(minute - 5, minute) for speed in speeds.get((segment, m), ())]
    return (2 * sum(read) + len(read)) // (2 * len(read)) if read else 0


def accidents_of(records: list[tuple[int, ...]]) -> list[Accident]:
    """Returns all accidents, in the order in which they were found."""
    found: list[Accident] = []
    equal: dict[int, tuple[Place, int]] = {}  # of a car: its last place, and how many reports in a row were from there
    stopped: dict[Place, set[int]] = defaultdict(set)
    now: dict[Place, Accident] = {}
    for record in records:
        if record[0] != 0:
            continue
        _, time, vid, _, xway, lane, way, seg, pos = record[:9]
        minute = time // 60 + 1
        place = xway, way, lane, pos
        before, count = equal.get(vid, (place, 0))
        if before != place:
            stopped[before].discard(vid)
            if len(stopped[before]) < 2 and before in now:
                now.pop(before).last = minute
            count = 0
        equal[vid] = place, count + 1
        if count + 1 >= 4:
            stopped[place].add(vid)
            if len(stopped[place]) == 2 and place not in now:
                now[place] = Accident(place, seg, minute + 1)
                found.append(now[place])
    return found


def accident_ahead(segment: Segment, minute: int, accidents: list[Accident]) -> int | None:
    """Returns the segment of the nearest accident that is announced to those who enter the segment."""
    xway, way, seg = segment
    distances = [
        distance
        for accident in accidents
        if accident.place[:2] == (xway, way)
        and accident.first <= minute
        and (accident.last is None or minute <= accident.last)
        and 0 <= (distance := (seg - accident.seg if way else accident.seg - seg)) <= 4
    ]
    if not distances:
        return None
    return seg - min(distances) if way else seg + min(distances)
