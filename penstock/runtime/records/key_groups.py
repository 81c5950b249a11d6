"""Key groups: which task a key belongs to, by key -> stable hash -> key group -> task.

The key group is the unit of state: a snapshot is read by key group, and a rescale reassigns whole groups. So a key must
have the same group in every process, on every machine and in every release. Nothing here may use Python's own
randomised `hash()` of texts, the address of an object, or the name of a module (the `__main__` of a script has another
name in a worker). Native code hashes whole lists; this module adds the tables, and the rarer types of keys.

Dividing records by key among tasks is docs/papers.md: A2.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

from penstock.runtime._native import key_groups, partition, stable_hash
from penstock.runtime.errors import FlowError, KeyTypeError
from penstock.runtime.scalars import python_number

if TYPE_CHECKING:
    from penstock.runtime.records.userfunc import ErrorHandler


__all__ = ["KeyGroups", "canonical_key", "key_groups", "partition", "stable_hash", "without_bad_keys"]

DEFAULT_KEY_GROUPS = 128
MOST_KEY_GROUPS = 65536  # groups and tasks are 16-bit numbers in a table


@dataclass(frozen=True)
class KeyGroups:
    """The fixed number of key groups of a job, and how tasks share them.

    The number (the setting `key_groups`) is chosen once for the life of a job. It limits the parallelism of a keyed
    operator, and state that was saved with one number cannot be read with another.
    """

    n_groups: int = DEFAULT_KEY_GROUPS

    def __post_init__(self) -> None:
        if not 1 <= self.n_groups <= MOST_KEY_GROUPS:
            raise FlowError(f"key_groups={self.n_groups}; it must be 1 to {MOST_KEY_GROUPS}")

    def table(self, parallelism: int) -> bytes:
        """Returns the task of each group as native unsigned 16-bit numbers, as `partition` takes them.

        Each task owns a contiguous range of groups, and the sizes of the ranges differ by at most one, as in Flink.
        """
        self._check(parallelism)
        return _table(self.n_groups, parallelism)

    def rescaled(self, table: bytes, parallelism: int) -> bytes:
        """Returns a table for another parallelism that leaves as many groups as possible with the tasks that `table`
        gives them.

        The shares differ by at most one group. Unlike `table()`, the result depends on the present table, and a task's
        groups need not be contiguous. So whoever uses it must save it with the epoch.
        """
        self._check(parallelism)
        tasks = array("H", table)
        if len(tasks) != self.n_groups:
            raise ValueError(f"the table has {len(tasks)} groups, not {self.n_groups}")
        held = [0] * parallelism
        for task in tasks:
            if task < parallelism:
                held[task] += 1
        share, larger = divmod(self.n_groups, parallelism)
        room = [share] * parallelism
        for task in sorted(range(parallelism), key=lambda task: (-held[task], task))[:larger]:
            # Tasks with the most groups get the larger shares, so that the fewest groups are reassigned.
            room[task] += 1
        homeless = []
        for group, task in enumerate(tasks):
            if task < parallelism and room[task]:
                room[task] -= 1
            else:
                homeless.append(group)
        free = (task for task in range(parallelism) for _ in range(room[task]))
        for group, task in zip(homeless, free, strict=True):
            tasks[group] = task
        return tasks.tobytes()

    def _check(self, parallelism: int) -> None:
        if parallelism < 1:
            raise FlowError(f"parallelism={parallelism}; it must be 1 or more")
        if parallelism > self.n_groups:
            raise FlowError(
                f"parallelism {parallelism} of a keyed operator is above key_groups, which is "
                f"{self.n_groups}: some tasks would own no keys. Lower the parallelism, or start the job "
                f"with key_groups={parallelism} or more"
            )


@lru_cache(maxsize=64)
def _table(n_groups: int, parallelism: int) -> bytes:
    return array("H", (group * parallelism // n_groups for group in range(n_groups))).tobytes()


_EPOCH_DAY = 86_400 * 1_000_000  # in microseconds


def without_bad_keys(
    keys: list[Any], records: list[Any], errors: ErrorHandler, named: list[Any] | None = None
) -> tuple[list[Any], list[Any]]:
    """Returns keys and records as parallel lists, without the records whose key has no stable hash. These go to
    `errors`, or, if `named` is given, what stands for them there."""
    named = records if named is None else named
    with suppress(KeyTypeError):
        key_groups(keys, 1)
        return keys, records
    good_keys: list[Any] = []
    good_records: list[Any] = []
    start = 0
    # A few at a time, so that the time does not grow with the square of the number of bad keys.
    while start < len(keys):
        end = start + 64
        try:
            key_groups(keys[start:end], 1)
        except KeyTypeError as error:
            end = start + error.index  # type: ignore[attr-defined]
            errors.handle(named[end], error)
            good_keys += keys[start:end]
            good_records += records[start:end]
            start = end + 1
        else:
            good_keys += keys[start:end]
            good_records += records[start:end]
            start = end
    return good_keys, good_records


def canonical_key(key: object) -> object:
    """Turns a key that the native hash does not know into one that it knows. Raises KeyTypeError when there is none.

    Equal keys get equal stand-ins. The stand-in of a number is an int with the same hash, because Python's hash is the
    same for equal numbers of all types. Native code calls this for each such key. It must not return a value of a type
    that the native code does not handle at the top level.
    """
    try:
        return _canonical(key)
    except (KeyTypeError, RecursionError):
        raise
    except Exception as error:  # of code of the key's class; the record's key is bad then, not the job
        raise KeyTypeError(
            f"a key of type {type(key).__qualname__} cannot be hashed: {type(error).__name__}: {error}. Return a field "
            "of it, or a tuple of fields, from the key function"
        ) from error


def _canonical(key: object) -> object:
    # Numbers come before enums: a member of an enum that is also a Decimal equals that Decimal.
    if isinstance(key, Decimal):
        return _not_a_number() if key.is_nan() else Decimal.__hash__(key)
    if isinstance(key, Fraction):
        return Fraction.__hash__(key)
    if isinstance(key, complex):
        nan = math.isnan(key.real) or math.isnan(key.imag)
        return _not_a_number() if nan else complex.__hash__(key)
    if isinstance(key, float):  # all other floats are hashed natively
        return _not_a_number()
    if isinstance(key, datetime):
        if type(key).__name__ == "NaTType":  # of pandas
            _not_a_number("NaT")
        # Two times of the same zone are equal whatever their `fold`, so the hash ignores it too.
        offset = key.replace(fold=0).utcoffset()
        wall = key.toordinal() * _EPOCH_DAY + _microseconds(key)
        return ("datetime", wall) if offset is None else ("instant", wall - _span(offset))
    if isinstance(key, date):
        return ("date", key.toordinal())
    if isinstance(key, time):
        offset = key.replace(fold=0).utcoffset()
        wall = _microseconds(key)
        return ("time", wall) if offset is None else ("zoned time", wall - _span(offset))
    if isinstance(key, timedelta):
        return ("timedelta", _span(key))
    if isinstance(key, UUID):
        return ("uuid", key.bytes)
    cls = type(key)
    if isinstance(key, Enum):
        # By name, because values may be of any type. A combination of flags is a member without a name.
        identity = key._value_ if isinstance(key, Flag) else key._name_
        return ("enum", cls.__qualname__, identity)
    if _is_value_dataclass(cls):
        fields = dataclasses.fields(key)  # type: ignore[arg-type]
        names = (field.name for field in fields if field.compare and field.hash is not False)
        return ("dataclass", cls.__qualname__, tuple(getattr(key, name) for name in names))
    return _numpy_key(key)


def _microseconds(clock: datetime | time) -> int:
    seconds = (clock.hour * 60 + clock.minute) * 60 + clock.second
    return seconds * 1_000_000 + clock.microsecond


def _span(delta: timedelta) -> int:
    return delta.days * _EPOCH_DAY + delta.seconds * 1_000_000 + delta.microseconds


def _is_value_dataclass(cls: type) -> bool:
    params = getattr(cls, "__dataclass_params__", None)
    return params is not None and params.eq and (params.frozen or params.unsafe_hash)


def _not_a_number(name: str = "NaN") -> NoReturn:
    """NaN equals nothing, not even itself. Each NaN would be a key of its own, and the state would grow for ever."""
    raise KeyTypeError(
        f"a key is {name}, or has {name} in it, and {name} equals no other key. Let the key function return another "
        "key for such records, for example None, or filter them out before"
    )


def _numpy_key(key: object) -> object:
    number = python_number(key)
    if number is not key:
        return canonical_key(number) if isinstance(number, complex) else number
    raise KeyTypeError(
        f"a key of type {type(key).__qualname__} has no hash that is the same in every process"
        f"{_advice(key)}. Keys can be str, bytes, int, float, complex, bool, None, Decimal, Fraction, UUID, "
        "date, time, datetime, timedelta, Enum members, NumPy numbers, frozen dataclasses, and tuples, named "
        "tuples and frozensets of these"
    )


def _advice(key: object) -> str:
    for types, advice in _ADVICE:
        if isinstance(key, types):
            return f": {advice}"
    if dataclasses.is_dataclass(key):
        return ": declare it @dataclass(frozen=True)"
    if (kind := getattr(getattr(key, "dtype", None), "kind", None)) in ("m", "M"):  # of nanoseconds, item() is a number
        unit = "timedelta64" if kind == "m" else "datetime64"
        return f": return key.astype('{unit}[us]').item() from the key function"
    if hasattr(key, "tolist"):
        return ": return key.tolist(), made a tuple if it is a list, from the key function"
    return ": return a field of it, or a tuple of fields, from the key function"


_ADVICE: tuple[tuple[tuple[type, ...], str], ...] = (
    ((list,), "return tuple(key) from the key function"),
    ((set,), "return frozenset(key) from the key function"),
    ((dict,), "return a value of it, or tuple(sorted(key.items())), from the key function"),
    ((bytearray, memoryview), "return bytes(key) from the key function"),
)


def of_key(key: Any, error: BaseException) -> BaseException:
    """Returns the error of a record's key. Where Python says only "unhashable type", the error says what can be a
    key."""
    if isinstance(error, TypeError) and not isinstance(error, KeyTypeError):
        try:
            hash(key)
        except TypeError:
            try:
                stable_hash(key)
            except KeyTypeError as better:
                return better
    return error
