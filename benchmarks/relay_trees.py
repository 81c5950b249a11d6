"""What Penstock's relays carry along multicast trees whose links all have 100 Mbit/s (docs/papers.md: W3, W6).

The relays are alone, without Ray and tasks, in network namespaces of this machine (tests/hosts). Each is a Relay with
its loop and a TcpTransport; the root drives a RootLog with the credit window of a job. A tree can carry the rate of a
link, divided by the children of the node that has most. What sockets alone carry, hosts_links.py shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.common import Bench, median, quantile
from benchmarks.hosts_links import BODY, BURST, LINK, mbits, shape
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.multicast.building import binomial, non_blocking, sequential
from penstock.runtime.multicast.least_change import adapted
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.relaying.wire import FIRST_RELAY
from tests.hosts import spaces
from tests.hosts.hosts import ROOT, Hosts

SMALL = 150
_LIMIT_S = 120.0


class _Programs:
    """The root on the first host and a relay on each other one."""

    def __init__(self, hosts: Hosts, trees: list[Tree], **settings: Any) -> None:
        tree = trees[0]
        self._running: dict[int, subprocess.Popen[str]] = {}
        places = {0: hosts[0]} | {relay: hosts[relay - FIRST_RELAY] for relay in tree.parent}
        for number, host in places.items():
            own = {"part": "relay" if number else "root", "number": number, "host": host.address, **settings}
            self._running[number] = host.start(
                [sys.executable, "-m", "benchmarks.relay_trees_peer", json.dumps(own)],
                directory=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        addresses = {number: self._read(number) for number in self._running}
        for number in (*tree.parent, 0):
            self._write(number, {"addresses": addresses, "trees": [list(one.parent.items()) for one in trees]})

    def _read(self, number: int) -> Any:
        out = self._running[number].stdout
        assert out is not None
        line = out.readline()
        assert line, f"the program of node {number} has ended"
        return json.loads(line)

    def _write(self, number: int, what: object) -> None:
        into = self._running[number].stdin
        assert into is not None
        into.write(json.dumps(what) + "\n")
        into.flush()

    def results(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Returns what the root says, and what each relay says."""
        root = self._read(0)
        relays = {}
        for number in self._running:
            if number:
                self._write(number, "end")
                relays[number] = self._read(number)
        for process in self._running.values():
            process.communicate(timeout=_LIMIT_S)
            assert process.returncode == 0
        return root, relays


def multicast(
    hosts: Hosts, trees: list[Tree], seconds: float, *, size: int, rate: int = 0, switch_s: float = 0.0
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Returns what the root and the relays say after the root has sent for so long. Each relay must have every body.
    The tree changes between the first and the second one each `switch_s` seconds."""
    window = max(1, CREDIT_WINDOW_BYTES // size)
    settings = {"bytes": size, "seconds": seconds, "rate": rate, "window": window, "switch_s": switch_s}
    root, relays = _Programs(hosts, trees, **settings).results()
    for number, found in relays.items():
        assert len(found["arrived"]) == root["sent"], (
            f"relay {number - FIRST_RELAY} has {len(found['arrived'])} of {root['sent']} bodies"
        )
    return root, relays


def _trees(bench: Bench, count: int) -> None:
    seconds = bench.pick(4.0, 0.5)
    relays = range(FIRST_RELAY + 1, FIRST_RELAY + count + 1)
    trees: dict[str, Tree] = {
        "sequential": sequential(0, relays),
        "binomial": binomial(0, relays),
        "d*=2": non_blocking(0, relays, 2),
        "d*=1": non_blocking(0, relays, 1),
    }
    ideal = {label: LINK / 1e6 / tree.out_degree for label, tree in trees.items()}
    rates = {label: int(at_most * 1e6 / 2 / (BODY * 8)) for label, at_most in ideal.items()}
    with Hosts(count + 1, one_clock=True) as hosts:
        shape(hosts, LINK, BURST)

        def slowest(tree: Tree) -> float:
            return min(mbits(found, seconds) for found in multicast(hosts, [tree], seconds, size=BODY)[1].values())

        def last_ms(label: str, size: int) -> tuple[float, float]:
            found = multicast(hosts, [trees[label]], seconds, size=size, rate=rates[label])[1].values()
            lasts = [max(ages) / 1e6 for ages in zip(*(one["ages"] for one in found), strict=True)]
            late = sorted(lasts[len(lasts) // 4 :])
            return quantile(late, 0.5), quantile(late, 0.99)

        def at_half(size: int) -> dict[str, Callable[[], tuple[float, float]]]:
            return {label: lambda label=label: last_ms(label, size) for label in trees}

        full = bench.take_turns(
            {label: lambda tree=tree: slowest(tree) for label, tree in trees.items()}, unit="Mbit/s"
        )
        halves = {size: bench.take_turns(at_half(size), runs=1) for size in (BODY, SMALL)}
        for label in trees:
            bench.case(
                f"{count} destinations, {label}",
                median(full[label]),
                "Mbit/s at the slowest",
                peer="the links",
                goal=">= 0.85",
                peer_figure=ideal[label],
                config=f"bodies of {BODY} bytes, links of {LINK / 1e6:g} Mbit/s",
                runs=full[label],
            )
            for size, paced in halves.items():
                ((p50, p99),) = paced[label]
                bench.case(
                    f"{count} destinations, {label}, {size} bytes, until the last has it",
                    p50,
                    "ms",
                    config=f"{rates[label]} bodies a second, half of what the tree bears at {BODY} bytes",
                    note=f"p99 {p99:.2f} ms",
                )


def _switches(bench: Bench, count: int, each_way_s: float) -> None:
    """Trees that switch every second. The pause of a relay is by how much the first bodies after an announcement are
    older than bodies usually are, in the old tree or the new one."""
    relays = range(FIRST_RELAY + 1, FIRST_RELAY + count + 1)
    limits = bench.pick((2, 3), (1, 2))
    low = non_blocking(0, relays, limits[0])
    trees = [low, adapted(low, list(relays), limits[1])]
    rate = int(LINK / max(tree.out_degree for tree in trees) / 2 / (BODY * 8))
    seconds = bench.pick(20.0, 2.0)
    pauses: dict[bool, list[float]] = {True: [], False: []}
    took: list[float] = []
    with Hosts(count + 1, one_clock=True) as hosts:
        shape(hosts, LINK, BURST)
        if each_way_s:
            for host in hosts:
                host.link.delay(each_way_s / 2)  # a frame passes two links
        root, found = multicast(hosts, trees, seconds, size=BODY, rate=rate, switch_s=bench.pick(1.0, 0.3))
        ends = [0, *(switch["sent"] for switch in root["switches"]), root["sent"]]
        for begin, switch, end in zip(ends, root["switches"], ends[2:], strict=False):
            first = switch["sent"]
            for number, relay in found.items():
                ages = relay["ages"]
                if first + 10 < end:
                    usual = max(median(ages[begin:first]), median(ages[first + 5 : end]))
                    pauses[number in switch["moved"]].append(max(0.0, max(ages[first : first + 5]) - usual) / 1e6)
            if "took_ns" in switch:
                took.append(switch["took_ns"] / 1e6)
    round_trip_ms = 2 * each_way_s * 1000
    for moved, who in ((True, "that get another parent"), (False, "that keep their parent")):
        late = sorted(pauses[moved])
        if late:
            bench.case(
                f"{count} destinations, a switch every second, {each_way_s * 1000:g} ms each way, relays {who}",
                quantile(late, 0.99),
                "ms longer, p99",
                goal=f"< {3 * round_trip_ms + 5:g}",
                config=f"d*={limits[0]} and {limits[1]}, {rate} bodies of {BODY} bytes a second",
                note=f"p50 {quantile(late, 0.5):.2f} ms, of {len(took)} switches; a switch takes {median(took):.1f} ms",
            )


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        bench.say(f"{bench.name} is left out: {reason}")
        return
    for count in bench.pick((7, 15), (3,)):
        _trees(bench, count)
        for each_way_s in (0.0, 0.01):
            _switches(bench, count, each_way_s)
