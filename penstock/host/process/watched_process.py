"""The process of a worker, as the host of its job sees it: what it did last, whether it is stopped, and how to kill it.

Only the kernel of the process's own machine knows this. So a process of another machine is asked about at the agent of
its node (host/process/node_agent.py).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.host.process.hangs import Process
from penstock.runtime.worker.blackbox import Crash, Note, Watcher, is_stopped


class LastWords(NamedTuple):
    """The note in the black box of a dead process. `note`: what the process was doing, if it ran a step. `crash`: how
    it crashed, if it did. `doing`: what it was doing beside records, as words that follow "died"."""

    note: Note | None = None
    crash: Crash | None = None
    doing: str = ""


class WatchedProcess(Protocol):
    """See the module's docstring. Each method may wait for another machine, for a limited time."""

    def kill(self) -> None:
        """Ends the process at once. Returns without waiting for its end."""
        ...

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process (SIGSTOP, a debugger)."""
        ...

    def last_words(self) -> LastWords | None:
        """The known facts about the death of the process; None when no process is left that could know."""
        ...


class ProcessHere:
    """A process of this machine; see WatchedProcess. It must be made while the process lives."""

    def __init__(self, pid: int, blackbox: str) -> None:
        """`blackbox`: the address of the process's black box."""
        self.pid = pid
        self._process = Process(pid)
        self._watcher = Watcher(blackbox)

    def kill(self) -> None:
        """See WatchedProcess, also for the methods that follow."""
        self._process.kill()

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)

    def last_words(self) -> LastWords:
        return LastWords(self._watcher.read(), self._watcher.crash(), self._watcher.doing())
