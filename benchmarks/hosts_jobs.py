"""Jobs over two hosts beside the same jobs on one: WordCount's throughput and CPU time, Bytewax over the same link, and
how long a record is under way. Before them, what the transport alone carries. See README.md. The hosts are network
namespaces of this machine (tests/namespaces)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import pacing, stamps, text
from benchmarks.common import Bench, Skipped, WrongResult, median, quantile
from benchmarks.hosts_links import round_trips, shape, socket_pair
from benchmarks.throughput import Input
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Hosts
from tests.namespaces.ray_cluster import RayCluster

RATE = 1_000
RECORD_BYTES = 100
_PORT = 9200
_TRANSPORT_BYTES = (16 * 1024, 256 * 1024)


class _Place:
    """Two hosts with Ray, and programs on them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._env = RayCluster(hosts, cpus=8).environment

    def job(self, **settings: Any) -> None:
        self._start(0, "benchmarks.hosts_peer", settings)()

    def bytewax(self, settings: dict[str, Any]) -> None:
        addresses = [f"{host.address}:{_PORT}" for host in self.hosts]
        both = [
            self._start(number, "benchmarks.bytewax_peer", {**settings, "addresses": addresses, "process": number})
            for number in range(2)
        ]
        for end in both:
            end()

    def _start(self, host: int, module: str, settings: dict[str, Any]) -> Any:
        program = self.hosts[host].start(
            [sys.executable, "-m", module, json.dumps(settings)], env=self._env, directory=ROOT
        )

        def end() -> None:
            code = program.wait(600)
            if code:
                raise RuntimeError(f"{module} on host {host} ended with {code}")

        return end


def _transport(bench: Bench, place: _Place) -> None:
    """The transport alone, without Ray and tasks, beside a bare socket pair that sends bodies of 16 KiB."""
    seconds = bench.pick(3.0, 0.5)
    hosts = place.hosts

    def alone(size: int) -> float:
        programs = [
            hosts[number].start(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.transport_peer",
                    json.dumps({"number": number, "host": hosts[number].address, "bytes": size, "seconds": seconds}),
                ],
                directory=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(2)
        ]
        addresses = [_line(program) for program in programs]
        for program, other in zip(programs, reversed(addresses), strict=True):
            assert program.stdin is not None
            program.stdin.write(other)
            program.stdin.flush()
        sent, received = (json.loads(program.communicate(timeout=120)[0]) for program in programs)
        if sent["sent"] != received["received"]:
            raise WrongResult(f"{received['received']} of {sent['sent']} messages have come")
        return float(received["bytes_s"] * 8 / 1e6)

    for each_way_s in (0.0, 0.005):
        hosts[1].link.delay(each_way_s)
        for bits_s in (None, 1e9) if not each_way_s else (1e9,):
            shape(hosts, bits_s)
            contestants: dict[str, Callable[[], float]] = {
                f"{size:,} bytes": functools.partial(alone, size) for size in _TRANSPORT_BYTES
            }
            bare = "a bare socket pair"
            if bits_s is None:
                contestants[bare] = lambda: socket_pair(hosts, seconds)[0]
            found = bench.take_turns(contestants, unit="Mbit/s")
            for label in contestants.keys() - {bare}:
                bench.case(
                    f"the transport alone, messages of {label}, {each_way_s * 1000:g} ms each way, "
                    f"{'unshaped' if bits_s is None else '1 Gbit/s'}",
                    median(found[label]),
                    "Mbit/s",
                    peer=bare if bits_s is None else "the link",
                    peer_figure=median(found[bare]) if bits_s is None else bits_s / 1e6,
                    goal=">= 0.5" if bits_s is None else ">= 0.9",
                    runs=found[label],
                    peer_runs=found.get(bare, []),
                )
    hosts[1].link.delay(0)
    shape(hosts, None)


def _line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def _throughput(bench: Bench, place: _Place, folder: Path) -> None:
    lines = text.sentences(bench.pick(1_000_000, 20_000))
    data = Input(folder, text.write_text(folder, lines), len(lines), text.count_words(lines), None)
    settings = {"flow": "wordcount", "folder": str(folder), "paths": data.paths, "out": str(data.out)}

    def measured(who: str) -> tuple[float, float]:
        outcome = stamps.collect(data.out)
        assert data.counts is not None
        outcome.check(data.counts, who)
        return data.lines / outcome.seconds, outcome.cpu_s / data.lines * 1e6

    def penstock(hosts: int) -> tuple[float, float]:
        place.job(**settings, hosts=hosts)
        return measured(f"penstock on {hosts} hosts")

    def bytewax(form: str) -> tuple[float, float]:
        place.bytewax({**settings, "input": form, "count": "final"})
        return measured("bytewax")

    two, one, theirs = "penstock, 2 hosts", "penstock, 1 host", "bytewax, 2 hosts"
    results = bench.take_turns(
        {two: lambda: penstock(2), one: lambda: penstock(1), theirs: lambda: bytewax("batch")},
        unit="sentences/s, us CPU a sentence",
    )
    for peer, goal in ((one, ">= 0.75"), (theirs, ">= 3")):
        bench.case(
            f"WordCount over 2 hosts beside {peer}",
            median(rate for rate, _ in results[two]),
            "sentences/s",
            peer=peer,
            peer_figure=median(rate for rate, _ in results[peer]),
            goal=goal,
            config="2 workers",
            runs=[rate for rate, _ in results[two]],
            peer_runs=[rate for rate, _ in results[peer]],
        )
    bench.case(
        f"CPU time of WordCount over 2 hosts beside {one}",
        median(cpu for _, cpu in results[two]),
        "us a sentence",
        peer=one,
        peer_figure=median(cpu for _, cpu in results[one]),
        goal="<= 1.33",
        config="of both workers, from the first read to the end",
        runs=[cpu for _, cpu in results[two]],
        peer_runs=[cpu for _, cpu in results[one]],
    )


def _latency(bench: Bench, place: _Place, folder: Path) -> None:
    seconds = bench.pick(8.0, 1.0)
    texts = [f"{number:0{RECORD_BYTES}}" for number in range(1000)]
    out, file = folder / "arrived", folder / "texts.txt"
    out.mkdir()
    file.write_text("\n".join(texts) + "\n")
    records = int(RATE * seconds)

    cores = sorted(os.sched_getaffinity(0))

    def use_cores(hosts: int) -> None:
        """On two hosts each has half of the cores. Otherwise the kernel wakes the receiver on the sender's core, where
        the receiver waits until the sender sleeps; that cannot happen between machines."""
        for host in place.hosts if len(cores) > 1 else ():
            host.use_cores(cores[host.number :: 2] if hosts == 2 else cores)

    def p50_us(hosts: int) -> float:
        use_cores(hosts)
        place.job(flow="one_way", hosts=hosts, rate=RATE, records=records, texts=str(file), out=str(out))
        expected = dict.fromkeys(texts[:records], 1)
        return pacing.collect(out, expected, records, f"penstock on {hosts} hosts", seconds / 4)["p50"] * 1000

    def round_trip_us() -> float:
        use_cores(2)
        return quantile(round_trips(place.hosts, bench.pick(4000, 100), RATE), 0.5)

    link, ring, bare = "2 hosts", "1 host", "a byte there and back"
    found = bench.take_turns({link: lambda: p50_us(2), ring: lambda: p50_us(1), bare: round_trip_us}, unit="us")
    allowed = median(found[ring]) + 2.5 * median(found[bare]) / 2
    bench.case(
        f"a record of {RECORD_BYTES} bytes at {RATE:,}/s from host to host, p50",
        median(found[link]),
        "us",
        peer="the ring + 2.5 x half a round trip of plain TCP",
        peer_figure=allowed,
        goal="<= 1",
        note=f"the ring {median(found[ring]):.0f} us, the round trip {median(found[bare]):.0f} us",
        runs=found[link],
    )
    place.hosts[1].link.delay(0.005)
    far = [p50_us(2) / 1000 for _ in range(bench.runs)]
    place.hosts[1].link.delay(0)
    bench.case("the same with 5 ms each way on the link, p50", median(far), "ms", goal="<= 6", runs=far)


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        raise Skipped(reason)
    # Not in /dev/shm, of which each host has its own.
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Hosts(2, one_clock=True) as hosts:
        place = _Place(hosts)
        _transport(bench, place)
        _throughput(bench, place, Path(folder))
        _latency(bench, place, Path(folder))
