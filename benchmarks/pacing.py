"""Paced input and latency recording: the same code in every contestant of the latency benchmarks.

Record i is due at start + i / rate, whatever the system does (an open load); it carries that time as its first field,
so that every delay, also that of the source, is in the latency that the user's function at the sink finds.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from time import monotonic_ns
from typing import Any

from benchmarks.common import WrongResult, quantile

NS = 1_000_000_000


class Pacer:
    """Makes (due ns, text) records from a pool of texts, in turn, as they fall due. The schedule starts at `start_ns`
    or, with None, a moment after the first look."""

    def __init__(self, texts: list[str], rate: int, count: int, start_ns: int | None = None) -> None:
        self._texts = texts
        self._rate = rate
        self._count = count
        self._start = start_ns
        self._made = 0

    @property
    def finished(self) -> bool:
        """All records have been made."""
        return self._made >= self._count

    def due(self, limit: int) -> list[tuple[int, str]]:
        """The records that are due now, at most `limit`."""
        now = monotonic_ns()
        if self._start is None:
            self._start = now + NS // 10
        start, rate, made, texts = self._start, self._rate, self._made, self._texts
        until = min(self._count, made + limit, (now - start) * rate // NS + 1)
        if until <= made:
            return []
        self._made = until
        n = len(texts)
        return [(start + i * NS // rate, texts[i % n]) for i in range(made, until)]

    def next_ns(self) -> int:
        """When the next record is due."""
        if self._start is None:
            return 0
        return self._start + self._made * NS // self._rate

    def next_in_ns(self) -> int:
        """How long until then; 0: now."""
        return max(0, self.next_ns() - monotonic_ns())


class Latencies:
    """The user's function at the sink: takes (key, due ns, count) records, notes now - due and the newest count.

    Room for all is made before the start; a record costs one look at the clock, one store and one dict entry."""

    def __init__(self, out: str, most: int) -> None:
        self._out = out
        self._most = most

    def open(self) -> None:
        """In the process of the sink."""
        self._took = array("q", bytes(8 * self._most))
        self._due = array("q", bytes(8 * self._most))
        self._n = 0
        self._counts: dict[str, int] = {}

    def record(self, update: tuple[str, int, int]) -> None:
        """Called for each record."""
        key, due, count = update
        n = self._n
        self._took[n] = monotonic_ns() - due
        self._due[n] = due
        self._n = n + 1
        self._counts[key] = count

    def save(self) -> None:
        """Leave the file, when anything came."""
        if not self._n:
            return
        import pickle

        name = f"sink-{os.getpid()}-{monotonic_ns()}"
        partial = Path(self._out, f".{name}")
        partial.write_bytes(pickle.dumps((self._took[: self._n], self._due[: self._n], self._counts)))
        partial.rename(Path(self._out, name))


def collect(out: Path, expected: dict[str, int], updates: int, who: str, skip_s: float) -> dict[str, float]:
    """{p50, p99, max} in ms over all sinks, without the records due in the first `skip_s` seconds; checks the
    number of updates and the final counts."""
    import pickle

    pairs: list[tuple[int, int]] = []
    counts: dict[str, int] = {}
    for path in sorted(out.iterdir()):
        took, due, part = pickle.loads(path.read_bytes())
        path.unlink()
        pairs += zip(due, took, strict=True)
        if counts.keys() & part.keys():
            raise WrongResult(f"{who}: two sinks got the same key")
        counts.update(part)
    if len(pairs) != updates:
        raise WrongResult(f"{who}: {len(pairs)} updates arrived, not {updates}")
    if counts != expected:
        raise WrongResult(f"{who}: the final counts are wrong")
    first = min(due for due, _ in pairs) + int(skip_s * NS)
    kept: list[float] = sorted(took / 1e6 for due, took in pairs if due >= first)
    return {"p50": quantile(kept, 0.5), "p99": quantile(kept, 0.99), "max": kept[-1]}


def split(record: tuple[int, str]) -> list[tuple[str, int]]:
    """The user's flat_map: (word, due ns) for each word."""
    due, text = record
    return [(word, due) for word in text.split()]


def word_of(pair: tuple[str, int]) -> str:
    """The user's key function."""
    return pair[0].lower()


def show(latency: Any) -> str:
    """For progress."""
    return ", ".join(f"{name} {value:.3f}" for name, value in latency.items()) + " ms"
