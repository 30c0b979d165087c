"""Turn values of a closed set of types into msgpack's own types, and back.

A dataclass becomes a map in which TAG has the name of its type. Only types of the set are ever
built, so a damaged or foreign message cannot create other objects. A missing field gets its
default. An unknown field is refused. The journal and RPC share this code.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

TAG = "$"
PAIRS = ""  # in place of a type: a dict that has the key TAG itself, stored as pairs
LIST = "list"  # in place of a type: a list, where a plain array means a tuple
ITEMS = "items"
MOST_DEPTH = 32
MANY = 16  # items of a sequence whose types are worth a short cut
SCALARS = frozenset({str, int, float, bool, NoneType, bytes})
LEAVES = (*SCALARS, np.ndarray, Any, None, ...)
CONTAINERS = (tuple, list, dict, Mapping, Union, UnionType)
ARRAY = 1  # msgpack's extension for an array: the length of its head, the head, its bytes
HEAD_BYTES = 2
ARRAY_KINDS = "biuf"

Array = NDArray[Any]


def types_in(*annotations: Any) -> tuple[type, ...]:
    """Return the dataclasses that these annotations and their fields name.

    Raises:
        TypeError: An annotation allows values that cannot be encoded.
    """
    found: dict[type, None] = {}

    def visit(annotation: Any) -> None:
        origin = get_origin(annotation)
        if origin in CONTAINERS:
            for inner in get_args(annotation):
                visit(inner)
        elif isinstance(annotation, type) and is_dataclass(annotation):
            if annotation not in found:
                found[annotation] = None
                hints = get_type_hints(annotation)
                for field in fields(annotation):
                    visit(hints[field.name])
        elif (
            origin not in (Literal, np.ndarray)
            and annotation not in LEAVES
            and annotation not in CONTAINERS
        ):
            raise TypeError(f"values of type {annotation} cannot be encoded")

    for annotation in annotations:
        visit(annotation)
    return tuple(found)


class _Fields:
    """The fields of a dataclass, and a function that reads all of them at once."""

    def __init__(self, cls: type):
        self.names = tuple(one.name for one in fields(cls))
        if len(self.names) > 1:
            self.values: Callable[[Any], tuple[Any, ...]] = attrgetter(*self.names)
        else:
            self.values = lambda value: tuple(getattr(value, name) for name in self.names)


class TypeTable:
    """A closed set of dataclasses by name.

    `keeps_lists`: lists are decoded as lists. Otherwise they are decoded as tuples.
    """

    def __init__(self, types: Iterable[type], *, keeps_lists: bool):
        self.types: dict[str, type] = {}
        for cls in types:
            if self.types.setdefault(cls.__name__, cls) is not cls:
                raise TypeError(f"two message types have the name {cls.__name__}")
        self._fields = {cls: _Fields(cls) for cls in self.types.values()}
        self._keeps_lists = keeps_lists

    def plain(self, value: Any, array: Callable[[Array], Any], depth: int = 0) -> Any:
        """Return the value in msgpack's types. `array` encodes an array.

        Raises:
            TypeError: The value has a type that is not in the set.
            ValueError: The value is nested too deeply.
        """
        kind = cast("type[Any]", type(value))
        if kind in SCALARS:
            return value
        if depth == MOST_DEPTH:
            raise ValueError(f"values are nested more than {MOST_DEPTH} deep")
        depth += 1
        if (of := self._fields.get(kind)) is not None:
            found: dict[Any, Any] = {TAG: kind.__name__}
            found.update(zip(of.names, of.values(value), strict=True))
            if not SCALARS.issuperset(map(type, found.values())):
                for name, item in found.items():
                    if type(item) not in SCALARS:
                        found[name] = self.plain(item, array, depth)
            return found
        if isinstance(value, tuple | list):
            sequence = cast("list[Any]", value)
            items = (
                sequence
                if _are_scalars(sequence)
                else [self.plain(item, array, depth) for item in sequence]
            )
            return {TAG: LIST, ITEMS: items} if self._keeps_lists and kind is list else items
        if isinstance(value, dict):
            mapping = cast("dict[Any, Any]", value)
            found = {_key(key): self.plain(item, array, depth) for key, item in mapping.items()}
            return {TAG: PAIRS, ITEMS: list(found.items())} if TAG in found else found
        if isinstance(value, np.ndarray):
            content = cast("Array", value)
            if content.dtype.kind not in ARRAY_KINDS:
                raise TypeError(f"an array of {content.dtype} cannot be encoded")
            return array(content)
        return _scalar(value)

    def built(self, value: Any, depth: int = 0) -> Any:
        """Return what `plain` was given; tuples for arrays of msgpack.

        Raises:
            ValueError: An unknown type, or a value that is nested too deeply.
            TypeError: An unknown or missing field.
        """
        if isinstance(value, list):
            return tuple(self._items(cast("list[Any]", value), depth))
        if not isinstance(value, dict):
            return value
        found = cast("dict[Any, Any]", value)
        if TAG not in found:
            return self._values(found, depth)
        name = found.pop(TAG)
        if name == LIST and self._keeps_lists:
            return self._items(found[ITEMS], depth)
        if name == PAIRS:
            return self._values(dict(found[ITEMS]), depth)
        if (cls := self.types.get(name)) is None:
            raise ValueError(f"unknown type {name!r}")
        return cls(**self._values(found, depth))

    def _items(self, items: list[Any], depth: int) -> list[Any]:
        if _are_scalars(items):
            return items
        _check_depth(depth)
        return [self.built(item, depth + 1) for item in items]

    def _values(self, found: dict[Any, Any], depth: int) -> dict[Any, Any]:
        _check_depth(depth)
        if SCALARS.issuperset(map(type, found.values())):
            return found
        for key, item in found.items():
            if type(item) not in SCALARS:
                found[key] = self.built(item, depth + 1)
        return found


def _are_scalars(items: list[Any]) -> bool:
    """Return whether no item needs to be converted.

    Tokens are most of what is sent. Adding them up shows fastest that they are numbers: a sum with
    anything else fails, or has another type.
    """
    if len(items) >= MANY and type(items[0]) is int:
        with suppress(TypeError, OverflowError):  # the latter from small integers of numpy
            if type(sum(items)) is int:
                return True
    return SCALARS.issuperset(map(type, items))


def _check_depth(depth: int) -> None:
    if depth >= MOST_DEPTH:
        raise ValueError(f"values are nested more than {MOST_DEPTH} deep")


def _key(key: Any) -> Any:
    return key if type(key) in SCALARS else _scalar(key)


def _scalar(value: Any) -> Any:
    """Convert a number of numpy, or a subclass of a scalar such as StrEnum, to the scalar."""
    kind = cast("type[Any]", type(value))
    if issubclass(kind, str):
        return str.__str__(value)
    for base in (int, float):
        if issubclass(kind, base):
            return base(value)
    if issubclass(kind, np.generic) and type(item := value.item()) in SCALARS:
        return item
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be encoded")


def array_inside(value: Array) -> msgspec.msgpack.Ext:
    """Encode an array with its bytes."""
    head = array_head(value)
    size = len(head).to_bytes(HEAD_BYTES, "little")
    return msgspec.msgpack.Ext(ARRAY, size + head + value.tobytes())


def array_from_inside(content: memoryview) -> Array:
    """Decode what `array_inside` encoded, as a copy. Raises ValueError or TypeError."""
    end = HEAD_BYTES + int.from_bytes(content[:HEAD_BYTES], "little")
    return array_from(content[HEAD_BYTES:end], content, end).copy()


def array_head(value: Array) -> bytes:
    """Encode the dtype and the shape of an array."""
    return msgspec.msgpack.encode((value.dtype.str, value.shape))


def array_from(head: Any, content: memoryview, offset: int = 0) -> Array:
    """Return an array that views `content`. Raises ValueError or TypeError for a wrong head."""
    dtype, shape = msgspec.msgpack.decode(head)
    return np.frombuffer(content, _dtype(dtype), offset=offset).reshape(shape)


@lru_cache
def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"arrays of {text!r} are not allowed")
    return dtype
