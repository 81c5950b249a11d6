"""The paper's steps of the rate with real relays: a tree that adjusts itself beside fixed ones (docs/papers.md: W5,
W10).

The hosts, the root and the relays are those of relay_trees.py. The steps are scaled to the links, so that a copy is as
great a part of the time between two bodies as in the paper: five, three, two, one and two children are affordable in
turn, of which seven destinations can use three. Each tree gets the same load, one after the other. Where a tree cannot
carry a step, its source falls behind, and catches up in later steps if it can.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Bench, Skipped, median, quantile
from benchmarks.hosts_links import BODY, BURST, shape
from benchmarks.multicast_model import COPY_OF_STEPS_S, STEPS
from benchmarks.relay_trees import multicast
from penstock.runtime.multicast.reach import binomial_degree
from tests.namespaces import spaces
from tests.namespaces.hosts import Hosts

LINK = 50e6  # the relays of all hosts share this machine's processors, which are not to be what limits a tree
_BODIES = 0.95  # of what a link carries, the rest are the heads of frames
COUNT = 7
ADJUSTING = "self-adjusting"
_SLOT_S = 0.25  # of the curves


@dataclass(frozen=True)
class Story:
    """What has become of the load with one tree. `complete`: when (in seconds from the beginning) the last destination
    had each body, and how old the body was then, in ms, in the order of the bodies. `samples`, `switches`: what the
    root noted."""

    complete: list[tuple[float, float]]
    samples: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    waited_s: float

    def within(self, begin_s: float, end_s: float) -> list[float]:
        """The ages of the bodies that the last destination had in a time."""
        return [age_ms for at_s, age_ms in self.complete if begin_s <= at_s < end_s]

    def curve(self, what: str) -> list[tuple[float, float]]:
        """A curve over the time: "throughput" or "latency" of what is complete, or a sample."""
        if what not in ("throughput", "latency p50"):
            return [(sample["at_s"], sample[what]) for sample in self.samples]
        slots: dict[int, list[float]] = {}
        for at_s, age_ms in self.complete:
            slots.setdefault(int(at_s / _SLOT_S), []).append(age_ms)
        middle_s = {slot: (slot + 0.5) * _SLOT_S for slot in slots}
        if what == "throughput":
            return [(middle_s[slot], len(ages) / _SLOT_S) for slot, ages in slots.items()]
        return [(middle_s[slot], median(ages)) for slot, ages in slots.items()]


def story(hosts: Hosts, profile: list[tuple[float, int]], limit: int | None, *, one_layer: bool = False) -> Story:
    """Sends the load along one tree, or one that adjusts itself."""
    root, relays = multicast(hosts, profile, [limit], size=BODY, one_layer=one_layer)
    arrived = zip(*(found["arrived"] for found in relays.values()), strict=True)
    ages = zip(*(found["ages"] for found in relays.values()), strict=True)
    complete = [((max(at) - root["started_ns"]) / 1e9, max(old) / 1e6) for at, old in zip(arrived, ages, strict=True)]
    return Story(complete, root["samples"], root["switches"], root["waited_ns"] / 1e9)


def steps_of(seconds: float) -> list[tuple[float, int]]:
    """Returns the paper's steps, scaled to the links."""
    copy_s = BODY * 8 / (LINK * _BODIES)
    return [(seconds, round(rate * COPY_OF_STEPS_S / copy_s)) for rate in STEPS]


def _tell(
    bench: Bench, name: str, found: Story, profile: list[tuple[float, int]], best: list[tuple[str, float]]
) -> None:
    begin_s = 0.0
    for number, ((seconds, rate), (quickest, quickest_ms)) in enumerate(zip(profile, best, strict=True), 1):
        step = f"step {number} of {rate}/s, {name}"
        config = f"bodies of {BODY} bytes, links of {LINK / 1e6:g} Mbit/s, {COUNT} destinations"
        done = len(found.within(begin_s, begin_s + seconds)) / seconds
        bench.case(f"throughput, {step}", done, "bodies/s", peer="input", peer_figure=rate, config=config)
        late = sorted(found.within(begin_s + seconds / 2, begin_s + seconds))
        samples = [one for one in found.samples if begin_s <= one["at_s"] < begin_s + seconds]
        if late:
            bench.case(
                f"latency p50 in the second half, {step}",
                quantile(late, 0.5),
                "ms until the last has it",
                peer=f"the quickest fixed tree, {quickest}" if name == ADJUSTING else None,
                peer_figure=quickest_ms if name == ADJUSTING else None,
                config=config,
                note=f"p99 {quantile(late, 0.99):.1f} ms, longest {late[-1]:.1f} ms",
            )
        if samples:
            behind = max(one["behind"] for one in samples)
            note = f"at most {behind} bodies were due and not sent"
            bench.case(f"out-degree at the end, {step}", samples[-1]["out_degree"], "children", note=note)
        begin_s += seconds
    note = "; ".join(
        f"{switch['at_s']:.2f} s: out-degree {switch['out_degree']}, {len(switch['moved'])} nodes with another parent, "
        f"{switch.get('took_ns', 0) / 1e6:.1f} ms"
        for switch in found.switches
    )
    bench.case(f"switches, {name}", len(found.switches), "switches", note=note)
    bench.case(f"the source waits, {name}", found.waited_s, "s")


def run(bench: Bench) -> None:
    """Measures, where hosts can be made."""
    if reason := spaces.why_not():
        raise Skipped(reason)
    seconds = bench.pick(6.0, 0.8)
    profile = steps_of(seconds)
    most = binomial_degree(COUNT)
    with Hosts(COUNT + 1, one_clock=True) as hosts:
        shape(hosts, LINK, BURST)
        stories: dict[str, Story] = {}
        for name, limit in ((ADJUSTING, None), ("sequential", COUNT), ("binomial", most), ("d*=2", 2), ("d*=1", 1)):
            stories[name] = story(hosts, profile, limit, one_layer=limit == COUNT)
            bench.say(f"{bench.name} {name}: {len(stories[name].switches)} switches")
    best = []
    for number in range(len(profile)):
        ages = {
            name: found.within((number + 0.5) * seconds, (number + 1) * seconds)
            for name, found in stories.items()
            if name != ADJUSTING
        }
        middles = {name: median(late) for name, late in ages.items() if late}
        quickest = min(middles, key=lambda name: middles[name])
        best.append((quickest, middles[quickest]))
    for name, found in stories.items():
        _tell(bench, name, found, profile, best)
    end_s = seconds * len(profile)
    marks = {f"{number}: {rate}/s": (number - 1) * seconds for number, (_, rate) in enumerate(profile, 1)}
    for what, unit, log in (
        ("out_degree", "children of the node that has most", False),
        ("throughput", "bodies/s at the last destination", False),
        ("latency p50", "ms until the last destination has a body", True),
        ("behind", "bodies that are due and not sent", False),
    ):
        bench.plot(
            f"rate_steps-{what.replace(' ', '-')}.png",
            f"{what.replace('_', '-')}, {COUNT} destinations, links of {LINK / 1e6:g} Mbit/s",
            {name: [point for point in found.curve(what) if point[0] <= end_s] for name, found in stories.items()},
            "s",
            unit,
            log_y=log,
            lines=marks,
        )
    with bench.path("rate_steps-samples.jsonl").open("w") as file:
        for name, found in stories.items():
            for sample in [*found.samples, *found.switches]:
                file.write(json.dumps({"tree": name, **sample}) + "\n")
