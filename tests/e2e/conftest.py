"""Ends the jobs that a test has started by tests/e2e/jobs.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.jobs import STARTED


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    while STARTED:
        job = STARTED.pop()
        if job.state not in ("FINISHED", "CANCELLED", "FAILED"):
            job.cancel()
