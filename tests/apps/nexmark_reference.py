"""What the Nexmark queries must answer: each query in SQL, or in plain Python, over a finite list of events.

The functions share nothing with the queries that they judge, neither code nor operators. The semantics are those of
the SQL suite that is published with the benchmark (nexmark/nexmark on GitHub). Where that suite leaves an answer open,
the docstring of the query says what is decided here, so that each list of events has exactly one answer:

- Ties are broken by other fields of the records, never by the order in which events arrive.
- Times are milliseconds since 1970. Days, hours and minutes are UTC. A window is [start, end).
- An average of prices is a whole number of cents, rounded down, as the suite's columns are integers.
- An answer in euros is a double: 0.908 times the price.
- The input is finite. At its end every auction is closed and every window complete, and no event is late.
- A query that corrects its results while it runs answers with its last results: `settled` reduces the results of a flow
  to these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import duckdb
import pyarrow as pa

Event = dict[str, Any]
Row = tuple[Any, ...]
Database = duckdb.DuckDBPyConnection

_INT, _TEXT = pa.int64(), pa.string()
TABLES = {
    "person": {
        "id": _INT,
        "name": _TEXT,
        "email_address": _TEXT,
        "credit_card": _TEXT,
        "city": _TEXT,
        "state": _TEXT,
        "date_time": _INT,
        "extra": _TEXT,
    },
    "auction": {
        "id": _INT,
        "item_name": _TEXT,
        "description": _TEXT,
        "initial_bid": _INT,
        "reserve": _INT,
        "date_time": _INT,
        "expires": _INT,
        "seller": _INT,
        "category": _INT,
        "extra": _TEXT,
    },
    "bid": {
        "auction": _INT,
        "bidder": _INT,
        "price": _INT,
        "channel": _TEXT,
        "url": _TEXT,
        "date_time": _INT,
        "extra": _TEXT,
    },
}

UPDATED: dict[str, tuple[int, ...]] = {
    "q4": (0,),
    "q6": (0,),
    "q15": (0,),
    "q16": (0, 1),
    "q17": (0, 1),
    "q18": (0, 1),
    "q19": (0, 7),
}
"""The queries that correct their results, and the fields by which a result replaces an earlier one."""


def answers(query: str, events: list[Event]) -> Counter[Row]:
    """Returns the answer of a query, "q0" to "q22", over these events: how often each result is in it."""
    if query not in QUERIES:
        raise ValueError(f"there is no query {query!r}; there are {', '.join(QUERIES)}")
    with duckdb.connect(config={"threads": 1}) as db:
        for kind, fields in TABLES.items():
            rows = [event for event in events if event["kind"] == kind]
            columns = {field: pa.array([row.get(field) for row in rows], type) for field, type in fields.items()}
            db.register(kind, pa.table(columns))
        return Counter(QUERIES[query](db))


def settled(query: str, results: Iterable[Row | Mapping[str, Any]]) -> Counter[Row]:
    """Returns what is left of a flow's results when later ones have replaced earlier ones, to compare with `answers`.

    Results are tuples, or dicts whose values are in the order of the answer's fields. The windows of q12 depend on when
    the flow ran; here they become one sum for each bidder, which does not.
    """
    rows = [tuple(row.values()) if isinstance(row, Mapping) else tuple(row) for row in results]
    if query == "q12":
        sums: Counter[Any] = Counter()
        for bidder, bids, *_ in rows:
            sums[bidder] += bids
        return Counter(sums.items())
    if query in UPDATED:
        return Counter({tuple(row[field] for field in UPDATED[query]): row for row in rows}.values())
    return Counter(rows)


def _rows(db: Database, sql: str) -> list[Row]:
    return db.execute(sql).fetchall()


_DAY = "strftime(epoch_ms(date_time), '%Y-%m-%d')"
_MINUTE = "strftime(epoch_ms(date_time), '%H:%M')"
_RANK1, _RANK2, _RANK3 = "price < 10000", "price >= 10000 AND price < 1000000", "price >= 1000000"
_WINNING = """
    SELECT a.*, b.auction, b.bidder, b.price, b.date_time AS bid_date_time, b.extra AS bid_extra
    FROM auction a JOIN bid b ON a.id = b.auction AND b.date_time BETWEEN a.date_time AND a.expires
    QUALIFY row_number() OVER (PARTITION BY a.id ORDER BY b.price DESC, b.date_time, b.extra) = 1
"""
_STATISTICS = ", ".join(
    f"{what} FILTER ({rank})"
    for what in ("count(*)", "count(DISTINCT bidder)", "count(DISTINCT auction)")
    for rank in ("true", _RANK1, _RANK2, _RANK3)
)


def q0(db: Database) -> list[Row]:
    """Pass through: (auction, bidder, price, date_time, extra) of each bid."""
    return _rows(db, "SELECT auction, bidder, price, date_time, extra FROM bid")


def q1(db: Database) -> list[Row]:
    """Currency: (auction, bidder, euros, date_time, extra) of each bid. `euros` is the double 0.908 * price."""
    return _rows(db, "SELECT auction, bidder, 0.908::DOUBLE * price, date_time, extra FROM bid")


def q2(db: Database) -> list[Row]:
    """Selection: (auction, price) of each bid for an auction whose id is a multiple of 123."""
    return _rows(db, "SELECT auction, price FROM bid WHERE auction % 123 = 0")


def q3(db: Database) -> list[Row]:
    """Local items: (name, city, state, auction's id) of each auction of category 10 whose seller lives in OR, ID or CA.
    It does not matter which of the two came first, or how long before."""
    return _rows(
        db,
        "SELECT name, city, state, auction.id FROM auction JOIN person ON seller = person.id "
        "WHERE category = 10 AND state IN ('OR', 'ID', 'CA')",
    )


def q4(db: Database) -> list[Row]:
    """Average price of a category: (category, average), the average of the closed auctions' winning bids.

    A winning bid is as in q9. An auction without one does not count, and a category without any is not in the answer.
    An auction counts with its final price only, so a flow may emit an average whenever an auction closes. The reserve
    does not matter, as in the published suite.
    """
    return _rows(db, f"SELECT category, (sum(price) // count(*))::BIGINT FROM ({_WINNING}) GROUP BY category")


def q5(db: Database) -> list[Row]:
    """Hot items: (auction, bids, start) for each sliding window of 10 seconds, of which one begins every 2 seconds: the
    auctions that have the most bids of that window. Several auctions with equally many bids are all in the answer; a
    window without bids is not. Windows are aligned to 1970, and the first ones begin before the first event."""
    return _rows(
        db,
        """
        WITH counts AS (
            SELECT auction, count(*) AS bids, date_time - date_time % 2000 - back AS start
            FROM bid, (SELECT unnest([0, 2000, 4000, 6000, 8000]) AS back)
            GROUP BY auction, start
        )
        SELECT auction, bids, start FROM counts QUALIFY bids = max(bids) OVER (PARTITION BY start)
        """,
    )


def q6(db: Database) -> list[Row]:
    """Average selling price: (seller, average), the average of the winning bids of the seller's last ten closed
    auctions. A seller with fewer has the average of these.

    Auctions are in the order of (expires, id), and a winning bid is as in q9. The published statement takes the row and
    the ten before it, which are eleven, and its words say ten; these are ten. Each seller has one row: the average
    after the last auction.
    """
    return _rows(
        db,
        f"""
        SELECT seller, (sum(price) // count(*))::BIGINT FROM (
            FROM ({_WINNING}) QUALIFY row_number() OVER (PARTITION BY seller ORDER BY expires DESC, id DESC) <= 10
        ) GROUP BY seller
        """,
    )


def q7(db: Database) -> list[Row]:
    """Highest bid: (auction, price, bidder, date_time, extra) for each tumbling window of 10 seconds: all bids of the
    window with its highest price. The published statement also takes a bid of that price at the end of the window,
    which belongs to the next one; here it does not count."""
    return _rows(
        db,
        "SELECT auction, price, bidder, date_time, extra FROM bid "
        "QUALIFY price = max(price) OVER (PARTITION BY date_time // 10000)",
    )


def q8(db: Database) -> list[Row]:
    """New users: (id, name, start) of each person who came and opened an auction in the same tumbling window of 10
    seconds. A person who opened several is there once. The auction may have come before the person."""
    return _rows(
        db,
        """
        SELECT DISTINCT person.id, name, person.date_time - person.date_time % 10000
        FROM person JOIN auction ON seller = person.id AND person.date_time // 10000 = auction.date_time // 10000
        """,
    )


def q9(db: Database) -> list[Row]:
    """Winning bids: all ten fields of each auction that has one, followed by (auction, bidder, price, date_time, extra)
    of its winning bid.

    Only bids count whose time is between the auction's date_time and expires, both included. The highest price wins,
    of equal prices the earliest bid, and of equal times the least `extra`.
    """
    return _rows(db, _WINNING)


def q10(db: Database) -> list[Row]:
    """Log to files: (auction, bidder, price, date_time, extra, day, minute) of each bid, where the last two name the
    partition of the files in which the bid is: the day ("2023-11-14") and the hour with its minute ("22:13")."""
    return _rows(db, f"SELECT auction, bidder, price, date_time, extra, {_DAY}, {_MINUTE} FROM bid")


def q11(db: Database) -> list[Row]:
    """Sessions: (bidder, bids, start, end) of each session of a bidder.

    A session ends 10 seconds after its last bid, and `end` is that time. A bid at or after that time begins a new
    session: a window does not contain its end. (In Flink a bid exactly at the end still belongs to the session.)
    """
    return _rows(
        db,
        """
        WITH marked AS (
            FROM bid SELECT *, date_time - lag(date_time) OVER (PARTITION BY bidder ORDER BY date_time) AS gap
        ), numbered AS (
            FROM marked SELECT *, count(*) FILTER (gap >= 10000)
                OVER (PARTITION BY bidder ORDER BY date_time RANGE UNBOUNDED PRECEDING) AS session
        )
        SELECT bidder, count(*), min(date_time), max(date_time) + 10000 FROM numbered GROUP BY bidder, session
        """,
    )


def q12(db: Database) -> list[Row]:
    """Windows of processing time: (bidder, bids), the sum over all windows of a bidder.

    The query counts a bidder's bids in windows of 10 seconds of the clock, so in which window a bid is counted depends
    on when the flow ran. What does not is the sum over the windows, to which `settled` reduces them. With a simulated
    clock a test can also check that starts are multiples of 10 seconds, and that no (bidder, start) comes twice.
    """
    return _rows(db, "SELECT bidder, count(*) FROM bid GROUP BY bidder")


def q13(db: Database) -> list[Row]:
    """Side input: (auction, bidder, price, date_time, value) of each bid. `value` comes from a table of 10,000 rows,
    whose keys are 0 to 9999 and whose values are the keys as text; the key of a bid is its auction modulo 10,000."""
    db.execute("CREATE TABLE side_input AS SELECT range AS key, range::VARCHAR AS value FROM range(10000)")
    return _rows(
        db,
        "SELECT auction, bidder, price, date_time, value FROM bid JOIN side_input ON auction % 10000 = key",
    )


def q14(db: Database) -> list[Row]:
    """Calculation: (auction, bidder, euros, time type, date_time, extra, number of letters "c" in extra) of each bid of
    more than 1,000,000 and less than 50,000,000, in euro cents as in q1. The time type is "dayTime" in the hours 8 to
    18, "nightTime" in the hours 20 to 6 and "otherTime" in the hours 7 and 19."""
    return _rows(
        db,
        """
        SELECT auction, bidder, 0.908::DOUBLE * price AS euros,
            CASE WHEN hour(epoch_ms(date_time)) BETWEEN 8 AND 18 THEN 'dayTime'
                 WHEN hour(epoch_ms(date_time)) IN (7, 19) THEN 'otherTime' ELSE 'nightTime' END,
            date_time, extra, len(extra) - len(replace(extra, 'c', ''))
        FROM bid WHERE euros > 1000000 AND euros < 50000000
        """,
    )


def q15(db: Database) -> list[Row]:
    """Statistics of a day: (day, 4 numbers of bids, 4 numbers of distinct bidders, 4 numbers of distinct auctions). The
    four are: of all bids, of those below 10,000 cents, of those from there to below 1,000,000, and of all others."""
    return _rows(db, f"SELECT {_DAY} AS day, {_STATISTICS} FROM bid GROUP BY day")


def q16(db: Database) -> list[Row]:
    """Statistics of a channel and day: (channel, day, minute, the twelve numbers of q15). `minute` is the latest hour
    and minute ("22:13") of the channel's bids of that day."""
    return _rows(
        db,
        f"SELECT channel, {_DAY} AS day, max({_MINUTE}), {_STATISTICS} FROM bid GROUP BY channel, day",
    )


def q17(db: Database) -> list[Row]:
    """Statistics of an auction and day: (auction, day, bids, bids of the three ranks of q15, least price, greatest
    price, average price, sum of the prices)."""
    ranks = ", ".join(f"count(*) FILTER ({rank})" for rank in (_RANK1, _RANK2, _RANK3))
    return _rows(
        db,
        f"""
        SELECT auction, {_DAY} AS day, count(*), {ranks}, min(price), max(price),
            (sum(price) // count(*))::BIGINT, sum(price)::BIGINT
        FROM bid GROUP BY auction, day
        """,
    )


def q18(db: Database) -> list[Row]:
    """Last bid: all seven fields of the last bid of each bidder for each auction. Of bids at the same time, the one
    with the highest price is the last, and of equal prices the one with the greatest `extra`."""
    return _rows(
        db,
        "FROM bid QUALIFY row_number() OVER "
        "(PARTITION BY bidder, auction ORDER BY date_time DESC, price DESC, extra DESC) = 1",
    )


def q19(db: Database) -> list[Row]:
    """Top ten: all seven fields of each of an auction's ten highest bids, and its rank, 1 to 10. Of equal prices the
    earliest bid comes first, and of equal times the least `extra`. Bids count whenever they were made."""
    return _rows(
        db,
        """
        SELECT *, row_number() OVER (PARTITION BY auction ORDER BY price DESC, date_time, extra) AS rank
        FROM bid QUALIFY rank <= 10
        """,
    )


def q20(db: Database) -> list[Row]:
    """Bids with their auctions: (auction, bidder, price, channel, url, date_time, extra) of each bid for an auction of
    category 10, followed by the auction's (item_name, description, initial_bid, reserve, date_time, expires, seller,
    category, extra). It does not matter which of the two came first, or whether the auction was open."""
    return _rows(
        db,
        """
        SELECT b.*, item_name, description, initial_bid, reserve, a.date_time, expires, seller, category, a.extra
        FROM bid b JOIN auction a ON b.auction = a.id WHERE category = 10
        """,
    )


def q21(db: Database) -> list[Row]:
    """Channel ids: (auction, bidder, price, channel, channel's id). The id is "0" of Apple, "1" of Google, "2" of
    Facebook and "3" of Baidu, in upper or lower case, and of another channel the parameter channel_id of the url, which
    may be empty. Bids without either are not in the answer."""
    return _rows(
        db,
        r"""
        SELECT auction, bidder, price, channel, CASE lower(channel)
            WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
            ELSE CASE WHEN regexp_matches(url, '(&|^)channel_id=')
                 THEN regexp_extract(url, '(&|^)channel_id=([^&]*)', 2) END
            END AS channel_id
        FROM bid WHERE channel_id IS NOT NULL
        """,
    )


def q22(db: Database) -> list[Row]:
    """Directories: (auction, bidder, price, channel, dir1, dir2, dir3) of each bid, where the last three are the parts
    of the url between its third and its sixth slash; a part that the url does not have is null."""
    return _rows(
        db,
        "WITH parts AS (SELECT *, string_split(url, '/') AS part FROM bid) "
        "SELECT auction, bidder, price, channel, part[4], part[5], part[6] FROM parts",
    )


QUERIES: dict[str, Callable[[Database], list[Row]]] = {
    query.__name__: query
    for query in (
        *(q0, q1, q2, q3, q4, q5, q6, q7, q8, q9, q10, q11),
        *(q12, q13, q14, q15, q16, q17, q18, q19, q20, q21, q22),
    )
}
