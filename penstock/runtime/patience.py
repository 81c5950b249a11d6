"""Patience with systems outside of the job: a database that is locked, a server that restarts, a disk that is full.

A step that fails by an error that may pass is tried again, with waits that double, for as long as the end of a job
waits for its checkpoint store. Then its error counts. The log says so at once, and so does the status.

Only a step may be tried again that has the same effect then: a commit, a read from a position, a write that the sink
declares to be repeatable. Whoever calls this must know that. An error of the user's data never passes.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.runtime.backoff import Backoff
from penstock.runtime.errors import PenstockError, RecordError, SourceError, StoreError, describe
from penstock.runtime.status import StallStatus

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
_FIRST_S, _MOST_S = 0.05, 5.0
_LONG_S = 1.0  # the status tells of a step that takes longer

#: Of the system, for what is busy, full, or does not answer just now.
_OF_DISKS = {errno.EAGAIN, errno.EINTR, errno.EIO, errno.EBUSY, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE}
_OF_TABLES = {errno.ENFILE, errno.EMFILE, errno.ENOBUFS, errno.ENOMEM}
_OF_NETWORKS = {errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN}
_OF_NETWORKS |= {errno.EHOSTUNREACH, errno.ENOTCONN}
_PASSING = _OF_DISKS | _OF_TABLES | _OF_NETWORKS
_SQLITE_BUSY, _SQLITE_LOCKED = 5, 6

T = TypeVar("T")
Kinds = tuple[type[BaseException], ...]


def may_pass(error: BaseException, kinds: Kinds = ()) -> bool:
    """Whether an error may pass by itself. `kinds`: the classes of such errors that a connector names."""
    if isinstance(error, kinds):
        return True
    if isinstance(error, StoreError):
        return error.may_pass
    if isinstance(error, PenstockError):  # of a connector of ours, which has told the cause in its words
        told = not isinstance(error, RecordError | SourceError) and error.__cause__ is not None
        return told and may_pass(error.__cause__, kinds)  # type: ignore[arg-type]
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError):
        again = getattr(sys.modules.get("socket"), "EAI_AGAIN", None)
        return error.errno in _PASSING or (type(error).__name__ == "gaierror" and error.errno == again)
    sqlite = sys.modules.get("sqlite3")
    if sqlite is not None and isinstance(error, sqlite.OperationalError):
        code = getattr(error, "sqlite_errorcode", None)  # since Python 3.11
        return "is locked" in str(error) if code is None else code & 0xFF in (_SQLITE_BUSY, _SQLITE_LOCKED)
    return False


@dataclass
class _Outage:
    since: float
    error: str
    limit_s: float
    waits: Backoff = field(default_factory=lambda: Backoff(_FIRST_S, _MOST_S))


class Patience:
    """The patience of one worker; see the module's docstring. `what` names a step and its operator, for people. Each
    step belongs to one thread."""

    def __init__(self, limit_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s`: 0 is none."""
        self._limit_s = limit_s
        self._clock = clock
        self._given_up = threading.Event()
        self._outages: dict[str, _Outage] = {}
        self._under_way: dict[str, float] = {}  # steps that may take long, and since when
        self._parts: weakref.WeakSet[Patience] = weakref.WeakSet()

    def part(self, limit_s: float | None = None) -> Patience:
        """Returns the patience of a part of the worker, which may be given up alone, and may have a limit of its own.
        Without patience in the worker the part has none either."""
        part = Patience(self._limit_s if limit_s is None or not self._limit_s else limit_s, self._clock)
        part._outages, part._under_way = self._outages, self._under_way
        self._parts.add(part)
        if self._given_up.is_set():
            part.give_up()
        return part

    def call(self, what: str, step: Callable[[], T], kinds: Kinds = (), failed: BaseException | None = None) -> T:
        """Takes a step, and takes it again while its errors may pass. It waits in between. `failed`: the first try has
        failed with this error."""
        while True:
            if failed is not None:
                wait_s = self.failed(what, failed, kinds)
                if wait_s is None or self._given_up.wait(wait_s):
                    self._outages.pop(what, None)
                    raise failed
            try:
                done = step()
            except Exception as error:  # whatever the step raises; what does not pass is raised above
                failed = error
            else:
                if failed is not None:
                    self.passed(what)
                return done

    def watched(self, what: str, step: Callable[[], T], kinds: Kinds = ()) -> T:
        """Does the same as `call`, with a step that may take long. If it does, `told` says so."""
        self._under_way[what] = self._clock()
        try:
            return self.call(what, step, kinds)
        finally:
            del self._under_way[what]

    def failed(self, what: str, error: BaseException, kinds: Kinds = ()) -> float | None:
        """Notes that a step has failed. Returns the seconds until it should be tried again, or None when its error
        counts."""
        if not self._limit_s or not isinstance(error, Exception) or not may_pass(error, kinds):
            self._outages.pop(what, None)
            return None
        now = self._clock()
        outage = self._outages.get(what)
        if outage is None:
            outage = self._outages[what] = _Outage(now, describe(error), self._limit_s)
            logger.warning(
                "%s has failed by an error that may pass, and is tried again for %g s: %s",
                what,
                self._limit_s,
                outage.error,
            )
        left_s = outage.since + self._limit_s - now
        if left_s <= 0:
            del self._outages[what]
            return None
        outage.error = describe(error)
        return min(left_s, outage.waits.failed())

    def passed(self, what: str) -> None:
        """Notes that a step is done."""
        outage = self._outages.pop(what, None)
        if outage is not None:
            logger.warning("%s is done, after it had failed for %.1f s", what, self._clock() - outage.since)

    def told(self) -> list[StallStatus]:
        """Returns which steps fail now, or take long, for how long they have, and by which error; for the status."""
        now = self._clock()
        stalls = [
            StallStatus(what, now - outage.since, outage.limit_s, outage.error)
            for what, outage in list(self._outages.items())
        ]
        failing = {stall.what for stall in stalls}
        return stalls + [
            StallStatus(what, now - since)
            for what, since in list(self._under_way.items())
            if now - since >= _LONG_S and what not in failing
        ]

    def give_up(self) -> None:
        """Ends all waits, because the worker ends."""
        self._given_up.set()
        for part in list(self._parts):
            part.give_up()
