"""The agent of a node: it knows how the processes of its machine end, tells the time, and ends them when nobody asks
any more. Here both ends are on one machine, and speak TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.host.process import node_agent
from penstock.host.process.control import End
from penstock.host.process.node_agent import BEAT_S, NodeAgent, NodeLine, Sees
from penstock.host.process.watched_process import LastWords
from penstock.runtime.transport.endpoint import Ports
from penstock.runtime.worker.blackbox import Note
from tests.e2e.processes import LIMIT_S, wait_until

LOOPBACK = Ports("127.0.0.1")

_WORKER = """
import sys
from penstock.runtime.worker.blackbox import BlackBox
box = BlackBox()
print(box.address, flush=True)
sys.stdin.readline()
box.note(7)
print("noted", flush=True)
sys.stdin.readline()
"""

_AGENT = """
import sys
from penstock.runtime.transport.endpoint import Ports
from penstock.host.process.node_agent import NodeAgent, leave_process
agent = NodeAgent("job", Ports("127.0.0.1"), float(sys.argv[1]), leave_process)
print(agent.end.address, agent.end.key.hex(), flush=True)
sys.stdin.readline()
"""

Started = Callable[..., "Process"]


class Process:
    """A child process that talks by lines."""

    def __init__(self, program: str, *arguments: str) -> None:
        pipe = subprocess.PIPE
        self.child = subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=pipe, stdout=pipe, text=True)
        self.pid = self.child.pid

    def says(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()


@pytest.fixture
def started() -> Iterator[Started]:
    processes: list[Process] = []

    def start(program: str, *arguments: str) -> Process:
        processes.append(Process(program, *arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.child.kill()
        process.child.wait()
        for pipe in (process.child.stdin, process.child.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def line() -> Iterator[NodeLine]:
    """A line to an agent of this process."""
    agent = NodeAgent("job", LOOPBACK, LIMIT_S, lambda: None)
    lost: list[str] = []
    line = NodeLine("there", agent.end, LIMIT_S, lost.append)
    yield line
    line.close()
    agent.close()
    assert not lost


def test_the_agent_tells_how_a_process_ended(line: NodeLine, started: Started) -> None:
    worker = started(_WORKER)
    process = line.process(worker.pid, worker.says())
    assert process.last_words() == LastWords(), "it lives, and runs no step"
    process = line.process(worker.pid, f"/proc/{worker.pid}/fd/none")
    assert process.last_words() == LastWords(), "a black box that cannot be opened says nothing"
    other = started(_WORKER)
    process = line.process(other.pid, other.says())
    other.go_on()
    assert other.says() == "noted"
    assert not process.is_stopped()
    os.kill(other.pid, signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    assert process.is_stopped()
    process.kill()
    assert other.child.wait() == -signal.SIGKILL
    assert process.last_words() == LastWords(Note(7))
    wait_until(lambda: process.last_words() is None, "the agent has forgotten the dead process")


def test_the_clock_of_the_same_machine_is_not_ahead(line: NodeLine) -> None:
    offset = line.wait_for_clock(LIMIT_S)
    assert offset is not None
    assert abs(offset.ahead_ns) <= offset.uncertainty_ns
    status = line.status()
    assert status["name"] == "there"
    assert status["clock_uncertainty_ms"] > 0
    assert status["round_trip_ms"] > 0


def test_a_file_is_seen_only_with_its_contents(line: NodeLine, tmp_path: object) -> None:
    path = f"{tmp_path}/seen"
    assert line.ask(Sees(path, "text")) is False
    with open(path, "w") as file:
        file.write("text")
    assert line.ask(Sees(path, "text")) is True
    assert line.ask(Sees(path, "tex")) is False


def test_an_agent_that_is_started_again_looks_after_the_same_processes(started: Started) -> None:
    worker = started(_WORKER)
    first, second = (NodeAgent("job", LOOPBACK, LIMIT_S, lambda: None) for _ in range(2))
    line = NodeLine("there", first.end, LIMIT_S, lambda reason: None)
    process = line.process(worker.pid, worker.says())
    first.close()
    line.connect(second.end)
    worker.go_on()
    assert worker.says() == "noted"
    wait_until(lambda: worker.pid in second._processes, "it is told of the process")
    process.kill()
    assert worker.child.wait() == -signal.SIGKILL
    assert process.last_words() == LastWords(Note(7))
    line.close()
    second.close()


def test_a_node_that_does_not_answer_is_lost_once(started: Started) -> None:
    agent = started(_AGENT, "1000")
    address, key = agent.says().split()
    lost: list[str] = []
    line = NodeLine("there", End(address, bytes.fromhex(key)), 1.0, lost.append)
    assert line.wait_for_clock(LIMIT_S) is not None
    os.kill(agent.pid, signal.SIGSTOP)
    wait_until(lambda: line.status()["state"] == "silent" or lost, "it is silent")
    wait_until(lambda: lost, "it is lost")
    assert lost == ["its node there has not answered for 1 s"]
    line.close()


class Seconds:
    """A clock, and an event for which nobody waits in vain: the time passes at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.set_ = False

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def wait(self, seconds: float) -> bool:
        self.now += seconds + 0.001  # a thread never wakes too early
        return self.set_

    def is_set(self) -> bool:
        return self.set_

    def set(self) -> None:
        self.set_ = True


class Nobody:
    """In place of a ControlClient: what is asked gets no answer."""

    refused: str | None = None

    def __init__(self, end: End, name: str) -> None: ...

    def ask(self, command: object) -> Future[Any]:
        return Future()

    def close(self) -> None: ...


@pytest.mark.parametrize("limit_s", [1.0, 2.0, 3.0, 5.0, 5.1, 6.0, 7.9, 30.0])
def test_a_node_is_lost_soon_after_its_limit(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Seconds()
    monkeypatch.setattr(node_agent, "time", clock)
    monkeypatch.setattr(node_agent, "ControlClient", Nobody)
    threads = SimpleNamespace(Event=lambda: clock, Lock=threading.Lock, Thread=threading.Thread)
    monkeypatch.setattr(node_agent, "threading", threads)
    lost: SimpleQueue[float] = SimpleQueue()
    line = NodeLine("there", End("nowhere", b""), limit_s, lambda reason: lost.put(clock.now))
    waited = lost.get(timeout=LIMIT_S) - 1000.0
    line.close()
    assert limit_s <= waited <= limit_s + 2.5 * BEAT_S + 0.01 * limit_s


def test_a_pause_within_the_limit_is_slow_and_no_loss(started: Started) -> None:
    agent = started(_AGENT, "1000")
    address, key = agent.says().split()
    lost: list[str] = []
    line = NodeLine("there", End(address, bytes.fromhex(key)), LIMIT_S, lost.append)
    assert line.wait_for_clock(LIMIT_S) is not None
    os.kill(agent.pid, signal.SIGSTOP)
    wait_until(lambda: line.status()["state"] == "silent", "it is silent")
    os.kill(agent.pid, signal.SIGCONT)
    wait_until(lambda: line.status()["state"] != "silent", "its answer comes late")
    wait_until(lambda: line.status()["state"] == "ok", "it is as quick as before")
    assert not lost
    line.close()


def test_an_agent_that_hears_nothing_ends_its_processes_and_itself(started: Started) -> None:
    worker = started(_WORKER)
    left = threading.Event()
    agent = NodeAgent("job", LOOPBACK, 1.0, left.set)
    line = NodeLine("there", agent.end, LIMIT_S, lambda reason: None)
    line.process(worker.pid, worker.says())
    begun = time.monotonic()
    while time.monotonic() < begun + 2.0:  # while it hears something, it stays
        assert not left.is_set()
        time.sleep(0.05)
    line.close()
    assert left.wait(LIMIT_S)
    assert worker.child.wait() == -signal.SIGKILL
    agent.close()


def test_an_agent_that_was_paused_with_its_machine_listens_on(started: Started) -> None:
    """A pause longer than the limit is no silence of the JobMaster."""
    agent = started(_AGENT, "2")
    address, key = agent.says().split()
    line = NodeLine("there", End(address, bytes.fromhex(key)), LIMIT_S, lambda reason: None)
    assert line.wait_for_clock(LIMIT_S) is not None
    os.kill(agent.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    wait_until(lambda: time.monotonic() > stopped + 3.0, "the pause is longer than the limit")
    os.kill(agent.pid, signal.SIGCONT)
    wait_until(lambda: line.status()["state"] == "ok", "it answers")
    assert agent.child.poll() is None
    line.close()
