"""The store keeper: writes manifests and savepoints, compacts snapshots, and checks what is saved.

One thread carries out requests in order. Compactions run in another thread beside it. When there is nothing else to do,
the keeper checks the store: it lists the files to see whether everything that the kept epochs consist of is there, and
reads all of it, slowly. What is missing or damaged is written again from its copy. What is lost for good while the job
lives is reported (`lost`), and the tasks that it belongs to save their whole state.

The keeper must never give up a manifest half-way: while the store does not answer, nobody knows whether the manifest is
there, so it is written again until the store answers. A directory that takes no more, such as that of a full disk, does
answer: the manifest is certainly not there, so the epoch is given up after some tries, and the job may continue from
the one before when a worker dies. And the keeper must never write a manifest that refers to a known loss.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from penstock.runtime.epochs.compaction import compact_snapshots
from penstock.runtime.epochs.manifest import Blob, Manifest, encode
from penstock.runtime.epochs.restore import kinds_with_state
from penstock.runtime.epochs.snapshot import worth_compacting
from penstock.runtime.epochs.store import Store, manifest_files, result_of
from penstock.runtime.errors import SnapshotDamaged, StoreError
from penstock.runtime.program.graph import SAVEPOINT
from penstock.runtime.records.pickling import Program, belonging_to

if TYPE_CHECKING:
    from penstock.host.process.collected import Collected
    from penstock.runtime.program.plan import Plan

logger = logging.getLogger(__name__)

_Done = TypeVar("_Done")

# The number of complete epochs that stay in the store: the last one, and one to go back to if that is damaged.
_EPOCHS_KEPT = 2
# Old epochs are deleted once in this many epochs, because each look lists the store.
_COLLECT_EVERY = 5
# The time between two tries to write to a store that does not answer.
_RETRY_S = 1.0
# After so many tries an epoch is given up whose manifest is certainly not there.
_TRIES = 3
# The store is checked after each epoch, but this takes at most this share of the keeper's time. After this many seconds
# a check is due in any case: for a directory, and for a store whose requests may cost money.
_LOOK_SHARE = 0.05
_LOOK_S = 1.0
_LOOK_REMOTE_S = 10.0
# The keeper of a directory reads this many bytes of the files in a second, to see whether they are as they were
# written. Object stores do this themselves. It starts again from the beginning after this many seconds at the earliest.
_EXAMINE_BYTES_S = 8 << 20
_EXAMINE_EVERY_S = 60.0
# The number of blobs of collected records that a manifest refers to before they are written as one.
_COLLECTED_BLOBS_MAX = 32


class NotSaved(StoreError):
    """A manifest could not be written, and is certainly not there."""


class StoreKeeper:
    """See the module's docstring.

    `said(reason)` is called with the reason why the store cannot be written to, and with None when it can be written
    again. `lost(names, reason)` is called when snapshots of tasks are lost, at every check until they are there again
    or no epoch needs them any more. `failed(error)` is called when a piece of work raised an unexpected error. Without
    a `thread`, nothing happens except in calls of the methods. `wall` tells the time that manifests note, in seconds.
    `classes_of`: the program that the classes of saved objects belong to, for a process that has joined none.
    """

    def __init__(
        self,
        store: Store,
        collected: Collected,
        said: Callable[[str | None], None],
        lost: Callable[[frozenset[str], str], None] = lambda names, reason: None,
        failed: Callable[[Exception], None] = lambda error: None,
        thread: bool = True,
        wall: Callable[[], float] = time.time,
        classes_of: Program | None = None,
    ) -> None:
        self.store = store
        self._classes_of = classes_of
        self.damage: str | None = None  # what was last found missing or damaged, and what was done about it
        self.last: Manifest | None = None  # the last manifest that was written
        self.collected_blobs: list[Blob] = []
        self.program: Blob | None = None
        self.program_bytes: bytes | None = None
        self.extra: dict[str, str | int | float] = {}
        self.origin: Store | None = None  # the store with the blobs of `last`, if it is another one
        self.cannot_take_back: list[str] = []  # the sinks that cannot
        self._collected = collected
        self._said = said
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._say_lost = lost
        self._failed = failed
        self._wall = wall
        self._kept: list[Manifest] = []  # the last manifests that were written or continued from, the newest last
        self._sizes: dict[int, int] = {}  # of the manifests of these epochs, since the last check
        self._lost: dict[str, str] = {}  # blobs that the kept epochs need, and why they cannot be read
        self._spoiled: dict[str, str] = {}  # those of them that are there, but not as they were written
        self._collected_lost = False
        self._chosen_again: set[str] | None = None  # blobs of an epoch that was refused, and then found whole
        # When the next check is due, and the time before which it would take too much time.
        self._look_at = self._look_after = 0.0
        self._examining: Iterator[int] | None = None
        self._examine_at = 0.0
        self._compacting = threading.Event()
        # Compacted snapshots to which a later manifest may refer: the first of the snapshots that each was made from,
        # or None while it is made.
        self._compacted: dict[str, str | None] = {}
        self._room_wanted = threading.Event()
        self._asked_at: float | None = None  # when the store was asked for what it has not answered yet
        store.second_copy_read = self._second_copy_read
        self._thread = threading.Thread(target=self._run, name="penstock-store", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    def do(self, work: Callable[[], object]) -> None:
        """Has something done in the keeper's thread, after everything before it."""
        self._work.put(work)

    def close(self) -> None:
        """Gives up all requests without an answer, and does nothing more."""
        self._over.set()
        self._work.put(lambda: None)  # the thread may be waiting for work

    def wait(self, timeout_s: float) -> None:
        """Waits, after `close`, until the thread has ended. Until then it may still write to the store."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def silent_s(self) -> float:
        """Returns for how many seconds the keeper has waited for the store to write a manifest, or to be checked."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                work = self._work.get(timeout=max(0.0, min(self._look_at, self._examine_at) - time.monotonic()))
            except queue.Empty:
                work = self._watch
            try:
                work()
            except Exception as error:  # without this thread no epoch would ever complete, and nobody would be told
                self._failed(error)

    def save(self, manifest: Manifest) -> bool:
        """Writes a manifest. Returns False when the keeper was closed before. Raises SnapshotDamaged when the manifest
        refers to something lost, NotSaved when a directory takes no more, and StoreError when the manifest cannot be
        written for another reason."""
        return self._with_pauses(self.saving(manifest)) is not None

    def saving(self, manifest: Manifest) -> Generator[None, None, Manifest]:
        """Writes a manifest, and yields before each further try. Returns what it has written, and raises the errors of
        `save`."""
        whole: Manifest | None = None
        before = list(self.collected_blobs), self._collected_lost
        tries = 0
        while True:
            try:
                if whole is None:  # afterwards nobody knows whether the manifest is there, and it must not be given up
                    self.check(manifest)
                    self._save_collected(manifest)
                    whole = replace(
                        manifest,
                        created=self._wall(),
                        collected=list(self.collected_blobs),
                        program=self.program,
                        extra={**manifest.extra, **self.extra},
                    )
                self.store.write_manifest(whole)
            except StoreError as error:
                if not error.may_pass:
                    raise
                self._said(f"epoch {manifest.epoch}: {error}")
                self._collect()  # in a full store, old epochs may take the room that this one needs
                tries += 1
                if tries >= _TRIES and self._certainly_not_there(manifest):
                    self.collected_blobs, self._collected_lost = before
                    raise NotSaved(str(error)) from error
                yield
            else:
                self.saved(whole)
                self._said(None)
                return whole

    def _with_pauses(self, tries: Generator[None, None, _Done]) -> _Done | None:
        """Makes tries, with a pause before each further one. Returns None when the keeper was closed before."""
        while not self._over.is_set():
            self._asked_at = time.monotonic()
            try:
                next(tries)
            except StopIteration as end:
                done: _Done = end.value
                return done
            finally:
                self._asked_at = None
            self._over.wait(_RETRY_S)
        return None

    def _certainly_not_there(self, manifest: Manifest) -> bool:
        """Returns whether a manifest that could not be written will certainly never be found. The last manifest of a
        job is never given up: the job would have nothing more to do than to try again."""
        if manifest.final or self.store.remote:  # a request may arrive late
            return False
        try:
            return manifest.epoch not in self.store.epochs()
        except StoreError:
            return False

    def saved(self, manifest: Manifest) -> None:
        """Notes that a manifest is written."""
        self.last, self.origin = manifest, None
        self._kept = [*self._kept, _as_written(manifest)][-_EPOCHS_KEPT:]

    def check(self, manifest: Manifest) -> None:
        """Raises SnapshotDamaged when a manifest refers to something lost."""
        if not self._lost:
            return
        # Whatever deleted what is known to be lost may have continued since, and may have deleted files that no
        # manifest had referred to before.
        self.look()
        before, there = dict(self._lost), self.store.sizes()
        blobs = [(task, blob) for task in manifest.tasks for blob in task.blobs]
        for _, blob in blobs:
            if blob.name in self._lost:
                self._examine_now([blob])  # it may have been written again, or be there again
            else:
                self._mend(blob, there, self._lost)
        self._now_lost(before)
        for task, blob in blobs:
            if blob.name in self._lost:
                raise SnapshotDamaged(f"task {task.name} builds on a snapshot that is lost: {self._lost[blob.name]}")

    def tidy(self, epoch: int, replaced: Callable[[int, list[Blob], Blob], None]) -> None:
        """Compacts the snapshots of tasks that have many, and deletes files that no epoch needs any more. Calls
        `replaced(task, old, new)`."""
        assert self.last is not None
        due: dict[int, list[Blob]] = {}
        for entry in self.last.tasks:
            blobs = list(entry.blobs)  # the JobHost shortens the series itself when it hears of the compaction
            first = worth_compacting([blob.size for blob in blobs])
            if first is not None:
                due[entry.number] = blobs[first:]
        if due and not self._compacting.is_set():
            # In a thread of its own, because a large state takes seconds, and manifests must not wait for it.
            self._compacting.set()
            arguments = (due, self.last.key_groups, epoch, replaced)
            threading.Thread(target=self._compact_all, args=arguments, name="penstock-compact", daemon=True).start()
        if epoch % _COLLECT_EVERY == 0:
            self._collect()
        if time.monotonic() >= self._look_after:
            self._watch()

    def make_room(self) -> None:
        """Deletes files that no epoch needs any more, because a process could not write to the store. Requests that
        come meanwhile, from the other tasks of the epoch, count as the same request. It returns at once."""
        if not self._room_wanted.is_set():
            self._room_wanted.set()
            self.do(self._collect)

    def _collect(self) -> int:
        """Deletes files that no epoch needs any more. Returns how many files it has deleted."""
        self._room_wanted.clear()
        # A series in which a task's snapshots may still be replaced has the first of them, and so has the manifest of
        # an epoch that the job may go back to.
        there = {blob.name for manifest in self._kept for blob in manifest.blobs()}
        for name, first in list(self._compacted.items()):
            # The first of them may itself be compacted, and be in no manifest yet.
            if first is not None and first not in there and first not in self._compacted:
                del self._compacted[name]
        # A kept manifest that is damaged now is written again, so its blobs stay. The names of compacted blobs are no
        # copy: a compaction may begin while files are looked at.
        return self.store.collect(_EPOCHS_KEPT, ChainMap(self._compacted, dict.fromkeys(there)))

    # --- looking after what is saved -----------------------------------------------------------------------------

    def look(self) -> None:
        """Checks by names and sizes whether all files of the kept epochs are in the store, and mends the files that it
        can. Raises StoreError when the store does not answer."""
        there = self.store.sizes()
        needed = {blob.name: blob for manifest in self._kept for blob in manifest.blobs()}
        self._sizes = {kept.epoch: self._sizes.get(kept.epoch) or len(encode(kept)) for kept in self._kept}
        for manifest in self._kept:
            if any(there.get(name) != self._sizes[manifest.epoch] for name in manifest_files(manifest.epoch)):
                self._found(self.store.mend_manifest(manifest))
        lost: dict[str, str] = {}
        for blob in needed.values():
            # A list does not say whether what was spoiled was written again since, so this is read.
            self._mend(blob, {} if blob.name in self._spoiled else there, lost)
        # This comes last: when the store stops answering on the way, what was known to be lost is still lost.
        self._spoiled = {name: lost[name] for name in self._spoiled if name in lost}
        before, self._lost = self._lost, lost
        self._now_lost(before)

    def _mend(self, blob: Blob, there: Mapping[str, int], lost: dict[str, str]) -> None:
        """Mends a blob if it needs that, or notes that it is lost."""
        try:
            self._found(self.store.mend(blob, there))
        except SnapshotDamaged as error:
            lost[blob.name] = str(error)

    def examine(self) -> Iterator[int]:
        """Reads all files of the kept epochs, in pieces whose sizes it yields, and mends the files that it can. Between
        two pieces other work may be done, which may delete a file that no epoch needs any more."""
        for blob in {blob.name: blob for manifest in self._kept for blob in manifest.blobs()}.values():
            if not self._needs(blob):
                continue
            try:
                self._found((yield from self.store.examine(blob)))
            except SnapshotDamaged as error:
                if not self._needs(blob):
                    continue
                before = dict(self._lost)
                self._lost[blob.name] = self._spoiled[blob.name] = str(error)
                self._now_lost(before)
            else:
                self._not_lost(blob)
        for manifest in list(self._kept):
            if manifest in self._kept:
                self._found(self.store.mend_manifest(manifest))

    def _examine_now(self, blobs: Iterable[Blob]) -> None:
        """Examines these blobs, because some of them are damaged now, or were."""
        before = dict(self._lost)
        for blob in blobs:
            try:
                self._found(result_of(self.store.examine(blob)))
            except SnapshotDamaged as error:
                self._lost[blob.name] = self._spoiled[blob.name] = str(error)
            else:
                self._not_lost(blob)
        self._now_lost(before)

    def _not_lost(self, blob: Blob) -> None:
        """Notes that a blob was read and is whole: it may have been lost, and written again since."""
        self._lost.pop(blob.name, None)
        self._spoiled.pop(blob.name, None)

    def _needs(self, blob: Blob) -> bool:
        """Whether one of the kept epochs refers to this blob."""
        return any(blob.name == other.name for manifest in self._kept for other in manifest.blobs())

    def _watch_over(self, blobs: list[Blob]) -> None:
        """Examines the blobs of a compaction that could not read them. Those that no epoch needs any more may have been
        deleted while the compaction waited for its turn."""
        try:
            self._examine_now(filter(self._needs, blobs))
        except StoreError as error:
            logger.info("job %s: the store cannot be checked now, and is checked later: %s", self.store.job, error)

    def _watch(self) -> None:
        """Checks the store and reads on, as far as this is due."""
        now = self._asked_at = time.monotonic()
        try:
            if now >= self._look_after:
                pause = _LOOK_REMOTE_S if self.store.remote else _LOOK_S
                self._look_at = self._look_after = now + pause
                if self._kept and not self._over.is_set():
                    self.look()
                    took = time.monotonic() - now
                    self._look_after = now + min(pause, took / _LOOK_SHARE)
            if now >= self._examine_at:
                self._read_on(now)
        except StoreError as error:
            self._examine_at = now + _EXAMINE_EVERY_S
            logger.info("job %s: the store cannot be checked now, and is checked later: %s", self.store.job, error)
        finally:
            self._asked_at = None

    def _read_on(self, now: float) -> None:
        if self.store.remote or not self._kept or self._over.is_set():
            self._examine_at = now + _LOOK_S
            return
        if self._examining is None:
            self._examining = self.examine()
        size = 0
        while size < _EXAMINE_BYTES_S // 2:
            piece = next(self._examining, None)
            if piece is None:
                self._examining = None
                self._examine_at = now + _EXAMINE_EVERY_S
                return
            size += piece
        self._examine_at = now + size / _EXAMINE_BYTES_S

    def _found(self, what: str | None) -> None:
        """Notes that something was missing or damaged, and was mended."""
        if what is not None:
            self.damage = what
            logger.warning("job %s, its checkpoint store: %s", self.store.job, what)

    def _second_copy_read(self, problem: str) -> None:
        self.damage = f"{problem} The second copy was read."

    def _now_lost(self, before: Mapping[str, str]) -> None:
        """Writes again the lost files that this process has, and reports the losses that tasks have. `before` is what
        was lost before."""
        program, lost = self.program, self._lost
        fresh = lost.keys() - before.keys()
        if program is not None and program.name in lost and self.program_bytes is not None:
            self.program = self.put_program(self.program_bytes)
        # Not now, because what belongs to the last epoch may still have to be committed.
        self._collected_lost |= any(blob.name in lost for blob in self.collected_blobs)
        if not lost:
            return
        example = next(iter(sorted(fresh or lost)))
        more = f" {len(lost) - 1} more are lost." if len(lost) > 1 else ""
        reason = f"the store {self.store.place} has lost snapshots or records: {lost[example]}{more}"
        if fresh:
            self.damage = f"{reason} What the job's processes still have of it is saved again with the next epoch."
            logger.warning("job %s: %s", self.store.job, self.damage)
        self._say_lost(frozenset(lost), reason)

    def put_program(self, program: bytes) -> Blob:
        """Writes the program with which the job was started."""
        self.program_bytes = program
        # An unknown blob that is older than the last epoch would be deleted.
        epoch = self._kept[-1].epoch if self._kept else 0
        return self.store.put(f"snapshots/{epoch + 1:08d}-program-{os.urandom(4).hex()}", [program])

    # --- savepoints, and continuing --------------------------------------------------------------------------------

    def savepoint(self, plan: Plan, url: str, wanted: Callable[[], bool] = lambda: True) -> None:
        """Copies the last complete epoch to a place of its own, where it stays. Ends without a savepoint as soon as it
        is not `wanted` any more; what was copied by then stays too."""
        if wanted():
            self.copy_to(Store.open(url, SAVEPOINT, durable=True), plan, wanted)

    def copy_to(self, target: Store, plan: Plan, wanted: Callable[[], bool] = lambda: True) -> None:
        """Copies the last complete epoch to a store of its own; see `savepoint`. A copy of the same epoch that is there
        already is enough, because the last host of the job may have died after it had written it."""
        manifest, store = self.last, self.origin or self.store
        assert manifest is not None
        if there := target.epochs():
            found = target.read_manifest(max(there))
            of = str(found.extra.get("of"))
            if (of, found.epoch, found.created) == (manifest.job, manifest.epoch, manifest.created):
                return
            url = target.place
            raise StoreError(f"{url!r} holds a savepoint already; give another place, or delete that savepoint")
        tasks = []
        for entry in manifest.tasks:
            if not wanted():
                return
            name = f"snapshots/{manifest.epoch:08d}-{entry.number}"
            with belonging_to(self._classes_of):
                blob = compact_snapshots(store, entry.blobs, manifest.key_groups, target, name)
            # A job that stops has committed everything when this is called.
            uncommitted = [] if "stop" in manifest.extra else entry.uncommitted
            tasks.append(replace(entry, blobs=[blob], uncommitted=uncommitted))
        if not wanted():
            return
        extra = {**manifest.extra, "of": manifest.job, "kinds": json.dumps(kinds_with_state(plan))}
        extra.pop("stop", None)  # that is what its job does there, and not what a job does that starts from it
        target.write_manifest(replace(manifest, job=SAVEPOINT, tasks=tasks, collected=[], program=None, extra=extra))

    def continue_from(self, manifest: Manifest, origin: Store | None = None) -> None:
        """Continues where an earlier life of the job has ended. Raises SnapshotDamaged, and changes nothing, when
        records that Collect sinks have sent can no longer be read."""
        collected = [self.store.get(blob) for blob in manifest.collected]
        self.last, self.origin = manifest, origin
        self._kept = [_as_written(manifest)] if origin is None else []
        self._lost, self._spoiled, self._collected_lost, self._examining = {}, {}, False, None
        self.program = manifest.program
        self.collected_blobs = list(manifest.collected)
        self._collected.restore(collected)

    def newest(self) -> tuple[Manifest, list[str]] | None:
        """Continues from the newest epoch that can be used. Returns it, with descriptions of the faults of newer ones,
        or None when there is none. Raises SnapshotDamaged when there are epochs and none can be used."""
        last = max(self.store.epochs(), default=0)

        def usable(manifest: Manifest) -> None:
            self._may_go_back(manifest.epoch, last)
            self.continue_from(manifest)

        return self.store.latest(usable)

    def _may_go_back(self, epoch: int, committed: int) -> None:
        """Raises SnapshotDamaged when a sink has perhaps committed a later epoch, and cannot take that back."""
        if epoch < committed and self.cannot_take_back:
            sinks = ", ".join(map(repr, self.cannot_take_back))
            raise SnapshotDamaged(
                f"from it on, records would come again that sink {sinks} has committed up to epoch {committed}, and "
                "that it cannot take back."
            )

    def older(self, refused: int, reason: str) -> Manifest | None:
        """Returns the newest undamaged epoch before one that was refused for this reason, with all its blobs, and
        deletes the manifests of later ones. It is the refused epoch itself when its snapshots were compacted meanwhile,
        and those from which the compacted ones were made are still there. When no other epoch can be used, it is the
        refused epoch, but only once, if a worker whose answer got lost has meanwhile written again what was damaged.
        Returns None when the keeper was closed, or when there is no epoch. Raises SnapshotDamaged when there are epochs
        and none can be used."""
        return self._with_pauses(self.looking_for_older(refused, reason))

    def looking_for_older(self, refused: int, reason: str) -> Generator[None, None, Manifest | None]:
        """Does the same as `older`, and yields before each further try."""

        unreadable = _names(self.last) if self.last is not None and self.last.epoch == refused else None

        def usable(manifest: Manifest) -> None:
            # Its blobs may be as they were written, and still nobody can read them. They would be chosen again and
            # again. But a compaction has replaced some of them since the manifest was written, perhaps.
            if manifest.epoch > refused or (manifest.epoch == refused and unreadable in (None, _names(manifest))):
                raise SnapshotDamaged(reason)
            self._may_go_back(manifest.epoch, refused)
            self.store.verify(manifest)

        while True:
            try:
                manifest = self._latest(usable, refused, unreadable)
                # Sinks are about to undo what later epochs have committed.
                self.store.forget_after(0 if manifest is None else manifest.epoch)
                if manifest is not None:
                    self.continue_from(manifest)
            except SnapshotDamaged:
                raise
            except StoreError as error:
                self._said(str(error))
                yield
            else:
                return manifest

    def _latest(self, usable: Callable[[Manifest], None], refused: int, unreadable: set[str] | None) -> Manifest | None:
        """Returns the newest usable epoch; or the refused one if it can be read now, and has not been chosen again with
        the same blobs before."""
        try:
            found = self.store.latest(usable)
            return None if found is None else found[0]
        except SnapshotDamaged as none:  # it tells of all epochs, and what to do
            if unreadable is None or unreadable == self._chosen_again:
                raise
            try:
                manifest = self.store.read_manifest(refused)
                self.store.verify(manifest)
            except SnapshotDamaged:
                raise none from None
            self._chosen_again = unreadable
            return manifest

    def _save_collected(self, manifest: Manifest) -> None:
        token = os.urandom(4).hex()
        name = f"snapshots/{manifest.epoch:08d}-collected-{token}"
        if len(self.collected_blobs) >= _COLLECTED_BLOBS_MAX or self._collected_lost:
            self.collected_blobs = [self.store.put(f"{name}-all", [self._collected.everything()])]
            self._collected_lost = False
        due = self._collected.due(manifest.epoch)
        if due is not None:
            self.collected_blobs.append(self.store.put(name, [due]))

    def _compact_all(
        self,
        due: dict[int, list[Blob]],
        key_groups: int,
        epoch: int,
        replaced: Callable[[int, list[Blob], Blob], None],
    ) -> None:
        try:
            for task, old in due.items():
                name = f"snapshots/{epoch:08d}-{task}-to-{epoch}-{os.urandom(4).hex()}"
                self._compacted[name] = None
                try:
                    with belonging_to(self._classes_of):
                        blob = compact_snapshots(self.store, old, key_groups, self.store, name)
                    self._compacted[name] = old[0].name
                    replaced(task, old, blob)
                except SnapshotDamaged:
                    self.do(partial(self._watch_over, old))
                finally:
                    if self._compacted.get(name) is None:
                        self._compacted.pop(name, None)
        except Exception as error:  # whatever the error is: a later epoch may try again, and nothing depends on it
            logger.warning(
                "job %s: snapshots could not be compacted, which is tried again later: %s: %s",
                self.store.job,
                type(error).__name__,
                error,
            )
        finally:
            self._compacting.clear()


def _names(manifest: Manifest) -> set[str]:
    return {blob.name for blob in manifest.blobs()}


def _as_written(manifest: Manifest) -> Manifest:
    """Returns a copy, because a compaction changes the series of the last manifest."""
    return replace(manifest, tasks=[replace(entry, blobs=list(entry.blobs)) for entry in manifest.tasks])
