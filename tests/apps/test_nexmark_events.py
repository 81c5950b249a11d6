"""The Nexmark events are a pure function of seed and number, and the references of the queries answer as by hand."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import random
import re
from collections import Counter
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.apps.nexmark.events import (
    ACTIVE_PEOPLE,
    CATEGORIES,
    CHANNELS,
    CITIES,
    FIRST_AUCTION,
    FIRST_CATEGORY,
    FIRST_PERSON,
    HOT_CHANNELS,
    IN_FLIGHT,
    LEAD,
    ROUND,
    START_MS,
    STATES,
    Events,
)
from penstock.runtime.errors import FlowError
from penstock.runtime.sources.pace import Schedule
from tests.apps.nexmark_reference import QUERIES, TABLES, answers, settled

N = 60_000
RATES = st.sampled_from([10_000, 0.5, 7.25, "5000:10s,60000:10s", [(100, 0.1), (0, 5), (7, None)], "0:1s,3:2s"])


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    return list(Events(11, N))


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def assert_share(found: int, n: int, share: float) -> None:
    """Five standard deviations are never seen by chance."""
    assert abs(found - n * share) < 5 * math.sqrt(n * share * (1 - share)) + 1, f"{found} of {n}, not {share:.0%}"


# --- what an event depends on ----------------------------------------------------------------------------------


def test_the_events_of_seed_1_stay_as_they_are() -> None:
    """What is measured on one version can be compared with what is measured on the next."""
    assert Events(1)(123_456) == {
        "kind": "bid",
        "auction": 8400,
        "bidder": 3401,
        "price": 5157053,
        "channel": "channel-6310",
        "url": "https://www.nexmark.com/gdkn/wqky/zjgn/item.htm?query=1&channel_id=1696071680",
        "date_time": 1700000012345,
        "extra": "cphdfohbotmsjubchhlmbtxelyrvxfqkxhgbdevjqngzcqjfkrpeociaipqviigvqhmpyjaeluwopy",
    }
    text = "\n".join(map(json.dumps, Events(1, 2_000, rate="5000:0.1s,60000:0.1s", skew_ms=20)))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


DIGEST = "7e04453ed3a1d96e0fc370088811ac5c1d5f403d8d04fdb8992c67122607e854"


@given(st.sampled_from([0, 1, 7]), RATES, st.integers(0, 1 << 40), st.sampled_from([0, 300]), st.sampled_from([0, 10]))
def test_an_event_depends_on_its_number_alone(seed: int, rate: Any, number: int, skew_ms: int, lead: int) -> None:
    events = Events(seed, rate=rate, skew_ms=skew_ms, lead=lead)
    event = events(number)
    assert [events(number + 1), events(number)] == [events(number + 1), event]
    assert Events(seed, number + 1, rate=rate, skew_ms=skew_ms, lead=lead)(number) == event
    assert pickle.loads(pickle.dumps(events))(number) == event


def test_several_tasks_make_the_same_events_as_one() -> None:
    flow = ps.Flow("events")
    flow.read(ps.sources.Generator(Events(3, skew_ms=50), limit=500)).write(ps.sinks.Collect(), name="out")
    out = ps.testing.run(flow, parallelism=3)["out"]
    assert sorted(map(json.dumps, out)) == sorted(map(json.dumps, Events(3, 500, skew_ms=50)))


def test_seeds_make_other_events() -> None:
    one, two = of_kind(list(Events(1, 500)), "bid"), of_kind(list(Events(2, 500)), "bid")
    assert not {bid["extra"] for bid in one} & {bid["extra"] for bid in two}
    assert [bid["price"] for bid in one] != [bid["price"] for bid in two]


def test_there_is_no_event_outside_the_range() -> None:
    assert len(list(Events(1, 3))) == 3
    for number in (-1, 3):
        with pytest.raises(IndexError):
            Events(1, 3)(number)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"events": -1},
        {"events": 1.5},
        {"rate": 0},
        {"rate": "fast"},
        {"start_ms": -1},
        {"skew_ms": -1},
        {"skew_ms": 0.5},
        {"lead": -1},
    ],
)
def test_what_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(FlowError):
        Events(**wrong)


# --- what events are like --------------------------------------------------------------------------------------


def test_kinds_follow_each_other_in_rounds(events: list[dict[str, Any]]) -> None:
    one_round = ["person"] + ["auction"] * 3 + ["bid"] * 46
    assert len(one_round) == ROUND == 50
    assert [event["kind"] for event in events] == one_round * (N // ROUND)


def test_fields_and_their_types(events: list[dict[str, Any]]) -> None:
    for event in events[:1_000]:
        fields = TABLES[event["kind"]]
        assert list(event) == ["kind", *fields]
        assert [type(event[field]).__name__ for field in fields] == [
            {"int64": "int", "string": "str"}[str(type)] for type in fields.values()
        ]


def test_persons_and_auctions_are_numbered(events: list[dict[str, Any]]) -> None:
    for kind, first in (("person", FIRST_PERSON), ("auction", FIRST_AUCTION)):
        ids = [event["id"] for event in of_kind(events, kind)]
        assert ids == list(range(first, first + len(ids)))
    assert FIRST_PERSON == FIRST_AUCTION == 1_000


@pytest.mark.parametrize("lead", [0, 1, LEAD])
def test_ids_refer_to_what_has_come_or_comes_soon(lead: int) -> None:
    person, auction, ahead = FIRST_PERSON - 1, FIRST_AUCTION - 1, set()
    for event in Events(5, N, lead=lead):
        if event["kind"] == "person":
            person = event["id"]
            continue
        if event["kind"] == "auction":
            auction, someone = event["id"], event["seller"]
        else:
            someone = event["bidder"]
            # The newest auctions, the one before and the next few; a hot auction may be a little older.
            assert max(FIRST_AUCTION, auction - IN_FLIGHT) <= event["auction"] <= auction + lead
            ahead.add(event["auction"] - auction)
        # The active people and the next few.
        assert max(FIRST_PERSON, person - ACTIVE_PEOPLE + 1) <= someone <= person + lead
        ahead.add(someone - person)
    assert max(ahead) == lead, "all that is allowed occurs"


def test_hot_auctions_sellers_bidders_and_channels(events: list[dict[str, Any]]) -> None:
    """Far from the start, few others meet a hot id by chance."""
    events = events[N // 3 :]
    first_person = of_kind(events, "person")[0]["id"]
    auctions, bids = of_kind(events, "auction"), of_kind(events, "bid")
    for found, ids, group, place, share in (
        (bids, "auction", 100, 0, 1 / 2 + 1 / 2 / (IN_FLIGHT + LEAD + 1)),
        (auctions, "seller", 100, 0, 3 / 4),
        (bids, "bidder", 100, 1, 3 / 4),
    ):
        hot = sum(event[ids] % group == place and event[ids] > first_person - 200 for event in found)
        others = len(found) * (1 - share) / group  # those drawn from all that happen to be at the place
        assert abs(hot - len(found) * share) < 5 * math.sqrt(len(found)) + others
    busiest = Counter(bid["auction"] for bid in bids).most_common(20)
    assert all(auction % 100 == 0 for auction, _ in busiest)
    assert busiest[0][1] > 50 * len(bids) / len({bid["auction"] for bid in bids})
    channels = Counter(bid["channel"] for bid in bids)
    assert_share(sum(channels[channel] for channel in HOT_CHANNELS), len(bids), 1 / 2)
    for channel in HOT_CHANNELS:
        assert_share(channels[channel], len(bids), 1 / 8)
    others_seen = set(channels) - set(HOT_CHANNELS)
    assert others_seen <= {f"channel-{number}" for number in range(CHANNELS)}
    assert len(others_seen) > 0.8 * CHANNELS


def test_urls_have_three_directories_and_mostly_a_channel_id(events: list[dict[str, Any]]) -> None:
    urls = {bid["channel"]: bid["url"] for bid in of_kind(events, "bid")}
    form = re.compile(r"https://www\.nexmark\.com/([a-z_]{3,4}/){3}item\.htm\?query=1(&channel_id=\d+)?")
    assert all(form.fullmatch(url) for url in urls.values())
    assert not any("channel_id" in urls[channel] for channel in HOT_CHANNELS)
    assert_share(sum("channel_id" in url for url in urls.values()), len(urls), 0.9)
    ids = [url.partition("&channel_id=")[2] for url in urls.values() if "channel_id" in url]
    assert max(Counter(ids).values()) == 2, "as in the published generator, an id may be that of two channels"
    assert all(bid["url"] == urls[bid["channel"]] for bid in of_kind(events, "bid"))


def test_prices_are_even_in_their_logarithms(events: list[dict[str, Any]]) -> None:
    prices = [bid["price"] for bid in of_kind(events, "bid")]
    assert 100 <= min(prices) < 110
    assert 9e7 < max(prices) <= 1e8
    for decade in range(2, 8):
        assert_share(sum(10**decade <= price < 10 ** (decade + 1) for price in prices), len(prices), 1 / 6)
    for auction in of_kind(events, "auction"):
        assert 100 <= auction["reserve"] - auction["initial_bid"] <= 10**8


def test_all_else_is_drawn_evenly(events: list[dict[str, Any]]) -> None:
    persons, auctions = of_kind(events, "person"), of_kind(events, "auction")
    categories = Counter(auction["category"] for auction in auctions)
    assert sorted(categories) == list(range(FIRST_CATEGORY, FIRST_CATEGORY + CATEGORIES))
    for found, values in (
        (categories, range(10, 15)),
        (Counter(person["state"] for person in persons), STATES),
        (Counter(person["city"] for person in persons), CITIES),
    ):
        assert set(found) == set(values)
        for count in found.values():
            assert_share(count, sum(found.values()), 1 / len(values))
    assert len({person["name"] for person in persons}) == 11 * 9
    assert all(re.fullmatch(r"\d{4}( \d{4}){3}", person["credit_card"]) for person in persons)
    assert all(re.fullmatch(r"[a-z]{3,6}@[a-z]{3,4}\.com", person["email_address"]) for person in persons)
    assert all(len(auction["item_name"]) < 20 and len(auction["description"]) < 100 for auction in auctions)
    blanks = Counter("".join(auction["description"] for auction in auctions))
    assert blanks[" "] / blanks.total() == pytest.approx(1 / 13, rel=0.1)


def test_events_have_their_sizes_on_average(events: list[dict[str, Any]]) -> None:
    def size(event: dict[str, Any]) -> int:
        # The published sizes count neither the channel nor the url, nor the time of a person.
        left_out = {"kind", "channel", "url"} | ({"date_time"} if event["kind"] == "person" else set())
        return sum(len(v) if isinstance(v, str) else 8 for field, v in event.items() if field not in left_out)

    for kind, average in (("person", 200), ("auction", 500), ("bid", 100)):
        assert mean(map(size, of_kind(events, kind))) == pytest.approx(average, rel=0.02)


# --- times -----------------------------------------------------------------------------------------------------


@given(RATES, st.integers(0, 1 << 31))
def test_times_follow_the_schedule(rate: Any, first: int) -> None:
    numbers = range(first, first + 200)
    times = [Events(1, rate=rate)(number)["date_time"] for number in numbers]
    due = Schedule(rate).due_ns(np.array(numbers, dtype=np.float64)) / 1e6 + START_MS
    assert max(abs(np.array(times) - due)) < 1.01, "whole milliseconds, rounded down"
    assert all(one <= other for one, other in pairwise(times))


def test_times_of_a_steady_rate_are_exact() -> None:
    assert [Events(1, rate=4)(number)["date_time"] - START_MS for number in range(6)] == [0, 250, 500, 750, 1000, 1250]
    assert Events(1, rate=1000, start_ms=5)(10**15)["date_time"] == 10**15 + 5


def test_skew_is_bounded_and_changes_nothing_else() -> None:
    n, skew_ms = 20_000, 40
    behind, greatest = Counter[int](), 0
    for on_time, skewed in zip(Events(2, n), Events(2, n, skew_ms=skew_ms), strict=True):
        behind[on_time["date_time"] - skewed["date_time"]] += 1
        greatest = max(greatest, skewed["date_time"])
        assert skewed["date_time"] >= max(START_MS, greatest - skew_ms), "a watermark by so much is never too early"
        for field in on_time.keys() - {"date_time", "expires"}:
            assert on_time[field] == skewed[field]
    assert sorted(behind) == list(range(skew_ms + 1))
    for late in behind.values():
        assert_share(late, n, 1 / (skew_ms + 1))


@pytest.mark.parametrize("rate", [100, 10_000])
def test_an_auction_lasts_as_long_as_a_hundred_others_take_on_average(rate: int) -> None:
    lengths = [event["expires"] - event["date_time"] for event in of_kind(list(Events(4, N, rate=rate)), "auction")]
    average = IN_FLIGHT / 3 * ROUND / rate * 1000
    assert min(lengths) >= 1
    assert max(lengths) <= 2 * average + 1
    assert mean(lengths) == pytest.approx(average, rel=0.03)


# --- the references, by hand -----------------------------------------------------------------------------------


def person(id: int, at: int) -> dict[str, Any]:
    return {"kind": "person", "id": id, "name": f"name {id}", "date_time": at}


def auction(id: int, at: int = 0, expires: int = 0, *, seller: int = 0, category: int = 10) -> dict[str, Any]:
    return {"kind": "auction", "id": id, "date_time": at, "expires": expires, "seller": seller, "category": category}


def bid(auction: int, price: int, at: int, *, bidder: int = 0, extra: str = "") -> dict[str, Any]:
    fields = {"auction": auction, "bidder": bidder, "price": price, "channel": "c", "url": "u"}
    return {"kind": "bid", **fields, "date_time": at, "extra": extra}


def test_q4_averages_the_winning_bids_of_each_category() -> None:
    events = [
        *(auction(1, 100, 200), auction(2, 100, 300), auction(3, 100, 200, category=11)),
        auction(4, 100, 200, category=12),
        # Only bids from the begin to the end count, both included.
        *(bid(1, 900, 99), bid(1, 50, 100), bid(1, 70, 200), bid(1, 999, 201)),
        bid(2, 31, 150),
        bid(3, 5, 99),  # so category 11 has no winning bid
        *(bid(4, 6, 150), bid(4, 5, 150)),
        bid(9, 100, 150),  # nobody has opened this auction
    ]
    assert answers("q4", events) == Counter([(10, (70 + 31) // 2), (12, 6)])


def test_q6_averages_the_last_ten_auctions_of_each_seller() -> None:
    twelve = [auction(id, 0, 1000 - id, seller=7) for id in range(1, 13)]
    bids = [bid(id, 100 * id, 10) for id in range(1, 13)]
    events = [*twelve, *bids, auction(20, 0, 50, seller=8), bid(20, 33, 0), auction(21, 0, 5000, seller=7)]
    # Auction 12 ends first; the last ten that have a winning bid are 10 to 1.
    assert answers("q6", events) == Counter([(7, 550), (8, 33)])


def test_q5_finds_the_hot_items_of_sliding_windows() -> None:
    events = [bid(1, 1, 1_000), bid(1, 1, 1_500), bid(2, 1, 3_000), bid(2, 1, 11_000), bid(3, 1, 19_000)]
    assert answers("q5", events) == Counter(
        [
            *((1, 2, start) for start in (-8_000, -6_000, -4_000, -2_000, 0)),
            (2, 2, 2_000),
            *((2, 1, start) for start in (4_000, 6_000, 8_000)),
            *((2, 1, 10_000), (3, 1, 10_000)),  # equally many
            *((3, 1, start) for start in (12_000, 14_000, 16_000, 18_000)),
        ]
    )


def test_q7_finds_the_highest_bids_of_each_window() -> None:
    events = [bid(1, 5, 0), bid(2, 9, 9_999), bid(3, 9, 1, bidder=4), bid(4, 9, 10_000), bid(5, 12, 19_999)]
    assert answers("q7", events) == Counter([(2, 9, 0, 9_999, ""), (3, 9, 4, 1, ""), (5, 12, 0, 19_999, "")])


def test_q8_finds_who_has_come_and_sells_in_the_same_window() -> None:
    events = [
        *(person(1, 9_999), auction(1, 1_000, seller=1), auction(2, 9_000, seller=1)),
        *(person(2, 9_999), auction(3, 10_000, seller=2)),  # in the next window
        *(person(3, 12_000), auction(4, 19_999, seller=3)),
        person(4, 12_000),
        auction(5, 12_000, seller=5),
    ]
    assert answers("q8", events) == Counter([(1, "name 1", 0), (3, "name 3", 10_000)])


def test_q9_finds_the_earliest_of_the_highest_bids() -> None:
    events = [auction(1, 0, 100), bid(1, 8, 30), bid(1, 8, 20, extra="b"), bid(1, 8, 20, extra="a"), bid(1, 7, 10)]
    (row,) = answers("q9", events)
    assert row[0] == 1
    assert row[10:] == (1, 0, 8, 20, "a")


def test_q11_counts_the_bids_of_sessions() -> None:
    of_one = [bid(1, 1, at, bidder=1) for at in (9_999, 0, 19_999, 40_000)]
    of_two = [bid(1, 1, at, bidder=2) for at in (5_000, 5_000)]
    assert answers("q11", of_one + of_two) == Counter(
        [(1, 2, 0, 19_999), (1, 1, 19_999, 29_999), (1, 1, 40_000, 50_000), (2, 2, 5_000, 15_000)]
    )


def test_q18_finds_the_last_bid_of_a_bidder_for_an_auction() -> None:
    events = [
        *(bid(1, 90, 1, bidder=1), bid(1, 50, 2, bidder=1), bid(1, 60, 2, bidder=1, extra="z")),
        *(bid(1, 60, 2, bidder=1, extra="y"), bid(2, 7, 1, bidder=1), bid(1, 8, 9, bidder=2)),
    ]
    assert answers("q18", events) == Counter(
        [(1, 1, 60, "c", "u", 2, "z"), (2, 1, 7, "c", "u", 1, ""), (1, 2, 8, "c", "u", 9, "")]
    )


def test_q19_finds_the_ten_highest_bids() -> None:
    twelve = [bid(1, price, price) for price in range(1, 13)]
    events = [*twelve, bid(2, 5, 9), bid(2, 5, 3), bid(2, 5, 3, extra="x")]
    assert answers("q19", events) == Counter(
        [
            *((1, 0, price, "c", "u", price, "", 13 - price) for price in range(3, 13)),
            *((2, 0, 5, "c", "u", 3, "", 1), (2, 0, 5, "c", "u", 3, "x", 2), (2, 0, 5, "c", "u", 9, "", 3)),
        ]
    )


def test_q14_knows_the_hours() -> None:
    hours = [bid(1, 2_000_000, hour * 3_600_000, extra="cac") for hour in range(24)]
    rows = answers("q14", [*hours, bid(1, 1_101_321, 0), bid(1, 55_066_080, 0)])
    kinds = {at // 3_600_000: kind for _, _, _, kind, at, _, _ in rows}
    assert Counter(kinds.values()) == {"dayTime": 11, "otherTime": 2, "nightTime": 11}
    assert [kinds[hour] for hour in (6, 7, 8, 18, 19, 20)] == [
        *("nightTime", "otherTime", "dayTime"),
        *("dayTime", "otherTime", "nightTime"),
    ]
    assert {(row[2], row[6]) for row in rows} == {(1_816_000.0, 2)}


def test_q21_finds_the_channel_id_of_a_url() -> None:
    bids = [
        {**bid(1, 1, 1, bidder=number), "channel": channel, "url": url}
        for number, (channel, url) in enumerate(
            [
                ("Apple", "u?channel_id=5"),
                ("GOOGLE", "u"),
                ("x", "u?q=1&channel_id=77&z=1"),
                ("x", "channel_id=8"),
                ("x", "u?q=1&channel_id="),
                ("x", "u?channel_id=5"),
            ]
        )
    ]
    found = {row[1]: row[4] for row in answers("q21", bids)}
    assert found == {0: "0", 1: "1", 2: "77", 3: "8", 4: ""}


# --- the references, over generated events ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def many() -> list[dict[str, Any]]:
    """Events of which several have the same time."""
    return list(Events(6, 3_000, rate=4_000, skew_ms=20))


@pytest.mark.parametrize("query", QUERIES)
def test_an_answer_does_not_depend_on_the_order_of_events(query: str, many: list[dict[str, Any]]) -> None:
    right = answers(query, many)
    assert right, "there is something to answer"
    assert answers(query, random.Random(1).sample(many, len(many))) == right
    assert settled(query, right.elements()) == right
    assert not answers(query, [])


def test_later_results_replace_earlier_ones() -> None:
    assert settled("q4", [(10, 5), (11, 6), (10, 7)]) == Counter([(10, 7), (11, 6)])
    assert settled("q12", [(1, 5, 0, 10), (1, 2, 10, 20), (2, 1, 0, 10)]) == Counter([(1, 7), (2, 1)])
    assert settled("q2", [{"auction": 1, "price": 2}, (1, 2)]) == Counter({(1, 2): 2})
    first, second = [(1, 0, price, "c", "u", 1, "", 1) for price in (3, 4)]
    assert settled("q19", [first, second]) == Counter([second])


def test_there_are_23_queries() -> None:
    assert list(QUERIES) == [f"q{number}" for number in range(23)]
    with pytest.raises(ValueError, match="no query 'q23'"):
        answers("q23", [])
