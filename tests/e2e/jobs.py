"""Jobs that end with their tests (tests/e2e/conftest.py sees to it), whatever becomes of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import penstock as ps

STARTED: list[Any] = []


def run(flow: ps.Flow, **options: Any) -> Any:
    """A job that ends with its test."""
    job = ps.run(flow, **options)
    STARTED.append(job)
    return job


@dataclass(frozen=True)
class Carrier:
    """What the jobs of a test run on: Ray, or processes of the test's own process."""

    local: bool

    def run(self, flow: ps.Flow, **options: Any) -> Any:
        """A job that ends with its test."""
        return run(flow, local=self.local, **options)
