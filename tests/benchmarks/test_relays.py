"""The benchmarks of relays: their programs run, here on one host, and what is read out of their answers is right."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rate_steps, relay_keyed, relay_trees
from benchmarks.hosts_links import BODY
from benchmarks.rate_steps import Story
from benchmarks.relay_trees import Pauses, pauses
from penstock.runtime.relaying.wire import FIRST_RELAY


class Here:
    """Stands for a host, at an address of this machine."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.address = f"127.0.0.{1 + number}"

    def start(self, command: list[str], directory: Path, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=directory, text=True, **options)


def hosts(count: int) -> Any:
    return [Here(number) for number in range(count)]


def test_a_root_sends_along_trees_that_switch() -> None:
    root, relays = relay_trees.multicast(hosts(4), [(0.2, 50), (0.3, 200)], [1, 2], size=1000, switch_s=0.1)
    assert root["sent"] == 10 + 60
    assert all(len(found["arrived"]) == len(found["ages"]) == 70 for found in relays.values())
    assert len(root["switches"]) >= 2
    for switch in root["switches"]:
        assert switch["moved"]
        assert set(switch["moved"]) <= set(switch["led"]) <= set(relays)
    assert {switch["out_degree"] for switch in root["switches"]} == {1, 2}
    assert root["samples"]


def test_a_tree_of_one_layer() -> None:
    root, relays = relay_trees.multicast(hosts(4), [(0.1, 0)], [3], size=1000, one_layer=True)
    assert root["samples"][0]["out_degree"] == 3
    assert not any(found["forwarded"] for found in relays.values())


def test_a_root_has_other_work_for_each_body() -> None:
    busy, _ = relay_trees.multicast(hosts(4), [(0.2, 100)], [1], size=1000, other_us=5_000.0)
    assert busy["cpu_s"] >= 20 * 0.005


def test_what_came_late_counts_for_no_tree() -> None:
    root = {"started_ns": 1_000_000_000}
    arrived = [[1_500_000_000, 2_200_000_000, 2_900_000_000, 3_100_000_000], [2_100_000_000, 3_500_000_000]]
    relays = {number: {"arrived": found} for number, found in enumerate(arrived, FIRST_RELAY + 1)}
    assert relay_trees.late_rate(root, relays, 1.0, 2.0) == 1.0, "of the relay with the fewest"


@pytest.mark.parametrize("form", ["together", "relays"])
def test_keyed_messages_arrive(form: str) -> None:
    found = relay_keyed.measure(hosts(2), form, 1, 300, 0.1, 0)
    assert found.rate > 0
    assert found.cpu_us > 0


def test_pauses_are_what_bodies_are_later_than_usual() -> None:
    ages = [[1_000_000] * 90 for _ in range(3)]
    ages[0][32] = 5_000_000  # after the first switch
    ages[1][45] = 8_000_000  # between the two
    ages[2][61] = 3_000_000  # after the second
    one, two, three = (FIRST_RELAY + number for number in (1, 2, 3))
    switches = [
        {"sent": 30, "moved": [one], "led": [one, three], "took_ns": 4_000_000},
        {"sent": 60, "moved": [two], "led": [two]},
    ]
    relays = {number: {"ages": age} for number, age in zip((one, two, three), ages, strict=True)}
    found = pauses({"sent": 90, "switches": switches}, relays)
    assert found == Pauses(
        moved=[4.0, 0.0], led=[0.0], kept=[0.0, 0.0, 2.0], between=[0.0, 7.0, 0.0, 0.0, 0.0, 0.0], took=[4.0]
    )


def test_steps_are_scaled_to_the_links() -> None:
    rates = [rate for _, rate in rate_steps.steps_of(1.0)]
    copy_s = BODY * 8 / (0.95 * rate_steps.LINK)
    assert [int(1 / (rate * copy_s)) for rate in rates] == [6, 3, 2, 1, 2]


def test_curves_count_what_is_complete() -> None:
    story = Story([(0.1, 1.0), (0.2, 3.0), (0.3, 5.0), (0.6, 7.0)], [{"at_s": 0.0, "behind": 4}], [], 0.0)
    assert story.within(0.2, 0.6) == [3.0, 5.0]
    assert story.curve("throughput") == [(0.125, 8.0), (0.375, 4.0), (0.625, 4.0)]
    assert story.curve("latency p50") == [(0.125, 2.0), (0.375, 5.0), (0.625, 7.0)]
    assert story.curve("behind") == [(0.0, 4)]
