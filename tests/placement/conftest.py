"""The simulated cluster that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.placement import world


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], None]]:
    """Calls a test with the World (tests/placement/world.py), in the process that has it."""
    # Ray's sockets lie in it, and a socket's path may have 107 characters: pytest's own folders are too deep.
    with (
        TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder,
        world.elsewhere(request.module, Path(folder)) as call,
    ):
        yield call
