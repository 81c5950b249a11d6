"""What tests of several folders share: one Ray cluster a session, which outlives the jobs run on it, and how tests are
dealt out where `make test JOBS=2` asks for several processes: those that need the cluster to one, those that need
Spark's JVM to one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The tests of these folders run in one process, one after the other; others wherever there is time for them.
TOGETHER = {"e2e": "ray", "docs": "ray", "benchmarks": "ray", "apps": "ray", "actors": "ray", "bridge": "spark"}


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that have to run in the same process."""
    here = Path(__file__).parent
    for item in items:
        group = TOGETHER.get(item.path.relative_to(here).parts[0]) if item.path.is_relative_to(here) else None
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Epochs of the tests' jobs, in this process and in others, are saved where the tests are, not at the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster with 16 CPUs, joined by this process, as if somebody else had started it; its address."""
    import ray

    from penstock.actors.cluster import NAMESPACE

    ray.init(
        address="local",
        num_cpus=16,
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=128 * 1024 * 1024,
        logging_level="warning",
    )
    address: str = ray.get_runtime_context().gcs_address
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = address  # for the drivers that tests start
    yield address
    if before is None:
        del os.environ["RAY_ADDRESS"]
    else:
        os.environ["RAY_ADDRESS"] = before
    ray.shutdown()


@pytest.fixture(scope="session")
def fresh_name() -> Callable[[], str]:
    """Names for flows that no other test uses."""
    numbers = itertools.count()
    return lambda: f"test-{next(numbers)}"
