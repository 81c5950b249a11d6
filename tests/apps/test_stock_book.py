"""The stock exchange: orders are a pure function of seed and number, and a book makes the trades of the slow oracle."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.apps.stock.book import Book, Trade
from penstock.apps.stock.orders import (
    BUY,
    NUMBER,
    PRICE,
    QUANTITY,
    SELL,
    SIDE,
    SYMBOL,
    TIME_MS,
    Order,
    Orders,
    is_valid,
)
from penstock.runtime.errors import FlowError
from tests.apps.stock_checker import expected, expected_and_resting, volumes

COUNT = 60_000


@pytest.fixture(scope="module")
def made() -> list[Order]:
    orders = Orders(1)
    return [orders(number) for number in range(COUNT)]


# --- the orders ------------------------------------------------------------------------------------------------


def test_an_order_is_a_function_of_seed_and_number(made: list[Order]) -> None:
    orders = Orders(1)
    backwards = [orders(number) for number in reversed(range(0, COUNT, 7))]
    assert backwards[::-1] == made[::7]
    copy = pickle.loads(pickle.dumps(orders))
    assert [copy(number) for number in range(50)] == made[:50]
    assert [order[1:5] for order in map(Orders(2), range(50))] != [order[1:5] for order in made[:50]]


def test_an_order_is_a_plain_tuple(made: list[Order]) -> None:
    assert {tuple(map(type, order)) for order in made} == {(int, str, str, int, int, int)}
    assert [order[NUMBER] for order in made] == list(range(COUNT))


def test_times_follow_the_rate() -> None:
    orders = Orders(rate=4, start_ms=1000)
    assert [orders(number)[TIME_MS] for number in (0, 1, 2, 40)] == [1000, 1250, 1500, 11_000]


def test_symbols_are_unequal_and_sides_are_equal(made: list[Order]) -> None:
    symbols = Counter(order[SYMBOL] for order in made)
    assert len(symbols) > 5_000
    assert set(symbols) <= {f"S{rank:04}" for rank in range(6_649)}
    first = symbols["S0000"] / COUNT
    assert 0.03 < first < 0.05
    assert symbols["S0007"] / COUNT == pytest.approx(first / 8**0.8, rel=0.2)
    assert sum(order[SIDE] == BUY for order in made) / COUNT == pytest.approx(0.5, abs=0.02)
    assert {order[SIDE] for order in made} == {BUY, SELL}


def test_one_in_a_hundred_orders_breaks_the_rules(made: list[Order]) -> None:
    wrong = [order for order in made if not is_valid(order)]
    assert len(wrong) / COUNT == pytest.approx(0.01, rel=0.2)
    assert {order[QUANTITY] == 0 for order in wrong} == {order[PRICE] < 0 for order in wrong} == {True, False}
    assert all(map(is_valid, map(Orders(1, invalid_share=0), range(5_000))))


def test_limits_lie_about_the_price_which_wanders() -> None:
    orders = Orders(1, symbols=1, rate=1, invalid_share=0)
    prices = []
    for number in range(0, 20_000, 10):
        order = orders(number)
        price = orders.price(0, order[TIME_MS])
        prices.append(price)
        assert abs(order[PRICE] - price) <= 0.005 * price + 0.5
    assert 1.01 < max(prices) / min(prices) < 1.2
    steps = [abs(two / one - 1) for one, two in itertools.pairwise(prices)]
    assert max(steps) < 0.02


def test_about_half_of_the_orders_of_a_frequent_symbol_trade(made: list[Order]) -> None:
    orders = [order for order in made if is_valid(order) and order[SYMBOL] < "S0010"]
    trades = expected_by_books(orders)
    traded = {number for trade in trades for number in trade[3:5]}
    assert 0.4 < len(traded) / len(orders) < 0.8


@pytest.mark.parametrize("wrong", [{"symbols": 0}, {"rate": 0}, {"start_ms": -1}, {"invalid_share": 2}])
def test_orders_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(FlowError):
        Orders(**wrong)


def test_orders_are_a_source() -> None:
    flow = ps.Flow("orders")
    flow.read(ps.sources.Generator(Orders(3), limit=100)).write(ps.sinks.Collect(), name="out")
    assert ps.testing.run(flow)["out"] == list(map(Orders(3), range(100)))


# --- the book --------------------------------------------------------------------------------------------------


def expected_by_books(orders: list[Order], lifetime_ms: int | None = None) -> list[Trade]:
    """Returns the trades of a book for each symbol."""
    books: dict[str, Book] = defaultdict(lambda: Book(lifetime_ms))
    return [trade for order in orders for trade in books[order[SYMBOL]].add(order)]


def buy(number: int, price: int, quantity: int, time_ms: int = 0) -> Order:
    return (number, "A", BUY, price, quantity, time_ms)


def sell(number: int, price: int, quantity: int, time_ms: int = 0) -> Order:
    return (number, "A", SELL, price, quantity, time_ms)


def test_the_lowest_seller_sells_first_and_at_its_own_price() -> None:
    book = Book()
    assert book.add(sell(1, 101, 10)) == book.add(sell(2, 100, 10)) == []
    assert book.add(buy(3, 105, 15, 7)) == [("A", 100, 10, 3, 2, 7), ("A", 101, 5, 3, 1, 7)]
    assert book.resting(SELL) == [(1, 101, 5)]
    assert book.resting(BUY) == []


def test_the_highest_buyer_buys_first_and_of_equal_ones_the_earlier() -> None:
    book = Book()
    for number, price in ((1, 99), (2, 100), (3, 100)):
        book.add(buy(number, price, 10))
    assert book.add(sell(4, 99, 25, 7)) == [("A", 100, 10, 2, 4, 7), ("A", 100, 10, 3, 4, 7), ("A", 99, 5, 1, 4, 7)]


def test_an_order_that_is_partly_filled_keeps_its_turn() -> None:
    book = Book()
    book.add(sell(1, 100, 10))
    book.add(sell(2, 100, 10))
    book.add(buy(3, 100, 4))
    assert book.resting(SELL) == [(1, 100, 6), (2, 100, 10)]
    assert book.add(buy(4, 100, 8)) == [("A", 100, 6, 4, 1, 0), ("A", 100, 2, 4, 2, 0)]


def test_what_is_left_of_an_order_rests() -> None:
    book = Book()
    book.add(sell(1, 100, 10))
    assert len(book.add(buy(2, 100, 25))) == 1
    assert book.resting(BUY) == [(2, 100, 15)]
    assert book.add(sell(3, 101, 5)) == []
    assert book.add(sell(4, 90, 5)) == [("A", 100, 5, 2, 4, 0)]


def test_an_order_expires_when_its_lifetime_is_over() -> None:
    for time_ms, trades in ((1099, 1), (1100, 0)):
        book = Book(lifetime_ms=100)
        book.add(sell(1, 100, 10, 1000))
        assert len(book.add(buy(2, 100, 10, time_ms))) == trades


def test_a_late_order_meets_none_that_has_expired() -> None:
    book = Book(lifetime_ms=100)
    book.add(sell(1, 100, 10, 1000))
    book.add(buy(2, 50, 10, 1100))
    assert book.add(buy(3, 100, 10, 1050)) == []


def test_an_order_that_comes_after_its_lifetime_trades_and_does_not_rest() -> None:
    book = Book(lifetime_ms=100)
    book.add(sell(1, 100, 10, 1100))
    assert book.add(buy(2, 100, 15, 1000)) == [("A", 100, 10, 2, 1, 1000)]
    assert book.resting(BUY) == []
    assert len(book) == 0


def test_a_book_with_a_lifetime_does_not_grow_for_ever() -> None:
    book = Book(lifetime_ms=100)
    for number in range(10_000):
        book.add(sell(number, 1000 + number % 13, 10, number))
        assert len(book) <= 250
    assert len(book.resting(SELL)) == 100


@pytest.mark.parametrize(
    "wrong", [(1, "B", BUY, 1, 1, 9), (1, "A", "keep", 1, 1, 9), (1, "A", BUY, 0, 1, 9), (1, "A", SELL, 1, 0, 9)]
)
def test_an_order_that_a_book_cannot_hold_is_refused_and_changes_nothing(wrong: Order) -> None:
    book = Book()
    book.add(buy(0, 100, 10))
    with pytest.raises(ValueError, match=r"order"):
        book.add(wrong)
    assert (book.symbol, book.now_ms, book.resting(BUY), book.resting(SELL)) == ("A", 0, [(0, 100, 10)], [])


def test_a_lifetime_must_be_above_0() -> None:
    with pytest.raises(ValueError, match="lifetime_ms"):
        Book(lifetime_ms=0)


# Few prices, so that orders match and are equal; times that go back now and then.
RANDOM_ORDERS = st.lists(
    st.tuples(
        st.sampled_from("AB"), st.sampled_from([BUY, SELL]), st.integers(1, 6), st.integers(1, 5), st.integers(0, 9)
    ),
    max_size=60,
).map(
    lambda drawn: [
        (number, symbol, side, price, quantity, 3 * number + back)
        for number, (symbol, side, price, quantity, back) in enumerate(drawn)
    ]
)
LIFETIMES = st.sampled_from([None, 1, 10, 50])


@given(RANDOM_ORDERS, LIFETIMES)
def test_a_book_makes_the_trades_of_the_oracle(orders: list[Order], lifetime_ms: int | None) -> None:
    assert expected_by_books(orders, lifetime_ms) == expected(orders, lifetime_ms)


@given(RANDOM_ORDERS, LIFETIMES)
def test_what_rests_is_what_rests_in_the_oracle(orders: list[Order], lifetime_ms: int | None) -> None:
    orders = [order for order in orders if order[SYMBOL] == "A"]
    book = Book(lifetime_ms)
    for order in orders:
        book.add(order)
    resting = expected_and_resting(orders, lifetime_ms)[1]
    assert {side: sorted(book.resting(side)) for side in (BUY, SELL)} == resting


@given(RANDOM_ORDERS)
def test_a_book_is_never_crossed_and_loses_nothing(orders: list[Order]) -> None:
    left = {order[NUMBER]: order[QUANTITY] for order in orders}
    books: dict[str, Book] = defaultdict(Book)
    for order in orders:
        book = books[order[SYMBOL]]
        for _, price, quantity, buyer, seller, _ in book.add(order):
            assert orders[seller][PRICE] <= price <= orders[buyer][PRICE]
            left[buyer] -= quantity
            left[seller] -= quantity
        bids, asks = book.resting(BUY), book.resting(SELL)
        assert not bids or not asks or bids[0][1] < asks[0][1]
    rests = {
        number: quantity
        for book in books.values()
        for side in (BUY, SELL)
        for number, _, quantity in book.resting(side)
    }
    assert {number: quantity for number, quantity in left.items() if quantity} == rests


@given(RANDOM_ORDERS, LIFETIMES, st.integers(0, 60))
def test_a_pickled_book_continues_where_it_was(orders: list[Order], lifetime_ms: int | None, at: int) -> None:
    orders = [order for order in orders if order[SYMBOL] == "A"]
    book = Book(lifetime_ms)
    trades = [trade for order in orders[:at] for trade in book.add(order)]
    book = pickle.loads(pickle.dumps(book))
    trades += [trade for order in orders[at:] for trade in book.add(order)]
    assert trades == expected(orders, lifetime_ms)


def test_books_agree_with_the_oracle_on_generated_orders() -> None:
    orders = [order for order in map(Orders(5, symbols=20), range(3_000)) if is_valid(order)]
    trades = expected_by_books(orders)
    assert len(trades) > 500
    assert trades == expected(orders)
    assert expected_by_books(orders, 50) == expected(orders, 50) != trades


def test_the_volume_is_the_quantity_of_each_symbol_and_window() -> None:
    trades = [("A", 5, 10, 1, 2, 999), ("A", 6, 20, 3, 4, 1000), ("A", 6, 1, 5, 6, 1999), ("B", 1, 7, 8, 9, 1500)]
    assert volumes(trades, 1000) == {("A", 0): 10, ("A", 1000): 21, ("B", 1000): 7}
