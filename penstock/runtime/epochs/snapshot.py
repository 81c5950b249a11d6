"""A task's snapshot as bytes, and back: from any number of tasks' snapshots to any number of tasks.

    header bytes u32 | header (msgpack) | segments

The header names each operator of the task with its counters, where its own state stands, and for each keyed map where
its entries stand. A map's entry says whether it is whole or builds on the snapshots before it. Entries are not sorted
by key group: that took most of the time for which a snapshot stops its task, and only who goes on with another plan
needs it. They sort what they read.

Entries stand in frames of about 2 MiB (codec.FRAME_BYTES). Whoever reads a snapshot does so from the front to the back,
in pieces, and needs the memory of one frame beside what it reads. Whoever puts snapshots together reads the oldest of
them, which may be very large, in the same way.

State of a job with another parallelism, or of a changed flow, is matched by the names of operators and of their maps;
it must never depend on task numbers or on which operators shared a task.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain as one_after_the_other
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import Any, TypeAlias

import msgspec

from penstock.runtime.errors import FlowError, KeyTypeError, RecordError, SnapshotDamaged, StoreError, shorten
from penstock.runtime.records.codec import (
    FRAME_BYTES,
    PICKLE,
    Encoded,
    KeysNowEqual,
    decode,
    decode_map,
    encode_columns,
    encode_map,
    encode_values,
)
from penstock.runtime.records.key_groups import partition
from penstock.runtime.records.pickling import dumps, loads
from penstock.runtime.records.userfunc import describe
from penstock.runtime.state.aggregate import merge_of
from penstock.runtime.state.keyed import (
    Counters,
    Delta,
    KeyedDelta,
    KeyedLog,
    KeyedValues,
    KeyedWhole,
    SavedState,
    StageState,
)
from penstock.runtime.transport.base import Buffer

_LENGTH = struct.Struct("<I")

#: What a task saves: operator -> (state or None, counters).
States = dict[str, "tuple[StageState | None, Counters]"]


#: A snapshot's bytes, or what reads them piece by piece.
Bytes: TypeAlias = Buffer | Iterator[Buffer]

# What is put together is in memory up to so many bytes, then in a file without a name.
_SPOOL_BYTES = 8 << 20
_NOTHING = (0, 0)
_SOME = 1 << 16  # entries


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
    known: int = -1  # of KeyedValues; -1: it is none
    placed: int = 1  # of KeyedValues: so many of the chunks are its keys and, behind them, its values
    size: int = -1  # entries that the map has with these changes; -1: not known


class _Operator(msgspec.Struct, array_like=True):
    name: str
    counted: tuple[int, int, int]
    own: int  # bytes; 0: none
    maps: list[_Map]
    late: int = 0

    @property
    def counters(self) -> Counters:
        return (*self.counted, self.late)


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
        operators.append(_Operator(name, counters[:3], len(own), maps, counters[3]))
    header = _encoder.encode(_Header(key_groups, operators))
    return [_LENGTH.pack(len(header)) + header, *segments]


def _encode_map(operator: str, title: str, delta: Delta | _Placed, key_groups: int, segments: list[Buffer]) -> _Map:
    if isinstance(delta, KeyedWhole):
        frames = _encode_or_say(operator, encode_map, delta.entries)
        if any(codec == PICKLE for codec, _ in frames):
            _check_keys(operator, list(delta.entries), key_groups)
        return _Map(title, True, "", [_Chunk(_put(frame, segments), _NOTHING, _NOTHING) for frame in frames])
    if isinstance(delta, KeyedLog):
        return _Map(title, False, delta.merge, _encode_log(delta, segments), size=delta.size)
    if isinstance(delta, KeyedValues):
        delta = _Placed(delta.known, delta.keys, _encode_or_say(operator, encode_values, delta.values))
    if isinstance(delta, _Placed):
        chunks = _encode_lists(operator, delta.keys, [], [], key_groups, segments)
        chunks += [_Chunk(_NOTHING, _put(frame, segments), _NOTHING) for frame in delta.values]
        if delta.later is None:
            return _Map(title, False, "", chunks, delta.known, len(chunks))
        later = _encode_map(operator, title, delta.later, key_groups, segments)
        return _Map(title, False, later.merge, chunks + later.chunks, delta.known, len(chunks), later.size)
    lists = _encode_lists(operator, delta.keys, delta.values, delta.gone, key_groups, segments)
    return _Map(title, False, "", lists, size=delta.size)


def _put(frame: Encoded, segments: list[Buffer]) -> tuple[int, int]:
    codec, data = frame
    segments.append(data)
    return codec, len(data)


def _encode_log(log: KeyedLog, segments: list[Buffer]) -> list[_Chunk]:
    return [_Chunk(_put(keys, segments), _put(partials, segments), _NOTHING) for keys, partials in log.chunks]


def _encode_lists(
    operator: str, keys: list[Any], values: list[Any], gone: list[Any], key_groups: int, segments: list[Buffer]
) -> list[_Chunk]:
    """Keys with their values, or without, and keys that are gone."""
    chunks = []
    pickled = False
    try:
        for parts in encode_columns(keys, values) if values else encode_columns(keys):
            pickled |= parts[0][0] == PICKLE
            places = [_put(part, segments) for part in parts]
            chunks.append(_Chunk(places[0], places[1] if values else _NOTHING, _NOTHING))
        chunks += [_Chunk(_NOTHING, _NOTHING, _put(parts[0], segments)) for parts in encode_columns(gone)]
    except Exception as error:  # of the user's classes, which decide what pickling them raises
        raise _unsaved_entry(operator, keys or gone, values or keys or gone, error) from error
    if pickled:
        _check_keys(operator, keys, key_groups)
    return chunks


def _encode_or_say(
    operator: str, how: Callable[[dict[Any, Any]], list[Encoded]], entries: dict[Any, Any]
) -> list[Encoded]:
    try:
        return how(entries)
    except Exception as error:  # as in _encode_lists
        raise _unsaved_entry(operator, list(entries), list(entries.values()), error) from error


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
        return dumps(own)
    except Exception as error:  # as in _encode_lists
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
            dumps((key, value))
        except Exception as cause:  # as in _encode_lists
            return _unsaved(operator, f"the state of key {shorten(key)}, {shorten(value)},", cause, shorten(value))
    return _unsaved(operator, "its state", error)


class _Reading:
    """A snapshot's bytes, taken front to back."""

    def __init__(self, snapshot: Bytes) -> None:
        whole = isinstance(snapshot, bytes | bytearray | memoryview)
        self._pieces: Iterator[Buffer] = iter((snapshot,)) if whole else snapshot  # type: ignore[arg-type,assignment]
        self._piece = memoryview(b"")
        self._taken = 0

    def take(self, size: int) -> Buffer:
        parts: list[memoryview] = []
        self._taken += size
        while size > len(self._piece):
            parts.append(self._piece)
            size -= len(self._piece)
            piece = next(self._pieces, None)
            if piece is None:
                raise SnapshotDamaged(f"a snapshot ends {size:,} bytes before what its header speaks of")
            self._piece = memoryview(piece)
        part, self._piece = self._piece[:size], self._piece[size:]
        return b"".join((*parts, part)) if parts else part

    def skip(self, size: int) -> None:
        while size > 0:
            step = min(size, FRAME_BYTES)
            self.take(step)
            size -= step

    def end(self) -> None:
        """There must be no more; this also lets who reads the pieces see the end of what they read."""
        more = len(self._piece) + sum(map(len, self._pieces))
        if more:
            raise SnapshotDamaged(
                f"a snapshot has {self._taken + more:,} bytes where its header speaks of {self._taken:,}"
            )

    def header(self) -> _Header:
        """What the snapshot says that it holds; this comes first."""
        try:
            (size,) = _LENGTH.unpack(self.take(_LENGTH.size))
            return _decoder.decode(self.take(size))
        except (struct.error, msgspec.MsgspecError) as error:
            raise SnapshotDamaged(f"a snapshot has no readable header: {error}") from error


def holding(snapshot: Bytes) -> set[str]:
    """The operators that have state in a snapshot, or what changed of it."""
    return {operator.name for operator in _Reading(snapshot).header().operators if operator.own or operator.maps}


def counters_of(snapshot: Bytes) -> dict[str, Counters]:
    """The counters of each operator in a snapshot of a task; no state is looked at."""
    return {operator.name: operator.counters for operator in _Reading(snapshot).header().operators}


class Merged:
    """The states of some tasks put together: operator -> map -> entries, for some key groups."""

    def __init__(self, key_groups: int) -> None:
        self.key_groups = key_groups
        self.operators: dict[str, SavedState] = {}

    def add_task(
        self, snapshots: Iterable[Bytes], groups: Container[int] | None, operators: Container[str] | None = None
    ) -> None:
        """Add the state of one task: its snapshots, oldest first, the oldest whole; of these key groups and operators
        (None: all). They are taken one by one, so that they need not all be in memory."""
        chain = Chain(self.key_groups, operators, complete=True)
        for snapshot in snapshots:
            chain.add(snapshot)
        for name, state in chain.states().items():
            merged = self.operators.setdefault(name, SavedState())
            for title, entries in state.maps.items():
                if groups is None and not merged.maps.get(title):
                    merged.maps[title] = entries
                    continue
                known = merged.maps.setdefault(title, {})
                for wanted in [entries] if groups is None else _those_of(groups, self.key_groups, entries):
                    if not known.keys().isdisjoint(wanted):
                        key = next(key for key in wanted if key in known)
                        raise _now_equal(name, shorten(key))
                    known.update(wanted)
            merged.own += state.own
            merged.counters = tuple(a + b for a, b in zip(merged.counters, state.counters, strict=True))  # type: ignore[assignment]


def _now_equal(operator: str, key: str) -> FlowError:
    return FlowError(
        f"operator {operator!r}: several keys that were saved are now equal, to {key}, and a key can go on with the "
        "state of one only. Give the class of the key the fields and the comparison that it had"
    )


#: The value of a key that is gone, while snapshots are put together.
_GONE = object()


@dataclass
class _Placed:
    """All values of a map, as KeyedValues has them, in frames as they were encoded: they are decoded once they are
    wanted, which is not when others come that take their place."""

    known: int
    keys: list[Any]
    values: list[Encoded]
    later: KeyedLog | KeyedDelta | None = None

    def all(self) -> Iterator[Any]:
        return one_after_the_other.from_iterable(decode(codec, data) for codec, data in self.values)


@dataclass
class Chain:
    """A task's state, brought up from snapshot to snapshot. Without those before the first (not `complete`) it is what
    the snapshots say of it: of maps that are whole in one only from behind that on, which is noted as their base; of
    others it is noted what was merged into them, and which keys are gone from them."""

    key_groups: int
    wanted: Container[str] | None = None  # operators; None: all
    complete: bool = False
    operators: dict[str, SavedState] = field(default_factory=dict)
    count: int = 0  # snapshots so far
    bases: dict[tuple[str, str], int] = field(default_factory=dict)  # maps, by operator and name: snapshots
    logged: dict[tuple[str, str], str] = field(default_factory=dict)  # with what merges the log
    # All values of maps. What came later is among the entries where these are not complete. Where they are nothing did:
    # the values are put in their places when something does, once instead of with every snapshot.
    values: dict[tuple[str, str], _Placed] = field(default_factory=dict)
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)  # entries of maps, where the last snapshot says it

    def add(self, snapshot: Bytes) -> None:
        """Bring the state up to the next snapshot."""
        reading = _Reading(snapshot)
        header = reading.header()
        for operator in header.operators:
            if self.wanted is not None and operator.name not in self.wanted:
                state = self.operators.setdefault(operator.name, SavedState())
                state.counters = operator.counters
                reading.skip(operator.own + sum(map(_size, operator.maps)))
                continue
            state = self.operators.setdefault(operator.name, SavedState())
            state.counters = operator.counters
            state.own = [loads(reading.take(operator.own))] if operator.own else []
            for kept in operator.maps:
                if header.key_groups != self.key_groups:
                    raise StoreError(
                        f"the state was saved with key_groups={header.key_groups}, and the flow has "
                        f"key_groups={self.key_groups}: give Flow(key_groups={header.key_groups})"
                    )
                place = (operator.name, kept.name)
                entries = state.maps.setdefault(kept.name, {})
                try:
                    self._add_map(place, kept, entries, reading)
                except KeysNowEqual as error:
                    raise _now_equal(operator.name, shorten(error.key)) from error
                self.sizes[place] = kept.size
                if self.complete and kept.size >= 0 and len(entries) != kept.size:
                    some = f"what others are, such as {shorten(next(iter(entries), None))}"
                    raise _now_equal(operator.name, some)
        reading.end()
        self.count += 1

    def states(self) -> dict[str, SavedState]:
        """The states, by operator."""
        if self.complete:
            for place in list(self.values):
                self._settle(place)
        return self.operators

    def delta(self, place: tuple[str, str], entries: dict[Any, Any]) -> Delta | _Placed:
        """What the snapshots say of a map without a base, in one."""
        later: KeyedLog | KeyedDelta
        if place in self.logged:
            frames = encode_columns(list(entries), list(entries.values()))
            logged = [(keys, partials) for keys, partials in frames]
            later = KeyedLog(logged, self.logged[place], self.sizes[place])
        else:
            keys = [key for key, value in entries.items() if value is not _GONE]
            gone = [key for key, value in entries.items() if value is _GONE] if len(keys) < len(entries) else []
            later = KeyedDelta(keys, list(map(entries.__getitem__, keys)), gone, self.sizes[place])
        if (placed := self.values.get(place)) is not None:
            placed.later = later if entries else None
            return placed
        return later

    def _add_map(self, place: tuple[str, str], kept: _Map, entries: dict[Any, Any], reading: _Reading) -> None:
        if kept.whole:
            entries.clear()
            self.values.pop(place, None)
            if not self.complete:
                self.bases[place] = self.count
                reading.skip(_size(kept))
                return
            for chunk in kept.chunks:
                codec, length = chunk.keys
                _put_in(entries, decode_map(codec, reading.take(length)))
            return
        chunks = kept.chunks
        if kept.known >= 0:
            self._place(place, kept, entries, reading)
            chunks = chunks[kept.placed :]
        if kept.merge:
            self.logged[place] = kept.merge
        if chunks and self.complete and place in self.values:
            self._settle(place)
        merge = merge_of(kept.merge) if kept.merge else None
        for chunk in chunks:
            keys, values, gone = _lists(chunk, reading)
            if merge is not None:
                merge(entries, iter(keys), iter(values))
                continue
            changed = dict(zip(keys, values, strict=True))
            if len(changed) != len(keys):
                raise KeysNowEqual(keys)
            entries.update(changed)
            if not self.complete:
                entries.update(dict.fromkeys(gone, _GONE))
                continue
            for key in gone:
                entries.pop(key, None)

    def _place(self, place: tuple[str, str], kept: _Map, entries: dict[Any, Any], reading: _Reading) -> None:
        """Take up all values of a map, but put none in its place yet."""
        new: list[Any] = []
        values: list[Encoded] = []
        for chunk in kept.chunks[: kept.placed]:
            codec, length = chunk.keys
            if length:
                new += decode(codec, reading.take(length))
            codec, length = chunk.values
            if length:
                values.append((codec, bytes(reading.take(length))))
        if self.complete:
            if len(entries) < kept.known:
                raise SnapshotDamaged(
                    f"a snapshot has values for {kept.known:,} keys of earlier ones, which have {len(entries):,}"
                )
            # What lies behind the known entries came from a log, and is among the new keys.
            for key in list(islice(reversed(entries), len(entries) - kept.known)):
                del entries[key]
            _put_in(entries, dict.fromkeys(new))
            if len(entries) != kept.known + len(new):
                raise KeysNowEqual([*entries, *new])
        else:
            before = self.values.get(place)
            if before is not None:  # what the earlier built on
                if before.known + len(before.keys) != kept.known:
                    raise SnapshotDamaged(
                        f"a snapshot builds on {kept.known:,} keys, where {before.known + len(before.keys):,} were "
                        "saved before it"
                    )
                self.values[place] = _Placed(before.known, before.keys + new, values)
                entries.clear()
                return
            entries.clear()
        self.values[place] = _Placed(kept.known, new, values)

    def _settle(self, place: tuple[str, str]) -> None:
        """Give a map its values, in its order, frame by frame; no key comes or goes."""
        placed = self.values.pop(place)
        operator, name = place
        entries = self.operators[operator].maps[name]
        keys, seen = iter(entries), 0
        for codec, data in placed.values:
            values = decode(codec, data)
            seen += len(values)
            entries.update(zip(islice(keys, len(values)), values, strict=False))
        if seen != len(entries):
            raise SnapshotDamaged(f"a snapshot has {seen:,} values for {len(entries):,} keys")


def _put_in(entries: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Add entries of other keys; KeysNowEqual when they are the same."""
    size = len(entries) + len(new)
    entries.update(new)
    if len(entries) != size:
        raise KeysNowEqual([*entries, *new])


def _size(kept: _Map) -> int:
    """The bytes of a map's entries."""
    return sum(length for chunk in kept.chunks for _, length in (chunk.keys, chunk.values, chunk.gone))


def _lists(chunk: _Chunk, reading: _Reading) -> list[list[Any]]:
    return [
        decode(codec, reading.take(length)) if length else []
        for codec, length in (chunk.keys, chunk.values, chunk.gone)
    ]


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


def _those_of(groups: Container[int], key_groups: int, entries: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Some at a time, so that little is in memory twice."""
    items = iter(entries.items())
    while some := dict(islice(items, _SOME)):
        keys, values = _of_groups(groups, key_groups, list(some), list(some.values()))
        yield dict(zip(keys, values, strict=True))


def compact(snapshots: Sequence[Buffer | Callable[[], Iterator[Buffer]]], key_groups: int) -> Iterator[Buffer]:
    """One snapshot that says what consecutive snapshots of a task, oldest first, say together; whole as the first.

    What is whole is never in memory but for a frame, what changed after it is: so there is a base of any size, and its
    changes, one value a key. The result waits in a file without a name until its sizes are known.
    """
    chain = Chain(key_groups)
    for snapshot in snapshots:
        chain.add(_opened(snapshot))
    with SpooledTemporaryFile(_SPOOL_BYTES) as spool:
        operators = []
        for name, state in chain.states().items():
            own = _pickled(state.own[0], name) if state.own else b""
            spool.write(own)
            maps = []
            for title, entries in state.maps.items():
                segments: list[Buffer] = []
                base = chain.bases.get((name, title))
                if base is None:
                    maps.append(_encode_map(name, title, chain.delta((name, title), entries), key_groups, segments))
                    spool.writelines(segments)
                    continue
                chunks = []
                for codec, data in _merged(chain, (name, title), _frames(_opened(snapshots[base]), name, title)):
                    spool.write(data)
                    chunks.append(_Chunk((codec, len(data)), _NOTHING, _NOTHING))
                maps.append(_Map(title, True, "", chunks))
            operators.append(_Operator(name, state.counters[:3], len(own), maps, state.counters[3]))
        header = _encoder.encode(_Header(key_groups, operators))
        yield _LENGTH.pack(len(header)) + header
        spool.seek(0)
        while piece := spool.read(FRAME_BYTES):
            yield piece


def _opened(snapshot: Buffer | Callable[[], Iterator[Buffer]]) -> Bytes:
    return snapshot() if callable(snapshot) else snapshot


def _frames(snapshot: Bytes, operator: str, title: str) -> Iterator[tuple[int, Buffer]]:
    """The frames of a map that is whole in a snapshot."""
    reading = _Reading(snapshot)
    for found in reading.header().operators:
        reading.skip(found.own)
        for kept in found.maps:
            if (found.name, kept.name) != (operator, title):
                reading.skip(_size(kept))
                continue
            for chunk in kept.chunks:
                codec, length = chunk.keys
                yield codec, reading.take(length)
    reading.end()


def _merged(chain: Chain, place: tuple[str, str], base: Iterator[tuple[int, Buffer]]) -> Iterator[tuple[int, Buffer]]:
    """The frames of a map that is whole, with all that came later."""
    operator, title = place
    later = chain.operators[operator].maps[title]
    merge = merge_of(chain.logged[place]) if place in chain.logged else None
    placed = chain.values.get(place)

    def brought_up(entries: dict[Any, Any]) -> bool:
        """Bring entries up to what came later, which is done with then."""
        changed = later.keys() & entries.keys()
        values = list(map(later.pop, changed))
        if merge is not None:
            merge(entries, iter(changed), iter(values))
        else:
            for key, value in zip(changed, values, strict=True):
                if value is _GONE:
                    del entries[key]
                else:
                    entries[key] = value
        return bool(changed)

    at = 0
    values = iter(()) if placed is None else placed.all()
    for codec, data in base:
        if placed is None and not later:
            yield codec, data
            continue
        entries = decode_map(codec, data)
        if placed is not None:
            # What lies behind the known entries came from a log, and is among the new keys.
            keys = list(islice(entries, max(0, placed.known - at)))
            at += len(keys)
            entries = _with_values(keys, values)
        if brought_up(entries) or placed is not None:
            yield from encode_map(entries)
        else:
            yield codec, data
    if placed is not None:
        if at != placed.known:
            raise SnapshotDamaged(f"a snapshot has values for {placed.known:,} keys of earlier ones, which have {at:,}")
        new = iter(placed.keys)
        while keys := list(islice(new, _SOME)):
            entries = _with_values(keys, values)
            brought_up(entries)
            yield from encode_map(entries)
        if (more := sum(1 for _ in values)) > 0:
            raise SnapshotDamaged(f"a snapshot has {more:,} values more than keys")
    yield from encode_map({key: value for key, value in later.items() if value is not _GONE})


def _with_values(keys: list[Any], values: Iterator[Any]) -> dict[Any, Any]:
    found = dict(zip(keys, values, strict=False))  # in this order: of the values none is taken too many
    if len(found) != len(keys):
        raise SnapshotDamaged("a snapshot has fewer values than keys")
    return found


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
