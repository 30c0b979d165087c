"""Bytes and JSON to Columns and back. Nothing here knows of HTTP."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from skyrl_actors.api import schema
from skyrl_actors.messages.columns import Example, columns_from
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LossCall
from skyrl_actors.messages.requests import ForwardBackward
from skyrl_actors.messages.results import LossOutput, SampleOutput

DTYPES = {schema.FLOAT32: np.float32, schema.INT64: np.int64, "float32": np.float32, "int64": np.int64}


class BodyTooLarge(InvalidRequest):
    status = 413


def decompress(body: bytes, limit: int) -> bytes:
    """zstd with a bound on what comes out. Raises BodyTooLarge or InvalidRequest."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is not valid zstd: {error}") from None
    if len(plain) > limit:
        raise BodyTooLarge(f"the decompressed body has more than {limit} bytes, the most this service takes")
    return plain


def forward_backward_from_proto(body: bytes) -> ForwardBackward:
    """The protobuf body of /forward_backward (SDK 0.25 and later)."""
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"the body is not a ForwardBackwardRequest: {error}") from None
    examples = [_example_from_proto(i, datum) for i, datum in enumerate(message.data)]
    config: dict[str, Any] = dict(message.loss_fn_config)
    config |= {key: getattr(v, v.WhichOneof("kind") or "number") for key, v in message.loss_fn_config_v2.items()}
    return ForwardBackward(
        message.model_id,
        columns_from(examples),
        LossCall(message.loss_fn, config),
        message.forward_only,
        message.seq_id or None,
    )


def _example_from_proto(index: int, datum: Any) -> Example:
    parts = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("kind") != "encoded_text":
            raise InvalidRequest(f"datum {index} has a chunk of kind {chunk.WhichOneof('kind')}; only text tokens are served")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, "tokens"))
    fields = {name: _tensor_from_proto(index, name, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return Example(np.concatenate(parts) if parts else np.zeros(0, np.int32), fields)


def _tensor_from_proto(index: int, name: str, tensor: Any) -> NDArray[np.generic]:
    if tensor.WhichOneof("kind") == "sparse_csr":
        raise InvalidRequest(f"datum {index}: {name} is two-dimensional; only one value for each token is served")
    if tensor.dtype not in DTYPES:
        raise InvalidRequest(f"datum {index}: {name} has dtype {tensor.dtype}; use float32 or int64")
    return _shaped(_array(tensor.dense, DTYPES[tensor.dtype], name), list(tensor.shape), index, name)


def _array(data: bytes, dtype: Any, name: str) -> NDArray[Any]:
    try:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}") from None


def _shaped(flat: NDArray[Any], shape: Sequence[int], index: int, name: str) -> NDArray[Any]:
    if shape and math.prod(shape) != flat.size:
        raise InvalidRequest(f"datum {index}: {name} has {flat.size} values but shape {list(shape)}")
    if len(shape) > 1:
        raise InvalidRequest(f"datum {index}: {name} has shape {list(shape)}; only one value for each token is served")
    return flat


def forward_backward_from_json(body: Mapping[str, Any], forward_only: bool) -> ForwardBackward:
    """The JSON bodies of /forward_backward and /forward (SDKs before 0.25)."""
    content = body.get("forward_input" if forward_only else "forward_backward_input")
    if not isinstance(content, Mapping) or not isinstance(body.get("model_id"), str):
        raise InvalidRequest("the body needs model_id and " + ("forward_input" if forward_only else "forward_backward_input"))
    data = content.get("data")
    if not isinstance(data, list) or not isinstance(content.get("loss_fn"), str):
        raise InvalidRequest("the input needs data (a list) and loss_fn (a string)")
    examples = [_example_from_json(i, datum) for i, datum in enumerate(data)]
    loss = LossCall(content["loss_fn"], dict(content.get("loss_fn_config") or {}))
    return ForwardBackward(body["model_id"], columns_from(examples), loss, forward_only, body.get("seq_id"))


def _example_from_json(index: int, datum: Any) -> Example:
    try:
        tokens = np.asarray(tokens_from_chunks(datum["model_input"]["chunks"]), np.int32)
        fields = {
            name: _shaped(np.asarray(t["data"], DTYPES[t["dtype"]]), t.get("shape") or [], index, name)
            for name, t in datum["loss_fn_inputs"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"datum {index} is not a Datum: {type(error).__name__} {error}") from None
    return Example(tokens, fields)


def tokens_from_chunks(chunks: Sequence[Mapping[str, Any]]) -> list[int]:
    """All text chunks in order; SDKs up to 0.16 leave out `type`, so the keys decide."""
    tokens: list[int] = []
    for chunk in chunks:
        if "tokens" not in chunk or chunk.get("type", "encoded_text") != "encoded_text":
            raise InvalidRequest(f"a chunk of kind {chunk.get('type', sorted(chunk))}; only text tokens are served")
        tokens.extend(chunk["tokens"])
    return tokens


def loss_output_to_proto(output: LossOutput) -> bytes:
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(num_datums=len(output.offsets) - 1)
    for name, array in output.fields.items():
        tensor = record.fields[name]
        tensor.data = np.ascontiguousarray(array, "<f4").tobytes()
        tensor.offsets = (output.offsets * 4).astype("<i8").tobytes()  # bytes, not elements
        tensor.dtype = schema.FLOAT32
    for name, value in output.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def loss_output_to_json(output: LossOutput) -> dict[str, Any]:
    rows = []
    for start, end in zip(output.offsets[:-1], output.offsets[1:], strict=True):
        fields = {name: array[start:end].tolist() for name, array in output.fields.items()}
        rows.append({name: {"data": data, "dtype": "float32", "shape": [len(data)]} for name, data in fields.items()})
    return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": rows, "metrics": output.metrics}


def sample_to_proto(output: SampleOutput) -> bytes:
    message = schema.SampleResponse(prompt_cache_hit_tokens=output.cached_tokens)
    for sequence in output.sequences:
        added = message.sequences.add(
            stop_reason=schema.STOP if sequence.stop_reason == "stop" else schema.LENGTH,
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.logprobs.astype("<f4").tobytes(),
        )
        if sequence.topk_ids is not None and sequence.topk_logprobs is not None:
            _set_topk(added.topk_sampled_logprobs, sequence.topk_ids, sequence.topk_logprobs)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = output.prompt_logprobs.astype("<f4").tobytes()
    if output.topk_prompt_ids is not None and output.topk_prompt_logprobs is not None:
        _set_topk(message.topk_prompt_logprobs, output.topk_prompt_ids, output.topk_prompt_logprobs)
    return message.SerializeToString()


def _set_topk(message: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    message.token_ids = ids.astype("<i4").tobytes()
    message.logprobs = logprobs.astype("<f4").tobytes()
    message.length, message.k = ids.shape


def sample_to_json(output: SampleOutput) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {"stop_reason": s.stop_reason, "tokens": s.tokens.tolist(), "logprobs": s.logprobs.tolist()} for s in output.sequences
        ],
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [None if math.isnan(x) else x for x in output.prompt_logprobs.tolist()]
    if output.topk_prompt_ids is not None and output.topk_prompt_logprobs is not None:
        rows = zip(output.topk_prompt_ids.tolist(), output.topk_prompt_logprobs.tolist(), strict=True)
        kept = [[(i, lp) for i, lp in zip(ids, lps, strict=True) if lp > -99999.0] for ids, lps in rows]
        body["topk_prompt_logprobs"] = [row or None for row in kept]
    return body
