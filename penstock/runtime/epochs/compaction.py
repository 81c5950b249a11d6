"""Compaction: merges several snapshots of a task into one, in a process of its own.

A compaction has everything that changed after the oldest snapshot in memory, which takes many times its size. The
memory of the JobMaster must never grow with the state of the job. So a compaction of more than a little data runs in a
process that lives only for this, has a low priority, and is the first one that the kernel ends when memory runs out. It
must never outlive the process that has started it, nor leave anything but the blob.
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

#: Up to this many bytes of snapshots are compacted in the calling process. In memory they take up to 20 times as much.
SMALL_BYTES = 2 << 20

_PR_SET_PDEATHSIG = 1


def compact_snapshots(origin: Store, blobs: Sequence[Blob], key_groups: int, target: Store, name: str) -> Blob:
    """Compacts a task's snapshots, which are all in one store, into one blob of this name in the same or another store.
    Raises what reading and writing them raises, and StoreError when the process that does it has ended."""
    if sum(blob.size for blob in blobs) <= SMALL_BYTES:
        return target.put_pieces(name, compact([partial(origin.pieces, blob) for blob in blobs], key_groups))
    process = subprocess.run(
        [sys.executable, "-m", "penstock.runtime.epochs.compaction", str(os.getpid())],
        input=for_child((origin, list(blobs), key_groups, target, name)),
        capture_output=True,
        check=False,
        # The process finds modules where this one does.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if process.returncode:
        raise StoreError(
            f"the process that was to compact {len(blobs)} snapshots ended with exit code {process.returncode} "
            f"({'memory may have run out' if process.returncode == -signal.SIGKILL else 'its output follows'}): "
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
    answer, sys.stdout = sys.stdout, sys.stderr  # the user's code may print
    done: Blob | PenstockError
    try:
        origin, blobs, key_groups, target, name = join(sys.stdin.buffer.read())
        done = target.put_pieces(name, compact([partial(origin.pieces, blob) for blob in blobs], key_groups))
    except PenstockError as error:
        done = error
    answer.buffer.write(dumps(done))


if __name__ == "__main__":
    _main()
