"""The orders of the stock exchange (docs/papers.md: W9), made of nothing but a seed and their number.

The paper's trace is a month of an exchange, with 6,649 symbols; it is not public, so these orders are made up. Symbols
are as unequal as those of an exchange (by Zipf's law). The price of each wanders by itself, and the limits of orders
lie about it, by half a percent at most, so that those who are ready to give more meet those who want less: of the first
300,000 orders about half find a match, at least for a part. A few orders break the rules, for an operator to filter
out.

An order is a hash of (seed, number), and never depends on other orders: so the same orders come in every run, in any
order, from any number of tasks. Even a price that wanders is no sum of earlier steps. It is a hash at fixed times,
joined by straight lines, at several scales.

An order is a tuple (number, symbol, side, price, quantity, time_ms). The codec sends lists of such tuples as msgpack;
records of a class would be pickled. Prices are whole cents, because sums and comparisons of them must be exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate
from typing import Final

from penstock.apps.hashing import GOLDEN, WORD, mixed
from penstock.runtime.errors import FlowError

Order = tuple[int, str, str, int, int, int]
"""(number, symbol, side, price, quantity, time_ms): `price` is the limit in cents, `time_ms` since 1970."""

NUMBER: Final = 0
SYMBOL: Final = 1
SIDE: Final = 2
PRICE: Final = 3
QUANTITY: Final = 4
TIME_MS: Final = 5
BUY, SELL = "buy", "sell"

SYMBOLS = 6_649
RATE = 10_000  # orders a second of event time, where nothing else is said
START_MS = 1_700_000_000_000
INVALID_SHARE = 0.01

_ZIPF = 0.8  # the exponent: the first symbol has about one order in 27
_LOT = 100
_LOTS_MOST = 10
_PRICE_MIN, _PRICE_MAX = 500, 50_000  # where the price of a symbol begins
_WAVES = ((3_600_000, 0.05), (300_000, 0.015), (20_000, 0.004))  # milliseconds between two points, and how far they go
_WIDTH = 0.005  # how far limits are from the price at most
_EAGER = 0.5  # the share of this width that lies on the side that makes a match


class Orders:
    """Makes the order of a number, for a `Generator`:

        flow.read(ps.sources.Generator(Orders(seed=1), rate=20_000))

    `symbols`: how many there are. `rate`: orders a second of event time, from `start_ms` on; numbers are in the order
    of times. `invalid_share`: so many orders break the rules, see `is_valid`. `Orders` travels to workers as these few
    values.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        symbols: int = SYMBOLS,
        rate: float = RATE,
        start_ms: int = START_MS,
        invalid_share: float = INVALID_SHARE,
    ) -> None:
        if symbols < 1:
            raise FlowError(f"Orders need at least one symbol, got symbols={symbols}")
        if not rate > 0:
            raise FlowError(f"Orders: rate must be above 0, got {rate}")
        if start_ms < 0:
            raise FlowError(f"Orders: start_ms must not be negative, got {start_ms}")
        if not 0 <= invalid_share <= 1:
            raise FlowError(f"Orders: invalid_share must be between 0 and 1, got {invalid_share}")
        self.seed = seed
        self.symbols = symbols
        self.rate = rate
        self.start_ms = start_ms
        self.invalid_share = invalid_share

    def __reduce__(self) -> tuple[Callable[..., Orders], tuple[int, int, float, int, float]]:
        return _orders, (self.seed, self.symbols, self.rate, self.start_ms, self.invalid_share)

    def __call__(self, number: int) -> Order:
        one = mixed(self._key + (3 * number + 1) * GOLDEN)
        two = mixed(self._key + (3 * number + 2) * GOLDEN)
        time_ms = self.start_ms + int(number * 1000 / self.rate)
        symbol = bisect_right(self._shares, (one >> 32) / (1 << 32))
        mid = self.price(symbol, time_ms)
        # The limit is between half of the width beyond the price and the whole width short of it.
        away = mid * _WIDTH * ((one & 0xFFFFFFFF) / (1 << 32) * (1 + _EAGER) - _EAGER)
        if two & 1:
            side, price = BUY, round(mid - away)
        else:
            side, price = SELL, round(mid + away)
        quantity = _LOT * (1 + (two >> 1) % _LOTS_MOST)
        if (two >> 32) < self._invalid:
            if two & 2:
                quantity = 0
            else:
                price = -price
        return number, self._names[symbol], side, price, quantity, time_ms

    def price(self, symbol: int, time_ms: int) -> float:
        """Returns the price in cents about which the limits of a symbol (by its rank) lie at a time."""
        key, first, lines = self._walks[symbol]
        far = 1.0
        for wave, (period_ms, height) in enumerate(_WAVES):
            point, passed = divmod(time_ms, period_ms)
            line = lines[wave]
            if line[0] != point:  # the last one is kept, because the next order is likely to need it
                begin = mixed(key + (point << 2) + wave) / WORD
                end = mixed(key + (point + 1 << 2) + wave) / WORD
                line = lines[wave] = (point, height * (2 * begin - 1), height * 2 * (end - begin) / period_ms)
            far += line[1] + line[2] * passed
        return first * far

    @cached_property
    def _key(self) -> int:
        return mixed(self.seed * GOLDEN + GOLDEN)

    @cached_property
    def _walks(self) -> list[tuple[int, float, list[tuple[int, float, float]]]]:
        """Of each symbol: its key, its first price, and the lines that `price` used last, one for each wave."""
        keys = [mixed(self._key ^ (symbol + 1) * GOLDEN) for symbol in range(self.symbols)]
        return [
            (key, _PRICE_MIN + (_PRICE_MAX - _PRICE_MIN) * (key / WORD) ** 3, [(-1, 0.0, 0.0)] * len(_WAVES))
            for key in keys
        ]

    @cached_property
    def _invalid(self) -> int:
        return round(self.invalid_share * (1 << 32))

    @cached_property
    def _names(self) -> list[str]:
        return [f"S{rank:04}" for rank in range(self.symbols)]

    @cached_property
    def _shares(self) -> list[float]:
        """Up to which number of 0 to 1 a symbol goes, for all but the last one."""
        sums = list(accumulate((rank + 1) ** -_ZIPF for rank in range(self.symbols)))
        return [share / sums[-1] for share in sums[:-1]]


def is_valid(order: Order) -> bool:
    """Says whether an order complies with the rules: it has a price, and whole lots of a hundred."""
    _, _, side, price, quantity, _ = order
    return price > 0 and quantity > 0 and quantity % _LOT == 0 and side in {BUY, SELL}


def _orders(seed: int, symbols: int, rate: float, start_ms: int, invalid_share: float) -> Orders:
    return Orders(seed, symbols=symbols, rate=rate, start_ms=start_ms, invalid_share=invalid_share)
