"""The one pickler: plans, records, state, messages between processes and what Spark's workers run are bytes made here.

A class of the main script, of a notebook cell or of a function cannot be imported by another process, so its code
travels. All that travels must then agree which class it is: a record of the program's class `Order` is to be an `Order`
for every function of the program, in every process, also when it was saved by an earlier life of the job. Two picklers
that each keep a table of such classes make two classes of one, which no error tells: so nothing else in Penstock may
pickle, and nothing of the user's may pass through Ray but as bytes from here.

How it is done. The classes that a flow needs and that cannot be imported are the classes of its *program*. The driver
pickles the flow by `Program.dumps`, once, with their code, and each class gets a name: (token of the program, module,
qualified name, number among those of this name). Each process of the job takes the program up by `join`. From then on
`dumps` names these classes and sends no code; `loads` finds them by name: in the driver the very classes that the user
defined, in the job's processes those of the program.

State may come from another program: a job that starts from a savepoint, from the same script or an edited one. A name
with another program's token stands for the class of this program that has the same module, qualified name and number.
The program's class always wins; where it has none of this name, CodecError says so. Names in pickles also carry the
fields of dataclasses, so that objects saved with other fields are noticed, and completed (class_evolution.py).

Classes that a user's function makes while it runs belong to no program: they travel with their code, each list anew,
and are made once in each process.

What `loads` is given must come from a process of the job, or from its store: unpickling executes code.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, TypeVar

import cloudpickle

from penstock.runtime.errors import CodecError
from penstock.runtime.records.class_evolution import layout, stand_in

PROTOCOL = 5

#: What a class that travels is called: token of its program or process, module, qualified name, and number among the
#: program's classes of this module and name.
Name: TypeAlias = tuple[str, str, str, int]

_Value = TypeVar("_Value")

loads: Callable[..., Any] = pickle.loads

# Definitions are taken one at a time: a class must not be made by two threads at once.
_lock = threading.RLock()
_classes: weakref.WeakValueDictionary[Name, type] = weakref.WeakValueDictionary()
_complete: weakref.WeakSet[type] = weakref.WeakSet()  # the values of _classes
_unfinished: dict[type, Name] = {}  # made by the definitions that are being read, and still empty
_readers: list[Program] = []  # that read definitions

# Of classes that belong to no program: their names, and their code once it has been asked for.
_strays: weakref.WeakKeyDictionary[type, Name] = weakref.WeakKeyDictionary()
_codes: weakref.WeakKeyDictionary[type, bytes] = weakref.WeakKeyDictionary()
_token = uuid.uuid4().hex
_numbers = count()

_here: Program | None = None  # the program that this process was started for


def dumps(value: Any) -> bytes:
    """A value as bytes, for `loads` in another process of the same job. Raises what pickling it raises."""
    if _here is not None:
        # Quicker, and right here: what plain pickle can name can be imported, as the main script is another process's.
        try:
            return pickle.dumps(value, PROTOCOL)
        except Exception:  # the value's class decides what pickling it raises; the last way's error is the one to tell
            pass
        try:
            return _dumped(_Plain, value)
        except Exception:  # the same
            pass
    return _dumped(_Naming, value)


def copied(value: _Value) -> _Value:
    """A copy of a value as it would be in another process, but of the same classes."""
    found: _Value = loads(dumps(value))
    return found


def travels(module: ModuleType) -> None:
    """What this module defines takes its code along from now on: other processes may not be able to import it."""
    cloudpickle.register_pickle_by_value(module)


class Program:
    """The classes that travel with a flow. Whoever still expects bytes of the program's processes keeps it."""

    def __init__(self) -> None:
        self.classes: dict[type, Name] = {}
        self._token = uuid.uuid4().hex
        self._named: Counter[tuple[str, str]] = Counter()
        self._references: dict[type, tuple[str, str, str, int, str]] = {}

    def dumps(self, value: Any) -> bytes:
        """A value with the code of all the program's classes, and of those that it brings; for `loads`, or `join`."""
        classes = list(self.classes)
        data = _dumped(_Defining, (classes, value), self._name)
        return pickle.dumps(_Definition(data), PROTOCOL)

    @classmethod
    def loads(cls, data: bytes) -> tuple[Program, Any]:
        """The program that a value came with, and the value."""
        program = cls()
        with _lock:
            _readers.append(program)
            try:
                value = loads(data)
            finally:
                _readers.pop()
        program._named.update((module, name) for _, module, name, _ in program.classes.values())
        return program, value

    def prefer_own(self) -> None:
        """Let `loads` give objects of this process's own classes where it has defined some of the same names: for a
        driver that takes up again what an earlier run of its script began."""
        for name in self.classes.values():
            _, module, qualified, number = name
            own: Any = sys.modules.get(module)
            for part in qualified.split("."):
                own = getattr(own, part, None)
            if isinstance(own, type) and number == 0:
                _own[name] = own

    def reference(self, class_: type) -> tuple[str, str, str, int, str] | None:
        """What a pickle has in place of a class of the program, for `_find`."""
        found = self._references.get(class_)
        if found is None and (name := self.classes.get(class_)) is not None:
            found = self._references[class_] = (*name, layout(class_))
        return found

    def find(self, name: Name) -> type | None:
        """The class that an object of another program's class of this name is to have."""
        return next((known for known, (_, *rest) in self.classes.items() if rest == list(name[1:])), None)

    def _name(self, class_: type) -> Name:
        name = self.classes.get(class_)
        if name is None:
            place = class_.__module__, class_.__qualname__
            name = (self._token, *place, self._named[place])
            self._named[place] += 1
            self.classes[class_] = name
            _remember(name, class_)
        return name


_own: dict[Name, type] = {}  # see Program.prefer_own


def join(data: bytes) -> Any:
    """The value that `Program.dumps` made this of. This process belongs to the program from now on."""
    global _here
    _here, value = Program.loads(data)
    return value


def for_child(value: Any) -> bytes:
    """A value as bytes for `join` in a process that this one starts, with the code of the program's classes."""
    return (_here or Program()).dumps(value)


def program() -> Program:
    """The program that this process has joined."""
    assert _here is not None, "only a process of a job has a program"
    return _here


class _Plain(pickle.Pickler):
    """Names the classes of the program; others must be such as can be imported. Half the cost of _Naming."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, PROTOCOL)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and _here is not None and (found := _here.reference(obj)) is not None:
            return _find, found
        return NotImplemented


class _Naming(cloudpickle.Pickler):  # type: ignore[misc]
    """Names the classes of the program; others that cannot be imported take their code along."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType:
            return super().reducer_override(obj)
        if not issubclass(kind, type):
            return NotImplemented
        if _here is not None and (found := _here.reference(obj)) is not None:
            return _find, found
        reduced = super().reducer_override(obj)
        return (_find_or_make, (_stray(obj), _code(obj))) if _is_definition(reduced) else reduced


class _Defining(cloudpickle.Pickler):  # type: ignore[misc]
    """Defines classes that cannot be imported, under the names that `name` gives them."""

    def __init__(self, file: io.BytesIO, name: Callable[[type], Name]) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._name = name

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not issubclass(type(obj), type) or not _is_definition(reduced):
            return reduced
        make, arguments, state, _, _, fill = reduced
        return _begin, (self._name(obj), make, arguments), (fill, state), None, None, _end


class _DefiningStray(_Defining):
    """Defines a class that belongs to no program; those that do are named."""

    def reducer_override(self, obj: Any) -> Any:
        if _here is not None and issubclass(type(obj), type) and (found := _here.reference(obj)) is not None:
            return _find, found
        return super().reducer_override(obj)


class _Definition:
    """Bytes that hold definitions of classes; unpickled it is the value that they came with."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_definitions, (self._data,)


def _dumped(pickler: Callable[..., Any], value: Any, *arguments: Any) -> bytes:
    with io.BytesIO() as file:
        pickler(file, *arguments).dump(value)
        return file.getvalue()


def _is_definition(reduced: Any) -> bool:
    """Whether cloudpickle would send a class by its code: how to make it, what with, its state, and how to fill it."""
    return isinstance(reduced, tuple) and len(reduced) == 6 and reduced[2] is not None


def _stray(class_: type) -> Name:
    name = _strays.get(class_)
    if name is None:
        with _lock:
            name = _strays.setdefault(class_, (_token, class_.__module__, class_.__qualname__, next(_numbers)))
            _remember(name, class_)
    return name


def _code(class_: type) -> bytes:
    data = _codes.get(class_)
    if data is None:
        data = _codes[class_] = _dumped(_DefiningStray, class_, _stray)
    return data


def _remember(name: Name, class_: type) -> None:
    _classes[name] = class_
    _complete.add(class_)


def _defined(data: bytes) -> Any:
    """What was pickled with definitions of classes."""
    with _lock:
        try:
            return loads(data)
        finally:
            _unfinished.clear()


# --- what pickles call: the names of these functions are in what jobs have saved ---------------------------------


def _find(token: str, module: str, qualified: str, number: int, saved: str = "") -> type:
    """The class of this name, for objects that were saved with this layout."""
    name = (token, module, qualified, number)
    found = _own.get(name) or _classes.get(name)
    if found is None:
        found = None if _here is None else _here.find(name)
        if found is None:
            raise CodecError(
                f"there is no class {qualified} of module {module} in this program, and objects of it were saved or "
                "sent. A program that goes on from saved state must define the classes of the main script that are in "
                "the state under the names that they had, and its flow must use them"
            )
        _classes[name] = found
    if saved and saved != (now := layout(found)) and now:
        return stand_in(found, saved)
    return found


def _find_or_make(name: Name, code: bytes) -> type:
    """The class of this name; when this process has none, of this code."""
    found = _classes.get(name)
    if found is None:
        with _lock:
            found = _classes.get(name)
            if found is None:
                found = _defined(code)
                _strays[found] = name
                _codes[found] = code
    return found


def _with_definitions(data: bytes) -> Any:
    _, value = _defined(data)
    return value


def _begin(name: Name, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """The class of this name, if need be a new one that is still empty."""
    class_ = _classes.get(name)
    if class_ is None:
        class_ = make(*arguments)
        if class_ in _complete:  # cloudpickle knows it: from another program
            _remember(name, class_)
        else:
            _unfinished[class_] = name
    if _readers:
        _readers[-1].classes[class_] = name
    return class_


def _end(class_: type, state: tuple[Callable[[type, Any], object], Any]) -> None:
    """Fill a new class. One that there was keeps what it has: its methods belong to the module that defined it."""
    if class_ in _unfinished:
        fill, members = state
        fill(class_, members)
        _remember(_unfinished.pop(class_), class_)
