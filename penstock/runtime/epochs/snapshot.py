"""A task's snapshot as bytes, and back: from any number of tasks' snapshots to any number of tasks.

    header bytes u32 | header (msgpack) | segments

The header names each operator of the task with its counters, where its own state stands, and for each keyed map where
its entries stand. A map's entry says whether it is whole or builds on the snapshots before it. Entries are not sorted
by key group: that took most of the time for which a snapshot stops its task, and only who goes on with another plan
needs it. They sort what they read.

State of a job with another parallelism, or of a changed flow, is matched by the names of operators and of their maps;
it must never depend on task numbers or on which operators shared a task.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import cloudpickle
import msgspec

from penstock.runtime.aggregate import merge_of
from penstock.runtime.codec import PICKLE, decode, decode_map, encode, encode_map, encode_values, pickled
from penstock.runtime.errors import KeyTypeError, RecordError, SnapshotDamaged, StoreError, shorten
from penstock.runtime.partition import partition
from penstock.runtime.state import Delta, KeyedDelta, KeyedLog, KeyedValues, KeyedWhole, SavedState, StageState
from penstock.runtime.transport.base import Buffer
from penstock.runtime.userfunc import describe

_LENGTH = struct.Struct("<I")

#: What a task saves: operator -> (state or None, counters).
States = dict[str, "tuple[StageState | None, tuple[int, int, int]]"]


class _Chunk(msgspec.Struct, array_like=True):
    """Some entries: codec and bytes of keys, of values, and of keys that are gone. Of a whole map the keys are a dict,
    and the values there."""

    keys: tuple[int, int]
    values: tuple[int, int]
    gone: tuple[int, int]


class _Map(msgspec.Struct, array_like=True):
    name: str
    whole: bool
    merge: str  # how its values merge into those before, for merge_of; "": they take their place
    chunks: list[_Chunk]
    known: int = -1  # of KeyedValues, whose keys and values are the first chunk; -1: it is none


class _Operator(msgspec.Struct, array_like=True):
    name: str
    counters: tuple[int, int, int]
    own: int  # bytes; 0: none
    maps: list[_Map]


class _Header(msgspec.Struct, array_like=True):
    key_groups: int
    operators: list[_Operator]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_snapshot(states: States, key_groups: int) -> list[Buffer]:
    """The parts of a snapshot's bytes; raises RecordError for state that cannot be saved."""
    segments: list[Buffer] = []
    operators = []
    for name, (state, counters) in states.items():
        own = b""
        maps = []
        if state is not None:
            if state.own is not None:
                own = _pickled(state.own, name)
                segments.append(own)
            maps = [_encode_map(name, title, delta, key_groups, segments) for title, delta in state.maps.items()]
        operators.append(_Operator(name, counters, len(own), maps))
    header = _encoder.encode(_Header(key_groups, operators))
    return [_LENGTH.pack(len(header)) + header, *segments]


def _encode_map(operator: str, title: str, delta: Delta, key_groups: int, segments: list[Buffer]) -> _Map:
    if isinstance(delta, KeyedWhole):
        return _encode_whole(operator, title, delta.entries, key_groups, segments)
    if isinstance(delta, KeyedLog):
        return _Map(title, False, delta.merge, _encode_log(delta, segments))
    if isinstance(delta, KeyedValues):
        chunks = [_encode_lists(operator, delta.keys, delta.values, [], key_groups, segments)]
        if delta.later is None:
            return _Map(title, False, "", chunks, delta.known)
        later = _encode_map(operator, title, delta.later, key_groups, segments)
        return _Map(title, False, later.merge, chunks + later.chunks, delta.known)
    if not delta.keys and not delta.gone:
        return _Map(title, False, "", [])
    return _Map(title, False, "", [_encode_lists(operator, delta.keys, delta.values, delta.gone, key_groups, segments)])


def _encode_log(log: KeyedLog, segments: list[Buffer]) -> list[_Chunk]:
    chunks = []
    for (key_codec, keys), (codec, partials) in log.chunks:
        segments += [keys, partials]
        chunks.append(_Chunk((key_codec, len(keys)), (codec, len(partials)), (0, 0)))
    return chunks


def _encode_lists(
    operator: str,
    keys: list[Any],
    values: list[Any] | dict[Any, Any],
    gone: list[Any],
    key_groups: int,
    segments: list[Buffer],
) -> _Chunk:
    sizes = []
    for records in (keys, values, gone):
        try:
            if isinstance(records, dict):
                codec, data = encode_values(records)
            else:
                codec, data = encode(records) if records else (0, b"")
        except Exception as error:
            if isinstance(values, dict):
                keys, values = list(values), list(values.values())
            raise _unsaved_entry(operator, keys, values, error) from error
        if data:
            segments.append(data)
        sizes.append((codec, len(data)))
    if keys and sizes[0][0] == PICKLE:
        _check_keys(operator, keys, key_groups)
    return _Chunk(*sizes)


def _encode_whole(operator: str, title: str, entries: dict[Any, Any], key_groups: int, segments: list[Buffer]) -> _Map:
    if not entries:
        return _Map(title, True, "", [])
    try:
        codec, data = encode_map(entries)
    except Exception as error:
        raise _unsaved_entry(operator, list(entries), list(entries.values()), error) from error
    if codec == PICKLE:
        _check_keys(operator, list(entries), key_groups)
    segments.append(data)
    return _Map(title, True, "", [_Chunk((codec, len(data)), (0, 0), (0, 0))])


def _check_keys(operator: str, keys: list[Any], key_groups: int) -> None:
    """Whether keys that were pickled can be sorted by key group; others can for sure."""
    try:
        partition(keys, (), _each_group(key_groups), key_groups)
    except KeyTypeError as error:
        raise _unsaved(operator, "a key of its state", error) from error


def _each_group(key_groups: int) -> bytes:
    """A table by which `partition` sorts by key group."""
    return array("H", range(key_groups)).tobytes()


def _pickled(own: Any, operator: str) -> bytes:
    try:
        return pickled(own)
    except Exception as error:
        raise _unsaved(operator, "its state", error, shorten(own)) from error


def _unsaved(operator: str, what: str, error: Exception, record: str = "") -> RecordError:
    return RecordError(
        f"operator {operator!r}: {what} cannot be saved with an epoch: {describe(error)}. Keep plain data in state "
        "(numbers, text, tuples, dicts, dataclasses), and what cannot travel in a Process, from its open() on; or run "
        "the job without epochs: run(flow, epoch_interval_s=None)",
        operator=operator,
        record=record,
        location=None,
    )


def _unsaved_entry(operator: str, keys: Sequence[Any], values: Sequence[Any], error: Exception) -> RecordError:
    """Of a list that cannot be encoded, the first entry that is to blame. There may be values whose keys come from
    elsewhere; then all that is known of the entry is its value."""
    if len(keys) != len(values):
        keys = ["?"] * len(values)
    for key, value in zip(keys, values, strict=True):
        try:
            cloudpickle.dumps((key, value), protocol=5)
        except Exception as cause:
            return _unsaved(operator, f"the state of key {shorten(key)}, {shorten(value)},", cause, shorten(value))
    return _unsaved(operator, "its state", error)


class Merged:
    """The states of some tasks put together: operator -> map -> entries, for some key groups."""

    def __init__(self, key_groups: int) -> None:
        self.key_groups = key_groups
        self.operators: dict[str, SavedState] = {}

    def add_task(
        self, snapshots: Sequence[Buffer], groups: Container[int] | None, operators: Container[str] | None = None
    ) -> None:
        """Add the state of one task: its snapshots, oldest first, the oldest whole; of these key groups and operators
        (None: all)."""
        chain = Chain(self.key_groups, operators, complete=True)
        for snapshot in snapshots:
            chain.add(snapshot)
        for name, state in chain.states().items():
            merged = self.operators.setdefault(name, SavedState())
            for title, entries in state.maps.items():
                wanted = entries if groups is None else _those_of(groups, self.key_groups, entries)
                merged.maps.setdefault(title, {}).update(wanted)
            merged.own += state.own
            merged.counters = tuple(a + b for a, b in zip(merged.counters, state.counters, strict=True))  # type: ignore[assignment]


#: The value of a key that is gone, while snapshots are put together.
_GONE = object()


@dataclass
class Chain:
    """A task's state, brought up from snapshot to snapshot. Without those before the first (not `complete`) it is noted
    which maps are whole, what was merged into others, and which keys are gone from them."""

    key_groups: int
    wanted: Container[str] | None = None  # operators; None: all
    complete: bool = False
    operators: dict[str, SavedState] = field(default_factory=dict)
    whole: set[tuple[str, str]] = field(default_factory=set)  # maps, by operator and name
    logged: dict[tuple[str, str], str] = field(default_factory=dict)  # with what merges the log
    # All values of maps. Of maps that are not whole here, what came later is among their entries; of others nothing
    # did: they are put in their places when something does, once instead of with every snapshot.
    values: dict[tuple[str, str], KeyedValues] = field(default_factory=dict)

    def add(self, snapshot: Buffer) -> None:
        """Bring the state up to the next snapshot."""
        view = memoryview(snapshot)
        try:
            (size,) = _LENGTH.unpack_from(view)
            header = _decoder.decode(view[_LENGTH.size : _LENGTH.size + size])
        except Exception as error:
            raise SnapshotDamaged(f"a snapshot of {len(view):,} bytes has no readable header: {error}") from error
        at = _LENGTH.size + size
        for operator in header.operators:
            chosen = self.wanted is None or operator.name in self.wanted
            state = self.operators.setdefault(operator.name, SavedState()) if chosen else SavedState()
            state.counters = operator.counters
            state.own = []
            if operator.own:
                if chosen:
                    state.own.append(pickle.loads(view[at : at + operator.own]))
                at += operator.own
            for kept in operator.maps:
                if chosen and header.key_groups != self.key_groups:
                    raise StoreError(
                        f"the state was saved with key_groups={header.key_groups}, and the flow has "
                        f"key_groups={self.key_groups}: give Flow(key_groups={header.key_groups})"
                    )
                end = at + sum(length for chunk in kept.chunks for _, length in (chunk.keys, chunk.values, chunk.gone))
                if chosen:
                    self._add_map((operator.name, kept.name), kept, state.maps.setdefault(kept.name, {}), view[at:end])
                at = end
        if at != len(view):
            raise SnapshotDamaged(f"a snapshot has {len(view):,} bytes where its header speaks of {at:,}")

    def states(self) -> dict[str, SavedState]:
        """The states, by operator."""
        for place in [place for place in self.values if self._is_whole(place)]:
            self._settle(place)
        return self.operators

    def delta(self, place: tuple[str, str], entries: dict[Any, Any]) -> Delta:
        """What the snapshots say of a map, in one."""
        if place in self.whole:
            return KeyedWhole(entries)
        later: KeyedLog | KeyedDelta
        if place in self.logged:
            chunk = (encode(list(entries)), encode(list(entries.values())))
            later = KeyedLog([chunk] if entries else [], self.logged[place])
        else:
            keys = [key for key, value in entries.items() if value is not _GONE]
            gone = [key for key, value in entries.items() if value is _GONE] if len(keys) < len(entries) else []
            later = KeyedDelta(keys, list(map(entries.__getitem__, keys)), gone)
        if (values := self.values.get(place)) is not None:
            return replace(values, later=later if entries else None)
        return later

    def _is_whole(self, place: tuple[str, str]) -> bool:
        return self.complete or place in self.whole

    def _add_map(self, place: tuple[str, str], kept: _Map, entries: dict[Any, Any], view: memoryview) -> None:
        if kept.whole:
            entries.clear()
            self.whole.add(place)
            self.values.pop(place, None)
        if kept.merge:
            self.logged[place] = kept.merge
        merge = merge_of(kept.merge) if kept.merge else None
        at = 0
        for number, chunk in enumerate(kept.chunks):
            if kept.whole:
                codec, length = chunk.keys
                entries.update(decode_map(codec, view[at : at + length]))
                at += length
                continue
            parts: list[list[Any]] = []
            for codec, length in (chunk.keys, chunk.values, chunk.gone):
                parts.append(decode(codec, view[at : at + length]) if length else [])
                at += length
            keys, values, gone = parts
            if number == 0 and kept.known >= 0:
                self.values[place] = _later_values(self.values.get(place), KeyedValues(kept.known, keys, values))
                if not self._is_whole(place):
                    entries.clear()
                continue
            if place in self.values and self._is_whole(place):
                self._settle(place)
            if merge is not None:
                merge(entries, iter(keys), iter(values))
            else:
                entries.update(zip(keys, values, strict=True))
                if not self._is_whole(place):
                    entries.update(dict.fromkeys(gone, _GONE))
                    continue
                for key in gone:
                    entries.pop(key, None)

    def _settle(self, place: tuple[str, str]) -> None:
        """Give a map that is whole its values."""
        found = self.values.pop(place)
        operator, name = place
        _replace_values(self.operators[operator].maps[name], found.known, found.keys, list(found.values))


def _replace_values(entries: dict[Any, Any], known: int, keys: list[Any], values: list[Any]) -> None:
    """Give a map all its values, as KeyedValues has them; what lies behind the known entries comes from a log."""
    if len(entries) < known or known + len(keys) != len(values):
        raise SnapshotDamaged(
            f"a snapshot has {len(values):,} values for {known:,} keys of earlier ones, which have {len(entries):,}, "
            f"and {len(keys):,} keys of its own"
        )
    in_order = [*islice(entries, known), *keys]
    entries.clear()
    entries.update(zip(in_order, values, strict=True))


def _later_values(before: KeyedValues | None, later: KeyedValues) -> KeyedValues:
    """The later of two, or of one, so that it builds on what the earlier built on."""
    if before is None:
        return later
    if before.known + len(before.keys) != later.known:
        raise SnapshotDamaged(
            f"a snapshot builds on {later.known:,} keys, where {before.known + len(before.keys):,} were saved before it"
        )
    return KeyedValues(before.known, before.keys + later.keys, later.values)


def _of_groups(groups: Container[int], key_groups: int, keys: list[Any], *columns: list[Any]) -> list[list[Any]]:
    """Those of the keys, and what stands beside them in the columns, that are of these key groups."""
    found: list[list[Any]] = [[] for _ in range(1 + len(columns))]
    if not keys:
        return found
    for group, share in enumerate(partition(keys, columns, _each_group(key_groups), key_groups)):
        if group in groups:
            for column, part in zip(found, share, strict=True):
                column.extend(part)
    return found


def _those_of(groups: Container[int], key_groups: int, entries: dict[Any, Any]) -> dict[Any, Any]:
    keys, values = _of_groups(groups, key_groups, list(entries), list(entries.values()))
    return dict(zip(keys, values, strict=True))


def compact(snapshots: Sequence[Buffer], key_groups: int) -> list[Buffer]:
    """One snapshot that says what consecutive snapshots of a task, oldest first, say together; whole as the first."""
    chain = Chain(key_groups)
    for snapshot in snapshots:
        chain.add(snapshot)
    states: States = {}
    for name, state in chain.states().items():
        maps = {title: chain.delta((name, title), entries) for title, entries in state.maps.items()}
        states[name] = (StageState(maps, state.own[0] if state.own else None), state.counters)
    return encode_snapshot(states, key_groups)


def worth_compacting(sizes: Sequence[int], run: int = 8) -> int | None:
    """From which of a task's snapshots on, of these sizes, to put all into one: the earliest behind which there are
    `run` and none is larger than the others together. So whatever is written again becomes part of something at least
    twice its size, which can happen only a few times however long the job runs. None: not now."""
    total = sum(sizes)
    for first in range(len(sizes) - run + 1):
        if 2 * max(sizes[first:]) <= total:
            return first
        total -= sizes[first]
    return None


def names(operators: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(map(repr, operators)) or "none"
