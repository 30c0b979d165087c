"""Estimate how many bytes a message takes in memory (pure)."""

from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, cast

import numpy as np

OBJECT_BYTES = 64  # a small Python object with its reference
NUMBER_BYTES = 36  # an int in a tuple: the object and its reference
SMALL = frozenset({int, float, bool, NoneType})


def size_of(message: Any) -> int:
    """Return the bytes of a request or result: arrays and texts by length, others by a constant."""
    kind = cast("type[Any]", type(message))
    if kind in SMALL:
        return OBJECT_BYTES
    if (names := _fields_of(kind)) is not None:
        return OBJECT_BYTES + sum([size_of(getattr(message, name)) for name in names])
    if isinstance(message, np.ndarray):
        return message.nbytes + OBJECT_BYTES
    if isinstance(message, str | bytes):
        return len(message) + OBJECT_BYTES
    if isinstance(message, tuple | list):
        items = cast("tuple[Any, ...]", message)
        if items and isinstance(items[0], int | float):
            return NUMBER_BYTES * len(items)
        return OBJECT_BYTES + sum([size_of(item) for item in items])
    if isinstance(message, dict):
        table = cast("dict[Any, Any]", message)
        return OBJECT_BYTES + sum([size_of(key) + size_of(value) for key, value in table.items()])
    return OBJECT_BYTES


@cache
def _fields_of(kind: type[Any]) -> tuple[str, ...] | None:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
