"""Loads a job's program in a process of the job.

A program fails to load when a module of the user's is missing on a machine, or raises when it is imported there.
"""

from __future__ import annotations

from typing import Any

from penstock.runtime.errors import ProgramNotLoaded, describe
from penstock.runtime.records.pickling import join
from penstock.runtime.records.userfunc import user_line


def load_program(data: bytes, process: str) -> Any:
    """Returns the result of `pickling.join`. Raises ProgramNotLoaded when the user's modules cannot be imported here.
    `process`: the name of this process, for the error."""
    try:
        return join(data)
    except (Exception, SystemExit) as error:  # a user's module may raise anything when it is imported
        line = user_line(error)
        raise ProgramNotLoaded(
            f"the job's program cannot be loaded in {process}: {describe(error)}{f' ({line})' if line else ''}. Each "
            "process of the job imports the modules that the program has imported, from the program's sys.path. "
            "Install the missing module on all machines of the job, or correct what it does when it is imported."
        ) from error
