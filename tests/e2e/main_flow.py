"""What recovery_flows.in_main runs in the main script, as a cell of a notebook would be: classes of records, keys and
state, and the flow. Each function looks whether what it gets is of the classes that it knows; a job in which one is not
fails.
"""

import dataclasses
import enum
import typing

import penstock as ps


class TradeKind(enum.Enum):
    BUY = "buy"
    SELL = "sell"
    LEND = "lend"


@dataclasses.dataclass(frozen=True)
class TradeKey:
    name: str
    kind: TradeKind


@dataclasses.dataclass
class Trade:
    number: int
    key: TradeKey
    price: int


@dataclasses.dataclass
class BigTrade(Trade):
    pass


@dataclasses.dataclass
class TradeBook:
    """State of a key."""

    key: TradeKey
    trades: int
    big: int
    prices: int
    last: Trade | None


class TradeQuote(typing.NamedTuple):
    key: TradeKey
    trades: int
    big: int
    prices: int


class TradeMismatch(Exception):
    pass


def trade_of(number: int) -> Trade:
    kind = (TradeKind.BUY, TradeKind.SELL, TradeKind.LEND)[number % 3]
    key = TradeKey(f"t{number * 2654435761 % 2**32 % 97}", kind)
    return (BigTrade if number % 10 == 0 else Trade)(number, key, number % 13)


def checked_trade(trade: typing.Any) -> Trade:
    due = trade_of(trade.number)
    if not isinstance(trade, Trade) or type(trade) is not type(due) or trade != due or trade.key.kind not in TradeKind:
        raise TradeMismatch(f"{trade!r} is none of this program's; {due!r} would be")
    if not isinstance(trade.key, TradeKey) or trade.key.kind is not due.key.kind:
        raise TradeMismatch(f"{trade.key!r} is none of this program's")
    return trade


class KeepBook(ps.ProcessFunction):
    def process(self, ctx: ps.ProcessContext, key: TradeKey, record: Trade) -> typing.Any:
        checked_trade(record)
        book = ctx.get() or TradeBook(key, 0, 0, 0, None)
        if not isinstance(book, TradeBook) or book.key != record.key or book.key.kind is not record.key.kind:
            raise TradeMismatch(f"{book!r} is not the book of {record.key!r}")
        if book.last is not None:
            checked_trade(book.last)
        book.trades += 1
        book.big += isinstance(record, BigTrade)
        book.prices += record.price
        book.last = record
        ctx.set(book)
        return [TradeQuote(book.key, book.trades, book.big, book.prices)]


def trade_flow(
    name: str, records: int, rate: float, files: typing.Any
) -> tuple[ps.Flow, ps.sinks.Collect, ps.sinks.Collect]:
    flow = ps.Flow(name)
    quotes, kinds = ps.sinks.Collect(), ps.sinks.Collect()
    trades = flow.read(ps.sources.Generator(trade_of, rate=rate, limit=records), name="source")
    kept = trades.key_by(lambda trade: trade.key).process(KeepBook(), name="books")
    kept.map(lambda quote: f"{quote.key.name} {quote.key.kind.name}\t{quote.trades}").write(files)
    kept.filter(lambda quote: quote.trades % 50 == 0).write(quotes)
    trades.key_by(lambda trade: checked_trade(trade).key.kind).count(emit="final").write(kinds)
    return flow, quotes, kinds


def check_trades(records: int, quotes: list[typing.Any], kinds: list[typing.Any]) -> None:
    for quote in quotes:
        assert type(quote) is TradeQuote, f"{quote!r} is none of TradeQuote"
        assert type(quote.key) is TradeKey, f"{quote!r} has another key"
        assert type(quote.key.kind) is TradeKind, f"{quote!r} has a key of another kind"
    numbers: dict[TradeKey, int] = {}
    for trade in map(trade_of, range(records)):
        numbers[trade.key] = numbers.get(trade.key, 0) + 1
    found = sorted((quote.key.name, quote.key.kind.name, quote.trades) for quote in quotes)
    due = sorted((k.name, k.kind.name, n) for k, count in numbers.items() for n in range(50, count + 1, 50))
    assert found == due, (
        f"Collect has {len(found)} quotes, {len(set(found))} of them different, where {len(due)} are due"
    )
    totals = {kind: sum(n for key, n in numbers.items() if key.kind is kind) for kind in TradeKind}
    assert dict(kinds) == totals, f"{kinds} where {totals} is due"
    assert len(kinds) == len(totals)
