"""Simulated jobs with epochs and faults: everything exactly once, in some seeds of the campaign.

More of them: python -m tests.epochs.campaign --help
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from penstock.host.decide.commands import StartProcess
from penstock.runtime.epochs.coordinator import Complete
from penstock.runtime.errors import StoreUnreachable
from penstock.runtime.operators.process import ProcessContext
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.worker.task_state import AT_END
from tests.epochs.campaign import main, run_seed
from tests.epochs.flows import epoch_flow
from tests.epochs.sim import EpochCluster, Faults, Process, Stuck, faults_of
from tests.program.random_flows import RandomFlow
from tests.runtime.sim import Trickle, small_steps

SEEDS = int(os.environ.get("PENSTOCK_EPOCH_SEEDS", "18"))
CHUNKS = 6


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_record_counts_once_whatever_dies(chunk: int) -> None:
    for seed in range(chunk, SEEDS, CHUNKS):
        run_seed(seed)


@pytest.mark.parametrize(
    "seed",
    [
        7528,  # a rescale fuses a key_by, which has had no counters of its own
        *(78, 80),  # a channel through relays has more outstanding than a credit window
        331091,  # records whose calls are to be made again are saved by one more epoch before that
        320877,  # a rescale makes a task from ends alone, and the job ends before that task is sent the end again
    ],
)
def test_what_long_campaigns_have_found(seed: int) -> None:
    run_seed(seed)


def test_the_same_seed_gives_the_same_run() -> None:
    def story() -> tuple[int, list[str]]:
        with small_steps(12):
            cluster = EpochCluster(epoch_flow(12), 12, faults_of(12))
            cluster.run()
        # Names of channels, which are random, are part of what is saved. So checksums differ, and by their digits the
        # sizes of manifests, by which the room in a full store is drawn, and the ends of long lines, which are cut off.
        lines = re.sub(r"checksum=\d+|full but for \d+", "", cluster.told()).split("\n")
        return cluster.steps, [line[:170] for line in lines]

    assert story() == story()


def test_the_seeds_have_every_kind_of_fault() -> None:
    faults = [faults_of(seed) for seed in range(300)]
    for name in ("kills", "master_kills", "pairs", "moments", "stillborn", "put", "get", "manifest", "unknown"):
        with_it = sum(bool(getattr(fault, name)) for fault in faults)
        assert 20 < with_it < 290, f"{name} is in {with_it} of 300 seeds"
    for name in (
        *("damages", "scratches", "wipes", "full", "read_only", "remote", "looks"),
        *("stop_at", "inline_bytes", "pauses", "wakes"),
    ):
        assert sum(bool(getattr(fault, name)) for fault in faults) > 20
    one_node = sum(fault.nodes == 1 for fault in faults)
    assert 100 < one_node < 200, f"{one_node} of 300 seeds have one node"
    for name in ("cuts", "partial_cuts", "breaks", "node_kills", "node_pauses", "slow_nodes", "apart_s"):
        with_it = sum(bool(getattr(fault, name)) for fault in faults if fault.nodes > 1)
        assert 20 < with_it < 150, f"{name} is in {with_it} of 300 seeds"


def test_nodes_are_lost_and_killed_and_connections_break() -> None:
    counts = run_seed(338) + run_seed(2) + run_seed(407)
    for what in (
        "nodes lost",
        "nodes killed",
        "one-way cuts",
        "workers that have left",
        "logs to all over several nodes",
    ):
        assert counts[what] > 0, f"{what} are not in these seeds any more: {counts}"
    assert counts["connections broken with bytes under way"] > 0


def test_a_node_that_another_does_not_reach_is_given_up() -> None:
    """In a job that would come to no end."""
    counts = run_seed(1660)
    assert counts["partial cuts for good"] > 0
    assert counts["nodes given up"] > 0


# --- single scenes ---------------------------------------------------------------------------------------------


class Scene(EpochCluster):
    """A job whose faults the test gives."""

    def until(self, reached: Any, steps: int = 20_000) -> None:
        """Continue until something holds."""
        for _ in range(steps):
            if reached():
                return
            assert not self.over
            self._turn()
            self.steps += 1
        raise Stuck(f"after {steps} steps it still does not hold\n{self.dump()}")

    held: list[StartProcess] | None = None  # processes that are not started before the test says so

    def _start_later(self, command: StartProcess) -> None:
        if self.held is None:
            super()._start_later(command)
        else:
            self.held.append(command)

    def kill_and_hold(self, worker: int) -> None:
        """Kill a worker's process, and start no other for now."""
        process = self.processes[worker]
        self._kill(process)
        self.timers.clear()
        self.held = []
        self._lost(process)

    def start_what_was_held(self) -> None:
        """Start the processes that were held back."""
        self.until(lambda: self.held)
        held, self.held = self.held, None
        assert held is not None
        for command in held:
            self._start_later(command)

    def process_of(self, task: int) -> Process:
        return self.processes[self.placed[task]]

    def number(self, name: str) -> int:
        return next(task.number for task in self.plan.tasks if self.plan.task_name(task).startswith(name))


def line(n: int) -> RandomFlow:
    """read > middle > last, each with one task."""
    made = RandomFlow(Flow("line", chaining=False))
    sink = Collect()
    stream = made.flow.read(Trickle([list(range(n))], 1), name="read", parallelism=1)
    stream.map(lambda record: record + 1, name="middle", parallelism=1).write(sink, name="last", parallelism=1)
    made.expected[sink.channel] = ("last", Counter(record + 1 for record in range(n)))
    return made


def test_those_before_a_failure_continue_meanwhile() -> None:
    """The worker of the last task dies at once; a source with a hundred windows of records reads them all before
    another process is there."""
    with small_steps(5):
        cluster = Scene(line(500), 5, Faults(kills=1, kill_rate=0.0, window=30, interval_s=1e6, memory_bytes=1000))
        cluster.placed.update({0: 0, 1: 1, 2: 2})
        cluster.until(lambda: cluster.coordinator.state == "RUNNING")
        cluster.kill_and_hold(2)
        source = cluster.process_of(cluster.number("read")).loop.wiring.tasks[cluster.number("read")]
        middle = cluster.process_of(cluster.number("middle")).loop.wiring.tasks[cluster.number("middle")]
        cluster.until(lambda: source.finished and middle.finished)
        assert 2 not in cluster.processes
        cluster.start_what_was_held()
        cluster.run()


def test_what_does_not_depend_on_a_failure_ends_meanwhile() -> None:
    made = RandomFlow(Flow("two-lanes", chaining=False))
    for name in ("a", "b"):
        sink = Collect()
        read = made.flow.read(Trickle([list(range(200))], 1), name=f"read-{name}", parallelism=1)
        read.rebalance().write(sink, name=f"write-{name}", parallelism=2)
        made.expected[sink.channel] = (name, Counter(range(200)))
    with small_steps(6):
        cluster = Scene(made, 6, Faults(kills=1, kill_rate=0.0, window=30, interval_s=1e6))
        for task in cluster.plan.tasks:
            cluster.placed[task.number] = 1 if "-a" in cluster.plan.task_name(task) else 2
        cluster.until(lambda: cluster.coordinator.state == "RUNNING")
        cluster.until(lambda: cluster.processes[1].loop.tasks)
        tasks = list(cluster.processes[1].loop.tasks)
        assert len(tasks) == 3
        cluster.kill_and_hold(2)
        cluster.until(lambda: all(task.finished for task in tasks))
        cluster.start_what_was_held()
        cluster.run()
        assert [id(task) for task in cluster.processes[1].loop.tasks] == [id(task) for task in tasks]


def test_epochs_quicker_than_a_worker_do_not_stop_its_sources() -> None:
    """There is always a barrier to begin; between two of them the source reads, and it ends."""
    made = line(100)
    with small_steps(7):
        cluster = Scene(made, 7, Faults(kills=0, interval_s=1e6))
        number = cluster.number("read")
        cluster.until(lambda: number in cluster.placed and cluster.coordinator.state == "RUNNING")
        cluster.until(lambda: not any(process.commands for process in cluster.live))
        source = cluster.process_of(number).loop.wiring.tasks[number]
        assert source.input.is_read
        next_epoch = 1000

        def ended() -> bool:
            nonlocal next_epoch
            while len(source.input._triggers) < 3 and source.state not in AT_END:
                source.trigger(next_epoch)
                next_epoch += 1
            return source.state in AT_END

        cluster.until(ended)
        assert source.stages[0].records_in == 100


@pytest.mark.parametrize("who", ["nobody", "source", "sink", "master", "savepoint"])
@pytest.mark.parametrize("when", ["RUNNING", "HALTED"])
def test_a_job_that_stops_with_a_savepoint_is_continued_exactly(who: str, when: str) -> None:
    """Whoever dies before or after its last epoch is complete; and after a savepoint that could not be written."""
    with small_steps(9):
        faults = Faults(kills=2, kill_rate=0.0, master_rate=0.0, interval_s=0.005, no_copy=float(who == "savepoint"))
        cluster = Scene(line(1000), 9, faults)
        cluster.until(lambda: cluster.coordinator.epoch > 1)
        cluster._halt()
        cluster.until(lambda: cluster.coordinator.migrating)
        cluster.until(lambda: cluster.coordinator.state == when)
        if who == "master":
            cluster._kill_master()
        elif who in ("source", "sink"):
            cluster._kill(cluster.process_of(cluster.number("read" if who == "source" else "last")))
        if who == "savepoint":
            cluster.until(lambda: cluster.counts["savepoints that could not be written"] > 0)
            cluster.faults = replace(cluster.faults, no_copy=0.0)
            cluster.halt_at = cluster.now
        cluster.run()
        assert cluster.counts["stops with a savepoint"] == 1


@pytest.mark.parametrize("who", ["source", "sink", "master"])
def test_nobody_is_lost_who_is_paused(who: str) -> None:
    """However long: epochs are given up meanwhile, others continue, and it ends as if nothing had been; also when it is
    told to stop just then."""
    with small_steps(9):
        cluster = Scene(line(2000), 9, Faults(kills=0, interval_s=0.005, timeout_s=0.02, pauses=1, pause_rate=0.0))
        cluster.placed.update({0: 0, 1: 1, 2: 2})
        cluster.until(lambda: cluster.coordinator.epoch > 1)
        until = cluster.now + 5.0
        if who == "master":
            cluster.master_paused_until = until
        else:
            cluster.processes[0 if who == "source" else 2].paused_until = until
        cluster._after(5.0, cluster._tell_to_stop, masters=False)
        before = cluster.coordinator.epoch
        cluster._stop()
        cluster.until(lambda: cluster.now >= until - 1.0 or cluster.over)
        assert not cluster.over
        assert cluster.coordinator.epoch <= before + 1, "an epoch that was all but complete"
        cluster.run()
        assert cluster.now >= until
        assert cluster.coordinator.restarts == 0


def test_what_the_dead_do_when_they_wake_up_is_nothing_to_the_living() -> None:
    """All workers live on when their master is killed, with the inboxes that they know."""
    with small_steps(10):
        faults = Faults(kills=0, interval_s=0.005, pauses=1, pause_rate=0.0, pause_s=0.01, wakes=1.0)
        cluster = Scene(line(1000), 10, faults)
        cluster.until(lambda: cluster.coordinator.epoch > 1)
        cluster.master_kills = 1
        cluster._kill_master()
        assert len(cluster.woken) == 3
        cluster.run()
        assert cluster.counts["steps of the dead"] > 0


@pytest.mark.parametrize("how", ["by another master", "after a rescale", "while commits are late"])
def test_fewer_tasks_undo_what_more_have_committed(how: str) -> None:
    """A sink had one task, then two, and goes back to an epoch at which there was one; that knows nothing of the other,
    whose records come again."""

    def rescale(parallelism: int) -> None:
        cluster.rescale("last", parallelism)
        cluster.until(lambda: not cluster.asked)
        assert len(cluster.plan.tasks) == parallelism + 2

    with small_steps(1):
        cluster = Scene(line(1000), 1, Faults(workers=2, kills=0, hurry=0.5, interval_s=0.002))
        cluster.placed.update({0: 0, 1: 0, 2: 0})
        cluster.chosen = [1]
        cluster.until(lambda: cluster.coordinator.epoch > 0)
        rescale(2)
        last = cluster.coordinator.epoch
        cluster.until(lambda: any(task == 1 for _, task, _ in cluster.outside.done))
        if how != "by another master":
            rescale(1)
        if how == "while commits are late":
            cluster.processes[1].slow = 0.99
            assert any(isinstance(call.command, Complete) for call in cluster.processes[1].commands)
        for epoch, manifest in cluster.store.manifests.items():
            if epoch > last:
                cluster.store.ruin(manifest.tasks[2].blobs[-1].name)
        if how == "by another master":
            cluster.master_kills = 1
            cluster._kill_master()
        cluster.run()
        assert cluster.counts["fall-backs"] == 1


def counted(keys: int = 40) -> RandomFlow:
    """read > count > last, with a count of each key after each record: state that grows by deltas."""
    made = RandomFlow(Flow("counted", chaining=False))
    sink = Collect()
    stream = made.flow.read(Trickle([list(range(12 * keys))], 1), name="read", parallelism=1)
    counts = stream.key_by(lambda record: record % keys).count(emit="every", name="count", parallelism=2)
    counts.write(sink, name="last", parallelism=1)
    made.expected[sink.channel] = ("last", Counter((key, n) for key in range(keys) for n in range(1, 13)))
    return made


def epochs_of(made: RandomFlow) -> Scene:
    """A job with some complete epochs, the same one each time."""
    cluster = Scene(made, 3, Faults(kills=0, interval_s=0.002))
    cluster.until(lambda: cluster.coordinator.epoch >= 4 and cluster.coordinator.state == "RUNNING")
    return cluster


@pytest.mark.parametrize(("way", "first"), [("delete", 0), ("truncate", 1), ("flip", 0), ("replace", 1)])
def test_damage_of_any_one_file_loses_nothing(way: str, first: int) -> None:
    """Of the files of a real sequence of epochs each is damaged, in two of four ways, and then everybody dies."""
    with small_steps(3):
        names = sorted(epochs_of(counted()).store.disk.files)
    assert len(names) > 20
    for number, name in enumerate(names[first::2]):
        with small_steps(3):
            cluster = epochs_of(counted())
            files = cluster.store.disk.files
            data = bytearray(files.pop(name))
            if way == "truncate":
                files[name] = bytes(data[: len(data) // 2])
            elif way == "flip":
                data[len(data) // 2] ^= 1
                files[name] = bytes(data)
            elif way == "replace":
                files[name] = bytes(data[::-1])
            before = cluster.coordinator.epoch
            if number % 2:
                cluster._kill_master()
                assert cluster.coordinator.epoch == before
            else:
                cluster.kills = len(cluster.live)
                for process in list(cluster.live):
                    cluster._kill(process)
            cluster.run()
            assert cluster.counts["fall-backs"] == 0, f"{way} {name}"


@pytest.mark.parametrize("seed", range(5))
def test_a_store_that_was_removed_is_filled_anew_while_the_job_lives(seed: int) -> None:
    with small_steps(seed):
        cluster = Scene(counted(), seed, Faults(kills=0, interval_s=0.002))
        cluster.until(lambda: cluster.coordinator.epoch >= 3 and cluster.coordinator.state == "RUNNING")
        cluster._wipe()
        cluster.keeper.look()
        assert "has lost snapshots or records" in (cluster.coordinator.last_failure or "")
        epoch = cluster.coordinator.begun
        cluster.until(lambda: cluster.coordinator.epoch >= epoch)
        assert cluster.coordinator.last_failure is None
        cluster._kill_master()
        assert cluster.coordinator.epoch >= epoch
        cluster.run()
        assert cluster.counts["fall-backs"] == 0


def test_after_a_snapshot_that_could_not_be_written_the_next_one_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """No epoch with changes to it can be complete."""
    with small_steps(3):
        cluster = Scene(counted(400), 3, Faults(kills=0, interval_s=0.002))
        cluster.until(lambda: cluster.coordinator.epoch >= 3 and cluster.coordinator.state == "RUNNING")
        put, number, failed = cluster.store.put, cluster.number("count"), 0

        def fails_once(name: str, parts: Any) -> Any:
            nonlocal failed
            if not failed and name.split("-")[1] == str(number):
                failed = cluster.coordinator.begun
                raise StoreUnreachable("the store takes nothing")
            return put(name, parts)

        monkeypatch.setattr(cluster.store, "put", fails_once)
        cluster.until(lambda: failed and cluster.coordinator.epoch > failed)
        assert cluster.coordinator.epoch <= failed + 2
        cluster._kill_master()
        cluster.run()


@pytest.mark.parametrize("read_only", [False, True], ids=["full", "read-only"])
def test_a_dead_worker_is_replaced_before_the_store_takes_anything(read_only: bool) -> None:
    """It dies while the manifest of an epoch is tried, of which all snapshots are written. The epoch is given up, and
    the job goes back to the one before; epochs complete again when the store is open."""
    with small_steps(3):
        cluster = Scene(counted(100), 3, Faults(kills=1, kill_rate=0.0, interval_s=0.002))
        cluster.until(lambda: cluster.coordinator.epoch >= 3 and cluster.coordinator.state == "RUNNING")
        cluster.until(lambda: cluster.coordinator._saving is not None)
        epoch = cluster.coordinator.epoch
        cluster.store.collect(2)  # so that no room can be made
        cluster.close_store(1e6, read_only)
        dead = cluster.process_of(cluster.number("count"))
        cluster._kill(dead)
        cluster.until(lambda: cluster.coordinator.restarts == 1)
        cluster.until(lambda: cluster.coordinator.state == "RUNNING")
        assert cluster.processes[dead.worker] is not dead
        assert cluster.counts["epochs given up while the store was closed"] == 1
        assert cluster.coordinator.epoch == epoch
        assert "its manifest could not be written" in str(cluster.coordinator.last_failure)
        cluster.until(lambda: cluster.counts["declined"])
        assert cluster.is_closed
        cluster._open_store()
        cluster.until(lambda: cluster.coordinator.epoch > epoch)
        cluster.run()


def test_old_epochs_make_room_in_a_full_store() -> None:
    """No epoch would complete that could delete them: tasks that could not write have it done."""
    with small_steps(3):
        cluster = Scene(counted(100), 3, Faults(kills=0, interval_s=0.002))
        cluster.until(lambda: cluster.coordinator.epoch >= 6 and cluster.coordinator.state == "RUNNING")
        assert len(cluster.store.epochs()) >= 6, "nothing was deleted so far"
        cluster.until(lambda: not cluster.keeping)
        cluster.close_store(1e6, read_only=False)
        epoch = cluster.coordinator.begun
        cluster.until(lambda: cluster.coordinator.epoch > epoch)
        assert cluster.is_closed
        assert cluster.counts["times that room was wanted"] > 0
        cluster._open_store()
        cluster.run()


def test_an_older_epoch_is_not_continued_from_before_later_ones_are_deleted() -> None:
    """Another JobMaster would find them, whose records the sinks have undone."""
    with small_steps(3):
        cluster = epochs_of(counted(100))
        cluster.until(lambda: not cluster.keeping)
        last = cluster.coordinator.epoch
        cluster.store.ruin(cluster.store.manifests[last].tasks[cluster.number("count")].blobs[-1].name)
        cluster.close_store(1e6, read_only=True)
        cluster._kill(cluster.process_of(cluster.number("count")))
        cluster.until(lambda: cluster.counts["waits to go back to an older epoch"] > 3)
        assert cluster.coordinator.state == "FALLING_BACK"
        assert cluster.store.epochs()[0] == last
        cluster._open_store()
        cluster.until(lambda: cluster.coordinator.state == "RUNNING")
        assert cluster.coordinator.epoch < last
        cluster.run()
        assert cluster.counts["fall-backs"] == 1


def test_an_ended_task_is_built_again_from_its_end_alone() -> None:
    """The last snapshot of an aggregate of which most had changed is of those that build on others, and was kept
    without them."""
    made = RandomFlow(Flow("ended", chaining=False))
    sink = Collect()
    stream = made.flow.read(Trickle([list(range(1000))], 1), name="read", parallelism=1)
    counts = stream.key_by(lambda record: record % 20).count(emit="final", name="count", parallelism=1)
    counts.write(sink, name="last", parallelism=1)
    made.expected[sink.channel] = ("ended", Counter({(key, 50): 1 for key in range(20)}))
    with small_steps(1):
        cluster = Scene(made, 1, Faults(kills=0, interval_s=0.002))
        cluster.until(lambda: any(manifest.final for manifest in cluster.store.manifests.values()))
        assert len(cluster.store.manifests) > 2
        cluster.master_kills = 1
        cluster._kill_master()
        cluster.run()
        assert cluster.counts["fall-backs"] == 0


def test_a_timer_that_is_always_due_does_not_stop_its_task() -> None:
    made = RandomFlow(Flow("restless", chaining=False))
    sink = Collect()

    def work(ctx: ProcessContext, key: Any, record: Any) -> list[Any]:
        ctx.set_timer(after_s=0)
        return [record]

    def again(ctx: ProcessContext, key: Any, at: float) -> None:
        ctx.set_timer(after_s=0)

    stream = made.flow.read(Trickle([list(range(100))], 1), parallelism=1).key_by(lambda record: record % 3)
    stream.process(work, on_timer=again, parallelism=2).write(sink, parallelism=1)
    made.expected[sink.channel] = ("restless", Counter(range(100)))
    with small_steps(8):
        EpochCluster(made, 9, Faults(kills=2, interval_s=0.01)).run()


def test_a_failing_seed_is_told_with_the_command_that_runs_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["campaign", "--seeds", "25", "--jobs", "1", "--plant", "early-commit"])
    assert main() == 1
    told = capsys.readouterr().out
    assert "Again: python -m tests.epochs.campaign --only 1 --story --plant early-commit" in told
    assert "FAILED seed 1: AssertionError: epoch 1 has no manifest" in told
    monkeypatch.setattr("sys.argv", ["campaign", "--only", "1", "--story"])
    assert main() == 0
    assert "Complete(epoch=" in capsys.readouterr().out
