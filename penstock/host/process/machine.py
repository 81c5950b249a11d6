"""Tells processes apart that cannot share memory: those of other machines, and of other containers of this machine."""

from __future__ import annotations

import os


def machine_id() -> str:
    """Returns a text that two processes have in common when one of them can find the other one below /proc, and attach
    to its shared memory there: they run on the same machine since its last start, and number processes alike."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"
