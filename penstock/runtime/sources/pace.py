"""Computes when the records of a paced source are due.

A `Schedule` is a rate that changes in steps. It maps a count of records to the time at which that many have
come, so that a constant stream and a Poisson stream (whose counts are sums of exponential gaps) follow the
same steps. It must never depend on when it is asked: the due times of a job are the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.runtime.errors import FlowError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Steps = Sequence[tuple[float, float | None]]
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_rate(text: str) -> list[tuple[float, float | None]]:
    """Returns the steps in "rate:seconds,...": parse_rate("5000:10s,60000:500ms") is [(5000.0, 10.0), (60000.0, 0.5)].

    Rates are records a second. A time may end in ms, s, m or h; without a unit it is in seconds. The last
    step may have no time, it then holds for ever: "5000:10s,60000". FlowError when the text is not of this
    form.
    """
    steps: list[tuple[float, float | None]] = []
    parts = text.split(",")
    for i, part in enumerate(parts):
        rate, colon, duration = (piece.strip() for piece in part.partition(":"))
        try:
            if colon:
                steps.append((float(rate), _seconds(duration)))
            elif i == len(parts) - 1:
                steps.append((float(rate), None))
            else:
                raise ValueError("only the last step may have no time")
        except ValueError as error:
            raise FlowError(
                f"rate {text!r}: step {part.strip()!r} is not of the form rate:time, e.g. "
                f"5000:10s,60000:500ms ({error})"
            ) from error
    return steps


def _seconds(text: str) -> float:
    unit = text.lstrip("0123456789._")
    return float(text[: len(text) - len(unit)]) * _SECONDS[unit] if unit in _SECONDS else float(text)


class Schedule:
    """A schedule of steps (records a second, seconds), repeated without end, or with a last step without end (seconds
    None)."""

    def __init__(self, rate: Any) -> None:
        import numpy as np

        steps = self._steps(rate)
        self.steps = steps
        lengths = [math.inf if seconds is None else seconds for _, seconds in steps]
        counts = [rate * seconds if rate else 0.0 for (rate, _), seconds in zip(steps, lengths, strict=True)]
        self._rates = np.array([rate for rate, _ in steps])
        self._times = np.concatenate(([0.0], np.cumsum(lengths[:-1])))
        self._counts = np.concatenate(([0.0], np.cumsum(counts[:-1])))
        self._cycle_time = math.fsum(lengths)
        self._cycle_count = math.fsum(counts)

    @staticmethod
    def _steps(rate: Any) -> list[tuple[float, float | None]]:
        if isinstance(rate, str):
            rate = parse_rate(rate)
        try:
            steps: list[tuple[float, float | None]]
            if isinstance(rate, (int, float)):
                steps = [(float(rate), None)]
            else:
                steps = [(float(r), None if s is None else float(s)) for r, s in rate]
        except (TypeError, ValueError):
            raise FlowError(f"rate must be records a second, or steps [(rate, seconds), ...], got {rate!r}") from None
        for i, (speed, seconds) in enumerate(steps):
            if not 0 <= speed < math.inf:
                raise FlowError(f"rate: {speed!r} is not a rate; give records a second, None for no limit")
            if seconds is None:
                if i < len(steps) - 1:
                    raise FlowError("rate: only the last step may hold for ever (seconds None)")
                if speed == 0:
                    raise FlowError("rate: it ends in a step of rate 0 that holds for ever; give the source a duration")
            elif not 0 < seconds < math.inf:
                raise FlowError(f"rate: a step of {seconds!r} seconds is not possible; give a positive number")
        if not any(speed for speed, _ in steps):
            raise FlowError(f"rate must be above 0 in at least one step, got {rate!r}")
        return steps

    def due_ns(self, counts: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Returns, for each count of records, the nanoseconds after the start at which that many records have come. The
        record after the last one of a step belongs to the next step that has a rate."""
        import numpy as np

        cycles: npt.NDArray[np.float64] | float = 0.0
        if self._cycle_count < math.inf:
            cycles, counts = np.divmod(counts, self._cycle_count)
        step = np.maximum(np.searchsorted(self._counts, counts, side="right") - 1, 0)
        rates = self._rates[step]
        into = np.divide(counts - self._counts[step], rates, out=np.zeros_like(counts), where=rates > 0)
        seconds = self._times[step] + into
        if self._cycle_count < math.inf:
            seconds += cycles * self._cycle_time
        due: npt.NDArray[np.int64] = np.rint(seconds * 1e9).astype(np.int64)
        return due
