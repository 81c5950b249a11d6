"""How the suite's tests are dealt out to several processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.scheduling import CLUSTER, CLUSTERS, ByFixture


class Process:
    """A process of the suite that runs what it is given at once."""

    shutting_down = False
    gateway = SimpleNamespace(id="")

    def __init__(self) -> None:
        self.given: list[int] = []

    def send_runtest_some(self, tests: list[int]) -> None:
        self.given += tests

    def shutdown(self) -> None:
        self.shutting_down = True


def dealt(tests: list[str]) -> list[set[str]]:
    """The tests that each of four processes has run, which take turns."""
    config: Any = SimpleNamespace(getvalue=lambda name: 4 * ["popen"], option=SimpleNamespace())
    scheduler, processes = ByFixture(config), [Process() for _ in range(4)]
    for process in processes:
        scheduler.add_node(process)  # type: ignore[arg-type]
        scheduler.add_node_collection(process, tests)  # type: ignore[arg-type]
    scheduler.schedule()
    ran: list[set[str]] = [set() for _ in processes]
    while not all(process.shutting_down and not process.given for process in processes):
        for process, names in zip(processes, ran, strict=True):
            if process.given:
                number = process.given.pop(0)
                names.add(tests[number])
                scheduler.mark_test_complete(process, number)  # type: ignore[arg-type]
    return ran


def test_two_processes_run_what_uses_the_cluster_and_all_the_rest() -> None:
    using = [f"tests/a/test_{i}.py::test_it{CLUSTER}" for i in range(20)]
    others = [f"tests/b/test_{i}.py::test_it" for i in range(60)]
    ran = dealt(using + others)
    assert sorted(name for names in ran for name in names) == sorted(using + others)
    assert sum(not names.isdisjoint(using) for names in ran) == CLUSTERS
    assert all(not names.isdisjoint(others) for names in ran), "who has run all that uses the cluster goes on"


def test_when_only_tests_are_left_that_use_the_cluster_all_processes_run_them() -> None:
    ran = dealt([f"tests/a/test_{i}.py::test_it{CLUSTER}" for i in range(20)])
    assert all(ran)
