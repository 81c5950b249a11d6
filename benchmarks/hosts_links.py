"""What the links between hosts of the tests carry for plain programs: sockets alone, and multicast trees of plain
forwarders with every link at 100 Mbit/s. What Penstock sends over such links is judged by these figures.

The hosts are network namespaces of this machine (tests/namespaces). A plain forwarder takes a body and sends it to its
children one after the other, by blocking calls: it has no queue but the kernel's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.common import Bench, Skipped, median, quantile
from penstock.runtime.multicast.building import binomial, non_blocking, sequential
from penstock.runtime.multicast.tree import Tree
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Host, Hosts

BODY = 16 * 1024
LINK = 100e6
PACED = 40  # bodies a second, which every tree can carry
BURST = 4096  # or a body would pass a link that had been idle as if there were no rate
_LIMIT_S = 120.0


class _Program:
    """A links_peer on a host."""

    def __init__(self, host: Host, **settings: Any) -> None:
        self.process = host.start(
            [sys.executable, "-m", "benchmarks.links_peer", json.dumps(settings)],
            directory=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == "ready\n", f"a program on {host.name} says {said!r}"

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("begin\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=_LIMIT_S)
        assert self.process.returncode == 0
        found: dict[str, Any] = json.loads(out)
        return found


def multicast(hosts: Hosts, tree: Tree, seconds: float, rate: int = 0) -> tuple[dict[str, Any], dict[int, Any]]:
    """What the root and each destination of a tree say after it has sent for so long."""
    programs = {}
    for node in reversed(list(tree.parent)):  # children listen before their parents connect
        programs[node] = _Program(
            hosts[node], part="forward", bytes=BODY, children=[hosts[child].address for child in tree.of(node)]
        )
    children = [hosts[child].address for child in tree.of(tree.root)]
    root = _Program(hosts[tree.root], part="send", bytes=BODY, rate=rate, seconds=seconds, children=children)
    root.begin()
    sent = root.result()
    arrived = {node: program.result() for node, program in programs.items()}
    for node, found in arrived.items():
        assert len(found["arrived"]) == sent["sent"], (
            f"node {node} has {len(found['arrived'])} of {sent['sent']} bodies"
        )
    return sent, arrived


def mbits(found: dict[str, Any], seconds: float) -> float:
    """The rate at which a destination got bodies, once the queues had filled."""
    first = found["arrived"][0]
    steady = [at for at in found["arrived"] if first + 0.3e9 * seconds <= at <= first + 1e9 * seconds]
    return (len(steady) - 1) * BODY * 8 / 1e6 / ((steady[-1] - steady[0]) / 1e9)


def socket_pair(hosts: Hosts, seconds: float) -> tuple[float, str]:
    """Mbit/s of one connection, and what it costs."""
    sent, arrived = multicast(hosts, sequential(0, [1]), seconds)
    cpu_s = sent["cpu_s"] + arrived[1]["cpu_s"]
    return mbits(arrived[1], seconds), f"{cpu_s / (sent['sent'] * BODY / 1e9):.2f} CPU s a GB in both programs"


def round_trips(hosts: Hosts, count: int, rate: int = 0) -> list[float]:
    """Microseconds of a byte there and back, in order; `rate` times a second, or one after the other."""
    answering = _Program(hosts[1], part="answer")
    asking = _Program(hosts[0], part="ask", count=count, rate=rate, children=[hosts[1].address])
    asking.begin()
    took = asking.result()["took"]
    answering.result()
    return sorted(at / 1000 for at in took[count // 10 :])


def shape(hosts: Hosts, bits_s: float | None, burst_bytes: int | None = None) -> None:
    """All links have this rate, both ways."""
    for host in hosts:
        host.link.rate(bits_s, burst_bytes=burst_bytes)


def _pair(bench: Bench) -> None:
    seconds = bench.pick(3.0, 0.5)
    with Hosts(2, one_clock=True) as hosts:
        for each_way_s in (0.0, 0.005):
            hosts[1].link.delay(each_way_s)
            runs = [
                round_trips(hosts, bench.pick(2000, 100) // (1 if not each_way_s else 10)) for _ in range(bench.runs)
            ]
            bench.case(
                f"round trip of a byte, {each_way_s * 1000:g} ms each way",
                median(quantile(run, 0.5) for run in runs),
                "us",
                note=f"p99 {median(quantile(run, 0.99) for run in runs):.0f} us",
                runs=[quantile(run, 0.5) for run in runs],
            )
            for label, bits_s in (("unshaped", None), ("1 Gbit/s", 1e9), ("100 Mbit/s", 100e6)):
                shape(hosts, bits_s)
                figures = [socket_pair(hosts, seconds) for _ in range(bench.runs)]
                bench.case(
                    f"one connection, {label}, {each_way_s * 1000:g} ms each way",
                    median(figure for figure, _ in figures),
                    "Mbit/s",
                    peer="the link" if bits_s else None,
                    peer_figure=bits_s / 1e6 if bits_s else None,
                    note=figures[-1][1],
                    runs=[figure for figure, _ in figures],
                )
            shape(hosts, None)


def _trees(bench: Bench, count: int) -> None:
    seconds = bench.pick(4.0, 0.5)
    destinations = range(1, count + 1)
    trees: dict[str, Callable[[], Tree]] = {
        "sequential": lambda: sequential(0, destinations),
        "binomial": lambda: binomial(0, destinations),
        "d*=2": lambda: non_blocking(0, destinations, 2),
        "d*=1": lambda: non_blocking(0, destinations, 1),
    }
    with Hosts(count + 1, one_clock=True) as hosts:
        shape(hosts, LINK, BURST)

        def slowest(tree: Tree) -> float:
            _, arrived = multicast(hosts, tree, seconds)
            return min(mbits(found, seconds) for found in arrived.values())

        def last_ms(tree: Tree) -> tuple[float, float]:
            _, arrived = multicast(hosts, tree, seconds, PACED)
            lasts = [max(ages) / 1e6 for ages in zip(*(found["ages"] for found in arrived.values()), strict=True)]
            late = sorted(lasts[len(lasts) // 4 :])
            return quantile(late, 0.5), quantile(late, 0.99)

        full = bench.take_turns(
            {label: lambda make=make: slowest(make()) for label, make in trees.items()}, unit="Mbit/s"
        )
        paced = bench.take_turns({label: lambda make=make: last_ms(make()) for label, make in trees.items()}, runs=1)
        for label, make in trees.items():
            ideal = LINK / 1e6 / make().out_degree
            bench.case(
                f"{count} destinations, {label}",
                median(full[label]),
                "Mbit/s at the slowest",
                peer="the links",
                peer_figure=ideal,
                config=f"bodies of {BODY} bytes, links of {LINK / 1e6:g} Mbit/s",
                runs=full[label],
            )
            ((p50, p99),) = paced[label]
            bench.case(
                f"{count} destinations, {label}, until the last has it",
                p50,
                "ms",
                config=f"{PACED} bodies of {BODY} bytes a second",
                note=f"p99 {p99:.2f} ms",
            )


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        raise Skipped(reason)
    _pair(bench)
    for count in bench.pick((7, 15), (3,)):
        _trees(bench, count)
