"""Decides when a range comes back from Spark for a try, because the present speed of its record tasks is unknown
(docs/papers.md: D2).

While Spark runs a range, the speed of its record tasks is that of the moment in which they could not keep up. If an
operator was slow for some seconds only, because of another process or of a service that it asks, this figure would keep
the range in Spark for ever. So the range comes back for a try, a *probe*, although by the figures it should not:

- The first probe comes after `first_s` in Spark. A probe that ends in Spark again within `WATCH_S` has failed, and each
  wait is twice as long as the one before, up to `most_s`. After a probe that did not fail the first wait counts again.
- While more records arrive than the record tasks have shown lately (`ShownSpeed`), a probe would fail unless they have
  become quicker than ever. Then each wait is `UNSHOWN` times as long.

It must never be that a range goes to and fro: of the time in Spark and in failed probes, ever less is spent on probes.
Nothing here reads a clock.
"""

from __future__ import annotations

import math

from penstock.runtime.backoff import Backoff

# A range that is in Spark again after less has failed its probe.
WATCH_S = 10.0

# Waits are so many times as long while more arrives than the record tasks have shown, by this factor: rates swing.
UNSHOWN = 6.0
SWING = 1.2


class Probes:
    """The probes of one range; see the module's docstring."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._backoff = Backoff(first_s, most_s)
        self._most_s = most_s
        self.wait_s = self._backoff.failed()  # in Spark, before the next one
        self.number = 0  # that have failed since one did not
        self._watched_until: float | None = None  # None: no probe is under way

    def due_in(self, in_spark_s: float, arrival_rate: float, shown_rate: float) -> float:
        """Returns in how many seconds a range may probe that has been in Spark for so long."""
        wait_s = self.wait_s if arrival_rate <= SWING * shown_rate else min(self._most_s, UNSHOWN * self.wait_s)
        return max(0.0, wait_s - in_spark_s)

    def begin(self) -> None:
        """Notes that the range returns for a probe."""
        self._watched_until = math.inf

    def returned(self, time_s: float) -> bool:
        """Notes that the range has come back. Returns whether it is a probe."""
        if self._watched_until is None:
            return False
        self._watched_until = time_s + WATCH_S
        return True

    def in_records(self, time_s: float) -> None:
        """Notes that the range is in the record paradigm at this time."""
        if self._watched_until is not None and time_s >= self._watched_until:
            self._watched_until = None
            self.number = 0
            self._backoff.succeeded()
            self.wait_s = self._backoff.failed()

    def burst(self) -> None:
        """Notes that the range wants to go to Spark: a probe that is under way has failed."""
        if self._watched_until is not None:
            self._watched_until = None
            self.number += 1
            self.wait_s = self._backoff.failed()
