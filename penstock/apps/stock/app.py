"""The stock exchange for the `penstock` command (docs/papers.md: W9): generated orders, or a file of them.

The flow is in `topology.py`, and what a run answers must be the same for every number of tasks. A file has lines of
comma-separated values without a header, in the order of their times: (number, symbol, side, price in cents, quantity,
time_ms). The form of the paper's trace is taken too: (symbol, side, price, time_ms). It has no quantities, so each of
its orders is for a hundred, and no numbers, so the time of a line and its text stand for the number.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from types import SimpleNamespace

from penstock.apps.app import App, Built, add_load_options, described_rate, packaged
from penstock.apps.command_line import COUNT, SECONDS, Options
from penstock.apps.few import SHOWN, Few, told
from penstock.apps.stock.orders import RATE, SYMBOLS, Order, Orders
from penstock.apps.stock.topology import LIFETIME_S, TOP, WINDOW_S, topology
from penstock.runtime.errors import FlowError
from penstock.runtime.sinks import Collect, Null
from penstock.runtime.sources import Generator, Source, TextFiles
from penstock.runtime.status import JobStatus

_RATE = "5000"
_DURATION_S = 10.0


def parse(line: str) -> Order:
    """Returns the order of a line, in one of the two forms."""
    fields = line.split(",")
    if len(fields) == 6:
        number, symbol, side, price, quantity, at = fields
        return int(number), symbol, side, int(price), int(quantity), int(at)
    if len(fields) == 4:
        symbol, side, dollars, at = fields
        # The trace has no numbers. What stands for one must be the same in every run.
        number_of_line = int.from_bytes(blake2b(line.encode(), digest_size=7).digest(), "big")
        return number_of_line, symbol, side, round(float(dollars) * 100), 100, int(at)
    raise ValueError(
        "a line of orders is number,symbol,side,cents,quantity,time_ms or symbol,side,price,time_ms; this one has "
        f"{len(fields)} fields: {line[:200]!r}"
    )


def _add_options(parser: Options) -> None:
    add_load_options(parser, rate=_RATE, duration=f"{_DURATION_S:g}")
    parser.add("--orders", metavar="N", type=COUNT, help="end after so many orders, instead of --duration")
    parser.add("--symbols", metavar="N", type=COUNT, default=SYMBOLS, help=f"number of symbols ({SYMBOLS})")
    parser.add("--seed", metavar="N", type=int, default=0, help="seed of the random orders (0)")
    parser.add("--sample", is_flag=True, help="read the small file that is part of the package")
    parser.add("--input", metavar="FILE", help="read orders from this file")
    parser.add(
        "--lifetime",
        metavar="S",
        type=SECONDS,
        default=LIFETIME_S,
        help=f"seconds for which an order rests; 0: for ever ({LIFETIME_S:g})",
    )
    parser.add(
        "--window", metavar="S", type=SECONDS, default=WINDOW_S, help=f"seconds of each traded volume ({WINDOW_S:g})"
    )
    parser.add(
        "--lateness",
        metavar="S",
        type=SECONDS,
        default=0.0,
        help="seconds by which lines of a file may be out of order (0)",
    )


def _build(options: SimpleNamespace) -> Built:
    if options.sample and options.input is not None:
        raise FlowError("--sample reads the file of the package; leave out --input")
    if not options.window:
        raise FlowError("--window must be above 0 seconds")
    path = str(packaged("stock_orders.csv")) if options.sample else options.input
    if path is None:
        source, about = _generated(options)
    else:
        if options.rate is not None or options.duration is not None or options.orders is not None:
            raise FlowError("--rate, --duration and --orders are for generated orders; a file is read to its end")
        source = TextFiles(path, parallel=False)
        about = "the orders of the package" if options.sample else f"the orders of {path}"
    best = Collect()
    flow = topology(
        source,
        Null(),
        Few(best),
        Null(),
        lifetime_s=options.lifetime or None,
        window_s=options.window,
        lateness_s=options.lateness,
        parse=None if path is None else parse,
        name=options.name,
    )

    def results(status: JobStatus, ran: float) -> Iterable[str]:
        yield from told(status, ran, "trades", "trades")
        yield f"{status.operators['volumes'].records_in:,} traded volumes of {options.window:g} s"
        for start, volumes in sorted(best.records())[-SHOWN:]:
            most = ", ".join(f"{symbol} {quantity:,}" for symbol, quantity in volumes[:3])
            yield f"  most traded from {start}: {most}"

    return Built(
        flow,
        f"trades, traded volumes and the {TOP} most traded symbols of {about}",
        results,
        ("penstock run stock --sample", "penstock run stock --rate max --orders 300000", "penstock explain stock"),
    )


def _generated(options: SimpleNamespace) -> tuple[Source, str]:
    if options.orders is not None and options.duration is not None:
        raise FlowError("--orders and --duration both say when to end; give one of them")
    rate = options.rate or _RATE
    if rate != "max" and not _is_number(rate):
        raise FlowError(f"--rate {rate}: the times of orders follow one rate; give a number, or max")
    duration = _DURATION_S if options.duration is None and options.orders is None else options.duration
    orders = Orders(options.seed, symbols=options.symbols, rate=RATE if rate == "max" else float(rate))
    source = Generator(orders, None if rate == "max" else rate, limit=options.orders, duration_s=duration or None)
    if options.orders is not None:
        ends = f"{options.orders:,} orders"
    else:
        ends = f"orders for {duration:g} s" if duration else "orders until you stop it with Ctrl-C"
    return source, f"{ends} of {options.symbols:,} symbols, {described_rate(rate)}"


def _is_number(rate: str) -> bool:
    try:
        return float(rate) > 0
    except ValueError:
        return False


APP = App("stock", "a stock exchange: matches orders by price and time, sums up what was traded", _add_options, _build)
