"""Calls a function of the driver with each complete epoch of a table, as a DataFrame of the user's own Spark session.

Spark is only what the user gives, a session that has a `read`: nothing here imports it, and no worker ever needs it. A
function must never see a record that a recovery would take back.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from penstock.runtime.errors import FlowError, shorten
from penstock.runtime.sinks import follower
from penstock.runtime.sinks.base import Guarantee, RunningJob, SinkContext, SinkWriter
from penstock.runtime.sinks.follower import Follower
from penstock.runtime.sinks.parquet import Parquet
from penstock.runtime.sinks.parts import PartNames
from penstock.runtime.sinks.places import Place

logger = logging.getLogger(__name__)

#: fn(DataFrame, epoch)
EpochFunction = Callable[[Any, int], object]


class ToSpark(Parquet):
    """The sink that `Stream.to_spark` makes; see there."""

    title = "to_spark"
    guarantee: Guarantee = "at least once"

    def __init__(
        self,
        fn: EpochFunction,
        *,
        spark: Any,
        folder: str | os.PathLike[str],
        schema: pa.Schema | None = None,
        keep: bool = True,
        overwrite: bool = False,
    ) -> None:
        check_folder(folder)
        super().__init__(folder, schema=schema, overwrite=overwrite)
        self.taken_away = not keep
        self._frames: Frames | None = Frames(fn, spark)
        self._name = self._frames.name
        self._follower: Follower | None = None

    def check(self) -> None:
        super().check()
        if not self.overwrite and follower.progress(self.directory):
            raise FlowError(
                f"to_spark: {self.directory!r} was used by another job, of which epoch "
                f"{follower.progress(self.directory)} was the last one handed over. Give another folder, or "
                "overwrite=True to begin anew in this one."
            )

    def started(self, job: RunningJob) -> None:
        if self._frames is None:
            logger.warning(
                "job %s continues without a function that is called with its epochs in %s; give one to "
                "penstock.bridge.follow(job, fn, spark=..., folder=...)",
                job.name,
                self.directory,
            )
            return
        self._follower = follow(job, self._frames, self.directory, keep=not self.taken_away)

    def ended(self, timeout: float | None) -> bool:
        return self._follower is None or self._follower.ended(timeout)

    def writer(self, context: SinkContext) -> SinkWriter:
        if not context.epochs:
            raise FlowError(
                "to_spark calls its function once for each epoch, and this job has no epochs; run it with epochs "
                "(epoch_interval_s=1, or --epoch-interval 1 on the command line)"
            )
        return super().writer(context)

    def begin(self, context: SinkContext, place: Place) -> None:
        super().begin(context, place)
        if context.index == 0:
            follower.note_progress(self.directory, 0)

    def gone_back(self, context: SinkContext, epoch: int, place: Place) -> None:
        super().gone_back(context, epoch, place)
        # Further than that only where an epoch was damaged, or in a job that starts from a savepoint: what comes now
        # are other records, under numbers that may have been used.
        if context.index == 0 and follower.progress(self.directory) > epoch:
            follower.note_progress(self.directory, epoch)

    def describe(self) -> str:
        return f"to_spark({self._name}, {self.directory!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_frames": None, "_follower": None}  # the driver's, like the session


class Frames:
    """Calls the user's function with the files of an epoch as a DataFrame."""

    def __init__(self, fn: EpochFunction, spark: Any) -> None:
        if not callable(fn):
            raise FlowError(f"to_spark needs a function fn(DataFrame, epoch), got {shorten(fn)}")
        if not hasattr(spark, "read"):
            raise FlowError(f"to_spark needs your Spark session, spark=..., got {shorten(spark)}")
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self._fn = fn
        self._spark = spark
        self._schema: Any = None

    def __call__(self, files: list[str], epoch: int) -> None:
        reader = self._spark.read
        if self._schema is not None:  # Spark would run a job to find it out
            reader = reader.schema(self._schema)
        frame = reader.parquet(*[f"file://{file}" for file in files])
        self._schema = frame.schema
        self._fn(frame, epoch)


def follow(job: RunningJob | None, frames: Frames, directory: str, *, keep: bool) -> Follower:
    """Begins to hand over the epochs of a table."""
    return Follower(job, PartNames(directory, ".parquet", "to_spark"), frames, keep=keep, what=frames.name)


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raises FlowError for a directory whose files Spark cannot read by their names."""
    if found := re.search(r"[*?\[\]{}\\]|://", os.path.expanduser(os.fspath(folder))):
        raise FlowError(
            f"to_spark: the folder {os.fspath(folder)!r} has {found[0]!r} in its name, which Spark does not take for a "
            "plain path; give a directory of this machine, or one that all share, without it"
        )
