"""What stays when the processes of the simulated cluster die (tests/epochs/sim.py): where its sinks write.

A database takes back what it has committed. A log does not, and its transactions behave as those of Kafka: each belongs
to a transactional id, and whoever starts an id again fences all who have started it before, and aborts its open
transaction. A commit looks for the marker of the transaction first, because a log cannot tell what it has committed
from what it has aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.runtime.sinks.base import Committable, Sink, SinkCommitter, SinkContext, SinkWriter

Key = tuple[str, int, int]  # of a transaction: sink, task, number
Id = tuple[str, int, int]  # of those that follow each other: sink, task, number


class Outside:
    """A database with transactions."""

    def __init__(self) -> None:
        self.open: dict[Key, list[Any]] = {}
        self.stale: set[Key] = set()  # of writers that were closed; somebody else may still have to commit them
        self.done: dict[Key, tuple[int, list[Any]]] = {}  # the epoch that it was prepared for, and its records
        self.numbers = 0
        self.newest: Callable[[], int] = lambda: 0  # the last epoch whose manifest is written
        self.may_retract = False  # an epoch was damaged

    def begin(self, sink: str, task: int) -> Key:
        self.numbers += 1
        key = (sink, task, self.numbers)
        self.open[key] = []
        return key

    def commit(self, key: Key, prepared: int) -> None:
        assert self.newest() >= prepared, f"a commit of epoch {prepared}, and none from it on has a manifest"
        if key not in self.done:
            assert key in self.open, f"a transaction that was prepared for epoch {prepared} is gone: {key}"
            self.done[key] = (prepared, self.open.pop(key))

    def go_back(self, sink: str, task: int, epoch: int) -> None:
        """Forget what the task has written since an epoch."""
        for key in [key for key in self.open if key[:2] == (sink, task)]:
            del self.open[key]
        self._retract(epoch, lambda key: key[:2] == (sink, task))

    def go_back_beyond(self, sink: str, tasks: int, epoch: int) -> None:
        """Forget what was committed since an epoch by tasks that there are no more."""
        # What they had prepared for it is open perhaps: whoever has got their state is to commit that, if not yet.
        self._retract(epoch, lambda key: key[0] == sink and key[1] >= tasks)

    def _retract(self, epoch: int, whose: Callable[[Key], bool]) -> None:
        for key in [key for key, (at, _) in self.done.items() if at > epoch and whose(key)]:
            assert self.may_retract, f"{key} was committed with epoch {self.done[key][0]}, and goes back to {epoch}"
            del self.done[key]

    def records(self) -> dict[str, list[Any]]:
        """What was committed, by sink."""
        records: dict[str, list[Any]] = {}
        for (sink, _, _), (_, more) in self.done.items():
            records.setdefault(sink, []).extend(more)
        return records

    def uncommitted(self) -> dict[str, list[Any]]:
        """What was written and not committed, by sink: all, in a job without epochs."""
        records: dict[str, list[Any]] = {}
        for (sink, _, _), more in self.open.items():
            records.setdefault(sink, []).extend(more)
        return records


class Log(Outside):
    """A log with transactions; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[Id, int] = {}  # how often each id was started
        self.current: dict[Id, Key] = {}  # its open transaction

    def start(self, id_: Id) -> int:
        """Starts an id, which fences all others that use it. Returns the number that its transactions need."""
        self.starts[id_] = self.starts.get(id_, 0) + 1
        key = self.current.pop(id_, None)
        if key is not None:
            self.open.pop(key, None)
        return self.starts[id_]

    def ids(self, sink: str, whose: Callable[[int], bool]) -> list[Id]:
        """All ids of tasks of a sink that were ever started."""
        return [id_ for id_ in self.starts if id_[0] == sink and whose(id_[1])]

    def begin_with(self, id_: Id, start: int) -> Key | None:
        """Begins a transaction; None when the id is fenced."""
        if self.starts[id_] != start:
            return None
        key = self.current[id_] = self.begin(id_[0], id_[1])
        return key


# --- sinks that take back ------------------------------------------------------------------------------------------


class Transactions(Sink):
    """A sink with a transaction an epoch in an Outside."""

    guarantee = "exactly once"

    def __init__(self, name: str, outside: Outside) -> None:
        self.name = name
        self.outside = outside

    def writer(self, context: SinkContext) -> SinkWriter:
        return _Transaction(self, context)

    def committer(self, context: SinkContext) -> SinkCommitter:
        return _Committer(self.outside)


class _Committer(SinkCommitter):
    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def commit(self, committables: list[Committable]) -> None:
        for one in committables:
            self._outside.commit(one.data, one.epoch)


class _Transaction(SinkWriter):
    def __init__(self, sink: Transactions, context: SinkContext) -> None:
        self._outside = sink.outside
        self._name = sink.name
        self._index = context.index
        self._parallelism = context.parallelism
        self._prepared: list[tuple[int, Key]] = []
        self._key: Key | None = None

    def write(self, records: list[Any]) -> None:
        if self._key is None:
            self._key = self._outside.begin(self._name, self._index)
        # Somebody who has taken this task's place may have rolled the transaction back: then nobody wants it any more.
        self._outside.open.get(self._key, []).extend(records)

    def prepare(self, epoch: int) -> Any:
        key, self._key = self._key, None
        if key is not None:
            self._prepared.append((epoch, key))
        return key

    def state(self) -> Any:
        return self._index

    def committed(self, epoch: int) -> None:
        left = [key for prepared, key in self._prepared if prepared <= epoch and key in self._outside.open]
        assert not left, f"{left} are said to be committed, and are not"
        self._prepared = [one for one in self._prepared if one[0] > epoch]

    def close(self, failed: bool) -> None:
        # When it moves to another worker the new writer may be there already, and has cleared away what there was.
        keys = {key for _, key in self._prepared} | ({self._key} if self._key is not None else set())
        self._outside.stale |= keys

    def restore(self, epoch: int, states: list[Any]) -> None:
        for index in {self._index, *states}:  # there may be no such task any more
            self._outside.go_back(self._name, index, epoch)
        if self._index == 0:
            self._outside.go_back_beyond(self._name, self._parallelism, epoch)


# --- sinks that do not ---------------------------------------------------------------------------------------------


class LogTransactions(Sink):
    """A sink with a transaction an epoch in a Log. Its writers have a pool of ids, of which one is used again only when
    its transaction is committed."""

    guarantee = "exactly once"
    takes_back = False

    def __init__(self, name: str, outside: Log) -> None:
        self.name = name
        self.outside = outside

    def writer(self, context: SinkContext) -> SinkWriter:
        return _LogTransaction(self, context)

    def committer(self, context: SinkContext) -> SinkCommitter:
        return _Committer(self.outside)


class _LogTransaction(SinkWriter):
    def __init__(self, sink: LogTransactions, context: SinkContext) -> None:
        self._log = sink.outside
        self._name = sink.name
        self._index = context.index
        self._parallelism = context.parallelism
        self._free: list[tuple[Id, int]] = []
        self._used: list[tuple[int, Id, int]] = []  # by epoch: ids whose transactions are not committed
        self._present: tuple[Id, int] | None = None  # the id that it writes with
        self._key: Key | None = None
        self._fenced = False

    def write(self, records: list[Any]) -> None:
        if self._key is None and not self._fenced:
            if not self._free:
                known = self._log.ids(self._name, lambda index: index == self._index)
                id_ = (self._name, self._index, len(known))
                self._free.append((id_, self._log.start(id_)))
            self._present = self._free.pop()
            self._key = self._log.begin_with(*self._present)
            self._fenced = self._key is None  # somebody has taken this task's place
        self._log.open.get(self._key, []).extend(records)  # type: ignore[arg-type]  # None is nobody's

    def prepare(self, epoch: int) -> Any:
        key, self._key = self._key, None
        if key is not None:
            assert self._present is not None
            self._used.append((epoch, *self._present))
        return key

    def state(self) -> Any:
        return self._index

    def committed(self, epoch: int) -> None:
        for prepared, id_, start in self._used:
            if prepared <= epoch:
                assert self._log.current.get(id_) not in self._log.open, f"{id_} is said to be committed, and is not"
                self._free.append((id_, start))
        self._used = [one for one in self._used if one[0] > epoch]

    def close(self, failed: bool) -> None:
        keys = {self._log.current.get(id_) for _, id_, _ in self._used} | {self._key}
        self._log.stale |= {key for key in keys if key is not None}

    def restore(self, epoch: int, states: list[Any]) -> None:
        """Fences all that earlier writers of this task have used, and those of tasks that there are no more."""
        beyond = self._parallelism if self._index == 0 else 1 << 30
        for id_ in self._log.ids(self._name, lambda index: index == self._index or index >= beyond):
            start = self._log.start(id_)
            if id_[1] == self._index:
                self._free.append((id_, start))
