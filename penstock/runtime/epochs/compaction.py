"""Putting snapshots together in a process of its own.

To put snapshots together is to have what has changed since the oldest in memory, many times its size there. Whoever has
that done, above all the JobMaster, must not grow with the state of the job; so what is more than small is done by a
process that lives as long as it takes, gives way to others, and is the first that the kernel ends when memory runs out.
It must never outlive who started it, nor leave anything behind but the blob.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from penstock.runtime.epochs.manifest import Blob
from penstock.runtime.epochs.snapshot import compact
from penstock.runtime.epochs.store import Store
from penstock.runtime.errors import PenstockError, StoreError, shorten
from penstock.runtime.records.pickling import dumps, for_child, join, loads

#: Snapshots of so many bytes are put together where they are asked for: in memory they take up to 20 times as much.
SMALL_BYTES = 2 << 20

_PR_SET_PDEATHSIG = 1


def put_together(origin: Store, blobs: Sequence[Blob], key_groups: int, target: Store, name: str) -> Blob:
    """Put a task's snapshots, which are in one store, together into one blob of this name in another, or in the same.

    Raises what reading and writing them raises; StoreError when the process ended that was to do it.
    """
    if sum(blob.size for blob in blobs) <= SMALL_BYTES:
        return target.put_pieces(name, compact([partial(origin.pieces, blob) for blob in blobs], key_groups))
    process = subprocess.run(
        [sys.executable, "-m", "penstock.runtime.epochs.compaction", str(os.getpid())],
        input=for_child((origin, list(blobs), key_groups, target, name)),
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # modules are found there as here
    )
    if process.returncode:
        raise StoreError(
            f"the process that was to put {len(blobs)} snapshots together ended with {process.returncode} "
            f"({'memory may have run out' if process.returncode == -signal.SIGKILL else 'see what it said'}): "
            f"{shorten(process.stderr.decode(errors='replace').strip()[-500:])}"
        )
    done: Blob | PenstockError = loads(process.stdout)
    if isinstance(done, PenstockError):
        raise done
    return done


def _main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # it has died already
    with suppress(OSError):
        os.nice(10)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    answer, sys.stdout = sys.stdout, sys.stderr  # user code may print
    done: Blob | PenstockError
    try:
        origin, blobs, key_groups, target, name = join(sys.stdin.buffer.read())
        done = target.put_pieces(name, compact([partial(origin.pieces, blob) for blob in blobs], key_groups))
    except PenstockError as error:
        done = error
    answer.buffer.write(dumps(done))


if __name__ == "__main__":
    _main()
