"""Tests for the types of JSON that the type checker understands.

`isinstance(value, dict)` says nothing about keys and values; these tests name them.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether this is a JSON object."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether this is a mapping, whose keys are taken to be texts."""
    return isinstance(value, Mapping)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Return whether this is a JSON array."""
    return isinstance(value, list)


def is_sequence(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return whether this is a list or a tuple."""
    return isinstance(value, list | tuple)
