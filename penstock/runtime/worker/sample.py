"""Samples of the records that tasks process, on which their range is tried in Spark before it is needed
(docs/papers.md: D4).

A task keeps nothing until somebody asks for a sample. Then it encodes what it is about to process, once for some
thousand records and up to a number of bytes, and not more until the sample is taken. Encoded, the records stay as they
were whatever the functions of the flow do with them, no record lives longer than it would, and the JobMaster can pass
them on without knowing their classes.

A sample must never be kept for long: it is dropped when it is taken, when its tasks are built again, and some time
after its first record, when nobody takes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.runtime.errors import CodecError
from penstock.runtime.records.codec import Encoded, decode, encode

#: What a sample has at most.
SAMPLE_RECORDS = 8_192
SAMPLE_BYTES = 4 << 20

#: A sample that nobody takes is dropped after this time, in ns.
KEPT_NS = 60_000_000_000

# The records that are encoded at a time. How large records are is known only after the first of them.
_PIECE = 1_024


@dataclass(frozen=True)
class SampleRequest:
    """Asks a worker for records that its tasks of a chain with these operators have taken lately. It gives them when it
    has at least so many, and collects them from the first request on."""

    chain: int
    operators: tuple[str, ...]
    least: int

    def concerns(self, chain: int, operators: Iterable[str]) -> bool:
        return chain == self.chain and self.operators == tuple(operators)


@dataclass(frozen=True)
class RecordSample:
    """Records that tasks have taken, encoded. `each_s`: how long the tasks were busy with a record, on average."""

    count: int
    pieces: tuple[Encoded, ...]
    each_s: float = 0.0

    def records(self) -> list[Any]:
        return [record for code, payload in self.pieces for record in decode(code, payload)]


class Sample:
    """Collects a sample; see the module's docstring. The run loop's thread adds records, and any thread may take what
    there is."""

    def __init__(self) -> None:
        self.full = False
        self.failure: Exception | None = None  # why the records cannot travel
        self.first_ns: int | None = None  # when the first record came, by the clock of the tasks
        self._pieces: list[tuple[int, Encoded]] = []  # with the number of records
        self._records = self._bytes = 0

    def add(self, records: Any, now_ns: int) -> None:
        """Adds records that are about to be processed, as far as there is room for them."""
        if self.full or not isinstance(records, list):
            return
        at = 0
        while at < len(records) and not self.full:
            size = 1
            if self._records:
                each = max(1, self._bytes // self._records)
                size = max(1, min(_PIECE, SAMPLE_RECORDS - self._records, (SAMPLE_BYTES - self._bytes) // each))
            piece = records[at : at + size]
            at += len(piece)
            try:
                encoded = encode(piece)
            except Exception as error:  # the class of a record decides what encoding it raises
                self.failure, self.full = error, True
                return
            if self._bytes + len(encoded[1]) > SAMPLE_BYTES:
                self.full = True
                if not self._records:
                    self.failure = CodecError(
                        f"a record has {len(encoded[1]):,} bytes when it is encoded; a sample has at most "
                        f"{SAMPLE_BYTES:,}"
                    )
                return
            self._records += len(piece)
            self._bytes += len(encoded[1])
            self._pieces.append((len(piece), encoded))
            self.first_ns = now_ns if self.first_ns is None else self.first_ns
            self.full = self._records >= SAMPLE_RECORDS

    def is_old(self, now_ns: int) -> bool:
        return self.first_ns is not None and now_ns - self.first_ns > KEPT_NS

    def taken(self, least: int) -> RecordSample | None:
        """Returns the collected records, if they are enough: so many records, or all for which there was room."""
        pieces = self._pieces[:]
        count = sum(records for records, _ in pieces)
        if not count or (count < least and not self.full):
            return None
        return RecordSample(count, tuple(encoded for _, encoded in pieces))
