"""How a Job reaches the host of its job, which is a JobMaster on Ray or a JobRunner in this process."""

from __future__ import annotations

from typing import Protocol, TypeVar

from penstock.host.carry.requests import Request
from penstock.host.decide.commands import JobEnd
from penstock.host.process.linger import Driver
from penstock.runtime.errors import PenstockError

T = TypeVar("T")


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
    #: This link, as the host knows it.
    driver: Driver

    @property
    def silent_s(self) -> float:
        """Returns the number of seconds since the host's last answer."""
        return 0.0

    def is_connected(self) -> bool:
        """Returns whether this process can still call the host."""
        return True

    def ask(self, request: Request[T]) -> T:
        """Sends a request to the host, and waits for its answer. Raises what the host raises, and TimeoutError for a
        request that does not wait longer for a host that does not answer. Only one thread at a time may ask for the
        status."""
        ...

    def cause(self, error: BaseException) -> BaseException:
        """Returns why a call after the job's end has raised this error."""
        return error

    def end_without_host(self, error: BaseException) -> JobEnd:
        """Returns the job's end when the request for the outcome has raised this error."""
        ...
