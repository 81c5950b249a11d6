"""The JobMaster's dealings with the store: manifests, savepoints, and keeping what is saved small.

What it is asked for is done in order, in one thread; snapshots are put together in another, beside it. It must never
give up a manifest half-way: while the store does not answer nobody knows whether it is there, so it is written again
until the store does.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.runtime.epochs.manifest import Blob, Manifest, TaskEntry
from penstock.runtime.epochs.restore import kinds_with_state
from penstock.runtime.epochs.snapshot import compact, worth_compacting
from penstock.runtime.epochs.store import Store, may_pass
from penstock.runtime.errors import SnapshotDamaged, StoreError

if TYPE_CHECKING:
    from penstock.actors.collected import Collected
    from penstock.runtime.plan import Plan

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
# Blobs of collected records that a manifest refers to, before they are written as one.
_COLLECTED_BLOBS_MAX = 32


class Keeper:
    """See the module's docstring. `said(reason)`: why the store cannot be written to, None when it can again."""

    def __init__(self, store: Store, collected: Collected, said: Callable[[str | None], None]) -> None:
        self.store = store
        self.last: Manifest | None = None  # the last one written
        self.collected_blobs: list[Blob] = []
        self.program: Blob | None = None
        self.extra: dict[str, str | int | float] = {}
        self.origin: Store | None = None  # where the blobs of `last` are, if in another store
        self._collected = collected
        self._said = said
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._compacting = threading.Event()
        threading.Thread(target=self._run, name="penstock-store", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        """Do something in the keeper's thread, behind all before it."""
        self._work.put(work)

    def close(self) -> None:
        """Give up what does not get an answer."""
        self._over.set()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def save(self, manifest: Manifest) -> bool:
        """Write a manifest; False when the keeper was closed before. Raises StoreError when it cannot be."""
        whole: Manifest | None = None
        while not self._over.is_set():
            try:
                if whole is None:
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
                if not may_pass(error):
                    raise
                self._said(f"epoch {manifest.epoch}: {error}")
                self._over.wait(_RETRY_S)
            else:
                self.last, self.origin = whole, None
                self._said(None)
                return True
        return False

    def tidy(self, epoch: int, replaced: Callable[[int, list[Blob], Blob], None]) -> None:
        """Put together snapshots of tasks that have many, and delete what no epoch needs any more. `replaced(task, old,
        new)` is told."""
        assert self.last is not None
        due = [(entry, worth_compacting([blob.size for blob in entry.blobs])) for entry in self.last.tasks]
        if any(first is not None for _, first in due) and not self._compacting.is_set():
            # In a thread of its own: large state takes seconds, and manifests must not wait for it.
            self._compacting.set()
            arguments = ([(entry, first) for entry, first in due if first is not None], self.last, epoch, replaced)
            threading.Thread(target=self._compact_all, args=arguments, name="penstock-compact", daemon=True).start()
        if epoch % _COLLECT_EVERY == 0:
            self.store.collect(_EPOCHS_KEPT)

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
            parts = compact([store.get(blob) for blob in entry.blobs], manifest.key_groups)
            tasks.append(replace(entry, blobs=[target.put(name, parts)]))
        of = {"of": manifest.job, "kinds": json.dumps(kinds_with_state(plan))}
        target.write_manifest(
            replace(manifest, job=SAVEPOINT, tasks=tasks, collected=[], program=None, extra={**manifest.extra, **of})
        )

    def go_on_from(self, manifest: Manifest, origin: Store | None = None) -> None:
        """Take up where an earlier life of the job left off."""
        self.last, self.origin = manifest, origin
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
        if len(self.collected_blobs) >= _COLLECTED_BLOBS_MAX:
            self.collected_blobs = [self.store.put(f"{name}-all", [self._collected.everything()])]
        due = self._collected.due(manifest.epoch)
        if due is not None:
            self.collected_blobs.append(self.store.put(name, [due]))

    def _compact_all(
        self,
        due: list[tuple[TaskEntry, int]],
        manifest: Manifest,
        epoch: int,
        replaced: Callable[[int, list[Blob], Blob], None],
    ) -> None:
        try:
            for entry, first in due:
                replaced(entry.number, *self._compact(entry, first, epoch, manifest.key_groups))
        except Exception as error:
            logger.warning("snapshots stay apart for now: %s: %s", type(error).__name__, error)
        finally:
            self._compacting.clear()

    def _compact(self, entry: TaskEntry, first: int, epoch: int, key_groups: int) -> tuple[list[Blob], Blob]:
        old = entry.blobs[first:]
        parts = compact([self.store.get(blob) for blob in old], key_groups)
        # Named by an epoch far off: `collect` must not take it for a left-over before a manifest refers to it.
        name = f"snapshots/{epoch + _NOT_YET:08d}-{entry.number}-to-{epoch}-{os.urandom(4).hex()}"
        return old, self.store.put(name, parts)
