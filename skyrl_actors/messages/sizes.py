"""Estimate how many bytes a message takes in memory (pure)."""

from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

OBJECT_BYTES = 64  # a small Python object with its reference
NUMBER_BYTES = 36  # an int in a tuple: the object and its reference
SMALL = frozenset({int, float, bool, NoneType})


@dataclass(frozen=True, slots=True)
class Shape:
    """What messages of one class have in common. `varying`: fields that may hold more than SMALL.

    `fixed` counts the object and its other fields.
    """

    fixed: int
    varying: tuple[str, ...]


def size_of(message: Any) -> int:
    """Return the bytes of a request or result: arrays and texts by length, others by a constant."""
    kind = cast("type[Any]", type(message))
    if kind in SMALL:
        return OBJECT_BYTES
    if kind is str or kind is bytes:
        return len(message) + OBJECT_BYTES
    if (shape := _shape_of(kind)) is not None:
        size = shape.fixed
        for name in shape.varying:
            value = getattr(message, name)
            size += OBJECT_BYTES if value is None else size_of(value)
        return size
    if kind is np.ndarray:
        return message.nbytes + OBJECT_BYTES
    if kind is tuple or kind is list:
        if message and isinstance(message[0], int | float):
            return NUMBER_BYTES * len(message)
        return OBJECT_BYTES + sum([size_of(item) for item in message])
    if kind is dict:
        return OBJECT_BYTES + sum([size_of(k) + size_of(item) for k, item in message.items()])
    return OBJECT_BYTES


@cache
def _shape_of(kind: type[Any]) -> Shape | None:
    if not is_dataclass(kind):
        return None
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    varying = tuple(name for name in names if not _is_small(hints[name]))
    return Shape(OBJECT_BYTES * (1 + len(names) - len(varying)), varying)


def _is_small(annotation: Any) -> bool:
    """Return whether values are of SMALL types: one of them, or a union."""
    is_union = isinstance(annotation, UnionType) or get_origin(annotation) is Union
    return SMALL.issuperset(get_args(annotation) if is_union else (annotation,))
