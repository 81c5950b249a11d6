"""Ends forks that a user's function has made, and that come out of the function as the worker would.

Such a fork shares the worker's connections and open files. It must never write to a sink, remove the worker's files, or
speak for the worker. A fork that stays in the user's function, as a pool of multiprocessing does, is left alone.
"""

from __future__ import annotations

import os


def end_forks(process: int) -> None:
    """Ends this process at once unless it is the one with this id. Called where a user's function has returned."""
    if os.getpid() != process:
        os._exit(1)
