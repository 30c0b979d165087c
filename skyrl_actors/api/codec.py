"""Decode requests from protobuf and JSON to Columns. This module does not use HTTP."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from skyrl_actors.api import schema
from skyrl_actors.api.pictures import PictureReader, Row
from skyrl_actors.api.tensors import DTYPES, SparseBound, array_of, numbers, shaped
from skyrl_actors.config.limits import LimitsConfig
from skyrl_actors.messages.columns import check_num_datums, columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import Example
from skyrl_actors.messages.images import Picture
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.narrowing import is_array, is_mapping
from skyrl_actors.messages.requests import ForwardBackward
from skyrl_actors.messages.sampling import PromptTargets, SparseLayout

SERVED = "only text tokens and images are served"
RESIZE = "resize the image before it is sent"


class _ModelOfBody(msgspec.Struct):
    model_id: str = ""


def model_id_in(body: bytes, is_proto: bool) -> str:
    """Return the model of a batch without its data; "" if the body has none or is damaged."""
    try:
        if is_proto:
            return schema.ModelOfRequest.FromString(body).model_id
        return msgspec.json.decode(body, type=_ModelOfBody).model_id
    except (DecodeError, msgspec.MsgspecError, RecursionError):
        return ""


def batch_of(body: bytes) -> Any:
    """Parse the protobuf of /forward_backward (SDK 0.25 and later)."""
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"the body is not a ForwardBackwardRequest: {error}") from None
    check_num_datums(len(message.data))
    return message


def forward_backward_from_proto(
    body: bytes, limit: int = 2**31, reader: PictureReader | None = None
) -> ForwardBackward:
    """Decode the protobuf of /forward_backward."""
    return forward_backward_of(batch_of(body), limit, reader)


def forward_backward_of(
    message: Any, limit: int = 2**31, reader: PictureReader | None = None
) -> ForwardBackward:
    """Convert a ForwardBackwardRequest."""
    reader = reader or PictureReader(None, LimitsConfig())
    bound = SparseBound(limit)
    examples = [_example_from_proto(i, d, bound, reader) for i, d in enumerate(message.data)]
    config: dict[str, Any] = dict(message.loss_fn_config)
    config |= {
        key: getattr(v, v.WhichOneof("kind") or "number")
        for key, v in message.loss_fn_config_v2.items()
    }
    return ForwardBackward(
        model_id=message.model_id,
        columns=columns_from(examples, limit),
        loss=LossCall(message.loss_fn, config),
        forward_only=message.forward_only,
        seq_id=message.seq_id or None,
    )


def _example_from_proto(
    index: int, datum: Any, bound: SparseBound, reader: PictureReader
) -> Example:
    row = Row(f"datum {index}", reader)
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("kind")
        if kind == "encoded_text":
            row.add_text(array_of(chunk.encoded_text.tokens, np.int32, "tokens"))
        elif kind == "image":
            own = chunk.image
            if own.HasField("override_dimensions"):
                raise InvalidRequest(
                    f"datum {index} has an image with override_dimensions; {RESIZE}"
                )
            expected = own.expected_tokens if own.HasField("expected_tokens") else None
            row.add_image(own.data, own.format, expected)
        else:
            raise InvalidRequest(f"datum {index} has a chunk of kind {kind}; {SERVED}")
    fields = {
        name: _tensor_from_proto(f"datum {index}: {name}", tensor, bound)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return row.example(fields)


def _tensor_from_proto(what: str, tensor: Any, bound: SparseBound) -> NDArray[np.generic]:
    if tensor.dtype not in DTYPES:
        raise InvalidRequest(f"{what} has dtype {tensor.dtype}; use float32 or int64")
    shape = list(tensor.shape)
    if tensor.WhichOneof("kind") != "sparse_csr":
        return shaped(array_of(tensor.dense, DTYPES[tensor.dtype], what), shape, what)
    csr = tensor.sparse_csr
    crow, col = (
        array_of(csr.crow_indices, np.int64, what),
        array_of(csr.col_indices, np.int64, what),
    )
    return bound.dense(what, shape, array_of(csr.values, DTYPES[tensor.dtype], what), crow, col)


def forward_backward_from_json(
    body: Mapping[str, Any],
    forward_only: bool,
    limit: int = 2**31,
    reader: PictureReader | None = None,
    sparse_limit: int | None = None,
) -> ForwardBackward:
    """Decode the JSON of /forward_backward or /forward (SDKs before 0.25).

    Sparse tensors may have `sparse_limit` bytes as dense ones; None is `limit`.
    """
    reader = reader or PictureReader(None, LimitsConfig())
    content = input_of(body, forward_only)
    bound = SparseBound(limit if sparse_limit is None else sparse_limit)
    examples = [
        _example_from_json(i, datum, bound, reader) for i, datum in enumerate(content["data"])
    ]
    config, seq_id = content.get("loss_fn_config") or dict[str, Any](), body.get("seq_id")
    only = body.get("forward_only")
    if not is_mapping(config) or isinstance(seq_id, bool) or not isinstance(seq_id, int | None):
        raise InvalidRequest("loss_fn_config must be an object, and seq_id a whole number")
    if not isinstance(only, bool | None):
        raise InvalidRequest("forward_only must be true or false")
    return ForwardBackward(
        model_id=body["model_id"],
        columns=columns_from(examples, limit),
        loss=LossCall(content["loss_fn"], dict(config)),
        forward_only=forward_only or bool(only),
        seq_id=seq_id,
    )


def input_of(body: Mapping[str, Any], forward_only: bool) -> Mapping[str, Any]:
    """Return the input of a JSON batch, with its `data` and `loss_fn`."""
    content = body.get("forward_input" if forward_only else "forward_backward_input")
    if not is_mapping(content) or not isinstance(body.get("model_id"), str):
        raise InvalidRequest(
            "the body needs model_id and "
            + ("forward_input" if forward_only else "forward_backward_input")
        )
    data = content.get("data")
    if not is_array(data) or not isinstance(content.get("loss_fn"), str):
        raise InvalidRequest("the input needs data (a list) and loss_fn (a string)")
    check_num_datums(len(data))
    return content


def _example_from_json(
    index: int, datum: Any, bound: SparseBound, reader: PictureReader
) -> Example:
    row = Row(f"datum {index}", reader)
    try:
        for chunk in datum["model_input"]["chunks"]:
            _add_json_chunk(row, chunk)
        tensors = datum["loss_fn_inputs"].items()
        fields = {
            name: _tensor_from_json(f"datum {index}: {name}", tensor, bound)
            for name, tensor in tensors
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(
            f"datum {index} is not a Datum: {type(error).__name__} {error}"
        ) from None
    return row.example(fields)


def _add_json_chunk(row: Row, chunk: Any) -> None:
    """Add a chunk to a row. SDKs up to 0.16 omit `type`, so the keys decide the kind.

    The first SDKs send an image's number of tokens as `tokens`.
    """
    if is_mapping(chunk) and "location" in chunk:
        row.add_pointer(chunk["location"], str(chunk.get("format")), _expected(row, chunk))
        return
    if is_mapping(chunk) and "data" in chunk and chunk.get("type", "image") == "image":
        expected = _expected(row, chunk)
        try:
            content = base64.b64decode(chunk["data"], validate=True)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{row.what}: data of an image: {error}") from None
        row.add_image(content, str(chunk.get("format")), expected)
        return
    if is_mapping(chunk) and "tokens" not in chunk:
        kind = chunk.get("type", sorted(chunk))
        raise InvalidRequest(f"{row.what} has a chunk of kind {kind}; {SERVED}")
    tokens = tokens_from_chunks([chunk], row.what)
    row.add_text(numbers(f"{row.what}: tokens", tokens, np.int32))


def _expected(row: Row, chunk: Mapping[str, Any]) -> int | None:
    expected = chunk.get("expected_tokens", chunk.get("tokens"))
    if isinstance(expected, bool) or not isinstance(expected, int | None):
        raise InvalidRequest(f"{row.what}: expected_tokens must be a whole number")
    return expected


def _tensor_from_json(what: str, tensor: Any, bound: SparseBound) -> NDArray[np.generic]:
    values, shape = (
        numbers(what, tensor["data"], DTYPES[tensor["dtype"]]),
        tensor.get("shape") or list[int](),
    )
    if not all(type(size) is int for size in shape):
        raise InvalidRequest(f"{what}: shape must be a list of whole numbers")
    crow, col = tensor.get("sparse_crow_indices"), tensor.get("sparse_col_indices")
    if crow is None or col is None:
        return shaped(values, shape, what)
    return bound.dense(
        what, shape, values, numbers(what, crow, np.int64), numbers(what, col, np.int64)
    )


def prompt_from_chunks(
    chunks: Sequence[object], reader: PictureReader
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Return the tokens of a prompt, with placeholders for its images, and the images."""
    if reader.form is None and not has_images(chunks):
        return tuple(tokens_from_chunks(chunks)), ()
    row = Row("the prompt", reader)
    try:
        for chunk in chunks:
            _add_json_chunk(row, chunk)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(
            f"the prompt is not a ModelInput: {type(error).__name__} {error}"
        ) from None
    return row.prompt()


def has_images(chunks: Sequence[object]) -> bool:
    """Return whether a chunk is an image, or names one."""
    return any(is_mapping(chunk) and ("data" in chunk or "location" in chunk) for chunk in chunks)


def tokens_from_chunks(chunks: Sequence[object], what: str = "the prompt") -> list[int]:
    """Return the tokens of all text chunks of `what`, in order.

    SDKs up to 0.16 omit `type`, so the keys decide the kind.
    """
    tokens: list[int] = []
    for chunk in chunks:
        if not is_mapping(chunk):
            raise InvalidRequest(
                f"a chunk must be an object with tokens, not {type(chunk).__name__}"
            )
        if "tokens" not in chunk or chunk.get("type", "encoded_text") != "encoded_text":
            raise InvalidRequest(
                f"a chunk of kind {chunk.get('type', sorted(chunk))}; only text tokens are served"
            )
        given = chunk["tokens"]
        if not is_array(given) or {*map(type, given)} - {int}:
            raise InvalidRequest(f"{what}: tokens must be a list of whole numbers")
        tokens.extend(given)
    return tokens


def prompt_targets_from_json(tensor: Any, limit: int) -> PromptTargets:
    """Decode the ids to score at each prompt position, [P - 1, K] int64; -1 scores nothing."""
    what = "target_prompt_logprobs"
    if not is_mapping(tensor) or tensor.get("dtype") != "int64":
        raise InvalidRequest(f"{what} must be an int64 tensor of token ids")
    shape, crow, col = (
        tensor.get(key) for key in ("shape", "sparse_crow_indices", "sparse_col_indices")
    )
    ids = numbers(what, tensor.get("data", []), np.int64)
    if (
        not is_array(shape)
        or len(shape) != 2
        or not all(type(size) is int and size >= 0 for size in shape)
    ):
        raise InvalidRequest(f"{what} has shape {shape}; it must be [prompt tokens - 1, K]")
    layout = None
    if crow is None or col is None:
        shaped(ids, shape, what)
    else:
        # Converted to a dense matrix only for its checks.
        SparseBound(limit).dense(
            what, shape, ids, numbers(what, crow, np.int64), numbers(what, col, np.int64)
        )
        layout = SparseLayout(tuple(crow), tuple(col))
    return PromptTargets((shape[0], shape[1]), tuple(ids.ravel().tolist()), layout)
