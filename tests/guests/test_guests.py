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


def test_rdma_passes_its_tests_and_loses_nothing_when_peers_are_stopped_killed_and_cut_off() -> None:
    """One guest runs the conformance suite of all transports and the other one what only RDMA does. Then they are each
    other's peers."""
    suite, torture = ("python3", "-m", "tests.guests.suite"), ("--", "30", "1", "1")
    commands = [
        [*suite, "tests/transport/test_conformance.py", *torture],
        [*suite, "tests/transport/test_rdma.py", "-k", "not missing", *torture],
    ]
    said: list[str] = []
    ended = Guests(commands, line=lambda number, line: said.append(f"[{number}] {line}")).run(LIMIT_S)
    assert [one.status for one in ended] == [0, 0], "\n".join(said) + ended[0].console[-2000:]
    for one, least in zip(ended, (20, 5), strict=True):
        assert "skipped" not in one.output
        assert int(one.output.split(" passed")[0].split()[-1]) >= least
    assert "have arrived from the stopped process" in ended[1].output
