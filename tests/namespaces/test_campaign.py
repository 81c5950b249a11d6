"""What the campaign of hosts does to single processes of a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.processes import wait_until
from tests.namespaces.campaign import HostsPlace
from tests.namespaces.hosts import Host, Hosts
from tests.namespaces.remote import Harm


class _Asked:
    """Answers as Remote does, but within the program that has made the hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self._harm = Harm(hosts, None)  # type: ignore[arg-type]

    def __getattr__(self, what: str) -> Any:
        return getattr(self._harm, what)

    def processes(self, host: int) -> dict[str, str]:
        return {str(pid): line for pid, line in self._harm.processes(host).items()}


def sleeping(host: Host) -> list[int]:
    """The processes of a host that sleep."""
    return [pid for pid, line in host.processes().items() if line == "sleep 1000"]


def state_of(host: Host, pid: int) -> str:
    """The letter by which the kernel tells what a process of a host does."""
    return host.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_of_a_host_is_paused_and_killed(
    new_hosts: Callable[[int], Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = new_hosts(2)
    place = HostsPlace(_Asked(hosts), 2)  # type: ignore[arg-type]
    monkeypatch.setattr(place, "host_of", int)
    for host in hosts:
        host.start(["sh", "-c", "sleep 1000; true"])  # nsenter stops itself, for good, when its own child is stopped
    wait_until(lambda: all(sleeping(host) for host in hosts), "both sleep")
    (here,), (there,) = (sleeping(host) for host in hosts)
    with place.paused(("1", there)):
        wait_until(lambda: state_of(hosts[1], there) == "T", "it is stopped")
        assert state_of(hosts[0], here) == "S"
    wait_until(lambda: state_of(hosts[1], there) == "S", "it continues")
    assert place.kill([("1", there), ("1", 1000)]) == 1
    wait_until(lambda: not sleeping(hosts[1]), "it is gone")
    assert sleeping(hosts[0]) == [here]
