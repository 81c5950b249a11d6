"""Which tests one process of the suite runs in a row (`make test`, pytest-xdist): those that share a costly fixture.
What takes long begins first.

Files whose tests share nothing but the session-wide cluster are dealt out test by test, so that no process is left with
a long file at the end. Two processes run all tests that use such a cluster: each process of these tests has a cluster
of its own, which takes time of the cores for as long as the suite runs, also while nobody uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

#: What shares the one Spark session (tests/conftest.py) runs in one process; and what shares a simulated Ray cluster
#: (tests/placement/conftest.py).
SPARK = (
    "tests/bridge/spark/",
    "tests/docs/test_spark_examples.py",
    "tests/e2e/test_spark.py",
)
WORLD = ("tests/placement/test_groups.py", "tests/placement/test_jobs_over_nodes.py")
#: The tests of these files are dealt out one by one: most start processes, and none needs what another has made.
APART = (
    "tests/apps/test_cli.py",
    "tests/docs/test_examples.py",
    "tests/e2e/test_bad_input.py",
    "tests/e2e/test_dual.py",
    "tests/e2e/test_ends.py",
    "tests/e2e/test_in_main.py",
    "tests/e2e/test_migration.py",
    "tests/e2e/test_recovery.py",
    "tests/e2e/test_shapes.py",
    "tests/e2e/test_store_faults.py",
    "tests/epochs/test_simulated.py",
    "tests/guests/test_guests.py",
    "tests/namespaces/test_hosts.py",
    "tests/ring/test_stress.py",
)
#: Ends the name under which the scheduler knows a test that uses the cluster (tests/conftest.py).
CLUSTER = "@cluster"
#: How many processes have a cluster, unless only tests that use it are left.
CLUSTERS = 2

#: What takes longest. A process that began one of these at the end would run on alone when the others have ended.
FIRST = (
    "tests/bridge/spark/",
    "tests/placement/test_groups.py",
    "tests/e2e/test_dual.py::test_windows_",
    "tests/guests/test_guests.py",
    "tests/namespaces/test_jobs.py",
    "tests/e2e/test_pauses.py",
    "tests/apps/test_cli.py::test_resume_",
    "tests/e2e/test_clusters.py",
    "tests/local/test_local_job.py",
    "tests/e2e/test_in_main.py",
    "tests/bridge/test_arrow_raydp.py",
    "tests/bridge/test_lost_executor.py",
    "tests/epochs/test_store_s3.py",
    "tests/epochs/test_store_faults.py",
    "tests/docs/test_examples.py::test_examples",
    "tests/e2e/",
    "tests/namespaces/",
    "tests/ring/test_stress.py",
    "tests/epochs/test_simulated.py",
    "tests/bridge/test_session.py",
    "tests/epochs/test_poison.py",
)


def scope(nodeid: str) -> str:
    """Returns the name of those tests that run in one process, in a row."""
    nodeid = nodeid.removesuffix(CLUSTER)
    for shared in (SPARK, WORLD):
        if nodeid.startswith(shared):
            return shared[0]
    file = nodeid.split("::", 1)[0]
    return nodeid if file in APART else file


def long_first(nodeids: Iterable[str]) -> list[str]:
    """Returns the ids of tests in the order in which they are dealt out. Otherwise the order stays."""

    def place(nodeid: str) -> int:
        return next((i for i, name in enumerate(FIRST) if nodeid.startswith(name)), len(FIRST))

    return sorted(nodeids, key=place)


class ByFixture(LoadScopeScheduling):
    """Deals out what shares something, files or single tests, as the lists above say."""

    _ordered = False

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        self._with_cluster: set[WorkerController] = set()

    def schedule(self) -> None:
        self.config.option.loadscopereorder = False  # it would begin with what has many tests, which are short
        super().schedule()

    def _assign_work_unit(self, node: WorkerController) -> None:
        if not self._ordered:  # the first one; the whole queue is there by now
            self._ordered = True
            for scope in long_first(list(self.workqueue)):
                self.workqueue.move_to_end(scope)
        self.workqueue.move_to_end(self._next_for(node), last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: WorkerController) -> str:
        """Returns the scope that a process is given: one that uses the cluster, as long as there are any, if the
        process has a cluster or is to have one."""
        wanted = node in self._with_cluster or len(self._with_cluster) < CLUSTERS
        scopes = self.workqueue
        chosen = next((scope for scope in scopes if self._needs_cluster(scope) == wanted), next(iter(scopes)))
        if self._needs_cluster(chosen):
            self._with_cluster.add(node)
        return chosen

    def _needs_cluster(self, scope: str) -> bool:
        return any(test.endswith(CLUSTER) for test in self.workqueue[scope])

    def _reschedule(self, node: WorkerController) -> None:
        """Gives a process what it needs to go on: it begins a test when it knows the next one, or that there is none.
        More would lie there while others are idle."""
        if node.shutting_down or node not in self.registered_collections:  # one that replaces another collects first
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        """Forgets a process, and returns the test that it was running if it has crashed: that test has failed, and is
        not run again. The others that it was given go to the front of the queue; another process takes its place."""
        self._with_cluster.discard(node)
        given = self.assigned_work.pop(node)
        left = [(scope, test) for scope, tests in given.items() for test, completed in tests.items() if not completed]
        if not left:
            return None
        (_, crashed), *others = left
        for scope, test in reversed(others):
            self.workqueue.setdefault(scope, {})
            self.workqueue[scope] = {test: False, **self.workqueue[scope]}
            self.workqueue.move_to_end(scope, last=False)
        for process in self.assigned_work:
            self._reschedule(process)
        return crashed.removesuffix(CLUSTER)

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
