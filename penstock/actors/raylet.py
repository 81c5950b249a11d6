"""Ends a process of a job when the raylet that has started it has died.

Ray's own check does so too, but lets a process that is in a call live on for more than a minute. A JobMaster would hold
the store of its job for so long, and nobody could resume the job. A raylet that is only paused ends nothing.
"""

from __future__ import annotations

import logging
import os
import select
import threading

logger = logging.getLogger(__name__)


def end_with_raylet() -> None:
    """In an actor, starts a thread that ends this process when its raylet has died. Does nothing in a process that no
    raylet has started."""
    pid = os.environ.get("RAY_RAYLET_PID")  # Ray sets it for its workers
    if pid is None:
        return
    try:
        raylet = os.pidfd_open(int(pid))
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # the kernel is an old one, and Ray's own check has to do
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(raylet, select.POLLIN)
        poll.poll()
        logger.error("the raylet of this machine (process %s) has died, and this process ends", pid)
        os._exit(1)

    threading.Thread(target=wait, name="penstock-raylet", daemon=True).start()
