"""Digests that tell a retry of a request from another request (pure).

The journal stores digests. They are compared with requests that a later version of this project
receives. So a digest covers a field only when its value differs from the default: a field that is
added later, with a default, changes no digest. Fields are identified by name, not by position.
Neither defaults nor the encoding below may change.
"""

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.losses import processing
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.requests import ForwardBackward, Request

PRESENT = 1 << 62  # set in each digest of the present kind; earlier ones were CRCs of 32 bits


class RequestDigest(int):
    """A digest that can be compared with digests of an earlier version, too.

    It references the request, so store `int(digest)`.
    """

    request: Request

    def matches(self, first: int) -> bool:
        """Return whether `first` is the digest of the same request."""
        return self == first or (first < PRESENT and first == digest_before(self.request))


def digest_of(request: Request) -> RequestDigest:
    """Return a digest of 63 bits. Raises TypeError for a value of an unknown type."""
    parts: list[bytes | memoryview] = []
    _add(request, parts)
    content = hashlib.blake2b(b"".join(parts), digest_size=8)
    digest = RequestDigest(int.from_bytes(content.digest()) >> 2 | PRESENT)
    digest.request = request
    return digest


def _add(value: Any, parts: list[bytes | memoryview]) -> None:
    """Add parts that contain their kind and length, so no two values have the same parts."""
    if (shape := _shape_of(cast("type[Any]", type(value)))) is not None:
        _add_fields(value, shape, parts)
    elif isinstance(value, np.generic):
        _add(cast(Any, value).item(), parts)
    elif isinstance(value, np.ndarray):
        dense: NDArray[Any] = np.ascontiguousarray(cast(NDArray[Any], value))
        # By its checksum: a hash of a large batch would take many times as long.
        checksum = zlib.crc32(dense.reshape(-1).view(np.uint8).data)
        parts.append(f"a{dense.dtype.str}{dense.shape}{checksum};".encode())
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        parts.append(b"s%d:" % len(text) + text)
    elif isinstance(value, bytes):
        parts.append(b"b%d:" % len(value) + value)
    elif value is None or isinstance(value, bool | int | float):
        parts.append(_number(value))
    elif isinstance(value, Mapping):
        mapping = cast(Mapping[Any, Any], value)
        parts.append(b"m%d:" % len(mapping))
        for key in sorted(mapping):
            _add(key, parts)
            _add(mapping[key], parts)
    elif isinstance(value, tuple | list):
        items = cast(Sequence[Any], value)
        parts.append(b"l%d:" % len(items))
        _add_items(items, parts)
    else:
        raise TypeError(f"no digest of a {type(cast(object, value)).__name__}")


@dataclass(frozen=True, slots=True)
class Shape:
    """A class as digests cover it. `fields` are in the order of names, each with its encoding."""

    head: bytes
    fields: "tuple[tuple[Field[Any], bytes], ...]"


@cache
def _shape_of(kind: type[Any]) -> Shape | None:
    if not is_dataclass(kind):
        return None
    ordered = sorted(fields(kind), key=lambda field: field.name)
    named = [(field, b"s%d:%b" % (len(field.name), field.name.encode())) for field in ordered]
    return Shape(f"d{kind.__name__}:".encode(), tuple(named))


def _add_fields(value: Any, shape: Shape, parts: list[bytes | memoryview]) -> None:
    """Add a dataclass as its name and a mapping of the fields that differ from their defaults."""
    given = [
        (key, item)
        for field, key in shape.fields
        # Most values are the default itself, which is seen soonest.
        if (item := getattr(value, field.name)) is not field.default
        and not _is_default(field, item)
    ]
    parts.append(b"%bm%d:" % (shape.head, len(given)))
    for key, item in given:
        parts.append(key)
        if isinstance(value, LossCall) and item is value.config:
            item = _options(value)
        _add(item, parts)


def _options(call: LossCall) -> dict[str, float | str]:
    """Return a loss's options without those of the sampling distribution that change nothing.

    Losses got them later, with defaults, so they follow the rule for fields.
    """
    return {
        key: value
        for key, value in call.config.items()
        if key not in processing.OPTIONS or value != processing.OPTIONS[key]
    }


def _add_items(values: Sequence[Any], parts: list[bytes | memoryview]) -> None:
    """Add a list of integers at once, and any other list item by item."""
    if set(map(type, values)) == {int}:
        parts.append(b"q")
        try:
            parts.append(memoryview(array("q", values)).cast("B"))
            return
        except OverflowError:
            pass
    for value in values:
        _add(value, parts)


def _number(value: float | None) -> bytes:
    """Encode equal numbers equally: 1, 1.0 and True."""
    if isinstance(value, float) and not value.is_integer():
        return b"f" + value.hex().encode() + b";"
    return b"n;" if value is None else b"i%d;" % int(value)


def _is_default(field: "Field[Any]", value: Any) -> bool:
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    if isinstance(value, np.ndarray):
        return False
    return field.default is not MISSING and bool(value == field.default)


# Fields that digests of the earlier version cover. Fields added since are not in the table: no
# request of that version used them.
FIELDS_BEFORE = {
    "CreateModel": "spec session_id user_metadata from_path with_optimizer",
    "ModelSpec": "model_id base_model role lora seed optimizer",
    "LoraSpec": "rank alpha train_attn train_mlp train_unembed",
    "OptimStep": "model_id adam seq_id",
    "AdamParams": "learning_rate beta1 beta2 eps weight_decay grad_clip_norm",
    "SaveWeights": "model_id name overwrite seq_id user_metadata ttl_seconds",
    "SaveForSampler": "model_id name sampler_id seq_id user_metadata ttl_seconds",
    "SaveExternal": "model_id name seq_id ttl_seconds",
    "LoadWeights": "model_id path with_optimizer seq_id mixed_with share",
    "Unload": "model_id",
    "Sample": "sampler_id prompt params seq_id",
    "SamplingParams": "max_tokens num_samples temperature top_k top_p seed stop prompt_logprobs "
    "topk_prompt_logprobs topk_sample_logprobs prompt_logprobs_last_n prompt_targets "
    "prompt_alternatives stop_at_end_too stream",
    "PromptTargets": "shape ids layout",
    "SparseLayout": "crow col",
}


def digest_before(request: Request) -> int | None:
    """Return the digest that the earlier version stored for this request.

    Returns None for a request that uses newer fields.
    """
    if isinstance(request, ForwardBackward):
        return _columns_before(request)
    try:
        return zlib.crc32(_shown_before(request).encode())
    except LookupError:
        return None


def _shown_before(value: Any) -> str:
    """Return the `repr` of the earlier version. Raises LookupError for newer fields."""
    if not is_dataclass(value):
        return repr(value)
    names = FIELDS_BEFORE[type(value).__name__].split()
    if any(
        field.name not in names and not _is_default(field, getattr(value, field.name))
        for field in fields(value)
    ):
        raise LookupError
    shown = ", ".join(f"{name}={_shown_before(getattr(value, name))}" for name in names)
    return f"{type(value).__name__}({shown})"


def _columns_before(request: ForwardBackward) -> int:
    columns, loss = request.columns, request.loss
    head = (loss.name, sorted(_options(loss).items()), request.forward_only, sorted(columns.fields))
    arrays: Iterable[np.ndarray[Any, Any]] = (
        columns.tokens,
        columns.offsets,
        *(columns.fields[name] for name in sorted(columns.fields)),
    )
    total = zlib.crc32(repr(head).encode())
    if columns.widths is not None:
        total = zlib.crc32(columns.widths.tobytes(), total)
    for content in arrays:
        total = zlib.crc32(np.ascontiguousarray(content).tobytes(), total)
    return total
