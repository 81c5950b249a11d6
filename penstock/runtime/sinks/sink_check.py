"""Tries a sink of a user's as jobs with epochs use it: its processes die between any two calls, tasks go back and
change their number, epochs are passed over, and commits come late and twice.

It must never pass a sink that loses a record of a complete epoch, shows one twice, or shows one of an epoch that is not
complete. It knows nothing of the outside system but the records that it shows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from penstock.runtime.records.pickling import copied
from penstock.runtime.sinks.base import Sink, SinkContext
from penstock.runtime.sinks.two_phases import SavedSink, TwoPhases, commit_saved

_TASKS = 3


def check_sink(sink: Sink, shown: Callable[[], Iterable[Any]], *, seed: int = 0, steps: int = 60) -> None:
    """Tries an exactly-once sink whose place is empty, in a job that takes its course by chance.

        ps.testing.check_sink(Rows(tmp_path / "rows"), lambda: rows(tmp_path / "rows"), seed=7)

    `sink`: writes texts. `shown`: returns the records that readers of its place see, in any order.
    `seed`: another seed is another job. `steps`: the number of things that happen.

    Errors: AssertionError says which records were lost, came twice, or came too early; what the sink raises.
    """
    _Job(sink, shown, random.Random(f"sink {seed}")).run(steps)


class _Job:
    def __init__(self, sink: Sink, shown: Callable[[], Iterable[Any]], rng: random.Random) -> None:
        self._sink = sink
        self._shown = shown
        self._rng = rng
        self._generation = 0
        self._serial = 0
        self._epoch = 0  # the last that was begun
        self._complete = 0
        self._written: list[str] = []  # since the last complete epoch
        self._history: list[str] = []  # of the complete epochs
        self._saved: list[SavedSink] = []  # with the last complete epoch
        self._tasks: list[TwoPhases] = []
        self._start()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            drawn = self._rng.random()
            if drawn < 0.5:
                self._write()
            elif drawn < 0.8:
                self._take_epoch(self._rng.choice(("passed over", "told", "told", "told to some", "told to nobody")))
            else:
                self._go_back()
            self._look()
        for task in self._tasks:
            task.writer.finish()
        self._take_epoch("the last")
        for task in self._tasks:
            task.close(failed=False)
        self._look(everything=True)

    def _context(self, index: int, parallelism: int) -> SinkContext:
        restoring = self._generation > 1
        return SinkContext(
            "sink", index, parallelism, epochs=True, restoring=restoring, job="check", run="1",
            generation=self._generation,
        )  # fmt: skip

    def _start(self) -> None:
        """Makes the tasks, after everything of the last complete epoch is committed."""
        rng = self._rng
        self._generation += 1
        number = rng.randrange(1, _TASKS + 1)
        dealt: list[list[SavedSink]] = [[] for _ in range(number)]
        for place, saved in enumerate(self._saved):
            dealt[place % number].append(copied(saved))
        contexts = [self._context(index, number) for index in range(number)]
        for index in rng.sample(range(number), number):
            commit_saved(self._sink, contexts[index], dealt[index])
        self._tasks = [TwoPhases(self._sink, context) for context in contexts]
        if self._generation > 1:
            for index in rng.sample(range(number), number):
                self._tasks[index].restore(self._complete, dealt[index])

    def _write(self) -> None:
        task = self._rng.choice(self._tasks)
        records = [f"record {self._serial + i}" for i in range(self._rng.randrange(1, 4))]
        self._serial += len(records)
        task.writer.write(list(records))
        self._written += records
        if self._rng.random() < 0.3:
            task.writer.flush()

    def _take_epoch(self, how: str) -> None:
        """Takes an epoch, which is then complete or passed over. Some tasks die on the way."""
        self._epoch += 1
        saved: list[SavedSink] = []
        for task in self._tasks:
            made = task.prepare(self._epoch, lambda step: step())
            saved.append((made.result(60.0) if isinstance(made, Future) else made) or SavedSink())
            if how != "the last" and self._rng.random() < 0.05:
                self._go_back()
                return
        if how == "passed over":
            return
        self._saved, self._complete = [copied(one) for one in saved], self._epoch
        self._history += self._written
        self._written = []
        for task in self._tasks:
            if how in ("told", "the last") or (how == "told to some" and self._rng.random() < 0.5):
                task.complete(self._epoch, last=how == "the last").result(60.0)

    def _go_back(self) -> None:
        """The processes of all tasks die, or the tasks are removed, and others come in their place."""
        for task in self._tasks:
            if self._rng.random() < 0.5:
                task.close(failed=True)
        self._written = []
        self._start()
        self._look(everything=True)

    def _look(self, *, everything: bool = False) -> None:
        """Looks at the records that readers see. `everything`: all that is complete must be among them."""
        shown, complete = Counter(self._shown()), Counter(self._history)
        early = sorted((shown - complete).elements())
        known = set(complete)
        assert not early, (
            f"readers see {', '.join(early)}: "
            f"{'twice' if known.issuperset(early) else 'of an epoch that is not complete, or that was given up'}"
        )
        lost = sorted((complete - shown).elements()) if everything else []
        assert not lost, f"readers do not see {', '.join(lost)}, of complete epochs"
