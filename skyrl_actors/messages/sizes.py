"""Estimate how many bytes a message takes in memory (pure)."""

from dataclasses import fields, is_dataclass
from typing import Any, cast

import numpy as np

OBJECT_BYTES = 64  # a small Python object with its reference
NUMBER_BYTES = 36  # an int in a tuple: the object and its reference


def size_of(message: Any) -> int:
    """Return the bytes of a request or result: arrays and texts by length, others by a constant."""
    if isinstance(message, np.ndarray):
        return message.nbytes + OBJECT_BYTES
    if isinstance(message, str | bytes):
        return len(message) + OBJECT_BYTES
    if isinstance(message, tuple | list):
        items = cast("tuple[Any, ...]", message)
        if items and isinstance(items[0], int | float):
            return NUMBER_BYTES * len(items)
        return OBJECT_BYTES + sum(size_of(item) for item in items)
    if isinstance(message, dict):
        table = cast("dict[Any, Any]", message)
        return OBJECT_BYTES + sum(size_of(key) + size_of(value) for key, value in table.items())
    if is_dataclass(message):
        return OBJECT_BYTES + sum(
            size_of(getattr(message, field.name)) for field in fields(message)
        )
    return OBJECT_BYTES
