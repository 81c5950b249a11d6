"""Decides about links between workers that are silent while both workers reach the JobMaster.

Nobody but the workers notices such a cut: each machine answers the heartbeats, and the job would wait for ever. The
workers report which peers do not answer (link_watch.py). When a link that the job needs stays silent for the limit, the
machine of one side is given up as if it were lost. When the link has never worked, and no epoch has completed, there is
a firewall rather than a cut, and the job fails with what to open: on another machine it would fail the same way.

This is a part of the JobHost (job_host.py), and like it without threads and clock. What must not happen: that a
machine is given up because of a process that has died or is paused, because of a link that answers again, or for a time
in which the JobMaster itself was paused and could not hear that. The machine of the JobMaster is never given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations, product

from penstock.runtime.program.plan import Plan
from penstock.runtime.status import LinkStatus
from penstock.runtime.transport.base import SilentLink

# The number of looks within the limit.
_LOOKS = 8


@dataclass(frozen=True)
class Station:
    """A process of a worker that runs: its machine, the name and the numeric address of this machine, and the address
    at which other workers connect."""

    machine: str
    name: str
    host: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.host})" if self.host and self.host != self.name else self.name


@dataclass(frozen=True)
class GivenUp:
    """A machine that is to be given up, and why."""

    machine: str
    reason: str


#: Two machines.
Pair = frozenset[str]


@dataclass
class _Silence:
    """One worker's report of a peer."""

    link: SilentLink
    since: float


class BrokenLinks:
    """See the module's docstring. `limit_s`: the silence after which a link is given up. `refused_limit_s`: the same
    for links that are refused, whose peers have died more often than not. `master`: the machine of the JobMaster."""

    def __init__(self, limit_s: float, refused_limit_s: float, master: str, ports: tuple[int, int] = (0, 0)) -> None:
        """`ports`: the first and the last port of the job's processes, for people; 0: any."""
        self._limit_s = limit_s
        self._refused_limit_s = max(limit_s, refused_limit_s)
        self._period_s = limit_s / _LOOKS
        self._master = master
        self._ports = ports
        self._silent: dict[tuple[int, int], _Silence] = {}  # by the worker that reports, and its peer
        self._stations: dict[int, Station] = {}
        self._waited: dict[Pair, float] = {}
        self._worked: set[Pair] = set()
        self._looked_at = 0.0

    # --- events ------------------------------------------------------------------------------------------------------

    def said(self, worker: int, links: Collection[SilentLink], stations: Mapping[int, Station], now: float) -> None:
        """Takes which peers do not answer a worker, of all that it is connected to. `stations`: the processes of the
        workers that run. What is said of any other process comes late."""
        self._stations = dict(stations)
        if not self._silent:
            self._looked_at = now
        before = {pair: silence for pair, silence in self._silent.items() if pair[0] == worker}
        self._silent = {pair: silence for pair, silence in self._silent.items() if pair[0] != worker}
        own = stations[worker]
        for link in links:
            peer = stations.get(link.peer)
            if peer is None or link.process not in peer.address or peer.machine == own.machine:
                continue
            known = before.get((worker, link.peer))
            since = now - link.for_s if known is None else known.since
            self._silent[worker, link.peer] = _Silence(link, since)
            if link.worked:
                self._worked.add(frozenset((own.machine, peer.machine)))
        # The next look counts the time since the last one, of which a new silence has only a part.
        begins = max(self._looked_at - now, -self._period_s)
        self._waited = {pair: self._waited.get(pair, begins) for pair in self._pairs()}

    def over(self, worker: int) -> None:
        """Notes that the process of a worker does nothing more."""
        self._silent = {pair: silence for pair, silence in self._silent.items() if worker not in pair}
        self._stations.pop(worker, None)
        pairs = self._pairs()
        self._waited = {pair: waited for pair, waited in self._waited.items() if pair in pairs}

    def due(self) -> float | None:
        """Returns when `look` must be called, or None when all links answer."""
        return self._looked_at + self._period_s if self._silent else None

    def look(self, needed: Collection[Pair], now: float, *, runs: bool) -> list[GivenUp] | str:
        """Returns the machines to give up, or why the job must fail. `needed`: the machines between whose workers
        something goes. `runs`: an epoch has completed, so that all links that it needed have worked."""
        # When a look comes late, this process was paused, and reports may wait that a link answers again.
        passed = min(now - self._looked_at, self._period_s)
        self._looked_at = now
        broken = {pair: of for pair, of in self._pairs().items() if pair in needed}
        # A silent link that the job has just begun to need begins anew.
        self._waited = {pair: self._waited[pair] + passed if pair in self._waited else 0.0 for pair in broken}
        over = [pair for pair in broken if self._waited[pair] >= self._limit(broken[pair])]
        never = [pair for pair in over if pair not in self._worked and not runs]
        if never:
            return self._never(broken[min(never, key=sorted)])
        found = []
        while over:
            machine = self._chosen(over, broken)
            (pair, *_) = sorted((pair for pair in over if machine in pair), key=sorted)
            found.append(GivenUp(machine, self._why(machine, broken[pair])))
            # If the machine is still there when the limit has passed once more, it is given up again.
            self._waited |= {pair: 0.0 for pair in broken if machine in pair}
            over = [pair for pair in over if machine not in pair]
            broken = {pair: of for pair, of in broken.items() if machine not in pair}
        return found

    # --- what is decided ---------------------------------------------------------------------------------------------

    def _pairs(self) -> dict[Pair, list[tuple[int, int]]]:
        """Returns the machines between which a link is silent, each with the workers of its reports."""
        found: dict[Pair, list[tuple[int, int]]] = {}
        for reporter, peer in sorted(self._silent):
            pair = frozenset((self._stations[reporter].machine, self._stations[peer].machine))
            found.setdefault(pair, []).append((reporter, peer))
        return found

    def _limit(self, reports: list[tuple[int, int]]) -> float:
        refused = all(self._silent[report].link.refused for report in reports)
        return self._refused_limit_s if refused else self._limit_s

    def _chosen(self, over: list[Pair], broken: Collection[Pair]) -> str:
        """Returns the machine to give up: the one with more broken links, or else with fewer workers, or else with the
        later ones."""
        links = Counter(machine for pair in broken for machine in pair)
        workers: dict[str, list[int]] = {}
        for worker, station in self._stations.items():
            workers.setdefault(station.machine, []).append(worker)
        candidates = {machine for pair in over for machine in pair if machine != self._master}
        return max(candidates, key=lambda one: (links[one], -len(workers[one]), min(workers[one])))

    def _told(self, report: tuple[int, int]) -> str:
        here, there = (self._stations[worker] for worker in report)
        at = self._silent[report].link.at
        return f"worker {report[0]} on {here} has not reached worker {report[1]} on {there.name} at {at}"

    def _why(self, machine: str, reports: list[tuple[int, int]]) -> str:
        name = next(station.name for station in self._stations.values() if station.machine == machine)
        return (
            f"its node {name} is given up, because {self._told(reports[0])} for {self._limit(reports):g} s, although "
            "both reach the JobMaster: the network between the two machines is cut"
        )

    def _never(self, reports: list[tuple[int, int]]) -> str:
        first, last = self._ports
        remedy = f"to the ports {first} to {last}"
        if not first:
            remedy = (
                "to all ports, or keep the job's processes in a range of ports (ports=(20000, 20999), or --ports "
                "20000-20999) and let TCP through to these"
            )
        return (
            f"{', and '.join(map(self._told, reports))} since the job began, for {self._limit(reports):g} s, although "
            "both reach the JobMaster. A firewall may be closed between the two machines. Let TCP through, in both "
            f'directions, {remedy}. See "Ports and firewalls" in docs/cluster.md'
        )

    # --- what others may look at -------------------------------------------------------------------------------------

    def status(self, now: float) -> list[LinkStatus]:
        """Returns the links that are silent."""
        return [
            LinkStatus(
                from_=reporter,
                to=peer,
                at=silence.link.at,
                machines=[self._stations[reporter].name, self._stations[peer].name],
                silent_s=now - silence.since,
                worked=silence.link.worked,
            )
            for (reporter, peer), silence in sorted(self._silent.items())
        ]


def pairs_of(plan: Plan, placed: Mapping[int, int], machines: Mapping[int, str]) -> set[Pair]:
    """Returns the machines between whose workers the plan has channels. `placed`: the worker of each task. `machines`:
    the machine of each worker that runs."""
    found: set[Pair] = set()
    at = {(task.chain, task.index): machines.get(placed.get(task.number, -1)) for task in plan.tasks}
    for exchange in plan.exchanges:
        for sender in range(exchange.senders):
            here = at[exchange.source, sender]
            there = {at[exchange.target, receiver] for receiver in exchange.targets(sender)}
            found |= {frozenset((here, one)) for here, one in product([here], there) if here and one and here != one}
    return found


def all_pairs(machines: Collection[str]) -> set[Pair]:
    """Returns all pairs of these machines."""
    return {frozenset(pair) for pair in combinations(sorted(set(machines)), 2)}
