"""The only pickler: plans, records, state, messages between processes, and what Spark's workers run become bytes here.

Another process cannot import a class of the main script, of a notebook cell or of a function, so the code of such a
class travels. All processes must then agree which class is meant: a record of the program's class `Order` must be an
`Order` for every function of the program, in every process, also if it was saved by an earlier life of the job. Two
picklers with a table of such classes each would make two classes of one, and no error would tell. So nothing else in
Penstock may pickle, and nothing of the user's may pass through Ray except as bytes from here.

How it works. The classes that a flow needs and that cannot be imported are the classes of its *program*. The driver
pickles the flow once, by `Program.dumps`, with the code of these classes, and each class gets a name: (token of the
program, module, qualified name, number among the classes of this name). Each process of the job joins the program by
`join`. From then on, `dumps` names these classes and sends no code, and `loads` finds them by name: in the driver the
very classes that the user has defined, in the other processes those of the program.

State may come from another program, when a job starts from a savepoint of the same script or of a changed one. A name
with the token of another program then means the class of this program with the same module, qualified name and number.
The program's class always wins; when there is none of this name, CodecError says so. Names in pickles also contain the
fields of dataclasses, structs and named tuples, so objects that were saved with other fields are noticed, and get each
value under its name (class_evolution.py). In state, classes that can be imported are named so too.

Classes that a user's function creates while it runs are *strays*, and belong to no program. They travel with their code
in each list, and each process creates them once.

`loads` must only get bytes of a process of the job, or from its store, because unpickling executes code.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import EnumMeta
from itertools import count
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import cloudpickle

from penstock.runtime.errors import CodecError
from penstock.runtime.records import class_layouts, enum_classes, struct_classes
from penstock.runtime.records.class_evolution import ByName, LayoutChanged, called_class, differs, layout
from penstock.runtime.records.enum_classes import is_enum
from penstock.runtime.records.remade import remade
from penstock.runtime.records.struct_classes import is_struct

PROTOCOL = 5

#: The name of a class that travels: the token of its program or process, its module, its qualified name, and its number
#: among the program's classes of this module and name.
Name: TypeAlias = tuple[str, str, str, int]

Buffer: TypeAlias = bytes | bytearray | memoryview

_Value = TypeVar("_Value")

# Definitions are read one at a time, because two threads must not create the same class.
_lock = threading.RLock()
_classes: weakref.WeakValueDictionary[Name, type] = weakref.WeakValueDictionary()
_complete: weakref.WeakSet[type] = weakref.WeakSet()  # the values of _classes
_unfinished: dict[type, Name] = {}  # created by definitions that are being read, and still empty
_readers: list[Program] = []  # programs that read definitions

# The names of classes that belong to no program.
_strays: weakref.WeakKeyDictionary[type, Name] = weakref.WeakKeyDictionary()
_token = uuid.uuid4().hex
_numbers = count()

_here: Program | None = None  # the program that this process was started for
_hosting = threading.local()  # program: see `belonging_to`


def dumps(value: Any, program: Program | None = None, *, saved: bool = False) -> bytes:
    """Returns a value as bytes, for `loads` in another process of the same job. Raises what pickling the value
    raises. `program`: the program that the value belongs to, where this process has not joined it: a driver that hosts
    its jobs itself. Without it, the program is that of `belonging_to`, if the thread is in its context. `saved`: the
    value is state, which a later program may read whose classes have changed, also those that can be imported."""
    if _here is not None and program in (None, _here):
        # This is faster, and right here: plain pickle names only what can be imported, because the main script belongs
        # to another process.
        if not saved:
            try:
                return pickle.dumps(value, PROTOCOL)
            except Exception:  # the value's class decides what pickling it raises; only the last way's error is told
                pass
        try:
            return _dumped(_Plain, value, saved)
        except Exception:  # the same
            pass
    with io.BytesIO() as file:
        pickler = _Naming(file, program or _hosted(), saved)
        pickler.dump(value)
        data = file.getvalue()
    return pickle.dumps(_Definition(_defined, data), PROTOCOL) if pickler.defines else data


def loads(data: Buffer) -> Any:
    """Returns the value from which `dumps` made these bytes in a process of the job, or of one that saved the state.
    Raises what unpickling the value raises."""
    try:
        return pickle.loads(data)
    except LayoutChanged:
        return ByName(data, _find, _named).load()


@contextmanager
def belonging_to(program: Program | None) -> Iterator[None]:
    """While the context is active, objects that this thread pickles belong to this program. For the threads of a
    process that has joined no program, because it hosts several jobs: without it, the classes of the program would
    travel as strays, and no other program would take an object of them for one of its own class."""
    before = _hosted()
    _hosting.program = program
    try:
        yield
    finally:
        _hosting.program = before


def _hosted() -> Program | None:
    """Returns the program whose job this thread works for, see `belonging_to`."""
    found: Program | None = getattr(_hosting, "program", None)
    return found


class Unhashable(NamedTuple):
    """Describes a key whose class was hashable when it was saved."""

    words: str


def unhashable(keys: Iterable[Any]) -> Unhashable | None:
    """Describes the first of these keys, or of their parts, that is not hashable. None: there is none."""
    for key in keys:
        kind: Any = type(key)
        if kind.__hash__ is None:
            called = f"{kind.__qualname__} (of module {kind.__module__})"
            return Unhashable(f"{called} is not hashable, and objects of it were saved as keys")
        if isinstance(key, tuple) and (found := unhashable(key)) is not None:
            return found
    return None


def copied(value: _Value) -> _Value:
    """Returns a copy of a value as it would be in another process, but with the same classes."""
    found: _Value = loads(dumps(value))
    return found


def travels(module: ModuleType) -> None:
    """Lets the definitions of this module travel with their code from now on, because other processes may not be able
    to import it."""
    cloudpickle.register_pickle_by_value(module)


class Program:
    """The classes that travel with a flow. Whoever still expects bytes from the program's processes must keep it."""

    def __init__(self) -> None:
        self.classes: dict[type, Name] = {}
        self._token = uuid.uuid4().hex
        self._named: Counter[tuple[str, str]] = Counter()
        self._references: dict[type, tuple[str, str, str, int, str]] = {}

    def dumps(self, value: Any) -> bytes:
        """Returns a value, with the code of all the program's classes and of the classes that the value adds, for
        `loads` or `join`."""
        classes = list(self.classes)
        data = _dumped(_Defining, (classes, value), self._name)
        return pickle.dumps(_Definition(_with_definitions, data), PROTOCOL)

    @classmethod
    def loads(cls, data: bytes) -> tuple[Program, Any]:
        """Returns the value, and the program that came with it."""
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
        """Lets `loads` give objects of this process's own classes if it has defined classes of the same names. This is
        for a driver that continues what an earlier run of its script has begun."""
        for name in self.classes.values():
            _, module, qualified, number = name
            own: Any = sys.modules.get(module)
            for part in qualified.split("."):
                own = getattr(own, part, None)
            if isinstance(own, type) and number == 0:
                _own[name] = own
                self._references[own] = (*name, layout(own))  # what this process writes again has the same name

    def reference(self, class_: type) -> tuple[str, str, str, int, str] | None:
        """Returns the reference that a pickle has in place of a class of the program, for `_find`."""
        found = self._references.get(class_)
        if found is None and (name := self.classes.get(class_)) is not None:
            found = self._references[class_] = (*name, layout(class_))
        return found

    def find(self, name: Name) -> type | None:
        """Returns the class for objects whose class has this name in another program."""
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
_ORDINALS = ("first", "second", "third")


def join(data: bytes) -> Any:
    """Returns the value from which `Program.dumps` made these bytes. This process belongs to the program from now
    on."""
    global _here
    _here, value = Program.loads(data)
    return value


def for_child(value: Any) -> bytes:
    """Returns a value as bytes for `join` in a process that this one starts, with the code of the program's classes."""
    return (_here or _hosted() or Program()).dumps(value)


def program() -> Program:
    """Returns the program that this process has joined."""
    assert _here is not None, "only a process of a job has a program"
    return _here


class _Plain(pickle.Pickler):
    """Names the classes of the program. All other classes must be importable. This costs half as much as _Naming."""

    def __init__(self, file: io.BytesIO, saved: bool) -> None:
        super().__init__(file, PROTOCOL)
        self._saved = saved

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return _reference(obj, _here, self._saved)
        if isinstance(type(obj), EnumMeta):  # this is called for each object
            return _member(obj, _here, self._saved)
        return NotImplemented


class _Defining(cloudpickle.Pickler):  # type: ignore[misc]
    """Defines the classes that cannot be imported, under the names that `name` gives them."""

    def __init__(self, file: io.BytesIO, name: Callable[[type], Name]) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._name = name

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if not issubclass(type(obj), type) or not _is_definition(reduced):
            return reduced if (found := _remade(obj)) is NotImplemented else found
        make, arguments, state, _, _, fill = reduced
        if is_struct(obj):
            make, arguments = _make_once, (arguments[-2], *struct_classes.making(obj))
            state = struct_classes.members(obj, state)
        elif is_enum(obj):
            make, arguments = _make_once, (arguments[-2], *enum_classes.making(obj))
            fill, state = enum_classes.filling(obj, fill, state)
        else:
            arguments = class_layouts.making(obj, arguments, _travels)
            state = class_layouts.filling(obj, state)
        return _begin, (self._name(obj), make, arguments), (fill, state), None, None, _end


class _Naming(_Defining):
    """Names the classes of the program. Other classes that cannot be imported travel with their code."""

    def __init__(self, file: io.BytesIO, program: Program | None, saved: bool) -> None:
        super().__init__(file, self._stray)
        self.defines = False  # whether code of classes is in the bytes
        self._program = program or _here
        self._saved = saved

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)  # this is called for each object
        if not issubclass(kind, type):
            if is_enum(kind):
                return _member(obj, self._program, self._saved)
            found = _remade(obj)
            if found is NotImplemented and kind is FunctionType:
                return cloudpickle.Pickler.reducer_override(self, obj)
            return found
        found = _reference(obj, self._program, self._saved)
        return super().reducer_override(obj) if found is NotImplemented else found

    def _stray(self, class_: type) -> Name:
        self.defines = True
        with _lock:
            name = _strays.get(class_)
            if name is None:
                name = _strays[class_] = (_token, class_.__module__, class_.__qualname__, next(_numbers))
                _remember(name, class_)
        return name


class _Definition:
    """Bytes with definitions of classes. Unpickling it gives the value that came with them, as `read` finds it."""

    def __init__(self, read: Callable[[bytes], Any], data: bytes) -> None:
        self._reading = read, (data,)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reading


def _dumped(pickler: Callable[..., Any], value: Any, *arguments: Any) -> bytes:
    with io.BytesIO() as file:
        pickler(file, *arguments).dump(value)
        return file.getvalue()


def _is_definition(reduced: Any) -> bool:
    """Whether cloudpickle would send a class as code: how to create it, from what, its state, and how to fill it."""
    return isinstance(reduced, tuple) and len(reduced) == 6 and reduced[2] is not None


def _remade(obj: Any) -> Any:
    """Returns how an object of the main script is made again that pickle refuses or would only name. NotImplemented:
    pickle knows better."""
    return remade(obj, _travels)


def _reference(class_: type, program: Program | None, saved: bool) -> Any:
    """Returns how a class is found again. NotImplemented: by its name alone, or it has to take its code along."""
    if program is not None and (found := program.reference(class_)) is not None:
        return _find, found
    if saved and (described := layout(class_)) and _imported(class_.__module__, class_.__qualname__) is class_:
        return _find, ("", class_.__module__, class_.__qualname__, 0, described)
    return NotImplemented


def _imported(module: str, qualified: str) -> Any:
    """Returns the object of this name in a module that is imported, or None."""
    found: Any = None if _travels(module) else sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found


def _member(obj: Any, program: Program | None, saved: bool) -> Any:
    """Returns how a member of an Enum class is found again. NotImplemented: pickle knows better, because the class is
    none of the program's, and the member is no part of state."""
    if not saved and (program is None or program.reference(type(obj)) is None):
        return NotImplemented
    return enum_classes.reduced(obj)


def _travels(module: str | None) -> bool:
    """Whether the definitions of the module of this name travel."""
    return module == "__main__" or module in cloudpickle.list_registry_pickle_by_value()


def _remember(name: Name, class_: type) -> None:
    _classes[name] = class_
    _complete.add(class_)


# --- what pickles call: the names of these functions are in what jobs have saved ---------------------------------


def _find(token: str, module: str, qualified: str, number: int, saved: str = "") -> type:
    """Returns the class of this name. Raises LayoutChanged when objects that were saved with this layout must be read
    by the names of their fields."""
    found = _named(token, module, qualified, number)
    if saved and differs(found, saved):
        raise LayoutChanged(f"{called_class(found)} has other fields than when objects of it were saved")
    return found


def _named(token: str, module: str, qualified: str, number: int) -> type:
    """Returns the class of this name: an imported one without a token, or one of a program."""
    found: type | None
    if not token:
        importlib.import_module(module)
        found = _imported(module, qualified)
        if found is None:
            raise CodecError(
                f"there is no class {qualified} in module {module}, and objects of it were saved. Keep the class under "
                "its name, or start the job without the savepoint"
            )
        return found
    name = (token, module, qualified, number)
    found = _own.get(name) or _classes.get(name)
    if found is None:
        found = None if _here is None else _here.find(name)
        if found is None:
            number_of = f"{_ORDINALS[number] if number < len(_ORDINALS) else f'{number + 1}th'} " if number else ""
            raise CodecError(
                f"there is no {number_of}class {qualified} of module {module} in this program, and objects of it were "
                "saved or sent. A program that continues from saved state must define the classes of the main script "
                "that are in the state under the names that they had, and its flow must use them"
            )
        _classes[name] = found
    return found


def _defined(data: bytes) -> Any:
    """Returns the object that was pickled together with definitions of classes."""
    with _lock:
        try:
            return loads(data)
        finally:
            _unfinished.clear()


def _with_definitions(data: bytes) -> Any:
    _, value = _defined(data)
    return value


def _begin(name: Name, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Returns the class of this name, if necessary a new one that is still empty."""
    class_ = _classes.get(name)
    if class_ is None:
        class_ = make(*arguments)
        class_.__qualname__ = name[2]
        if class_ in _complete:  # cloudpickle knows the class from another program
            _remember(name, class_)
        else:
            _unfinished[class_] = name
    if _readers:
        _readers[-1].classes[class_] = name
    return class_


def _make_once(tracked: str, make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """Returns a new class, or the one that has come already from the same process, with another program. `tracked` is
    the id that cloudpickle gives the class."""
    class_: type = cloudpickle.cloudpickle._lookup_class_or_track(tracked, make(*arguments))
    return class_


def _end(class_: type, state: tuple[Callable[[type, Any], object], Any]) -> None:
    """Fills a new class. A class that existed already stays as it is, because its methods belong to the module that has
    defined it."""
    if class_ in _unfinished:
        fill, members = state
        fill(class_, members)
        _remember(_unfinished.pop(class_), class_)
