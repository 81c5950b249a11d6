"""StoreRunner: carries out a JobHost's commands about the checkpoint store, and ends the store's part of a job.

The store keeper does what the JobHost asks for, and what comes of it becomes an event. A job with epochs also makes
notes that outlive its host. A store that hangs, such as a network mount whose server is gone, must not keep the job
from ending, and epochs must never be deleted before the drivers have what they want of the job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.host.carry.event_queue import EventQueue
from penstock.host.carry.last_steps import in_time
from penstock.host.carry.pending_requests import PendingRequests
from penstock.host.carry.store_keeper import NotSaved, StoreKeeper
from penstock.host.decide.commands import (
    CopySavepoint,
    CopySavepointAndStop,
    FindOlder,
    JobEnd,
    MakeRoom,
    SaveManifest,
)
from penstock.host.process.collected import Collected
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import SnapshotDamaged, StoreError, first_line
from penstock.runtime.records.pickling import Program
from penstock.runtime.status import EpochsStatus

if TYPE_CHECKING:
    from penstock.host.carry.notes import Note, Notes

logger = logging.getLogger(__name__)

StoreCommand = SaveManifest | FindOlder | MakeRoom | CopySavepoint | CopySavepointAndStop

# How long the store may take for a step of the job's end, and the store keeper to end before the job's epochs are
# deleted.
_END_S = 60.0
# After so long without an answer from the store, the status says so.
_SILENT_S = 10.0
# The time between two tries to make the note without which sinks must not commit.
_NOTE_AGAIN_S = 1.0


class StoreRunner:
    """See the module's docstring. `program`: of the driver, to which the classes of saved objects belong;
    `program_bytes`: the same with the job's options, as the store keeps it for `resume`. `cannot_take_back`: sinks."""

    def __init__(
        self,
        store: Store,
        collected: Collected,
        notes: Notes,
        events: EventQueue,
        requests: PendingRequests,
        program: Program,
        program_bytes: bytes | None,
        cannot_take_back: list[str],
    ) -> None:
        self.store = store
        self.notes = notes
        self._job = events.job
        self._events = events
        self._requests = requests
        self.keeper = StoreKeeper(store, collected, self._says, self._has_lost, self._failed, classes_of=program)
        self.keeper.program_bytes = program_bytes
        self.keeper.cannot_take_back = cannot_take_back
        self._is_locked = False
        self._begins_anew = False  # whether all that is in the store is of this job
        self._epochs_noted = False
        self._removing = threading.Lock()
        self._removed = False  # whether the epochs have been removed, after the job's end

    # --- before there is a JobHost -----------------------------------------------------------------------------

    def lock(self) -> None:
        """Locks the store against other jobs. Raises DirectoryLocked, and StoreError."""
        self.store.lock()
        self._is_locked = True

    def begin_anew(self) -> None:
        """Deletes the files of a failed job of this name. Raises StoreError."""
        self.store.check_format()
        self.store.destroy()
        self._begins_anew = True
        self.store.check()

    # --- while the job runs --------------------------------------------------------------------------------------

    def carry_out(self, command: StoreCommand) -> None:
        """Carries out a command. Waits for nothing."""
        if isinstance(command, SaveManifest):
            self.keeper.do(partial(self._save, command.manifest))
        elif isinstance(command, FindOlder):
            self.keeper.do(partial(self._find_older, command))
        elif isinstance(command, CopySavepoint):
            self.keeper.do(partial(self._copy, command))
        elif isinstance(command, CopySavepointAndStop):
            self.keeper.do(partial(self._copy_and_stop, command))
        else:
            self.keeper.make_room()

    def note(self, what: Note) -> None:
        """Makes a note where a JobMaster that Ray starts again finds it. A driver that has asked for something may have
        gone by then. Until this has returned, the driver repeats its request when the JobMaster dies."""
        try:
            self.notes.note(what)
        except Exception as error:  # whatever the carrier's store of notes raises
            logger.warning(
                "job %s: the note %r could not be made, and is missing if the JobMaster dies now: %s",
                self._job,
                what,
                first_line(error),
            )

    def note_epochs(self) -> None:
        """Notes that the job has a complete epoch, and tries until it is noted. Sinks commit the first epoch only after
        this: a JobMaster that Ray starts again, and that finds no epoch in the store, may start from the beginning only
        when nothing has been committed."""
        while not self._epochs_noted and not self._events.ended.is_set():
            try:
                self.notes.note("epochs")
                self._epochs_noted = True
            except Exception as error:  # whatever the carrier's store of notes raises
                logger.warning(
                    "job %s: its first complete epoch cannot be noted, so sinks do not commit; trying again: %s",
                    self._job,
                    first_line(error),
                )
                self._events.ended.wait(_NOTE_AGAIN_S)

    def status(self, known: EpochsStatus) -> EpochsStatus:
        """Returns the status of epochs (`known`), with the facts that the store keeper adds."""
        silent_s = self.keeper.silent_s()
        if silent_s > _SILENT_S:
            known = known.changed(
                last_failure=f"the checkpoint store {self.store.place} has not answered for {silent_s:.0f} s, "
                "and no epoch completes until it does. Look whether it is up and can be reached from this node."
            )
        return known.changed(damage=self.keeper.damage, store=self.store.place)

    # --- at the job's end ----------------------------------------------------------------------------------------

    def note_the_end(self, state: str) -> None:
        """Notes in the store that the job has ended, so that a JobMaster that Ray starts again does not continue from
        its epochs."""

        def note() -> None:
            try:
                self.store.end(state)
            except StoreError as error:
                logger.warning("job %s: the store cannot note that the job is %s: %s", self._job, state, error)

        if self._is_locked:
            self._in_time("note that the job has ended", note)

    def leave_failed(self) -> None:
        """Lets `resume` continue from the store of a job that has failed. What a job has written that has failed before
        its first epoch is deleted, because no job can continue from it. The store must still be locked then, so that
        the files are not those of the next job."""

        def destroy() -> None:
            if not self.store.epochs():
                self.store.destroy()

        if self._begins_anew and not self._epochs_noted:
            self.keeper.wait(_END_S)  # it may still be writing
            self._in_time("delete what the job has begun to write", destroy)
        self._in_time("release its lock", self.store.release)

    def remove_epochs(self, end: JobEnd) -> None:
        """Deletes the epochs of a job that did not fail. This must come after drivers have what they want: if this
        process dies earlier, a JobMaster that Ray starts again needs the epochs to answer in its stead."""

        def destroy() -> None:
            try:
                self.store.destroy()
                self.store.release()
            except StoreError as error:
                logger.warning("job %s: its epochs could not be deleted, and stay in the store: %s", self._job, error)

        with self._removing:
            if not self._is_locked or self._removed or end.state == "FAILED":
                return
            self.note("ended")
            self.note_the_end(end.state)
            self.keeper.wait(_END_S)  # it may still be writing
            self._in_time("delete the job's epochs", destroy)
            self._removed = True

    def forget(self) -> None:
        """Deletes the notes on this job."""
        try:
            self.notes.forget()
        except Exception as error:  # whatever the carrier's store of notes raises
            logger.warning("job %s: its notes could not be deleted: %s", self._job, first_line(error))

    def _in_time(self, what: str, step: Callable[[], None]) -> None:
        if not in_time(self._job, step, _END_S):
            logger.warning(
                "job %s: the checkpoint store %s has not answered for %.0f s, and did not %s. Look whether it is up "
                "and can be reached from this node.",
                self._job,
                self.store.place,
                _END_S,
                what,
            )

    # --- in the store keeper's thread ------------------------------------------------------------------------------

    def _says(self, trouble: str | None) -> None:
        self._events.put(lambda host: host.store_says(trouble))

    def _has_lost(self, names: frozenset[str], reason: str) -> None:
        self._events.tell_coordinator(lambda coordinator, now: coordinator.lost(names, reason, now))

    def _failed(self, error: Exception) -> None:
        self._fail(JobEnd.by_own_fault(error))

    def _fail(self, end: JobEnd) -> None:
        self._events.put(lambda host: host.fail(end, time.monotonic()))

    def _save(self, manifest: Manifest) -> None:
        epoch = manifest.epoch
        try:
            if not self.keeper.save(manifest):
                return
        except (SnapshotDamaged, NotSaved) as error:
            reason = str(error)
            self._events.tell_coordinator(lambda coordinator, _: coordinator.not_saved(epoch, reason))
            return
        except StoreError as error:
            self._fail(JobEnd("FAILED", str(error)))
            return
        self.note_epochs()
        self._events.tell_coordinator(lambda coordinator, _: coordinator.saved(epoch))

        def replaced(task: int, old: list[Blob], new: Blob) -> None:
            self._events.tell_coordinator(lambda coordinator, _: coordinator.replace_chain(task, old, new))

        self.keeper.tidy(epoch, replaced)

    def _find_older(self, command: FindOlder) -> None:
        """Looks for an older epoch that can be read, because the last complete one is damaged."""
        try:
            manifest = self.keeper.older(command.epoch, command.reason)
        except SnapshotDamaged as error:
            self._fail(JobEnd("FAILED", str(error)))
            return
        self._events.put(lambda host: host.found_older(manifest, command, time.monotonic()))

    def _copy(self, command: CopySavepoint) -> None:
        """Copies an epoch to the place of a savepoint, and replies to the driver."""
        try:
            self.keeper.savepoint(command.plan, command.place, lambda: self._requests.is_wanted(command.request))
        except Exception as error:  # the driver waits for a reply, whatever the error
            self._requests.reply(command.request, error)
        else:
            self._requests.reply(command.request, None)

    def _copy_and_stop(self, command: CopySavepointAndStop) -> None:
        """Copies the epoch at which the job is to end."""
        generation = command.generation
        try:
            self.keeper.savepoint(command.plan, command.place)
        except Exception as error:  # the job continues, whatever the error
            failed = error
            self._events.tell_requests(lambda requests, now: requests.not_copied(generation, failed, now))
        else:
            self._events.tell_coordinator(lambda coordinator, _: coordinator.copied(generation))
