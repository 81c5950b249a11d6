"""The death of a worker's process, and its words for the log and the status."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.worker.blackbox import Crash, Note

_KILLED = "killed from outside, or for want of memory"
_NOT_KNOWN = (
    "the agent of its node cannot say how: the machine was busy or cut off, or the agent itself has ended the process, "
    "because it had heard nothing of the JobMaster"
)


@dataclass(frozen=True)
class Death:
    """The death of a worker's process, as its carrier knows it. `note`: what it was doing. `crash`: how it ended, if it
    crashed. `with_node`: its node is lost, whatever the process does. Without `known`, nobody can say how it ended.
    `doing`: what it was doing beside records, as words that follow "died"."""

    reason: str
    note: Note | None = None
    crash: Crash | None = None
    with_node: bool = False
    known: bool = True
    doing: str = ""

    def words(self, process: str, task: str | None, hung_s: float | None) -> str:
        """Returns how this process has died. `task`: the task that it was running. `hung_s`: it was killed because it
        had not answered for this long."""
        during = f" {self.doing}" if self.doing else ""
        running = "" if task is None else f"; it was running {task}"
        if hung_s is not None:
            return (
                f"{process} did not answer for hang_timeout_s={hung_s:g} seconds, as it was stopped or native code "
                f"kept its interpreter, and was killed{during}{running}"
            )
        text = f"{process} {'is lost' if self.with_node else 'died'}{during}: {self.reason.rstrip('.')}{running}"
        if self.with_node:
            return text
        # A carrier guesses at reasons, and only this distinguishes a crash from a kill.
        if self.crash is not None:
            return f"{text}; its own doing: {self.crash.what}"
        return f"{text}; {_KILLED if self.known else _NOT_KNOWN}"
