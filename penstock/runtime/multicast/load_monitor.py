"""Measures the load of a root: how many records arrive, what they cost, and how many wait (docs/papers.md: W5).

The relay counts anyway: records that arrived, copies and encodings with the time that they took, and the length of its
queue. It hands the counters in at each look, with the time. The monitor smooths what it sees: a new figure is alpha
times the past and 1 - alpha times the last interval, so an alpha close to 1 remembers long. A look that comes late
weighs as much as the looks that were left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runtime.multicast.queue_model import Cost


@dataclass(frozen=True)
class Counters:
    """What a relay has counted since it began. All counts are in one unit: records, or messages of a fixed size."""

    arrived: int = 0
    copies: int = 0
    copying_s: float = 0.0
    encoded: int = 0
    encoding_s: float = 0.0


@dataclass(frozen=True)
class Load:
    """What is known of a root at a look. `queued_before` is the queue at the look before."""

    rate: float
    cost: Cost
    queued: int
    queued_before: int
    emit_s: float  # the paper's t_e: all work for a record, divided by its copies


class LoadMonitor:
    """See the module's docstring."""

    def __init__(self, interval_s: float, alpha: float) -> None:
        """`interval_s`: the time between two looks. `alpha`: the weight of the past, from 0 to below 1."""
        if not (interval_s > 0 and 0 <= alpha < 1):
            raise ValueError(f"interval_s={interval_s} must be above 0, and alpha={alpha} from 0 to below 1")
        self._interval_s = interval_s
        self._alpha = alpha
        self._seen: tuple[float, Counters, int] | None = None
        self._rate: float | None = None
        self._copy_s: float | None = None
        self._encode_s: float | None = None
        self._emit_s: float | None = None

    def look(self, now_s: float, counters: Counters, queued: int) -> Load | None:
        """Takes the counters of a relay. Returns the load, or None while an arriving record's cost is not yet known,
        and when no time has passed."""
        before = self._seen
        if before is not None and now_s <= before[0]:
            return None
        self._seen = (now_s, counters, queued)
        if before is None or counters.arrived < before[1].arrived:  # the relay is a new one
            return None
        then_s, then, queued_before = before
        elapsed_s = now_s - then_s
        past = self._alpha ** (elapsed_s / self._interval_s)
        self._rate = _smooth(self._rate, (counters.arrived - then.arrived) / elapsed_s, past)
        copies, encoded = counters.copies - then.copies, counters.encoded - then.encoded
        copying_s, encoding_s = counters.copying_s - then.copying_s, counters.encoding_s - then.encoding_s
        # An interval without copies says nothing of their cost.
        if copies > 0:
            self._copy_s = _smooth(self._copy_s, copying_s / copies, past)
            self._emit_s = _smooth(self._emit_s, (copying_s + encoding_s) / copies, past)
        if encoded > 0:
            self._encode_s = _smooth(self._encode_s, encoding_s / encoded, past)
        if not self._copy_s or self._emit_s is None:
            return None
        return Load(self._rate, Cost(self._copy_s, self._encode_s or 0.0), queued, queued_before, self._emit_s)


def _smooth(past: float | None, new: float, weight: float) -> float:
    """The weighted mean of the past and a new figure. The first figure has no past."""
    return new if past is None else weight * past + (1 - weight) * new
