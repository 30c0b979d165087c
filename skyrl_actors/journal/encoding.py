"""Encode messages as msgpack in which every message names its type, and decode them.

`messages.tagged` has the format, which RPC shares. Only requests, results and weights are ever
built, so a damaged or foreign file cannot create other objects. A missing field gets its default,
because it was added later. An unknown field is Corrupt, because a newer version wrote it.
"""

from typing import Any

import msgspec

from skyrl_actors.messages.errors import Corrupt, InvalidRequest
from skyrl_actors.messages.requests import Request
from skyrl_actors.messages.results import Result
from skyrl_actors.messages.tagged import (
    ARRAY,
    TypeTable,
    array_from_inside,
    array_inside,
    types_in,
)
from skyrl_actors.messages.weights import SamplerWeights

TABLE = TypeTable(types_in(Request, Result, SamplerWeights), keeps_lists=False)
UNENCODABLE = (OverflowError, UnicodeError, TypeError, ValueError, RecursionError)
UNDECODABLE = (TypeError, ValueError, KeyError, RecursionError)  # msgspec's are ValueErrors


def encode(message: Any) -> bytes:
    """Encode a message, with its arrays, as bytes for `decode`."""
    return _encoder.encode(TABLE.plain(message, array_inside))


def check(message: Any) -> None:
    """Check that `encode` accepts a message, without its arrays. Raises InvalidRequest."""
    try:
        _checker.encode(TABLE.plain(message, _without_content))
    except UNENCODABLE as error:
        raise InvalidRequest(
            f"a value of this request cannot be stored: {_described(error)}; "
            "use numbers of at most 64 bits and text that is valid Unicode"
        ) from None


def _described(error: Exception) -> str:
    """Return the error's text in ASCII, because it may contain what could not be encoded."""
    return str(error).encode("ascii", "backslashreplace").decode()[:200]


def decode(content: bytes | memoryview) -> Any:
    """Decode a message. Raises Corrupt for other bytes."""
    try:
        return TABLE.built(_decoder.decode(content))
    except UNDECODABLE as error:
        raise Corrupt(f"not a message of this journal: {error}") from None


def to_json(message: Any) -> str:
    """Encode for a column of a row. The message must not contain arrays."""
    return msgspec.json.encode(TABLE.plain(message, array_inside)).decode()


def from_json(text: str) -> Any:
    """Decode a text of `to_json`. Raises Corrupt for other texts."""
    try:
        return TABLE.built(msgspec.json.decode(text))
    except UNDECODABLE as error:
        raise Corrupt(f"not a message of this journal: {error}") from None


def _extension(code: int, content: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"unknown extension {code}")
    return array_from_inside(content)


def _without_content(_: Any) -> None:
    """Encode nothing of an array: every array can be encoded."""


_encoder = msgspec.msgpack.Encoder()
_checker = msgspec.msgpack.Encoder()  # not shared with the journal's thread
_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
