"""The TCP transport over links that are cut, and not only connections: nothing answers, and nothing says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.namespaces.hosts import Host, Hosts
from tests.namespaces.links import Way
from tests.transport.networks import LIMIT_S


class Program:
    """A worker on a host (tests/transport/on_a_host.py)."""

    def __init__(self, worker: int, host: Host) -> None:
        self._process = host.start(
            [sys.executable, "-m", "tests.transport.on_a_host", str(worker), host.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> Any:
        """The answer to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def connect(self, peer: Program) -> None:
        """Connects to a peer."""
        assert self.ask(peer.address) == "connected"

    def look(self) -> tuple[int, bool]:
        """How many messages have come, and whether they came in order."""
        came, in_order = self.ask("look")
        return came, in_order

    def silent(self) -> float:
        """For how many seconds the peer has not answered; 0: it answers."""
        return float(sum(self.ask("silent").values()))


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["both", "out"])
def test_a_cut_is_a_pause(new_hosts: Callable[[int], Hosts], way: Way) -> None:
    """Both workers know of it, also when only one way is cut, and nothing is lost, doubled or reordered."""
    hosts = new_hosts(2)
    ends = [Program(worker, host) for worker, host in enumerate(hosts)]
    ends[0].connect(ends[1])
    ends[1].connect(ends[0])
    for end in ends:
        wait_until(lambda end=end: end.look()[0] > 50, "messages come")
        assert end.silent() == 0
    hosts[0].link.cut(way)
    for end in ends:
        wait_until(lambda end=end: end.silent() > 0.7, "the cut is known")
    before = [end.look()[0] for end in ends]
    hosts[0].link.restore(way)
    for end, came in zip(ends, before, strict=True):
        wait_until(lambda end=end, came=came: end.look()[0] > came + 100, "messages come again")
        wait_until(lambda end=end: end.silent() == 0, "the peer answers")
        assert end.look()[1], "messages are missing, or in another order"
