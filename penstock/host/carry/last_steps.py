"""The steps of a job's end. Drivers wait for the end without a time limit, so neither an error nor a store that hangs
may keep the job from ending."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def anyway(job: str, step: Callable[[], object]) -> None:
    """Does a step. An error is logged, and the other steps follow."""
    try:
        step()
    except Exception:
        logger.exception("job %s: a step of ending the job failed; the other steps follow", job)


def in_time(job: str, step: Callable[[], object], limit_s: float) -> bool:
    """Does a step in another thread, and waits for it up to a limit. Returns whether it is done."""
    thread = threading.Thread(target=anyway, args=(job, step), name="penstock-last-step", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()
