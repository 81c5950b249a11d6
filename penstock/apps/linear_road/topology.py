"""Linear Road (docs/papers.md: A10): tolls, accident alerts, balances and daily expenses for the cars of expressways.

    records -> watermark -+-> (by segment, minutes) -> statistics ------------------+
                          +-> (by car) -> cars -+-> entries --------> (by segment) -+-> tolls -+-> tolls, alerts
                          |                     +-> stops -> (by place) -> accidents +         |
                          |                     +-> leaves ----+                               |
                          +-> questions about balances --------+-> (by car) -> accounts <------+
                          +-> questions about expenses -> expenses

The benchmark wants each answer within five seconds. What the answers are is said by the rules of the benchmark, and by
nothing else: an answer must never depend on the order in which records arrive, or on how they are divided among tasks.
So every operator waits for the watermark where order matters. The rules, with minutes that count from 1:

- **cars** brings the reports of a car into order. A report from a lane below 4 enters a segment when the car's last one
  was from another segment, or ended a journey in lane 4. The car is stopped from its fourth equal report on.
- **statistics** has, of each segment and minute, the sum and number of the speeds, and the number of different cars.
- **accidents**: two cars that are stopped at one place. An accident is announced from the minute after the one in which
  it was found up to the one in which it was cleared, in its segment and in the four before it.
- **tolls** answers an entry when all of the minute before it is known: 2 * (50 - cars) ** 2, if there were more than 50
  cars, if the mean speed of the five minutes before is below 40, and if no accident is ahead.
- **accounts** charges a toll when the car reports from another segment. It answers a question when the watermark has
  passed it, with all that was charged up to its time.
- **expenses** looks the answer up in the history.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import penstock as ps
from penstock.apps.linear_road.traffic import (
    BALANCE,
    DAY,
    DIR,
    EXIT_LANE,
    EXPENSES,
    LANE,
    POS,
    QID,
    REPORT,
    SEG,
    SEGMENTS,
    SPEED,
    TIME,
    TYPE,
    VID,
    XWAY,
    Record,
)
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.sinks import Sink
from penstock.runtime.sources import Source

Segment = tuple[int, int, int]
"""(xway, dir, seg)."""

Place = tuple[int, int, int, int]
"""(xway, dir, lane, pos)."""

Answer = tuple[Any, ...]
"""("toll", vid, time, lav, toll), ("alert", vid, time, seg of the accident), ("balance", qid, time, time of the last
charge, balance) or ("expenses", qid, time, toll). Times are seconds, and the third field is that of the question."""

TOLL, ALERT, BALANCE_IS, EXPENSES_ARE = "toll", "alert", "balance", "expenses"
STOPS, LEAVES, ALERTS, LATE = "stops", "leaves", "alerts", "late"

_MINUTE_S = 60
_MINUTES = 5  # of the mean speed
_AHEAD = 4  # an accident concerns so many segments before its own
_EQUAL_REPORTS = 4
_CARS, _SPEED = 50, 40  # a toll needs more cars, and a lower mean speed
_FOLD = 32  # charges of a car that are too few to sum up


def topology(
    source: Source,
    sink: Sink,
    history: Callable[[int, int, int], int],
    *,
    lateness_s: float = 0.0,
    parse: Callable[[str], Record] | None = None,
    files: int = 1,
    stamp: Callable[[Stream], object] | None = None,
    name: str = "linear-road",
) -> Flow:
    """Builds the flow: records go in, and Answers come out. `history`: (vid, day, xway) -> toll. With `parse` the
    source gives lines, of which it makes records, and has `files` files, each of which one task reads. `stamp` adds
    operators for the answers."""
    flow = Flow(name)
    tasks = None if parse is None else files
    records = flow.read(source, name="records", parallelism=tasks)
    if parse is not None:
        records = records.map(parse, name="parse", parallelism=tasks)
    given = answers(records, history, lateness_s=lateness_s)
    if stamp is not None:
        stamp(given)
    given.write(sink, name="answers")
    return flow


def answers(records: Stream, history: Callable[[int, int, int], int], *, lateness_s: float = 0.0) -> Stream:
    """Returns the stream of all answers. The records must come from their source directly."""
    records = records.watermark(_time_ms, out_of_orderness_s=lateness_s, name="watermark")
    reports = records.filter(_is_report, name="reports")
    balances = records.filter(_is_balance, name="questions about balances")
    expenses = records.filter(_is_expenses, name="questions about expenses")

    statistics = reports.key_by(_segment).window(ps.Tumbling(_MINUTE_S)).aggregate(_Statistics(), name="statistics")
    entries = reports.key_by(VID).process(_Cars(), outputs=(STOPS, LEAVES, LATE), name="cars")
    accidents = entries.side_output(STOPS).key_by(0).process(_Accidents(), name="accidents")
    about = statistics.map(_of_minute, name="minutes").union(accidents)
    tolls = entries.key_by(0).connect(about.key_by(0)).process(_Tolls(), outputs=(ALERTS,), name="tolls")
    charges = entries.side_output(LEAVES).union(balances.map(_question, name="questions"))
    accounts = tolls.key_by(1).connect(charges.key_by(0)).process(_Accounts(), name="accounts")
    return tolls.union(tolls.side_output(ALERTS), accounts, expenses.map(_Expenses(history), name="expenses"))


# --- records ---------------------------------------------------------------------------------------------------


def _time_ms(record: Record) -> int:
    return record[TIME] * 1000


def _is_report(record: Record) -> bool:
    return record[TYPE] == REPORT


def _is_balance(record: Record) -> bool:
    return record[TYPE] == BALANCE


def _is_expenses(record: Record) -> bool:
    return record[TYPE] == EXPENSES


def _segment(report: Record) -> Segment:
    return report[XWAY], report[DIR], report[SEG]


def _minute(time: int) -> int:
    return time // _MINUTE_S + 1


# --- segments --------------------------------------------------------------------------------------------------


class _Statistics(ps.AggregateFunction):
    """The sum of the speeds, how many there are, and the number of different cars."""

    def create(self) -> list[Any]:
        return [0, 0, set()]

    def add(self, found: list[Any], report: Record) -> list[Any]:
        found[0] += report[SPEED]
        found[1] += 1
        found[2].add(report[VID])
        return found

    def result(self, found: list[Any]) -> tuple[int, int, int]:
        return found[0], found[1], len(found[2])


def _of_minute(window: tuple[Segment, int, int, tuple[int, int, int]]) -> tuple[Any, ...]:
    """Returns the figures of a segment and minute: (segment, "minute", minute, sum, number, cars)."""
    segment, start_ms, _, found = window
    return segment, "minute", _minute(start_ms // 1000), *found


class _Tolls(ps.CoProcessFunction):
    """Answers who has entered a segment, when the watermark has passed the entry.

    The first input has entries (segment, vid, time), and the second one what is known of the segment: minutes, and
    accidents that are (segment, "found" or "cleared", place, segment of the accident, minute). The state is: the last
    minutes, the accidents as [segment, first minute, last minute or None] by their places, and the entries that wait.
    """

    def process1(self, ctx: ps.ProcessContext, segment: Segment, entry: tuple[Segment, int, int]) -> None:
        _, vid, time = entry
        insort(self._state(ctx)[2], (time, vid))
        ctx.set_event_timer(time * 1000 + 1)

    def process2(self, ctx: ps.ProcessContext, segment: Segment, about: tuple[Any, ...]) -> None:
        minutes, accidents, _ = self._state(ctx)
        kind = about[1]
        if kind == "minute":
            _, _, minute, *found = about
            minutes[minute] = found
            self._forget(minutes, accidents, ctx.watermark())
        else:
            _, _, place, seg, minute = about
            if kind == "found":
                accidents.setdefault(place, []).append([seg, minute, None])
            else:
                accidents[place][-1][2] = minute

    def on_event_timer(self, ctx: ps.ProcessContext, segment: Segment, at_ms: int) -> Iterable[Answer]:
        minutes, accidents, waiting = self._state(ctx)
        passed = 0
        tolls: list[Answer] = []
        for time, vid in waiting:
            if time * 1000 >= at_ms:
                break
            passed += 1
            minute = _minute(time)
            lav = _mean_speed(minutes, minute)
            cars = minutes[minute - 1][2] if minute - 1 in minutes else 0
            ahead = _nearest(accidents, segment, minute)
            toll = 2 * (_CARS - cars) ** 2 if cars > _CARS and lav < _SPEED and ahead is None else 0
            tolls.append((TOLL, vid, time, lav, toll))
            if ahead is not None:
                ctx.output(ALERTS, (ALERT, vid, time, ahead))
        del waiting[:passed]
        self._forget(minutes, accidents, at_ms)  # and not the watermark, as other timers may be due
        return tolls

    @staticmethod
    def _state(ctx: ps.ProcessContext) -> tuple[dict[int, list[int]], dict[Place, list[Any]], list[tuple[int, int]]]:
        state: tuple[dict[int, list[int]], dict[Place, list[Any]], list[tuple[int, int]]] | None = ctx.get()
        if state is None:
            state = ({}, {}, [])
            ctx.set(state)
        return state

    @staticmethod
    def _forget(minutes: dict[int, list[int]], accidents: dict[Place, list[Any]], upto_ms: int | None) -> None:
        """Removes the figures that no entry needs whose time is `upto_ms` or later."""
        if upto_ms is None:
            return
        now = _minute(upto_ms // 1000)
        for minute in [minute for minute in minutes if minute < now - _MINUTES]:
            del minutes[minute]
        for place in list(accidents):
            accidents[place] = [one for one in accidents[place] if one[2] is None or one[2] >= now]
            if not accidents[place]:
                del accidents[place]


def _mean_speed(minutes: dict[int, list[int]], minute: int) -> int:
    """Returns the mean speed of the minutes before, with halves rounded up, and 0 where there is none."""
    known = [minutes[each] for each in range(minute - _MINUTES, minute) if each in minutes]
    total, count = sum(found[0] for found in known), sum(found[1] for found in known)
    return (2 * total + count) // (2 * count) if count else 0


def _nearest(accidents: dict[Place, list[Any]], segment: Segment, minute: int) -> int | None:
    """Returns the segment of the nearest accident of which cars hear that enter the segment in the minute."""
    found = [
        seg
        for known in accidents.values()
        for seg, first, last in known
        if first <= minute and (last is None or minute <= last)
    ]
    return min(found, key=lambda seg: abs(seg - segment[2]), default=None)


# --- cars ------------------------------------------------------------------------------------------------------


class _Cars(ps.ProcessFunction):
    """Brings the reports of a car into order, and finds the meaning of each of them.

    It emits an entry (segment, vid, time). The side output "leaves" has (vid, time of the entry, time of the next
    report from elsewhere, or -1 if the car leaves the expressway in this segment). The side output "stops" has (place,
    time, vid, whether the car is stopped there or has left, seg). "late" has reports that came too late.

    The state is: the reports that wait, the segment, the time of the entry, the place, and how many equal reports came.
    """

    def process(self, ctx: ps.ProcessContext, vid: int, report: Record) -> None:
        watermark = ctx.watermark()
        at_ms = report[TIME] * 1000
        if watermark is not None and at_ms < watermark:
            ctx.output(LATE, report)
            return
        state = ctx.get()
        if state is None:
            state = [[], None, 0, None, 0]
            ctx.set(state)
        insort(state[0], (report[TIME], report))
        ctx.set_event_timer(at_ms + 1)

    def on_event_timer(self, ctx: ps.ProcessContext, vid: int, at_ms: int) -> None:
        state = ctx.get()
        waiting = state[0]
        while waiting and waiting[0][0] * 1000 < at_ms:
            _, report = waiting.pop(0)
            self._move(ctx, state, report)
            self._stop(ctx, state, report)

    def _move(self, ctx: ps.ProcessContext, state: list[Any], report: Record) -> None:
        vid, time = report[VID], report[TIME]
        segment = _segment(report)
        _, last, since, _, _ = state
        leaves = report[LANE] == EXIT_LANE
        if segment == last:
            if leaves:
                ctx.output(LEAVES, (vid, since, -1))
                state[1] = None
            return
        if last is not None:
            ctx.output(LEAVES, (vid, since, time))
        if leaves:
            state[1] = None
        else:
            state[1], state[2] = segment, time
            ctx.emit((segment, vid, time))

    def _stop(self, ctx: ps.ProcessContext, state: list[Any], report: Record) -> None:
        vid, time, seg = report[VID], report[TIME], report[SEG]
        place = (report[XWAY], report[DIR], report[LANE], report[POS])
        if state[3] != place:
            if state[4] >= _EQUAL_REPORTS:
                ctx.output(STOPS, (state[3], time, vid, False, seg))
            state[3], state[4] = place, 0
        state[4] += 1
        if state[4] == _EQUAL_REPORTS:
            ctx.output(STOPS, (place, time, vid, True, seg))


class _Accidents(ps.ProcessFunction):
    """Finds accidents at a place, and tells the segments that they concern.

    The state is: the stops that wait, the cars that are stopped, and the segment of the accident, if there is one.
    """

    def process(self, ctx: ps.ProcessContext, place: Place, stop: tuple[Place, int, int, bool, int]) -> None:
        _, time, vid, stopped, seg = stop
        state = ctx.get()
        if state is None:
            state = [[], [], None]
            ctx.set(state)
        insort(state[0], (time, vid, stopped, seg))
        ctx.set_event_timer(time * 1000 + 1)

    def on_event_timer(self, ctx: ps.ProcessContext, place: Place, at_ms: int) -> Iterable[tuple[Any, ...]]:
        state = ctx.get()
        waiting, cars, _ = state
        notices: list[tuple[Any, ...]] = []
        while waiting and waiting[0][0] * 1000 < at_ms:
            time, vid, stopped, seg = waiting.pop(0)
            if stopped:
                cars.append(vid)
                if len(cars) == 2 and state[2] is None:
                    state[2] = seg
                    notices += _notices(place, seg, "found", _minute(time) + 1)
            else:
                cars.remove(vid)
                if len(cars) < 2 and state[2] is not None:
                    notices += _notices(place, state[2], "cleared", _minute(time))
                    state[2] = None
        if not waiting and not cars:
            ctx.clear()
        return notices


def _notices(place: Place, seg: int, kind: str, minute: int) -> Iterable[tuple[Any, ...]]:
    """Returns the notices for the segments that an accident concerns: its own and those before it."""
    xway, direction = place[:2]
    back = 1 if direction else -1
    for each in range(seg, seg + back * (_AHEAD + 1), back):
        if 0 <= each < SEGMENTS:
            yield (xway, direction, each), kind, place, seg, minute


# --- accounts --------------------------------------------------------------------------------------------------


def _question(record: Record) -> tuple[int, int, int, str]:
    return record[VID], record[TIME], record[QID], BALANCE_IS


class _Accounts(ps.CoProcessFunction):
    """Charges tolls, and answers questions about balances when the watermark has passed them.

    The first input has tolls, and the second one leaves and questions. A toll and the leave of the same entry come in
    any order, and are one charge. The state is: the balance and the time of the last charge, of charges that no answer
    depends on any more; the other charges; tolls and leaves that wait for each other, by the times of their entries;
    and the questions that wait.
    """

    def process1(self, ctx: ps.ProcessContext, vid: int, answer: Answer) -> None:
        _, _, since, _, toll = answer
        state = self._state(ctx)
        if since in state.leaves:
            self._charge(ctx, state, state.leaves.pop(since), toll)
        else:
            state.tolls[since] = toll

    def process2(self, ctx: ps.ProcessContext, vid: int, record: tuple[Any, ...]) -> None:
        state = self._state(ctx)
        if len(record) == 4:
            _, time, qid, _ = record
            insort(state.questions, (time, qid))
            ctx.set_event_timer(time * 1000 + 1)
            return
        _, since, time = record
        if since in state.tolls:
            self._charge(ctx, state, time, state.tolls.pop(since))
        else:
            state.leaves[since] = time

    def on_event_timer(self, ctx: ps.ProcessContext, vid: int, at_ms: int) -> Iterable[Answer]:
        state = self._state(ctx)
        answered: list[Answer] = []
        while state.questions and state.questions[0][0] * 1000 < at_ms:
            time, qid = state.questions.pop(0)
            charges = [charge for charge in state.charges if charge[0] <= time]
            balance = state.balance + sum(toll for _, toll in charges)
            charged_at = charges[-1][0] if charges else state.charged_at
            answered.append((BALANCE_IS, qid, time, charged_at, balance))
        return answered

    @staticmethod
    def _state(ctx: ps.ProcessContext) -> _Account:
        state: _Account | None = ctx.get()
        if state is None:
            state = _Account()
            ctx.set(state)
        return state

    @staticmethod
    def _charge(ctx: ps.ProcessContext, state: _Account, time: int, toll: int) -> None:
        if not toll or time < 0:
            return
        insort(state.charges, (time, toll))
        watermark = ctx.watermark()
        if len(state.charges) < _FOLD or watermark is None:
            return
        # Questions that wait, or that are still to come, have times from the watermark on.
        old = [charge for charge in state.charges if charge[0] * 1000 < watermark]
        if old:
            state.balance += sum(each for _, each in old)
            state.charged_at = old[-1][0]
            del state.charges[: len(old)]


@dataclass(slots=True)
class _Account:
    balance: int = 0
    charged_at: int = 0
    charges: list[tuple[int, int]] = field(default_factory=list)
    tolls: dict[int, int] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    questions: list[tuple[int, int]] = field(default_factory=list)


class _Expenses:
    """Answers questions about the expenses of a day."""

    def __init__(self, history: Callable[[int, int, int], int]) -> None:
        self._history = history

    def __call__(self, record: Record) -> Answer:
        return EXPENSES_ARE, record[QID], record[TIME], self._history(record[VID], record[DAY], record[XWAY])
