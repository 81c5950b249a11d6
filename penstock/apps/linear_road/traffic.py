"""The input of Linear Road (docs/papers.md: A10): what the cars of expressways report, made of nothing but a seed.

An expressway has 100 segments of a mile in two directions. Each of its cars tells every 30 seconds where it is and how
fast, from the lane by which it enters to the lane by which it leaves. Two cars that stop at one place are an accident,
behind which traffic queues until it is cleared. With one in a hundred reports a car would ask a question; the half of
these that ask for its balance, and the tenth that ask for the expenses of an earlier day, are records of their own.
Questions about the time of a journey, the rest, are left out: nobody answers them.

An expressway is simulated second by second, and depends on the seed and its own number only. So the same records come
in every run, whatever the number of expressways and of the tasks that share them, and a source that goes back to a
second simulates what was before it again, in two thirds of the time that giving the records takes. The clock, and
how fast the records are read, must never have an influence.

Records are tuples of 15 whole numbers, in the order of the benchmark's files (`FIELDS`), -1 where a field means
nothing. The codec sends lists of such tuples as msgpack; records of a class would be pickled, and dicts repeat 15 names
in each record.

The constants are those of the public generators. How fast cars get through a crowd is not among them; it was fitted so
that the number of records follows that of the public generator. One expressway of seed 0 in three hours:

    minute                            0    10    30    60    90   120   150   179    all records
    records a second                 34   461  1218  2115  2701  2905  2705  2162     23,155,272
    of the public generator          32   446  1220  2159  2700  2876  2684  2204     23,168,666

In no minute of the 180 do the two differ by more than 5 %; the mean is 1.3 %. It has 115,346 questions for balances
and 23,097 for expenses, where the public generator has 115,165 and 23,072.

Both have nine accidents. But these cars are faster on longer journeys: of 10.9 million entries into segments 0.4 % have
a toll and 1.0 % an accident alert, where the public generator has 8.5 million, 1.1 % and 1.0 %. The pace "slow" is for
tests of tolls, see `PACES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, repeat
from math import pi, sin
from typing import TYPE_CHECKING

from penstock.apps.hashing import GOLDEN, mixed
from penstock.runtime.errors import FlowError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

Record = tuple[int, ...]
"""15 whole numbers, named by FIELDS."""

FIELDS = (
    "type", "time", "vid", "speed", "xway", "lane", "dir", "seg", "pos", "qid", "s_init", "s_end", "dow", "tod", "day",
)  # fmt: skip
TYPE, TIME, VID, SPEED, XWAY, LANE, DIR, SEG, POS, QID, S_INIT, S_END, DOW, TOD, DAY = range(15)

REPORT, BALANCE, EXPENSES = 0, 2, 3  # the types of records; 4, the time of a journey, is not made

SEGMENTS, SEGMENT_FT = 100, 5280
LENGTH_FT = SEGMENTS * SEGMENT_FT
LANES = 5
ENTRY_LANE, FIRST_TRAVEL_LANE, LAST_TRAVEL_LANE, EXIT_LANE = 0, 1, 3, 4
REPORT_S = 30  # between two reports of a car
DURATION_S = 10_800  # of the benchmark: three hours
DAYS = 69  # of the history; day 1 is yesterday
TOLL_MIN, TOLL_MAX = 10, 99  # of a day in the history

_FT = 44  # a car of one mile an hour moves so far between two reports
_VIDS = 10_000_000  # of an expressway, so that no two have a car with the same number
_FREE = 24  # so many cars of a lane and segment do not slow each other
_LANE_CHANGE = 0.4
_CHANCE = 0.53  # in the rate of new cars; the public generator's cars show a mean of half of it
_ENTRY_MIN, _ENTRY_MAX, _EXIT_SPEED, _LEAST_SPEED = 10, 40, 10, 5
_RAMP_FT = 528  # cars enter within the first tenth of a segment
_SPREAD = 10  # speeds are up to so much above or below the limit
_TAIL_SPEED = 25  # in the queue behind an accident
_TAIL_S = 120  # a queue grows by a segment in this time
_TAIL_MOST = 10
_REENTRY, _REENTRY_MIN_S, _REENTRY_S = 0.10, 1_000, 1_000
_BALANCES, _EXPENSES = 0.005, 0.001  # of the reports: a half and a tenth of one in a hundred
_CELLS = 2 * SEGMENTS * LANES

# The rows of the table of cars that report in the same seconds.
_VID, _DIR, _POS, _LANE, _SPEED, _EXIT, _UNTIL, _SEG = range(8)


@dataclass(frozen=True)
class Pace:
    """Says how much traffic there is and how it moves.

    `cars_per_s`: new cars in a second of each expressway, by (sin(180 degrees * t / 3 h) + 0.8 + chance). `limit`: of
    the speed, in miles an hour. `crowding`: how much a lane of twice the free number of cars slows down. `first_seg`,
    `last_seg`: between which cars enter and leave. `accident_every_s`, `accident_lasts_s`: the mean time from the end
    of an accident to the next one, and that of an accident. Each is at least half the mean and at most one and a half.
    """

    cars_per_s: float = 20.0
    limit: int = 70
    crowding: float = 0.04
    first_seg: int = 0
    last_seg: int = SEGMENTS - 1
    accident_every_s: int = 600
    accident_lasts_s: int = 600

    def __post_init__(self) -> None:
        if not 0 < self.cars_per_s <= 1000:
            raise FlowError(f"Pace: cars_per_s must be above 0 and at most 1000, got {self.cars_per_s}")
        if not 2 * _SPREAD <= self.limit <= 100 - _SPREAD:
            raise FlowError(f"Pace: limit must be between {2 * _SPREAD} and {100 - _SPREAD}, got {self.limit}")
        if not 0 <= self.crowding <= 10:
            raise FlowError(f"Pace: crowding must be between 0 and 10, got {self.crowding}")
        if not 0 <= self.first_seg < self.last_seg < SEGMENTS:
            raise FlowError(
                f"Pace: first_seg must be below last_seg and both between 0 and {SEGMENTS - 1}, got {self.first_seg} "
                f"and {self.last_seg}"
            )
        if self.accident_every_s < 2 or self.accident_lasts_s < 2:
            raise FlowError(
                "Pace: accident_every_s and accident_lasts_s must be at least 2 seconds, got "
                f"{self.accident_every_s} and {self.accident_lasts_s}"
            )


#: "slow" is a rush hour on ten miles: after five minutes nearly all of these segments have more than 50 cars, at less
#: than 40 miles an hour, and so a toll. Accidents are more frequent and shorter, so that a run of a quarter of an hour
#: has some that are cleared.
PACES = {
    "default": Pace(),
    "slow": Pace(cars_per_s=8, limit=30, first_seg=40, last_seg=49, accident_every_s=200, accident_lasts_s=300),
}


class Traffic:
    """Gives all records of a seed.

        traffic = Traffic(seed=1, xways=2, seconds=600)
        for record in traffic: ...              # all, in the order of their times
        traffic.seconds_of(1, first=300)        # a list of records for each second from 300 on, of expressway 1 only

    `xways`: the number of expressways. `seconds`: how long. `pace`: a Pace, or the name of one of PACES. Records of a
    second come by expressway; of each, reports first, and then questions, each after a report of the same car in the
    same second. `Traffic` travels to workers as these few values.
    """

    def __init__(
        self, seed: int = 0, *, xways: int = 1, seconds: int = DURATION_S, pace: str | Pace = "default"
    ) -> None:
        if seed < 0:
            raise FlowError(f"Traffic: seed must not be negative, got {seed}")
        if xways < 1:
            raise FlowError(f"Traffic needs at least one expressway, got xways={xways}")
        if seconds < 0:
            raise FlowError(f"Traffic: seconds must not be negative, got {seconds}")
        if isinstance(pace, str):
            if pace not in PACES:
                raise FlowError(f"Traffic: pace must be a Pace or one of {', '.join(PACES)}, got {pace!r}")
            pace = PACES[pace]
        self.seed = seed
        self.xways = xways
        self.seconds = seconds
        self.pace = pace

    def __iter__(self) -> Iterator[Record]:
        for lists in zip(*map(self.seconds_of, range(self.xways)), strict=True):
            yield from chain.from_iterable(lists)

    def seconds_of(self, xway: int, first: int = 0) -> Iterator[list[Record]]:
        """Gives the records of one expressway, a list for each second from `first` on."""
        expressway = self.expressway(xway)
        for _ in range(min(first, self.seconds)):
            expressway.skip()
        for _ in range(first, self.seconds):
            yield expressway.next_second()

    def expressway(self, xway: int) -> Expressway:
        """Returns an expressway before its first second."""
        if not 0 <= xway < self.xways:
            raise FlowError(f"Traffic has expressways 0 to {self.xways - 1}, and no {xway}")
        return Expressway(self.seed, xway, self.xways, self.pace)

    def with_seconds(self, seconds: int) -> Traffic:
        """Returns the same traffic for another number of seconds."""
        return Traffic(self.seed, xways=self.xways, seconds=seconds, pace=self.pace)


@dataclass(frozen=True)
class _Wreck:
    """Holds a place where a car has stopped, and when it will go on. A second car makes it an accident."""

    dir: int
    seg: int
    lane: int
    pos: int
    since: int
    until: int
    is_accident: bool = False


class Expressway:
    """Simulates one expressway; `next_second` gives the records of one second after the other.

    `xways` is how many there are: the questions for expenses are about any of them. An Expressway can be pickled at any
    second, and then continues from there.
    """

    def __init__(self, seed: int, xway: int, xways: int, pace: Pace) -> None:
        import numpy as np

        self.xway = xway
        self.time = 0  # of the next second
        self._xways = xways
        self._pace = pace
        self._random = np.random.default_rng((seed, xway))
        self._cars: list[Ints] = [np.empty((8, 0), np.int64) for _ in range(REPORT_S)]
        self._crowd: Ints = np.zeros(_CELLS, np.int64)  # cars of each (dir, seg, lane)
        self._vids = xway * _VIDS  # the last one that was given
        self._back: dict[int, list[Ints]] = {}  # cars that come again, by second
        self._qids = xway * _VIDS
        self._wreck: _Wreck | None = None
        self._next_wreck = self._about(pace.accident_every_s)

    def next_second(self) -> list[Record]:
        """Returns the records of the next second."""
        time = self.time
        cars, asks = self._advance()
        count = cars.shape[1]
        if not count:
            return []
        none = repeat(-1)
        records: list[Record] = list(
            zip(
                repeat(REPORT, count),
                repeat(time),
                cars[_VID].tolist(),
                cars[_SPEED].tolist(),
                repeat(self.xway),
                cars[_LANE].tolist(),
                cars[_DIR].tolist(),
                cars[_SEG].tolist(),
                cars[_POS].tolist(),
                none,
                none,
                none,
                none,
                none,
                none,
                strict=False,
            )
        )
        for kind, vid, xway, qid, day in asks:
            records.append((kind, time, vid, -1, xway, -1, -1, -1, -1, qid, -1, -1, -1, -1, day))
        return records

    def skip(self) -> None:
        """Goes on by a second without giving its records."""
        self._advance()

    def _advance(self) -> tuple[Ints, list[tuple[int, int, int, int, int]]]:
        """Simulates a second. Returns the cars that report, and what they ask: type, vid, xway, qid, day."""
        import numpy as np

        time = self.time
        cars = self._moved(self._leave(self._cars[time % REPORT_S]))
        cars = np.concatenate((cars, self._entering()), axis=1)
        self._crowd += np.bincount(_cells(cars), minlength=_CELLS)
        self._cars[time % REPORT_S] = cars
        asks = self._questions(cars)
        self.time += 1
        return cars, asks

    def _leave(self, cars: Ints) -> Ints:
        """Returns the cars that have not left, and takes all from the crowd. Some will come again."""
        import numpy as np

        if cars.shape[1]:
            self._crowd -= np.bincount(_cells(cars), minlength=_CELLS)
            leaving = cars[_LANE] == EXIT_LANE
            gone = cars[_VID, leaving]
            chance = self._random.random(len(gone))
            again = chance < _REENTRY
            after = (chance[again] / _REENTRY * _REENTRY_S).astype(np.int64) + _REENTRY_MIN_S + self.time
            for vid, when in zip(gone[again], after.tolist(), strict=True):
                self._back.setdefault(when, []).append(vid)
            cars = cars[:, ~leaving]
        return cars

    def _moved(self, cars: Ints) -> Ints:
        """Moves the cars by the distance between two reports, at the speeds that they last reported."""
        import numpy as np

        count = cars.shape[1]
        if not count:
            return cars
        was = cars[_POS]
        forward = 1 - 2 * cars[_DIR]
        pos = was + forward * cars[_SPEED] * _FT
        until = np.where(cars[_UNTIL] > self.time, cars[_UNTIL], 0)
        stopped = until > 0
        seg = pos // SEGMENT_FT
        leaving = (seg == cars[_EXIT]) & ~stopped
        lane = np.maximum(cars[_LANE], FIRST_TRAVEL_LANE)
        # Some cars change to the lane beside theirs, if fewer cars are there.
        chance = self._random.random(count)
        beside = lane + np.where(chance < _LANE_CHANGE / 2, -1, 1)
        beside = np.clip(beside, FIRST_TRAVEL_LANE, LAST_TRAVEL_LANE)
        row = (cars[_DIR] * SEGMENTS + seg) * LANES
        better = (chance < _LANE_CHANGE) & (self._crowd[row + beside] < self._crowd[row + lane]) & ~stopped
        lane = np.where(better, beside, lane)
        # Speeds are about the limit, and lower in a crowd.
        wish = self._pace.limit - _SPREAD + self._random.random(count) * (2 * _SPREAD + 1)
        excess = np.maximum(self._crowd[row + lane] / _FREE - 1, 0)
        speed = np.maximum(wish / (1 + self._pace.crowding * excess), _LEAST_SPEED).astype(np.int64)
        if self._wreck is not None and self._wreck.is_accident:
            wreck = self._wreck
            behind = (wreck.seg - seg) * forward
            tail = min((self.time - wreck.since) // _TAIL_S, _TAIL_MOST)
            queue = (cars[_DIR] == wreck.dir) & (behind >= 0) & (behind <= tail)
            speed = np.where(queue, np.minimum(speed, _TAIL_SPEED), speed)
        speed[leaving] = _EXIT_SPEED
        speed[stopped] = 0
        lane[leaving] = EXIT_LANE
        cars = np.stack((cars[_VID], cars[_DIR], pos, lane, speed, cars[_EXIT], until, seg))
        self._maybe_stop(cars, was)
        return cars

    def _maybe_stop(self, cars: Ints, was: Ints) -> None:
        """Stops a car when an accident is due, and the next one that comes by at the same place."""
        import numpy as np

        wreck = self._wreck
        if wreck is not None and self.time >= wreck.until:
            self._wreck = wreck = None
            self._next_wreck = self.time + self._about(self._pace.accident_every_s)
        driving = (cars[_LANE] != EXIT_LANE) & (cars[_SPEED] > 0)
        if wreck is None:
            if self.time < self._next_wreck:
                return
            able = np.flatnonzero(driving)
            if not len(able):
                return
            car = int(able[int(self._random.random() * len(able))])
            until = self.time + self._about(self._pace.accident_lasts_s)
            self._wreck = _Wreck(
                int(cars[_DIR, car]),
                int(cars[_SEG, car]),
                int(cars[_LANE, car]),
                int(cars[_POS, car]),
                self.time,
                until,
            )
        elif not wreck.is_accident:
            passing = (was <= wreck.pos) == (wreck.pos <= cars[_POS])
            able = np.flatnonzero(driving & (cars[_DIR] == wreck.dir) & passing)
            if not len(able):
                return
            car = int(able[0])
            cars[_LANE, car], cars[_POS, car], cars[_SEG, car] = wreck.lane, wreck.pos, wreck.seg
            until = wreck.until
            self._wreck = replace(wreck, is_accident=True)
        else:
            return
        cars[_SPEED, car] = 0
        cars[_UNTIL, car] = until

    def _entering(self) -> Ints:
        """Returns the cars that enter, returning cars first."""
        import numpy as np

        wave = sin(pi * self.time / DURATION_S) if self.time < DURATION_S else 0.0
        first, chance = self._random.random(2).tolist()
        count = int(self._pace.cars_per_s * (wave + 0.8 + first * _CHANCE) + chance)
        back = self._back.pop(self.time, [])
        new = max(0, count - len(back))
        vid = np.concatenate((np.array(back, np.int64), np.arange(self._vids + 1, self._vids + new + 1)))
        self._vids += new
        count = len(vid)
        begin, end, speed, ramp = self._random.random((4, count))
        # Where cars enter and where they leave differ, and all pairs are equally likely.
        segs = self._pace.last_seg - self._pace.first_seg + 1
        seg = (begin * segs).astype(np.int64)
        leave = (end * (segs - 1)).astype(np.int64)
        leave += leave >= seg
        direction = (leave < seg).astype(np.int64)
        offset = (ramp * _RAMP_FT).astype(np.int64)
        seg += self._pace.first_seg
        leave += self._pace.first_seg
        cars = np.zeros((8, count), np.int64)
        cars[_VID], cars[_DIR], cars[_SEG], cars[_EXIT] = vid, direction, seg, leave
        cars[_POS] = seg * SEGMENT_FT + np.where(direction == 0, offset, SEGMENT_FT - 1 - offset)
        cars[_SPEED] = _ENTRY_MIN + (speed * (_ENTRY_MAX - _ENTRY_MIN + 1)).astype(np.int64)
        cars[_LANE] = ENTRY_LANE
        return cars

    def _questions(self, cars: Ints) -> list[tuple[int, int, int, int, int]]:
        import numpy as np

        chance = self._random.random((cars.shape[1],))
        asks = []
        for car in np.flatnonzero(chance < _BALANCES + _EXPENSES).tolist():
            vid = int(cars[_VID, car])
            self._qids += 1
            if chance[car] < _BALANCES:
                asks.append((BALANCE, vid, -1, self._qids, -1))
            else:
                day, xway = self._random.random(2).tolist()
                asks.append((EXPENSES, vid, int(xway * self._xways), self._qids, 1 + int(day * DAYS)))
        return asks

    def _about(self, mean_s: int) -> int:
        return round(mean_s * (0.5 + self._random.random()))


def _cells(cars: Ints) -> Ints:
    cells: Ints = (cars[_DIR] * SEGMENTS + cars[_SEG]) * LANES + cars[_LANE]
    return cells


# --- the history -----------------------------------------------------------------------------------------------


class History:
    """Tells the toll that a car paid on an earlier day: a toll of 10 to 99 for each (vid, day, xway), by a hash of
    these and the seed. As a table it would have 25 million rows for one expressway."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._key = mixed(seed * GOLDEN + 1)

    def toll(self, vid: int, day: int, xway: int) -> int:
        """Returns the toll of a day, 1 (yesterday) to 69."""
        if not 1 <= day <= DAYS:
            raise ValueError(f"the history has days 1 to {DAYS}, and no day {day}")
        word = mixed(mixed(mixed(self._key ^ vid) + day) + xway)
        return TOLL_MIN + ((word >> 32) * (TOLL_MAX - TOLL_MIN + 1) >> 32)

    __call__ = toll


# --- the benchmark's files -------------------------------------------------------------------------------------


def parse(line: str) -> Record:
    """Returns the record of a line of the benchmark's files: 15 whole numbers, separated by commas."""
    record = tuple(map(int, line.split(",")))
    if len(record) != len(FIELDS):
        raise ValueError(f"a line of Linear Road has {len(FIELDS)} numbers, this one has {len(record)}: {line[:200]!r}")
    return record


def read_lines(lines: Iterable[str]) -> Iterator[Record]:
    """Gives the records of the lines; leaves empty lines out."""
    return (parse(line) for line in lines if not line.isspace() and line)


def to_line(record: Record) -> str:
    """Returns the line of a record, without an end of line."""
    return ",".join(map(str, record))
