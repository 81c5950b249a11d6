"""How a Job reaches the host of its job, which is a JobMaster on Ray or a JobRunner in this process."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.host.decide.commands import JobEnd
from penstock.host.process.collected import Encoded
from penstock.runtime.errors import PenstockError


class HostGone(PenstockError):
    """The process that hosts the job has died. Another one may take its place."""


class JobLink(Protocol):
    """A Job's link to the host of its job. Every method may be called from any thread, and may raise HostGone or
    ClusterGone."""

    #: Distinguishes the host from other hosts.
    host: object
    #: Whether the host is in this process.
    is_local: bool
    #: Where the job runs, for people.
    where: str

    @property
    def silent_s(self) -> float:
        """Returns the number of seconds since the host's last answer."""
        ...

    def is_connected(self) -> bool:
        """Returns whether this process can still call the host."""
        ...

    def status(self) -> dict[str, Any] | None:
        """Returns the job's status, or None when the host does not answer within a few seconds. Only one thread at a
        time may call this."""
        ...

    def last_status(self) -> dict[str, Any]:
        """Waits for the job's end, and returns the last status."""
        ...

    def ask(self, method: str, *arguments: Any, limit_s: float | None = None, again: bool = False) -> Any:
        """Sends a driver's request to the host, and waits until it is fulfilled. Raises what the host raises. Where the
        host gives the request up after `limit_s` seconds, a host that does not answer is not waited for either: raises
        TimeoutError. `again`: the request is repeated when another host takes the place of one that has died."""
        ...

    def tell(self, method: str) -> bool:
        """Asks the host to stop or cancel the job. Returns whether the host has answered within a few seconds."""
        ...

    def collected(self, channel: str, last: bool = False) -> list[Encoded]:
        """Returns the records of a Collect sink so far; with `last`, all of them, after waiting for the job's end. A
        host that takes the place of one that has died must come to the end of the job again before it knows them
        all."""
        ...

    def console(self, seen: int | None, last: bool) -> tuple[int, list[str]]:
        """Returns the result of JobRunner.console, after waiting for new lines; with `last`, without waiting. Raises
        TimeoutError."""
        ...

    def wait_for_end(self) -> JobEnd:
        """Waits until the job has ended, and returns its end. Raises an error when the end will never be known."""
        ...

    def release(self) -> None:
        """Tells the host that this program has all that it wants of the job."""
        ...

    def cause(self, error: BaseException) -> BaseException:
        """Returns why a call after the job's end has raised this error."""
        ...

    def end_without_host(self, error: BaseException) -> JobEnd:
        """Returns the job's end when `wait_for_end` has raised this error."""
        ...
