"""Hands the records of each complete epoch to a function of the driver, as the files that hold them.

A job's tasks write a table (`parquet.py`) of which each file has the number of its epoch in its name. A thread of the
driver asks the job which epochs are complete, takes their files in order, and notes in the table's directory how far it
has come. Who comes after it, in this process or another, continues after that; so an epoch that was under way is handed
over again, under its number and with the same records.

It must never hand over an epoch of which a task's file is not there yet, nor one that is not complete. An epoch is
complete when every task has closed its file of it, but the tasks give these files their names a moment later. So an
epoch is ready when none is left of the hidden files that were closed up to it. A hidden file that is not whole, as its
writer died over it, is nobody's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

from penstock.runtime.errors import JobError, PenstockError, describe
from penstock.runtime.records.userfunc import user_line
from penstock.runtime.sinks.base import RunningJob
from penstock.runtime.sinks.parts import PartNames
from penstock.runtime.units import seconds

logger = logging.getLogger(__name__)

_PROGRESS = "_handed_over"  # in the table's directory; readers of tables pass over names that begin so
_LOOK_S = 0.5  # between two looks at the job
_ENDED = ("FINISHED", "CANCELLED", "FAILED")
_MAGIC = b"PAR1"
_EVER = 1 << 62


class Follower:
    """Hands complete epochs to a function; see the module's docstring. `hand_over(files, epoch)` is called in a thread
    of its own. With `keep`, files stay where they are after they were handed over. Without a job, it hands over what an
    ended job has left."""

    def __init__(
        self,
        job: RunningJob | None,
        names: PartNames,
        hand_over: Callable[[list[str], int], None],
        *,
        keep: bool,
        what: str,
    ) -> None:
        self.error: PenstockError | None = None  # why no more epochs are handed over
        self._job = job
        self._names = names
        self._hand_over = hand_over
        self._keep = keep
        self._what = what  # the function, for messages
        self._stopped = False
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-follower", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Follower of {self._names.directory!r}, epoch {self.epoch}>"

    @property
    def epoch(self) -> int:
        """The last epoch that was handed over; 0 means none yet. Epochs without records are passed over."""
        return progress(self._names.directory)

    def stop(self, timeout_s: float | timedelta | None = None) -> None:
        """Hands over no further epoch, and waits at most `timeout_s` seconds for the one that is under way."""
        self._stopped = True
        self._awake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(None if timeout_s is None else seconds(timeout_s, "stop: timeout_s"))

    def wait(self, timeout_s: float | timedelta | None = None) -> int:
        """Waits until the job has ended and its epochs were handed over, and returns the last epoch. Raises the error
        that stopped it, or TimeoutError after `timeout_s` seconds (or a timedelta)."""
        limit_s = None if timeout_s is None else seconds(timeout_s, "wait: timeout_s")
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise TimeoutError(f"after {limit_s:g} s, not all epochs of {self._of()} are handed over yet")
        if self.error is not None:
            raise self.error
        return self.epoch

    def ended(self, timeout: float | None) -> bool:
        """Waits at most `timeout` seconds after the job's end, and tells whether all epochs were handed over, or no
        more will be."""
        self._awake.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _of(self) -> str:
        return f"the table {self._names.directory!r}" if self._job is None else f"job {self._job.name!r}"

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # also when Ray ends this thread, as the process leaves the cluster
            self.error = error if isinstance(error, PenstockError) else JobError(self._failure(error))
            if self.error is not error:
                self.error.__cause__ = error
            logger.warning("%s", self.error)
            if self._job is not None:
                self._job.trouble(self.error)

    def _failure(self, error: BaseException) -> str:
        return f"no more epochs of {self._of()} are handed to {self._what}: {describe(error)}"

    def _follow(self) -> None:
        if self._job is None:
            self._take(None)
            return
        seen = 0
        while not self._stopped:
            status = self._job.status()
            state, complete = status.state, status.epochs.complete
            if complete != seen or (complete and state in _ENDED):
                # A job that has ended well has committed all of its epochs.
                whole = self._take(None if state == "FINISHED" else complete)
                seen = complete if whole else -1
            if state in _ENDED:
                return
            self._awake.wait(_LOOK_S)

    def _take(self, complete: int | None) -> bool:
        """Hands over the records that are ready up to a complete epoch (None: all that there is). Returns False when
        some of them are not ready."""
        limit = None if complete is None else ready(self._names, complete)
        if self._job is None and ready(self._names, _EVER) != _EVER:
            raise JobError(
                f"the job that wrote {self._names.directory!r} did not end well: some of its files have no name yet. "
                "Resume it (penstock.resume), and pass the resumed job"
            )
        handed = self.epoch
        epochs: defaultdict[int, list[str]] = defaultdict(list)
        for name, _, epoch in self._names.parts():
            if epoch is None or (limit is not None and epoch > limit):
                continue
            if epoch > handed:
                epochs[epoch].append(self._names.path(name))
            elif not self._keep:
                self._names.remove(name)  # nobody came to it
        for epoch in sorted(epochs):
            if self._stopped:
                return True
            files = sorted(epochs[epoch])
            try:
                self._hand_over(files, epoch)
            except Exception as error:  # of the user's function
                raise JobError(self._says_no(epoch, error)) from error
            note_progress(self._names.directory, epoch)
            if not self._keep:
                for file in files:
                    self._names.remove(file)
        return limit == complete

    def _says_no(self, epoch: int, error: Exception) -> str:
        line = user_line(error)
        continues = "" if self._job is None else f" Job {self._job.name!r} continues, and its records are safe there."
        return (
            f"{self._what} failed for epoch {epoch} of the table {self._names.directory!r}: {describe(error)[:1000]}"
            + (f"\n  at {line}" if line else "")
            + f"\n  It is called for no further epoch.{continues} To continue with epoch {epoch}: "
            "penstock.bridge.follow(job, fn, spark=..., folder=...)"
        )


def ready(names: PartNames, complete: int) -> int:
    """Returns the last epoch up to which all files of complete epochs have their names, if the files are listed after
    this call: a file that is given its name during the listing may be seen under neither name."""
    limit = complete
    for name, _, epoch in names.hidden_ones():
        if epoch <= limit and _may_be_whole(names.path(name)):
            limit = epoch - 1
    return limit


def progress(directory: str) -> int:
    """Returns the last epoch of a table that was handed over; 0 means none."""
    try:
        with open(os.path.join(directory, _PROGRESS), encoding="ascii") as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def note_progress(directory: str, epoch: int) -> None:
    """Notes that all epochs up to this one were handed over; 0 means that another table begins."""
    path = os.path.join(directory, _PROGRESS)
    if not epoch:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    new = os.path.join(directory, f".{_PROGRESS}-{secrets.token_hex(4)}")
    with open(new, "x", encoding="ascii") as file:
        file.write(str(epoch))
    os.replace(new, path)


def _may_be_whole(path: str) -> bool:
    """Tells whether a hidden file was closed, or has just got its name."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_MAGIC)))
            return size > len(_MAGIC) and file.read() == _MAGIC
    except FileNotFoundError:
        return True
