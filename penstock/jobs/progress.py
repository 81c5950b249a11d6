"""Shows the live progress of a job on stderr: as a table that is redrawn on a terminal, and elsewhere as a line now and
then."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

from penstock.runtime.status import JobStatus

_FIRST_S = 1.0  # a job that is over sooner needs no progress
_TERMINAL_S = 0.5
_LINE_S = 2.0

_MARK = "\0end of the table\n"  # written after everything that is still to be shown above the table
_CARRIED_S = 5.0  # how long the end of the table waits for what is before the mark
_SILENT_S = 2.0  # a process is shown as silent when it has not answered for this long


class Progress:
    """A context manager around the wait for a job's end. It asks for a status only when one is due to be shown."""

    def __init__(self, name: str, shown: bool, where: str = "") -> None:
        """`where`: the cluster that the job runs on, which is shown while the job starts."""
        self._name = name
        self._where = where
        self._shown = shown = shown and sys.stderr is not None  # a service may have none
        self._terminal = shown and sys.stderr.isatty()
        self._due = time.monotonic() + _FIRST_S
        self._any = False
        self._live: Any = None
        self._above: _Above | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._above is not None:
            self._above.end()

    def wait_s(self, deadline: float | None) -> float | None:
        """Returns how long to wait for the job's end before calling this again; None: without limit."""
        ends = [deadline] if deadline is not None else []
        if self._shown:
            ends.append(self._due)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def due(self) -> bool:
        """Returns whether a status should be shown now."""
        return self._shown and time.monotonic() >= self._due

    def update(self, status: JobStatus) -> None:
        """Shows a status."""
        self._due = time.monotonic() + (_TERMINAL_S if self._terminal else _LINE_S)
        self._any = True
        starts = status.state == "STARTING"
        if not self._terminal:
            try:
                print(starting(status, self._where) if starts else line(status), file=sys.stderr, flush=True)
            except OSError:  # whoever read the progress has gone, or its disk is full; the job does not depend on it
                self._shown = self._any = False
            return
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._above = _Above()
            # Lines that the program prints go above the table, but only where both go to the same terminal.
            self._live = Live(
                console=Console(file=self._above.terminal),
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=False,
            )
            self._live.start()
            self._above.begin(self._live.console)
        if starts:
            self._live.update(Text(starting(status, self._where)), refresh=True)
            return
        said = "\n".join([*paradigms(status), *filter(None, [trouble(status)])])
        shown = Group(table(status), Text(said)) if said else table(status)
        self._live.update(shown, refresh=True)

    def finish(self, status: JobStatus) -> None:
        """Shows the last status, if any was shown before."""
        if self._any:
            self.update(status)


class _Above:
    """Shows above the live table the lines that code in this process writes to its standard error: Ray's native code,
    loggers that keep an older stream object, and Ray's copies of what workers print. They all write to file descriptor
    2, so this descriptor is replaced by a pipe, and the table itself goes to a copy of the terminal's descriptor."""

    def __init__(self) -> None:
        sys.stderr.flush()
        self._before = os.dup(2)
        # It is closed when nobody can write to the pipe any more. A child process that was started meanwhile has the
        # pipe as its standard error, and may outlive the table.
        self.terminal = os.fdopen(self._before, "w", encoding=sys.stderr.encoding, errors="replace", closefd=False)
        self._console: Any = None

    def begin(self, console: Any) -> None:
        """Shows the lines of this console above the table, from now on."""
        from rich.text import Text

        read, write = os.pipe()
        os.dup2(write, 2)
        self._write = write
        self._console = console
        self._carried = threading.Event()

        def carry() -> None:
            # This thread reads until the process ends, because a child that was started meanwhile has the pipe too.
            with os.fdopen(read, encoding="utf-8", errors="replace") as lines:
                for text in lines:
                    over = text.endswith(_MARK)  # what was written last may be a line without an end
                    text = text.removesuffix(_MARK)  # noqa: PLW2901
                    if not text:
                        pass
                    elif self._console is None:
                        self.terminal.write(text)
                        self.terminal.flush()
                    else:
                        self._console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
                    if over:
                        self._carried.set()
            os.close(self._before)

        threading.Thread(target=carry, name="penstock-stderr", daemon=True).start()

    def end(self) -> None:
        """Makes standard error the terminal again."""
        sys.stderr.flush()
        os.dup2(self._before, 2)
        self._console = None
        os.write(self._write, _MARK.encode())
        os.close(self._write)
        self._carried.wait(_CARRIED_S)


def starting(status: JobStatus, where: str = "") -> str:
    """Returns one line about the thing for which a job waits that has not started yet."""
    on = f" on {where}" if where else ""
    return f"{status.name} starting{on} {status.uptime_s:.0f} s: {status.waits_for or 'its JobMaster'}"


def line(status: JobStatus) -> str:
    """Returns a status in one line."""
    said = trouble(status)
    queued = sum(op.queued for op in status.operators.values())
    return (
        f"{status.name} {status.state.lower()} {status.uptime_s:.0f} s: "
        f"read {status.records_read:,} ({status.read_per_s:,.0f}/s), "
        f"written {status.records_written:,}, queued {queued:,}, "
        f"latency p50 {_number(status.latency_ms.p50, ' ms')} p99 {_number(status.latency_ms.p99, ' ms')}"
        + (f", skipped {status.skipped:,}" if status.skipped else "")
        + "".join(f"; {said}" for said in paradigms(status))
        + (f", {said}" if said else "")
    )


def paradigms(status: JobStatus) -> list[str]:
    """Returns a line for each range of operators that can go to Spark: where it runs, and why."""
    where = {"operation": "in Spark", "record": "as records"}
    return [
        f"{', '.join(one.operators) or 'partial aggregates'} {where[one.paradigm]}: {one.reason or 'starting'}"
        for one in status.dual.ranges
    ]


def trouble(status: JobStatus) -> str:
    """Returns the troubles of a job, for live progress, or an empty text when all went well."""
    parts = [f"{who} has not answered for {seconds:.0f} s" for who, seconds in silent(status)]
    parts += links(status)
    if status.epochs.restarts:
        parts.append(f"restarted {times(status.epochs.restarts)}")
    if status.epochs.last_failure:
        parts.append(f"epochs: {status.epochs.last_failure}")
    if status.waits_for:
        parts.append(f"waits for {status.waits_for}")
    return "; ".join(parts)


def silent(status: JobStatus) -> list[tuple[str, float]]:
    """Returns the processes of a job that do not answer, and the number of seconds for which they have not."""
    found = [("JobMaster", status.master_silent_s)]
    found += [(f"worker {worker.index}", worker.silent_s) for worker in status.workers]
    return [(who, seconds) for who, seconds in found if seconds >= _SILENT_S]


def links(status: JobStatus) -> list[str]:
    """Returns a sentence for each two machines of a job between which a link between workers is silent, although both
    reach the JobMaster."""
    found: dict[frozenset[str], str] = {}
    for one in status.links:
        here, there = one.machines
        found.setdefault(
            frozenset((here, there)),
            f"worker {one.from_} on {here} does not reach worker {one.to} on {there} at {one.at}, "
            f"for {one.silent_s:.0f} s",
        )
    return list(found.values())


def epochs(status: JobStatus) -> str:
    """Returns one line about the epochs in a status, for jobs that have epochs."""
    known = status.epochs
    age = f", {known.age_s:.1f} s ago" if known.age_s is not None else ""
    parts = [
        f"epoch {known.complete} complete{age}" if known.complete else "no epoch complete yet",
        f"restarted {times(known.restarts)}" if known.restarts else "no restarts",
        f"last failure: {known.last_failure or 'none'}",
        f"in {known.store}",
    ]
    return "; ".join(parts)


def processes(status: JobStatus) -> list[str]:
    """Returns a line for each worker, for each machine that is silent or lost or has come back under another id, and
    one for all relays. Nodes are named when there is more than one, and with their ids when they have the same name."""
    placement = status.placement
    hosts = {one.node_id: one.name.removesuffix(f" ({one.node_id[:8]})") for one in placement.machines}
    hosts.update(zip(placement.node_ids, (node.name for node in placement.nodes), strict=False))
    with_name = Counter(hosts.values())
    nodes = {worker.node_id for worker in status.workers} | set(placement.node_ids)

    def name(node_id: str) -> str:
        host = hosts.get(node_id)
        if host is None:
            return node_id[:8]
        return host if with_name[host] == 1 else f"{host} ({node_id[:8]})"

    lines = []
    for worker in status.workers:
        on = f" on {name(worker.node_id)}" if len(nodes) > 1 else ""
        tasks = len(worker.tasks)
        said = f"worker {worker.index}{on}: process {worker.pid}, {tasks} task{'s' * (tasks != 1)}"
        if worker.state != "RUNNING":
            said += "; the process has gone, and another one is started"
        elif worker.silent_s >= _SILENT_S:
            said += f", silent for {worker.silent_s:.0f} s"
        lines.append(said)
    lost = {hosts[machine.node_id] for machine in placement.machines if machine.state == "lost"}
    for machine in placement.machines:
        if machine.state in ("silent", "lost") or hosts[machine.node_id] in lost:
            how = f"silent for {machine.silent_s:.0f} s" if machine.state == "silent" else machine.state
            lines.append(f"machine {machine.name}: {how}")
    lines += links(status)
    if status.relays:
        lines.append("relays: " + ", ".join(f"{name(one.node_id)} {one.state}" for one in status.relays))
    return lines


def times(number: int) -> str:
    """Returns "once", "twice" or "3 times"."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def table(status: JobStatus) -> Any:
    """Returns a status as a rich table, with a row for each operator."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{status.name}  {status.state.lower()}  {status.uptime_s:.0f} s"
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    shown.add_column("operator", no_wrap=True, min_width=8)
    for column in ("tasks", "in", "in/s", "out/s", "queued", "busy", "p50 ms", "p99 ms"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, op in status.operators.items():
        shown.add_row(
            name,
            str(op.parallelism),
            short(op.records_in),
            short(op.in_per_s),
            short(op.out_per_s),
            short(op.queued),
            f"{100 * op.busy:.0f} %",
            _number(op.latency_ms.p50),
            _number(op.latency_ms.p99),
        )
    return shown


def short(value: float) -> str:
    """Returns a count in at most seven characters: 1,234 or 56.7 k or 8.9 M."""
    if value < 9_999.5:
        return f"{value:,.0f}"
    for unit in ("k", "M", "G", "T"):
        value /= 1000
        if value < 999.5 or unit == "T":
            break
    return f"{value:.3g} {unit}"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
