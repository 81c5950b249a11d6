"""Faults to plant that only nodes and the connections between them can show: entries of the table of tests/planting.py.
The simulated cluster must find all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from penstock.host.decide.broken_links import BrokenLinks
from penstock.host.decide.death import Death
from penstock.host.decide.job_host import JobHost
from penstock.host.decide.worker_lives import LifeState
from penstock.runtime.exchange.delivery import Delivery
from penstock.runtime.transport import tcp
from penstock.runtime.transport.framing import FrameDecoder
from penstock.runtime.transport.send_stream import SendStream
from penstock.runtime.transport.tcp import TcpTransport
from tests.epochs.nodes import Nodes
from tests.epochs.sim import EpochCluster, Faults
from tests.planting import Seeds, planted_fault

STREAM = "penstock/runtime/transport/send_stream.py"
TCP = "penstock/runtime/transport/tcp.py"


def _several(faults: Faults) -> bool:
    return faults.nodes > 1


def _breaks(faults: Faults) -> bool:
    return faults.nodes > 1 and faults.breaks + faults.cuts > 0


def _is_cut_partly(faults: Faults) -> bool:
    return faults.partial_cuts > 0 and faults.kills < 5


def _is_cut_partly_and_pauses(faults: Faults) -> bool:
    pauses = faults.pauses > 1 and faults.pause_s > faults.node_timeout_s
    return pauses and faults.partial_cuts + faults.cuts > 3 and faults.nodes > 2


def _is_lost(faults: Faults) -> bool:
    return faults.nodes > 1 and faults.cuts + faults.node_pauses > 0 and faults.cut_s > faults.node_timeout_s


def _patch(owner: Any, name: str, new: Any) -> Any:
    return mock.patch.object(owner, name, new)


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


@planted_fault(STREAM, Seeds(3, _breaks))
def _forgets_what_was_under_way() -> Any:
    """A connection that takes another's place begins with what comes next, so that the last messages are forgotten."""
    answered = SendStream.answered

    def forgets(self: SendStream, data: bytes) -> None:
        first = not self.resumed
        answered(self, data)
        if first and self.resumed:
            self.written = self.region.head

    def any_number(self: FrameDecoder, length: int, task: int, number: int, expected: int) -> None:
        """Nothing is missed."""

    return _both(_patch(SendStream, "answered", forgets), _patch(FrameDecoder, "_check", any_number))


@planted_fault(TCP, Seeds(29, _breaks))
def _sends_twice_after_a_cut() -> Any:
    """A receiver that is connected to anew says that it lacks its last message, which then comes twice."""
    begin, decode = tcp.Incoming.begin, FrameDecoder.decode
    last: dict[int, int] = {}

    def begin_before(self: Any, capacity: int) -> None:
        position, number = self.decoder.position, self.decoder.number
        if number and id(self.decoder) in last and not self._owner._closed:
            self.decoder.position = last[id(self.decoder)]
            self.decoder.number -= 1
        begin(self, capacity)
        assert position >= self.decoder.position

    def decode_and_note(self: Any, view: Any, start: int, stop: int, messages: list[Any]) -> int:
        known = len(messages)
        at = decode(self, view, start, stop, messages)
        if len(messages) > known:
            last[id(self)] = self.position - len(messages[-1][1]) - 16
        return at

    return _both(_patch(tcp.Incoming, "begin", begin_before), _patch(FrameDecoder, "decode", decode_and_note))


@planted_fault(TCP, Seeds(2, _several))
def _the_dropped_are_heard() -> Any:
    """A process that was dropped stays connected, and what it sends is taken for what its successor does."""

    def drop(self: TcpTransport, workers: Any) -> dict[int, int]:
        return {}

    return _patch(TcpTransport, "drop", drop)


@planted_fault("penstock/host/decide/job_host.py", Seeds(99, _is_lost))
def _silent_workers_are_taken_back() -> Any:
    """A worker that was lost with its node is taken back when it is heard before its successor is started."""
    died, said = JobHost.process_died, JobHost.said
    lost: set[tuple[int, int, int]] = set()

    def died_and_note(self: JobHost, worker: int, incarnation: int, death: Death, now: float) -> Any:
        if death.with_node:
            lost.add((id(self), worker, incarnation))
        return died(self, worker, incarnation, death, now)

    def taken_back(self: JobHost, worker: int, incarnation: int, what: Any, now: float) -> Any:
        life = self.lives._lives[worker]
        known = (id(self), worker, incarnation) in lost and incarnation == life.incarnation
        if known and life.state == LifeState.NONE and self.end is None:
            life.move("start")
            life.move("ready")
            self.lives.running.add(worker)
            generations = self._generations
            generations._starts = [start for start in generations._starts if start[1] != worker]
            self._obey(self.coordinator.started(worker), now)
        return said(self, worker, incarnation, what, now)

    return _both(_patch(JobHost, "process_died", died_and_note), _patch(JobHost, "said", taken_back))


@planted_fault("penstock/actors/ray_processes.py", Seeds(5, _is_lost))
def _one_of_a_lost_node_is_not_told() -> Any:
    """When a node is lost, the death of one of its workers is not told to the JobHost."""
    lost = EpochCluster._lost

    def forgets(self: EpochCluster, process: Any) -> None:
        others = [other for other in self._all if other.node is process.node and other.with_node]
        if not process.with_node or others[0] is not process:
            lost(self, process)

    return _patch(EpochCluster, "_lost", forgets)


@planted_fault(
    "penstock/runtime/exchange/delivery.py", Seeds(61, lambda faults: faults.nodes > 1 and faults.apart_s > 1)
)
def _clocks_are_taken_as_they_are() -> Any:
    """Stamps of other machines are not translated."""
    return _patch(Delivery, "clocks", lambda self, ahead_ns: None)


@planted_fault("penstock/actors/nodes.py", Seeds(47, _is_lost))
def _started_where_the_node_is_lost() -> Any:
    """The next process of a worker starts on the node that it had, although the node is lost."""

    def place(self: Nodes, worker: int) -> Any:
        node = self._of[worker]
        return node if self.hears(node) and self.is_heard(node) and node not in self.dead else None

    return _patch(Nodes, "place", place)


@planted_fault("penstock/host/decide/job_host.py", Seeds(1660, _is_cut_partly))
def _silent_links_are_not_heard_of() -> Any:
    """Nobody does anything about links that are silent while both ends reach the JobMaster."""
    return _patch(JobHost, "links_said", lambda self, worker, incarnation, links, now: self._settled(now))


@planted_fault("penstock/host/decide/broken_links.py", Seeds(143, _is_cut_partly))
def _the_first_look_gives_up() -> Any:
    """A machine is given up as soon as a link is silent."""
    return _patch(BrokenLinks, "_limit", lambda self, reports: 0.0)


@planted_fault("penstock/host/decide/broken_links.py", Seeds(143, _is_cut_partly))
def _links_that_answer_again_stay_broken() -> Any:
    """That a link answers again is not noted."""
    said = BrokenLinks.said

    def only_silence(self: BrokenLinks, worker: int, links: Any, *rest: Any) -> None:
        if links:
            said(self, worker, links, *rest)

    return _patch(BrokenLinks, "said", only_silence)


@planted_fault("penstock/host/decide/broken_links.py", Seeds(143, _is_cut_partly))
def _the_machine_of_the_jobmaster_is_given_up() -> Any:
    """Which machine has the JobMaster is not looked at."""
    chosen = BrokenLinks._chosen

    def any_machine(self: BrokenLinks, *arguments: Any) -> str:
        with _patch(self, "_master", "none"):
            return chosen(self, *arguments)

    return _patch(BrokenLinks, "_chosen", any_machine)


@planted_fault("penstock/host/decide/broken_links.py", Seeds(717, _is_cut_partly_and_pauses))
def _pauses_of_the_jobmaster_count() -> Any:
    """The time for which the JobMaster was paused counts as silence of links."""
    look = BrokenLinks.look

    def counts_all(self: BrokenLinks, *arguments: Any, **more: Any) -> Any:
        with _patch(self, "_period_s", 1e9):
            return look(self, *arguments, **more)

    return _patch(BrokenLinks, "look", counts_all)
