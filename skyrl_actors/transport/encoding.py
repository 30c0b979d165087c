"""Encode the calls and answers of one Protocol as frames, and decode them.

The Protocol's annotations are the closed set of types; `messages.tagged` has the format. Large
arrays travel beside the body, without a copy into or out of it. An error travels as the name of its
class, its arguments and its declared attributes.
"""

import logging
from functools import cache
from typing import Any, cast

import msgspec
import numpy as np

from skyrl_actors import remote
from skyrl_actors.messages import errors
from skyrl_actors.messages.errors import InternalError, InvalidRequest, SkyrlActorsError
from skyrl_actors.messages.tagged import (
    ARRAY,
    Array,
    array_from,
    array_from_inside,
    array_head,
    array_inside,
)
from skyrl_actors.transport.frames import Frame, Unreadable, framed, parts_of
from skyrl_actors.transport.protocols import table_of

log = logging.getLogger(__name__)
BESIDE = 2  # msgpack's extension for an array beside the body: its number there, and its head
NUMBER_BYTES = 4
BESIDE_BYTES = 2**16  # arrays from this size on travel beside the body
UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError, AttributeError, MemoryError)
UNDECODABLE = (TypeError, ValueError, LookupError, RecursionError, MemoryError)
ERRORS: dict[str, type[SkyrlActorsError]] = {
    cls.__name__: cls
    for cls in (*vars(errors).values(), remote.ActorDied, remote.Overdue)
    if isinstance(cls, type) and issubclass(cls, SkyrlActorsError)
}


class CallEncoding:
    """The encoding of one Protocol's calls and answers.

    A call is (number, method, arguments, named arguments). An answer is (number, True, result) or
    (number, False, error).
    """

    def __init__(self, protocol: type):
        self._table = table_of(protocol)

    def call(self, number: int, method: str, arguments: tuple[Any, ...], named: Any) -> Frame:
        """Encode a call.

        Raises:
            InternalError: An argument has a type that the Protocol does not name.
            InvalidRequest: An argument has a value that cannot be sent, or is too long.
        """
        try:
            return self._encoded((number, method, arguments, named))
        except TypeError as error:
            raise InternalError(f"{method} cannot be called: {error}") from None
        except UNENCODABLE as error:
            raise InvalidRequest(
                f"{method}: a value cannot be sent: {_described(error)}; "
                "use numbers of at most 64 bits and text that is valid Unicode"
            ) from None

    def answer(self, number: int, method: str, result: Any) -> Frame:
        """Encode the result of a call, or an InternalError when it cannot be sent."""
        try:
            return self._encoded((number, True, result))
        except (*UNENCODABLE, InvalidRequest) as error:
            log.error("the answer of %s cannot be sent", method, exc_info=error)
            text = f"the answer of {method} cannot be sent: {_described(error)}"
            return self.error(number, method, InternalError(text))

    def error(self, number: int, method: str, error: BaseException) -> Frame:
        """Encode the error of a call.

        A class that is not in ERRORS is sent as its base class there, any other error as
        InternalError.
        """
        if not isinstance(error, SkyrlActorsError):
            log.error("%s failed", method, exc_info=error)
            error = InternalError(f"{method}: {type(error).__name__}: {error}")
        cls = next(cls for cls in type(error).__mro__ if ERRORS.get(cls.__name__) is cls)
        kept = {name: value for name, value in vars(error).items() if name in _declared(cls)}
        try:
            return self._encoded((number, False, (cls.__name__, error.args, kept)))
        except (*UNENCODABLE, InvalidRequest):
            return self._encoded((number, False, (cls.__name__, (_described(error),), {})))

    def decoded_call(
        self, body: memoryview, arrays: int
    ) -> tuple[int, str, tuple[Any, ...], dict[str, Any]]:
        """Decode a call. Raises Unreadable for other bytes."""
        try:
            number, method, arguments, named = self._decoded(body, arrays)
            if not isinstance(method, str) or not isinstance(arguments, tuple):
                raise ValueError("it is not a call")
            return int(number), method, cast(tuple[Any, ...], arguments), dict(named)
        except UNDECODABLE as error:
            raise Unreadable(f"a call cannot be decoded: {_described(error)}") from None

    def decoded_answer(self, body: memoryview, arrays: int) -> tuple[int, bool, Any]:
        """Decode an answer; its error is built. Raises Unreadable for other bytes."""
        try:
            number, is_result, content = self._decoded(body, arrays)
            found = content if is_result else _error_from(*content)
            return int(number), bool(is_result), found
        except UNDECODABLE as error:
            raise Unreadable(f"an answer cannot be decoded: {_described(error)}") from None

    def _encoded(self, content: Any) -> Frame:
        beside: list[memoryview] = []

        def array(value: Array) -> msgspec.msgpack.Ext:
            if value.nbytes < BESIDE_BYTES:
                return array_inside(value)
            number = len(beside).to_bytes(NUMBER_BYTES, "little")
            beside.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            return msgspec.msgpack.Ext(BESIDE, number + array_head(value))

        return framed(_encoder.encode(self._table.plain(content, array)), beside)

    def _decoded(self, body: memoryview, arrays: int) -> Any:
        if not arrays:
            return self._table.built(_decoder.decode(body))
        inside, beside = parts_of(body, arrays)

        def extension(code: int, content: memoryview) -> Array:
            if code != BESIDE:
                return _extension(code, content)
            number = int.from_bytes(content[:NUMBER_BYTES], "little")
            return array_from(content[NUMBER_BYTES:], beside[number])

        return self._table.built(msgspec.msgpack.decode(inside, ext_hook=extension))


def _extension(code: int, content: memoryview) -> Array:
    if code != ARRAY:
        raise ValueError(f"unknown extension {code}")
    return array_from_inside(content)


def _error_from(name: str, arguments: tuple[Any, ...], kept: dict[str, Any]) -> SkyrlActorsError:
    cls = ERRORS[name]
    if unknown := kept.keys() - _declared(cls):
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}")
    error = cls(*arguments)
    for attribute, value in kept.items():
        setattr(error, attribute, value)
    return error


@cache
def _declared(cls: type[SkyrlActorsError]) -> frozenset[str]:
    return frozenset(name for base in cls.__mro__ for name in vars(base).get("__annotations__", ()))


def _described(error: BaseException) -> str:
    """Return the error's text as valid Unicode."""
    return str(error).encode("utf-8", "backslashreplace").decode()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
