"""Snapshots as bytes: encodes what a task saves, and reads it back for the same or other tasks.

    header bytes u32 | header (msgpack) | segments

The header names each operator of the task with its counters, with the place of the operator's own state, and with the
places of the entries of each keyed map. For each map it also says whether the snapshot has the whole map, or only
changes to earlier snapshots. Entries are not sorted by key group, because sorting took most of the time for which a
snapshot stops its task. Only a reader with another plan needs the order, and sorts what it reads.

Entries stand in frames of about 2 MiB (codec.FRAME_BYTES). A reader goes through a snapshot from the front to the back,
in pieces, and needs the memory of one frame in addition to what it keeps. A compaction reads its oldest snapshot, which
may be very large, in the same way.

State is matched by the names of operators and of their maps. It must never depend on task numbers, or on which
operators shared a task, because a job may continue with another parallelism or a changed flow.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain as one_after_the_other
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import Any, TypeAlias

import msgspec

from penstock.runtime.errors import (
    CodecError,
    FlowError,
    KeyTypeError,
    RecordError,
    SnapshotDamaged,
    StoreError,
    describe,
    shorten,
)
from penstock.runtime.records.codec import (
    FRAME_BYTES,
    PICKLE,
    Encoded,
    KeysNowEqual,
    decode,
    decode_map,
    decode_value,
    encode_columns,
    encode_map,
    encode_values,
)
from penstock.runtime.records.key_groups import partition
from penstock.runtime.records.pickling import dumps
from penstock.runtime.state.aggregate import merge_of
from penstock.runtime.state.keyed import (
    NESTED,
    SHARED,
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


#: The bytes of a snapshot, or a function that reads them piece by piece.
Bytes: TypeAlias = Buffer | Iterator[Buffer]

#: Looks at keys of this operator that were read, and raises an error if they cannot be used.
CheckKeys: TypeAlias = Callable[[str, Iterable[Any]], None]


#: Takes the encoded parts of a snapshot, one after the other.
_Put: TypeAlias = Callable[[Buffer], object]

# The result of a compaction is in memory up to this many bytes, and then in a file without a name.
_SPOOL_BYTES = 8 << 20
_NOTHING = (0, 0)
_SOME = 1 << 16  # entries


class _Chunk(msgspec.Struct, array_like=True):
    """Some entries: the codec and the bytes of their keys, of their values, and of the keys that are gone. For a whole
    map, the keys are a dict with the values."""

    keys: tuple[int, int]
    values: tuple[int, int]
    gone: tuple[int, int]


class _Map(msgspec.Struct, array_like=True):
    name: str
    whole: bool
    merge: str  # how its values merge into earlier ones, for merge_of; "": they replace the earlier ones
    chunks: list[_Chunk]
    known: int = -1  # the field of KeyedValues; -1: this is none
    placed: int = 1  # for KeyedValues: the number of chunks that contain its keys and then its values
    size: int = -1  # the number of entries that the map has after these changes; -1: unknown


class _Operator(msgspec.Struct, array_like=True):
    name: str
    counted: tuple[int, int, int]
    own: int  # in bytes; 0: there is none
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
    """Encodes a task's state. Returns the parts of the snapshot's bytes. Raises RecordError for state that cannot be
    saved."""
    return begin_snapshot(states, key_groups)()


def begin_snapshot(states: States, key_groups: int) -> Callable[[], list[Buffer]]:
    """Encodes a task's state, except own states that are futures. Returns a function that encodes these too, when they
    are done."""
    segments: list[Buffer] = []
    operators: list[tuple[str, Counters, list[_Map]]] = []
    owns: list[tuple[Any, int]] = []  # each own state, or a future of it, and its place among the segments
    for name, (state, counters) in states.items():
        own: Any = b""
        at = len(segments)
        maps = []
        if state is not None:
            if state.own is not None:
                own = state.own if isinstance(state.own, Future) else _pickled(state.own, name)
                segments.append(b"")
            maps = [_encode_map(name, title, delta, key_groups, segments.append) for title, delta in state.maps.items()]
        operators.append((name, counters, maps))
        owns.append((own, at))

    def rest() -> list[Buffer]:
        made = []
        for (name, counters, maps), (own, at) in zip(operators, owns, strict=True):
            data = _pickled(own.result(), name) if isinstance(own, Future) else own
            if data:
                segments[at] = data
            made.append(_Operator(name, counters[:3], len(data), maps, counters[3]))
        header = _encoder.encode(_Header(key_groups, made))
        return [_LENGTH.pack(len(header)) + header, *segments]

    return rest


def _encode_map(operator: str, title: str, delta: Delta | _Placed, key_groups: int, put: _Put) -> _Map:
    if isinstance(delta, KeyedWhole):
        frames = _encode_or_say(operator, encode_map, delta.entries)
        if any(codec == PICKLE for codec, _ in frames):
            _check_keys(operator, list(delta.entries), key_groups)
        return _Map(title, True, "", [_Chunk(_put(frame, put), _NOTHING, _NOTHING) for frame in frames])
    if isinstance(delta, KeyedLog):
        chunks = [_Chunk(_put(keys, put), _put(partials, put), _NOTHING) for keys, partials in delta.chunks]
        return _Map(title, False, delta.merge, chunks, size=delta.size)
    if isinstance(delta, KeyedValues):
        delta = _Placed(delta.known, delta.keys, _encode_or_say(operator, encode_values, delta.values))
    if isinstance(delta, _Placed):
        chunks = _encode_lists(operator, delta.keys, [], [], key_groups, put)
        chunks += [_Chunk(_NOTHING, _put(frame, put), _NOTHING) for frame in delta.values]
        if delta.later is None:
            return _Map(title, False, "", chunks, delta.known, len(chunks))
        later = _encode_map(operator, title, delta.later, key_groups, put)
        return _Map(title, False, later.merge, chunks + later.chunks, delta.known, len(chunks), later.size)
    lists = _encode_lists(operator, delta.keys, delta.values, delta.gone, key_groups, put)
    return _Map(title, False, "", lists, size=delta.size)


def _put(frame: Encoded, put: _Put) -> tuple[int, int]:
    codec, data = frame
    put(data)
    return codec, len(data)


def _encode_lists(
    operator: str, keys: list[Any], values: list[Any], gone: list[Any], key_groups: int, put: _Put
) -> list[_Chunk]:
    """Encodes keys with their values, or without values, and keys that are gone."""
    chunks = []
    pickled = False
    try:
        for parts in encode_columns(keys, values) if values else encode_columns(keys):
            pickled |= parts[0][0] == PICKLE
            places = [_put(part, put) for part in parts]
            chunks.append(_Chunk(places[0], places[1] if values else _NOTHING, _NOTHING))
        chunks += [_Chunk(_NOTHING, _NOTHING, _put(parts[0], put)) for parts in encode_columns(gone)]
    except Exception as error:  # the user's classes decide what pickling them raises
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
    """Checks that pickled keys can be sorted by key group. Other keys always can."""
    try:
        partition(keys, (), _each_group(key_groups), key_groups)
    except KeyTypeError as error:
        raise _unsaved(operator, "a key of its state", error) from error


def _each_group(key_groups: int) -> bytes:
    """Returns a table by which `partition` sorts entries by key group."""
    return array("H", range(key_groups)).tobytes()


def _pickled(own: Any, operator: str) -> bytes:
    try:
        return dumps(own, saved=True)
    except Exception as error:  # as in _encode_lists
        raise _unsaved(operator, "its state", error, shorten(own)) from error


def _unsaved(operator: str, what: str, error: Exception, record: str = "") -> RecordError:
    return RecordError(
        f"operator {operator!r}: {what} cannot be saved with an epoch: {describe(error)}. Keep plain data in state "
        "(numbers, text, tuples, dicts, dataclasses), and what cannot travel in a ProcessFunction, from its open() on; "
        "or run the job without epochs (epoch_interval_s=None, or --epoch-interval 0 on the command line)",
        operator=operator,
        record=record,
        location=None,
    )


def _unsaved_entry(operator: str, keys: Sequence[Any], values: Sequence[Any], error: Exception) -> RecordError:
    """Returns the error for the first entry of a list that cannot be encoded. The keys of the values may be unknown;
    then the error names the value alone."""
    if len(keys) != len(values):
        keys = ["?"] * len(values)
    for key, value in zip(keys, values, strict=True):
        try:
            dumps((key, value), saved=True)
        except Exception as cause:  # as in _encode_lists
            return _unsaved(operator, f"the state of key {shorten(key)}, {shorten(value)},", cause, shorten(value))
    return _unsaved(operator, "its state", error)


class _Reading:
    """The bytes of a snapshot, read from the front to the back."""

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
                raise SnapshotDamaged(f"a snapshot is {size:,} bytes shorter than its header says")
            self._piece = memoryview(piece)
        part, self._piece = self._piece[:size], self._piece[size:]
        return b"".join((*parts, part)) if parts else part

    def skip(self, size: int) -> None:
        while size > 0:
            step = min(size, FRAME_BYTES)
            self.take(step)
            size -= step

    def end(self) -> None:
        """Checks that there are no more bytes. This also lets the reader of the pieces see the end of its input."""
        more = len(self._piece) + sum(map(len, self._pieces))
        if more:
            raise SnapshotDamaged(f"a snapshot has {self._taken + more:,} bytes, and its header says {self._taken:,}")

    def header(self) -> _Header:
        try:
            (size,) = _LENGTH.unpack(self.take(_LENGTH.size))
            return _decoder.decode(self.take(size))
        except (struct.error, msgspec.MsgspecError) as error:
            raise SnapshotDamaged(f"a snapshot has no readable header: {error}") from error


def holding(snapshot: Bytes) -> set[str]:
    """Returns the operators that have state, or changes of state, in a snapshot."""
    return {operator.name for operator in _Reading(snapshot).header().operators if operator.own or operator.maps}


def counters_of(snapshot: Bytes) -> dict[str, Counters]:
    """Returns the counters of each operator in a task's snapshot, without reading any state."""
    return {operator.name: operator.counters for operator in _Reading(snapshot).header().operators}


class Merged:
    """The combined states of several tasks: operator -> map -> entries, for some key groups. `check` is called with the
    name of an operator and with keys that were read, before anything is done with them."""

    def __init__(self, key_groups: int, check: CheckKeys | None = None) -> None:
        self.key_groups = key_groups
        self._check = check
        self.operators: dict[str, SavedState] = {}

    def add_task(
        self, snapshots: Iterable[Bytes], groups: Container[int] | None, operators: Container[str] | None = None
    ) -> None:
        """Adds the state of one task from its snapshots, the oldest (a base) first, for these key groups and operators
        (None: all). The snapshots are read one by one, so they need not all be in memory. Maps that tasks share are
        left out, because they belong to no key group."""
        chain = Chain(self.key_groups, operators, complete=True, shared=groups is None, check=self._check)
        for snapshot in snapshots:
            chain.add(snapshot)
        for name, state in chain.states().items():
            merged = self.operators.setdefault(name, SavedState())
            for title, entries in state.maps.items():
                if groups is None and not merged.maps.get(title):
                    merged.maps[title] = entries
                    continue
                known = merged.maps.setdefault(title, {})
                nested = title.startswith(NESTED)
                for wanted in [entries] if groups is None else _those_of(groups, self.key_groups, entries, nested):
                    if not known.keys().isdisjoint(wanted):
                        key = next(key for key in wanted if key in known)
                        raise _now_equal(name, shorten(key))
                    known.update(wanted)
            merged.own += state.own
            merged.counters = tuple(a + b for a, b in zip(merged.counters, state.counters, strict=True))  # type: ignore[assignment]

    def add_shared(self, snapshots: Iterable[Bytes], operators: Container[str]) -> None:
        """Adds the state that the first task of these operators has saved for all of their tasks."""
        chain = Chain(self.key_groups, operators, complete=True, shared=True, keyed=False, check=self._check)
        for snapshot in snapshots:
            chain.add(snapshot)
        for name, state in chain.states().items():
            if name in operators:
                self.operators.setdefault(name, SavedState()).maps.update(state.maps)


def _now_equal(operator: str, key: str) -> FlowError:
    return FlowError(
        f"operator {operator!r}: several keys that were saved are now equal, to {key}, and a key can have the "
        "state of one only. Give the class of the key the fields and the comparison that it had, and members of "
        "an Enum class that are in the key the values that they had"
    )


@contextmanager
def _naming(operator: str, title: str = "") -> Iterator[None]:
    """Says of saved objects that cannot be read in the context whose state they are, and in which map."""
    try:
        yield
    except KeysNowEqual:
        raise
    except CodecError as error:
        name = title.removeprefix(NESTED).removeprefix(SHARED)
        within = f", in {name!r}" if name else ""
        raise CodecError(f"operator {operator!r}: its saved state{within} cannot be read: {error}") from error


#: The value of a key that is gone, while snapshots are combined.
_GONE = object()


@dataclass
class _Placed:
    """All values of a map, as in KeyedValues, in encoded frames. They are decoded only when somebody needs them, and
    never when later values replace them."""

    known: int
    keys: list[Any]
    values: list[Encoded]
    later: KeyedLog | KeyedDelta | None = None

    def all(self) -> Iterator[Any]:
        return one_after_the_other.from_iterable(decode(codec, data, saved=True) for codec, data in self.values)


@dataclass
class Chain:
    """The state of a task, brought up to date snapshot by snapshot. When the first snapshots are missing, it is not
    `complete`, and contains only what the given snapshots say. If one of these has a whole map, the map's state counts
    from this snapshot on, which `bases` notes. For other maps it contains what was merged into them, and which keys are
    gone."""

    key_groups: int
    wanted: Container[str] | None = None  # operators; None: all
    complete: bool = False
    shared: bool = True  # whether it takes maps that tasks share
    keyed: bool = True  # whether it takes other maps
    check: CheckKeys | None = None  # see Merged
    operators: dict[str, SavedState] = field(default_factory=dict)
    count: int = 0  # the number of snapshots so far
    # By operator and name of the map: the number of the snapshot that has the whole map.
    bases: dict[tuple[str, str], int] = field(default_factory=dict)
    # By operator and name of the map: how its log merges.
    logged: dict[tuple[str, str], str] = field(default_factory=dict)
    # All values of maps. When a chain is not complete, later changes are among the entries. In a complete chain the
    # values are put into their places only when a later change needs them, once and not for every snapshot.
    values: dict[tuple[str, str], _Placed] = field(default_factory=dict)
    # The number of entries of maps, if the last snapshot says it.
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, snapshot: Bytes) -> None:
        """Takes the next snapshot, and brings the state up to date."""
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
            if operator.own:
                own = reading.take(operator.own)
                with _naming(operator.name):
                    state.own = [decode_value(own)]
            else:
                state.own = []
            for kept in operator.maps:
                if not (self.shared if kept.name.startswith(SHARED) else self.keyed):
                    reading.skip(_size(kept))
                    continue
                if header.key_groups != self.key_groups:
                    raise StoreError(
                        f"the state was saved with key_groups={header.key_groups}, and the flow has "
                        f"key_groups={self.key_groups}: give Flow(key_groups={header.key_groups})"
                    )
                place = (operator.name, kept.name)
                entries = state.maps.setdefault(kept.name, {})
                try:
                    with _naming(*place):
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
        if self.complete:
            for place in list(self.values):
                with _naming(*place):
                    self._settle(place)
        return self.operators

    def delta(self, place: tuple[str, str], entries: dict[Any, Any]) -> Delta | _Placed:
        """Returns, as one change, the changes of a map without a base."""
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
                some = decode_map(codec, reading.take(length))
                if self.check is not None:
                    self.check(place[0], some)
                _put_in(entries, some)
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
            if self.check is not None:
                self.check(place[0], keys)
                self.check(place[0], gone)
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
        """Takes all values of a map, but puts none into its place yet."""
        new: list[Any] = []
        values: list[Encoded] = []
        for chunk in kept.chunks[: kept.placed]:
            codec, length = chunk.keys
            if length:
                some = decode(codec, reading.take(length), saved=True)
                if self.check is not None:
                    self.check(place[0], some)
                new += some
            codec, length = chunk.values
            if length:
                values.append((codec, bytes(reading.take(length))))
        if self.complete:
            if len(entries) < kept.known:
                raise SnapshotDamaged(
                    f"a snapshot has values for {kept.known:,} keys of earlier ones, which have {len(entries):,}"
                )
            # The entries after the known ones came from a log, and are among the new keys.
            for key in list(islice(reversed(entries), len(entries) - kept.known)):
                del entries[key]
            _put_in(entries, dict.fromkeys(new))
            if len(entries) != kept.known + len(new):
                raise KeysNowEqual([*entries, *new])
        else:
            before = self.values.get(place)
            if before is not None:  # what the earlier snapshot built on
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
        """Puts the values of a map into their places, in the order of the map, frame by frame. No key is added or
        removed."""
        placed = self.values.pop(place)
        operator, name = place
        entries = self.operators[operator].maps[name]
        keys, seen = iter(entries), 0
        for codec, data in placed.values:
            values = decode(codec, data, saved=True)
            seen += len(values)
            entries.update(zip(islice(keys, len(values)), values, strict=False))
        if seen != len(entries):
            raise SnapshotDamaged(f"a snapshot has {seen:,} values for {len(entries):,} keys")


def _put_in(entries: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Adds entries with other keys. Raises KeysNowEqual when a key is there already."""
    size = len(entries) + len(new)
    entries.update(new)
    if len(entries) != size:
        raise KeysNowEqual([*entries, *new])


def _size(kept: _Map) -> int:
    return sum(length for chunk in kept.chunks for _, length in (chunk.keys, chunk.values, chunk.gone))


def _lists(chunk: _Chunk, reading: _Reading) -> list[list[Any]]:
    return [
        decode(codec, reading.take(length), saved=True) if length else []
        for codec, length in (chunk.keys, chunk.values, chunk.gone)
    ]


def _those_of(
    groups: Container[int], key_groups: int, entries: dict[Any, Any], nested: bool = False
) -> Iterator[dict[Any, Any]]:
    """Yields the entries that belong to these key groups, a few at a time, so that little of them is in memory twice.
    `nested`: the key of an entry is a pair of a key and a part."""
    items = iter(entries.items())
    while some := dict(islice(items, _SOME)):
        places = list(some)
        keys = [key for key, _ in places] if nested else places
        shares = partition(keys, (places, list(some.values())), _each_group(key_groups), key_groups)
        wanted = (zip(*share[1:], strict=True) for group, share in enumerate(shares) if group in groups)
        yield dict(one_after_the_other.from_iterable(wanted))


def compact(snapshots: Sequence[Buffer | Callable[[], Iterator[Buffer]]], key_groups: int) -> Iterator[Buffer]:
    """Returns one snapshot that says the same as consecutive snapshots of a task, the oldest first. It is whole if the
    first one is.

    Of a base, only one frame is in memory at a time. All later changes are in memory, with one value for each key. So
    the base may have any size. The result waits in a file without a name until the sizes in its header are known.
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
                base = chain.bases.get((name, title))
                if base is None:
                    delta = chain.delta((name, title), entries)
                    maps.append(_encode_map(name, title, delta, key_groups, spool.write))
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
    """Yields the frames of a whole map, with all later changes."""
    operator, title = place
    later = chain.operators[operator].maps[title]
    merge = merge_of(chain.logged[place]) if place in chain.logged else None
    placed = chain.values.get(place)

    def brought_up(entries: dict[Any, Any]) -> bool:
        """Applies the later changes to these entries. Changes that were applied are removed."""
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
            # The entries after the known ones came from a log, and are among the new keys.
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
            raise SnapshotDamaged(f"a snapshot has {more:,} more values than keys")
    yield from encode_map({key: value for key, value in later.items() if value is not _GONE})


def _with_values(keys: list[Any], values: Iterator[Any]) -> dict[Any, Any]:
    found = dict(zip(keys, values, strict=False))  # in this order, so that no value too many is taken
    if len(found) != len(keys):
        raise SnapshotDamaged("a snapshot has fewer values than keys")
    return found


def worth_compacting(sizes: Sequence[int], run: int = 8) -> int | None:
    """Returns the index of the first of a task's snapshots, of these sizes, that should be compacted into one with all
    later ones. It is the earliest index from which on there are at least `run` snapshots, of which none is larger than
    the others together. So bytes that are written again become part of something at least twice their size, which can
    happen only a few times, however long the job runs. Returns None when no compaction is worth it yet."""
    total = sum(sizes)
    for first in range(len(sizes) - run + 1):
        if 2 * max(sizes[first:]) <= total:
            return first
        total -= sizes[first]
    return None


def names(operators: Iterable[str]) -> str:
    return ", ".join(map(repr, operators)) or "none"
