"""Decides which relays a job has, and which peers its workers and relays hear of (docs/papers.md: W2).

A relay is of use on a machine that receives what a task of another machine sends to all. Each life of a relay has a
number of its own, and one that has died is replaced after a pause. Relays only make a job faster, so nothing here may
hold up or end the job, and whoever knows no relay sends without it.

This is a state machine without threads, clock, sockets and Ray. Each event is a method that returns commands. The
JobHost (job_host.py) gives it the events and passes the commands on.

Invariants:

- A relay connects to a worker of its machine only when this worker expects it, and the worker connects to the relay
  only when the relay has confirmed that it is connected to this process of the worker. While a worker expects a relay,
  its inbox stays where it is. Otherwise its inbox could grow without the relay's knowledge, and the relay would write
  into a ring that nobody reads.
- While a worker waits for the relay that it expects, it is told nothing. When this relay dies, the worker is told, so
  that its inbox may grow again.
- Workers are told of a relay only when it and all other relays that they know have confirmed that they know each other.
- Workers are told at once, and relays too, that a relay or a worker is gone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.host.decide.commands import KillRelay, StartRelay
from penstock.host.decide.process_commands import ExpectRelay, TellRelay, UseRelays
from penstock.runtime.backoff import Backoff
from penstock.runtime.exchange.grouping import All
from penstock.runtime.program.plan import Plan
from penstock.runtime.relaying.relay_map import RelayMap
from penstock.runtime.relaying.wire import FIRST_RELAY
from penstock.runtime.status import RelayStatus

logger = logging.getLogger(__name__)

# The pauses before a relay that has died is replaced. They grow while relays live for less than _STEADY_S.
_AGAIN_FIRST_S = 0.1
_AGAIN_MAX_S = 30.0
_STEADY_S = 30.0


RelayCommand = StartRelay | KillRelay | TellRelay | ExpectRelay | UseRelays


# --- what is known ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A process of a worker whose tasks are connected: its number, its machine, and where others reach it."""

    life: int
    machine: str
    address: str


@dataclass
class _Worker:
    """The facts about a worker."""

    member: Member
    expects: int | None = None  # the number of the relay that it was told to expect
    place: str | None = None  # where this relay finds it, once it has said so
    told: RelayMap = field(default_factory=RelayMap)


@dataclass(frozen=True)
class _Known:
    """The connections that a relay has heard of."""

    workers: dict[int, tuple[str, int]]
    relays: dict[int, str]


@dataclass
class _Relay:
    """One life of a relay."""

    number: int
    machine: str
    info: dict[str, Any] | None = None  # what its process has said of itself, once it is there
    ready_at: float = 0.0
    sent: _Known | None = None  # what it was told last
    unconfirmed: deque[_Known] = field(default_factory=deque)
    known: _Known | None = None  # what it has confirmed last
    usable: bool = False  # workers are told of it


@dataclass
class _Home:
    """A machine that is to have a relay."""

    node_id: str
    relay: _Relay | None = None
    last: int | None = None  # the number of the last relay
    again_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(_AGAIN_FIRST_S, _AGAIN_MAX_S))


class RelayKeeper:
    """See the module's docstring."""

    def __init__(self, job: str, earlier: int = 0) -> None:
        """`earlier`: a number of relays that earlier processes of the JobMaster have not exceeded."""
        self._job = job
        self._next = FIRST_RELAY + earlier
        self._workers: dict[int, _Worker] = {}
        self._homes: dict[str, _Home] = {}
        self._out: list[RelayCommand] = []

    # --- events ------------------------------------------------------------------------------------------------------

    def connected(self, members: Mapping[int, Member], homes: Mapping[str, str], now: float) -> list[RelayCommand]:
        """Notes that the tasks of these workers are connected, which are all that run. `homes`: the machines that are
        to have a relay, and for each a node of Ray there."""
        for worker, member in members.items():
            if worker not in self._workers:
                self._workers[worker] = _Worker(member)
        for machine in list(self._homes):
            if machine not in homes:
                relay = self._homes.pop(machine).relay
                if relay is not None:
                    self._out.append(KillRelay(relay.number))
        for machine, node_id in homes.items():
            self._homes.setdefault(machine, _Home(node_id)).node_id = node_id
        return self._settled(now)

    def worker_lost(self, worker: int, now: float) -> list[RelayCommand]:
        """Notes that the process of a worker does nothing more."""
        self._workers.pop(worker, None)
        return self._settled(now)

    def worker_expects(self, worker: int, life: int, relay: int, place: str, now: float) -> list[RelayCommand]:
        """Notes that a worker expects a relay, which finds the worker at this place."""
        known = self._workers.get(worker)
        if known is not None and known.member.life == life and known.expects == relay:
            known.place = place
        return self._settled(now)

    def relay_ready(self, number: int, info: dict[str, Any], now: float) -> list[RelayCommand]:
        """Notes that the process of a relay is there, and its report about itself."""
        relay = self._by_number().get(number)
        if relay is not None:
            relay.info = info
            relay.ready_at = now
        return self._settled(now)

    def relay_knows(self, number: int, now: float) -> list[RelayCommand]:
        """Notes that a relay has carried out the oldest command that it had not confirmed."""
        relay = self._by_number().get(number)
        if relay is not None:
            relay.known = relay.unconfirmed.popleft()
        return self._settled(now)

    def relay_died(self, number: int, node: str, reason: str, now: float) -> list[RelayCommand]:
        """Notes that a relay has died, or could not be started. `node`: its node's name, for people."""
        for home in self._homes.values():
            relay = home.relay
            if relay is not None and relay.number == number:
                if relay.info is not None and now - relay.ready_at >= _STEADY_S:
                    home.backoff.succeeded()
                home.relay = None
                home.again_at = now + home.backoff.failed()
                logger.warning("job %s: a relay of node %s is lost: %s", self._job, node, reason)
        return self._settled(now)

    def tick(self, now: float) -> list[RelayCommand]:
        """Notes the time. It must be called at the time of `due`; calling it earlier does no harm."""
        return self._settled(now)

    def due(self) -> float | None:
        """Returns when `tick` must be called, or None when this depends on the next event."""
        manned = self._manned()
        return min((h.again_at for m, h in self._homes.items() if h.relay is None and m in manned), default=None)

    # --- what others may look at -------------------------------------------------------------------------------------

    def status(self) -> list[RelayStatus]:
        """Returns the relays of the job. The state of a relay is "ready" when workers use it."""
        found = []
        for home in self._homes.values():
            relay = home.relay
            state = "lost" if relay is None else "ready" if relay.usable else "starting"
            pid = None if relay is None or relay.info is None else relay.info["pid"]
            number = home.last if relay is None else relay.number
            if number is not None:
                found.append(RelayStatus(number=number, node_id=home.node_id, state=state, pid=pid))
        return sorted(found, key=lambda entry: entry.number)

    def machines(self) -> set[str]:
        """Returns the machines whose relays workers use."""
        return {machine for machine, home in self._homes.items() if home.relay is not None and home.relay.usable}

    # --- after each event --------------------------------------------------------------------------------------------

    def _settled(self, now: float) -> list[RelayCommand]:
        """Takes the steps that are possible now, and returns all commands since the last event."""
        self._start_relays(now)
        relays = [home.relay for home in self._homes.values() if home.relay and home.relay.info]
        for relay in relays:
            self._expect(relay)
        for relay in relays:
            self._tell_relay(relay, relays)
        for relay in relays:
            relay.usable = relay.usable or self._can_be_used(relay, relays)
        self._tell_workers({relay.number: relay for relay in relays})
        out, self._out = self._out, []
        return out

    def _start_relays(self, now: float) -> None:
        manned = self._manned()
        for machine, home in self._homes.items():
            if home.relay is None and home.again_at <= now and machine in manned:
                home.relay = _Relay(self._next, machine)
                home.last = self._next
                self._next += 1
                self._out.append(StartRelay(home.relay.number, home.node_id))

    def _manned(self) -> set[str]:
        """Returns the machines of the present workers. Others may be lost."""
        return {worker.member.machine for worker in self._workers.values()}

    def _expect(self, relay: _Relay) -> None:
        """Lets the workers of the relay's machine expect it."""
        for number, worker in self._workers.items():
            if worker.member.machine == relay.machine and worker.expects != relay.number:
                worker.expects, worker.place = relay.number, None
                self._out.append(ExpectRelay(number, relay.number))

    def _tell_relay(self, relay: _Relay, relays: list[_Relay]) -> None:
        """Tells a relay its connections, when they have changed."""
        workers = {}
        for number, worker in self._workers.items():
            member = worker.member
            if member.machine != relay.machine:
                workers[number] = member.address, member.life
            elif worker.expects == relay.number and worker.place is not None:
                workers[number] = worker.place, member.life
        wanted = _Known(workers, {other.number: _address(other) for other in relays if other is not relay})
        if wanted != relay.sent:
            relay.sent = wanted
            relay.unconfirmed.append(wanted)
            self._out.append(TellRelay(relay.number, wanted.workers, wanted.relays))

    def _can_be_used(self, relay: _Relay, relays: list[_Relay]) -> bool:
        """Returns whether a relay serves all workers of its machine, and it and all usable relays know each other."""
        known = relay.known
        return (
            known is not None
            and all(_serves(relay, n, w) for n, w in self._workers.items() if w.member.machine == relay.machine)
            and all(
                other.number in known.relays and other.known is not None and relay.number in other.known.relays
                for other in relays
                if other.usable
            )
        )

    def _tell_workers(self, relays: Mapping[int, _Relay]) -> None:
        """Tells each worker that may hear it which relays there are, when they have changed."""
        usable = [relay for relay in relays.values() if relay.usable]
        wanted = RelayMap(
            {relay.number: _address(relay) for relay in usable},
            {
                number: relay.number
                for relay in usable
                for number, worker in self._workers.items()
                if _serves(relay, number, worker)
            },
            {relay.number: (relay.info or {})["pid"] for relay in usable},
        )
        for number, worker in self._workers.items():
            expected = None if worker.expects is None else relays.get(worker.expects)
            gone = worker.expects is not None and expected is None
            if expected is not None and not (expected.usable and _serves(expected, number, worker)):
                continue
            if gone:
                worker.expects = worker.place = None
            if gone or wanted != worker.told:
                worker.told = wanted
                self._out.append(UseRelays(number, wanted))

    def _by_number(self) -> dict[int, _Relay]:
        return {home.relay.number: home.relay for home in self._homes.values() if home.relay is not None}


def _address(relay: _Relay) -> str:
    assert relay.info is not None
    address: str = relay.info["address"]
    return address


def _serves(relay: _Relay, number: int, worker: _Worker) -> bool:
    """Whether a relay is connected to the present process of a worker of its machine."""
    return (
        relay.known is not None
        and worker.expects == relay.number
        and worker.place is not None
        and relay.known.workers.get(number) == (worker.place, worker.member.life)
    )


def homes(plan: Plan, placed: Mapping[int, int], machines: Mapping[int, str]) -> set[str]:
    """Returns the machines on which a relay is of use: those with a task that gets what a task of another machine sends
    to all. `placed` has the worker of each task, and `machines` the machine of each worker."""

    def of(chain: int) -> set[str]:
        return {machines[placed[task.number]] for task in plan.tasks if task.chain == chain}

    found: set[str] = set()
    for exchange in plan.exchanges:
        if isinstance(exchange.grouping, All):
            senders = of(exchange.source)
            found |= {machine for machine in of(exchange.target) if senders - {machine}}
    return found
