"""What a program on a host of the tests can ask of the program that made the hosts: to harm them, and what is on them.

Requests and answers are lines of JSON over a socket that the program on the host has inherited.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from tests.namespaces.hosts import Hosts
from tests.namespaces.links import Way, Ways
from tests.namespaces.ray_cluster import RayCluster


class Harm:
    """Carries out the requests. The names of its methods are those of the requests."""

    def __init__(self, hosts: Hosts, cluster: RayCluster) -> None:
        self._hosts = hosts
        self._cluster = cluster

    def kill(self, host: int, pid: int) -> None:
        """See Host.kill."""
        self._hosts[host].kill(pid)

    def stop(self, host: int, pid: int) -> None:
        """Stops a process of a host, until it is killed or woken."""
        self._hosts[host].kill(pid, "STOP")

    def wake(self, host: int, pid: int) -> None:
        """Has a process of a host continue that was stopped, if there still is one with this id."""
        self._hosts[host].kill(pid, "CONT")

    def crash(self, host: int) -> None:
        """See Host.crash."""
        self._hosts[host].crash()

    def boot(self, host: int) -> None:
        """A host comes back with a new node of the Ray cluster, whatever it still was."""
        self._hosts[host].close()
        self._hosts[host].boot()
        self._cluster.join(self._hosts[host])

    def cut(self, host: int, way: Way) -> None:
        """See Link.cut."""
        self._hosts[host].link.cut(way)

    def restore(self, host: int) -> None:
        """See Link.restore."""
        self._hosts[host].link.restore()

    def cut_between(self, one: int, other: int, ways: Ways) -> None:
        """See Hosts.cut_between."""
        self._hosts.cut_between(one, other, ways)

    def restore_between(self, one: int, other: int) -> None:
        """See Hosts.restore_between."""
        self._hosts.restore_between(one, other)

    def loss(self, host: int, share: float) -> None:
        """See Link.loss."""
        self._hosts[host].link.loss(share)

    def processes(self, host: int) -> dict[int, str]:
        """See Host.processes. JSON makes texts of the ids."""
        found: dict[int, str] = self._hosts[host].processes()
        return found

    def segments(self, host: int) -> list[str]:
        """See Host.segments."""
        found: list[str] = self._hosts[host].segments()
        return found

    def serve(self, door: socket.socket) -> None:
        """Answers requests until the program on the host closes its end, or ends."""
        with door, door.makefile("rw") as lines:
            for line in lines:
                request = json.loads(line)
                try:
                    answer = {"result": getattr(self, request["what"])(*request["arguments"])}
                except Exception as error:  # the program that asks has to fail, not this one
                    answer = {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(answer), file=lines, flush=True)


class Remote:
    """Asks for it, from a host."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # or Ray's processes would keep it
        self._lines = socket.socket(fileno=descriptor).makefile("rw")
        self._lock = threading.Lock()

    def __getattr__(self, what: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            with self._lock:
                print(json.dumps({"what": what, "arguments": arguments}), file=self._lines, flush=True)
                answer = json.loads(self._lines.readline())
            if "error" in answer:
                raise RuntimeError(f"{what}{arguments}: {answer['error']}")
            return answer["result"]

        return ask
