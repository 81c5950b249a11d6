"""How the suite's tests are dealt out to several processes."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduling import CLUSTER, CLUSTERS, ByFixture


class Process:
    """A process of the suite. It begins a test when it knows which is next, or that there is none."""

    gateway = SimpleNamespace(id="")

    def __init__(self) -> None:
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, tests: list[int]) -> None:
        assert not self.shutting_down
        self.given += tests

    def shutdown(self) -> None:
        self.shutting_down = True

    def next(self) -> int | None:
        """The test that it runs now."""
        return self.given[0] if len(self.given) > 1 or (self.given and self.shutting_down) else None


def dealt(tests: list[str], crashing: Collection[str] = (), failed: list[str] | None = None) -> list[set[str]]:
    """The tests that each of four processes has run, which take turns, and those that replace the ones in which tests
    crash. Such tests are among what failed."""
    config: Any = SimpleNamespace(getvalue=lambda name: 4 * ["popen"], option=SimpleNamespace())
    scheduler: Any = ByFixture(config)
    alive, ran = [Process() for _ in range(4)], []
    for process in alive:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
        ran.append((process, set[str]()))
    scheduler.schedule()
    while alive:
        before = list(alive), [list(process.given) for process in alive]
        for process, names in list(ran):
            number = process.next() if process in alive else None
            if number is not None and tests[number] in crashing:
                alive.remove(process)
                assert failed is not None
                failed.append(scheduler.remove_node(process))
                alive.append(another := Process())
                ran.append((another, set()))
                scheduler.add_node(another)
                for some in alive[:2]:  # may run on before the new process has collected its tests
                    scheduler._reschedule(some)
                scheduler.add_node_collection(another, tests)
                scheduler.schedule()
            elif number is not None:
                names.add(tests[process.given.pop(0)])
                scheduler.mark_test_complete(process, number)
            elif process in alive and process.shutting_down and not process.given:
                alive.remove(process)
                assert scheduler.remove_node(process) is None
        assert before != (alive, [process.given for process in alive]), "nobody goes on"
    return [names for _, names in ran]


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


def test_no_process_has_more_in_store_than_it_needs() -> None:
    """Two long tests that wait for one process would run alone at the end."""
    config: Any = SimpleNamespace(getvalue=lambda name: 4 * ["popen"], option=SimpleNamespace())
    scheduler: Any = ByFixture(config)
    processes = [Process() for _ in range(4)]
    tests = [f"tests/a/test_{i}.py::test_it" for i in range(20)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    for process in processes * 2:
        assert len(process.given) == 2
        scheduler.mark_test_complete(process, process.given.pop(0))


@pytest.mark.parametrize("crashing", [[0], [5], [39], [3, 4, 5], [36, 37, 38, 39], range(0, 40, 5)], ids=str)
def test_a_test_that_crashes_its_process_fails_and_all_others_run(crashing: Collection[int]) -> None:
    tests = [f"tests/a/test_{i // 3}.py::test_{i}{CLUSTER if i % 2 else ''}" for i in range(40)]
    crash = [tests[i] for i in crashing]
    failed: list[str] = []
    ran = dealt(tests, crash, failed)
    assert sorted(failed) == sorted(name.removesuffix(CLUSTER) for name in crash)
    assert sorted(name for names in ran for name in names) == sorted(set(tests) - set(crash))
