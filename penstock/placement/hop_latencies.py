"""How long hops take: inside a worker, between two workers of a node, and between nodes (docs/papers.md: T12).

The workers of a job that replans note when some of their messages were sent and when they had come
(`runtime/transport/hop_times.py`), and `HopLatencies.of` puts their notes together. A hop ends when the records lie in
the inbox of their task. What they wait there for their turn is about the same, whichever way they have come.

A quarter of the messages of a kind take less than the figure of this kind. The others have waited for their receiver,
who was busy with something else, and would wait for it wherever it runs. How far the clocks of two machines are apart
is not known exactly. The error is as much too long in one direction as too short in the other one, so the mean of both
directions counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.runtime.transport.hop_times import TimesReport

#: What is measured counts up to this many seconds, so that an odd measurement moves no task.
HOP_S_MOST = 0.01

# Two workers, or one, tell something when so many of their messages were noted at both ends.
_MESSAGES_LEAST = 10


@dataclass(frozen=True)
class HopLatencies:
    """Holds how many seconds a hop takes inside a worker, between two workers of a node, and between nodes. None: this
    kind of hop has not been measured."""

    worker: float | None = None
    node: float | None = None
    network: float | None = None

    def or_else(self, other: HopLatencies) -> HopLatencies:
        """Returns the same latencies, with latencies of `other` for the kinds that have not been measured."""
        pairs = ((self.worker, other.worker), (self.node, other.node), (self.network, other.network))
        return HopLatencies(*(found if found is not None else before for found, before in pairs))

    @classmethod
    def of(cls, reports: Iterable[TimesReport], node_of: Sequence[int]) -> HopLatencies:
        """Returns the latencies from the reports of a job's workers. `node_of` says on which node each worker is."""
        reports = [report for report in reports if report.worker < len(node_of)]
        begun = {message[:3]: (message[3], report.worker) for report in reports for message in report.sent}
        between: dict[tuple[int, int], list[int]] = defaultdict(list)
        for report in reports:
            for message in report.came:
                begun_ns, sender = begun.get(message[:3], (0, report.worker))
                if sender != report.worker:
                    between[sender, report.worker].append(message[3] - begun_ns)
        inside = [_low(report.inside_ns) for report in reports if len(report.inside_ns) >= _MESSAGES_LEAST]
        near, far = [], []
        known = {way: _low(took) for way, took in between.items() if len(took) >= _MESSAGES_LEAST}
        for (one, other), took in known.items():
            if node_of[one] == node_of[other]:
                near.append(took)
            elif (other, one) in known:
                far.append((took + known[other, one]) / 2)
        if not far:  # records go in one direction only
            far = [took for (one, other), took in known.items() if node_of[one] != node_of[other]]
        return cls(*map(_seconds, (inside, near, far)))


def _low(took: Sequence[int]) -> float:
    """Returns the time than which a quarter of the messages took less."""
    return float(sorted(took)[len(took) // 4])


def _seconds(each: Sequence[float]) -> float | None:
    """Returns the median of times in ns, in seconds and within the limits, or None when there is none."""
    if not each:
        return None
    ordered = sorted(each)
    return min(max(0.0, (ordered[len(each) // 2] + ordered[(len(each) - 1) // 2]) / 2e9), HOP_S_MOST)


def told_latencies(latencies: HopLatencies) -> Mapping[str, float | None]:
    """Returns the latencies for people, in microseconds."""
    found = {"worker": latencies.worker, "node": latencies.node, "network": latencies.network}
    return {kind: None if hop_s is None else 1e6 * hop_s for kind, hop_s in found.items()}
