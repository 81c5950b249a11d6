"""The simulated cluster that tests/scheduling.py names WORLD for: it takes five seconds of a core to start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.placement import world
from tests.scheduling import WORLD

_open = ExitStack()  # holds the cluster until the last test that shares it has run
_calls: list[Callable[[Any], None]] = []


@pytest.fixture
def elsewhere() -> Callable[[Any], None]:
    """Calls a test with the World (tests/placement/world.py), in the process that has it."""
    if not _calls:
        # Ray's sockets lie in it, and a socket's path may have 107 characters: pytest's own folders are too deep.
        folder = _open.enter_context(TemporaryDirectory(prefix="r", ignore_cleanup_errors=True))
        _calls.append(_open.enter_context(world.elsewhere(Path(folder))))
    return _calls[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or not nextitem.nodeid.startswith(WORLD):
        _calls.clear()
        _open.close()
