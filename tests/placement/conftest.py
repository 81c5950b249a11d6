"""The simulated cluster that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.placement import world


@pytest.fixture(scope="module")
def elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Any], None]]:
    """Calls a test with the World (tests/placement/world.py), in the process that has it."""
    with world.elsewhere(request.module, tmp_path_factory.mktemp("r")) as call:
        yield call
