"""What the JobHost decides about links between workers that are silent. Here each of four workers is on a machine, and
the JobMaster is on that of worker 0."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.host.decide.broken_links import BrokenLinks, GivenUp, Station, pairs_of
from penstock.host.decide.commands import EndJob, GiveUpMachine
from penstock.host.decide.death import Death
from penstock.host.process.link_watch import watch_links
from penstock.jobs.progress import line, links, processes
from penstock.runtime.program.flow import Flow
from penstock.runtime.sinks.call import Null
from penstock.runtime.sources.memory import Memory
from penstock.runtime.status import JobStatus, LinkStatus
from penstock.runtime.transport.base import SilentLink
from tests.host.test_job_host import Job

LIMIT_S, REFUSED_S = 4.0, 60.0
STATIONS = {worker: Station(f"m{worker}", f"host-{worker}", f"10.0.0.{worker}", f"w{worker}/1") for worker in range(4)}
ALL = {frozenset((f"m{a}", f"m{b}")) for a in range(4) for b in range(a)}


def to(peer: int, *, worked: bool = True, refused: bool = False, process: str | None = None) -> SilentLink:
    """A peer that has not answered for a second."""
    return SilentLink(peer, process or f"w{peer}/1", f"10.0.0.{peer}:4000", worked, refused, 1.0)


class Links:
    """BrokenLinks with a clock."""

    def __init__(self, ports: tuple[int, int] = (0, 0)) -> None:
        self.now = 100.0
        self.stations = dict(STATIONS)
        self.of = BrokenLinks(LIMIT_S, REFUSED_S, "m0", ports)
        self.runs = True
        self.needed = ALL

    def said(self, worker: int, *silent: SilentLink) -> None:
        self.of.said(worker, silent, self.stations, self.now)

    def passes(self, seconds: float) -> list[GivenUp]:
        """Looks when it is due, for so long. Returns what is given up."""
        found: list[GivenUp] = []
        until = self.now + seconds
        while (due := self.of.due()) is not None and due <= until:
            self.now = due
            given_up = self.of.look(self.needed, self.now, runs=self.runs)
            assert not isinstance(given_up, str), given_up
            found += given_up
        self.now = until
        return found


def test_a_link_that_stays_silent_gives_up_the_side_with_more_broken_links() -> None:
    links = Links()
    links.said(1, to(2))
    links.said(2, to(1), to(3))
    assert links.passes(LIMIT_S - 0.1) == []
    (one,) = links.passes(0.2)
    assert one == GivenUp(
        "m2",
        "its node host-2 is given up, because worker 1 on host-1 (10.0.0.1) has not reached worker 2 on host-2 at "
        "10.0.0.2:4000 for 4 s, although both reach the JobMaster: the network between the two machines is cut",
    )
    links.of.over(2)
    assert links.of.due() is None, "nobody is silent any more"


@pytest.mark.parametrize("reporter", [1, 2])
def test_of_two_sides_that_are_alike_the_later_is_given_up(reporter: int) -> None:
    links = Links()
    links.said(reporter, to(3 - reporter))
    assert [one.machine for one in links.passes(LIMIT_S)] == ["m2"]


def test_the_side_with_fewer_workers_is_given_up() -> None:
    links = Links()
    links.stations[3] = Station("m2", "host-2", "10.0.0.2", "w3/1")
    links.said(2, to(1))
    assert [one.machine for one in links.passes(LIMIT_S)] == ["m1"]


def test_the_machine_of_the_jobmaster_is_never_given_up() -> None:
    links = Links()
    links.said(0, to(1), to(2))
    assert [one.machine for one in links.passes(LIMIT_S)] == ["m2", "m1"]


def test_two_cuts_give_up_two_machines_and_one_that_remains_is_given_up_again() -> None:
    links = Links()
    links.stations |= {4: Station("m4", "host-4", "10.0.0.4", "w4/1")}
    links.needed = {frozenset(("m1", "m2")), frozenset(("m3", "m4"))}
    links.said(1, to(2))
    links.said(3, to(4))
    assert [one.machine for one in links.passes(LIMIT_S)] == ["m4", "m2"]
    links.of.over(4)
    assert [one.machine for one in links.passes(LIMIT_S)] == ["m2"]


def test_a_link_that_answers_in_time_ends_the_matter() -> None:
    links = Links()
    for _ in range(3):
        links.said(1, to(2))
        assert links.passes(LIMIT_S - 0.1) == []
        links.said(1)
        assert links.of.due() is None
        assert links.of.status(links.now) == []
        assert links.passes(1.0) == []


def test_a_pause_of_the_jobmaster_is_no_silence_of_links() -> None:
    links = Links()
    links.said(1, to(2))
    links.now += 100 * LIMIT_S  # and that the link answers again waits to be read
    assert links.of.look(ALL, links.now, runs=True) == []
    links.said(1)
    assert links.passes(LIMIT_S) == []


def test_a_link_that_the_job_does_not_need_is_told_and_nothing_is_given_up() -> None:
    links = Links()
    links.needed = {frozenset(("m0", "m1"))}
    links.said(1, to(2))
    assert links.passes(10 * LIMIT_S) == []
    (told,) = links.of.status(links.now)
    assert told["silent_s"] == pytest.approx(1.0 + 10 * LIMIT_S)
    assert told["machines"] == ["host-1", "host-2"]


def test_the_dead_and_the_processes_of_the_same_machine_do_not_count() -> None:
    links = Links()
    links.stations[3] = Station("m1", "host-1", "10.0.0.1", "w3/1")
    links.said(1, to(2, process="w2/0"), to(3), to(17))
    assert links.of.due() is None
    links.said(1, to(2))
    links.of.over(2)
    assert links.of.due() is None


def test_a_refused_link_has_the_time_in_which_its_dead_peer_would_be_told() -> None:
    links = Links()
    links.said(1, to(2, refused=True))
    assert links.passes(REFUSED_S - 1) == []
    assert [one.machine for one in links.passes(1)] == ["m2"]


@pytest.mark.parametrize(
    ("ports", "remedy"),
    [((20_000, 20_999), "in both directions, to the ports 20000 to 20999"), ((0, 0), "ports=(20000, 20999)")],
)
def test_a_link_that_has_never_worked_fails_the_job_and_says_what_to_open(ports: Any, remedy: str) -> None:
    links = Links(ports)
    links.said(1, to(2, worked=False))
    links.said(2, to(1, worked=False))
    for _ in range(8):
        links.now += LIMIT_S / 8
        found = links.of.look(ALL, links.now, runs=False)
    assert isinstance(found, str)
    assert found.startswith(
        "worker 1 on host-1 (10.0.0.1) has not reached worker 2 on host-2 at 10.0.0.2:4000, and worker 2 on host-2 "
        "(10.0.0.2) has not reached worker 1 on host-1 at 10.0.0.1:4000 since the job began, for 4 s"
    )
    assert "firewall" in found
    assert remedy in found


@pytest.mark.parametrize("how", ["it has worked for another process", "an epoch has completed"])
def test_a_new_process_that_is_cut_off_at_once_does_not_fail_a_job_that_has_run(how: str) -> None:
    links = Links()
    links.runs = how == "an epoch has completed"
    if not links.runs:
        links.said(1, to(2))
        links.said(1)
    links.said(1, to(2, worked=False))
    assert [one.machine for one in links.passes(LIMIT_S)] == ["m2"]


def test_the_links_that_a_plan_needs_are_those_of_its_channels() -> None:
    flow = Flow("job", chaining=False)
    read = flow.read(Memory([1]), name="read", parallelism=2)
    read.map(str, name="one to one", parallelism=2).rebalance().write(Null(), name="last", parallelism=1)
    plan = flow.plan(4)
    at = {"read[0]": 0, "read[1]": 1, "one to one[0]": 0, "one to one[1]": 2, "last": 3}
    placed = {task.number: at.get(plan.task_name(task), 3) for task in plan.tasks}
    machines = {worker: f"m{worker}" for worker in range(4)}
    assert pairs_of(plan, placed, machines) == {frozenset(pair) for pair in (("m1", "m2"), ("m0", "m3"), ("m2", "m3"))}
    assert pairs_of(plan, placed, {**machines, 2: "m3"}) == {frozenset(pair) for pair in (("m1", "m3"), ("m0", "m3"))}
    del machines[3]  # it has died
    assert pairs_of(plan, placed, machines) == {frozenset(("m1", "m2"))}


# --- in the JobHost ---------------------------------------------------------------------------------------------------


def job(**options: Any) -> Job:
    """A job with two workers, on a machine each, whose JobMaster is on a third."""
    made = Job(**options)
    made.now += 1
    return made


def until_it_acts(made: Job) -> list[Any]:
    """Lets the time pass until the host has given up something, or ended. Returns what it commands then."""
    for _ in range(1000):
        due = made.host.due()
        if due is None:
            break
        made.now = max(made.now, due)
        made.take(made.host.tick(made.now))
        if found := [one for one in made.others if isinstance(one, GiveUpMachine | EndJob)]:
            return found
    return []


def test_a_host_gives_up_a_machine_whose_link_is_cut_and_goes_on_when_its_workers_are_lost() -> None:
    made = job(epochs=True)
    host = made.host
    host._completed_at = made.now
    address = host.lives.addresses()[1]
    made.take(host.links_said(0, host.lives.incarnation(0), [to(1, process=address)], made.now))
    status = host.build_status([], {}, 0.0, made.now)
    assert [(one["from"], one["to"]) for one in status["links"]] == [(0, 1)]
    assert until_it_acts(made) == [GiveUpMachine("m1", made.others[-1].reason)]
    restarts = host.coordinator.restarts
    death = Death(made.others[-1].reason, with_node=True)
    made.take(host.process_died(1, host.lives.incarnation(1), death, made.now))
    assert host.coordinator.restarts == restarts + 1
    assert host.build_status([], {}, 0.0, made.now)["links"] == []
    assert not [one for one in until_it_acts(made) if isinstance(one, EndJob)]


def test_a_host_fails_a_job_whose_link_has_never_worked() -> None:
    made = job(epochs=True)
    host = made.host
    address = host.lives.addresses()[1]
    made.take(host.links_said(0, host.lives.incarnation(0), [to(1, worked=False, process=address)], made.now))
    (end,) = until_it_acts(made)
    assert isinstance(end, EndJob)
    assert "A firewall may be closed" in (end.end.error or "")


def test_a_link_is_told_in_the_progress_and_the_status() -> None:
    links_ = [
        LinkStatus(from_=a, to=b, at=f"10.0.0.{b}:4000", machines=[f"h{a}", f"h{b}"], silent_s=3.2, worked=True)
        for a, b in ((1, 2), (2, 1), (1, 3))
    ]
    status = JobStatus(name="job", state="RUNNING", links=links_)
    told = [
        "worker 1 on h1 does not reach worker 2 on h2 at 10.0.0.2:4000, for 3 s",
        "worker 1 on h1 does not reach worker 3 on h3 at 10.0.0.3:4000, for 3 s",
    ]
    assert links(status) == told
    assert line(status).endswith("; ".join(told))
    assert processes(status) == told


def test_a_worker_tells_of_its_links_when_they_change() -> None:
    found: list[list[SilentLink]] = [[], [to(1)], [to(1)], [to(1), to(2)], [], []]
    told: list[list[SilentLink]] = []
    looks = iter(found)
    over = threading.Event()

    def look() -> list[SilentLink]:
        one = next(looks, None)
        if one is None:
            over.set()
            return found[-1]
        return one

    watch_links(look, told.append, over, look_s=0.001)
    assert over.wait(60.0)
    assert told == [found[1], found[3], []]
