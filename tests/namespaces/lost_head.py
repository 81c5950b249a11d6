"""A job that loses its cluster: the host with Ray's head, the JobMaster and the driver loses its power, and the job is
resumed on a new cluster of the other hosts, from its store, with an exact output.

    python -m tests.namespaces.lost_head --seed 1

`make campaign-hosts` runs it before its own faults.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.e2e.processes import wait_until
from tests.e2e.recovery_flows import counted_up, hidden_files, parts, word_of
from tests.namespaces.hosts import ROOT, Host, Hosts
from tests.namespaces.ray_cluster import RayCluster

NAME = "lost-head"
RECORDS, RATE = 200_000, 20_000.0
CPUS = 2  # of each host, as Ray is told
_LIMIT_S = 180.0

RUN = """
import sys
import penstock as ps
from tests.e2e.recovery_flows import word_of

name, out, epochs, records, rate, workers = sys.argv[1:]
word = word_of()
flow = ps.Flow(name)
(
    flow.read(ps.sources.Generator(lambda i: word(i), rate=float(rate), limit=int(records)))
    .key_by(str.lower)
    .count(emit="every")
    .write(ps.sinks.Files(out))
)
job = ps.run(flow, workers=int(workers), checkpoints=epochs, detached=True)
job.wait(progress=False)
"""

RESUME = """
import sys
import penstock as ps

name, epochs = sys.argv[1:]
print(ps.resume(name, checkpoints=epochs).wait(progress=False)["state"])
"""


def wait_gone_from(host: Host) -> None:
    """Return when a host has no worker any more of a job that has gone."""

    def left() -> list[str]:
        return [line for line in host.processes().values() if line.startswith("ray::Worker")]

    try:
        wait_until(lambda: not left(), "no worker is left", _LIMIT_S)
    except AssertionError as error:
        names = [line for line in host.processes().values() if line.startswith("ray::")]
        raise AssertionError(f"{host.name} still has {left()} among {names}") from error


def lose_head(place: Path, seed: int, count: int = 3) -> float:
    """Lose it, and resume the job; the seconds from the loss until the new cluster's job has finished. AssertionError
    when its output is wrong, or something of it is left."""
    rng = random.Random(seed)
    out, epochs = place / "out", place / "epochs"
    with Hosts(count) as hosts:
        cluster = RayCluster(hosts, CPUS)
        # As many workers as the other hosts have room for, so that the job needs several hosts before and after.
        arguments = [NAME, str(out), str(epochs), str(RECORDS), str(RATE), str((count - 1) * CPUS)]
        driver = hosts[0].start(
            [sys.executable, "-c", RUN, *arguments], cluster.environment, ROOT, stderr=subprocess.DEVNULL
        )
        wait_until(lambda: list(epochs.rglob("manifests/*.json")) or driver.poll() is not None, "an epoch is complete")
        time.sleep(rng.uniform(0.0, 3.0))  # at any moment, for what the seed is
        assert driver.poll() is None, f"the job ended early, with {driver.returncode}"
        since = time.monotonic()
        hosts[0].crash()
        others: list[Host] = hosts[1:]
        for host in others:
            wait_gone_from(host)
            host.run(["ray", "stop", "--force"])
        again = RayCluster(others, CPUS)
        text = others[0].python(RESUME, NAME, str(epochs), env=again.environment, directory=ROOT, limit_s=_LIMIT_S)
        took_s = time.monotonic() - since
        assert text.strip() == "FINISHED", text
        entries = (line.split("\t") for lines in parts(out).values() for line in lines)
        counted_up("Files", ((key, int(number)) for key, number in entries), Counter(map(word_of(), range(RECORDS))))
        assert not hidden_files(out)
        assert not list(epochs.rglob("*.json")), "epochs are left"
        for host in others:
            assert not [name for name in host.segments() if "penstock" in name.lower()]
    return took_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.namespaces.lost_head", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=3)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="penstock-lost-head-"))
    took_s = lose_head(place, options.seed, options.hosts)
    print(f"lost head, seed {options.seed}: exact, resumed and finished after {took_s:.1f} s", flush=True)
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
