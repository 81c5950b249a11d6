"""Decides which strangers are named in the log: those that connect and do not prove that they belong to the job.

Each machine is told once in a while, and only so many machines at a time. So a stranger, or many of them, cannot fill
the log or the memory.
"""

from __future__ import annotations

import threading
import time

_TOLD_S = 600.0
_TOLD_MAX = 100


def refusal(error: Exception) -> str:
    """Returns why a connection was not let in, for a sentence that begins with who has connected. One that ends, or
    says nothing more, in the middle of the handshake may be of a process of the job whose machine has just gone."""
    import ssl  # most jobs refuse nobody

    if isinstance(error, EOFError | ConnectionError | TimeoutError | ssl.SSLEOFError):
        return (
            "and was gone or silent before it had proved that it belongs to the job. A process of the job that was cut "
            "off looks like this, and a stranger that only tries the port"
        )
    return "and was refused, because it has not proved that it belongs to the job"


class Told:
    """The machines that have been named in the log. Any thread may ask."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._lock = threading.Lock()

    def may_tell(self, machine: str) -> bool:
        """Returns whether a machine should be named in the log now, and takes it as named then."""
        now = time.monotonic()
        with self._lock:
            told = self._at.get(machine)
            if told is not None and now < told + _TOLD_S:
                return False
            if told is None and len(self._at) >= _TOLD_MAX:
                self._at = {one: at for one, at in self._at.items() if now < at + _TOLD_S}
                if len(self._at) >= _TOLD_MAX:
                    return False
            self._at[machine] = now
            return True
