"""What goes to one worker each, straight from worker to worker beside the way through the relays of both hosts
(docs/papers.md: W2).

The sources are in one network namespace (tests/namespaces), and as many sinks in another. The relays are minimal:
they read no more of a message than for whom it is, and put what goes to one host into one message. A relay of
the product would do more. Sources that themselves put up to 16 messages to a sink into one are shown beside, because a
relay gains by sending together, which needs no relay. What is counted is the processor time of all processes on both
hosts, and how old a message is when it comes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.common import Bench, Skipped, WrongResult, median, quantile
from benchmarks.relay_keyed_peer import RELAY_IN, RELAY_OUT, SINKS
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Host, Hosts

#: Bytes of a message: a record alone, a small batch, and two batches of usual sizes.
SIZES = (100, 1024, 8 * 1024, 64 * 1024)
RECORD = 100
FORMS = ("straight", "together", "relays")
_PACED = 1000  # messages a second of all sources
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Found:
    """Messages a second and processor time of a message, and its age in ms."""

    rate: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


class _Programs:
    """The programs of one run. They answer when they are connected."""

    def __init__(self, hosts: Hosts, form: str, workers: int, **settings: Any) -> None:
        self._running: dict[int, subprocess.Popen[str]] = {}
        places: dict[int, Host] = dict.fromkeys(range(workers), hosts[0])
        places |= {SINKS + number: hosts[1] for number in range(workers)}
        if form == "relays":
            places |= {RELAY_OUT: hosts[0], RELAY_IN: hosts[1]}
        for number, host in places.items():
            own = {"number": number, "host": host.address, "workers": workers, "form": form, **settings}
            self._running[number] = host.start(
                [sys.executable, "-m", "benchmarks.relay_keyed_peer", json.dumps(own)],
                directory=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        addresses = {number: self._read(number) for number in places}
        for number in places:
            self._write(number, json.dumps(addresses))
        for number in places:
            assert self._read(number) == "connected"

    def _read(self, number: int) -> Any:
        out = self._running[number].stdout
        assert out is not None
        line = out.readline()
        assert line, f"program {number} has ended"
        return json.loads(line)

    def _write(self, number: int, line: str) -> None:
        into = self._running[number].stdin
        assert into is not None
        into.write(line + "\n")
        into.flush()

    def results(self) -> dict[int, Any]:
        """Begins, and returns what each program says at the end."""
        for number in sorted(self._running, reverse=True):  # the sources are the last ones
            self._write(number, "begin")
        found = {number: self._read(number) for number in self._running if number < RELAY_OUT}
        for number in self._running:
            if number >= RELAY_OUT:
                self._write(number, "end")
                found[number] = self._read(number)
        for number, process in self._running.items():
            self._write(number, "close")
            process.communicate(timeout=_LIMIT_S)
            assert process.returncode == 0
        return found


def measure(hosts: Hosts, form: str, workers: int, size: int, seconds: float, rate: int) -> Found:
    """Sends for so long, `rate` messages a second from all sources together, or as many as they can."""
    settings = {"bytes": size, "seconds": seconds, "rate": rate // workers}
    found = _Programs(hosts, form, workers, **settings).results()
    sent = sum(one.get("sent", 0) for one in found.values())
    sinks = [one for number, one in found.items() if SINKS <= number < RELAY_OUT]
    arrived = sum(one["arrived"] for one in sinks)
    if arrived != sent:
        raise WrongResult(f"{form}: {arrived} of {sent} messages have come")
    took_s = (max(one["last"] for one in sinks) - min(one["first"] for one in sinks)) / 1e9
    ages = sorted(age / 1e6 for one in sinks for age in one["ages"][len(one["ages"]) // 4 :])
    cpu_s = sum(one["cpu_s"] for one in found.values())
    return Found(arrived / took_s, cpu_s / arrived * 1e6, quantile(ages, 0.5), quantile(ages, 0.99))


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        raise Skipped(reason)
    seconds = bench.pick(2.0, 0.3)
    with Hosts(2, one_clock=True) as hosts:
        for workers in bench.pick((2, 4), (2,)):
            for size in SIZES:
                full = bench.take_turns(
                    {form: partial(measure, hosts, form, workers, size, seconds, 0) for form in FORMS}
                )
                paced = bench.take_turns(
                    {form: partial(measure, hosts, form, workers, size, seconds, _PACED) for form in FORMS}
                )
                records = max(1, size // RECORD)
                where = f"{workers} workers a host, messages of {size:,} bytes"
                for what, unit, runs, name, times in (
                    ("throughput", "records/s", full, "rate", records),
                    ("processor time of a record at full load", "us", full, "cpu_us", 1 / records),
                    (f"latency p50 at {_PACED:,} messages/s", "ms", paced, "p50_ms", 1.0),
                    (f"latency p99 at {_PACED:,} messages/s", "ms", paced, "p99_ms", 1.0),
                    (f"processor time of a message at {_PACED:,}/s", "us", paced, "cpu_us", 1.0),
                ):
                    values = {form: [getattr(one, name) * times for one in runs[form]] for form in FORMS}
                    for form, label in (("relays", "through relays"), ("together", "straight, 16 in a message")):
                        bench.case(
                            f"{what}, {where}, {label}",
                            median(values[form]),
                            unit,
                            peer="straight",
                            peer_figure=median(values["straight"]),
                            config=f"records of {RECORD} bytes",
                            runs=values[form],
                            peer_runs=values["straight"],
                        )
