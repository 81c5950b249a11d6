"""What tests of several folders share: one Ray cluster a process, and one Spark session."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests import planting, scheduling
from tests.tiers import tier_of

if TYPE_CHECKING:
    from penstock.bridge.session import Session
    from tests.namespaces.hosts import Hosts

# `make test` tries so many examples of each property, others each time; `make campaign-properties` tries thousands. How
# long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "penstock",
    max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "30")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("penstock")

# A call of Ray's in a process that has joined no cluster fails, and does not start one that nobody has asked for. Ray
# reads it when it is imported; the programs that tests start, and their workers, inherit it.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# The autoscaler of a cluster has nothing to do here, and need not look for it every five seconds.
os.environ.setdefault("AUTOSCALER_UPDATE_INTERVAL_S", "60")

# The tests' queries are short: the JVM's optimising compiler and its parallel collector would take more of the two
# cores than they save.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData")


def pytest_configure(config: pytest.Config) -> None:
    """Plant the fault that `make campaign-planted` asks for, before any test is imported."""
    if fault := os.environ.get(planting.VARIABLE):
        stack = contextlib.ExitStack()
        stack.enter_context(planting.planted(fault))
        config.add_cleanup(stack.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal the tests out to several processes by the fixtures that they share."""
    return scheduling.ByFixture(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=("first", "second", "all"), default="all", help="which tests run (tests/tiers.py; all)"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests of the other tier. Marks the tests that use the cluster with `ray`, before `-m` chooses."""
    tier = config.getoption("--tier")
    if tier != "all":
        of_other = [item for item in items if tier_of(item.nodeid) != tier]
        config.hook.pytest_deselected(items=of_other)
        items[:] = [item for item in items if tier_of(item.nodeid) == tier]
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """Gives the tests that use the cluster other names while pytest-xdist tells its scheduler the names of all tests.

    What thousands of tests consist of stays to the end: the garbage collector need not look through it each time.
    """
    items = session.items
    if hasattr(session.config, "workerinput"):  # this is one of several processes
        session.items = [_Named(f"{item.nodeid}{scheduling.CLUSTER}") if uses_cluster(item) else item for item in items]  # type: ignore[misc]
    try:
        yield
    finally:
        session.items = items
    gc.collect()
    gc.freeze()


class _Named:
    """A test of which only the name is asked."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def uses_cluster(item: pytest.Item) -> bool:
    """Whether a test uses the fixture `cluster`. A parameter that is marked `ray` stands for a test that asks for the
    fixture when it runs."""
    marks = getattr(getattr(item, "callspec", None), "marks", ())
    return "cluster" in getattr(item, "fixturenames", ()) or any(mark.name == "ray" for mark in marks)


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Epochs of the tests' jobs, in this process and in others, are saved where the tests are, not at the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster with 16 CPUs and other resources, joined by this process, as if somebody else had started it; its
    address."""
    import ray

    from penstock.actors.cluster import NAMESPACE

    ray.shutdown()  # a test that has looked for jobs may have joined a cluster of somebody else
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=2,  # nobody uses them but to reserve them
        resources={"fpga": 3},
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


_spark = contextlib.ExitStack()  # holds the session until the last test of those that share it has run
_sessions: list[Session] = []


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the Spark session is started: relative paths of its queries begin there."""
    return tmp_path_factory.mktemp("spark")


@pytest.fixture
def spark_session(spark_folder: Path) -> Session:
    """A PySpark session with two cores. It takes ten seconds to start, and a process has only one: the tests that
    tests/scheduling.py names in SPARK share it."""
    from penstock.bridge.session import SparkOptions, open_session

    pytest.importorskip("pyspark", reason="PySpark is not installed")
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("there is no Java here")
    if not _sessions:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(spark_folder)
            _sessions.append(_spark.enter_context(open_session(SparkOptions(kind="pyspark", cores=2))))
    return _sessions[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the session behind the last test that shares it: others start sessions of their own."""
    if nextitem is None or not nextitem.nodeid.startswith(scheduling.SPARK):
        _sessions.clear()
        _spark.close()


@pytest.fixture
def new_hosts() -> Iterator[Callable[[int], Hosts]]:
    """Makes hosts with networks, shared memory and processes of their own (tests/namespaces/hosts.py), which end
    with the test. Who may not make them skips the test."""
    from tests.namespaces import spaces
    from tests.namespaces.hosts import Hosts

    if reason := spaces.why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(Hosts(count))


@pytest.fixture(scope="session")
def fresh_name() -> Callable[[], str]:
    """Names for flows that no other test uses."""
    numbers = itertools.count()
    return lambda: f"test-{next(numbers)}"
