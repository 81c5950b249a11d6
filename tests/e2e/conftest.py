"""One Ray cluster for the end-to-end tests; flows in it are run with `penstock.run` as a user would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster of this test session, connected; its address."""
    import ray

    from penstock.actors import cluster

    cluster.connect("local", cpus=16)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="session")
def fresh_name() -> Callable[[], str]:
    """Names for flows that no other test uses."""
    numbers = itertools.count()
    return lambda: f"test-{next(numbers)}"
