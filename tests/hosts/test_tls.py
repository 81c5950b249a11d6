"""Jobs on two hosts that encrypt: nothing that they send crosses the network in the clear."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import spaces
from tests.hosts.hosts import OWN, ROOT, Hosts
from tests.hosts.ray_cluster import RayCluster
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
            clear.update(word for word in ("in-the-clear", "build_tasks") if word.encode() in packet)

threading.Thread(target=listen, daemon=True).start()
print("listening", flush=True)
sys.stdin.readline()
print(json.dumps([seen[0], sorted(clear)]))
"""

JOB = """
import json, sys
import penstock as ps

place, checkpoints, tls = sys.argv[1:]
tls = json.loads(tls)
flow = ps.Flow("tls")
words = flow.read(ps.sources.Memory([f"in-the-clear-{n % 97}" for n in range(20_000)]))
words.key_by(str).count(emit="final").write(ps.sinks.Files(place))
options = {"ports": (20_000, 20_999), "tls": ps.Tls(*tls) if isinstance(tls, list) else tls}
try:
    status = ps.run(flow, workers=2, nodes=2, checkpoints=checkpoints, **options).wait(progress=False)
except ps.PenstockError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
else:
    print(json.dumps({"transports": [list(worker["transports"].values()) for worker in status["workers"]]}))
"""


class Cluster:
    """Two hosts with Ray; the driver runs on the first one."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._ray = RayCluster(hosts)

    def run(self, folder: Path, tls: Any) -> Any:
        """Runs the job. Returns what it says."""
        arguments = [str(folder / "out"), str(folder / "epochs"), json.dumps(tls)]
        return json.loads(self.hosts[0].python(JOB, *arguments, env=self._ray.environment, directory=ROOT))

    def sniff(self, folder: Path, tls: Any) -> tuple[Any, int, list[str]]:
        """Runs the job. Returns what it says, how many bytes the second host has seen of it, and what was clear."""
        sniffer = self.hosts[1].start(["python", "-c", SNIFF], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert sniffer.stdin is not None
        assert sniffer.stdout is not None
        assert sniffer.stdout.readline() == "listening\n"
        said = self.run(folder, tls)
        sniffer.stdin.write("\n")
        sniffer.stdin.flush()
        seen, clear = json.loads(sniffer.stdout.readline())
        return said, seen, clear


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Cluster]:
    if reason := spaces.why_not():
        pytest.skip(reason)
    with Hosts(2) as hosts:
        yield Cluster(hosts)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The files of a certificate, on both hosts."""
    folder = Folder(tmp_path)
    folder.authority("own")
    folder.sign("job", "own")
    return [str(tmp_path / name) for name in ("job.pem", "job.key", "own.pem")]


def _answer(folder: Path) -> dict[str, int]:
    counts = [line for part in folder.glob("out/*") if part.is_file() for line in part.read_text().splitlines()]
    return {"lines": len(counts)}


@pytest.mark.parametrize("by", ["nothing", "the job's own certificate", "files"])
def test_nothing_of_a_job_crosses_in_the_clear(two_hosts: Cluster, by: str, files: list[str], tmp_path: Path) -> None:
    said, seen, clear = two_hosts.sniff(tmp_path, {"nothing": False, "files": files}.get(by, True))
    assert "error" not in said, said
    assert _answer(tmp_path) == {"lines": 97}
    assert seen > 10_000, "the job's connections were seen"
    if by == "nothing":
        assert clear == ["build_tasks", "in-the-clear"]
        return
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
