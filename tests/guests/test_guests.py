"""What runs in guests with software RoCE: the guests themselves, and what `inside` tests in them."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from tests.guests import packages
from tests.guests.guest import PYTHON, Guests

#: A watchdog: an emulated processor is slow, and so is a busy machine.
LIMIT_S = 400.0
#: Of three guests with jobs, which take a minute on a machine that does nothing else.
JOBS_LIMIT_S = 1200.0


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


@pytest.mark.skipif(sys.version_info[:2] != PYTHON, reason="guests run jobs with the native core of their own Python")
@pytest.mark.timeout(JOBS_LIMIT_S + 60)
def test_a_job_with_a_tree_over_rdma_is_exact_when_a_relay_and_a_worker_are_killed(tmp_path: Path) -> None:
    """The same guests then say how many records a second the tree carries, over RDMA and over TCP."""
    said: list[str] = []
    command = ["python3", "-m", "tests.guests.job", "exact", "rdma", "tcp"]
    guests = Guests([command] * 3, jobs=True, shared=tmp_path, line=lambda n, line: said.append(f"[{n}] {line}"))
    ended = guests.run(JOBS_LIMIT_S)
    story = "\n".join(said)
    assert [one.status for one in ended] == [0, 0, 0], story + "".join(one.console[-1000:] for one in ended)
    exact, rdma, tcp = (json.loads(line) for line in ended[0].output.splitlines() if line.startswith('{"part"'))
    count = exact["limit"]
    assert max(exact["read"]) < count, "records came after the kills"
    assert exact["restarts"] == 1, story
    arrived, sums = json.loads((tmp_path / "exact.json").read_text())
    assert sorted(arrived) == [
        [guest, number, hashlib.md5((hashlib.sha256(b"%d" % number).hexdigest() * 8).encode()).hexdigest()]
        for guest in ("1", "2")
        for number in range(count)
    ]
    assert sorted(sums) == [[key, 2 * sum(range(key, count, 97))] for key in range(97)]
    for part, carries in ((exact, "RDMA, "), (rdma, "RDMA, "), (tcp, "TCP, ")):
        assert part["transports"], story
        assert all(why.startswith((carries, "Shared memory, ")) for why in part["transports"]), story
    assert "it sends over TCP from now on" not in story
    print({part["part"]: part["records_per_s"] for part in (rdma, tcp)})
