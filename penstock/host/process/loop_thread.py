"""The settings that the main thread of a worker's or a relay's process makes before it runs its loop."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>; the argument is in ns


def prepare_loop_thread() -> None:
    """Lets signals end this process, and this thread wake up on time. Must be called in the main thread."""
    # As SIGKILL does, so that the job recovers. Ray and Python turn them into exceptions, which would come out of the
    # user's function that is running, and would be taken for its error.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # Timed waits end when they are due. By default the kernel adds up to 50 us, which shows in the latency of every
    # paced record.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    # How long a control thread waits for the interpreter beside a busy loop, several times in each call.
    sys.setswitchinterval(0.001)
