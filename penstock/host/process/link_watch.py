"""In a worker: tells the JobMaster which peers do not answer, whenever that changes.

The kernel notices the silence (transport/peer_links.py), so this thread sends nothing to peers, and nothing to the
JobMaster while all goes well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.runtime.transport.base import SilentLink

# The time between two looks.
_LOOK_S = 0.5


def watch_links(
    silent_links: Callable[[], list[SilentLink]],
    tell: Callable[[list[SilentLink]], object],
    over: threading.Event,
    look_s: float = _LOOK_S,
) -> None:
    """Starts a thread that tells which links are silent, whenever these are others than before. It ends when `over` is
    set."""

    def watch() -> None:
        told: list[SilentLink] = []
        while not over.wait(look_s):
            found = silent_links()
            if found != told:
                tell(found)
                told = found

    threading.Thread(target=watch, name="penstock-links", daemon=True).start()
