"""The JobMaster's dealings with the store: manifests, savepoints, and keeping what is saved small.

What it is asked for is done in order, in one thread; snapshots are put together in another, beside it. When it has
nothing else to do it looks after what is saved: it lists the store to see whether all that the kept epochs consist of
is there, and reads it all, slowly. What is missing or damaged is written again from its copy; what is lost for good
while the job lives is told (`lost`), and the tasks that it belongs to save everything anew.

It must never give up a manifest half-way: while the store does not answer nobody knows whether it is there, so it is
written again until the store does. And it must never write one that refers to what it knows to be lost.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.runtime.epochs.compaction import put_together
from penstock.runtime.epochs.manifest import Blob, Manifest
from penstock.runtime.epochs.restore import kinds_with_state
from penstock.runtime.epochs.snapshot import worth_compacting
from penstock.runtime.epochs.store import Store, manifest_files, result_of
from penstock.runtime.errors import SnapshotDamaged, StoreError

if TYPE_CHECKING:
    from penstock.runtime.host.collected import Collected
    from penstock.runtime.program.plan import Plan

logger = logging.getLogger(__name__)

#: The job that a savepoint's directory is the store of, whatever job it was made of.
SAVEPOINT = "savepoint"

# Complete epochs that stay in the store: the last, and one to go back to should that be damaged.
_EPOCHS_KEPT = 2
# Old epochs are looked for every so many epochs: each look lists the store.
_COLLECT_EVERY = 5
# Epochs after which a snapshot that was put together, and that no manifest refers to, is a left-over.
_NOT_YET = 1000
# Between two tries to write to a store that does not answer.
_RETRY_S = 1.0
# A look at what there is comes after each epoch, but takes at most this share of the keeper's time; so many seconds
# after the last it is due in any case: of a directory, and of what may cost money.
_LOOK_SHARE = 0.05
_LOOK_S = 1.0
_LOOK_REMOTE_S = 10.0
# So many bytes a second of the files are read to see whether they are as they were written; by a directory's keeper: an
# object store looks after that itself. From the beginning again after so many seconds at the earliest.
_EXAMINE_BYTES_S = 8 << 20
_EXAMINE_EVERY_S = 60.0
# Blobs of collected records that a manifest refers to, before they are written as one.
_COLLECTED_BLOBS_MAX = 32


class StoreKeeper:
    """See the module's docstring.

    `said(reason)` is called with the reason why the store cannot be written to, and with None when it can be again.
    `lost(names, reason)` is called when snapshots of tasks are lost, with every look until no epoch needs them.
    `failed(error)` is called when a piece of work has raised an error that nobody has thought of. Without a `thread`,
    nothing is done except by calling the methods.
    """

    def __init__(
        self,
        store: Store,
        collected: Collected,
        said: Callable[[str | None], None],
        lost: Callable[[frozenset[str], str], None] = lambda names, reason: None,
        failed: Callable[[Exception], None] = lambda error: None,
        thread: bool = True,
    ) -> None:
        self.store = store
        self.damage: str | None = None  # what was last found missing or damaged, and what was done
        self.last: Manifest | None = None  # the last one written
        self.collected_blobs: list[Blob] = []
        self.program: Blob | None = None
        self.program_bytes: bytes | None = None
        self.extra: dict[str, str | int | float] = {}
        self.origin: Store | None = None  # where the blobs of `last` are, if in another store
        self._collected = collected
        self._said = said
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._say_lost = lost
        self._failed = failed
        self._kept: list[Manifest] = []  # the last ones written or gone on from, the newest last
        self._lost: dict[str, str] = {}  # blobs that the kept epochs need: why they cannot be read
        self._spoiled: dict[str, str] = {}  # those among them that are there, and are not what was written
        self._collected_lost = False
        self._look_at = self._look_after = 0.0  # when the next look is due, and before when it would take too much time
        self._examining: Iterator[int] | None = None
        self._examine_at = 0.0
        self._compacting = threading.Event()
        self._room_wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-store", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Do something in the keeper's thread, behind all before it."""
        self._work.put(work)

    def close(self) -> None:
        """Give up what does not get an answer, and do nothing more."""
        self._over.set()
        self._work.put(lambda: None)  # the thread may be waiting for work

    def wait(self, timeout_s: float) -> None:
        """After `close`: wait until the thread has ended. Before that it may yet write to the store."""
        if self._thread is not None:
            self._thread.join(timeout_s)

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
        """Write a manifest; False when the keeper was closed before. Raises SnapshotDamaged when it refers to what is
        lost, StoreError when it cannot be written."""
        whole: Manifest | None = None
        while not self._over.is_set():
            try:
                if whole is None:  # later nobody knows whether the manifest is there, and it must not be given up
                    self.check(manifest)
                    self._save_collected(manifest)
                    whole = replace(
                        manifest,
                        created=time.time(),
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
                self._over.wait(_RETRY_S)
            else:
                self.saved(whole)
                self._said(None)
                return True
        return False

    def saved(self, manifest: Manifest) -> None:
        """A manifest is written."""
        self.last, self.origin = manifest, None
        self._kept = [*self._kept, _as_written(manifest)][-_EPOCHS_KEPT:]

    def check(self, manifest: Manifest) -> None:
        """SnapshotDamaged when a manifest refers to what is lost."""
        if not self._lost:
            return
        # Whatever took away what is known to be lost may have gone on since, and have taken what no manifest has
        # referred to before.
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
                raise SnapshotDamaged(f"{task.name} builds on what is lost: {self._lost[blob.name]}")

    def tidy(self, epoch: int, replaced: Callable[[int, list[Blob], Blob], None]) -> None:
        """Put together snapshots of tasks that have many, and delete what no epoch needs any more. `replaced(task, old,
        new)` is told."""
        assert self.last is not None
        due: dict[int, list[Blob]] = {}
        for entry in self.last.tasks:
            blobs = list(entry.blobs)  # the JobMaster shortens the chain itself when it hears what was replaced
            first = worth_compacting([blob.size for blob in blobs])
            if first is not None:
                due[entry.number] = blobs[first:]
        if due and not self._compacting.is_set():
            # In a thread of its own: large state takes seconds, and manifests must not wait for it.
            self._compacting.set()
            arguments = (due, self.last.key_groups, epoch, replaced)
            threading.Thread(target=self._compact_all, args=arguments, name="penstock-compact", daemon=True).start()
        if epoch % _COLLECT_EVERY == 0:
            self._collect()
        if time.monotonic() >= self._look_after:
            self._watch()

    def make_room(self) -> None:
        """Somebody could not write to the store: delete what no epoch needs any more. What is asked for meanwhile, by
        the other tasks of the epoch, is the same request. Waits for nothing."""
        if not self._room_wanted.is_set():
            self._room_wanted.set()
            self.do(self._collect)

    def _collect(self) -> None:
        self._room_wanted.clear()
        self.store.collect(_EPOCHS_KEPT)

    # --- looking after what is saved -----------------------------------------------------------------------------

    def look(self) -> None:
        """Find out whether all that the kept epochs consist of is in the store, by names and sizes, and mend what can
        be mended. Raises StoreError when the store does not answer."""
        there = self.store.sizes()
        needed = {blob.name: blob for manifest in self._kept for blob in manifest.blobs()}
        for manifest in self._kept:
            if any(name not in there for name in manifest_files(manifest.epoch)):
                self._found(self.store.mend_manifest(manifest))
        self._spoiled = {name: why for name, why in self._spoiled.items() if name in needed}
        lost = dict(self._spoiled)
        for blob in needed.values():
            self._mend(blob, there, lost)
        # Only now: when the store falls silent on the way, what was known to be lost is still lost.
        before, self._lost = self._lost, lost
        self._now_lost(before)

    def _mend(self, blob: Blob, there: Mapping[str, int], lost: dict[str, str]) -> None:
        """Mend a blob if it needs that, or note that it is lost."""
        try:
            self._found(self.store.mend(blob, there))
        except SnapshotDamaged as error:
            lost[blob.name] = str(error)

    def examine(self) -> Iterator[int]:
        """Read all that the kept epochs consist of, in pieces, of which it yields the sizes, and mend what can be
        mended. Between two pieces other work may be done, and so a file may be deleted that no epoch needs any more."""
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
        for manifest in list(self._kept):
            if manifest in self._kept:
                self._found(self.store.mend_manifest(manifest))

    def _examine_now(self, blobs: Iterable[Blob]) -> None:
        """Somebody has found some of these to be damaged, or they were: find out what is so."""
        before = dict(self._lost)
        for blob in blobs:
            try:
                self._found(result_of(self.store.examine(blob)))
            except SnapshotDamaged as error:
                self._lost[blob.name] = self._spoiled[blob.name] = str(error)
            else:
                self._lost.pop(blob.name, None)
                self._spoiled.pop(blob.name, None)
        self._now_lost(before)

    def _needs(self, blob: Blob) -> bool:
        """Whether one of the kept epochs consists of this blob, among others."""
        return any(blob.name == other.name for manifest in self._kept for other in manifest.blobs())

    def _watch_over(self, blobs: list[Blob]) -> None:
        try:
            self._examine_now(blobs)
        except StoreError as error:
            logger.info("the store cannot be looked after just now: %s", error)

    def _watch(self) -> None:
        """Look, and read on, as far as they are due."""
        now = time.monotonic()
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
            logger.info("the store cannot be looked after just now: %s", error)

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
        """Something was missing or damaged, and was mended."""
        if what is not None:
            self.damage = what
            logger.warning("the store of job %s: %s", self.store.job, what)

    def _now_lost(self, before: Mapping[str, str]) -> None:
        """Of what is lost, write again what is here, and tell of what tasks have; `before`: what was lost before."""
        program, lost = self.program, self._lost
        fresh = lost.keys() - before.keys()
        if program is not None and program.name in lost and self.program_bytes is not None:
            self.program = self.put_program(self.program_bytes)
        # Not now: what belongs to the last epoch may yet have to be committed.
        self._collected_lost |= any(blob.name in lost for blob in self.collected_blobs)
        if not lost:
            return
        example = next(iter(sorted(fresh or lost)))
        more = f" {len(lost) - 1} more are lost." if len(lost) > 1 else ""
        reason = f"the store {self.store.place} has lost what was saved: {lost[example]}{more}"
        if fresh:
            self.damage = f"{reason} What is alive of it is saved anew with the next epoch."
            logger.warning("job %s: %s", self.store.job, self.damage)
        self._say_lost(frozenset(lost), reason)

    def put_program(self, program: bytes) -> Blob:
        """Write what the job was started with."""
        self.program_bytes = program
        epoch = self._kept[-1].epoch if self._kept else 0  # what is older than the last epoch, and unknown, is deleted
        return self.store.put(f"snapshots/{epoch + 1:08d}-program-{os.urandom(4).hex()}", [program])

    # --- savepoints, and going on --------------------------------------------------------------------------------

    def savepoint(self, plan: Plan, url: str) -> None:
        """Copy the last complete epoch to a place of its own, where it stays."""
        target = Store.open(url, SAVEPOINT, durable=True)
        if target.epochs():
            raise StoreError(f"{url!r} holds a savepoint already; give another place, or delete it")
        manifest, store = self.last, self.origin or self.store
        assert manifest is not None
        tasks = []
        for entry in manifest.tasks:
            name = f"snapshots/{manifest.epoch:08d}-{entry.number}"
            tasks.append(replace(entry, blobs=[put_together(store, entry.blobs, manifest.key_groups, target, name)]))
        of = {"of": manifest.job, "kinds": json.dumps(kinds_with_state(plan))}
        target.write_manifest(
            replace(manifest, job=SAVEPOINT, tasks=tasks, collected=[], program=None, extra={**manifest.extra, **of})
        )

    def go_on_from(self, manifest: Manifest, origin: Store | None = None) -> None:
        """Take up where an earlier life of the job left off."""
        self.last, self.origin = manifest, origin
        self._kept = [_as_written(manifest)] if origin is None else []
        self._lost, self._spoiled, self._collected_lost, self._examining = {}, {}, False, None
        self.program = manifest.program
        self.collected_blobs = list(manifest.collected)
        self._collected.restore([self.store.get(blob) for blob in manifest.collected])

    def older(self, refused: int, reason: str) -> Manifest | None:
        """The newest epoch before one that was refused for this reason that is whole, with all its blobs; later ones
        are forgotten. None: the keeper was closed, or there is no epoch. Raises SnapshotDamaged when there are some and
        none can be used."""

        def usable(manifest: Manifest) -> None:
            # Its blobs may be as they were written, and yet nobody can read them: it would be chosen for ever.
            if manifest.epoch >= refused:
                raise SnapshotDamaged(reason)
            self.store.verify(manifest)

        while not self._over.is_set():
            try:
                found = self.store.latest(usable)
                manifest = None if found is None else found[0]
                # Sinks are about to undo what later epochs committed.
                self.store.forget_after(0 if manifest is None else manifest.epoch)
                if manifest is not None:
                    self.go_on_from(manifest)
            except SnapshotDamaged:
                raise
            except StoreError as error:
                self._said(str(error))
                self._over.wait(_RETRY_S)
            else:
                return manifest
        return None

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
                # Named by an epoch far off: `collect` must not take it for a left-over before a manifest refers to it.
                name = f"snapshots/{epoch + _NOT_YET:08d}-{task}-to-{epoch}-{os.urandom(4).hex()}"
                try:
                    replaced(task, old, put_together(self.store, old, key_groups, self.store, name))
                except SnapshotDamaged:
                    self.do(partial(self._watch_over, old))
        except Exception as error:  # whatever it is, a later epoch may bring it about, and nothing depends on it
            logger.warning("snapshots stay apart for now: %s: %s", type(error).__name__, error)
        finally:
            self._compacting.clear()


def _as_written(manifest: Manifest) -> Manifest:
    """A copy: who puts snapshots together changes the chains of the last one."""
    return replace(manifest, tasks=[replace(entry, blobs=list(entry.blobs)) for entry in manifest.tasks])
