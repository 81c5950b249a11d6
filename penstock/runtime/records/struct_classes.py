"""How a class of msgspec structs travels to another process.

cloudpickle makes a class empty at first, and then fills it with its members. A `msgspec.Struct` made so would have no
fields, because msgspec lays out the fields of a class when the class is made. So `making` says how to make the class
with its fields at once. Its methods and the types of its fields are filled in afterwards (`members`), as those of any
class, since they may refer to the class itself. The types are no texts any more, which another process could not read:
its main script is another one.

The options of the class (`frozen`, `kw_only`, `tag` and so on) must be those of the user's class: an option that got
lost would make objects that are equal, encoded or built in another way.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import msgspec

_OPTIONS = (
    *("frozen", "eq", "order", "array_like", "gc", "repr_omit_defaults", "omit_defaults"),
    *("forbid_unknown_fields", "weakref", "dict", "cache_hash"),
)
_StructMeta = type(msgspec.Struct)


class _WithFactory(msgspec.Struct):
    made: list[Any] = msgspec.field(default_factory=list)


#: The type of what makes a default, in `__struct_defaults__`.
Factory: Any = type(_WithFactory.__struct_defaults__[0])  # msgspec has no public name for it


class Field(NamedTuple):
    """A field of a struct: its name, also in encoded objects, and its default or what makes the default."""

    name: str
    encoded: str
    default: Any  # in a tuple; an empty one: none
    factory: Callable[[], Any] | None


def is_struct(class_: type) -> bool:
    """Whether objects of a class are msgspec structs."""
    return isinstance(class_, _StructMeta)


def has_keywords(class_: type) -> bool:
    """Whether a class of structs has fields that are given by name only. Such structs are pickled by the names of all
    fields, and others by the order of the fields."""
    return bool(_keywords(class_))


def making(class_: Any) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """Returns a function, and its arguments, that make a class of structs with these fields and without methods."""
    names, defaults = class_.__struct_fields__, class_.__struct_defaults__
    fields = []
    for name in vars(class_).get("__annotations__", {}):
        if name not in names:  # such as a ClassVar
            continue
        at = names.index(name)
        behind = at - len(names) + len(defaults)
        default = defaults[behind] if behind >= 0 else msgspec.NODEFAULT
        factory = default.factory if isinstance(default, Factory) else None
        given = () if default is msgspec.NODEFAULT or factory is not None else (default,)
        fields.append(Field(name, class_.__struct_encode_fields__[at], given, factory))
    config = class_.__struct_config__
    options = {option: getattr(config, option) for option in _OPTIONS}
    if config.tag is not None:
        options |= {"tag": config.tag, "tag_field": config.tag_field}
    by_name = _keywords(class_)
    options["kw_only"] = any(each.name in by_name for each in fields)
    bases = vars(class_).get("__orig_bases__", class_.__bases__)
    has_post_init = "__post_init__" in vars(class_)
    return _make, (type(class_), class_.__name__, class_.__module__, bases, tuple(fields), options, has_post_init)


def members(class_: type, state: tuple[dict[str, Any], Any]) -> tuple[dict[str, Any], Any]:
    """Returns the content of a class of structs: `state`, with types of its fields that every process can read."""
    filled, slots = state
    try:
        hints = get_type_hints(class_, include_extras=True)
    except Exception:  # a name that is defined nowhere, for example; msgspec tells it when it needs the types
        return state
    return {**filled, "__annotations__": {name: hints[name] for name in filled.get("__annotations__", {})}}, slots


def _keywords(class_: type) -> set[str]:
    parameters = inspect.signature(class_).parameters.values()
    return {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


# Its name is in what jobs have saved.
def _make(
    meta: type,
    name: str,
    module: str,
    bases: tuple[Any, ...],
    fields: tuple[Field, ...],
    options: dict[str, Any],
    has_post_init: bool,
) -> type:
    made: list[Any] = []

    def post_init(self: Any) -> None:
        # msgspec keeps the function that a class has when it is made, and the user's own is filled in later.
        made[0].__post_init__(self)

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = module
        namespace["__annotations__"] = {field.name: Any for field in fields}
        for field in fields:
            more: dict[str, Any] = {} if field.encoded == field.name else {"name": field.encoded}
            if field.factory is not None:
                more["default_factory"] = field.factory
            elif field.default:
                more["default"] = field.default[0]
            if more:
                namespace[field.name] = msgspec.field(**more)
        if has_post_init:
            namespace["__post_init__"] = post_init

    made.append(types.new_class(name, bases, {"metaclass": meta, **options}, fill))
    class_: type = made[0]
    return class_
