"""The Nexmark queries q0 to q22, each as a function from the stream of all events to the stream of its results.

    flow = ps.Flow("nexmark")
    events = flow.read(ps.sources.Generator(Events(1), rate=10_000)).watermark("date_time", name="watermark")
    QUERIES["q5"](events).write(ps.sinks.Null())

The events are those of `events.py` and must have their watermarks. The queries mean what the SQL suite that is
published with the benchmark means by them (nexmark/nexmark on GitHub). A result is a tuple, or a dict whose fields are
in the same order. A query that corrects its results emits them again; the last one of its key counts. An answer must
never depend on the order in which events arrive from several tasks, so ties are broken by other fields of the records.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any

import penstock as ps
from penstock.apps.nexmark.events import Event
from penstock.runtime.expressions import Expr
from penstock.runtime.program.connected import ConnectedStreams
from penstock.runtime.program.flow import Stream

Row = tuple[Any, ...]

WINDOW_S, SLIDE_S = 10, 2
WINDOW_MS = WINDOW_S * 1000
EURO = 0.908  # of a dollar
TOP = 10  # bids of an auction
LAST = 10  # auctions of a seller
SIDE_INPUT = [{"key": key, "value": str(key)} for key in range(10_000)]

# --- streams and fields that several queries share -------------------------------------------------------------


def _persons(events: Stream) -> Stream:
    return events.filter(ps.col("kind") == "person", name="persons")


def _auctions(events: Stream) -> Stream:
    return events.filter(ps.col("kind") == "auction", name="auctions")


def _bids(events: Stream) -> Stream:
    return events.filter(ps.col("kind") == "bid", name="bids")


def _auctions_and_bids(events: Stream) -> ConnectedStreams:
    """Returns the auctions and the bids, connected by the auction's id."""
    return _auctions(events).key_by("id").connect(_bids(events).key_by("auction"))


def _bid_row(bid: Event) -> Row:
    return bid["auction"], bid["bidder"], bid["price"], bid["channel"], bid["url"], bid["date_time"], bid["extra"]


def _day(ms: int) -> str:
    return datetime.fromtimestamp(ms // 1000, timezone.utc).strftime("%Y-%m-%d")


def _minute(ms: int) -> str:
    return datetime.fromtimestamp(ms // 1000, timezone.utc).strftime("%H:%M")


def _day_and_minute(bid: Event) -> Row:
    at = datetime.fromtimestamp(bid["date_time"] // 1000, timezone.utc)
    return (
        *(bid["auction"], bid["bidder"], bid["price"], bid["date_time"], bid["extra"]),
        *(at.strftime("%Y-%m-%d"), at.strftime("%H:%M")),
    )


def _price_order(bid: Event) -> Row:
    """The higher price comes first, of equal prices the earlier bid, and then the lesser extra."""
    return -bid["price"], bid["date_time"], bid["extra"]


def _time_order(bid: Event) -> Row:
    return bid["date_time"], bid["price"], bid["extra"]


# --- stateless queries -----------------------------------------------------------------------------------------


def q0(events: Stream) -> Stream:
    """Pass through: all bids as they are."""
    return _bids(events).select("auction", "bidder", "price", "date_time", "extra", name="q0")


def q1(events: Stream) -> Stream:
    """Currency: all bids with their prices in euros."""
    euros = (EURO * ps.col("price")).alias("price")
    return _bids(events).select("auction", "bidder", euros, "date_time", "extra", name="q1")


def q2(events: Stream) -> Stream:
    """Selection: the bids for every 123rd auction."""
    return _bids(events).filter(ps.col("auction") % 123 == 0, name="every 123rd").select("auction", "price", name="q2")


def q10(events: Stream) -> Stream:
    """Log to files: all bids with the day and the minute that name the partition of the files that they go to."""
    return _bids(events).map(_day_and_minute, name="q10")


def q13(events: Stream) -> Stream:
    """Side input: each bid with the value of its key in a static table."""
    return (
        _bids(events)
        .with_columns(key=ps.col("auction") % len(SIDE_INPUT), name="key")
        .lookup(SIDE_INPUT, on="key", name="side input")
        .select("auction", "bidder", "price", "date_time", "value", name="q13")
    )


def q14(events: Stream) -> Stream:
    """Calculation: the bids of a range of prices, with the kind of the hour and the number of letters "c"."""
    euros = EURO * ps.col("price")
    hour = ps.col("date_time").dt.from_epoch_ms().dt.hour()
    extra = ps.col("extra")
    kind = ps.when((hour >= 8) & (hour <= 18), "dayTime").when((hour == 7) | (hour == 19), "otherTime")
    return (
        _bids(events)
        .filter((euros > 1_000_000) & (euros < 50_000_000), name="prices")
        .select(
            "auction",
            "bidder",
            euros.alias("price"),
            kind.otherwise("nightTime").alias("bid_time_type"),
            "date_time",
            "extra",
            (extra.str.length() - extra.str.replace("c", "").str.length()).alias("c_counts"),
            name="q14",
        )
    )


def q21(events: Stream) -> Stream:
    """Channel ids: each bid with the number of its channel, which for most channels is in the url."""
    channel = ps.col("channel").str.lower()
    known: Expr = ps.coalesce(*(ps.when(channel == name, number) for name, number in _CHANNEL_IDS.items()))
    in_url = ps.col("url").str.split("&channel_id=").list.get(1).str.split("&").list.get(0)
    return (
        _bids(events)
        .select("auction", "bidder", "price", "channel", channel_id=ps.coalesce(known, in_url), name="channel id")
        .filter(ps.col("channel_id").is_not_null(), name="q21")
    )


_CHANNEL_IDS = {"apple": "0", "google": "1", "facebook": "2", "baidu": "3"}


def q22(events: Stream) -> Stream:
    """Directories: each bid with the three directories of its url."""
    part = ps.col("url").str.split("/").list
    return _bids(events).select(
        *("auction", "bidder", "price", "channel"), dir1=part.get(3), dir2=part.get(4), dir3=part.get(5), name="q22"
    )


# --- joins without windows -------------------------------------------------------------------------------------


class _Join(ps.CoProcessFunction):
    """Joins the one record of a key in the first input with all of the key in the second, whichever come first.

    It keeps the one for good, and the others only until the one has come.
    """

    def process1(self, ctx: ps.ProcessContext, key: int, one: Event) -> Iterable[tuple[Event, Event]]:
        _, waiting = ctx.get((None, ()))
        ctx.set((one, ()))
        return [(one, other) for other in waiting]

    def process2(self, ctx: ps.ProcessContext, key: int, other: Event) -> Iterable[tuple[Event, Event]]:
        one, waiting = ctx.get((None, ()))
        if one is None:
            ctx.set((None, (*waiting, other)))
            return ()
        return [(one, other)]


def q3(events: Stream) -> Stream:
    """Local items: who sells in OR, ID or CA in category 10, and in which auctions?"""
    auctions = _auctions(events).filter(ps.col("category") == 10, name="category 10")
    return (
        _persons(events)
        .key_by("id")
        .connect(auctions.key_by("seller"))
        .process(_Join(), name="sellers")
        .filter(lambda pair: pair[0]["state"] in {"OR", "ID", "CA"}, name="states")
        .map(lambda pair: (pair[0]["name"], pair[0]["city"], pair[0]["state"], pair[1]["id"]), name="q3")
    )


def q20(events: Stream) -> Stream:
    """Bids with their auctions: each bid for an auction of category 10, with what is known of the auction."""
    return (
        _auctions_and_bids(events)
        .process(_Join(), name="auctions of bids")
        .filter(lambda pair: pair[0]["category"] == 10, name="category 10")
        .map(_expanded, name="q20")
    )


def _expanded(pair: tuple[Event, Event]) -> Row:
    auction, bid = pair
    return *_bid_row(bid), *(auction[field] for field in _EXPANDED)


_EXPANDED = (
    *("item_name", "description", "initial_bid", "reserve"),
    *("date_time", "expires", "seller", "category", "extra"),
)


# --- winning bids ----------------------------------------------------------------------------------------------


class _WinningBids(ps.CoProcessFunction):
    """Emits each auction with its winning bid, when event time has passed its end.

    A bid that comes before its auction is kept until event time has passed the bid. If the auction has not come by
    then, it begins after the bid, or has ended already: the bid does not count. So nothing is kept of auctions that
    have ended.
    """

    def process1(self, ctx: ps.ProcessContext, key: int, auction: Event) -> None:
        _, bids = ctx.get((None, ()))
        ctx.set_event_timer(auction["expires"] + 1)
        ctx.set((auction, _winning(auction, bids)))

    def process2(self, ctx: ps.ProcessContext, key: int, bid: Event) -> None:
        auction, bids = ctx.get((None, ()))
        if auction is None:
            ctx.set_event_timer(bid["date_time"] + 1)
            ctx.set((None, (*bids, bid)))
        else:
            ctx.set((auction, _winning(auction, (*bids, bid))))

    def on_event_timer(self, ctx: ps.ProcessContext, key: int, at_ms: int) -> Iterable[tuple[Event, Event]]:
        auction, bids = ctx.get((None, ()))
        if auction is None:
            bids = tuple(bid for bid in bids if bid["date_time"] >= at_ms)
            if bids:
                ctx.set((None, bids))
            else:
                ctx.clear()
        elif at_ms > auction["expires"]:
            ctx.clear()
            return [(auction, bid) for bid in bids]
        return ()


def _winning(auction: Event, bids: Iterable[Event]) -> tuple[Event, ...]:
    """Returns the winning bid, if there is one."""
    valid = [bid for bid in bids if auction["date_time"] <= bid["date_time"] <= auction["expires"]]
    return (min(valid, key=_price_order),) if valid else ()


def winning_bids(events: Stream) -> Stream:
    """Returns each closed auction with its winning bid."""
    return _auctions_and_bids(events).process(_WinningBids(), name="winning bids")


def q4(events: Stream) -> Stream:
    """Average price of a category: the average of its closed auctions' winning bids, after each auction."""
    return (
        winning_bids(events)
        .map(lambda pair: {"category": pair[0]["category"], "price": pair[1]["price"]}, name="prices")
        .key_by("category")
        .agg(total=ps.sum("price"), auctions=ps.count(), name="by category")
        .map(lambda row: (row[0], row[1]["total"] // row[1]["auctions"]), name="q4")
    )


class _LastAuctions(ps.ProcessFunction):
    """Emits the average price of a seller's last closed auctions, after each of them. Auctions may come in any order,
    because several tasks close them."""

    def process(self, ctx: ps.ProcessContext, seller: int, pair: tuple[Event, Event]) -> Iterable[Row]:
        auction, bid = pair
        last = ctx.get([])
        insort(last, (auction["expires"], auction["id"], bid["price"]))
        last = last[-LAST:]
        ctx.set(last)
        return [(seller, sum(price for _, _, price in last) // len(last))]


def q6(events: Stream) -> Stream:
    """Average selling price: the average of the winning bids of each seller's last ten closed auctions."""
    return winning_bids(events).key_by(lambda pair: pair[0]["seller"]).process(_LastAuctions(), name="q6")


def q9(events: Stream) -> Stream:
    """Winning bids: each closed auction with its winning bid."""
    return winning_bids(events).map(_won, name="q9")


def _won(pair: tuple[Event, Event]) -> Row:
    auction, bid = pair
    return (
        *(auction[field] for field in ("id", *_EXPANDED)),
        *(bid["auction"], bid["bidder"], bid["price"], bid["date_time"], bid["extra"]),
    )


# --- windows ---------------------------------------------------------------------------------------------------


def q5(events: Stream) -> Stream:
    """Hot items: which auctions have the most bids of the last 10 seconds? The answer comes every 2 seconds."""
    counts = _bids(events).key_by("auction").window(ps.Sliding(WINDOW_S, SLIDE_S)).count(name="bids of auctions")
    # Of all counts of one sliding window, and of no others, the last millisecond is in the same tumbling window.
    alike = counts.key_by(1).window(ps.Tumbling(SLIDE_S), time=lambda count: count[2] - 1)
    return alike.aggregate(_Most(3), name="by window").flat_map(_hottest, name="q5")


class _Most(ps.AggregateFunction):
    """All records with the greatest value in a field."""

    def __init__(self, field: Any) -> None:
        self._field = field

    def create(self) -> list[Any]:
        return []

    def add(self, most: list[Any], record: Any) -> list[Any]:
        field = self._field
        if not most or record[field] > most[0][field]:
            return [record]
        if record[field] == most[0][field]:
            most.append(record)
        return most

    def merge(self, a: list[Any], b: list[Any]) -> list[Any]:
        field = self._field
        if a[0][field] == b[0][field]:
            return a + b
        return a if a[0][field] > b[0][field] else b


def _hottest(window: tuple[Any, int, int, list[Row]]) -> list[Row]:
    return [(auction, bids, start) for auction, start, _, bids in window[3]]


def q7(events: Stream) -> Stream:
    """Highest bid: the bids with the highest price of each 10 seconds."""
    windows = _bids(events).key_by(lambda bid: None).window(ps.Tumbling(WINDOW_S))
    return windows.aggregate(_Most("price"), name="highest").flat_map(_highest_rows, name="q7")


def _highest_rows(window: tuple[Any, int, int, list[Event]]) -> list[Row]:
    return [(bid["auction"], bid["price"], bid["bidder"], bid["date_time"], bid["extra"]) for bid in window[3]]


def q8(events: Stream) -> Stream:
    """New users: who has come and opened an auction in the same 10 seconds?"""
    persons, auctions = _persons(events).key_by("id"), _auctions(events).key_by("seller")
    pairs = persons.join(auctions, ps.Tumbling(WINDOW_S), fn=_newcomer)
    # Who opened several auctions is in several pairs, all of the same window.
    once = pairs.key_by(0).window(ps.Tumbling(WINDOW_S), time=2).reduce(lambda one, other: one, name="once")
    return once.map(lambda window: window[3], name="q8")


def _newcomer(person: Event, auction: Event) -> Row:
    return person["id"], person["name"], person["date_time"] - person["date_time"] % WINDOW_MS


def q11(events: Stream) -> Stream:
    """Sessions: how many bids did a bidder make in each time of activity, which 10 seconds without a bid end?"""
    sessions = _bids(events).key_by("bidder").window(ps.Session(WINDOW_S)).count(name="sessions")
    return sessions.map(lambda window: (window[0], window[3], window[1], window[2]), name="q11")


class _ClockWindows(ps.ProcessFunction):
    """Counts the records of a key in windows of the clock."""

    def process(self, ctx: ps.ProcessContext, key: int, bid: Event) -> None:
        now = ctx.now_ms()
        start, bids = ctx.get((now - now % WINDOW_MS, 0))
        if now >= start + WINDOW_MS:  # the timer of the last window is due and has not fired yet
            self._end(ctx, key, start, bids)
            start, bids = now - now % WINDOW_MS, 0
        if not bids:
            ctx.set_timer(at_ms=start + WINDOW_MS)
        ctx.set((start, bids + 1))

    def on_timer(self, ctx: ps.ProcessContext, key: int, at_ms: int) -> None:
        start, bids = ctx.get((0, 0))
        if bids and at_ms >= start + WINDOW_MS:
            self._end(ctx, key, start, bids)

    def _end(self, ctx: ps.ProcessContext, key: int, start: int, bids: int) -> None:
        ctx.emit((key, bids, start, start + WINDOW_MS))
        ctx.clear()


def q12(events: Stream) -> Stream:
    """Windows of processing time: how many bids of a bidder does the flow see in each 10 seconds of the clock?"""
    return _bids(events).key_by("bidder").process(_ClockWindows(), name="q12")


# --- statistics ------------------------------------------------------------------------------------------------


def _rank(price: int) -> int:
    return 1 if price < 10_000 else 2 if price < 1_000_000 else 3


class _Statistics(ps.ProcessFunction):
    """Counts bids, distinct bidders and distinct auctions, of all prices and of three ranks of prices. The key is a
    tuple that ends in the day. `minutes`: results have the latest minute too."""

    def __init__(self, minutes: bool) -> None:
        self.minutes = minutes

    def process(self, ctx: ps.ProcessContext, key: Row, bid: Event) -> Iterable[Row]:
        state = ctx.get()
        if state is None:
            state = {"latest": 0, "bids": [0] * 4, "bidders": [set() for _ in range(4)]}
            state["auctions"] = [set() for _ in range(4)]
            ctx.set(state)
        state["latest"] = max(state["latest"], bid["date_time"])
        for rank in (0, _rank(bid["price"])):
            state["bids"][rank] += 1
            state["bidders"][rank].add(bid["bidder"])
            state["auctions"][rank].add(bid["auction"])
        minute = (_minute(state["latest"]),) if self.minutes else ()
        return [(*key, *minute, *state["bids"], *map(len, state["bidders"]), *map(len, state["auctions"]))]


def q15(events: Stream) -> Stream:
    """Statistics of a day: how many bids, bidders and auctions are there, in all and at three levels of prices?"""
    return _bids(events).key_by(lambda bid: (_day(bid["date_time"]),)).process(_Statistics(minutes=False), name="q15")


def q16(events: Stream) -> Stream:
    """Statistics of a channel and day: the same for each channel, and when its latest bid was."""
    keyed = _bids(events).key_by(lambda bid: (bid["channel"], _day(bid["date_time"])))
    return keyed.process(_Statistics(minutes=True), name="q16")


def q17(events: Stream) -> Stream:
    """Statistics of an auction and day: the number of bids, in all and at three levels, and their prices."""
    price = ps.col("price")
    return (
        _bids(events)
        .key_by(lambda bid: (bid["auction"], _day(bid["date_time"])))
        .agg(
            bids=ps.count(),
            rank1=ps.count(ps.when(price < 10_000, 1)),
            rank2=ps.count(ps.when((price >= 10_000) & (price < 1_000_000), 1)),
            rank3=ps.count(ps.when(price >= 1_000_000, 1)),
            least=ps.min(price),
            greatest=ps.max(price),
            total=ps.sum(price),
            name="statistics",
        )
        .map(_auction_statistics, name="q17")
    )


def _auction_statistics(result: tuple[Row, dict[str, int]]) -> Row:
    key, found = result
    *others, total = found.values()
    return *key, *others, total // found["bids"], total


# --- first and last --------------------------------------------------------------------------------------------


def q18(events: Stream) -> Stream:
    """Last bid: the last bid of each bidder for each auction."""
    return (
        _bids(events)
        .key_by(lambda bid: (bid["bidder"], bid["auction"]))
        .reduce(lambda one, other: max(one, other, key=_time_order), name="last bid")
        .map(lambda result: _bid_row(result[1]), name="q18")
    )


def q19(events: Stream) -> Stream:
    """Top ten: the ten highest bids of each auction, with their ranks."""
    bids = _bids(events).key_by("auction").window(ps.GlobalWindow(), early_s=1)
    best = bids.top(TOP, by=_price_order, largest=False, name="top ten")
    return best.flat_map(_ranked, name="q19")


def _ranked(window: tuple[Any, None, None, list[Event]]) -> list[Row]:
    return [(*_bid_row(bid), rank) for rank, bid in enumerate(window[3], 1)]


QUERIES: dict[str, Callable[[Stream], Stream]] = {
    query.__name__: query
    for query in (
        *(q0, q1, q2, q3, q4, q5, q6, q7, q8, q9, q10, q11),
        *(q12, q13, q14, q15, q16, q17, q18, q19, q20, q21, q22),
    )
}
