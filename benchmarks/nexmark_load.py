"""The load of the delays of Nexmark: lines that a server sends to whoever connects, each at the time when it is due.

A line has its event's fields between bars: the kind, the time and what the queries use of the kind. Event times begin
at a fixed time, and an event's time says when it is due after the first. So all lines are made before the run, and a
result's delay is the time by the wall clock since the run's begin, less the event time that its due time is after the
first event's. Sending them takes a thread of the benchmark, on the same cores as the contestant.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import quantile
from penstock.apps.nexmark.events import START_MS, Events

#: The fields of each kind, in the order in which a line has them after the kind and the time.
FIELDS = {
    "bid": ("auction", "bidder", "price", "channel", "url", "extra"),
    "person": ("id", "name", "city", "state"),
    "auction": ("id", "seller", "category", "expires"),
}
NUMBERS = frozenset({"auction", "bidder", "price", "id", "seller", "category", "expires"})
_TICK_S = 0.002


def line_of(event: dict[str, Any]) -> bytes:
    """Returns the line of an event."""
    kind = event["kind"]
    fields = "|".join(str(event[field]) for field in FIELDS[kind])
    return f"{kind}|{event['date_time']}|{fields}\n".encode()


def event_of(line: str) -> dict[str, Any]:
    """Returns the event of a line, with the fields that the line has."""
    kind, at, *values = line.split("|")
    if kind == "bid":
        auction, bidder, price, channel, url, extra = values
        return {
            "kind": kind,
            "auction": int(auction),
            "bidder": int(bidder),
            "price": int(price),
            "channel": channel,
            "url": url,
            "date_time": int(at),
            "extra": extra,
        }
    event: dict[str, Any] = {"kind": kind, "date_time": int(at)}
    for field, value in zip(FIELDS[kind], values, strict=True):
        event[field] = int(value) if field in NUMBERS else value
    return event


class Load:
    """So many seconds of events, at a rate."""

    def __init__(self, rate: float, seconds: float) -> None:
        lines = [line_of(event) for event in Events(1, int(rate * seconds), rate=rate)]
        self.rate = rate
        self.seconds = seconds
        self._bytes = memoryview(b"".join(lines))
        ends = np.fromiter(accumulate(map(len, lines)), np.int64, len(lines))
        # For each millisecond, the bytes of all lines that are due before its end.
        due = np.arange(len(lines)) * 1000 // rate
        self._until = ends[np.searchsorted(due, np.arange(int(seconds * 1000)), side="right") - 1]


class Server:
    """Sends a load to the first who connects, from then on. `port` is where it listens, and `began_ms` the time at
    which it began to send."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.began_ms = 0.0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits until all has been sent."""
        self._thread.join(60)
        self._listening.close()

    def _serve(self) -> None:
        self._listening.settimeout(120)
        connection, _ = self._listening.accept()
        load, sent = self._load, 0
        with connection:
            self.began_ms = time.time() * 1000
            begun = time.monotonic()
            last = len(load._until) - 1
            while sent < load._until[last]:
                passed = int((time.monotonic() - begun) * 1000)
                until = int(load._until[min(last, passed)]) if passed else 0
                if until > sent:
                    connection.sendall(load._bytes[sent:until])
                    sent = until
                time.sleep(_TICK_S)  # the rhythm of the load


def _ms(time_: str) -> float:
    """Returns a time as milliseconds since 1970: it may be this number, or a date and time in UTC."""
    if "-" not in time_:
        return float(time_)
    return datetime.fromisoformat(time_.strip('"').rstrip("Z")).replace(tzinfo=timezone.utc).timestamp() * 1000


def measure(load: Load, warm_s: float, contestant: Callable[[int, Path], None], folder: Path) -> dict[str, float]:
    """Lets a contestant, who gets the server's port and a folder for its results, process a load. Returns quantiles of
    the delays in milliseconds, and the number of results, of what was due from `warm_s` on and before the last event.

    Each line of the results has, between commas, when it was due by event time and when it was there by the wall clock,
    and a value.
    """
    server = Server(load)
    contestant(server.port, folder)
    server.close()
    offset = server.began_ms - START_MS
    delays = []
    for file in folder.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            for line in file.read_text().splitlines():
                due, there, _ = line.split(",")
                due_ms = _ms(due)
                if warm_s <= (due_ms - START_MS) / 1000 < load.seconds - 1:
                    delays.append(_ms(there) - due_ms - offset)
    delays.sort()
    found = {name: quantile(delays, q) for name, q in (("p50", 0.5), ("p99", 0.99))} if delays else {}
    return {**found, "results": len(delays)}
