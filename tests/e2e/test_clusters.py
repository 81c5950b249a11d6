"""Which Ray cluster a program's jobs run on, and what it sees when that cluster goes away: real programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import kill

pytestmark = pytest.mark.ray

COMMON = """
import sys
import penstock as ps

def flow(name, limit=None):
    flow = ps.Flow(name)
    flow.read(ps.sources.Generator(lambda i: i, rate=1000, limit=limit)).write(ps.sinks.Null())
    return flow

def address():
    import ray
    return ray.get_runtime_context().gcs_address
"""

ENDLESS = """
job = ps.run(flow("endless"), workers=1)
print("address", address(), flush=True)
job.wait(progress=False)
"""

# It looks at the other program's job, and runs one of its own there.
GUEST = """
import os
from penstock.actors import cluster
assert "RAY_RAYLET_PID" not in os.environ and cluster._LIMIT not in os.environ, "for this process alone"
looked_at = ps.attach("endless", address=sys.argv[1])
own = ps.run(flow("guest"), workers=1, address=address())
own.status()
print("address", address(), flush=True)
for job in (looked_at, own):
    try:
        job.wait(progress=False)
    except ps.JobFailed as error:
        print("error", type(error).__name__, error, flush=True)
    print("state", job.state, job.status()["error"], flush=True)
    try:
        job.savepoint("nowhere")
    except ps.JobError as error:
        print("savepoint", error, flush=True)
again = ps.run(flow("again", limit=1000), workers=1)  # on a cluster of its own
print("address", address(), flush=True)
print("again", again.wait(progress=False)["records_written"], flush=True)
sys.exit(7)
"""


class Program:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self, word: str) -> str:
        """What follows this word at the beginning of the next line that has it there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word + " "):
                return line.removeprefix(word + " ").strip()
        errors = self.process.stderr.read() if self.process.stderr is not None else ""
        raise AssertionError(f"the program ended ({self.process.wait()}) and did not say {word!r}\n{errors}")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs that know of no cluster, or of that at an address."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    running: list[subprocess.Popen[str]] = []

    def start(
        text: str, stderr: int | None = None, address: str | None = None, arguments: tuple[str, ...] = ()
    ) -> Program:
        script = tmp_path / f"program{len(running)}.py"
        script.write_text(COMMON + text)
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=tmp_path,
            env=environment if address is None else {**environment, "RAY_ADDRESS": address},
        )
        running.append(process)
        return Program(process)

    yield start
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_programs_have_clusters_of_their_own_and_outlive_another_s(
    cluster: str, program: Callable[..., Program]
) -> None:
    first = program(ENDLESS)
    address = first.says("address")
    assert address != cluster, "what another program has started is not joined"
    # It is given the address: a search would join the clusters of other tests too, and these may end meanwhile.
    guest = program(GUEST, arguments=(address,))
    assert guest.says("address") == address, "but where that is asked for it is"
    kill(first.process.pid)
    for job in ("endless", "guest"):
        error = guest.says("error")
        assert error.startswith(f"ClusterGone job '{job}' failed: the Ray cluster at {address} has gone")
        state, _, reason = guest.says("state").partition(" ")
        assert state == "FAILED"
        assert address in reason
        assert "has ended" in guest.says("savepoint")
    assert guest.says("address") not in (address, cluster)
    assert guest.says("again") == "1000"
    assert guest.process.wait() == 7, "the program ends as it wants to"


FORGETFUL = """
import time
job = ps.run(flow("forgotten"), workers=2)
while not job.status().get("records_read"):
    time.sleep(0.1)
too_large = ps.run(flow("too-large"), workers=100, start_timeout_s=100_000)
try:
    too_large.wait(progress=False)
except ps.NotEnoughResources as error:
    print("error", error, flush=True)
"""


def test_a_program_that_does_not_wait_is_told_what_it_loses(cluster: str, program: Callable[..., Program]) -> None:
    forgetful = program(FORGETFUL, stderr=subprocess.PIPE, address=cluster)
    # Its limit is a day: what cannot fit is not waited for.
    assert "100 x 1 = 100 CPUs, and the cluster has fewer" in forgetful.says("error")
    _, said = forgetful.process.communicate()
    assert forgetful.process.returncode == 0, said
    (line,) = (line for line in said.splitlines() if line.startswith("penstock:"))
    assert "this program ends while its job 'forgotten' is RUNNING" in line
    assert "job.wait()" in line


# As a handler of a web server does, or an executor's thread in a notebook.
OF_A_THREAD = """
import threading
jobs = []
thread = threading.Thread(target=lambda: jobs.append(ps.run(flow("of-a-thread", limit=5000), workers=1)))
thread.start()
thread.join()
print("written", jobs[0].wait(progress=False)["records_written"], flush=True)
print("again", ps.run(flow("again", limit=10), workers=1).wait(progress=False)["records_written"], flush=True)
"""


def test_a_cluster_outlives_the_thread_that_has_started_it(program: Callable[..., Program]) -> None:
    of_a_thread = program(OF_A_THREAD)
    assert of_a_thread.says("written") == "5000"
    assert of_a_thread.says("again") == "10"
    assert of_a_thread.process.wait() == 0


OF_A_RAYLET = """
import os, psutil, signal
ended = flow("of-a-raylet")
job = ps.run(ended, workers=1, checkpoints="epochs", epoch_interval_s=0.2)
status = job.wait_for(lambda status: status["epochs"]["complete"] > 0, 180)
raylet = psutil.Process(status["workers"][0]["pid"]).parent()
assert "raylet" in raylet.name(), raylet
raylet.send_signal(getattr(signal, sys.argv[1]))
try:
    job.wait(progress=False)
except ps.PenstockError as error:
    print("error", type(error).__name__, error, flush=True)
again = ps.resume("of-a-raylet", checkpoints="epochs", local=True)
again.wait_for(lambda status: status["state"] == "RUNNING", 180)
again.cancel()
print("again", again.wait(progress=False)["state"], flush=True)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_job_whose_raylet_ends_can_be_resumed_at_once(program: Callable[..., Program], how: str) -> None:
    """The head lives. Told to end (SIGTERM), a raylet leaves the cluster, then its actors die, then it ends."""
    of_a_raylet = program(OF_A_RAYLET, arguments=(how,))
    error = of_a_raylet.says("error")
    assert error.startswith("ClusterGone job 'of-a-raylet' failed: the Ray cluster at ")
    assert of_a_raylet.says("again") == "CANCELLED"
