"""Encode messages as msgpack in which every message names its type, and decode them.

Arrays keep their dtype and shape. Only the types listed here are ever built, so a damaged or
foreign file cannot create other objects. A missing field gets its default, because it was added
later. An unknown field is Corrupt, because a newer version wrote it.
"""

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from skyrl_actors.messages import columns, model, requests, results, sampling, weights
from skyrl_actors.messages.errors import Corrupt, InvalidRequest

TYPES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        columns.Columns,
        model.LoraSpec,
        model.ModelSpec,
        model.AdamParams,
        model.LossCall,
        requests.CreateModel,
        requests.ForwardBackward,
        requests.OptimStep,
        requests.SaveWeights,
        requests.SaveForSampler,
        requests.SaveExternal,
        requests.LoadWeights,
        requests.Unload,
        requests.SamplingParams,
        requests.Sample,
        results.ModelCreated,
        results.LossOutput,
        results.StepDone,
        results.Saved,
        results.SamplerSaved,
        results.Loaded,
        results.Unloaded,
        results.Sequence,
        results.SampleOutput,
        results.Failure,
        sampling.SparseLayout,
        sampling.PromptTargets,
        sampling.TargetLogprobs,
        sampling.PromptAlternatives,
        weights.TensorEntry,
        weights.WeightManifest,
        weights.SamplerWeights,
    )
}
FIELDS = {name: tuple(f.name for f in fields(cls)) for name, cls in TYPES.items()}
TAG = "$"
PAIRS = ""  # in place of a type: a plain dict, stored as pairs
ARRAY = 1
UNENCODABLE = (OverflowError, UnicodeError, TypeError, ValueError, RecursionError)


def encode(message: Any) -> bytes:
    """Encode a message, with its arrays, as bytes for `decode`."""
    return _encoder.encode(_plain(message))


def check(message: Any) -> None:
    """Check that `encode` accepts a message, without its arrays. Raises InvalidRequest."""
    try:
        _checker.encode(_plain(message, with_arrays=False))
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
        return _built(_decoder.decode(content))
    except (msgspec.DecodeError, TypeError, ValueError, KeyError) as error:
        raise Corrupt(f"not a message of this journal: {error}") from None


def to_json(message: Any) -> str:
    """Encode for a column of a row. The message must not contain arrays."""
    return msgspec.json.encode(_plain(message)).decode()


def from_json(text: str) -> Any:
    """Decode a text of `to_json`. Raises Corrupt for other texts."""
    try:
        return _built(msgspec.json.decode(text))
    except (msgspec.DecodeError, TypeError, ValueError, KeyError) as error:
        raise Corrupt(f"not a message of this journal: {error}") from None


def _plain(value: Any, with_arrays: bool = True) -> Any:
    names = FIELDS.get(type(value).__name__)
    if names is not None:
        return {
            TAG: type(value).__name__,
            **{name: _plain(getattr(value, name), with_arrays) for name in names},
        }
    if isinstance(value, dict):
        plain = {key: _plain(item, with_arrays) for key, item in value.items()}
        # A client's own key may equal TAG.
        return {TAG: PAIRS, "items": list(plain.items())} if TAG in plain else plain
    if isinstance(value, list | tuple):
        return [_plain(item, with_arrays) for item in value]
    if isinstance(value, np.ndarray):
        if not with_arrays:
            return None
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(2, "little") + head + value.tobytes())
    return value


def _built(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_built(item) for item in value)
    if isinstance(value, dict):
        if value.get(TAG) == PAIRS:
            return {key: _built(item) for key, item in value["items"]}
        items = {key: _built(item) for key, item in value.items() if key != TAG}
        return TYPES[value[TAG]](**items) if TAG in value else items
    return value


def _extension(code: int, content: memoryview) -> Any:
    if code != ARRAY:
        raise ValueError(f"unknown extension {code}")
    size = int.from_bytes(content[:2], "little")
    dtype, shape = msgspec.msgpack.decode(content[2 : 2 + size])
    return np.frombuffer(content, np.dtype(dtype), offset=2 + size).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder()
_checker = msgspec.msgpack.Encoder()  # not shared with the journal's thread
_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
