"""The order book of one symbol (docs/papers.md: W9): matches limit orders by the priority of price and time.

An order to buy meets the orders to sell that rest in the book, as long as their limits are not above its own: the
lowest first, and of equal ones the one that came first. An order to sell meets the others likewise, the highest first.
A trade has the limit of the order that rested. What is left of an order rests in the book in its turn. Time means the
order in which orders come to the book, so a program that must make the same trades every time has to bring the orders
of a symbol in the same order.

A book must never be crossed: afterwards, each limit to buy is below each limit to sell. And no quantity may be lost:
what an order was for is what it has traded and what rests of it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from math import inf

from penstock.apps.stock.orders import BUY, SELL, Order

Trade = tuple[str, int, int, int, int, int]
"""(symbol, price, quantity, number of the buying order, number of the selling order, time_ms of the later order)."""

_Resting = tuple[int, int, int, int, int]
"""(price, negative in orders to buy; turn; number of the order; quantity left; time_ms)."""

_PURGE = 64  # orders in a book that are too few to look for those that have expired


class Book:
    """Holds the resting orders of one symbol.

        book = Book()
        trades = book.add(order)

    `lifetime_ms`: so long after its time_ms an order rests no more, and is forgotten: the book would grow for ever
    otherwise, as there are always limits that the price never reaches again. The book's time is the latest time_ms of
    an order that was added. None: orders rest for ever. A Book can be pickled, and then continues from there.
    """

    __slots__ = ("_buying", "_look_at", "_selling", "_turn", "lifetime_ms", "now_ms", "symbol")

    def __init__(self, lifetime_ms: int | None = None) -> None:
        if lifetime_ms is not None and lifetime_ms < 1:
            raise ValueError(f"Book: lifetime_ms must be at least 1, got {lifetime_ms}")
        self.lifetime_ms = lifetime_ms
        self.now_ms = 0
        self.symbol: str | None = None  # of the first order
        self._buying: list[_Resting] = []  # heaps, the next one to match first
        self._selling: list[_Resting] = []
        self._turn = 0
        self._look_at = _PURGE  # how many orders make the book look for expired ones

    def add(self, order: Order) -> list[Trade]:
        """Matches an order, keeps the rest of it, and returns the trades, first ones first.

        Raises ValueError for an order that a book cannot hold: of another symbol, or without side, price or quantity.
        """
        number, symbol, side, price, quantity, time_ms = order
        if symbol != self.symbol and self.symbol is not None:
            raise ValueError(f"this is the book of {self.symbol}, the order is for {symbol}: {order}")
        if price <= 0 or quantity <= 0:
            raise ValueError(f"an order needs a price and a quantity above 0: {order}")
        if side == BUY:
            own, others, key = self._buying, self._selling, -price
        elif side == SELL:
            own, others, key = self._selling, self._buying, price
        else:
            raise ValueError(f"the side of an order is {BUY!r} or {SELL!r}: {order}")
        self.symbol = symbol
        self.now_ms = max(self.now_ms, time_ms)
        deadline = self._deadline()
        trades: list[Trade] = []
        while quantity and others and others[0][0] <= -key:
            rests, turn, other, left, since_ms = others[0]
            if since_ms <= deadline:
                heappop(others)
                continue
            traded = min(quantity, left)
            quantity -= traded
            buyer, seller = (number, other) if side == BUY else (other, number)
            trades.append((symbol, abs(rests), traded, buyer, seller, time_ms))
            if traded == left:
                heappop(others)
            else:
                heapreplace(others, (rests, turn, other, left - traded, since_ms))
        if quantity and time_ms > deadline:
            self._turn += 1
            heappush(own, (key, self._turn, number, quantity, time_ms))
            if self.lifetime_ms is not None and len(self) >= self._look_at:
                self._forget(deadline)
        return trades

    def resting(self, side: str) -> list[tuple[int, int, int]]:
        """Returns the resting orders of a side as (number, price, quantity left), the next one to match first."""
        orders = sorted(self._buying if side == BUY else self._selling)
        deadline = self._deadline()
        return [(number, abs(key), left) for key, _, number, left, since_ms in orders if since_ms > deadline]

    def __len__(self) -> int:
        """Returns the number of orders in the book, including expired ones that were not forgotten yet."""
        return len(self._buying) + len(self._selling)

    def __getstate__(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)

    def _deadline(self) -> float:
        """Returns the latest time whose orders have expired."""
        return -inf if self.lifetime_ms is None else self.now_ms - self.lifetime_ms

    def _forget(self, deadline: float) -> None:
        """Removes the expired orders, and looks again when the book has twice as many as are left."""
        for orders in (self._buying, self._selling):
            orders[:] = [order for order in orders if order[4] > deadline]
            heapify(orders)
        self._look_at = max(_PURGE, 2 * len(self))
