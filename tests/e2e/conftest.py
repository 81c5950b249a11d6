"""Ends the jobs that a test has started by tests/e2e/jobs.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.jobs import STARTED, Carrier


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    while STARTED:
        job = STARTED.pop()
        if job.state not in ("FINISHED", "CANCELLED", "FAILED"):
            job.cancel()


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    """Both carriers, one after the other. A test that needs only one of them is parametrised with LOCAL or by
    `@pytest.mark.parametrize("carrier", [...], indirect=True)`; the parameter "ray" then carries the mark `ray`."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return Carrier(local=request.param == "local")
