"""An oracle for the stock exchange (docs/papers.md: W9): the trades of a list of orders, slowly, by the rules.

All resting orders are in one list. Each order looks through the whole list for the best one to trade with, and again
until there is none. The rules:

- An order to buy can trade with a resting order to sell of the same symbol whose limit is not above its own, and the
  other way round. The best is the lowest limit to sell, or the highest to buy; of equal limits, the first that came.
- A trade has the limit of the resting order, the smaller of the two quantities, and the time of the order that came.
- What is left of an order rests. With a lifetime, it rests no more once the latest time of any order of its symbol so
  far is its own time and the lifetime, or later. An order that comes so late never rests, and may trade as it comes.
- The traded volume is the sum of the quantities of the trades of a symbol whose time is in a window [start, start +
  window_ms), where start is a multiple of window_ms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Order = tuple[int, str, str, int, int, int]
Trade = tuple[str, int, int, int, int, int]


def expected(orders: Iterable[Order], lifetime_ms: int | None = None) -> list[Trade]:
    """Returns the trades (symbol, price, quantity, buying number, selling number, time_ms) in their order."""
    return expected_and_resting(orders, lifetime_ms)[0]


def expected_and_resting(
    orders: Iterable[Order], lifetime_ms: int | None = None
) -> tuple[list[Trade], dict[str, list[tuple[int, int, int]]]]:
    """Returns the trades, and what rests at the end: side -> [(number, price, quantity left)], in order of number."""
    resting: list[Order] = []
    trades: list[Trade] = []
    latest: dict[str, int] = {}
    for number, symbol, side, price, wanted, time_ms in orders:
        quantity = wanted
        now = latest[symbol] = max(latest.get(symbol, 0), time_ms)
        if lifetime_ms is not None:
            resting = [order for order in resting if order[1] != symbol or order[5] + lifetime_ms > now]
        while quantity:
            able = [
                index
                for index, other in enumerate(resting)
                if other[1] == symbol
                and other[2] != side
                and (other[3] <= price if side == "buy" else other[3] >= price)
            ]
            if not able:
                if lifetime_ms is None or time_ms + lifetime_ms > now:
                    resting.append((number, symbol, side, price, quantity, time_ms))
                break
            best = min(able, key=lambda index: (resting[index][3] if side == "buy" else -resting[index][3], index))
            other = resting[best]
            traded = min(quantity, other[4])
            buyer, seller = (number, other[0]) if side == "buy" else (other[0], number)
            trades.append((symbol, other[3], traded, buyer, seller, time_ms))
            quantity -= traded
            if traded == other[4]:
                del resting[best]
            else:
                resting[best] = (*other[:4], other[4] - traded, other[5])
    rest = {
        side: sorted((number, price, left) for number, _, other, price, left, _ in resting if other == side)
        for side in ("buy", "sell")
    }
    return trades, rest


def volumes(trades: Iterable[Trade], window_ms: int) -> Counter[tuple[str, int]]:
    """Returns the traded volume: (symbol, start of the window in milliseconds) -> quantity."""
    volume: Counter[tuple[str, int]] = Counter()
    for symbol, _, quantity, _, _, time_ms in trades:
        volume[symbol, time_ms // window_ms * window_ms] += quantity
    return volume
