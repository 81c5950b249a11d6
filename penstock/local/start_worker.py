"""The first code of a worker's process, run as a script by a bare interpreter: `start_worker.py JOB WORKER FD PARENT`.

It takes the program's module search path from the socket FD before it imports anything of Penstock, so that it finds
what the program finds. The process must never outlive the program: the kernel kills it with the thread that started it,
which lives as long as the program (host/process/starter.py).
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def read(fd: int, size: int) -> bytes:
    """Reads exactly `size` bytes. The process ends when the program has gone."""
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data


def main(fd: int, parent: int) -> None:
    """Begins as a worker of the program `parent`."""
    os.set_inheritable(fd, False)
    size = int.from_bytes(read(fd, 8), "little")
    sys.path[:] = [os.fsdecode(entry) for entry in read(fd, size).split(b"\0")]

    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it has died before the kernel knew that this process is to go with it
        os._exit(1)

    from penstock.local.worker import serve

    serve(fd)


if __name__ == "__main__":
    main(int(sys.argv[3]), int(sys.argv[4]))
