"""Opens a job: finds out whether anybody else uses its store and the folders of its sinks, and from which epoch it
continues.

All of this waits for stores and directories. So it happens before there is a JobHost, in the thread that later takes
the job's events. A job must never start from the beginning after its sinks may have committed something.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from penstock.host.decide.commands import EndState, JobEnd
from penstock.host.decide.job_host import Found
from penstock.runtime.errors import StoreError
from penstock.runtime.operators.ends import Write
from penstock.runtime.program.plan import Plan
from penstock.runtime.storage.directory_lock import DirectoryLock, DirectoryLocked

if TYPE_CHECKING:
    from penstock.host.carry.store_runner import StoreRunner
    from penstock.runtime.epochs.store import Store
    from penstock.runtime.sinks.base import Sink

logger = logging.getLogger(__name__)

# A process that was killed is gone within a moment, and a job that has ended stays for some seconds (linger.py).
_LOCK_S = 30.0
# The time between two tries to take a lock that another process holds, and to use a store that does not answer.
_LOCK_RETRY_S = 0.1
_STORE_RETRY_S = 1.0


def sinks_of(plan: Plan) -> list[Sink]:
    """Returns the sinks of a plan."""
    return [op.sink for chain in plan.chains for op in chain.operators if isinstance(op, Write)]


class Opening:
    """Opens one job. `again`: the carrier has started the job again, because its first host has died. `resume`: a user
    wants the job to continue from the last complete epoch. `savepoint`: the store of the savepoint from which to
    continue. `cancelled` tells whether the job was cancelled meanwhile."""

    def __init__(
        self,
        plan: Plan,
        store: StoreRunner | None,
        *,
        again: bool,
        resume: bool,
        savepoint: Store | None,
        cancelled: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._store = store
        self._again = again
        self._resume = resume
        self._savepoint = savepoint
        self._cancelled = cancelled
        self._never = threading.Event()
        self.locks: list[DirectoryLock] = []  # to be closed when the job has ended
        self.waits_for: str | None = None  # what it waits for just now, in words

    def lock_places(self) -> bool:
        """Locks the job's store and the folders of its sinks against other jobs. The last process that had the locks,
        for example an earlier host of this job that was killed, has some time to end. Returns False when the job was
        cancelled meanwhile. Raises DirectoryLocked, and StoreError."""
        store = self._store
        until = time.monotonic() + _LOCK_S
        sinks = sinks_of(self._plan)
        found: list[DirectoryLock | None] = []
        for take in [*([] if store is None else [store.lock]), *(sink.lock for sink in sinks)]:
            while True:
                pause_s = _LOCK_RETRY_S
                try:
                    lock: DirectoryLock | None = take()
                except DirectoryLocked as error:
                    if time.monotonic() > until:
                        raise
                    if self.waits_for is None:
                        logger.warning("job %s waits for up to %g s: %s", self._plan.name, _LOCK_S, error)
                    self.waits_for = f"a directory that is locked: {error}"
                except StoreError as error:
                    if not self._again or not error.may_pass:
                        raise
                    logger.warning("job %s waits for its checkpoint store: %s", self._plan.name, error)
                    pause_s = _STORE_RETRY_S
                else:
                    found.append(lock)
                    if lock is not None:
                        self.locks.append(lock)
                    break
                if self._cancelled():
                    return False
                self._never.wait(pause_s)
            self.waits_for = None
        if not (self._resume or self._again or self._savepoint is not None):
            # The driver has checked this, but another job may have filled the folder before it released the lock.
            for sink, lock in zip(sinks, found[len(found) - len(sinks) :], strict=True):
                if lock is not None:
                    sink.check()
        return True

    def find(self) -> Found | JobEnd | None:
        """Returns the epoch from which the job continues; None when the job was cancelled meanwhile; or a JobEnd when
        the job had ended before its last host died. A job that has been running waits while the store does not answer.
        Raises StoreError."""
        while not self._cancelled():
            try:
                state = self._store.store.ended() if self._store is not None and self._again else None
                return self._find() if state is None else JobEnd(cast("EndState", state))
            except StoreError as error:
                if not self._again or not error.may_pass:
                    raise
                logger.warning("job %s waits for its checkpoint store: %s", self._plan.name, error)
                self._never.wait(_STORE_RETRY_S)
        return None

    def _find(self) -> Found:
        runner, name = self._store, self._plan.name
        if runner is None:
            return Found()
        keeper, store = runner.keeper, runner.store
        if self._resume or self._again:
            found = keeper.newest()
            if found is not None:
                manifest, passed = found
                for problem in passed:
                    logger.warning("job %s falls back to an older epoch, because one is damaged: %s", name, problem)
                begun = max(store.epochs())  # damaged ones too, because each number is used once
                store.forget_after(manifest.epoch)
                return Found(manifest, None, begun)
            if self._resume:  # from the beginning, it would delete what the job has written
                raise StoreError(
                    f"there is no epoch of job {name!r} in {store.place} any more: the job has been resumed elsewhere "
                    "and has ended meanwhile, or somebody has deleted its epochs. Run the flow anew"
                )
            if runner.notes.noted("epochs"):  # otherwise it would write again what its sinks have committed
                raise StoreError(
                    f"the JobMaster of job {name!r} has died, and the epochs that were complete in {store.place} are "
                    "gone: somebody has deleted or moved them. From the beginning the job would write again what its "
                    "sinks have written, so it was not started again. Put the directory back and call "
                    f"penstock.resume({name!r}), or run the flow anew, and let its sinks write to another place or "
                    "overwrite what they have written"
                )
        else:
            runner.begin_anew()
        if keeper.program_bytes is not None:
            keeper.program = keeper.put_program(keeper.program_bytes)
        if self._savepoint is not None:
            found = self._savepoint.latest(self._savepoint.verify)
            assert found is not None, "the driver has looked"
            keeper.continue_from(replace(found[0], program=keeper.program), self._savepoint)
            return Found(found[0], self._savepoint, found[0].epoch)
        return Found()
