"""The stock exchange: trades, volumes and top lists are those of the slow checker, whatever the order of arrival."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.apps import cli
from penstock.apps.app import packaged
from penstock.apps.stock import app
from penstock.apps.stock.book import Trade
from penstock.apps.stock.orders import TIME_MS, Order, Orders, is_valid
from penstock.apps.stock.topology import LATE, match, topology
from penstock.runtime.errors import FlowError
from tests.apps.parsed import parsed
from tests.apps.stock_checker import expected, volumes

SKEW_MS = 1_500
LIFETIME_S = 4.0
ORDERS = list(map(Orders(3, symbols=25, rate=100), range(2_000)))


def shuffled(orders: list[Order], seed: int) -> list[Order]:
    """The orders in another order, of which none is more than the skew behind one before it."""
    rng = random.Random(seed)
    return sorted(orders, key=lambda order: order[TIME_MS] + rng.uniform(0, 0.99 * SKEW_MS))


def run(orders: list[Order], lifetime_s: float | None, **options: Any) -> dict[str, list[Any]]:
    collect = ps.sinks.Collect
    flow = topology(
        *(ps.sources.Memory([]), collect(), collect(), collect()),
        lifetime_s=lifetime_s,
        top=5,
        lateness_s=SKEW_MS / 1000,
    )
    # One task reads, so that the records are in the order that was given.
    flow.graph.operators["orders"].parallelism = 1
    return ps.testing.run(flow, orders, **options)


def by_symbol(trades: list[Trade]) -> dict[str, list[Trade]]:
    """The trades of each symbol, in their order."""
    found: dict[str, list[Trade]] = defaultdict(list)
    for trade in trades:
        found[trade[0]].append(trade)
    return found


def ranking(volume: dict[tuple[str, int], int], top: int) -> list[tuple[int, list[tuple[str, int]]]]:
    windows: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for (symbol, start), quantity in volume.items():
        windows[start].append((quantity, symbol))
    return sorted(
        (start, [(symbol, quantity) for quantity, symbol in sorted(found, reverse=True)[:top]])
        for start, found in windows.items()
    )


def check(out: dict[str, list[Any]], trades: list[Trade]) -> None:
    assert by_symbol(out["trades"]) == by_symbol(trades)
    right = volumes(trades, 1_000)
    assert {(symbol, start): quantity for symbol, start, end, quantity in out["volumes"]} == right
    assert len(out["volumes"]) == len(right)
    assert sorted(out["best"]) == ranking(right, 5)


@pytest.mark.parametrize("lifetime_s", [None, LIFETIME_S])
@pytest.mark.parametrize("parallelism", [1, 2, 4])
def test_trades_volumes_and_top_lists_are_those_of_the_checker(parallelism: int, lifetime_s: float | None) -> None:
    lifetime_ms = None if lifetime_s is None else round(lifetime_s * 1000)
    trades = expected(filter(is_valid, ORDERS), lifetime_ms)
    assert len(trades) > 500
    out = run(shuffled(ORDERS, parallelism), lifetime_s, parallelism=parallelism, batch_size=13 * parallelism)
    check(out, trades)


def test_the_answers_are_the_same_after_failures() -> None:
    trades = expected(filter(is_valid, ORDERS[:1_000]), 4_000)
    check(run(shuffled(ORDERS[:1_000], 1), LIFETIME_S, parallelism=3, batch_size=7, fail_at=[200, 600, 990]), trades)


def test_trades_are_the_same_in_every_way_in_which_a_job_may_go() -> None:
    orders = list(filter(is_valid, map(Orders(5, symbols=6, rate=100), range(300))))

    def build(stream: ps.Stream) -> ps.Stream:
        return match(stream, lifetime_s=None, lateness_s=SKEW_MS / 1000)

    ps.testing.torment(build, shuffled(orders, 1), runs=8, expect=expected(orders), by=0)


def test_orders_of_several_source_tasks_meet_in_the_order_of_their_times() -> None:
    collect = ps.sinks.Collect
    source = ps.sources.Generator(Orders(9, symbols=10, rate=200), limit=900)
    flow = topology(source, collect(), collect(), collect(), top=5)
    out = ps.testing.run(flow, parallelism=4, batch_size=5)
    check(out, expected(filter(is_valid, map(Orders(9, symbols=10, rate=200), range(900))), 60_000))


def test_an_order_that_comes_too_late_is_not_matched() -> None:
    buy, sell = (1, "S", "buy", 100, 100, 1_000), (2, "S", "sell", 100, 100, 2_000)
    other, late = (3, "T", "buy", 5, 100, 9_000), (0, "S", "sell", 90, 100, 999)
    flow = ps.Flow("stock")
    trades = match(flow.read(ps.sources.Memory([]), name="orders"))
    trades.write(ps.sinks.Collect(), name="trades")
    trades.side_output(LATE).write(ps.sinks.Collect(), name="late")
    out = ps.testing.run(flow, [buy, sell, other, late])
    assert out == {"trades": [("S", 100, 100, 1, 2, 2_000)], "late": [late]}


# --- the command -----------------------------------------------------------------------------------------------


def options(*arguments: str) -> SimpleNamespace:
    return parsed(app.APP, *arguments)


def test_lines_have_two_forms() -> None:
    assert app.parse("7,S1,buy,1250,300,9000") == (7, "S1", "buy", 1250, 300, 9000)
    order = app.parse("S1,sell,87.23,1491206400004")
    assert order[1:] == ("S1", "sell", 8723, 100, 1491206400004)
    assert app.parse("S1,sell,87.23,1491206400004") == order
    with pytest.raises(ValueError, match="this one has 2 fields"):
        app.parse("a,b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sample", "--input", "a.csv"],
        ["--sample", "--rate", "5"],
        ["--orders", "5", "--duration", "5"],
        ["--rate", "5:10s,6"],
        ["--rate", "0"],
        ["--window", "0"],
    ],
)
def test_options_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(FlowError):
        app.APP.build(options(*arguments))


def test_the_file_of_the_package() -> None:
    orders = [app.parse(line) for line in packaged("stock_orders.csv").read_text().splitlines()]
    built = app.APP.build(options("--sample"))
    out = ps.testing.run(built.flow, parallelism=2, batch_size=20)
    trades = expected(filter(is_valid, orders), 60_000)
    assert by_symbol(out["trades"]) == by_symbol(trades)
    assert sorted(out["best"]) == ranking(volumes(trades, 1_000), 10)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--rate", "max", "--orders", "3000", "--symbols", "30", "--seed", "2"]
    assert cli.main(["run", "stock", *arguments, "--local", "--no-progress", "--epoch-interval", "0"]) == 0
    orders = map(Orders(2, symbols=30), range(3_000))
    assert capsys.readouterr().out.startswith(f"{len(expected(filter(is_valid, orders), 60_000)):,} trades, ")
