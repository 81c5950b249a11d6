"""The stock exchange (docs/papers.md: W9): the trades of all orders, the traded volumes and the top list.

    orders -> rules -> watermark -> (by symbol) -> match -+-> (by symbol, windows) -> volume -+-> volumes
                                                          +-> trades                          +-> (by window) -> top

The paper divides the orders into those to buy and those to sell, and joins the two. Which orders meet depends then on
how they arrive. Here the orders of a symbol go to one task, which brings them into the order of their times, so that
prices and times have the priority that they have at an exchange. Two orders of one time are in the order of their
numbers. An order must never meet another one before the watermark has passed the times of both.

An order that comes when the watermark has passed its time already is not matched, and goes to the side output "late".
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable

import penstock as ps
from penstock.apps.stock.book import Book, Trade
from penstock.apps.stock.orders import TIME_MS, Order, is_valid
from penstock.runtime.program.flow import Flow, Stream
from penstock.runtime.sinks import Sink
from penstock.runtime.sources import Source

Volume = tuple[str, int, int, int]
"""(symbol, start of the window, its end, quantity)."""

LIFETIME_S = 60.0
WINDOW_S = 1.0
TOP = 10
LATE = "late"

_TRADE_TIME_MS = 5


def topology(
    source: Source,
    volumes: Sink,
    best: Sink,
    trades: Sink,
    *,
    lifetime_s: float | None = LIFETIME_S,
    window_s: float = WINDOW_S,
    top: int = TOP,
    lateness_s: float = 0.0,
    parse: Callable[[str], Order] | None = None,
    name: str = "stock",
) -> Flow:
    """Builds the flow: orders go in. To `trades` goes each Trade, to `volumes` a Volume for each symbol and window with
    trades, and to `best` (start of the window, its `top` volumes). With `parse`, the source gives lines, of which it
    makes orders; the source is then one file, which one task reads."""
    flow = Flow(name)
    tasks = None if parse is None else 1
    orders = flow.read(source, name="orders", parallelism=tasks)
    if parse is not None:
        orders = orders.map(parse, name="parse", parallelism=1)
    valid = orders.filter(is_valid, name="rules", parallelism=tasks)
    matched = match(valid, lifetime_s=lifetime_s, lateness_s=lateness_s)
    matched.write(trades, name="trades")
    volume = matched.key_by(0).window(ps.Tumbling(window_s), time=_TRADE_TIME_MS).sum(2, name="volume")
    volume.write(volumes, name="volumes")
    windows = volume.key_by(1).window(ps.Tumbling(window_s), time=_last_ms)
    windows.top(top, by=_quantity, name="top").map(_ranking, name="ranking").write(best, name="best")
    return flow


def match(orders: Stream, *, lifetime_s: float | None = LIFETIME_S, lateness_s: float = 0.0) -> Stream:
    """Returns the stream of trades. Its side output "late" has the orders that came too late."""
    in_time = orders.watermark(TIME_MS, out_of_orderness_s=lateness_s, name="watermark")
    lifetime_ms = None if lifetime_s is None else round(lifetime_s * 1000)
    return in_time.key_by(1).process(_Match(lifetime_ms), outputs=(LATE,), name="match")


class _Match(ps.ProcessFunction):
    """Brings the orders of a symbol into the order of their times, and gives them to the book of the symbol.

    The state is the book, and a list of the orders that the watermark has not passed, in order.
    """

    def __init__(self, lifetime_ms: int | None) -> None:
        self.lifetime_ms = lifetime_ms

    def process(self, ctx: ps.ProcessContext, symbol: str, order: Order) -> None:
        watermark = ctx.watermark()
        if watermark is not None and order[TIME_MS] < watermark:
            ctx.output(LATE, order)
            return
        state: tuple[Book, list[tuple[int, Order]]] | None = ctx.get()
        if state is None:
            state = (Book(self.lifetime_ms), [])
            ctx.set(state)
        # Of one time, the order with the lesser number comes first, because an order begins with its number.
        insort(state[1], (order[TIME_MS], order))
        ctx.set_event_timer(order[TIME_MS] + 1)

    def on_event_timer(self, ctx: ps.ProcessContext, symbol: str, at_ms: int) -> Iterable[Trade]:
        book, waiting = ctx.get()
        trades: list[Trade] = []
        passed = 0
        for time_ms, order in waiting:
            if time_ms >= at_ms:
                break
            trades += book.add(order)
            passed += 1
        del waiting[:passed]
        return trades


def _last_ms(volume: Volume) -> int:
    """Returns a time in the window of a volume."""
    return volume[2] - 1


def _quantity(volume: Volume) -> tuple[int, str]:
    """Returns the value by which volumes are ranked. Of equal quantities, the greater symbol comes first, so that there
    are no ties."""
    return volume[3], volume[0]


def _ranking(window: tuple[int, int, int, list[Volume]]) -> tuple[int, list[tuple[str, int]]]:
    return window[0], [(symbol, quantity) for symbol, _, _, quantity in window[3]]
