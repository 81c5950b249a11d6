"""What Penstock's relays carry along multicast trees whose links all have 100 Mbit/s (docs/papers.md: W3, W6).

The relays are alone, without Ray and tasks, in network namespaces (tests/namespaces). Each is a Relay with its loop;
the root is that of a job's worker, with the credit of a job. A tree can carry the rate of a link, divided by
the children of the node that has most. Plain forwarders (hosts_links.py), which have no queue but the kernel's, take
turns with the relays.

A tree that adjusts itself is compared with fixed ones where the links are what limits the root, and where its processor
is, because its thread has other work for each body (docs/papers.md: W5).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.common import Bench, Skipped, WrongResult, median, quantile
from benchmarks.hosts_links import BODY, BURST, LINK, mbits, shape
from benchmarks.hosts_links import multicast as plain_forwarders
from penstock.runtime.exchange.channel import CREDIT_WINDOW_BYTES
from penstock.runtime.multicast.building import non_blocking, sequential
from penstock.runtime.multicast.reach import binomial_degree
from penstock.runtime.multicast.tree import Tree
from penstock.runtime.relaying.wire import FIRST_RELAY
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Hosts

SMALL = 150
_LIMIT_S = 120.0
_ADJUSTED = 7  # destinations of trees that adjust themselves
_FIXED = (1, 2, 3)
_OTHER_US = 500.0
_FIRST = 5  # bodies after a switch among which the pause is looked for


class _Programs:
    """The root on the first host, and a relay on each other one."""

    def __init__(self, hosts: Hosts, **settings: Any) -> None:
        self._running: dict[int, subprocess.Popen[str]] = {}
        for host in hosts:
            number = FIRST_RELAY + host.number if host.number else 0
            own = {"number": number, "host": host.address, **settings}
            self._running[number] = host.start(
                [sys.executable, "-m", "benchmarks.relay_trees_peer", json.dumps(own)],
                directory=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        addresses = {number: self._read(number) for number in self._running}
        for number in sorted(self._running, reverse=True):  # the root is the last one
            self._write(number, {"addresses": addresses})

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
    hosts: Hosts,
    profile: Sequence[tuple[float, int]],
    limits: Sequence[int | None],
    *,
    size: int,
    one_layer: bool = False,
    switch_s: float = 0.0,
    other_us: float = 0.0,
    window: int = CREDIT_WINDOW_BYTES,
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Returns what the root and the relays say after the root has sent by a profile of (seconds, bodies a second; 0: as
    many as it can). Each relay's worker must have every body. `limits`: of the tree, the next one each `switch_s`
    seconds; None: it adjusts itself. `one_layer`: the tree is sequential, which the product never makes. `other_us`:
    the processor time of the root's other work for each body."""
    settings = {"bytes": size, "profile": profile, "limits": limits, "switch_s": switch_s, "other_us": other_us}
    root, relays = _Programs(hosts, **settings, one_layer=one_layer, window=window).results()
    for number, found in relays.items():
        if len(found["arrived"]) != root["sent"]:
            raise WrongResult(f"relay {number - FIRST_RELAY} has {len(found['arrived'])} of {root['sent']} bodies")
    return root, relays


def _trees(bench: Bench, count: int) -> None:
    seconds = bench.pick(4.0, 0.5)
    destinations = range(1, count + 1)
    limits = {"sequential": count, "binomial": binomial_degree(count), "d*=2": 2, "d*=1": 1}
    plain_trees = {
        label: sequential(0, destinations) if limit == count else non_blocking(0, destinations, limit)
        for label, limit in limits.items()
    }
    ideal = {label: LINK / 1e6 / limit for label, limit in limits.items()}
    rates = {label: int(at_most * 1e6 / 2 / (BODY * 8)) for label, at_most in ideal.items()}
    with Hosts(count + 1, one_clock=True) as hosts:
        shape(hosts, LINK, BURST)

        def penstock(label: str, size: int = BODY, rate: int = 0) -> dict[int, Any]:
            profile, limit = [(seconds, rate)], limits[label]
            return multicast(hosts, profile, [limit], size=size, one_layer=limit == count)[1]

        def slowest(found: dict[int, Any]) -> float:
            return min(mbits(one, seconds) for one in found.values())

        def last_ms(label: str, size: int) -> tuple[float, float]:
            found = penstock(label, size, rates[label]).values()
            lasts = [max(ages) / 1e6 for ages in zip(*(one["ages"] for one in found), strict=True)]
            late = sorted(lasts[len(lasts) // 4 :])
            return quantile(late, 0.5), quantile(late, 0.99)

        def at_half(size: int) -> dict[str, Callable[[], tuple[float, float]]]:
            return {label: partial(last_ms, label, size) for label in limits}

        def full_load(label: str) -> float:
            return slowest(penstock(label))

        def plain_load(tree: Tree) -> float:
            return slowest(plain_forwarders(hosts, tree, seconds)[1])

        contestants: dict[str, Callable[[], float]] = {}
        for label, tree in plain_trees.items():
            contestants[label] = partial(full_load, label)
            contestants[f"{label}, plain"] = partial(plain_load, tree)
        full = bench.take_turns(contestants, unit="Mbit/s")
        halves = {size: bench.take_turns(at_half(size), runs=1) for size in bench.pick((BODY, SMALL), (BODY,))}
        for label in limits:
            config = f"bodies of {BODY} bytes, links of {LINK / 1e6:g} Mbit/s"
            plain = full[f"{label}, plain"]
            for peer, goal, figure, runs in (
                ("the links", ">= 0.85", ideal[label], []),
                ("plain forwarders", None, median(plain), plain),
            ):
                bench.case(
                    f"{count} destinations, {label}",
                    median(full[label]),
                    "Mbit/s at the slowest",
                    peer=peer,
                    goal=goal,
                    peer_figure=figure,
                    config=config,
                    runs=full[label],
                    peer_runs=runs,
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


@dataclass
class Pauses:
    """By how many ms the first bodies after a switch were older than bodies usually are, in the old tree or the new
    one: at relays that got another parent, at those of which only a relay on their way did, and at those whose way has
    stayed. `between`: the same at moments between two switches, at all relays. That is what the machine does."""

    moved: list[float] = field(default_factory=list)
    led: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)  # from the beginning of a switch to its end


def pauses(root: dict[str, Any], relays: dict[int, Any]) -> Pauses:
    """Reads the pauses out of what the root and the relays of a run say."""
    found = Pauses()
    switches = root["switches"]
    ends = [0, *(switch["sent"] for switch in switches), root["sent"]]
    for begin, switch, end in zip(ends, switches, ends[2:], strict=False):
        first, middle = switch["sent"], (switch["sent"] + end) // 2
        if min(first - begin, (end - first) // 2) < 2 * _FIRST:
            continue
        for number, relay in relays.items():
            group = found.moved if number in switch["moved"] else found.led if number in switch["led"] else found.kept
            group.append(_longer_ms(relay["ages"], begin, first, end))
            found.between.append(_longer_ms(relay["ages"], first + _FIRST, middle, end))
        if "took_ns" in switch:
            found.took.append(switch["took_ns"] / 1e6)
    return found


def _longer_ms(ages: list[int], begin: int, at: int, end: int) -> float:
    """By how much the first bodies from `at` on are older than those before and after. What was late before, as when a
    frame was lost and TCP waits for 200 ms, is no pause."""
    usual = max(median(ages[begin:at]), median(ages[at + _FIRST : end]), *ages[at - _FIRST : at])
    return max(0.0, max(ages[at : at + _FIRST]) - usual) / 1e6


def _switches(bench: Bench, count: int, each_way_s: float) -> None:
    """Trees that switch every second."""
    limits = bench.pick((2, 3), (1, 2))
    rate = int(LINK / max(limits) / 2 / (BODY * 8))
    seconds = bench.pick(30.0, 2.0)
    with Hosts(count + 1, one_clock=True) as hosts:
        shape(hosts, LINK, BURST)
        if each_way_s:
            for host in hosts:
                host.link.delay(each_way_s / 2)  # a frame passes two links
        found = pauses(*multicast(hosts, [(seconds, rate)], limits, size=BODY, switch_s=bench.pick(1.0, 0.3)))
    bound_ms = 3 * 2 * each_way_s * 1000 + 5
    for who, late in (
        ("that get another parent", found.moved),
        ("behind one that gets another parent", found.led),
        ("that keep their way", found.kept),
        ("between two switches", found.between),
    ):
        if late:
            above = sum(one > bound_ms for one in late)
            bench.case(
                f"{count} destinations, a switch every second, {each_way_s * 1000:g} ms each way, relays {who}",
                quantile(sorted(late), 0.99),
                "ms longer, p99",
                goal=f"< {bound_ms:g}",
                config=f"d*={limits[0]} and {limits[1]}, {rate} bodies of {BODY} bytes a second",
                note=f"p50 {quantile(sorted(late), 0.5):.2f} ms, {above} of {len(late)} above the goal; "
                f"{len(found.took)} switches, which take {median(found.took):.1f} ms",
                runs=late,
            )


def late_rate(root: dict[str, Any], relays: dict[int, Any], from_s: float, until_s: float) -> float:
    """The bodies a second that came to the relay with the fewest, in a time that counts from the first body."""
    begin, end = (root["started_ns"] + at_s * 1e9 for at_s in (from_s, until_s))
    return min(sum(begin <= at < end for at in found["arrived"]) for found in relays.values()) / (until_s - from_s)


def _adjusting(bench: Bench, what: str, other_us: float, link: float | None) -> None:
    """A tree that adjusts itself beside fixed ones, at parts of what the best one carries. `other_us`: the root's other
    work for each body; `link`: the bits a second of the links, which are as quick as the machine without it."""
    seconds = bench.pick(10.0, 0.6)
    settled_s = bench.pick(4.0, 0.2)
    with Hosts(_ADJUSTED + 1, one_clock=True) as hosts:
        if link is not None:
            shape(hosts, link, BURST)

        def carried(limit: int | None, rate: int = 0, from_s: float = settled_s) -> tuple[float, list[Any]]:
            profile = [(seconds if rate else seconds - settled_s, rate)]
            root, relays = multicast(hosts, profile, [limit], size=BODY, other_us=other_us)
            return late_rate(root, relays, from_s, profile[0][0]), root["switches"]

        most = {limit: carried(limit, from_s=0.3 * (seconds - settled_s))[0] for limit in _FIXED}
        for limit, rate in most.items():
            bench.case(f"{what}, d*={limit}, as many as it can", rate, "bodies/s at the slowest")
        for load in bench.pick((0.5, 0.8, 1.0, 1.2), (1.0,)):
            offered = max(1, round(load * max(most.values())))
            fixed = {limit: carried(limit, offered)[0] for limit in _FIXED}
            rate, switches = carried(None, offered)
            best = max(fixed, key=lambda limit: fixed[limit])
            told = [f"{switch['out_degree']} children from {switch['at_s']:.1f} s on" for switch in switches]
            bench.case(
                f"{what}, self-adjusting, {load:g} of the most",
                rate,
                "bodies/s at the slowest",
                peer=f"the best of fixed trees, d*={best}",
                peer_figure=fixed[best],
                goal=">= 0.9",
                config=f"{offered} bodies of {BODY} bytes a second, {_ADJUSTED} destinations, after {settled_s:g} s",
                note="; ".join([*told, *(f"d*={limit}: {one:.0f}/s" for limit, one in fixed.items())]),
            )
            bench.case(f"{what}, {load:g} of the most, switches", len(switches), "switches", goal="<= 2")


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        raise Skipped(reason)
    for count in bench.pick((7, 15), (3,)):
        _trees(bench, count)
        for each_way_s in (0.0, 0.01):
            _switches(bench, count, each_way_s)
    _adjusting(bench, f"a source with {_OTHER_US:g} us of other work", _OTHER_US, None)
    _adjusting(bench, f"links of {LINK / 1e6:g} Mbit/s", 0.0, LINK)
