"""The hosts of the tests are hosts: what each has of its own, what their links do, and that nothing of them is left."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import wait_gone, wait_until
from tests.namespaces import spaces
from tests.namespaces.hosts import OWN, ROOT, Host, Hosts
from tests.namespaces.links import Ways

NewHosts = Callable[[int], Hosts]

ABOUT = """
import json, os, pathlib, socket, sys, time
def read(path):
    return pathlib.Path(path).read_text().strip() if os.path.exists(path) else None
own, shared = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
own.joinpath("mine").write_text(socket.gethostname())
pathlib.Path("/dev/shm", socket.gethostname()).touch()
print(json.dumps({
    "name": socket.gethostname(), "address": socket.gethostbyname(socket.gethostname()),
    "boot_id": read("/proc/sys/kernel/random/boot_id"), "machine_id": read("/etc/machine-id"),
    "processes": sorted(int(pid) for pid in os.listdir("/proc") if pid.isdigit()), "me": os.getpid(),
    "shared_memory": os.listdir("/dev/shm"), "own": [path.read_text() for path in own.iterdir()],
    "shared": shared.read_text(), "clock": time.monotonic(),
}))
"""

# Sends datagrams, and receives them until one comes. All hosts have the machine's wall clock: `now` arrives as its age.
TALKER = """
import socket, sys, time
talker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
talker.bind(("", 9000))
print("ready", flush=True)
for line in sys.stdin:
    what, *words = line.split()
    if what == "send":
        for word in words[1:]:
            text = f"at:{time.time()}" if word == "now" else word
            talker.sendto(text.encode(), (words[0], 9000))
        print("sent", flush=True)
    else:
        got = []
        while got[-1:] != words:
            kind, _, at = talker.recv(100).decode().partition(":")
            got.append(str(time.time() - float(at)) if at else kind)
        print(*got, flush=True)
"""

# Connects to another host, and says how long a request takes there and back, and whether the connection still stands.
CONNECTED = """
import socket, sys, time
there = socket.create_connection((sys.argv[1], 9001))
there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print("ready", flush=True)
for line in sys.stdin:
    if line == "look\\n":
        there.setblocking(False)
        try:
            print("closed" if there.recv(1) == b"" else "data", flush=True)
        except BlockingIOError:
            print("open", flush=True)
        except OSError:
            print("closed", flush=True)
        continue
    size = int(line)
    started = time.monotonic()
    there.sendall(size.to_bytes(8, "big") + bytes(size))
    assert there.recv(1) == b"."
    print(time.monotonic() - started, flush=True)
"""

ANSWERING = """
import socket
door = socket.create_server(("", 9001))
print("ready", flush=True)
here = door.accept()[0].makefile("rwb", buffering=0)
while head := here.read(8):
    left = int.from_bytes(head, "big")
    while left:
        left -= len(here.read(min(left, 65536)))
    here.write(b".")
"""


class Program:
    """A program on a host that answers each line with a line."""

    def __init__(self, host: Host, text: str, *arguments: str) -> None:
        self.host = host
        self.process = host.start(
            [sys.executable, "-c", text, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def send(self, other: Program, *words: str) -> None:
        assert self.ask(f"send {other.host.address} {' '.join(words)}") == "sent"

    def until(self, word: str) -> list[str]:
        return self.ask(f"until {word}").split()


@pytest.fixture
def talkers(new_hosts: NewHosts) -> tuple[Program, Program]:
    """A program on each of two hosts; each has heard of the other."""
    one, other = (Program(host, TALKER) for host in new_hosts(2))
    one.send(other, "hello")
    assert other.until("hello") == ["hello"]
    other.send(one, "hello")
    assert one.until("hello") == ["hello"]
    return one, other


@pytest.fixture
def connected(new_hosts: NewHosts) -> Program:
    """A program on host 0 of two, connected with one on host 1."""
    here, there = new_hosts(2)
    Program(there, ANSWERING)
    return Program(here, CONNECTED, there.address)


def test_each_host_is_a_machine_of_its_own(new_hosts: NewHosts, tmp_path: Path) -> None:
    (tmp_path / "shared").write_text("for all")
    hosts = new_hosts(3)
    about = [json.loads(host.python(ABOUT, str(OWN), str(tmp_path / "shared"))) for host in hosts]
    for host, found in zip(hosts, about, strict=True):
        assert found["name"] == host.name
        assert found["address"] == host.address
        assert found["processes"] == [1, found["me"]]
        assert found["shared_memory"] == [host.name] == host.segments()
        assert found["own"] == [host.name] == [host.path(OWN / "mine").read_text()]
        assert found["shared"] == "for all"
    for what in ("boot_id", "machine_id") if Path("/etc/machine-id").exists() else ("boot_id",):
        assert len({found[what] for found in about}) == 3, what
    if spaces.own_clocks():
        clocks = [found["clock"] for found in about]
        assert clocks[0] + 10_000 < clocks[1] < clocks[2] - 10_000
    assert not Path("/dev/shm", hosts[0].name).exists(), "the machine's shared memory is not the hosts'"


def test_a_cut_stops_one_direction_or_both(talkers: tuple[Program, Program]) -> None:
    one, other = talkers
    link = other.host.link
    link.cut("in")
    one.send(other, "lost")
    other.send(one, "passes")
    assert one.until("passes") == ["passes"]
    link.restore("in")
    one.send(other, "restored")
    assert other.until("restored") == ["restored"]
    link.cut("out")
    other.send(one, "lost")
    one.send(other, "passes")
    assert other.until("passes") == ["passes"]
    link.cut()
    one.send(other, "lost")
    link.restore()
    for here, there in ((one, other), (other, one)):
        here.send(there, "restored")
        assert there.until("restored") == ["restored"]


@pytest.mark.parametrize("ways", ["there", "back", "both"])
def test_a_cut_between_two_hosts_leaves_the_third_alone(new_hosts: NewHosts, ways: Ways) -> None:
    hosts = new_hosts(3)
    talkers = [Program(host, TALKER) for host in hosts]
    for one in talkers:
        for other in talkers:
            if one is not other:
                one.send(other, "hello")
                assert other.until("hello") == ["hello"]
    hosts.cut_between(1, 2, ways)
    first, *cut = talkers
    passes = {("there", 2): True, ("back", 1): True}  # what is sent by this host
    for here, there in ((1, 2), (2, 1)):
        talkers[here].send(talkers[there], "between")
        first.send(talkers[there], "passes")
        assert talkers[there].until("passes") == (["between"] if passes.get((ways, here)) else []) + ["passes"]
        talkers[here].send(first, "passes")
        assert first.until("passes") == ["passes"]
    hosts.restore_between(1, 2)
    for here, there in (cut, cut[::-1]):
        here.send(there, "restored")
        assert there.until("restored") == ["restored"]


def test_a_share_of_the_frames_is_lost(talkers: tuple[Program, Program]) -> None:
    one, other = talkers
    arrived = 0
    for batch in range(5):
        other.host.link.loss(0.5, "in")
        one.send(other, *[f"{batch}-{number}" for number in range(100)])
        other.host.link.loss(0.0, "in")
        one.send(other, f"end-{batch}")
        arrived += len(other.until(f"end-{batch}")) - 1
    assert 150 < arrived < 350


def test_a_delay_delays(connected: Program) -> None:
    """Over a connection, because the first delay and the end of the last one may cost the frames of an instant."""
    link = connected.host.link
    assert float(connected.ask("1")) > 0
    for out_s, in_s in ((0.02, 0.02), (0.0, 0.03), (0.05, 0.0)):
        link.delay(out_s, in_s)
        assert float(connected.ask("1")) >= out_s + in_s
    link.delay(0)
    assert float(connected.ask("1")) > 0


def test_a_rate_takes_its_time(connected: Program) -> None:
    size, burst, bits_s = 100_000, 16_384, 2e6
    connected.host.link.rate(bits_s, "out", burst_bytes=burst)
    assert float(connected.ask(str(size))) >= (size - 2 * burst) * 8 / bits_s


def test_large_segments_pass_a_delayed_link_unharmed(new_hosts: NewHosts) -> None:
    here, there = new_hosts(2)
    there.link.delay(0.001)
    receiving = there.start(
        [
            sys.executable,
            "-c",
            "import hashlib, socket\n"
            "door = socket.create_server(('', 9001)); print('ready', flush=True)\n"
            "print(hashlib.sha256(door.accept()[0].makefile('rb').read()).hexdigest())",
        ],
        stdout=subprocess.PIPE,
    )
    assert receiving.stdout is not None
    assert receiving.stdout.readline() == "ready\n"
    here.python(
        "import random, socket, sys\n"
        "socket.create_connection((sys.argv[1], 9001)).sendall(random.Random(1).randbytes(2_000_000))",
        there.address,
    )
    import random

    assert receiving.stdout.readline().strip() == hashlib.sha256(random.Random(1).randbytes(2_000_000)).hexdigest()


@pytest.mark.parametrize("silent", [True, False])
def test_a_crash_leaves_no_process(connected: Program, new_hosts: NewHosts, silent: bool) -> None:
    there = connected.host.others[0]
    assert connected.ask("look") == "open"
    inside = psutil.Process(there.space.pid)
    running = [inside.pid, *(process.pid for process in inside.children())]
    assert len(there.processes()) == 1
    boot_id = there.path("/proc/sys/kernel/random/boot_id").read_text()
    there.crash(silent=silent)
    wait_gone(running, 10.0)
    if silent:
        assert connected.ask("look") == "open", "nobody hears from a host that has lost its power"
    else:
        wait_until(lambda: connected.ask("look") == "closed", "the kernel closes connections")
    there.boot()
    assert there.processes() == {}
    assert there.segments() == []
    assert there.path("/proc/sys/kernel/random/boot_id").read_text() != boot_id
    assert there.python("print(1)") == "1\n"


def test_a_process_of_a_host_is_killed_by_its_id_there(new_hosts: NewHosts) -> None:
    one, other = new_hosts(2)
    sleeping = [host.start(["sleep", "1000"]) for host in (one, other)]
    wait_until(lambda: all(list(host.processes().values()) == ["sleep 1000"] for host in (one, other)), "both sleep")
    (pid,) = one.processes()
    one.kill(pid)
    assert sleeping[0].wait(60.0) != 0
    assert one.processes() == {}
    assert list(other.processes().values()) == ["sleep 1000"]


@contextmanager
def _nothing_left() -> Iterator[list[int]]:
    """What is appended within the block are ids of processes that have gone soon after it."""
    devices = sorted(psutil.net_if_stats())
    pids: list[int] = []
    yield pids
    assert pids
    wait_gone(pids, 30.0)
    assert sorted(psutil.net_if_stats()) == devices


def test_the_processes_of_a_host_run_on_the_cores_that_it_is_given(new_hosts: NewHosts) -> None:
    first, second = new_hosts(2)
    says = "import os; print('ready', flush=True); input(); print(sorted(os.sched_getaffinity(0)), flush=True)"
    running = [Program(host, says) for host in (first, second)]
    all_cores = sorted(os.sched_getaffinity(0))
    first.use_cores(all_cores[-1:])
    for program in running:
        assert program.process.stdin is not None
        program.process.stdin.write("\n")
        program.process.stdin.flush()
    assert [program.answer() for program in running] == [str(all_cores[-1:]), str(all_cores)]
    assert first.python("import os; print(os.sched_getaffinity(0))").strip() == str({all_cores[-1]})


def test_two_tests_at_once_do_not_meet_and_nothing_is_left_of_them() -> None:
    if reason := spaces.why_not():
        pytest.skip(reason)
    others = {process.pid for process in psutil.Process().children(recursive=True)}  # a cluster of other tests
    with _nothing_left() as pids, ExitStack() as stack:
        sets = [stack.enter_context(Hosts(2)) for _ in range(2)]
        for hosts in sets:
            hosts[0].link.delay(0.001)
            talkers = [Program(host, TALKER) for host in hosts]
            talkers[0].send(talkers[1], "hello")
            assert talkers[1].until("hello") == ["hello"]
        pids.extend({process.pid for process in psutil.Process().children(recursive=True)} - others)
        assert len(pids) >= 2 * (3 * 2 + 2 * 2)


def test_nothing_is_left_when_the_tests_are_killed() -> None:
    if reason := spaces.why_not():
        pytest.skip(reason)
    text = (
        "from tests.namespaces.hosts import Hosts\n"
        "hosts = Hosts(2)\n"
        "hosts[0].link.delay(0.01)\n"
        "started = [host.start(['sleep', '1000']) for host in hosts]\n"
        "print('ready', flush=True)\n"
        "started[0].wait()\n"
    )
    with _nothing_left() as pids:
        tests = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert tests.stdout is not None
        with tests.stdout:
            assert tests.stdout.readline() == "ready\n"
            pids += [process.pid for process in psutil.Process(tests.pid).children(recursive=True)]
            os.kill(tests.pid, signal.SIGKILL)
            tests.wait()


def test_who_cannot_make_hosts_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "PATH", "/nowhere")
    reason = spaces.why_not.__wrapped__()
    assert reason is not None
    assert "no program ip, tc, unshare" in reason
