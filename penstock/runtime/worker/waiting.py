"""How many records wait for the operators of a chain: the L of burst detection (docs/papers.md: D2).

Credit limits what lies in an inbox to a few thousand records, however long the queue really is: the rest is held back
by the senders, and by those that send to them. When a function inside of a flow suddenly makes ten records of one, the
operator downstream of it has a full inbox, the sender has queued what it has made, and stands still; and what it would
have made ten records of waits at the source. So three things wait for an operator:

- what its tasks have: in their inboxes, begun by a step that is not over, or ready at a source;
- what senders hold back for it: in the queues of their logs, and in output caches, not sent yet;
- what waits for a sender that stands still because the operator takes no more, as the records that the sender will make
  of it. The *magnification* by which they are estimated is that of the last moments, because a burst may consist in its
  change.

A sender stands still because of an operator when a log that leads there has stopped it for a part of the time between
two looks. A fifth of the time is enough to count everything: whoever is stopped more than now and then is quicker than
the operator, and then the queue is the operator's. From nothing to a fifth of the time the share grows, so that chance
moves it little.

So a burst within a flow is also seen at the operators before it, up to the source. What of their queue waits only
because a chain further down takes no more is *held up*: the burst is that chain's, and it would not end if the
operators before it were quicker (`held_up`).

Everything is computed from counters of tasks (runtime/worker/load.py) by whoever asks for them; a task knows nothing of
this. It must never cost a task time for each record. What is held back also waits for the operator that holds it: it
counts at both, and so the records of several operators must not be added up.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

from penstock.runtime.worker.load import TaskLoad

# A magnification is that of the last moments, and of the records that came then: the weight of earlier ones falls with
# this time constant. When nothing comes, it stays.
_LATELY_S = 0.25

# Stops are looked at over at least this time.
_LOOK_S = 0.1

# What is held up is computed from the stops of this time: a sender that was stopped by chance for a moment is not held
# up, and one that went on for a moment still is.
_HELD_UP_S = 0.3

# A sender that is stopped for this share of the time is stopped.
_STOPPED = 0.2


@dataclass
class _Flow:
    """The records that a task sends to a chain."""

    taken: float  # records of the task's input, lately
    made: float  # of these, records for the chain
    share: float = 0.0  # of what waits for the task, the part that waits for the chain
    stopped: float = 0.0  # for what part of the time the chain has stopped the task lately

    @property
    def magnification(self) -> float:
        return self.made / self.taken if self.taken > 0 else 1.0


@dataclass
class _Seen:
    """A task's load at the last look."""

    chain: int
    at_ns: int
    taken: int  # records of its input that do not wait any more
    own: int  # records that wait for the task, and that it has not sent to Spark
    under_way: int
    sends: dict[int, tuple[int, int, int]]  # by chain: records made, records held back, ns stopped
    stops_ns: int = 0  # when stops were looked at last
    stopped_ns: dict[int, int] = field(default_factory=dict)  # by chain: how long it had been stopped then
    flows: dict[int, _Flow] = field(default_factory=dict)


class WaitingRecords:
    """See the module's docstring. It takes the loads of tasks as they come: of a worker that does not answer, the last
    one counts. When the chains have changed, another one is needed."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Seen] = {}
        self._held_back: dict[int, float] | None = None

    def look(self, load: TaskLoad, received: int) -> None:
        """Takes a task's load. `received` is the number of records that its first operator has received."""
        begun = load.begun
        seen = _Seen(
            load.chain,
            load.at_ns,
            received - begun,
            load.queued + load.backlog + begun,
            load.under_way,
            {chain: (made, held, stopped) for chain, made, held, stopped in load.sends},
        )
        before = self._tasks.get(load.number)
        flows = {} if before is None else before.flows
        self._tasks[load.number] = seen
        self._held_back = None
        if before is not None and seen.at_ns < before.at_ns:  # it has migrated, and its clock is another one
            before = None
        stops_due = before is None or seen.at_ns - before.stops_ns >= _LOOK_S * 1e9
        seen.stops_ns = seen.at_ns if before is None or stops_due else before.stops_ns
        for chain, (made, _, stopped) in seen.sends.items():
            then = None if before is None else before.sends.get(chain)
            if before is None or then is None or made < then[0] or stopped < then[2]:  # these are other logs
                # What it stood still for, it most likely stands still for again.
                known = flows.get(chain)
                seen.flows[chain] = _Flow(seen.taken, made)
                if known is not None:
                    seen.flows[chain].share, seen.flows[chain].stopped = known.share, known.stopped
                seen.stopped_ns[chain] = stopped
                continue
            flow = seen.flows[chain] = before.flows[chain]
            more_taken, more_made = max(0, seen.taken - before.taken), made - then[0]
            if more_taken or more_made:  # else the numbers would become too small to be divided
                kept = math.exp((before.at_ns - seen.at_ns) / 1e9 / _LATELY_S)
                flow.taken = kept * flow.taken + more_taken
                flow.made = kept * flow.made + more_made
            stopped_before = before.stopped_ns[chain]
            if stops_due:
                passed = seen.at_ns - before.stops_ns
                part = (stopped - stopped_before) / passed
                flow.share = min(1.0, part / _STOPPED)
                flow.stopped = part + (flow.stopped - part) * math.exp(-passed / 1e9 / _HELD_UP_S)
                stopped_before = stopped
            seen.stopped_ns[chain] = stopped_before

    def keep(self, numbers: Container[int]) -> None:
        self._tasks = {number: seen for number, seen in self._tasks.items() if number in numbers}
        self._held_back = None

    def held_back(self, chain: int) -> int:
        """Returns the number of records that senders hold back for a chain, and of records that would be made of the
        input of senders that it stops."""
        if self._held_back is None:
            self._held_back = self._compute()
        return round(self._held_back.get(chain, 0.0))

    def held_up(self, chain: int, by: Container[int]) -> int:
        """Returns how many of the records that wait for a chain wait because one of these chains takes no more, be it
        from the chain itself or from others between them."""
        by_chain = self._by_chain()
        parts: dict[int, float] = {}  # of a chain's own queue, the part that is held up
        held_up = 0.0
        # A chain sends to chains of higher numbers only.
        for sender in sorted((one for one in by_chain if one >= chain), reverse=True):
            parts[sender] = held_up = 0.0
            for seen in by_chain[sender]:
                part = max(
                    (
                        min(1.0, flow.stopped / _STOPPED) * (1.0 if target in by else parts.get(target, 0.0))
                        for target, flow in seen.flows.items()
                        if target in seen.sends
                    ),
                    default=0.0,
                )
                held_up += part * seen.own
                parts[sender] = max(parts[sender], part)
        return round(held_up + parts.get(chain, 0.0) * self.held_back(chain))

    def of_chain(self, chain: int) -> int:
        tasks = self._by_chain().get(chain, ())
        return sum(seen.own + seen.under_way for seen in tasks) + self.held_back(chain)

    def _by_chain(self) -> dict[int, list[_Seen]]:
        found: dict[int, list[_Seen]] = {}
        for seen in self._tasks.values():
            found.setdefault(seen.chain, []).append(seen)
        return found

    def _compute(self) -> dict[int, float]:
        found: dict[int, float] = {}
        # A chain sends to chains of higher numbers only.
        for chain, tasks in sorted(self._by_chain().items()):
            upstream = found.get(chain, 0.0)
            shares: dict[int, float] = {}
            magnifications: dict[int, list[float]] = {}
            for seen in tasks:
                for target, (_, held, _) in seen.sends.items():
                    flow = seen.flows[target]
                    found[target] = found.get(target, 0.0) + held + flow.share * flow.magnification * seen.own
                    shares[target] = max(shares.get(target, 0.0), flow.share)
                    magnifications.setdefault(target, []).append(flow.magnification)
            for target, several in magnifications.items():
                # One task that is stopped stops all of those that send to the chain.
                found[target] += upstream * shares[target] * sum(several) / len(several)
        return found
