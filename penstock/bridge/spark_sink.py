"""`follow`: continues the work of `Stream.to_spark` in another program than the one that started the job.

The driver's session and function end with its process. The table remains, and so does the note in it of the last epoch
for which the function was called.
"""

from __future__ import annotations

import os
from typing import Any

from penstock.runtime.errors import FlowError
from penstock.runtime.sinks import to_spark
from penstock.runtime.sinks.base import RunningJob
from penstock.runtime.sinks.follower import Follower
from penstock.runtime.sinks.to_spark import EpochFunction, Frames


def follow(
    job: RunningJob | None, fn: EpochFunction, *, spark: Any, folder: str | os.PathLike[str], keep: bool = True
) -> Follower:
    """Call fn(DataFrame, epoch) for the complete epochs of a job that `to_spark` writes to a folder.

        job = ps.resume("orders")
        following = penstock.bridge.follow(job, save, spark=spark, folder="/shared/orders")
        job.wait()
        following.wait()

    `job`: what `resume`, `attach` or `run` returned; None: it has ended well. `spark`, `folder`, `keep`: as in
    `Stream.to_spark`. It begins after the last epoch for which a function returned. Two programs that follow one
    folder at the same time both call their functions.

    The Follower has `wait(timeout_s)`, which waits for the job's end and all calls and raises what fn has raised;
    `epoch`, the last one handed over; `error`; and `stop()`. Raises FlowError for arguments that cannot work.
    """
    to_spark.check_folder(folder)
    directory = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    if not os.path.isdir(directory):
        raise FlowError(f"follow: there is no directory {directory!r}; give the folder that the job writes to")
    return to_spark.follow(job, Frames(fn, spark), directory, keep=keep)
