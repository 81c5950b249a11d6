"""Live progress of a job on stderr: a table that is redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

_FIRST_S = 1.0  # a job that is over sooner needs no progress
_TERMINAL_S = 0.5
_LINE_S = 2.0


class Progress:
    """Use as a context manager around the waiting; asks for a status only when one is due to be shown."""

    def __init__(self, name: str, shown: bool) -> None:
        self._name = name
        self._shown = shown
        self._terminal = shown and sys.stderr.isatty()
        self._due = time.monotonic() + _FIRST_S
        self._any = False
        self._live: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def wait_s(self, deadline: float | None) -> float | None:
        """How long to wait for the job's end before looking here again; None: for ever."""
        ends = [deadline] if deadline is not None else []
        if self._shown:
            ends.append(self._due)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def due(self) -> bool:
        """Whether a status should be shown now."""
        return self._shown and time.monotonic() >= self._due

    def update(self, status: dict[str, Any]) -> None:
        """Show a status."""
        self._due = time.monotonic() + (_TERMINAL_S if self._terminal else _LINE_S)
        self._any = True
        if not self._terminal:
            print(line(status), file=sys.stderr, flush=True)
            return
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            # Lines that the program prints go above the table, but only where both go to the same terminal.
            self._live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
        said = "\n".join([*paradigms(status), *filter(None, [trouble(status)])])
        shown = Group(table(status), Text(said)) if said else table(status)
        self._live.update(shown, refresh=True)

    def finish(self, status: dict[str, Any]) -> None:
        """Show the last status, if any was shown before."""
        if self._any:
            self.update(status)


def line(status: dict[str, Any]) -> str:
    """A status in one line."""
    latency = status.get("latency_ms") or {}
    said = trouble(status)
    queued = sum(op["queued"] for op in status["operators"].values())
    return (
        f"{status['name']} {status['state'].lower()} {status.get('uptime_s', 0.0):.0f} s: "
        f"read {status.get('records_read', 0):,} ({status.get('read_per_s', 0.0):,.0f}/s), "
        f"written {status.get('records_written', 0):,}, queued {queued:,}, "
        f"latency p50 {_ms(latency.get('p50'))} p99 {_ms(latency.get('p99'))}"
        + (f", skipped {status['skipped']:,}" if status.get("skipped") else "")
        + "".join(f"; {said}" for said in paradigms(status))
        + (f", {said}" if said else "")
    )


def paradigms(status: dict[str, Any]) -> list[str]:
    """A line for each range of operators that can go to Spark: where it is, and why."""
    known = status.get("dual")
    if not known:
        return []
    lines = []
    for one in known["ranges"]:
        where = {"operation": "in Spark", "record": "as records"}[one["paradigm"]]
        lines.append(f"{', '.join(one['operators']) or 'partial aggregates'} {where}: {one['reason'] or 'starting'}")
    return lines


def trouble(status: dict[str, Any]) -> str:
    """What a job's epochs have had to bear, for live progress; empty when all went well."""
    known = status.get("epochs") or {}
    parts = []
    if known.get("restarts"):
        parts.append(f"restarted {times(known['restarts'])}")
    if known.get("last_failure"):
        parts.append(f"epochs: {known['last_failure']}")
    return "; ".join(parts)


def epochs(status: dict[str, Any]) -> str:
    """What a status says of epochs, in one line; for jobs that have them."""
    known = status["epochs"]
    age = f", {known['age_s']:.1f} s ago" if known["age_s"] is not None else ""
    parts = [
        f"epoch {known['complete']} complete{age}" if known["complete"] else "no epoch complete yet",
        f"restarted {times(known['restarts'])}" if known["restarts"] else "no restarts",
        f"last failure: {known['last_failure'] or 'none'}",
        f"in {known['store']}",
    ]
    return "; ".join(parts)


def times(number: int) -> str:
    """Once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def table(status: dict[str, Any]) -> Any:
    """A status as a rich table: an operator a row."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{status['name']}  {status['state'].lower()}  {status.get('uptime_s', 0.0):.0f} s"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    shown.add_column("operator", no_wrap=True, min_width=8)
    for column in ("tasks", "in", "in/s", "out/s", "queued", "busy", "p50 ms", "p99 ms"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, op in status["operators"].items():
        shown.add_row(
            name,
            str(op["parallelism"]),
            short(op["records_in"]),
            short(op["in_per_s"]),
            short(op["out_per_s"]),
            short(op["queued"]),
            f"{100 * op['busy']:.0f} %",
            _number(op["latency_ms"]["p50"]),
            _number(op["latency_ms"]["p99"]),
        )
    return shown


def short(value: float) -> str:
    """A count in at most seven characters: 1,234 or 56.7 k or 8.9 M."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.5 or unit == "T":
            break
    return f"{value:.3g} {unit}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
