"""The campaign of hosts: jobs over several machines, to whose processes, machines and links something happens.

    python -m tests.namespaces.campaign --faults 60 --seed 1
    python -m tests.namespaces.campaign --faults 10 --hosts 2 --kinds host,cut-3
    python -m tests.namespaces.campaign --faults 10 --hosts 1          only processes; nothing leaves the machine
    make campaign-switching-trees                                 relays and links, while trees switch every second

It makes hosts on this machine (tests/namespaces/hosts.py), starts Ray on each, and runs the jobs of the kill campaign
(tests/e2e/kill_campaign.py) on host 0 over all hosts, with their checkpoints and outputs in a directory that all hosts
share. Beside its "worker", "master", "two", "pause", "pause-master", "file" and "store" there are:

    agent      the process that looks after the workers of a host is killed; no worker is to notice
    relay      the relay of a host is killed, in jobs that have relays; no worker is to notice
    relay-stop the relay of a host is stopped (SIGSTOP), and is to be killed and replaced
    cut-relay  the link of a host is cut for 0.2 to 3 s, and meanwhile the relay of a host is killed
    host       a host without the driver and the head of Ray loses its power; another comes at its address
    cut-0.2    the link of a host is cut for 0.2 s; also cut-3
    cut-30     for 30 s, after which nothing may run there that was given up meanwhile
    cut-out    for 3 s nothing of what a host sends arrives; cut-in: nothing arrives at it
    between    two hosts without the head of Ray do not reach each other for good, until one of them is given up
    between-3  they do not for 3 s; between-out: one of them does not reach the other for good
    head       once, before the others: host 0 loses its power, and the job is resumed on a new cluster (lost_head.py)
    loss       for 10 s a host's link loses 5 % of the frames of each direction

Times are from the fault. Those of short cuts and of losses are from their end, and those of relays from the time at
which another relay has taken the place. After each job its output must be exact, and no process and no segment of it
may be left on any host.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.e2e.kill_campaign import (
    GONE_S,
    KILL_LIMIT_S,
    DidNotStart,
    Fault,
    Figures,
    Outcome,
    Process,
    Sample,
    Tormentor,
    Watch,
    campaign,
    machine,
    master_process,
    quantiles,
    show,
    silent,
)
from tests.e2e.processes import wait_until
from tests.e2e.recovery_flows import FLOWS
from tests.namespaces import spaces
from tests.namespaces.hosts import ROOT, Hosts
from tests.namespaces.links import Ways
from tests.namespaces.lost_head import lose_head
from tests.namespaces.ray_cluster import RayCluster
from tests.namespaces.remote import Harm, Remote

#: What happens to single processes and to the store, as in the kill campaign.
PROCESSES = ("worker", "master", "two", "pause", "pause-master", "file", "store")
CUT_RELAY_S = (0.2, 3.0)
CUTS_S = {"cut-0.2": 0.2, "cut-3": 3.0, "cut-30": 30.0, "cut-out": 3.0, "cut-in": 3.0}
RELAYS = ("relay", "relay-stop", "cut-relay")
BETWEEN: dict[str, Ways] = {"between": "both", "between-3": "both", "between-out": "there"}
BETWEEN_S = 3.0
KINDS = (*PROCESSES, "agent", *RELAYS, "host", *CUTS_S, *BETWEEN, "loss")
ALL_KINDS = ("head", *KINDS)
LOSS, LOSS_S = 0.05, 10.0
FAULTS_A_RUN = 6
RATE, SECONDS = 10_000.0, 30.0  # of a run's records
TURNS = ("wordcount", "to all")  # the flows; the second has relays
STARTS = 3  # of one job
RAY_KNOWS_S = 300.0
# With these settings Ray declares a node dead that has been silent for some 25 s, so during the long cut, and not at
# any time after it (see tests/namespaces/ray_cluster.py). A busy machine answers sooner than within three seconds.
RAY = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
}
# Processes of Ray's that belong to no job.
_OF_RAY = re.compile(r"ray::(IDLE|DashboardAgent|RuntimeEnvAgent)")


class HostsPlace:
    """Where the processes of a job are: on hosts. See ThisMachine."""

    def __init__(self, remote: Remote, count: int) -> None:
        self.remote = remote
        self.count = count

    def host_of(self, node: str) -> int:
        """The number of the host on which a Ray node is, or was."""
        import ray

        (address,) = (entry["NodeManagerAddress"] for entry in ray.nodes() if entry["NodeID"] == node)
        return int(address.rsplit(".", 1)[1]) - 1

    def all_there(self) -> set[str]:
        """Each host has a node of Ray's, and Ray knows that earlier ones are dead; returns these nodes then."""
        import ray

        for host in range(1, self.count):
            if not any("/raylet/raylet " in line for line in self.remote.processes(host).values()):
                self.remote.boot(host)

        def one_each() -> bool:
            addresses = [entry["NodeManagerAddress"] for entry in ray.nodes() if entry["Alive"]]
            return len(addresses) == len(set(addresses)) == self.count

        wait_until(one_each, "Ray has one living node on each host", RAY_KNOWS_S)
        return self.living()

    @staticmethod
    def living() -> set[str]:
        """The nodes that Ray takes for alive."""
        import ray

        return {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}

    def kill(self, processes: Sequence[Process]) -> int:
        on = [(self.host_of(node), pid) for node, pid in processes]
        there = sum(str(pid) in self.remote.processes(host) for host, pid in on)
        for host, pid in on:
            self.remote.kill(host, pid)
        return there

    @contextmanager
    def paused(self, process: Process) -> Iterator[None]:
        """Stop a process for as long as the block runs; it continues then, unless it was killed."""
        host = self.host_of(process[0])
        self.remote.stop(host, process[1])
        try:
            yield
        finally:
            self.remote.wake(host, process[1])

    def of_job(self, host: int) -> list[str]:
        """What runs on a host for jobs."""
        return [line for line in self.remote.processes(host).values() if self._of_job(line)]

    def stale(self, host: int, now: set[Process]) -> list[str]:
        """The workers on a host that the job has replaced."""
        pids = {pid for node, pid in now if self.host_of(node) == host}
        return [line for pid, line in self.named(host, "ray::Worker").items() if pid not in pids]

    def named(self, host: int, name: str) -> dict[int, str]:
        """The processes on a host whose names begin so."""
        found = self.remote.processes(host)
        return {int(pid): line for pid, line in found.items() if line.startswith(name)}

    @staticmethod
    def _of_job(line: str) -> bool:
        return line.startswith("ray::") and not _OF_RAY.match(line)

    def check_empty(self, seen: set[Process]) -> None:
        for host in range(self.count):
            wait_until(lambda host=host: not self.of_job(host), f"no process of the job is left on host {host}", GONE_S)
            left = [name for name in self.remote.segments(host) if "penstock" in name.lower()]
            assert not left, f"segments are left on host {host}: {left}"


class HostTormentor(Tormentor):
    """Runs one flow as a job over all hosts, and harms them. `place` is a HostsPlace."""

    place: HostsPlace

    def run(self, faults: int, kills: float = math.inf, wait_s: float = 2.0) -> None:
        """See Tormentor. A job that cannot start is tried again if Ray has declared nodes dead to which nothing was
        done, as it does on a busy machine, and some time after a long cut."""
        for left in reversed(range(STARTS)):
            nodes = self.place.all_there()
            try:
                super().run(faults, kills, wait_s)
            except DidNotStart as error:
                dead = nodes - self.place.living()
                if not dead or not left:
                    raise
                print(f"Ray has declared {len(dead)} living nodes dead, so the run begins again: {error}", flush=True)
            else:
                return

    def _finished(self, watch: Watch) -> None:
        """Tells how often the trees switched, which they must have done when they are to do so by the clock."""
        switches: dict[tuple[int, int, int], int] = {}
        took_ms: set[tuple[int, float]] = set()
        for sample in watch.samples:
            for worker in sample.status.get("workers", ()):
                for stream in worker.get("streams", ()):
                    switches[worker["pid"], worker["index"], stream["stream"]] = stream["switches"]
                    if stream["switches"]:
                        took_ms.add((worker["index"], stream["last_switch_ms"]))
        if not switches:
            return
        count, took = sum(switches.values()), quantiles(ms for _, ms in took_ms) or {"p50": 0, "p99": 0}
        print(
            f"            the trees switched {count} times; from announcement to end p50 {took['p50']:.1f} ms, p99 "
            f"{took['p99']:.1f} ms",
            flush=True,
        )
        if str(self.options.get("trees", "auto")).startswith("toggle"):
            assert count > len(switches), f"trees that were to switch switched {count} times in {len(switches)} streams"

    def _note(self, watch: Watch, job: Any) -> None:
        last = watch.samples[-1]
        self._placed = {task["number"]: task["worker"] for task in last.status["tasks"]}
        on = {self.place.host_of(node) for node, _ in last.processes}
        assert on == set(range(self.place.count)), f"the workers are on the hosts {sorted(on)} of {self.place.count}"

    def _fault(self, job: Any, watch: Watch, kind: str) -> Fault | None:
        if kind in PROCESSES:
            return super()._fault(job, watch, kind)
        if kind in RELAYS:
            return self._fault_of_relay(watch, kind)
        if kind in BETWEEN:
            return self._fault_between(watch, kind)
        before = watch.samples[-1].processes
        # Host 0 has the driver, the JobMaster, and Ray's head.
        far = kind in ("host", "cut-30", "agent")
        among = {self.place.host_of(node) for node, _ in before} - ({0} if far else set())
        if not among:  # a job whose host was lost uses one host less
            return None
        host = self.rng.choice(sorted(among))
        names = [f"host {host}"]
        self._watch_ray({node for node, _ in before if self.place.host_of(node) == host})
        began = time.monotonic()
        if kind == "host":
            going = {process for process in before if self.place.host_of(process[0]) == host}
            try:
                if self.place.host_of(master_process(job)[0]) == host:
                    going = before
            except Exception:
                if job.status()["state"] != "FINISHED":
                    raise
                return None
            began = time.monotonic()
            self.place.remote.crash(host)
            return Fault(names, going, before, began, began, sum(self.place.host_of(node) == host for node, _ in going))
        if kind == "agent":
            agents = self.place.named(host, "ray::Agent")
            for pid in agents:
                self.place.remote.kill(host, pid)
            return Fault(names, set(), before, began, time.monotonic(), len(agents)) if agents else None
        if kind == "loss":
            self.place.remote.loss(host, LOSS)
            time.sleep(LOSS_S)
            self.place.remote.loss(host, 0.0)
            return Fault(names, set(), before, began, time.monotonic())
        self.place.remote.cut(host, kind[4:] if kind in ("cut-out", "cut-in") else "both")
        if kind != "cut-30":
            time.sleep(CUTS_S[kind])
            self.place.remote.restore(host)
            return Fault(names, set(), before, began, time.monotonic())
        self._restoring = threading.Timer(CUTS_S[kind], self.place.remote.restore, (host,))
        self._restoring.start()
        until = began + CUTS_S[kind]
        noticed = watch.wait(
            lambda s: silent(s.status) or s.status["state"] != "RUNNING" or s.processes != before or s.at > until,
            began,
            2 * KILL_LIMIT_S,
        )
        return Fault(names, set(), before, began, noticed.at)

    def _fault_of_relay(self, watch: Watch, kind: str) -> Fault | None:
        """Kill or stop a relay, and wait until another one has taken its place."""
        if not watch.samples[-1].status["relays"]:
            return None  # no record of this flow goes to all

        def ready(sample: Sample) -> dict[str, int]:
            return {r["node_id"]: r["pid"] for r in sample.status.get("relays", ()) if r["state"] == "ready"}

        last = watch.wait(lambda s: bool(ready(s)), time.monotonic(), KILL_LIMIT_S)
        if not ready(last):
            return None  # it has ended meanwhile
        node, pid = self.rng.choice(sorted(ready(last).items()))
        host = self.place.host_of(node)
        self._watch_ray({node})
        names = [f"host {host}"]
        began = time.monotonic()
        if kind == "cut-relay":
            cut, length_s = self.rng.randrange(self.place.count), self.rng.uniform(*CUT_RELAY_S)
            killed_at_s = self.rng.uniform(0.0, length_s)
            self.place.remote.cut(cut, "both")
            time.sleep(killed_at_s)
            self.place.remote.kill(host, pid)
            time.sleep(length_s - killed_at_s)
            self.place.remote.restore(cut)
            names.append(f"host {cut} cut for {length_s:.1f} s")
        else:
            (self.place.remote.kill if kind == "relay" else self.place.remote.stop)(host, pid)
        watch.wait(lambda s: ready(s).get(node, pid) != pid, began, KILL_LIMIT_S)
        return Fault(names, set(), last.processes, began, time.monotonic(), int(kind != "relay-stop"))

    def _fault_between(self, watch: Watch, kind: str) -> Fault | None:
        """Cut two hosts from each other. A cut for good must be told, and lasts until one of them is given up."""
        before = watch.samples[-1].processes
        among = sorted({self.place.host_of(node) for node, _ in before} - {0})
        if len(among) < 2:
            return None
        one, other = self.rng.sample(among, 2)
        hosts = {node: self.place.host_of(node) for node, _ in before}
        self._watch_ray({node for node, host in hosts.items() if host in (one, other)})
        began = time.monotonic()
        self.place.remote.cut_between(one, other, BETWEEN[kind])
        try:
            if kind == "between-3":
                time.sleep(BETWEEN_S)
                return Fault([f"host {one}", f"host {other}"], set(), before, began, time.monotonic())
            told = watch.wait(lambda s: bool(s.status.get("links")), began, KILL_LIMIT_S)
            gone = watch.wait(lambda s: bool(before - s.processes), began, KILL_LIMIT_S)
        finally:
            self.place.remote.restore_between(one, other)
        if not before - gone.processes:  # the job has ended meanwhile
            return None
        assert told.status["links"], "a machine is given up, and nobody was told of the link"
        lost = {hosts[node] for node, _ in before - gone.processes}
        assert len(lost) == 1, f"the hosts {sorted(lost)} are given up"
        assert lost < {one, other}, f"host {lost} is given up, and the cut was between the hosts {one} and {other}"
        going = {process for process in before if hosts[process[0]] in lost}
        return Fault([f"host {host}" for host in lost], going, before, began, gone.at)

    def _watch_ray(self, nodes: set[str]) -> None:
        """Note, in a thread, when Ray declares these nodes dead."""
        import ray

        began = time.monotonic()
        self._node_dead_s: float | None = None
        self._looked_enough = threading.Event()

        def look() -> None:
            while not self._looked_enough.wait(0.1):
                if not any(entry["Alive"] for entry in ray.nodes() if entry["NodeID"] in nodes):
                    self._node_dead_s = time.monotonic() - began
                    return

        self._looking = threading.Thread(target=look, daemon=True)
        self._looking.start()

    def _follow(self, job: Any, watch: Watch, outcome: Outcome, fault: Fault) -> None:
        super()._follow(job, watch, outcome, fault)
        if outcome.kind in PROCESSES:
            return
        host = int(fault.names[0].split()[1])
        if outcome.kind in BETWEEN and fault.going:
            wait_until(
                lambda: not self.place.stale(host, watch.samples[-1].processes),
                f"nothing that was given up runs on host {host}",
            )
        if outcome.kind == "cut-30":
            noticed_s = fault.over - fault.began
            outcome.running_s = None if outcome.running_s is None else outcome.running_s + noticed_s
            outcome.full_s = None if outcome.full_s is None else outcome.full_s + noticed_s
            self._restoring.join()
            wait_until(
                lambda: not self.place.stale(host, watch.samples[-1].processes),
                f"nothing that was given up runs on host {host}",
            )
        self._looked_enough.set()
        self._looking.join()
        outcome.node_dead_s = self._node_dead_s
        if outcome.kind == "host" or outcome.node_dead_s is not None:
            self.place.remote.boot(host)


def driver(settings: dict[str, Any]) -> int:
    """The part that runs on host 0."""
    import ray

    from penstock.actors.cluster import NAMESPACE

    options = argparse.Namespace(**settings)
    ray.init(namespace=NAMESPACE, logging_level="error", log_to_driver=False)  # joins the cluster of RAY_ADDRESS
    place = Path(options.place)
    where = HostsPlace(Remote(options.descriptor), options.hosts)

    def make(*arguments: Any, local: bool, **more: Any) -> Tormentor:
        over: dict[str, Any] = {"nodes": options.hosts, "trees": options.trees} if options.hosts > 1 else {}
        made = HostTormentor(*arguments, **more, **over)
        made.place = where
        return made

    before = machine()
    figures = campaign(options, place, make, Figures(kinds=KINDS, of_faults=True), _replayed, TURNS)
    show(figures)
    if options.json:
        line = {
            "campaign": "hosts",
            "machine": before,
            "options": settings,
            "summary": figures.summary(),
            "runs": [asdict(run) for run in figures.runs],
        }
        with Path(options.json).open("a") as out:
            out.write(json.dumps(line) + "\n")
    return 0 if figures.good else 1


def _replayed(options: argparse.Namespace, name: str, seed: int, left: int) -> str:
    return (
        f"python -m tests.namespaces.campaign --seed {seed} --runs 1 --faults {min(left, options.per_run)} "
        f"--hosts {options.hosts} --flow '{name}' --workers {options.workers} --kinds {options.kinds} "
        f"--rate {options.rate:g} --seconds {options.seconds:g} --interval {options.interval:g} "
        f"--per-run {options.per_run} --trees {options.trees}"
    )


def main() -> int:
    """Make the hosts, and run the driver on the first of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.namespaces.campaign", description=__doc__.split("\n\n")[0])
    parser.add_argument("--faults", dest="kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next one's is one more")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--flow", choices=list(FLOWS), help=f"default: {' and '.join(TURNS)} in turn")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kinds", help=f"of {','.join(ALL_KINDS)}")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of records in a run")
    parser.add_argument("--interval", type=float, default=1.0, help="between epochs, s")
    parser.add_argument("--per-run", type=int, default=FAULTS_A_RUN, help="faults in a run, at most")
    parser.add_argument(
        "--trees",
        type=lambda text: int(text) if text.isdigit() else text,
        default=2,
        help="see penstock.run (%(default)s, so all streams have trees); toggle:1 has the trees switch every second",
    )
    parser.add_argument("--runs", type=int, default=0, help="at most; 0: as many as the faults take")
    parser.add_argument("--go-on", action="store_true", help="after a run that failed, too")
    parser.add_argument("--json", type=Path, help="append the figures to this file, as one line")
    options = parser.parse_args()
    allowed = ALL_KINDS if options.hosts > 1 else PROCESSES
    kinds = options.kinds.split(",") if options.kinds else list(allowed)
    if wrong := set(kinds) - set(allowed):
        parser.error(f"--kinds: {', '.join(sorted(wrong))}; with {options.hosts} hosts there are {', '.join(allowed)}")
    if reason := spaces.why_not():
        parser.error(reason)
    place = Path(tempfile.mkdtemp(prefix="penstock-hosts-"))
    if "head" in kinds:
        kinds.remove("head")
        took_s = lose_head(place / "head", options.seed, options.hosts)
        print(f"lost head, seed {options.seed}: exact, resumed and finished after {took_s:.1f} s", flush=True)
    if not kinds:
        return 0
    options.kinds = ",".join(kinds)
    with Hosts(options.hosts) as hosts:
        cluster = RayCluster(hosts, cpus=2 * options.workers + 4, options=RAY)
        print(f"{options.hosts} hosts with Ray; files in {place}, and what Ray says in ray.txt there", flush=True)
        here, there = socket.socketpair()
        settings = {
            **vars(options),
            "place": str(place),
            "descriptor": there.fileno(),
            "json": str(options.json.absolute()) if options.json else None,
            "moving": False,
            "local": False,
        }
        program = hosts[0].start(
            [sys.executable, "-m", "tests.namespaces.campaign", "--on-host", json.dumps(settings)],
            env={**cluster.environment, "XDG_STATE_HOME": str(place / "state")},
            directory=ROOT,
            pass_fds=[there.fileno()],
            stderr=(place / "ray.txt").open("w"),
        )
        there.close()
        Harm(hosts, cluster).serve(here)
        code: int = program.wait()
    if not code:
        shutil.rmtree(place, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(driver(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--on-host"] else main())
