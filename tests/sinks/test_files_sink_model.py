"""The Files sink against a model: whatever dies and when, its parts hold the committed history, each record once.

The test plays the coordinator of a job with epochs. Tasks write numbered records; the model keeps what each wrote, and
a copy of that for each complete epoch. Writers are abandoned at any system call, as they are when a process is
killed; some of them continue for a while as stale ones. The job goes back to the last complete epoch, an older one, or
the start, with other numbers of tasks. After each restore the parts must be exactly the history up to its epoch.
"""

from __future__ import annotations

import os
import pickle
import random
import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime import sinks
from penstock.runtime.errors import PenstockError
from penstock.runtime.records.userfunc import ErrorHandler
from penstock.runtime.sinks import append, places
from penstock.runtime.sinks.base import SinkContext
from penstock.runtime.sinks.two_phases import SavedSink
from tests.sinks.one_task import OneTask

History = defaultdict[int, list[str]]  # by task


BLOCKS = int(os.environ.get("PENSTOCK_FILES_BLOCKS", "6"))  # of 100 seeds


class Killed(BaseException):
    """The process ends here."""


class Mortal:
    """Counts the system calls of the process that acts, and kills it before or after one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.late = False
        for name in ("replace", "unlink", "listdir"):
            patch.setattr(os, name, self._wrapped(getattr(os, name)))
        patch.setattr(os, "fsync", self._wrapped(lambda _: None))  # nothing here outlives the machine
        patch.setattr(places, "LocalFile", self._wrapped(places.LocalFile))

    def run(self, kill_after: int | None, late: bool, act: Callable[[], Any]) -> Any:
        self.left, self.late = kill_after, late
        try:
            return act()
        finally:
            self.left = None

    def _wrapped(self, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self.left is None:
                return call(*args, **kwargs)
            self.left -= 1
            if self.left < (-1 if self.late else 0):  # the dead do nothing more, not even in their handlers
                raise Killed
            result = call(*args, **kwargs)
            if self.left < 0:
                raise Killed
            return result

        return wrapped


@dataclass
class Complete:
    """A complete epoch."""

    epoch: int
    parallelism: int
    states: dict[int, SavedSink]
    history: History
    finished: set[int]


class Job:
    def __init__(self, seed: int, where: Path, patch: pytest.MonkeyPatch) -> None:
        self.rng = rng = random.Random(seed)
        self.where = where
        self.mortal = self.mortal_of(patch)
        patch.setattr(append, "_BUFFER", rng.choice([1, 30, 1 << 18]))
        self.packed = rng.random() < 0.5
        self.rescales = rng.random() < 0.6
        self.settings: dict[str, Any] = {
            "compression": "gzip" if self.packed else None,
            "part_bytes": rng.choice([1, 100, 400, 1 << 27]),
            "part_s": rng.choice([0, *[float("inf")] * 3]),
        }
        self.deadly = rng.choice([0.0, 0.1, 0.3])
        self.serial = 0
        self.history: History = defaultdict(list)
        self.done: list[Complete] = []
        self.begun = 0
        self.parallelism = rng.randint(1, 3)
        self.stale: list[OneTask] = []
        self.dead: list[OneTask] = []
        self.finished: dict[int, SavedSink] = {}  # of tasks that ended before the next epoch
        self.writers = {i: self.open(i, restoring=False) for i in range(self.parallelism)}

    def mortal_of(self, patch: pytest.MonkeyPatch) -> Mortal:
        return Mortal(patch)

    @property
    def last(self) -> Complete:
        return self.done[-1] if self.done else Complete(0, self.parallelism, {}, defaultdict(list), set())

    def open(self, index: int, restoring: bool) -> OneTask:
        errors = ErrorHandler("out", policy="fail")
        context = SinkContext("out", index, self.parallelism, epochs=True, restoring=restoring, errors=errors)
        return OneTask(sinks.Files(self.where, overwrite=self.rng.random() < 0.5, **self.settings), context)

    def mortally(self, index: int, act: Callable[[OneTask], Any]) -> Any:
        """Have the writer of a task do it, or die on the way."""
        rng = self.rng
        deadly = rng.random() < self.deadly
        writer = self.writers[index]
        kill_after = rng.randint(0, rng.choice([3, 12])) if deadly else None
        try:
            return self.mortal.run(kill_after, rng.random() < 0.5, lambda: act(writer))
        except Killed:
            self.dead.append(writer)
            raise

    # --- what tasks do -------------------------------------------------------------------------------------------

    def write(self, index: int) -> None:
        if index in self.finished:
            return
        records = []
        for _ in range(self.rng.randint(0, 4)):
            self.serial += 1
            records.append(f"{index}.{self.serial}" + "x" * self.rng.choice([0, 0, 50]))
        self.history[index] += records
        self.mortally(index, lambda writer: writer.write(records))
        if self.rng.random() < 0.5:
            self.mortally(index, lambda writer: writer.flush())

    def prepare(self, index: int, epoch: int) -> SavedSink:
        state: SavedSink = pickle.loads(pickle.dumps(self.mortally(index, lambda writer: writer.prepare(epoch))))
        return state

    def restore(self, index: int, epoch: int, states: list[SavedSink]) -> None:
        states = pickle.loads(pickle.dumps(states))
        self.mortally(index, lambda writer: writer.restore(epoch, states))

    def end(self, index: int) -> None:
        """The task's input has ended: it says so with the epoch that comes next."""
        if index not in self.finished:
            self.mortally(index, lambda writer: writer.finish())
            self.finished[index] = self.prepare(index, self.begun + 1)

    def haunt(self) -> None:
        """Stale writers do what they do until they find out."""
        for writer in self.stale[:]:
            act = self.rng.randint(0, 4)
            if writer._finished:
                act = 4
            if act <= 1:
                writer.write(["STALE"])
                writer.flush()
            elif act == 2:
                gone = writer._file is not None and writer._file.deleted()
                with pytest.raises(PenstockError, match="no longer there") if gone else nullcontext():
                    writer.prepare(max(writer._number, self.begun) + self.rng.randint(0, 2))
            elif act == 3:
                writer.finish()
            elif self.rng.random() < 0.5:
                writer.close(True)
                self.stale.remove(writer)

    # --- what the coordinator does -------------------------------------------------------------------------------

    def run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(5, 40)):
            try:
                self.step()
            except Killed:
                self.recover()
            self.haunt()
            self.check_finals()
        while True:
            try:
                self.finish()
                break
            except Killed:
                self.recover()

    def step(self) -> None:
        rng = self.rng
        act = rng.random()
        if act < 0.5:
            self.write(rng.randrange(self.parallelism))
        elif act < 0.85:
            self.epoch()
        elif act < 0.9:
            self.end(rng.randrange(self.parallelism))
        elif act < 0.95:
            raise Killed
        elif self.last.epoch:
            self.recover_some()

    def epoch(self) -> None:
        rng = self.rng
        self.begun += 1
        epoch = self.begun
        states: dict[int, SavedSink] = {}
        histories: History = defaultdict(list, deepcopy(self.last.history))
        order = list(range(self.parallelism))
        while order := [i for i in order if i not in states]:
            i = rng.choice(order)
            states[i] = self.finished[i] if i in self.finished else self.prepare(i, epoch)
            histories[i] = self.history[i][:]
            if rng.random() < 0.3:
                self.write(rng.choice(list(states)))  # belongs to the next one
            if rng.random() < 0.05 and self.last.epoch:
                for back in self.recover_some():  # and do their part of the epoch again
                    states.pop(back, None)
                order = list(range(self.parallelism))
        if rng.random() < 0.1:
            return  # its saving failed: it is passed over
        self.complete(epoch, states, histories)

    def complete(self, epoch: int, states: dict[int, SavedSink], history: History) -> None:
        self.done.append(Complete(epoch, self.parallelism, states, history, set(self.finished)))
        for i in self.rng.sample(range(self.parallelism), self.parallelism):
            for _ in range(self.rng.choice([0, 1, 1, 1, 1, 2])):  # a late one comes with the next epoch
                self.mortally(i, lambda writer: writer.commit(epoch))

    def recover_some(self) -> list[int]:
        """Some tasks go back to the last complete epoch, the others stay."""
        back = self.rng.sample(range(self.parallelism), self.rng.randint(1, self.parallelism))
        last = self.last
        if last.parallelism != self.parallelism:
            raise Killed
        for i in back:
            self.leave(self.writers[i])
            self.history[i] = last.history[i][:]
            self.finished.pop(i, None)
        for i in back:
            self.writers[i] = self.open(i, restoring=True)
            self.restore(i, last.epoch, [last.states[i]])
            if i in last.finished:
                self.finished[i] = self.prepare(i, last.epoch + 1)
        return back

    def recover(self) -> None:
        """All tasks go back; again, until nobody dies of it."""
        while True:
            try:
                self.try_to_recover()
                return
            except Killed:
                pass

    def try_to_recover(self) -> None:
        rng = self.rng
        for writer in self.writers.values():
            self.leave(writer)
        if rng.random() < 0.2:
            del self.done[-1:]  # its snapshot is damaged
        elif rng.random() < 0.05:
            del self.done[rng.randint(0, len(self.done)) :]
        last = self.last
        if self.rescales and rng.random() < 0.5:
            self.parallelism = rng.randint(1, 3)
        elif last.epoch:
            self.parallelism = last.parallelism
        if rng.random() < 0.3:
            self.begun = last.epoch  # another coordinator, which knows no more than what is complete
        self.history = defaultdict(list, deepcopy(last.history))
        self.finished = {}
        dealt: dict[int, list[SavedSink]] = defaultdict(list)
        for i in rng.sample(sorted(last.states), len(last.states)):
            same = self.parallelism == last.parallelism
            dealt[i if same else rng.randrange(self.parallelism)].append(last.states[i])
        self.writers = {}
        for i in rng.sample(range(self.parallelism), self.parallelism):
            self.writers[i] = self.open(i, restoring=True)
            self.restore(i, last.epoch, dealt[i])
            if rng.random() < 0.2:
                self.haunt()
            if rng.random() < 0.3:
                self.write(i)  # others are still going back
                self.writers[i].flush()
        self.check_finals(last.history)
        if self.parallelism == last.parallelism:
            for i in last.finished:
                self.finished[i] = self.prepare(i, last.epoch + 1)

    def leave(self, writer: OneTask) -> None:
        act = self.rng.random()
        if writer in self.dead:
            pass
        elif act < 0.3:
            writer.close(True)
        elif act < 0.7 and not writer._awaits_restore:
            self.stale.append(writer)

    def finish(self) -> None:
        for i in range(self.parallelism):
            self.end(i)
        self.begun += 1
        self.complete(self.begun, dict(self.finished), deepcopy(self.history))
        self.check_finals()
        self.haunt()
        for writer in self.stale:
            writer.close(True)
        for i in range(self.parallelism):
            self.mortally(i, lambda writer: writer.commit(self.begun))
        for writer in self.writers.values():
            writer.close(False)

    # --- what must hold ------------------------------------------------------------------------------------------

    def finals(self) -> History:
        found: History = defaultdict(list)
        for name in sorted(os.listdir(self.where), key=lambda name: (name.count("-") == 2, name)):
            if name.startswith("part-"):
                data = (self.where / name).read_bytes()
                text = (self.unpacked(data) if self.packed else data).decode()
                assert text == "" or text.endswith("\n")
                found[int(name[5:10])] += text.splitlines()
        return found

    @staticmethod
    def unpacked(data: bytes) -> bytes:
        """All members whole, and none empty but the only one."""
        out = b""
        assert data
        rest = data
        while rest:
            member = zlib.decompressobj(31)
            text = member.decompress(rest)
            assert member.eof
            assert text or len(data) == len(rest) - len(member.unused_data)
            out += text
            rest = member.unused_data
        return out

    def check_finals(self, exactly: History | None = None) -> None:
        """Parts hold nothing that is not complete; and, right after a restore, all that is."""
        found = self.finals()
        if exactly is not None:
            assert {i: records for i, records in exactly.items() if records} == {
                i: records for i, records in found.items() if records
            }
        for i, records in found.items():
            assert records == self.last.history[i][: len(records)]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_parts_are_the_committed_history(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100 * block, 100 * block + 100):
        where = tmp_path / str(seed)
        with monkeypatch.context() as patch:
            job = Job(seed, where, patch)
            try:
                job.run()
                job.check_finals(job.history)
                assert [name for name in os.listdir(where) if not name.startswith("part-")] == []
            except BaseException:
                print(f"seed {seed}: {job.settings}")
                raise
