"""What runs in guests with software RoCE: the guests themselves, and what `inside` tests in them."""

from __future__ import annotations

import pytest

from tests.guests import packages
from tests.guests.guest import Guests

#: A watchdog: an emulated processor is slow, and so is a busy machine.
LIMIT_S = 400.0

OPEN_DEVICE = """
import os, sys
import pyverbs.enums as enums
from pyverbs.device import Context
context = Context(name="rxe0")
assert context.query_port(1).state == enums.IBV_PORT_ACTIVE
print("active at", os.environ["GUESTS"])
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    try:
        packages.need()
    except packages.Missing as error:
        pytest.skip(str(error))


def test_a_guest_has_an_active_device_and_hands_on_output_and_status() -> None:
    (ended,) = Guests([["python3", "-c", OPEN_DEVICE]]).run(LIMIT_S)
    assert (ended.status, ended.output.split()) == (7, ["active", "at", "10.99.0.1"]), ended.console


def test_rdma_passes_the_conformance_suite_of_all_transports() -> None:
    suite = ["python3", "-m", "tests.guests.suite", "tests/transport/test_conformance.py"]
    (ended,) = Guests([suite]).run(LIMIT_S)
    assert ended.status == 0, ended.output + ended.console
    assert "skipped" not in ended.output
    assert int(ended.output.split(" passed")[0].split()[-1]) > 20
