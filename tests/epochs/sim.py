"""A job's workers, its JobHost and its store in one thread, with faults that a seed decides.

Tasks, channels, run loops, the participants, the JobHost and the coordinator in it are the real ones. Simulated are the
network between workers (links.py: within a node inboxes of limited room; what one process sends to another keeps its
order, but anything may pass what others send), the messages between JobHost and workers, the time, the store, the
sinks' database, processes and their deaths. A worker dies between any two steps, and with it its inbox, what it had
still to write, and the last of what it had sent; what it had told the JobHost may arrive after its death. When the
JobHost dies all workers die.

Half of the seeds have several nodes (nodes.py): then workers of different nodes have the real TCP transport over
simulated connections, and nodes are cut off, slow, lost and dead. Jobs that send to all have relays (relays.py), which
die at any step.

The store may be closed for a while, full or read-only: its files then fail as those of a disk do, and the store, the
tasks and the keeper of the store, all real, make of it what they do. The keeper has no thread: the cluster carries out
what it has to do, and waits between its tries.

A worker, or the JobHost, may be paused: it does nothing for a while, and what others send it waits; what it had
told may arrive meanwhile. A worker that is dead to all others may wake up later and go on for a moment, with the
inboxes that it knew: it processes, writes to sinks and saves snapshots, but does no more of what it was told.

Some jobs are told to stop with a savepoint, whatever else happens to them, and are then started from it: the records of
both together must be those of a run without faults.

In half of the jobs chains go to Spark and back, by calls of the JobHost like all others. In most of these jobs it is
chance that sends them (tests/bridge/chance_scheduler.py); in the others a ParadigmScheduler decides, with a simulated
Spark (tests/bridge/simulated_spark.py).

    cluster = EpochCluster(epoch_flow(7), 7, faults_of(7))
    cluster.run()          # raises what a check found (tests/epochs/checks.py), or Stuck

The cluster is a carrier of the JobHost, as the JobMaster is: it starts and kills processes, carries calls and their
answers, and writes manifests. It decides nothing that the JobHost decides.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from penstock.bridge.burst import Mode
from penstock.bridge.commands import DivertTasks, GreetBridge, SparkCommand, TakeSample, UndivertTasks
from penstock.bridge.forms import RangeForm, RangeRun, answer_of, answer_rows, as_columns, as_records, range_form
from penstock.bridge.paradigm_scheduler import ParadigmScheduler
from penstock.host.carry.store_keeper import NotSaved, StoreKeeper
from penstock.host.decide import commands as host_commands
from penstock.host.decide.death import Death
from penstock.host.decide.job_host import CoordinatorEvent, Found, HostOptions, JobHost, RequestEvent
from penstock.host.decide.process_commands import (
    Build,
    ExpectRelay,
    Remove,
    Removed,
    Stop,
    TellRelay,
    UseRelays,
)
from penstock.host.process.collected import Collected
from penstock.runtime.epochs import coordinator as protocol
from penstock.runtime.epochs.coordinator import Coordinator, EpochOptions
from penstock.runtime.epochs.manifest import Blob, Manifest, encode
from penstock.runtime.epochs.participant import Declined, EpochReport, NoLongerQuiet, Participant
from penstock.runtime.epochs.restore import cannot_take_back
from penstock.runtime.epochs.snapshot import worth_compacting
from penstock.runtime.epochs.store import Store, manifest_files
from penstock.runtime.errors import PenstockError, SnapshotDamaged, StoreError, StoreUnreachable
from penstock.runtime.exchange.grouping import All
from penstock.runtime.exchange.inbox import Inbox as TaskInbox
from penstock.runtime.exchange.output_cache import OutputCaches
from penstock.runtime.operators.ends import Write, Writing
from penstock.runtime.operators.micro_batch import Bridge, MicroBatchResult
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.program.plan import Plan, fused_by_key
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.root import MulticastRoot
from penstock.runtime.transport.base import Buffer, SilentLink
from penstock.runtime.worker.blackbox import Crash, Note
from penstock.runtime.worker.run_loop import RunLoop
from penstock.runtime.worker.wiring import Wiring, WiringOptions
from tests.bridge.chance_scheduler import ChanceScheduler
from tests.bridge.simulated_spark import SimulatedSpark, Spark
from tests.epochs.checks import Checks, reference
from tests.epochs.dict_files import DictFiles
from tests.epochs.links import Ends, Inbox, Network, Node
from tests.epochs.nodes import Nodes
from tests.epochs.outside import Log, LogTransactions, Outside, Transactions
from tests.epochs.relays import Relays
from tests.program.random_flows import RandomFlow

STEPS_MAX = (
    1_000_000  # of a run; few need a hundredth of it, and one with 4,900 switches to Spark 388,668 (seed 304972)
)
IDLE_MAX = 12_000  # in which no record is taken up, nobody dies or is made again; more in a large flow, see IDLE_A_TASK
IDLE_A_TASK = 1_000


class Stuck(AssertionError):
    """Nobody can go on, or nothing comes of it, but the job has not ended."""


# --- what stays ----------------------------------------------------------------------------------------------------


class MemoryStore(Store):
    """The store over files in memory, which fail, forget and change as the faults say."""

    def __init__(self, faults: Faults, rng: random.Random, tasks: int, job: str) -> None:
        self.disk = DictFiles()
        self.disk.remote = faults.remote
        super().__init__(self.disk, job)
        self.inline_bytes = faults.inline_bytes
        self.written: dict[str, bytes] = {}  # blobs, whatever became of them
        self.manifests: dict[int, Manifest] = {}
        self.ruined: set[str] = set()  # files that were damaged while their copies were, so that they may be lost
        self.refused: set[int] = set()  # epochs whose manifests the directory never takes
        self._faults = faults
        self._put = faults.put / tasks
        self._get_fails = faults.get / tasks
        self._rng = rng

    def put(self, name: str, parts: Sequence[Buffer]) -> Blob:
        if self._put and (drawn := self._rng.random()) < self._put:
            if drawn < self._put / 3:  # it has arrived, and the answer is lost
                self._keep(name, parts)
            raise StoreUnreachable("the store takes nothing")
        return self._keep(name, parts)

    def _keep(self, name: str, parts: Sequence[Buffer]) -> Blob:
        data = b"".join(parts)
        assert self.written.get(name, data) == data, f"{name} is written twice, with different bytes"
        self.written[name] = data
        return super().put(name, parts)

    def get(self, blob: Blob) -> bytes:
        if self._get_fails and self._rng.random() < self._get_fails / (1 + len(self.manifests)):  # chains grow
            raise StoreUnreachable("the store gives nothing")
        data = super().get(blob)
        assert data == self.written[blob.name], f"{blob.name} is damaged, and was taken for whole"
        return data

    def whole(self, manifest: Manifest) -> bool:
        """Whether a manifest, and all that it refers to, can be read."""
        try:
            self.read_manifest(manifest.epoch)
            self.verify(manifest)
        except SnapshotDamaged:
            return False
        return True

    def write_manifest(self, manifest: Manifest) -> None:
        copied = replace(manifest, tasks=[replace(entry, blobs=list(entry.blobs)) for entry in manifest.tasks])
        there = self.manifests.get(manifest.epoch)
        assert there is None or there == copied, f"epoch {manifest.epoch} is complete already, with other contents"
        if manifest.epoch in self.refused:
            raise StoreUnreachable("the store does not take this")
        drawn = self._rng.random()
        if drawn < self._faults.manifest:
            if there is None and not (self.remote or manifest.final):  # those are tried until they are there
                self.refused.add(manifest.epoch)
            raise StoreUnreachable("the store takes nothing")
        if drawn < self._faults.manifest + self._faults.unknown:
            if self._rng.random() < 0.5:
                self._complete(copied)
            raise StoreUnreachable("the store does not answer")
        self._complete(copied)

    def _complete(self, manifest: Manifest) -> None:
        try:
            super().write_manifest(manifest)
        finally:
            if self.may_be_found(manifest.epoch):
                self.manifests[manifest.epoch] = manifest

    def may_be_found(self, epoch: int) -> bool:
        """Whether a file of an epoch's manifest is there."""
        return any(name in self.disk.files for name in manifest_files(epoch))

    def given_up(self, epoch: int) -> None:
        """The keeper says that the manifest of an epoch is not there, and never will be."""
        if not self.may_be_found(epoch):
            self.manifests.pop(epoch, None)  # it may have been, before all was removed

    def close(self, read_only: bool, slack: int) -> str:
        """Let the store be read-only, or full but for so many bytes, until `open_again`."""
        self.disk.read_only = read_only
        if read_only:
            return "the store is read-only"
        self.disk.room = self.disk.used + slack
        return f"the store is full but for {slack} bytes"

    def open_again(self) -> None:
        """Let the store take everything."""
        self.disk.read_only, self.disk.room = False, sys.maxsize

    def ruin(self, name: str) -> None:
        """Make a blob unreadable for good, its copy too."""
        for one in (name, name.replace("snapshots/", "copies/")):
            self.disk.files.pop(one, None)
        self.ruined.add(name)

    def damage(self, both: bool, rng: random.Random) -> str | None:
        """Damage one file that has a copy, or a blob and its copy (`both`), in any way; what was done."""
        disk = self.disk.files
        names = sorted(name for name in disk if name.startswith("snapshots/") or not both)
        if self.disk.remote and not both:  # blobs have no copies, so manifests would be damaged twice
            last = {name: name.partition("/")[2] for name in names}
            names = [name for name in names if disk.get(f"manifests/{last[name]}") == disk.get(f"copies/{last[name]}")]
        if not names:
            return None
        # Most files are of no use any more; the newest are, and those of the last epoch.
        name = names[max(rng.randrange(len(names)) for _ in range(3))]
        if both and self.manifests and rng.random() < 0.7:
            blobs = [blob.name for blob in self.manifests[max(self.manifests)].blobs() if blob.name in disk]
            name = rng.choice(blobs) if blobs else name
        ways = []
        for one in [name, name.replace("snapshots/", "copies/")] if both else [name]:
            ways.append(rng.choice(("delete", "truncate", "flip", "replace")))
            data = bytearray(disk.pop(one, b""))
            if not data or ways[-1] == "delete":
                continue
            if ways[-1] == "truncate":
                del data[rng.randrange(len(data)) :]
            elif ways[-1] == "flip":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            else:
                data[:] = rng.randbytes(len(data))
            disk[one] = bytes(data)
        self._note_ruin(name)
        return f"{' and '.join(ways)} {name}{' and its copy' * both}"

    def _note_ruin(self, name: str) -> None:
        """A file, or its copy, was damaged: it is ruined when neither of the two is as it was written."""
        last = name.partition("/")[2]
        folder = "manifests" if last.endswith(".json") else "snapshots"
        name = f"{folder}/{last}"
        if folder == "snapshots":
            data = self.written.get(name)
        else:
            manifest = self.manifests.get(int(last.partition(".")[0]))
            data = None if manifest is None else encode(manifest)
        if data not in (self.disk.files.get(name), self.disk.files.get(f"copies/{last}")):
            self.ruined.add(name)

    def may_be_lost(self, names: Iterable[str]) -> None:
        """What is told to be lost must be: whoever mends must never spoil the one file that is whole."""
        whole = sorted(set(names) - self.ruined)
        assert not whole, f"{whole} are lost, and only one file of each was ever damaged at a time"

    def wipe(self) -> str:
        """Remove everything."""
        self.ruined.update(self.disk.files, self.written)  # of some only the copy was left
        self.disk.files.clear()
        return "remove all"


# --- what goes wrong -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """What a seed does to a job. Rates are chances a turn (or a call, for the store); times are virtual seconds."""

    # The cluster, and how it runs.
    workers: int = 3
    spread: bool = True  # else some workers may have no tasks
    capacity: int = 4096
    window: int = 300
    memory_bytes: int = 2000
    disk_bytes: int = 1 << 40
    interval_s: float = 0.01
    timeout_s: float = 0.5
    slow: tuple[float, ...] = (0.0, 0.0, 0.0)  # the chance that a worker, when it is its turn, does nothing
    hurry: float = 0.15  # how soon what coordinator and workers tell each other is taken up
    writing: float = 0.15  # how soon snapshots are written
    lazy_sources: float = 0.0  # the chance that a source, when it is its turn, does nothing
    mixed: bool = True  # what different workers send passes each other
    log: bool = False  # sinks write to a log, which takes nothing back
    stop_at: float | None = None  # when the job is told to stop
    halt_at: float | None = None  # when the job is told to stop with a savepoint, from which it is started again
    no_copy: float = 0.0  # the chance that this savepoint cannot be written
    rescales: int = 0
    rescale_rate: float = 0.01
    migrations: int = 0
    migration_rate: float = 0.01

    # The operation stream: chains go there and back, worker by worker, whenever; some micro-batches are not answered.
    diversions: float = 0.0
    unanswered: float = 0.0
    paradigms: Mode | None = None  # a ParadigmScheduler decides in this mode, in place of chance
    spark_trouble: float = 0.0  # the chance that a Spark does not start, dies or falls silent

    # Deaths.
    kills: int = 3
    kill_rate: float = 0.003
    pairs: float = 0.0  # the chance that another worker dies at once
    moments: frozenset[str] = frozenset()  # when workers are likely to die
    stillborn: float = 0.0  # the chance that a process dies before it has started
    master_kills: int = 0
    master_rate: float = 0.0005

    # Pauses, of workers and of the coordinator.
    pauses: int = 0
    pause_rate: float = 0.003
    pause_s: float = 0.1  # at most
    wakes: float = 0.0  # the chance that a dead process goes on for a moment, later

    # Nodes, and the lines between them.
    nodes: int = 1
    evenly: bool = True  # else chance says where the workers are at first
    delay_s: float = 0.001
    apart_s: float = 0.0  # how far the clocks of nodes are apart, at most
    slow_nodes: float = 0.0  # the chance that a node is slow
    node_timeout_s: float = 0.1
    cuts: int = 0
    cut_rate: float = 0.05  # of cuts, pauses and breaks, in a fiftieth of the turns
    cut_s: float = 0.1  # at most
    partial_cuts: int = 0  # between two nodes that both reach the JobMaster
    breaks: int = 0  # of connections
    again_s: float = 0.01  # until there is another connection, at most
    node_kills: int = 0
    node_pauses: int = 0
    relay_kills: int = 0
    relay_rate: float = 0.1
    limits: float = 0.0  # how often trees get another limit, in a fiftieth of the turns
    slow_relays: float = 0.0  # the chance that a relay, when it is its turn, does nothing
    no_room: float = 0.0  # the chance that a relay finds no room in the memory of a worker

    # What drivers ask for, and whoever watches processes.
    asks: float = 0.0  # for the status
    hangs: float = 0.0  # a process is taken for one that hangs; also when it has died since

    # The store.
    put: float = 0.0  # in an epoch of all tasks
    get: float = 0.0  # when all tasks go back
    manifest: float = 0.0  # it is not written, for sure
    remote: bool = False  # it is no directory: what is written may come to be there later
    unknown: float = 0.0  # it may be written
    damages: int = 0  # a blob and its copy
    scratches: int = 0  # one file, whose copy is whole
    wipes: int = 0  # everything is removed
    damage_rate: float = 0.002
    full: int = 0  # how often it is full for a while
    read_only: int = 0  # and how often read-only
    closure_rate: float = 0.005
    closure_s: float = 0.1  # at most
    closed_to_manifests: float = 0.0  # the chance that this begins just before a manifest is written
    looks: float = 0.0  # the keeper looks after what is saved
    inline_bytes: int = 0  # blobs of this size are in the manifest
    merges: float = 0.0  # the chance that snapshots are put together when an epoch is complete
    collects: float = 0.0  # and that what no epoch needs is deleted


#: When a worker is likely to die where `Faults.moments` says so: a manifest is being written, an epoch is committed,
#: the last epoch is written or committed, tasks are taken out, made, or joined. Beside these there is "doubt": a
#: manifest is not written, or nobody knows whether it is. And, where a ParadigmScheduler decides, that a worker is told
#: of it.
MOMENTS = ("save", "complete", "final", "remove_tasks", "build_tasks", "connect_tasks")

CALLS: dict[type, str] = {
    protocol.Complete: "complete",
    Remove: "remove_tasks",
    Build: "build_tasks",
    protocol.ConnectTasks: "connect_tasks",
    DivertTasks: "divert",
    UndivertTasks: "undivert",
}

NONE = Faults(kills=0)


def faults_of(seed: int) -> Faults:
    """A mix of the seed's choosing: every kind is absent from many."""
    rng = random.Random(f"faults {seed}")
    disk = random.Random(f"disk {seed}")
    choice, chance = rng.choice, lambda p: rng.random() < p
    workers = choice((1, 2, 3, 3, 3, 4, 5))
    kills = choice((0, 1, 2, 3, 3, 5, 8))
    store = chance(0.4)
    interval = choice((0.0005, 0.002, 0.002, 0.01, 0.01, 0.1, 1e6))
    memory = choice((0, 500, 2000, 1 << 20))
    tiny_disk = chance(0.1) and interval < 1  # what waits on it can go only when an epoch is complete
    pausing = random.Random(f"pauses {seed}")  # of its own: seeds without pauses are as they were before there were any
    pauses = pausing.choice((0, 0, 1, 3, 10))
    asking = random.Random(f"asks {seed}")
    scheduling = random.Random(f"scheduler {seed}")
    doubting = random.Random(f"doubts {seed}").random() > 0.25
    closing = random.Random(f"{seed}-closures")
    closures = closing.random() < 0.35
    faults = Faults(
        workers=workers,
        spread=chance(0.8),
        capacity=choice((2048, 4096, 4096, 20_000, 1 << 20)),
        window=choice((1, 100, 300, 1000, 100_000)),
        memory_bytes=memory,
        disk_bytes=3000 if tiny_disk else 1 << 40,
        interval_s=interval,
        timeout_s=choice((0.5,) if tiny_disk else (0.003, 0.02, 0.5)),
        slow=tuple(choice((0.5, 0.8)) if chance(0.15) else 0.0 for _ in range(workers)),
        hurry=choice((0.05, 0.15, 0.15, 0.5)),
        writing=max(choice((0.03, 0.15, 0.15, 0.5)), 0.15 if tiny_disk else 0.0),
        lazy_sources=choice((0.0, 0.0, 0.4, 0.7)),
        mixed=chance(0.8),
        stop_at=rng.random() ** 2 * 0.3 if chance(0.15) else None,
        kills=kills,
        kill_rate=choice((0.001, 0.003, 0.01)),
        pairs=choice((0.0, 0.0, 0.3)),
        moments=frozenset(moment for moment in MOMENTS if chance(0.2)) | ({"doubt"} if doubting else set()),
        stillborn=choice((0.0, 0.0, 0.1)),
        master_kills=choice((0, 0, 0, 1, 2)),
        master_rate=choice((0.0005, 0.002)),
        put=choice((0.0, 0.2, 0.2 if tiny_disk else 0.7)) if store else 0.0,
        get=choice((0.0, 0.2, 0.7)) if store else 0.0,
        manifest=choice((0.0, 0.1, 0.3)) if store else 0.0,
        unknown=choice((0.0, 0.1, 0.3)) if store else 0.0,
        damages=choice((1, 2, 3)) if chance(0.2) else 0,
        scratches=disk.choice((0, 0, 0, 1, 5, 20)),
        wipes=disk.choice((0,) * 9 + (1,)),
        looks=disk.choice((0.0, 0.0005, 0.005)),
        merges=disk.choice((0.0, 0.3, 1.0)),
        collects=disk.choice((0.0, 0.3, 1.0)),
        inline_bytes=choice((0, 0, 100)),
        rescales=choice((0, 0, 0, 1, 2, 5)) if interval < 1 else 0,
        diversions=choice((0.0, 0.0, 0.01, 0.02)),
        unanswered=choice((0.0, 0.1, 0.5)),
        migrations=choice((0, 0, 1, 3, 20)) if interval < 1 else 0,
        migration_rate=choice((0.02, 0.2)),
        pauses=pauses,
        pause_rate=pausing.choice((0.001, 0.01)),
        pause_s=pausing.choice((0.01, 0.1, 2.0)),
        wakes=pausing.choice((0.0, 0.5)) if pauses else 0.0,
        asks=asking.choice((0.0, 0.001, 0.01)),
        hangs=asking.choice((0.0, 0.0, 0.001)),
        full=closing.choice((0, 1, 3, 10)) if closures else 0,
        read_only=closing.choice((0, 1, 3, 10)) if closures else 0,
        closure_rate=closing.choice((0.001, 0.005)),
        closure_s=closing.choice((0.05, 0.2, 0.5)),
        closed_to_manifests=closing.choice((0.05, 0.3, 0.9)),
        remote=closing.random() < 0.2,
    )
    if scheduling.random() < 0.15:
        faults = _with_scheduler(faults, scheduling)
    halting = random.Random(f"halts {seed}")
    if halting.random() < 0.25 and faults.stop_at is None and interval < 1:
        halt_at, no_copy = halting.random() ** 2 * 0.2, halting.choice((0.0, 0.0, 0.5))
        faults = replace(faults, halt_at=halt_at, no_copy=no_copy)
    faults = replace(faults, log=random.Random(f"log {seed}").random() < 0.5)
    nodes = random.Random(f"nodes {seed}")
    if workers == 1 or nodes.random() >= 0.55:
        return faults
    faults = _with_nodes(faults, nodes)
    partial = random.Random(f"partial cuts of {seed}")
    return replace(faults, partial_cuts=partial.choice((0, 1, 2, 5))) if faults.nodes > 2 else faults


def _with_nodes(faults: Faults, rng: random.Random) -> Faults:
    """The same, on several nodes."""
    many = rng.random() < 0.4  # so that trees have several layers, and nodes several workers
    many = many and faults.paradigms is None and faults.disk_bytes > 1 << 20
    delay_s = rng.choice((0.0001, 0.0005, 0.003, 0.02))
    workers = rng.choice((6, 8)) if many else faults.workers
    return replace(
        faults,
        workers=workers,
        nodes=rng.randrange(3, 6) if many else rng.randrange(2, min(workers, 4) + 1),
        lazy_sources=rng.choice((0.7, 0.9)) if many else faults.lazy_sources,
        kills=min(faults.kills, 3) if many else faults.kills,
        evenly=rng.random() < 0.7,
        delay_s=delay_s,
        # A window a round trip, and it is to end some day.
        window=max(faults.window, int(50_000 * delay_s), 100 if many else 1),
        apart_s=rng.choice((0.0, 0.01, 1000.0)),
        slow_nodes=rng.choice((0.0, 0.0, 0.4)),
        node_timeout_s=rng.choice((0.03, 0.1)),
        cuts=rng.choice((0, 1, 3, 10)),
        cut_rate=rng.choice((0.02, 0.1, 0.3)),
        cut_s=rng.choice((0.01, 0.1, 0.3)),
        breaks=rng.choice((0, 3, 30)),
        again_s=rng.choice((0.001, 0.02, 0.1)),
        node_kills=rng.choice((0, 0, 1, 2)),
        node_pauses=rng.choice((0, 0, 1, 3)),
        relay_kills=rng.choice((0, 1, 3, 20)),
        relay_rate=rng.choice((0.05, 0.3)),
        limits=rng.choice((0.0, 0.05, 0.3)),
        slow_relays=rng.choice((0.0, 0.0, 0.7)),
        no_room=rng.choice((0.0, 0.5, 0.8)),
    )


def _with_scheduler(faults: Faults, rng: random.Random) -> Faults:
    """The same, but a ParadigmScheduler decides what goes to Spark: with barriers in time, at which chains go there,
    longer, and with more of what it has to see through."""
    return replace(
        faults,
        interval_s=min(faults.interval_s, 0.01),
        timeout_s=0.5,  # with a slow Spark no epoch may come to its end in less
        lazy_sources=rng.choice((0.7, 0.9, 0.97)),
        diversions=0.0,
        unanswered=rng.choice((0.0, 0.02, 0.2)),
        paradigms=rng.choice(("spark-only", "toggle", "toggle")),
        spark_trouble=rng.choice((0.0, 0.5, 1.0, 1.0)),
        moments=faults.moments | (frozenset(("divert", "undivert")) if rng.random() < 0.3 else frozenset()),
        rescales=rng.choice((0, 3, 10)),
        rescale_rate=0.02,
        pauses=rng.choice((0, 3, 30)),
        pause_rate=0.01,
        pause_s=0.1,
    )


# --- the cluster ---------------------------------------------------------------------------------------------------

Event = Callable[[], list[host_commands.HostCommand]]


class Refused(PenstockError):
    """What a worker says that could not do what it was called for."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@dataclass(eq=False)
class Process:
    """One life of a worker."""

    worker: int
    incarnation: int
    life: int
    loop: RunLoop
    participant: Participant
    output_caches: OutputCaches
    inbox: Inbox
    transport: Ends
    slow: float
    node: Node
    alive: bool = True
    ready: bool = False  # the JobHost knows of it
    paused_until: float = 0.0
    with_node: bool = False  # it is lost with its node
    ends_at: float | None = None  # when it finds out that its node is lost
    spark: Spark | None = None  # the one that it is connected to
    relays: set[int] = field(default_factory=set)  # those that it expects or uses
    work: deque[Callable[[], bool]] = field(default_factory=deque)  # snapshots to be written
    commands: deque[host_commands.Call] = field(default_factory=deque)  # on their way to it
    answers: deque[Event] = field(default_factory=deque)  # to calls, on their way from it
    said: deque[Event] = field(default_factory=deque)  # of snapshots, on their way from it

    def told(self) -> list[deque[Event]]:
        """The queues in which something is on its way from it."""
        return [queue for queue in (self.answers, self.said) if queue]

    def close(self) -> None:
        """Let go of the files that its channels keep messages in, long before the garbage collector would."""
        for log, _ in self.loop.wiring.out.values():
            log.cache.clear()


class _Bridge(Bridge):
    """The bridge as a process sees it: answers come some time later, in any order, or an error does."""

    def __init__(self, cluster: EpochCluster, process: Process, spark: Spark | None = None) -> None:
        self.cluster = cluster
        self.process = process
        self.spark = spark  # None: one that never dies

    def submit(self, chain: int, position: int, input_: Any) -> Future[MicroBatchResult]:
        future: Future[MicroBatchResult] = Future()
        cluster, columns = self.cluster, as_columns(input_)
        plan = self.process.loop.wiring.plan
        form = range_form(plan, plan.chains[chain])
        assert isinstance(form, RangeForm)

        def answer() -> None:
            if not self.process.alive:
                return
            self.process.inbox.quiet = False
            if (spark is not None and not spark.lives) or cluster.rng.random() < cluster.faults.unanswered:
                future.set_exception(ConnectionError("the bridge is gone"))
                return
            run = RangeRun(form.before(position))
            try:
                run.take(as_records(columns))
                rows = answer_rows(run.answer())
            except Exception as error:  # a record's: it is to fail where its operator's policy is known
                future.set_exception(error)
            else:
                cluster.counts["answers"] += 1
                future.set_result(answer_of(pa.Table.from_batches([rows])))

        spark = self.spark
        due = answer if spark is None else lambda: spark.when_it_speaks(cluster.now, answer)
        cluster._after(cluster.rng.random() ** 2 * 0.03, due, masters=False)
        return future


def _whose(process: Process, call: host_commands.Call) -> tuple[int, int, int]:
    return process.worker, process.incarnation, call.number


class EpochCluster:
    """See the module's docstring."""

    def __init__(self, made: RandomFlow, seed: int, faults: Faults = NONE) -> None:
        self.seed = seed
        self.faults = faults
        self.rng = random.Random(seed)
        self.disk = random.Random(f"disk {seed}")  # of its own: what is mended changes nothing else
        self.others = random.Random(f"others {seed}")  # of its own too: who asks and watches
        self.doubts = random.Random(f"doubt {seed}")  # and who dies while nobody knows what is written
        self.closing = random.Random(f"{seed}-closures")  # and when the store is closed
        self.made = made
        self.now = 1.0
        self.steps = 0
        self.story: list[tuple[float, Any]] = []
        self.counts: Counter[str] = Counter()
        self.outside = Log() if faults.log else Outside()
        self.sinks: list[Transactions | LogTransactions] = []
        for operator in made.flow.graph.operators.values():
            if isinstance(operator, Write):
                name = operator.sink.channel or operator.name
                outside = self.outside
                sink = LogTransactions(name, outside) if isinstance(outside, Log) else Transactions(name, outside)
                operator.sink = sink
                self.sinks.append(sink)
        self.first_plan: Plan = made.flow.plan(faults.workers)
        self.network = Network(seed, faults, lambda: self.now, self.counts)
        self.nodes = Nodes(self, self.network)
        self.relays = Relays(self)
        self.store = MemoryStore(faults, self.rng, len(self.first_plan.tasks), self.first_plan.name)
        self.stores = [self.store]  # with those of the job that has stopped
        self.outside.newest = lambda: max((max(store.manifests, default=0) for store in self.stores), default=0)
        self.savepoint_files = DictFiles()
        self.savepoint: Manifest | None = None  # from which the job was started
        self.halt_at = None if faults.halt_at is None else self.now + faults.halt_at
        self.halting: int | None = None  # the request of the driver who waits for the stop
        chosen = list(range(faults.workers))
        if not faults.spread:
            chosen = self.rng.sample(chosen, self.rng.randrange(1, faults.workers + 1))
        self.chosen = chosen
        self.last_placed: dict[int, int] = {}
        self.processes: dict[int, Process] = {}
        self.live: list[Process] = []
        self._all: list[Process] = []  # dead ones too
        self.late: list[Process] = []  # dead ones, of which something is still on its way
        self.woken: list[Process] = []  # dead ones that go on for a moment, or will
        self.master_paused_until = 0.0
        self.lives = 0  # of workers
        self.masters = 0
        self.kills = faults.kills
        self.pauses = faults.pauses
        self.master_kills = faults.master_kills
        self.damages = faults.damages
        self.scratches = faults.scratches
        self.wipes = faults.wipes
        self.full = faults.full
        self.read_only = faults.read_only
        self.closed_until = 0.0  # until when the store is full or read-only
        self.keeping = False  # whether the keeper is busy with an epoch
        self.keeper_due = 0.0  # when the keeper comes to what it has to do
        self.rescales = faults.rescales
        self.migrations = faults.migrations
        self.asked: dict[int, str] = {}  # rescales that have not begun: request, operator
        self.requests = 0  # of drivers
        self.replies: dict[int, Exception | None] = {}
        self._hang: set[tuple[int, int]] = set()  # processes of which the JobHost was told that they hang
        self._watched: list[tuple[int, int]] = []  # processes that hang, of which the JobHost is not told yet
        self._placed_before: dict[int, int] = {}  # as of the last command
        self.remembered: list[tuple[Plan, dict[int, int]]] = []  # plans and placements that were so once
        self.timers: list[tuple[float, int, bool, Callable[[], Any]]] = []  # when, number, the master's, what
        self.numbers = 0
        self.idle = 0
        self.progress = 0  # the last step in which there was any
        self.stopping = False
        self.over = False
        self.failed = False  # nothing was left of the job to go on from
        self.due: float | None = None
        self.host: JobHost
        self._looked_at = self.first_plan  # the plan that the checks know
        self.spark: SimulatedSpark | None = None
        self.chance: ChanceScheduler | None = None
        #: What a check in the scheduler has found. The JobHost survives it, as all faults of the scheduler.
        self.fault: Exception | None = None
        self.checks = Checks(self)
        self._new_master()

    # --- the coordinator and its host ----------------------------------------------------------------------------

    def clock(self) -> int:
        self.now += 1e-6
        return int(self.now * 1e9)

    def _wall(self) -> float:
        return self.now

    @property
    def plan(self) -> Plan:
        """The job's present plan."""
        return self.host.present.plan if hasattr(self, "host") else self.first_plan

    @property
    def placed(self) -> dict[int, int]:
        """The worker of each task."""
        return self.host.present.placed

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator of the present JobHost."""
        return self.host.coordinator

    def _new_master(self) -> None:
        faults = self.faults
        options = EpochOptions(
            interval_s=faults.interval_s,
            timeout_s=faults.timeout_s,
            max_restarts=10**6,
            backoff_first_s=0.001,
            backoff_max_s=0.01,
        )
        manifests = self.store.manifests
        manifest = self._older(None)
        if manifests and (manifest is None or manifest.epoch < max(manifests)):
            self._passed_over()
        if manifest is not None and manifest.epoch < max(manifests) and isinstance(self.outside, Log):
            self._nothing_is_left("another master would go back behind what it cannot take back")
            self.failed = self.over = True
            return
        if manifests and manifest is None:  # from the beginning the job would write again what its sinks have committed
            self._nothing_is_left("no epoch is left for another master")
            self.failed = self.over = True
            return
        found = Found(manifest, None, max(manifests, default=0))
        if manifest is None and self.savepoint is not None:
            found = Found(self.savepoint, Store(self.savepoint_files, SAVEPOINT), self.savepoint.epoch)
        self.masters += 1
        self.nodes.new_master()
        self.asked.clear()
        self._watched.clear()
        self.spark = None
        if faults.paradigms is not None:
            rng = random.Random(f"Spark {self.seed} {self.masters}")
            self.spark = SimulatedSpark(self, faults.paradigms, faults.spark_trouble, rng)
        self.chance = None
        self.answered_from = self.requests  # what an earlier master was asked died with it
        self.remembered.clear()
        self.host = JobHost(
            self.first_plan,
            HostOptions(
                faults.workers,
                options,
                has_store=True,
                flow=self.made.flow,
                relays=self.nodes.several,
                node_timeout_s=faults.node_timeout_s,
                machine=str(self.nodes.master.number),
                again=self.masters > 1,
            ),
            self,
            found,
            # What an earlier life has made may still be about: no number may be used again.
            earlier=1000 * self.masters if self.masters > 1 else 0,
            schedule=self._scheduler,
            decided=self._decided,
        )
        self._looked_at = self.plan
        if manifest is not None:
            # Tasks may have other numbers: an operator that had fewer tasks for a while has got new numbers since.
            saved = sorted(entry.name for entry in manifest.tasks)
            assert saved == sorted(map(self.plan.task_name, self.plan.tasks)), "another plan"
        self.keeper = StoreKeeper(
            self.store, Collected(True), lambda trouble: None, self._say_lost, thread=False, wall=lambda: 0.0
        )
        self.keeper.cannot_take_back = cannot_take_back(self.first_plan)
        self.keeping = False
        if manifest is not None:
            self._forget_after(manifest.epoch)
            self.keeper.continue_from(manifest)
        elif found.manifest is not None:
            self.keeper.continue_from(found.manifest, found.origin)
        self.checks.new_master()
        if self.stopping:  # the job's notes say so, whoever has died meanwhile
            self._do(self.host.stop(self.now))
        self._do(self.host.start(self.now))
        if self.halting is not None:  # the driver asks again
            self._halt()

    @property
    def _scheduler(self) -> Callable[[Plan], ParadigmScheduler] | None:
        """What makes the scheduler of a JobHost that uses Spark."""
        if self.spark is not None:
            return self.spark.schedule

        def by_chance(plan: Plan) -> ChanceScheduler:
            rng = random.Random(f"diversions {self.seed} {self.masters}")
            self.chance = ChanceScheduler(plan, rng, lambda what: setattr(self, "fault", AssertionError(what)))
            return self.chance

        return by_chance if self.faults.diversions else None

    def _forget_after(self, epoch: int) -> None:
        """Another master cannot begin before later epochs are deleted, and does nothing else until then."""
        try:
            self.store.forget_after(epoch)
        except StoreError:
            assert self.is_closed
            self.counts["masters that wait for the store"] += 1
            self.now = self.closed_until
            self._open_store()
            self.store.forget_after(epoch)

    def _nothing_is_left(self, reason: str) -> None:
        """The job is to end because nothing is left to go on from, which must be so now. Until its processes have
        ended, a worker whose answer got lost may still write what was damaged again."""
        assert self.store.ruined, reason
        left = self._older(None)
        if left is not None and left.epoch < max(self.store.manifests) and "cannot take back" in reason:
            left = None
            self.counts["jobs that would go back behind what a log has"] += 1
        assert left is None, f"the job fails ({reason}), and epoch {left} can be read"
        self.counts["jobs that nothing is left of"] += 1

    # --- placement, for the JobHost ------------------------------------------------------------------------------

    def first(self, plan: Plan) -> dict[int, int]:
        """Tasks that there were stay where they are."""
        return self.grown(plan, self.last_placed)

    def known(self) -> str:
        return ""

    def stays(self, plan: Plan) -> dict[int, int]:
        """See Placing."""
        return {}

    def grown(self, plan: Plan, before: dict[int, int]) -> dict[int, int]:
        """Tasks that there were stay where they are, others go anywhere."""
        placed = {}
        for task in plan.tasks:
            worker = before.get(task.number)
            placed[task.number] = self.rng.choice(self.chosen) if worker is None else worker
        self.last_placed = placed
        return placed

    def moved(self, tasks: int) -> None:
        """Nothing is kept that this changes."""

    def forget(self) -> None:
        """Nothing is kept that this changes."""

    def _older(self, than: int | None) -> Manifest | None:
        """The newest epoch that can be used."""
        for epoch in sorted(self.store.manifests, reverse=True):
            if (than is None or epoch < than) and self.store.whole(self.store.manifests[epoch]):
                return self.store.manifests[epoch]
        return None

    def _passed_over(self) -> None:
        self.outside.may_retract = True
        self.checks.passed_over()
        self.counts["fall-backs"] += 1

    def _decided(self, command: protocol.Command) -> None:
        """The coordinator has given a command, which the JobHost is about to carry out."""
        if not isinstance(command, protocol.Trigger | protocol.Save | protocol.Complete | protocol.Unpark):
            self.progress = self.steps
        self.story.append((self.now, command))
        if self.host.present.plan is not self._looked_at:
            operator = self.asked.pop(self.host.requests.rescaling[-1])
            self.counts["rescales"] += 1
            self.checks.replanned(self._looked_at, self.host.present.plan, operator)
            self.remembered.append((self._looked_at, self._placed_before))
            self._looked_at = self.host.present.plan
        self._placed_before = dict(self.host.present.placed)
        if isinstance(command, protocol.Trigger) and command.parking:
            moving = self.coordinator._migration
            if moving is None:
                assert self.coordinator._stop is not None
                self.counts["attempts to stop with a savepoint"] += 1
            else:
                self.story.append((self.now, f"MIGRATE {moving[1]}"))
                self.counts["migrations"] += 1
                self.checks.to_move(moving[1])
        if isinstance(command, protocol.FallBack):
            manifest = self.keeper.last  # whose snapshots may have been compacted since it was written
            assert manifest is not None
            assert manifest.epoch == command.epoch
            assert not self.store.whole(manifest), f"epoch {command.epoch} is not damaged: {command.reason}"
            blobs = {blob.name for blob in manifest.blobs()}
            assert blobs & self.store.ruined, f"epoch {command.epoch} need not be lost: {command.reason}"
            self._passed_over()
        self.checks.command(command)
        if isinstance(command, protocol.End):
            while self.woken:
                self._end(self.woken.pop())
            self.checks.end()

    def _tell_requests(self, event: RequestEvent) -> None:
        self._do(self.host.of_requests(event, self.now))

    def _tell_coordinator(self, event: CoordinatorEvent) -> None:
        self._do(self.host.of_coordinator(event, self.now))

    def _do(self, commands: list[host_commands.HostCommand]) -> None:
        """Carry out what the JobHost commands."""
        if self.fault is not None:
            raise self.fault
        said: set[type] = set()
        for command in commands:
            if isinstance(command, host_commands.Call):
                kind = type(command.command)
                if kind not in said:
                    said.add(kind)
                    final = isinstance(command.command, protocol.Complete) and command.command.final
                    self._moment(CALLS.get(kind, ""), final)
                process = self.processes.get(command.worker)
                if process is not None and process.incarnation == command.incarnation:
                    process.commands.append(command)
            elif isinstance(command, host_commands.StartProcess):
                self._start_later(command)
            elif isinstance(command, host_commands.SaveManifest):
                self._moment("save", command.manifest.final)
                if self._may_close() and self.closing.random() < self.faults.closed_to_manifests:
                    self._close_store()  # the snapshots are written, the manifest is not
                self._after(self.rng.random() * 0.005, lambda m=command.manifest: self._save(m))
            elif isinstance(command, host_commands.FindOlder):
                self._after(self.rng.random() * 0.01, lambda c=command: self._find_older(c))
            elif isinstance(command, host_commands.UndoSinkRecords | host_commands.CommitSinkRecords):
                pass  # the sinks of these flows send no records to the master
            elif isinstance(command, host_commands.MakeRoom):
                self.counts["times that room was wanted"] += 1
                self.keeper.make_room()
                self.keeper_due = self.keeper_due or self.now + 0.001
            elif isinstance(command, host_commands.Reply):
                assert command.request not in self.replies, f"request {command.request} is answered twice"
                self.replies[command.request] = command.error
                self.asked.pop(command.request, None)
                if command.request == self.halting:
                    self.halting = None
                    if command.error is not None and self.host.end is None and self.others.random() < 0.8:
                        self.halt_at = self.now + self.others.random() * 0.05
            elif isinstance(command, host_commands.CopySavepointAndStop):
                self._after(self.rng.random() * 0.01, lambda c=command: self._copy_and_stop(c))
            elif isinstance(command, host_commands.KillProcess):
                assert (command.worker, command.incarnation) in self._hang, f"{command} of a process that does not hang"
                hanging = self.processes.get(command.worker)
                if hanging is None or hanging.incarnation != command.incarnation:
                    continue  # it has died meanwhile, which the JobHost does not know yet
                self._after(0.0, lambda p=hanging: self._kill(p) if p.alive else None, masters=False)
            elif isinstance(command, host_commands.GiveUpMachine):
                self.nodes.give_up(command.machine, command.reason)
            elif isinstance(command, host_commands.StartRelay | host_commands.KillRelay | TellRelay):
                self.relays.carry_out(command)
            elif isinstance(command, SparkCommand):
                assert self.spark is not None
                self.spark.carry_out(command)
            elif isinstance(command, host_commands.TellAll):
                assert isinstance(command.command, Stop)
                self._tell_to_stop()
            else:
                assert isinstance(command, host_commands.EndJob), f"{command}"
                assert command == commands[-1], f"{commands[-1]} after the job's end"
                self._ended(command.end)
        self.due = self.host.due()
        if self.spark is not None and self.host.lives.all_have_started:
            self.spark.look()

    def _ended(self, end: host_commands.JobEnd) -> None:
        open_ = set(range(self.answered_from + 1, self.requests + 1)) - self.replies.keys()
        assert not open_, f"requests {sorted(open_)} never got a reply"
        if self.spark is not None:
            self.spark.close()
        if self.fault is not None:
            raise self.fault
        if end.state == "FAILED" and "no older epoch" in (end.error or ""):
            self.failed = self.over = True
            return
        if end.state == "FAILED" and "A firewall may be closed" in (end.error or ""):
            assert self.masters == 1, f"the job has run before: {end}"
            assert not self.checks.completed, f"an epoch has completed, for which all links have worked: {end}"
            self.counts["jobs that fail because a link has never worked"] += 1
            self.failed = self.over = True
            return
        assert end.state == "FINISHED", f"the job ended: {end}"
        assert self.coordinator.state == "ENDED", f"finished, and the coordinator is {self.coordinator.state}"
        if self.coordinator.halted_for is None:
            self.over = True
        else:
            self._start_from_savepoint()

    def _halt(self) -> None:
        """A driver wants the job to stop with a savepoint."""
        self.requests += 1
        self.halting, self.halt_at = self.requests, None
        self.story.append((self.now, "STOP with a savepoint"))
        self._tell_requests(lambda requests, _: requests.stop_with_savepoint(self.requests, "a place"))

    def _copy_and_stop(self, command: host_commands.CopySavepointAndStop) -> None:
        fails = self.others.random() < self.faults.no_copy
        try:
            if fails and self.others.random() < 0.5:
                raise StoreUnreachable("the place takes nothing")
            self.keeper.copy_to(Store(self.savepoint_files, SAVEPOINT), command.plan)
        except (StoreError, SnapshotDamaged) as error:
            self.counts["savepoints that could not be written"] += 1
            failed = error
            self._tell_requests(lambda requests, now: requests.not_copied(command.generation, failed, now))
            return
        if self.master_kills and self.others.random() < 0.3:
            self._kill_master()
        elif self.kills and self.live and self.others.random() < 0.3:
            self._kill(self.others.choice(self.live))
            self._after(
                0.0, lambda: self._tell_coordinator(lambda coordinator, _: coordinator.copied(command.generation))
            )
        else:
            self._tell_coordinator(lambda coordinator, _: coordinator.copied(command.generation))

    def _start_from_savepoint(self) -> None:
        """The job has ended with a savepoint. Nothing of it is left but what its sinks have committed, and another job
        starts from the savepoint."""
        self.counts["stops with a savepoint"] += 1
        self.story.append((self.now, "START from the savepoint"))
        for process in [*self.live, *self.woken]:
            if process in self.woken:
                self.woken.remove(process)
            else:
                self._gone(process)
            self._end(process)
        origin = Store(self.savepoint_files, SAVEPOINT)
        self.savepoint = origin.read_manifest(max(origin.epochs()))
        self.checks.starts_from(self.savepoint, self.keeper.last)
        self.store = MemoryStore(self.faults, self.rng, len(self.first_plan.tasks), self.first_plan.name)
        self.stores.append(self.store)
        self.closed_until = 0.0
        self.halting = None
        self.timers.clear()
        self.relays.master_dies()
        self.timers.clear()
        self.late.clear()
        self.master_paused_until = 0.0
        self._new_master()

    def _start_later(self, command: host_commands.StartProcess) -> None:
        self._after(self.rng.random() * 0.02, lambda: self._start(command))

    def _find_older(self, command: host_commands.FindOlder) -> None:
        self.keeping = True
        self._look_for_older(command, self.keeper.looking_for_older(command.epoch, command.reason))

    def _look_for_older(self, command: host_commands.FindOlder, tries: Generator[None, None, Manifest | None]) -> None:
        """The keeper tries to go back to an older epoch."""
        manifest: Manifest | None = None
        try:
            next(tries)
        except StopIteration as end:
            manifest = end.value
        except SnapshotDamaged as error:
            self._nothing_is_left(str(error))
        else:
            self.counts["waits to go back to an older epoch"] += 1
            self._after(self.closing.random() * 0.01, lambda: self._look_for_older(command, tries))
            return
        self.keeping = False
        self._do(self.host.found_older(manifest, command, self.now))

    def _save(self, manifest: Manifest) -> None:
        self.keeping = True
        self._try_to_save(manifest, self.keeper.saving(manifest))

    def _try_to_save(self, manifest: Manifest, tries: Generator[None, None, Manifest]) -> None:
        """The keeper tries to write a manifest."""
        try:
            next(tries)
            while manifest.epoch in self.store.refused:
                next(tries)
        except StopIteration:
            self.keeping = False
            self._saved(manifest)
        except SnapshotDamaged as error:
            self.keeping = False
            self.counts["epochs that build on what is lost"] += 1
            why = str(error)
            self._tell_coordinator(lambda coordinator, _: coordinator.not_saved(manifest.epoch, why))
        except NotSaved as error:
            self.keeping = False
            self.counts["lost manifests"] += 1
            self.counts["epochs given up while the store was closed"] += self.is_closed
            self.store.given_up(manifest.epoch)
            self._doubt()
            why = str(error)
            self._tell_coordinator(lambda coordinator, _: coordinator.not_saved(manifest.epoch, why))
        else:
            # It may be there, so nobody may go back to an older epoch: it is written until that is known.
            self.counts["unknown manifests"] += 1
            self._doubt()
            longest_s = 0.05 if "doubt" in self.faults.moments else 0.01  # so that deaths are noticed meanwhile
            wait_s = self.closing.random() * 0.01 if self.is_closed else self.rng.random() * longest_s
            self._after(wait_s, lambda: self._try_to_save(manifest, tries))

    def _saved(self, manifest: Manifest) -> None:
        self.checks.written(manifest)
        self._tidy(manifest)
        if self.master_kills and self.rng.random() < 0.1:
            self._kill_master()
            return
        self._tell_coordinator(lambda coordinator, _: coordinator.saved(manifest.epoch))

    def _keep(self) -> None:
        """The keeper does what it has to do beside the epochs."""
        while not self.keeper._work.empty():
            self.keeper._work.get_nowait()()

    def _tidy(self, manifest: Manifest) -> None:
        """Sometimes delete what no epoch needs any more, and put snapshots together; the coordinator hears of that some
        time later."""
        if self.faults.merges and self.disk.random() < self.faults.merges:
            due = {
                entry.number: entry.blobs[first:]
                for entry in manifest.tasks
                if (first := worth_compacting([blob.size for blob in entry.blobs], run=2)) is not None
            }
            self.keeper._compact_all(due, manifest.key_groups, manifest.epoch, self._merged)
            if not self.keeper._work.empty():  # it is to look at damaged snapshots
                self.keeper_due = self.keeper_due or self.now + 0.001
        if self.faults.collects and self.disk.random() < self.faults.collects:
            self.counts["files deleted"] += self.keeper._collect()

    def _merged(self, task: int, old: list[Blob], new: Blob) -> None:
        def replace_chain() -> None:
            self.counts["snapshots put together"] += len(old)
            self._tell_coordinator(lambda coordinator, _: coordinator.replace_chain(task, old, new))

        self.checks.merged(old[-1].name, new.name)
        self._after(self.disk.random() * 0.02, replace_chain)

    def _after(self, seconds: float, action: Callable[[], Any], masters: bool = True) -> None:
        """Do something later, if this master still lives; something of its own when it is not paused."""
        self.numbers += 1
        heapq.heappush(self.timers, (self.now + seconds, self.numbers, masters, action))

    # --- rescale -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Somebody wants another number of tasks for an operator; the old number will do as well."""
        self.rescales -= 1
        plan = self.plan
        # More receivers of a broadcast would be more records.
        copied = {exchange.target for exchange in plan.exchanges if isinstance(exchange.grouping, All)}
        names = [operator.name for chain in plan.chains if chain.index not in copied for operator in chain.operators]
        if self.faults.paradigms is not None:  # other chains can go to Spark when an operator is taken out of its chain
            fused = [name for name in names if fused_by_key(plan, name) and name in self.made.flow.graph.operators]
            if fused:
                self.rescale(self.rng.choice(fused), self.rng.randrange(2, 5))
                return
        if names:
            self.rescale(self.rng.choice(names), self.rng.randrange(1, 5))

    def rescale(self, operator: str, parallelism: int) -> int:
        """A driver asks for another number of tasks. Returns the number of the request."""
        self.requests += 1
        self.asked[self.requests] = operator
        self.story.append((self.now, f"RESCALE {operator} to {parallelism}"))
        self._tell_requests(lambda requests, _: requests.rescale(self.requests, operator, parallelism))
        return self.requests

    def _migrate(self) -> None:
        """Somebody wants some tasks to run elsewhere: a driver, or whoever has measured the traffic, perhaps of a plan
        or a placement that is not the job's any more."""
        self.migrations -= 1
        plan, placed = self.plan, dict(self.placed)
        measured = self.rng.random() < 0.5
        if measured and self.remembered and self.rng.random() < 0.5:
            plan, placed = self.rng.choice(self.remembered)
        self.remembered.append((self.plan, dict(self.placed)))
        wanted = dict(placed)
        for task in self.rng.sample(sorted(wanted), self.rng.randrange(1, min(3, len(wanted)) + 1)):
            wanted[task] = self.rng.randrange(self.faults.workers)
        if measured:
            moving = self.coordinator.migrating
            self._tell_requests(lambda requests, _: requests.better_placed(plan, placed, wanted))
            stale = plan is not self.plan or placed != self.placed
            assert moving or not (stale and self.coordinator.migrating), "what was planned for another plan is done"
            return
        names = {plan.task_name(plan.by_number[task]): worker for task, worker in wanted.items()}
        self.requests += 1
        self._tell_requests(lambda requests, _: requests.migrate(self.requests, names))

    def hears_of_links(self, process: Process, links: list[SilentLink]) -> list[host_commands.HostCommand]:
        """The JobHost hears what a process tells of its links."""
        if self.host.lives.present(process.worker, process.incarnation):
            self.nodes.heard(process, links)
        return self.host.links_said(process.worker, process.incarnation, links, self.now)

    def _ask_for_status(self) -> None:
        """A driver asks for the status; some workers answer, and what they say may be of a moment before."""
        reports = [
            {"index": process.worker, "time_ns": self.clock(), "tasks": process.loop.load(), "ring_bytes": 0}
            for process in self.live
            if process.paused_until <= self.now and self.others.random() < 0.8
        ]
        status = self.host.build_status(reports, {}, self.now, self.now)
        self.counts["statuses"] += 1
        plan = self.plan
        assert [task["name"] for task in status["tasks"]] == [plan.task_name(task) for task in plan.tasks]
        assert {task["number"]: task["worker"] for task in status["tasks"]} == self.placed
        assert status["epochs"]["restarts"] == self.host.coordinator.restarts
        assert set(status["operators"]) == {operator.name for chain in plan.chains for operator in chain.operators}

    def _hangs(self) -> None:
        """Whoever watches processes takes one for one that hangs. It may have died since, and another one be there."""
        self.progress = self.steps
        if self._watched and self.others.random() < 0.5:
            worker, incarnation = self._watched.pop()
        elif self.live and self.kills:
            process = self.others.choice(self.live)
            worker, incarnation = process.worker, process.incarnation
            if self.others.random() < 0.5:  # it is told later
                self._watched.append((worker, incarnation))
                return
        else:
            return
        self.counts["processes that hang"] += 1
        self._hang.add((worker, incarnation))
        self._do(self.host.process_hangs(worker, incarnation, True, self.now))

    # --- processes -----------------------------------------------------------------------------------------------

    def _start(self, command: host_commands.StartProcess) -> None:
        worker, incarnation = command.worker, command.incarnation
        node = self.nodes.place(worker)
        if node is None:  # it is not reached now
            self._after(0.005, lambda: self._start(command))
            return
        if self.faults.stillborn and self.rng.random() < self.faults.stillborn:
            self.counts["stillborn"] += 1
            self.checks.lost(worker)
            self._do(self.host.process_not_started(worker, incarnation, "it is stillborn", self.now))
            return
        assert worker not in self.processes, f"worker {worker} is started twice"
        self.lives += 1
        self.counts["processes started while the store was closed"] += self.is_closed
        transport = Ends(self.network, worker, self.lives, node, self.faults.capacity, self.rng, far=self.nodes.several)
        output_caches = OutputCaches(
            self.faults.memory_bytes, self.faults.disk_bytes, "/dev/shm"
        )  # quicker to open than a disk
        process: Process
        checks = self.checks

        def send(event: EpochReport) -> None:
            if process.alive:
                process.said.append(lambda: self._event(process, event))

        def later(work: Callable[[], bool]) -> None:
            process.work.append(work)

        def saved(snapshot: Any) -> None:
            if process.alive:
                checks.snapshot(process, snapshot)
            participant.on_snapshot(snapshot)

        clock = self.clock if not node.ahead_ns else lambda: self.clock() + node.ahead_ns
        root = MulticastRoot(worker, incarnation, transport, clock) if self.nodes.several else None
        if root is not None:
            root.adjuster.crowded = True  # so that streams have trees which would do without
        participant = Participant(self.store, command.plan.key_groups, send, later)  # type: ignore[arg-type]
        wiring = Wiring(
            command.plan,
            command.placed,
            worker,
            transport,
            WiringOptions(
                clock=clock,
                report=lambda reported: None,
                credit_window=self.faults.window,
                output_caches=output_caches,
                on_snapshot=saved,
                on_motion=participant.on_motion,
                wall=self._wall,
                root=root,
            ),
        )
        participant.loop = RunLoop(wiring, transport, clock)
        slow = max(node.slow, self.faults.slow[worker] if worker < len(self.faults.slow) else 0.0)
        loop, life, inbox = participant.loop, self.lives, transport.inbox
        process = Process(worker, incarnation, life, loop, participant, output_caches, inbox, transport, slow, node)
        self.processes[worker] = process
        self._all.append(process)
        self._look_who_lives()
        if self.stopping:
            participant.loop.stop()
        machine = str(node.number)
        info = {
            "index": worker,
            "pid": self.lives,
            "node_id": machine,
            "machine": machine,
            "name": f"node {machine}",
            "host": "",
            "address": transport.address,
        }

        def ready() -> list[host_commands.HostCommand]:
            if not process.alive:  # whoever starts processes tells of this death
                return []
            process.ready = True
            return self.host.process_ready(worker, incarnation, info, self.now)

        process.answers.append(ready)

    def _look_who_lives(self) -> None:
        self.live = [self.processes[worker] for worker in sorted(self.processes)]

    def everybody(self) -> list[Process]:
        """All processes that have not ended, also those that are dead to all others."""
        return [*self.live, *self.woken]

    def _event(self, process: Process, event: EpochReport) -> list[host_commands.HostCommand]:
        self.story.append((self.now, event))
        if isinstance(event, Declined):
            self.counts["declined"] += 1
        elif not isinstance(event, NoLongerQuiet):
            self.checks.acknowledged(event)
        return self.host.said(process.worker, process.incarnation, event, self.now)

    def _command(self, process: Process, call: host_commands.Call) -> None:
        """A process does what it is called for."""
        participant, transport, loop = process.participant, process.transport, process.loop
        before = dict(loop.wiring.tasks)
        command, answer = call.command, None
        tasks: Any = command  # of the coordinator
        if isinstance(command, Remove):
            tasks = command.tasks
            transport.drop(command.dead)
            future = participant.obey(tasks)
            answer = Removed(transport.address, {})
        elif isinstance(command, Build):
            tasks = command.tasks
            transport.connect(command.addresses)
            if self.nodes.several:
                self._set_clocks(process)
                self.nodes.look_at_links()
            try:
                future = participant.obey(tasks)
            except (StoreUnreachable, SnapshotDamaged) as error:
                refused = Refused(error)
                self._answer(process, lambda: self.host.refused(*_whose(process, call), refused, self.now))
                return
        elif isinstance(command, ExpectRelay):
            process.relays.add(command.relay)
            transport.drop([command.relay])
            future, answer = loop.call(lambda: None), transport.address
        elif isinstance(command, UseRelays):
            future = loop.call(lambda: self._use_relays(process, command.relays))
        elif isinstance(command, DivertTasks):
            try:
                spark = None if self.spark is None else self.spark.bridge(process, command.divert.life)
                bridge = _Bridge(self, process, spark)
            except ConnectionError as error:
                gone = Refused(error)
                self._answer(process, lambda: self.host.refused(*_whose(process, call), gone, self.now))
                return
            future = loop.call(lambda: loop.divert(command.divert, bridge))
        elif isinstance(command, UndivertTasks):
            future = loop.call(lambda: loop.undivert(command.chain))
        elif isinstance(command, GreetBridge):
            future = loop.call(lambda: None)
        elif isinstance(command, TakeSample):
            future, answer = loop.call(lambda: None), loop.take_sample(command.request)
        else:
            future = participant.obey(command)
            if isinstance(command, protocol.Complete):
                answer = process.inbox.capacity
        loop.do_calls()
        future.result(0)
        if isinstance(command, Build):
            self.checks.built(process, tasks)
        self._answer(process, lambda: self.host.answered(*_whose(process, call), answer, self.now))
        if isinstance(command, protocol.End):
            ended = lambda: self.host.run_ended(process.worker, process.incarnation, None, None, self.now)
            self._answer(process, ended)
        self.checks.others_stay(process, tasks, before)

    def _use_relays(self, process: Process, relays: RelayMap) -> None:
        transport, root = process.transport, process.loop.wiring.root
        transport.forget(process.relays - relays.addresses.keys())
        process.relays = set(relays.addresses)
        transport.connect(relays.addresses)
        assert root is not None
        root.use(relays)
        self.counts["workers told of relays"] += 1

    def _set_clocks(self, process: Process) -> None:
        """A process is told how far the clocks of the others are apart from its own."""
        ahead_ns = self.nodes.clocks()
        own_ns = ahead_ns.get(process.worker, 0)
        process.loop.wiring.delivery.clocks({worker: ahead - own_ns for worker, ahead in ahead_ns.items()})

    def _answer(self, process: Process, event: Event) -> None:
        process.answers.append(event)

    # --- faults --------------------------------------------------------------------------------------------------

    def _moment(self, what: str, final: bool) -> None:
        moments = self.faults.moments
        if not self.kills or not moments:
            return
        if (what in moments and self.rng.random() < 0.3) or (final and "final" in moments and self.rng.random() < 0.5):
            self._after(self.rng.random() * 0.006, self._kill_some, masters=False)

    def _doubt(self) -> None:
        """A manifest is not written, or may not be: whoever goes back now must know from which epoch."""
        if self.kills and "doubt" in self.faults.moments and self.doubts.random() < 0.7:
            self._after(self.doubts.random() * 0.002, self._kill_some, masters=False)

    def _kill_some(self) -> None:
        if not self.kills or not self.live:
            return
        self._kill(self.rng.choice(self.live))
        if self.kills and self.live and self.rng.random() < self.faults.pairs:
            self._kill(self.rng.choice(self.live))

    def _kill(self, process: Process) -> None:
        self.kills = max(0, self.kills - 1)
        self.counts["kills"] += 1
        self.counts[f"kills while {self.coordinator.state}"] += 1
        rng = self.rng
        self.story.append((self.now, f"KILL worker {process.worker}"))
        self._die(process)
        self._last_said(process)
        self._after(rng.random() * 0.02, lambda: self._lost(process))

    def _last_said(self, process: Process) -> None:
        """What a process had to say may have left before its death, and may yet arrive."""
        for queue in (process.answers, process.said):
            for _ in range(self.rng.randrange(len(queue) + 1)):
                queue.pop()
        if process.answers or process.said:
            self.late.append(process)

    def cut_off(self, process: Process, ends_at: float) -> None:
        """The node of a process is lost to the JobMaster. The process goes on until then."""
        process.with_node, process.ends_at = True, ends_at
        self._gone(process)
        self.woken.append(process)
        self._last_said(process)
        self._after(self.rng.random() * 0.005, lambda: self._lost(process))

    def ends_by_itself(self, process: Process) -> None:
        """A process has heard nothing for too long. The JobMaster may take it for dead already."""
        if process in self.woken:
            self.woken.remove(process)
            self._end(process)
            return
        self._gone(process)
        self._end(process)
        self._last_said(process)
        self._after(self.rng.random() * self.faults.node_timeout_s, lambda: self._lost(process))

    def dies_with_node(self, process: Process) -> None:
        """A process ends because its node does."""
        process.with_node = True
        self.ends_by_itself(process)

    def _gone(self, process: Process) -> None:
        process.alive = False
        del self.processes[process.worker]
        self._look_who_lives()

    def _die(self, process: Process) -> None:
        """A process is dead to all others."""
        self._gone(process)
        if self.faults.wakes and self.rng.random() < self.faults.wakes:
            # Until it has ended it knows the inboxes that there are now, and no later ones.
            process.paused_until = self.now + self.rng.random() ** 2 * self.faults.pause_s
            self.woken.append(process)
        else:
            self._end(process)

    def _end(self, process: Process) -> None:
        rng = self.rng
        process.inbox.dead = rng.random() < 0.5
        for task in process.loop.wiring.tasks.values():
            for stage in task.stages:
                if isinstance(stage, Writing) and stage.phases is not None:
                    stage.phases.writer.close(True)
        for ends in self.network.lives.values():  # the last of what it had sent may not have left
            queue = ends.inbox.queues.get(process.life)
            if queue and rng.random() < 0.5:
                for _ in range(rng.randrange(len(queue) + 1)):
                    ends.inbox.used -= len(queue.pop()[1])
        self.network.ended(process.transport, process.with_node)
        if process.work and rng.random() < 0.5:  # what it was writing may get there
            self._after(rng.random() * 0.01, process.work[0], masters=False)

    def _wake(self, process: Process) -> None:
        """Something that a process does, or its end, which is dead to all others."""
        if process.paused_until > self.now:
            return
        over = self.rng.random() < 0.05 if process.ends_at is None else self.now >= process.ends_at
        if over:
            self.woken.remove(process)
            self._end(process)
        elif process.work and self.rng.random() < 0.3:
            self.counts["snapshots of the dead"] += 1
            if process.work[0]():
                process.work.popleft()
        else:
            process.loop.deliver(process.transport.receive(0))
            if process.loop.wiring.root is not None:
                process.loop.wiring.root.tick()
            for task in process.loop.tasks:
                if task.runnable():
                    self.counts["steps of the dead"] += 1
                    task.step()

    def _pause_some(self) -> None:
        """Pause a worker, or the master."""
        rng = self.rng
        self.pauses -= 1
        seconds = rng.random() ** 2 * self.faults.pause_s
        if not self.live or rng.random() < 0.3:
            self.counts["master pauses"] += 1
            self.story.append((self.now, f"PAUSE master for {seconds:.4f}"))
            self.master_paused_until = self.now + seconds
            self.nodes.master_pauses(self.master_paused_until)
        else:
            process = rng.choice(self.live)
            self.counts["pauses"] += 1
            self.story.append((self.now, f"PAUSE worker {process.worker} for {seconds:.4f}"))
            process.paused_until = self.now + seconds
        self._after(seconds, self._tell_to_stop, masters=False)  # and a moment to which the clock may jump

    def _is_deaf(self, process: Process) -> bool:
        """Whether the JobMaster does not hear a process now."""
        return self._master_paused() or not self.nodes.is_heard(process.node)

    def _master_paused(self) -> bool:
        return self.master_paused_until > self.now

    def _lost(self, process: Process) -> None:
        """The death of a process is noticed."""
        self.checks.lost(process.worker)
        self.nodes.died(process)
        worker, incarnation, reason = process.worker, process.incarnation, "it was killed"
        if process.ready:
            words = (None, None) if process.with_node else self._last_words(process)
            death = Death(reason, *words, with_node=process.with_node)
            self._do(self.host.process_died(worker, incarnation, death, self.now))
        else:
            self._do(self.host.process_not_started(worker, incarnation, reason, self.now))

    def _last_words(self, process: Process) -> tuple[Note | None, Crash | None]:
        """What a dead process was doing, and how it ended, if that was its own doing; not known here."""
        return None, None

    def _kill_master(self) -> None:
        self.master_kills = max(0, self.master_kills - 1)  # a test may do it beside those of its seed
        self.counts["master kills"] += 1
        self.counts[f"master kills while {self.coordinator.state}"] += 1
        self.story.append((self.now, "KILL master"))
        self.master_dies()

    def master_dies(self) -> None:
        """All that it has started ends too, and another one begins."""
        self.timers.clear()
        self.relays.master_dies()
        self.timers.clear()
        for process in self.live:
            self._die(process)
        self.late.clear()
        self.master_paused_until = 0.0
        self._new_master()

    def _stop(self) -> None:
        self.story.append((self.now, "STOP"))
        self.counts["stops"] += 1
        self.stopping = True
        self._do(self.host.stop(self.now))

    def _tell_to_stop(self) -> None:
        """Who is paused hears of it when it wakes up."""
        for process in self.live:
            if self.stopping and process.paused_until <= self.now:
                process.loop.stop()

    # --- running -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the job has ended and its outcome is checked."""
        try:
            self._run()
        finally:
            for process in self._all:
                process.close()

    def _run(self) -> None:
        turn = self._turn
        while not self.over:
            turn()
            self.steps += 1
            idle = self.steps - self.progress
            if idle > IDLE_MAX and idle > IDLE_A_TASK * len(self.plan.tasks):
                raise Stuck(f"nothing has come of the last {idle} of {self.steps} steps")
            if self.steps > STEPS_MAX:
                raise Stuck(f"no end after {self.steps} steps")
        self.counts["epochs"] = len(self.checks.completed)
        self.counts["restarts"] = self.coordinator.restarts
        if self.nodes.several:
            self._count_logs_to_all()
            self.relays.count()
        self.check()

    def _count_logs_to_all(self) -> None:
        """How many senders have receivers of all their records on several nodes, or on another one."""
        at = {worker: process.node for worker, process in self.processes.items()}
        for exchange in self.plan.exchanges:
            if not isinstance(exchange.grouping, All) or exchange.receivers < 2:
                continue
            receivers = {at.get(self.placed[t.number]) for t in self.plan.tasks if t.chain == exchange.target}
            for task in self.plan.tasks:
                if task.chain == exchange.source and receivers - {at.get(self.placed[task.number])}:
                    self.counts["logs to all over several nodes"] += 1

    def check(self) -> None:
        """The outcome."""
        if self.failed:
            return
        outputs = self.outside.records()
        if self.stopping:
            self.checks.stopped(outputs)
        else:
            self.made.check(outputs)
        if self.stopping or self.seed % 8 == 0:
            self.checks.compare(reference(self), outputs)
        self._check_counters()
        if self.stopping:
            self._check_all_stopped()

    def _check_all_stopped(self) -> None:
        """Each source has heard of the stop, also one that was being made when its worker heard of it: one that has not
        would read for as long as its input grows."""
        for process in self.live:
            for task in process.loop.tasks:
                if task.input.is_read and not task.input.stopping and process.paused_until <= self.now:
                    raise AssertionError(f"{task.name} has not heard that the job is to stop")

    def _check_counters(self) -> None:
        """What an operator has taken is what those before it gave, however often the job went back or was changed."""
        plan = self.coordinator.plan
        tasks = [task for process in self.live for task in process.loop.tasks]
        if (
            {task.task.number for task in tasks} != plan.by_number.keys()
            or self.faults.diversions
            or self.faults.paradigms
        ):
            return  # a worker has died at the very end; or operators ran in Spark, which does not count each one's
        taken, given = Counter[str](), Counter[str]()
        for task in tasks:
            for stage in task.stages:
                taken[stage.context.operator.name] += stage.records_in
                given[stage.context.operator.name] += stage.records_out
        for chain in plan.chains:
            for before, operator in itertools.pairwise(chain.operators):
                assert taken[operator.name] == given[before.name], (
                    f"{before.name} gave {given[before.name]}, {operator.name} took {taken[operator.name]}, in one task"
                )
            coming = [exchange for exchange in plan.exchanges if exchange.target == chain.index]
            if coming and all(one.output is None and one.combiner is None for one in coming):
                copies = [one.receivers if isinstance(one.grouping, All) else 1 for one in coming]
                expected = sum(given[one.operator] * n for one, n in zip(coming, copies, strict=True))
                first = chain.operators[0]
                name, lets_go = first.name, first.on_error != "fail"  # records that have no key, say
                assert taken[name] <= expected, f"{name} took {taken[name]} of {expected} records"
                assert taken[name] == expected or lets_go, f"{name} took {taken[name]} of {expected} records"
                self.counts["counters checked"] += 1

    def _turn(self) -> None:
        rng, faults = self.rng, self.faults
        random_ = rng.random
        self.now += random_() * 0.0005
        drawn = random_()
        if drawn < 0.02:
            if self.kills and drawn < faults.kill_rate:
                self._kill_some()
                return
            if self.pauses and random_() < 50 * faults.pause_rate:
                self._pause_some()
                return
            drawn = random_()
            if self.master_kills and drawn < 50 * faults.master_rate:
                self._kill_master()
                return
            if self.damages and drawn < 50 * faults.damage_rate:
                self._damage(True)
            masters = not self._master_paused()
            disk = self.disk.random
            if self.scratches and disk() < 50 * faults.damage_rate:
                self._damage(False)
            if self.wipes and disk() < 0.02:
                self._wipe()
            if self._may_close() and self.closing.random() < 50 * faults.closure_rate:
                self._close_store()
            if masters and faults.looks and disk() < 50 * faults.looks:
                self._look()
            if masters and self.rescales and len(self.asked) < 2 and random_() < 50 * faults.rescale_rate:
                self._ask()
            if masters and self.migrations and random_() < 50 * faults.migration_rate:
                self._migrate()
            if masters and faults.asks and self.others.random() < 50 * faults.asks:
                self._ask_for_status()
            if masters and faults.hangs and self.others.random() < 50 * faults.hangs:
                self._hangs()
            if masters and self.chance is not None and random_() < 50 * faults.diversions:
                self._look_at_load()
            if self.nodes.several:
                self.nodes.turn()
                if self.over:
                    return
                if self.relays.kills and self.relays.rng.random() < faults.relay_rate:
                    self.relays.kill()
                if self.live and self.relays.rng.random() < faults.limits:
                    self.relays.limit()
        self.network.run()
        if self.closed_until and self.now >= self.closed_until:
            self._open_store()
        paused = self._master_paused()
        if self.keeper_due and self.now >= self.keeper_due and not (self.keeping or paused):
            self.keeper_due = 0.0
            self._keep()
        if self.timers and self.timers[0][0] <= self.now:
            _, number, masters, action = heapq.heappop(self.timers)
            if paused and masters:
                heapq.heappush(self.timers, (self.master_paused_until, number, True, action))
            else:
                action()
            return
        if self.due is not None and self.now >= self.due and not paused:
            self._do(self.host.tick(self.now))
            return
        if faults.stop_at is not None and not self.stopping and self.now >= 1.0 + faults.stop_at:
            self._stop()
        if self.halt_at is not None and self.now >= self.halt_at and not paused:
            self._halt()
        if self.woken and random_() < 0.3:
            self._wake(rng.choice(self.woken))
        if self.late and random_() < 0.1 and not paused:
            late = rng.choice(self.late)
            if self.nodes.is_heard(late.node):
                self._late(late)
        live = self.live
        if self.relays.all:
            share = len(self.relays.all) / (len(self.relays.all) + len(live))
            if self.relays.rng.random() < share and self.relays.turn():
                self.idle = 0
                return
        if not live:
            when = [at for at in (self.timers[0][0] if self.timers else None, self.network.next()) if at is not None]
            if self.is_closed:
                when.append(self.closed_until)
            if when:
                self.now = max(self.now, min(when))
            return
        process = live[int(random_() * len(live))]
        if not (process.slow and random_() < process.slow) and self._act(process):
            self.idle = 0
            return
        self.idle += 1
        if self.idle > 4 * len(live):
            self._jump()

    def _act(self, process: Process) -> bool:
        """One thing that a process does, or that comes of it; False when it did nothing."""
        random_, hurry = self.rng.random, self.faults.hurry
        deaf = self._is_deaf(process)
        if process.paused_until > self.now:
            if process.told() and not deaf and random_() < hurry:
                self._do(process.told()[0].popleft()())
                return True
            return False
        if process.inbox.quiet or random_() < 0.7:
            if (
                process.commands
                and self.nodes.hears(process.node)
                and random_() < hurry * (1 + len(process.commands) / 8)
            ):
                process.inbox.quiet = False
                self._command(process, process.commands.popleft())
                return True
            # Those of many epochs, of many workers, would otherwise be taken up so late that nothing seems to happen.
            if process.answers and not deaf and random_() < hurry * max(1.0, len(process.answers) / 8):
                self._do(process.answers.popleft()())
                return True
            if process.said and not deaf and random_() < hurry * (1 + len(process.said) / 8):
                self._do(process.said.popleft()())
                return True
            if process.work and random_() < self.faults.writing * (1 + len(process.work) / 8):
                if process.work[0]():
                    process.work.popleft()
                return True
        if process.inbox.quiet and random_() < 0.9:
            return False
        return self._pass(process)

    def _look_at_load(self) -> None:
        """Some workers tell their load, by which chance sends a chain to Spark, or takes it back."""
        assert self.chance is not None
        running = self.host.lives.running
        for number, worker in self.chance.open.items():
            assert worker in running, f"message {number} to worker {worker} is never answered"
        told = {p.worker: p.loop.load() for p in self.live if p.ready and self.others.random() < 0.7}
        self._do(self.host.of_scheduler(lambda scheduler, now: scheduler.looked(now, now, told), self.now))

    def _late(self, process: Process) -> None:
        for queue in (process.answers, process.said):
            if queue:
                self._do(queue.popleft()())
                break
        else:
            self.late.remove(process)

    def _jump(self) -> None:
        """Nobody who is quick has anything to do: let somebody slow do something, or go on to when somebody has."""
        self.idle = 0
        deaf = self._master_paused()
        awake = [process for process in self.live if process.paused_until <= self.now]

        def queues(process: Process) -> list[deque[Any]]:
            told = [] if self._is_deaf(process) else process.told()
            paused = process.paused_until > self.now
            hears = not paused and self.nodes.hears(process.node)
            waiting = [process.commands] if process.commands and hears else []
            return [*waiting, *told, *([process.work] if process.work and not paused else [])]

        busy = [process for process in self.live if queues(process)]
        if busy:
            process = self.rng.choice(busy)
            queue = self.rng.choice(queues(process))
            if queue is process.commands:
                self._command(process, process.commands.popleft())
            elif queue is process.work:
                if process.work[0]():
                    process.work.popleft()
            else:
                self._do(queue.popleft()())
            return
        moved = [self.relays.all_turn(), *(self._pass(process, whole=True) for process in awake)]
        if any(moved):
            return
        when = [self.timers[0][0]] if self.timers else []
        if (next_ := self.network.next()) is not None:
            when.append(next_)
        if self.due is not None and not deaf:
            when.append(self.due)
        if self.is_closed:
            when.append(self.closed_until)
        for process in awake:
            root = process.loop.wiring.root
            if root is not None and (due := root.due_s()) is not None:
                when.append(self.now + due)
            for task in process.loop.tasks:
                at = task.ready_in()
                if at is not None and (task.diversion is not None or not task.input.is_read):
                    when.append(self.now + at)
        if self.faults.stop_at is not None and not self.stopping:
            when.append(1.0 + self.faults.stop_at)
        if self.halt_at is not None and not deaf:
            when.append(self.halt_at)
        if not when:
            # A task that is blocked may have sent a message when it was asked, and not be able to go on by itself.
            if any(process.inbox.queues for process in awake):
                return
            raise Stuck("nobody can go on")
        self.now = max(self.now, min(when))

    def _pass(self, process: Process, whole: bool = False) -> bool:
        """Some of what a run loop does in a pass, or all of it."""
        random_ = self.rng.random
        loop = process.loop
        moved = False
        complete = whole
        if whole or random_() < 0.7:
            had = process.inbox.used
            messages = process.transport.all() if whole else process.transport.receive(0)
            if messages or loop.wiring.delivery.grants_due:
                loop.deliver(messages)
                moved = bool(messages)
                self.checks.delivered(process)
            if had > process.inbox.capacity // 2:
                for other in self.live:
                    other.inbox.quiet = False  # they may wait for the room
        else:
            complete = False
        root = loop.wiring.root
        if root is not None:
            root.tick()
        tasks = loop.tasks
        if tasks:
            if whole or random_() < 0.5:
                complete = True
            else:
                tasks = [tasks[int(random_() * len(tasks))]]
            lazy = 0.0 if whole else self.faults.lazy_sources
            for task in tasks:
                if lazy and task.input.is_read and not task.finished and random_() < lazy:
                    moved = True
                    continue
                if task.runnable():
                    records = task.stages[0].records_in
                    if loop.box is not None:
                        loop.box.note(task.task.number)
                    task.step()
                    moved = True
                    if task.finished or task.stages[0].records_in > records:
                        self.progress = self.steps
                elif random_() < 0.1:
                    task.idle()
                if task.blocked:
                    self.checks.not_held_up(task)
        if loop.wiring.catching_up and (whole or random_() < 0.5):
            places = [channel.next for _, channel in loop.wiring.catching_up.values()]
            loop._catch_up()
            moved = moved or places != [channel.next for _, channel in loop.wiring.catching_up.values()]
        if moved:
            self.checks.after(process)
        else:
            waits = process.transport.waits() or (root is not None and root.waiting)
            process.inbox.quiet = complete and not loop.wiring.catching_up and not waits
        return moved

    def _damage(self, both: bool) -> None:
        what = self.store.damage(both, self.rng if both else self.disk)
        if what is not None:
            self.damages -= both
            self.scratches -= not both
            self.counts["damages" if both else "scratches"] += 1
            self.story.append((self.now, f"DAMAGE {what}"))

    def _wipe(self) -> None:
        self.wipes = max(0, self.wipes - 1)
        self.counts["wipes"] += 1
        self.story.append((self.now, f"DAMAGE {self.store.wipe()}"))

    @property
    def is_closed(self) -> bool:
        """Whether the store is full or read-only now."""
        return self.closed_until > 0.0

    def _may_close(self) -> bool:
        return self.full + self.read_only > 0 and not self.is_closed

    def _close_store(self) -> None:
        """The store is full, or read-only, for a while."""
        rng = self.closing
        read_only = rng.randrange(self.full + self.read_only) >= self.full
        self.read_only -= read_only
        self.full -= not read_only
        manifests = self.store.manifests  # one of their size may find room, and its copy may find none
        room = 2.5 * len(encode(manifests[max(manifests)])) if manifests and rng.random() < 0.5 else 10_000.0
        self.close_store(rng.random() * self.faults.closure_s, read_only, int(rng.random() * room))

    def close_store(self, seconds: float, read_only: bool, slack: int = 0) -> None:
        """Let the store be read-only, or full but for so many bytes, for so long."""
        self.closed_until = self.now + seconds
        self.counts["times that the store was read-only" if read_only else "times that the store was full"] += 1
        self.story.append((self.now, f"CLOSE {self.store.close(read_only, slack)} for {seconds:.4f}"))

    def _open_store(self) -> None:
        self.closed_until = 0.0
        self.progress = self.steps
        self.story.append((self.now, "OPEN the store takes everything"))
        self.store.open_again()

    def _look(self) -> None:
        """The keeper looks after what is saved: by names and sizes, or by reading all of it."""
        by_names = self.disk.random() < 0.5
        if self.keeping:
            return  # it has one thread
        before = self.keeper.damage
        try:
            if by_names:
                self.keeper.look()
            else:
                for _ in self.keeper.examine():
                    pass
        except StoreError:  # nothing can be mended now; it looks again some time
            assert self.is_closed
            self.counts["looks that could not mend"] += 1
        self.counts["looks"] += 1
        if self.keeper.damage != before:
            self.story.append((self.now, f"FOUND {self.keeper.damage}"))

    def _say_lost(self, names: frozenset[str], reason: str) -> None:
        self.counts["losses told"] += 1
        self.store.may_be_lost(names)
        commands = self.host.of_coordinator(lambda coordinator, now: coordinator.lost(names, reason, now), self.now)
        self.counts["rewrites"] += any(
            isinstance(command, host_commands.Call) and isinstance(command.command, protocol.SaveWholeState)
            for command in commands
        )
        self._do(commands)

    # --- telling -------------------------------------------------------------------------------------------------

    def told(self, last: int | None = None) -> str:
        """The story so far, or the end of it."""
        story = self.story if last is None else self.story[-last:]
        return "\n".join(f"{at:.4f} {what}"[:200] for at, what in story)

    def dump(self) -> str:
        """Where everything stands, for a failing test."""
        master = self.coordinator
        lines = [
            f"seed {self.seed}, placed {self.placed}, now {self.now:.4f}, {self.steps} steps",
            f"{self.faults}",
            f"coordinator: {master.state}, epoch {master.epoch}, begun {master.begun}, generation {master.generation}, "
            f"pending {sorted(master._pending)}, finished {sorted(master._finished)}, going back "
            f"{sorted(master._going_back)}, missing {master._missing}, making {master._building}",
        ]
        for process in self.live:
            lines.append(
                f"worker {process.worker}: inbox {process.inbox.used} bytes, commands {len(process.commands)}, answers "
                f"{len(process.answers)}, said {len(process.said)}, work {len(process.work)}, behind "
                f"{sorted(process.loop.wiring.catching_up)}"
            )
            for task in process.loop.tasks:
                inbox = TaskInbox() if task.input.is_read else task.input.inbox
                lines.append(
                    f"  {task.task.number} {task.name}: generation {task.generation}, epoch {task.epoch}, finished "
                    f"{task.finished}, blocked {task.blocked}, queued {task.input.queued}, open {sorted(inbox.open)}, "
                    f"held {sorted(inbox._held)}, {task.state}"
                )
                lines += [
                    f"    -> {'local' if channel.local else 'remote'} {channel.number}: outstanding "
                    f"{channel.outstanding}, queued {log.unsent(channel)}, cached {log.cache.first} to "
                    f"{log.cache.end}, next {channel.next}, ended {log.ended}, "
                    f"{channel.life.state}, generation {channel.generation}"
                    for log in task.logs
                    for channel in log.channels
                ]
        return "\n".join(lines)
