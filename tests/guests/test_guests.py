"""What runs in guests with software RoCE: the guests themselves, and what `inside` tests in them."""

from __future__ import annotations

import pytest

from tests.guests import packages
from tests.guests.guest import Guests

#: A watchdog: an emulated processor is slow, and so is a busy machine.
LIMIT_S = 400.0


@pytest.fixture(autouse=True)
def _possible() -> None:
    try:
        packages.need()
    except packages.Missing as error:
        pytest.skip(str(error))


def test_rdma_passes_the_conformance_suite_of_all_transports_and_its_own_tests() -> None:
    tests = ("tests/transport/test_conformance.py", "tests/transport/test_rdma.py")
    suite = ["python3", "-m", "tests.guests.suite", *tests, "-k", "not missing"]
    (ended,) = Guests([suite]).run(LIMIT_S)
    assert ended.status == 0, ended.output + ended.console
    assert "skipped" not in ended.output
    assert int(ended.output.split(" passed")[0].split()[-1]) > 20


def test_rdma_loses_nothing_when_peers_are_stopped_killed_and_cut_off() -> None:
    torture = ["python3", "-m", "tests.guests.torture", "60", "1"]
    said: list[str] = []
    ended = Guests([torture, torture], line=lambda number, line: said.append(f"[{number}] {line}")).run(LIMIT_S)
    assert [one.status for one in ended] == [0, 0], "\n".join(said) + ended[0].console[-2000:]
    assert "have arrived from the stopped process" in ended[1].output
