"""Finds out whether all machines of a job see the directories that they have to share: the job's store, and the folders
of its sinks. A job must never begin that could not continue on another machine, or whose results would lie scattered
over several machines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from penstock.host.process.node_agent import NodeLine, Sees
from penstock.runtime.errors import PenstockError, StoreError
from penstock.runtime.operators.ends import Write
from penstock.runtime.program.plan import Plan
from penstock.runtime.storage.filesystems import is_url


def check_shared(plan: Plan, store: str | None, lines: Mapping[str, NodeLine]) -> None:
    """Raises StoreError when a machine at the end of `lines` does not see a directory that exists here. `store`: the
    directory of the job's store; None when the job has no store, or the store is none."""
    if store is not None:
        _check(
            store,
            f"the checkpoint store {store}",
            'give a store that all machines reach, checkpoints="s3://bucket/prefix" or a directory of a network file '
            "system that has the same path on all of them (--checkpoints on the command line)",
            lines,
        )
    for chain in plan.chains:
        for operator in chain.operators:
            if isinstance(operator, Write) and (place := operator.sink.fills) is not None and not is_url(place):
                _check(
                    place,
                    f"the directory {place}, which sink {operator.name!r} fills,",
                    "give the sink a URL such as s3://bucket/prefix, or a directory of a network file system that has "
                    "the same path on all of them",
                    lines,
                )


def _check(directory: str, what: str, remedy: str, lines: Mapping[str, NodeLine]) -> None:
    if not os.path.isdir(directory):
        return  # whoever makes it will say what is wrong with it
    text = os.urandom(16).hex()
    path = os.path.join(directory, f".penstock-seen-{text}")
    try:
        with open(path, "x") as file:
            file.write(text)
        blind = [line.name for line in lines.values() if not _sees(line, path, text)]
    finally:
        with suppress(OSError):
            os.unlink(path)
    if blind:
        raise StoreError(
            f"{what} is a directory of the JobMaster's machine that {' and '.join(blind)} cannot see. The job runs on "
            f"several machines, and continues on any of them when another one is lost: {remedy}, or let all workers "
            "run on one machine"
        )


def _sees(line: NodeLine, path: str, text: str) -> bool:
    found = line.ask(Sees(path, text))
    if found is None:
        raise PenstockError(line.refusal() or f"node {line.name} does not answer")
    return bool(found)
