"""Linear Road: the traffic is a pure function of the seed, with the benchmark's proportions; the oracle's answers to
small cases are those of the rules, worked out by hand."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.apps.linear_road.traffic import (
    BALANCE,
    DAY,
    DAYS,
    DIR,
    ENTRY_LANE,
    EXIT_LANE,
    EXPENSES,
    FIELDS,
    LANE,
    LENGTH_FT,
    POS,
    QID,
    REPORT,
    REPORT_S,
    SEG,
    SEGMENT_FT,
    SPEED,
    TIME,
    TYPE,
    VID,
    XWAY,
    History,
    Pace,
    Record,
    Traffic,
    parse,
    read_lines,
    to_line,
)
from penstock.runtime.errors import FlowError
from tests.apps.linear_road_checker import Accident, Answers, accidents_of, expected

# Reports a second of the public generator, in some of its minutes.
RATES = {0: 32.2, 1: 75.6, 2: 120.4, 5: 249.8, 9: 408.4}


@pytest.fixture(scope="module")
def usual() -> list[Record]:
    """Ten minutes of an expressway, at the usual pace."""
    return list(Traffic(3, seconds=600))


@pytest.fixture(scope="module")
def slow() -> list[Record]:
    """A quarter of an hour of a slow one."""
    return list(Traffic(1, seconds=900, pace="slow"))


@pytest.fixture(scope="module")
def answers(slow: list[Record]) -> Answers:
    return expected(slow, History(1))


# --- the traffic -----------------------------------------------------------------------------------------------


def test_records_are_a_function_of_the_seed() -> None:
    assert list(Traffic(5, seconds=90)) == list(Traffic(5, seconds=90))
    assert list(Traffic(5, seconds=90)) != list(Traffic(6, seconds=90))


def test_an_expressway_does_not_depend_on_the_others() -> None:
    alone = [record for record in Traffic(5, seconds=90) if record[TYPE] != EXPENSES]
    among = [record for record in Traffic(5, seconds=90, xways=3) if record[TYPE] != EXPENSES]
    assert [record for record in among if record[VID] < 10_000_000] == alone
    assert {record[XWAY] for record in among if record[TYPE] == REPORT} == {0, 1, 2}
    assert [record[TIME] for record in among] == sorted(record[TIME] for record in among)


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    traffic = Traffic(5, seconds=40)
    begin = list(traffic)
    assert list(traffic.with_seconds(60))[: len(begin)] == begin


def test_seconds_can_be_skipped() -> None:
    traffic = Traffic(2, seconds=120, pace="slow")
    assert list(traffic.seconds_of(0, first=70)) == list(traffic.seconds_of(0))[70:]
    assert list(traffic.seconds_of(0, first=500)) == []


def test_a_pickled_expressway_continues_where_it_was() -> None:
    expressway = Traffic(2).expressway(0)
    for _ in range(60):
        expressway.skip()
    copy = pickle.loads(pickle.dumps(expressway))
    for _ in range(60):
        assert copy.next_second() == expressway.next_second()


def test_records_are_tuples_of_15_whole_numbers(usual: list[Record]) -> None:
    assert {type(record) for record in usual} == {tuple}
    assert {len(record) for record in usual} == {len(FIELDS)} == {15}
    assert {type(value) for record in usual for value in record} == {int}


def test_reports_are_within_the_benchmark_s_limits(usual: list[Record]) -> None:
    for record in usual:
        if record[TYPE] == REPORT:
            assert 0 <= record[SPEED] <= 100
            assert ENTRY_LANE <= record[LANE] <= EXIT_LANE
            assert record[DIR] in {0, 1}
            assert 0 <= record[POS] < LENGTH_FT
            assert record[SEG] == record[POS] // SEGMENT_FT
            assert record[QID:] == (-1,) * 6


def journeys(records: Iterable[Record]) -> list[list[Record]]:
    """Returns the reports of each journey: from the entry to the exit, or to the end of the records."""
    found: dict[int, list[list[Record]]] = defaultdict(list)
    for record in records:
        if record[TYPE] == REPORT:
            if record[LANE] == ENTRY_LANE:
                found[record[VID]].append([])
            found[record[VID]][-1].append(record)
    return [journey for of_car in found.values() for journey in of_car]


@pytest.mark.parametrize("pace", ["usual", "slow"])
def test_cars_report_every_30_seconds_from_the_entry_to_the_exit(pace: str, request: pytest.FixtureRequest) -> None:
    for journey in journeys(request.getfixturevalue(pace)):
        ways = {(record[XWAY], record[DIR]) for record in journey}
        assert len(ways) == 1
        assert [record[LANE] for record in journey].count(ENTRY_LANE) == 1
        assert all(record[LANE] != EXIT_LANE for record in journey[:-1])
        forward = 1 - 2 * journey[0][DIR]
        for one, two in itertools.pairwise(journey):
            assert two[TIME] - one[TIME] == REPORT_S
            assert 0 <= (two[SEG] - one[SEG]) * forward <= 1
            assert 0 <= (two[POS] - one[POS]) * forward <= one[SPEED] * 44
            if 0 not in {one[SPEED], two[SPEED]}:
                assert two[POS] - one[POS] == forward * one[SPEED] * 44


def test_the_rate_follows_the_public_generator(usual: list[Record]) -> None:
    minutes = Counter(record[TIME] // 60 for record in usual)
    for minute, rate in RATES.items():
        assert minutes[minute] / 60 == pytest.approx(rate, rel=0.08)


def test_one_in_200_reports_has_a_question_for_the_balance_and_one_in_1000_for_expenses(usual: list[Record]) -> None:
    kinds = Counter(record[TYPE] for record in usual)
    assert set(kinds) == {REPORT, BALANCE, EXPENSES}
    assert kinds[BALANCE] / kinds[REPORT] == pytest.approx(0.005, rel=0.2)
    assert kinds[EXPENSES] / kinds[REPORT] == pytest.approx(0.001, rel=0.4)


def test_a_question_follows_a_report_of_the_same_car_and_second(usual: list[Record]) -> None:
    reported: set[tuple[int, int]] = set()
    questions = []
    for record in usual:
        if record[TYPE] == REPORT:
            reported.add((record[VID], record[TIME]))
            continue
        questions.append(record[QID])
        assert (record[VID], record[TIME]) in reported
        if record[TYPE] == EXPENSES:
            assert 1 <= record[DAY] <= DAYS
            assert record[XWAY] == 0
        else:
            assert record[XWAY] == record[DAY] == -1
        assert (record[SPEED], *record[LANE:QID]) == (-1,) * 5
    assert len(set(questions)) == len(questions)


def test_some_cars_come_again_and_none_is_in_two_places() -> None:
    pace = Pace(cars_per_s=2, first_seg=40, last_seg=43)
    records = [record for second in Traffic(0, seconds=2500, pace=pace).seconds_of(0) for record in second]
    found = journeys(records)
    again = len(found) - len({journey[0][VID] for journey in found})
    left = sum(journey[-1][LANE] == EXIT_LANE and journey[-1][TIME] < 1000 for journey in found)
    assert 0.05 * left < again < 0.2 * left
    places = Counter((record[VID], record[TIME]) for record in records if record[TYPE] == REPORT)
    assert set(places.values()) == {1}


def test_the_slow_pace_has_tolls(answers: Answers) -> None:
    tolls = sum(count for answer, count in answers.tolls.items() if answer.toll)
    assert tolls > 0.5 * sum(answers.tolls.values())
    assert sum(answer.balance > 0 for answer in answers.balances) > 100


def test_the_usual_pace_has_few_tolls(usual: list[Record]) -> None:
    tolls = expected(usual, History()).tolls
    assert sum(count for answer, count in tolls.items() if answer.toll) < 0.02 * sum(tolls.values())


def test_the_slow_pace_has_accidents_and_some_are_cleared(answers: Answers) -> None:
    assert answers.accidents
    assert any(accident.last is not None for accident in answers.accidents)
    assert answers.alerts
    ahead = {alert.seg for alert in answers.alerts}
    assert ahead <= {accident.seg for accident in answers.accidents}


def test_the_usual_pace_has_an_accident_in_each_half_hour() -> None:
    lists = Traffic(4, seconds=1800).seconds_of(0)
    standing = [record for second in lists for record in second if record[TYPE] == REPORT and not record[SPEED]]
    assert 1 <= len(accidents_of(standing)) <= 3


def test_every_question_has_an_answer(slow: list[Record], answers: Answers) -> None:
    questions = {kind: {record[QID] for record in slow if record[TYPE] == kind} for kind in (BALANCE, EXPENSES)}
    assert {answer.qid for answer in answers.balances} == questions[BALANCE]
    assert {answer.qid for answer in answers.expenses} == questions[EXPENSES]
    assert all(10 <= answer.toll <= 99 for answer in answers.expenses)


@pytest.mark.parametrize(
    "wrong",
    [{"seed": -1}, {"xways": 0}, {"seconds": -1}, {"pace": "fast"}],
)
def test_traffic_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FlowError):
        Traffic(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cars_per_s": 0},
        {"limit": 10},
        {"limit": 95},
        {"crowding": -1},
        {"first_seg": 50, "last_seg": 50},
        {"last_seg": 100},
        {"accident_every_s": 0},
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(FlowError):
        Pace(**wrong)


def test_an_expressway_that_is_not_there_is_refused() -> None:
    with pytest.raises(FlowError, match="0 to 1, and no 2"):
        Traffic(xways=2).expressway(2)


# --- the history and the files ---------------------------------------------------------------------------------


def test_the_history_has_a_toll_of_10_to_99_for_each_day_car_and_expressway() -> None:
    history = History(7)
    tolls = [history(vid, day, xway) for vid in range(30) for day in range(1, DAYS + 1) for xway in range(3)]
    assert set(tolls) == set(range(10, 100))
    assert sum(tolls) / len(tolls) == pytest.approx(54.5, abs=2)
    assert tolls == [History(7).toll(v, d, x) for v in range(30) for d in range(1, DAYS + 1) for x in range(3)]
    assert history(1, 2, 3) != history(2, 1, 3) or history(1, 3, 2) != history(3, 1, 2)
    assert [History(8)(vid, 1, 0) for vid in range(9)] != [history(vid, 1, 0) for vid in range(9)]


@pytest.mark.parametrize("day", [0, 70])
def test_the_history_has_no_other_days(day: int) -> None:
    with pytest.raises(ValueError, match="days 1 to 69"):
        History()(1, day, 0)


def test_lines_become_records_and_records_lines(usual: list[Record]) -> None:
    assert parse("0,8400,32,0,0,1,0,2,11559,-1,-1,-1,-1,-1,-1\n")[:9] == (0, 8400, 32, 0, 0, 1, 0, 2, 11559)
    lines = [to_line(record) + "\n" for record in usual[:1000]]
    assert list(read_lines([*lines, "\n", ""])) == usual[:1000]


def test_a_line_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="15 numbers, this one has 3"):
        parse("0,1,2")


# --- the oracle, by hand ---------------------------------------------------------------------------------------


def report(
    time: int, vid: int, seg: int, *, speed: int = 30, lane: int = 1, way: int = 0, pos: int | None = None
) -> Record:
    pos = seg * SEGMENT_FT + vid if pos is None else pos
    return (REPORT, time, vid, speed, 0, lane, way, seg, pos, -1, -1, -1, -1, -1, -1)


def balance(time: int, vid: int, qid: int) -> Record:
    return (BALANCE, time, vid, -1, -1, -1, -1, -1, -1, qid, -1, -1, -1, -1, -1)


def crowd(time: int, seg: int, count: int, speed: int = 30, way: int = 0) -> list[Record]:
    """Returns a report of each of so many cars, which no other record is about."""
    return [report(time, 1_000_000 + time * 1000 + number, seg, speed=speed, way=way) for number in range(count)]


def standing(vid: int, first: int, reports: int, seg: int = 10, way: int = 0) -> list[Record]:
    return [
        report(first + 30 * turn, vid, seg, speed=0, lane=2, way=way, pos=seg * SEGMENT_FT + 7)
        for turn in range(reports)
    ]


def in_order(*records: list[Record]) -> list[Record]:
    return sorted(itertools.chain(*records), key=lambda record: record[TIME])


def of(vid: int, answers: Answers) -> list[tuple[int, int, int]]:
    """Returns the toll notifications of a car, as (time, lav, toll)."""
    return sorted((answer.time, answer.lav, answer.toll) for answer in answers.tolls.elements() if answer.vid == vid)


def test_51_slow_cars_make_a_toll_of_2_and_50_none() -> None:
    found = expected([*crowd(0, 5, 51), *crowd(1, 6, 50), report(60, 1, 5), report(90, 1, 6)])
    assert of(1, found) == [(60, 30, 2), (90, 30, 0)]
    assert of(1, expected([*crowd(0, 5, 60), report(60, 1, 5)])) == [(60, 30, 200)]


def test_a_car_counts_once_a_minute_however_often_it_reports() -> None:
    twice = [report(time, vid, 5) for time in (0, 30) for vid in range(100, 150)]
    assert of(1, expected([*twice, report(60, 1, 5)])) == [(60, 30, 0)]


def test_cars_count_in_the_minute_before_only() -> None:
    found = expected([*crowd(0, 5, 60), report(59, 1, 5), report(120, 2, 5)])
    assert of(1, found) == [(59, 0, 0)]  # nothing was there in the minute before the first one
    assert of(2, found) == [(120, 30, 0)]  # the speeds of the first minute still count, its cars do not


def test_a_mean_speed_of_40_makes_no_toll_and_halves_are_rounded_up() -> None:
    half = [*crowd(0, 5, 30, speed=39), *crowd(1, 5, 30, speed=40)]  # 39.5
    assert of(1, expected([*half, report(60, 1, 5)])) == [(60, 40, 0)]
    below = [*crowd(0, 5, 31, speed=39), *crowd(1, 5, 30, speed=40)]
    assert of(1, expected([*below, report(60, 1, 5)])) == [(60, 39, 242)]


def test_the_mean_speed_is_over_the_five_minutes_before() -> None:
    speeds = [report(60 * minute, 100 + minute, 5, speed=10 * (minute + 1)) for minute in range(7)]  # 10, 20, ..., 70
    found = expected([*speeds, report(60 * 6 + 59, 1, 5)])
    assert of(1, found) == [(419, 40, 0)]  # minutes 2 to 6: 20, 30, 40, 50, 60
    assert [of(100 + minute, found)[0][1] for minute in range(7)] == [0, 10, 15, 20, 25, 30, 40]


def test_directions_have_statistics_of_their_own() -> None:
    found = expected([*crowd(0, 5, 60), report(60, 1, 5, way=1)])
    assert of(1, found) == [(60, 0, 0)]


def test_a_toll_is_charged_on_leaving_the_segment() -> None:
    cars = [
        *crowd(0, 5, 60),
        report(60, 1, 5),
        balance(60, 1, 71),
        report(90, 1, 5),
        balance(90, 1, 72),
        report(120, 1, 6),
        balance(120, 1, 73),
        balance(150, 2, 74),
    ]
    found = expected(cars)
    assert of(1, found) == [(60, 30, 200), (120, 0, 0)]
    assert sorted(found.balances) == [(71, 60, 0, 0), (72, 90, 0, 0), (73, 120, 120, 200), (74, 150, 0, 0)]


def test_tolls_add_up_and_a_toll_of_none_changes_nothing() -> None:
    cars = [
        *crowd(0, 5, 60),
        *crowd(1, 6, 51),
        report(60, 1, 5),
        report(90, 1, 6),
        report(120, 1, 7),
        report(150, 1, 8),
    ]
    found = expected([*cars, balance(150, 1, 9)])
    assert list(found.balances) == [(9, 150, 120, 202)]


def test_leaving_the_expressway_in_the_next_segment_charges_the_toll_and_in_the_same_one_does_not() -> None:
    for seg, charged in ((6, 200), (5, 0)):
        found = expected([*crowd(0, 5, 60), report(60, 1, 5), report(90, 1, seg, lane=4), balance(90, 1, 9)])
        assert [answer.balance for answer in found.balances] == [charged]
        assert of(1, found) == [(60, 30, 200)]  # there is no notification in the exit lane


def test_a_car_that_comes_again_begins_a_journey_in_the_segment_where_the_last_one_ended() -> None:
    cars = [
        *crowd(0, 5, 60),
        report(60, 1, 5),
        report(90, 1, 5, lane=4),
        *crowd(1020, 5, 60),
        report(1080, 1, 5, lane=0),
    ]
    found = expected([*cars, report(1110, 1, 6), balance(1110, 1, 9)])
    assert of(1, found) == [(60, 30, 200), (1080, 30, 200), (1110, 0, 0)]
    assert [answer.balance for answer in found.balances] == [200]  # of the second journey


def test_what_was_charged_on_leaving_is_not_charged_again_when_the_car_comes_again() -> None:
    cars = [
        *crowd(0, 5, 60),
        report(60, 1, 5),
        report(90, 1, 6, lane=4),
        report(1080, 1, 5, lane=0),
        report(1110, 1, 6),
    ]
    found = expected([*cars, balance(1110, 1, 9)])
    assert of(1, found) == [(60, 30, 200), (1080, 0, 0), (1110, 0, 0)]
    assert list(found.balances) == [(9, 1110, 90, 200)]


def test_four_equal_reports_of_two_cars_are_an_accident_from_the_next_minute_to_that_of_its_clearing() -> None:
    one, two = standing(1, 0, 12), standing(2, 5, 10)
    # The second car has its fourth report at 95, in minute 2, its last one at 275; it drives on at 305, in minute 6.
    passing = [report(time, 100 + time, 9) for time in range(20, 480, 20)]
    found = expected(in_order(one, two, [report(305, 2, 10, pos=53_000)], passing))
    assert found.accidents == [Accident((0, 0, 2, 52_807), 10, 3, 6)]
    assert sorted(alert.time for alert in found.alerts.elements() if alert.vid >= 100) == list(range(120, 360, 20))
    assert {alert.seg for alert in found.alerts} == {10}


def test_three_equal_reports_or_one_car_or_two_places_are_no_accident() -> None:
    assert accidents_of(in_order(standing(1, 0, 3), standing(2, 0, 3))) == []
    assert accidents_of(standing(1, 0, 9)) == []
    assert accidents_of(in_order(standing(1, 0, 9), standing(2, 0, 9, way=1))) == []
    beside = [(*record[:LANE], 3, *record[DIR:]) for record in standing(2, 0, 9)]
    assert accidents_of(in_order(standing(1, 0, 9), beside)) == []


def test_four_reports_must_follow_each_other() -> None:
    moved = report(50, 2, 10, pos=53_000)
    assert accidents_of(in_order(standing(1, 0, 9), standing(2, 0, 2), [moved], standing(2, 60, 3))) == []
    assert len(accidents_of(in_order(standing(1, 0, 9), standing(2, 0, 2), [moved], standing(2, 60, 4)))) == 1


def test_an_accident_lasts_as_long_as_two_of_three_cars_stand() -> None:
    cars = in_order(standing(1, 0, 20), standing(2, 0, 5), standing(3, 0, 9), [report(150, 2, 10, pos=53_000)])
    (accident,) = accidents_of(cars)
    assert accident.last is None
    (accident,) = accidents_of([*cars, report(600, 3, 10, pos=53_000)])
    assert accident.last == 11


def test_a_second_accident_in_the_same_segment_is_seen() -> None:
    first = in_order(standing(1, 0, 6), standing(2, 0, 6))
    cleared = [report(180, 1, 11), report(180, 2, 11)]
    second = in_order(standing(3, 600, 6), standing(4, 600, 6))
    found = accidents_of([*first, *cleared, *second])
    assert [(accident.seg, accident.first, accident.last) for accident in found] == [(10, 3, 4), (10, 13, None)]


@pytest.mark.parametrize("way", [0, 1])
def test_an_accident_is_announced_in_its_segment_and_the_four_before_it(way: int) -> None:
    wreck = in_order(standing(1, 0, 4, way=way), standing(2, 0, 4, way=way))
    passing = [report(120, 200 + seg, seg, way=way) for seg in range(3, 18)]
    other_way = [report(120, 300 + seg, seg, way=1 - way) for seg in range(3, 18)]
    found = expected([*wreck, *passing, *other_way])
    segs = range(10, 15) if way else range(6, 11)
    assert sorted(found.alerts) == [(200 + seg, 120, 10) for seg in segs]


def test_the_nearest_of_two_accidents_is_announced_once() -> None:
    wrecks = [standing(vid, 0, 4, seg) for vid, seg in ((1, 10), (2, 10), (3, 12), (4, 12))]
    found = expected([*in_order(*wrecks), report(120, 9, 9), report(121, 11, 11)])
    assert sorted(found.alerts.elements()) == [(9, 120, 10), (11, 121, 12)]


def test_an_accident_ahead_takes_the_toll_away_and_not_the_notification() -> None:
    wreck = in_order(standing(1, 0, 4), standing(2, 0, 4))
    cars = [report(120, 9, 8), report(120, 10, 5), report(120, 11, 11)]
    crowds = [record for seg in (5, 8, 11) for record in crowd(60 + seg, seg, 60)]
    found = expected([*in_order(wreck, crowds), *cars])
    assert of(9, found) == [(120, 30, 0)]
    assert of(10, found) == of(11, found) == [(120, 30, 200)]


def test_cars_in_the_exit_lane_get_no_alert() -> None:
    wreck = in_order(standing(1, 0, 4), standing(2, 0, 4))
    assert not expected([*wreck, report(120, 9, 9, lane=4)]).alerts


def test_expenses_are_what_the_history_says() -> None:
    question = (EXPENSES, 40, 17, -1, 3, -1, -1, -1, -1, 99, -1, -1, -1, -1, 12)
    found = expected([question], lambda vid, day, xway: 1000 * vid + 10 * day + xway)
    assert list(found.expenses) == [(99, 40, 17_123)]


def test_the_order_of_different_cars_within_a_minute_makes_no_difference(slow: list[Record], answers: Answers) -> None:
    """Sorts the records of each minute by car: those of a car keep their order."""
    other = expected(sorted(slow, key=lambda record: (record[TIME] // 60, record[VID] % 17, record[VID])), History(1))
    assert (other.tolls, other.alerts) == (answers.tolls, answers.alerts)
    assert (other.balances, other.expenses) == (answers.balances, answers.expenses)


def test_records_in_no_order_are_refused() -> None:
    with pytest.raises(AssertionError, match="order of their minutes"):
        expected([report(60, 1, 5), report(59, 1, 5)])
