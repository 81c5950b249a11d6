"""Records that kill, among equal ones that do not, in the simulated cluster: each is found out and no other is lost;
and the same for one task, without a cluster.

A worker's process dies when an operator of it gets a record that kills, wherever that is, and by kills from outside.
Notes, watchers, and the suspects of the JobHost are the real ones.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.host.decide.commands import Call, StartProcess
from penstock.host.decide.process_commands import Build
from penstock.host.decide.suspects import Suspects
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.collect import Collect
from penstock.runtime.worker.blackbox import BlackBox, Crash, Note, Watcher
from penstock.runtime.worker.record_by_record import CALM_EPOCHS, Poison, RecordByRecord
from tests.epochs.flows import epoch_flow
from tests.epochs.sim import EpochCluster, Faults, Process, faults_of
from tests.program.random_flows import RandomFlow
from tests.runtime.sim import Trickle, small_steps

CRASH = Crash("Segmentation fault", True)
WORDS = ("the", "be", "to")


class Deadly(EpochCluster):
    """A cluster whose processes can be killed by records: a flow's functions call `kill`."""

    def __init__(self, made: RandomFlow, seed: int, faults: Faults) -> None:
        self.boxes: dict[int, tuple[BlackBox, Watcher]] = {}  # by a process's life
        self.words: dict[int, tuple[Note | None, Crash | None]] = {}  # the last ones of the dead, by life
        self.running: Process | None = None
        self.killed: Note | None = None  # what the process at work was doing when a record killed it
        self.crashes = 0
        super().__init__(made, seed, faults)

    def kill(self) -> None:
        """The record at hand kills its process; the step that it is in comes to its end, but nobody knows any more."""
        if self.running is not None and self.killed is None:
            self.killed = self.boxes[self.running.life][1].read()

    def _start(self, command: StartProcess) -> None:
        super()._start(command)
        process = self.processes.get(command.worker)
        if process is not None:
            box = process.loop.box = BlackBox()
            self.boxes[process.life] = box, Watcher(box.address)

    def _pass(self, process: Process, whole: bool = False) -> bool:
        self.running = process
        moved = super()._pass(process, whole)
        self.running = None
        note, self.killed = self.killed, None
        if note is not None:
            self.crashes += 1
            self.kills += 1  # which it does not count as
            self._let_die(process, note, CRASH)
        return moved

    def _kill(self, process: Process) -> None:
        # Between two steps here, but the last one might as well have been under way.
        self._let_die(process, self.boxes[process.life][1].read(), None)

    def _let_die(self, process: Process, note: Note | None, crash: Crash | None) -> None:
        self.words[process.life] = note, crash
        super()._kill(process)

    def _last_words(self, process: Process) -> tuple[Note | None, Crash | None]:
        return self.words[process.life]

    def _command(self, process: Process, call: Call) -> None:
        super()._command(process, call)
        if isinstance(call.command, Build):
            process.loop.run_record_by_record(call.command.modes)

    def check(self) -> None:
        self.made.check(self.outside.records())

    @property
    def found(self) -> int:
        """Records that an operator, or a function on the way to an operator, refused to take."""
        tasks = [task for process in self.processes.values() for task in process.loop.wiring.tasks.values()]
        refused = sum(stage.errors.skipped for task in tasks for stage in task.stages)
        return refused + sum(sum(task.outputs.skipped().values()) for task in tasks)


def deadly(seed: int, poison: int, faults: Faults, records: int = 300, where: str = "operator") -> Deadly:
    """Few words, again and again, of which some, "xx", kill whatever task gets them; two sources, and tasks that both
    of them send to. `where`: the function that kills is that of an operator, or one on the way to an operator."""
    rng = random.Random(f"deadly {seed}")
    words = rng.choices(WORDS[: rng.choice((1, 3))], k=records)
    for where in rng.sample(range(len(words)), poison):
        words[where] = "xx"
    made = RandomFlow(Flow("deadly", chaining=True))
    clusters: list[Deadly] = []

    def work(word: str) -> str:
        if word == "xx":
            clusters[0].kill()
        return word.upper()

    sink = Collect()
    read = made.flow.read(Trickle([words[::2], words[1::2]], seed), name="read", parallelism=2)
    before = read.rebalance()
    if where == "side":

        def aside(ctx: Any, key: Any, word: str) -> list[str]:
            ctx.output("aside", word)
            return []

        before = before.key_by(str.lower).process(aside, name="before", parallelism=2).side_output("aside")
    elif where != "operator":
        before = before.map(str.lower, name="before", parallelism=2)
    if where in ("key", "side"):
        keyed = before.key_by(work)
        worked = keyed.process(lambda ctx, key, word: [key], name="work", on_error="skip", parallelism=2)
    elif where == "partition":
        divided = before.partition_by(lambda word, tasks: len(work(word)) % tasks)
        worked = divided.map(str.upper, name="work", on_error="skip", parallelism=2)
    else:
        worked = before.map(work, name="work", on_error="skip", parallelism=2)
    worked.rebalance().write(sink, name="out", parallelism=1)
    made.expected[sink.channel] = ("out", Counter(word.upper() for word in words if word != "xx"))
    cluster = Deadly(made, seed, faults)
    clusters.append(cluster)
    return cluster


@pytest.mark.parametrize("seed", range(6))
def test_kills_from_outside_cost_no_record(seed: int) -> None:
    with small_steps(seed):
        cluster = deadly(seed, 0, Faults(workers=2, kills=60, kill_rate=0.02, window=30, interval_s=0.002), 1000)
        cluster.run()
        assert cluster.counts["kills"] > 30
        assert cluster.found == 0
        assert not any(how.places or how.values for how in cluster.host.suspects.modes().values())


@pytest.mark.parametrize("seed", range(3))
def test_a_task_that_runs_record_by_record_does_as_others(seed: int) -> None:
    """Whatever its operators are, and whatever else goes wrong: killed so often, most tasks run record by record."""
    faults = replace(faults_of(seed), kills=20, kill_rate=0.01, rescales=0, master_kills=0, stop_at=None)
    with small_steps(seed):
        Deadly(epoch_flow(seed), seed, faults).run()


@pytest.mark.parametrize("where", ["operator", "key", "partition", "side"])
@pytest.mark.parametrize("poison", [1, 2, 40])
@pytest.mark.parametrize("seed", range(4))
def test_records_that_kill_are_found_and_no_other_is_lost(seed: int, poison: int, where: str) -> None:
    """The output is that of all others; and each task that met them died so often at most. Where a selector on the way
    to an operator kills, it is this operator that refuses the record."""
    with small_steps(seed):
        kills, window = random.Random(seed).choice((0, 3, 15)), random.Random(seed).choice((30, 300))
        faults = Faults(workers=3, kills=kills, kill_rate=0.01, window=window, interval_s=0.005)
        cluster = deadly(seed, poison, faults, where=where)
        cluster.run()
        assert cluster.found == poison
        # Two deaths until the task runs record by record; three for the first that is found, two more until all its
        # like are.
        assert cluster.crashes <= 2 * (2 + 3 + 2)


# --- one task, without a cluster ---------------------------------------------------------------------------------


class Life:
    """A task with two channels that goes through lives, by chance: epochs complete, and it is killed from outside, but
    not so often without an epoch between that a record has to pay for it."""

    def __init__(
        self, attempts: int, channels: list[list[str]], poison: set[tuple[int, int]], rng: random.Random
    ) -> None:
        self.suspects = Suspects(attempts)
        self.channels = channels
        self.poison = poison
        self.rng = rng
        self.crashes = 0
        self.refused: set[tuple[int, int]] = set()
        self._attempts = attempts
        self._box = BlackBox()
        self._watcher = Watcher(self._box.address)
        self._epoch = 0
        self._at = [0, 0]  # in the channels, at the last complete epoch
        self._refused: set[tuple[int, int]] = set()
        self._outside = 0  # kills since
        self._crash: Crash | None = None  # of the last death

    def run(self) -> None:
        while not self._live():
            self.suspects.died(self._watcher.read(), self._crash)

    def _live(self) -> bool:
        """False: the process has died."""
        how = self.suspects.modes().get(0)
        record_by_record = None if how is None else RecordByRecord(self._box, 0, how, self._epoch)
        at, self.refused = list(self._at), set(self._refused)
        epochs = 0
        while left := [channel for channel in (0, 1) if at[channel] < len(self.channels[channel])]:
            if epochs < CALM_EPOCHS - 1 and self.rng.random() < 0.1:
                epochs += 1
                self._complete(at, record_by_record)
            channel = self.rng.choice(left)
            record = channel, at[channel]
            self._box.note(0)
            try:
                if record_by_record is not None:
                    record_by_record.next(channel)
                    record_by_record.check(0, [self.channels[channel][at[channel]]])
            except Poison:
                self.refused.add(record)
            else:
                self._crash = CRASH if record in self.poison else None
                self.crashes += record in self.poison
                outside = self._outside < 2 * self._attempts - 1 and self.rng.random() < 0.1
                self._outside += outside
                if outside or record in self.poison:
                    return False
            at[channel] += 1
        return True

    def _complete(self, at: list[int], record_by_record: RecordByRecord | None) -> None:
        self._epoch += 1
        self._at, self._refused, self._outside = list(at), set(self.refused), 0
        self.suspects.completed()
        if record_by_record is not None:
            record_by_record.passed(self._epoch)
            if self.rng.random() < 0.9:  # else it dies, or the next one completes, before it hears of this one
                record_by_record.completed(self._epoch)


@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 2**32))
def test_whatever_kills_a_task_just_its_poison_is_refused(attempts: int, poison: int, seed: int) -> None:
    rng = random.Random(seed)
    channels = [rng.choices(WORDS[: rng.choice((1, 3))], k=40) for _ in range(2)]
    deadly = set(rng.sample([(channel, i) for channel in (0, 1) for i in range(40)], poison))
    for channel, i in deadly:
        channels[channel][i] = "xx"
    life = Life(attempts, channels, deadly, rng)
    life.run()
    assert life.refused == deadly
    assert life.crashes <= 2 + attempts + 2


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_equals_of_poison_are_not_refused_with_it(attempts: int, poison: int, seed: int) -> None:
    """As long as it is not found out by its value: it has crashed the process no more than so often."""
    rng = random.Random(seed)
    channels = [["the"] * 40, ["the"] * 40]
    deadly = set(rng.sample([(channel, i) for channel in (0, 1) for i in range(40)], poison))
    life = Life(attempts, channels, deadly, rng)
    life.run()
    if not any(how.values for how in life.suspects.modes().values()):
        assert life.refused == deadly
    else:
        assert life.refused >= deadly
        assert life.crashes >= attempts + 2
