"""The Protocol of an actor: its methods, and the types of their arguments and results."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from skyrl_actors.messages.tagged import TypeTable, types_in

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred(Generic[R]):
    """A method's answer that is loaded only while it is sent. `num_bytes` is an estimate."""

    num_bytes: int
    load: Callable[[], Awaitable[R]]


class CallProxy:
    """An object with the methods of a Protocol. Each passes the Protocol's method to `call`."""

    def __init__(self, protocol: type, call: Callable[..., Awaitable[Any]]):
        self._protocol = protocol
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._call, getattr(self._protocol, name))


def calls_of(protocol: type[T], call: Callable[..., Awaitable[Any]]) -> T:
    """Return an object whose methods are calls: `call(method of the Protocol, arguments...)`."""
    proxy: Any = CallProxy(protocol, call)
    return proxy


def methods_of(protocol: type) -> frozenset[str]:
    """Return the names of the methods that a Protocol declares or inherits."""
    return frozenset(
        name for name in dir(protocol) if name[0] != "_" and callable(getattr(protocol, name))
    )


@cache
def table_of(protocol: type) -> TypeTable:
    """Return the closed set of types that a Protocol's annotations name.

    Raises:
        TypeError: An annotation allows values that cannot be sent.
    """
    return TypeTable(types_in(*_annotations(protocol)), keeps_lists=True)


def _annotations(protocol: type) -> list[Any]:
    found: list[Any] = []
    for name in methods_of(protocol):
        for annotation in get_type_hints(getattr(protocol, name)).values():
            is_deferred = get_origin(annotation) is Deferred
            found += get_args(annotation) if is_deferred else (annotation,)
    return found
