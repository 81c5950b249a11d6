"""Control calls: every worker's answer belongs to the question that was asked."""

from __future__ import annotations

import pytest

from penstock.actors.control import ControlClients, ControlServer
from penstock.runtime.errors import PenstockError


def fail() -> int:
    raise ValueError("no status")


def test_a_failing_answer_leaves_none_behind_for_the_next_question() -> None:
    servers = [ControlServer({"status": fail, "stop": lambda: 10})]
    servers += [ControlServer({"status": lambda i=i: i, "stop": lambda i=i: 10 + i}) for i in (1, 2)]
    clients = ControlClients({i: (server.address, server.key) for i, server in enumerate(servers)})
    for _ in range(20):
        with pytest.raises(PenstockError, match="worker 0 could not answer 'status': ValueError: no status"):
            clients.call("status", 60.0)
        assert clients.call("stop", 60.0) == [10, 11, 12]
    clients.close()
