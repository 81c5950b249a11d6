"""Jobs on two hosts: what holds on one machine holds over several, and TLS hides what crosses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.placement.hop_costs import NODE_COST_LEAST, NODE_COST_MOST
from penstock.runtime.relaying.wire import HEAD_BYTES
from penstock.runtime.transport.framing import HEAD_BYTES as FRAME_HEAD_BYTES
from tests.e2e.processes import LIMIT_S, wait_until
from tests.namespaces import spaces
from tests.namespaces.hosts import OWN, ROOT, Hosts
from tests.namespaces.ray_cluster import RayCluster
from tests.transport.certificates import Folder

pytestmark = pytest.mark.ray

# Reads all packets of the host, and tells how much of the job's connections it has seen, and which words in the clear.
SNIFF = """
import json, socket, struct, sys, threading

everything = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
everything.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
seen, clear, over = [0], set(), threading.Event()

def listen():
    while True:
        packet = everything.recv(1 << 16)
        if packet[12:14] != b"\\x08\\x00" or packet[23] != 6 or packet[26:30] == packet[30:34]:
            continue  # no TCP, or to this host itself
        start = 14 + 4 * (packet[14] & 15)
        if any(20_000 <= port <= 20_999 for port in struct.unpack_from("!HH", packet, start)):
            seen[0] += len(packet)
            clear.update(word for word in ("in-the-clear", "process_commands") if word.encode() in packet)

threading.Thread(target=listen, daemon=True).start()
print("listening", flush=True)
sys.stdin.readline()
print(json.dumps([seen[0], sorted(clear)]))
"""

# A flow whose output is known beforehand, over both hosts.
JOB = """
import json, sys, time
import penstock as ps
from ray.util import placement_group_table

place, checkpoints, tls = sys.argv[1:]
tls = json.loads(tls)
flow = ps.Flow("two-hosts")
words = flow.read(ps.sources.Memory([f"in-the-clear-{n % 97}" for n in range(20_000)]))
words.key_by(str).count(emit="final").write(ps.sinks.Files(place))
options = {"ports": (20_000, 20_999), "tls": ps.Tls(*tls) if isinstance(tls, list) else tls}
try:
    status = ps.run(flow, workers=2, nodes=2, checkpoints=checkpoints, **options).wait(progress=False)
except ps.PenstockError as error:
    def reserved():
        return [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]

    end = time.monotonic() + LIMIT_S
    while reserved() and time.monotonic() < end:  # the job gives its room back, although this program lives
        time.sleep(0.1)
    print(json.dumps({"error": f"{type(error).__name__}: {error}", "reserved": reserved()}))
else:
    print(json.dumps({
        "nodes": len({worker["node_id"] for worker in status["workers"]}),
        "latency_ms": status["latency_all_ms"].plain(),
        "transports": [list(worker["transports"].values()) for worker in status["workers"]],
    }))
""".replace("LIMIT_S", repr(LIMIT_S))
ANSWER = sorted(f"in-the-clear-{i}\t{len(range(i, 20_000, 97))}" for i in range(97))

# Records that go to three tasks on two hosts, until the relay of this host has been killed and replaced.
RELAYS = """
import collections, json, os, signal, sys, time
import ray
import penstock as ps

flow = ps.Flow("to_all")
got = ps.sinks.Collect()
read = flow.read(ps.sources.Generator(lambda i: i, rate=2_000), parallelism=2)
read.broadcast().filter(lambda i: i % 10 == 0, parallelism=3).write(got)
job = ps.run(flow, workers=3, nodes=2, checkpoints=sys.argv[1], epoch_interval_s=0.5)

def relays(condition):
    until = time.monotonic() + LIMIT_S
    while True:
        status = job.status()
        ready = {r["node_id"]: r for r in status["relays"] if r["state"] == "ready"}
        if len(ready) == 2 and condition(ready):
            return ready
        assert time.monotonic() < until and status["state"] in ("STARTING", "RUNNING"), status
        time.sleep(0.05)

here = ray.get_runtime_context().get_node_id()
before = relays(lambda ready: True)
os.kill(before[here]["pid"], signal.SIGKILL)
after = relays(lambda ready: ready[here]["number"] != before[here]["number"])
job.stop()
status = job.wait(progress=False)
times = collections.Counter(got.records())
print(json.dumps({
    "kept": [before[node]["number"] == after[node]["number"] for node in sorted(before, key=here.__ne__)],
    "times": sorted(set(times.values())),
    "restarts": status["epochs"]["restarts"],
    "workers": len({(worker["pid"], worker["node_id"]) for worker in status["workers"]}),
}))
""".replace("LIMIT_S", repr(LIMIT_S))


# Keyed records between two workers of each of two hosts, until what the hops cost and how long they take has been
# measured.
HOPS = """
import json, time
import penstock as ps
from penstock.placement.adoption import AdoptionOptions
from penstock.placement.options import PlacementOptions

flow = ps.Flow("hops", chaining=False)
read = flow.read(ps.sources.Generator(lambda i: i), parallelism=4)
read.map(str, parallelism=4).key_by(lambda text: text[-3:]).count(parallelism=4).write(ps.sinks.Null())
stays = AdoptionOptions(margin=2.0, busy=float("inf"))
job = ps.run(flow, workers=4, placement=PlacementOptions(nodes=2, replan_s=0.5, adoption=stays))
until = time.monotonic() + LIMIT_S
def measured(found):
    kinds = ("hop_ns_per_kib", "hop_ns_per_message", "hop_us")
    return all(found[kind] is not None and None not in found[kind].values() for kind in kinds)
while not measured(found := job.status()["placement"]):
    assert time.monotonic() < until and job.status()["state"] in ("STARTING", "RUNNING"), found
    time.sleep(0.1)
job.cancel()
of_kib = {kind: ns + found["hop_ns_per_message"][kind] for kind, ns in found["hop_ns_per_kib"].items()}
print(json.dumps({"node_cost": found["node_cost"], "us": found["hop_us"], **of_kib}))
""".replace("LIMIT_S", repr(LIMIT_S))

# A job with a worker on each host, of which a host is lost. Says when it runs, and when the worker there is lost.
LOSES = """
import collections, json, sys, time
import penstock as ps

flow = ps.Flow("loses")
got = ps.sinks.Collect()
read = flow.read(ps.sources.Generator(lambda i: i, rate=500), parallelism=2)
read.rebalance().map(lambda i: i, parallelism=2).write(got)
options = json.loads(sys.argv[2])
job = ps.run(flow, workers=2, nodes=2, checkpoints=sys.argv[1], epoch_interval_s=0.3, node_timeout_s=2, **options)

def until(condition):
    end = time.monotonic() + LIMIT_S
    while True:
        status = job.status()
        if condition(status):
            return status
        assert time.monotonic() < end and status["state"] not in ("FAILED", "FINISHED"), status
        time.sleep(0.05)

until(lambda status: status["state"] == "RUNNING" and status["epochs"]["complete"])
print("runs", flush=True)
until(lambda status: status["epochs"].get("restarts"))
print("lost", flush=True)
status = until(lambda status: status["state"] == "RUNNING")
epochs = status["epochs"]["complete"]
until(lambda status: status["epochs"]["complete"] > epochs)
job.stop()
status = job.wait(progress=False)
times = collections.Counter(got.records())
print(json.dumps({
    "times": sorted(set(times.values())),
    "restarts": status["epochs"]["restarts"],
    "nodes": len({worker["node_id"] for worker in status["workers"]}),
    "machines": [machine["state"] for machine in status["placement"].get("machines", [])],
}))
""".replace("LIMIT_S", repr(LIMIT_S))


def _said(printed: str) -> Any:
    """The last line that is JSON."""
    for line in reversed(printed.splitlines()):
        with suppress(json.JSONDecodeError):
            return json.loads(line)
    raise AssertionError(f"nothing was said: {printed}")


class Cluster:
    """Two hosts with Ray; drivers run on the first."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._ray = RayCluster(hosts)

    def says(self, text: str, *arguments: str | Path, **env: str) -> Any:
        """What a driver prints last, which is one value of JSON. Ray may print what it notices before and after."""
        env = {**self._ray.environment, **env}
        return _said(self.hosts[0].python(text, *map(str, arguments), env=env, directory=ROOT))

    def run(self, folder: Path, tls: Any = False, checkpoints: Path | None = None) -> Any:
        """What the driver of JOB says."""
        return self.says(JOB, folder / "out", checkpoints or folder / "epochs", json.dumps(tls))

    def sniff(self, folder: Path, tls: Any = False) -> tuple[Any, int, list[str]]:
        """What the driver of JOB says, how many bytes the second host has seen of the job, and what was clear."""
        sniffer = self.hosts[1].start(["python", "-c", SNIFF], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert sniffer.stdin is not None
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == "listening\n"
        said = self.run(folder, tls)
        sniffer.stdin.write("\n")
        sniffer.stdin.flush()
        seen, clear = json.loads(sniffer.stdout.readline())
        return said, seen, clear

    def broadcasts(self, settings: dict[str, Any], folder: Path) -> Any:
        """What a job of benchmarks/broadcast_peer.py has counted."""
        given = json.dumps({"folder": str(folder), "relays": True, **settings})
        ran = self.hosts[0].run([sys.executable, "-m", "benchmarks.broadcast_peer", given], self._ray.environment, ROOT)
        return _said(ran.stdout)

    @contextmanager
    def loses(self, folder: Path, **options: Any) -> Iterator[Callable[[], str]]:
        """Runs the job LOSES. Gives a function that returns what its driver says next."""
        driver = self.hosts[0].start(
            [sys.executable, "-c", LOSES, str(folder), json.dumps(options)],
            env=self._ray.environment,
            directory=ROOT,
            stdout=subprocess.PIPE,
        )
        assert driver.stdout is not None
        said = (line for line in driver.stdout if line[0] in "rl{")  # the others are Ray's
        yield lambda: next(said).strip()
        assert driver.wait(LIMIT_S) == 0


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Cluster]:
    if reason := spaces.why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Cluster(stack.enter_context(Hosts(2)))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The files of a certificate, on both hosts."""
    folder = Folder(tmp_path)
    folder.authority("own")
    folder.sign("job", "own")
    return [str(tmp_path / name) for name in ("job.pem", "job.key", "own.pem")]


def answer(folder: Path) -> list[str]:
    return sorted(line for part in folder.glob("out/*") if part.is_file() for line in part.read_text().splitlines())


def test_the_answer_over_two_hosts_is_right(two_hosts: Cluster, tmp_path: Path) -> None:
    """Without TLS everything can be read on the way, so the sniffer of the next test sees what there is."""
    assert all(any("raylet" in line for line in host.processes().values()) for host in two_hosts.hosts)
    said, seen, clear = two_hosts.sniff(tmp_path)
    assert answer(tmp_path) == ANSWER
    assert said["nodes"] == 2, said
    # The clocks of the hosts are a day apart where the kernel allows that. Latency is measured across them.
    assert 0 < said["latency_ms"]["p50"] <= said["latency_ms"]["p99"] < LIMIT_S * 1000
    assert seen > 10_000, "the job's connections were seen"
    assert clear == ["in-the-clear", "process_commands"]


@pytest.mark.parametrize("by", ["the job's own certificate", "files"])
def test_nothing_of_a_job_with_tls_crosses_in_the_clear(
    two_hosts: Cluster, by: str, files: list[str], tmp_path: Path
) -> None:
    said, seen, clear = two_hosts.sniff(tmp_path, files if by == "files" else True)
    assert "error" not in said, said
    assert answer(tmp_path) == ANSWER
    assert seen > 10_000, "the job's connections were seen"
    assert clear == []
    assert said["transports"] == [["TCP with TLS, because TLS was asked for, and RDMA sends in the clear."]] * 2
    saved = b"".join(path.read_bytes() for path in tmp_path.glob("epochs/**/*") if path.is_file())
    assert b"PRIVATE KEY" not in saved


def test_a_certificate_that_a_host_does_not_have_is_told(two_hosts: Cluster, files: list[str], tmp_path: Path) -> None:
    """Each host reads its own files."""
    private = two_hosts.hosts[0].path(OWN / "tls")
    private.mkdir()
    for file in files:
        shutil.copy(file, private)
    said = two_hosts.run(tmp_path, [f"{OWN}/tls/{Path(file).name}" for file in files])
    assert f"on node {two_hosts.hosts[1].name}" in said["error"], said
    assert f"the certificate '{OWN}/tls/job.pem' cannot be read: No such file or directory" in said["error"]


def test_a_relay_that_dies_is_replaced_and_no_worker_notices(two_hosts: Cluster, tmp_path: Path) -> None:
    said = two_hosts.says(RELAYS, tmp_path / "epochs")
    assert said == {"kept": [False, True], "times": [3], "restarts": 0, "workers": 3}

    def relays() -> list[str]:
        return [line for host in two_hosts.hosts for line in host.processes().values() if "ray::Relay" in line]

    wait_until(lambda: not relays(), "no relay is left")


def test_a_broadcast_crosses_to_each_host_once(two_hosts: Cluster, tmp_path: Path) -> None:
    # Two workers on each host, with two tasks each.
    said = two_hosts.broadcasts({"count": 300, "size": 1000, "tasks": 8, "workers": 4, "hosts": 2}, tmp_path)
    assert said["right"], "each task has each record once, in order"
    assert said["elsewhere"] == [4]
    sent = said["stream"]
    assert sent["entries"] == sent["encodings"] > 0
    # Besides the body there is the head of a frame, and that of a stream, which names no task.
    assert said["transports"] == sent["bytes"] + sent["entries"] * (FRAME_HEAD_BYTES + HEAD_BYTES)


def test_what_hops_cost_is_measured_while_a_job_runs(two_hosts: Cluster) -> None:
    said = two_hosts.says(HOPS)
    assert 0 < said["worker"] < said["node"], said
    assert said["worker"] < said["network"], said
    assert NODE_COST_LEAST <= said["node_cost"] <= NODE_COST_MOST
    assert 0 < said["us"]["worker"] < min(said["us"]["node"], said["us"]["network"]), said


def test_a_store_that_the_other_host_cannot_see_is_refused(two_hosts: Cluster, tmp_path: Path) -> None:
    said = two_hosts.run(tmp_path, checkpoints=OWN / "epochs")
    assert said["error"].startswith("StoreError: "), "as run() promises"
    assert f"the checkpoint store {OWN}/epochs/two-hosts is a directory of the JobMaster's machine" in said["error"]
    assert said["reserved"] == []
    assert f"machine that {two_hosts.hosts[1].name} (" in said["error"]
    assert "let all workers run on one machine" in said["error"]
    assert not list(tmp_path.glob("out/*part*")), "nothing has begun"


def test_a_host_that_comes_back_has_the_room_that_the_job_has_reserved_there(
    two_hosts: Cluster, tmp_path: Path
) -> None:
    with two_hosts.loses(tmp_path, cpus_per_worker=4) as said:  # all CPUs of both hosts
        assert said() == "runs"
        two_hosts.hosts[1].link.cut()
        assert said() == "lost"
        two_hosts.hosts[1].link.restore()
        told = json.loads(said())
    assert told["times"] == [1]
    assert told["nodes"] == 2


def test_a_host_that_crashes_is_no_place_to_start_a_worker_again(two_hosts: Cluster, tmp_path: Path) -> None:
    """The connections of its processes break at once, so Ray tells of the worker's death before the host is lost."""
    with two_hosts.loses(tmp_path) as said:
        assert said() == "runs"
        two_hosts.hosts[1].crash(silent=False)
        assert said() == "lost"
        told = json.loads(said())
    assert told == {"times": [1], "restarts": 1, "nodes": 1, "machines": ["lost"]}
