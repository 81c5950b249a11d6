"""How a Job reaches the host of its job: a JobMaster on Ray, or a JobRunner in this process."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.runtime.errors import PenstockError
from penstock.runtime.host.collected import Encoded
from penstock.runtime.host.commands import JobEnd


class HostGone(PenstockError):
    """The process that hosts the job has died; another one may take its place."""


class JobLink(Protocol):
    """See the module's docstring. Safe to use from several threads. Each call may raise HostGone or ClusterGone."""

    #: What tells the host from others.
    host: object
    #: Whether the host is in this process.
    is_local: bool
    #: Where the job runs, for people.
    where: str

    @property
    def silent_s(self) -> float:
        """The number of seconds since the host has answered."""
        ...

    def is_connected(self) -> bool:
        """Whether this process can still call the host."""
        ...

    def status(self) -> dict[str, Any] | None:
        """The job's status; None when the host does not answer within a few seconds. Called by one thread at a time."""
        ...

    def last_status(self) -> dict[str, Any]:
        """The job's status after its end."""
        ...

    def ask(self, method: str, *arguments: Any) -> Any:
        """Do what a driver asks for, and wait until it is done. Raises what the host raises."""
        ...

    def tell(self, method: str) -> bool:
        """Stop or cancel the job. Returns whether the host has answered within a few seconds."""
        ...

    def collected(self, channel: str) -> list[Encoded]:
        """The records of a Collect sink so far."""
        ...

    def console(self, seen: int, last: bool) -> tuple[int, list[str]]:
        """See JobRunner.console; waits for new lines, but not when `last`. Raises TimeoutError."""
        ...

    def wait_for_end(self) -> JobEnd:
        """Wait until the job has ended. Raises whatever tells that this will never be known."""
        ...

    def release(self) -> None:
        """This program has all that it wants of the job."""
        ...

    def cause(self, error: BaseException) -> BaseException:
        """Why a call after the job's end has raised this error."""
        ...

    def end_without_host(self, error: BaseException) -> JobEnd:
        """The job's end, when `wait_for_end` has raised this error."""
        ...
