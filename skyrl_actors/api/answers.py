"""Convert results to the protobuf and JSON that SDKs read. This module does not use HTTP."""

import math
from collections.abc import Sequence as ListLike
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.api import schema
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence
from skyrl_actors.messages.sampling import SparseLayout

EMPTY = -99999.0  # the logprob of a cell without a token


def loss_output_to_proto(output: LossOutput) -> bytes:
    """Encode as protobuf. Adjacent rows of one width form a record, in their order."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for width, first, end in _runs(output):
        record = message.loss_fn_outputs.add(num_datums=end - first)
        bounds = output.offsets[first : end + 1]
        for name, array in output.fields.items():
            tensor = record.fields[name]
            tensor.data = np.ascontiguousarray(
                _cut(array, bounds[0], bounds[-1], width), "<f4"
            ).tobytes()
            # SDKs expect the offsets in bytes.
            tensor.offsets = ((bounds - bounds[0]) * 4 * max(width, 1)).astype("<i8").tobytes()
            tensor.dtype = schema.FLOAT32
            if width:
                tensor.trailing_shape.append(width)
    for name, value in output.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def _runs(output: LossOutput) -> list[tuple[int, int, int]]:
    """Return (width, first row, end row) for each run of adjacent rows of one width."""
    rows = len(output.offsets) - 1
    if output.widths is None:
        return [(0, 0, rows)]
    changes = [0, *(np.flatnonzero(np.diff(output.widths)) + 1).tolist(), rows]
    return [(int(output.widths[first]), first, end) for first, end in pairwise(changes)]


def _cut(array: NDArray[np.float32], start: int, end: int, width: int) -> NDArray[np.float32]:
    part = array[start:end]
    return part if array.ndim == 1 else part[:, :width] if width else part[:, 0]


def loss_output_to_json(output: LossOutput) -> dict[str, Any]:
    """Encode as JSON, for clients that do not accept protobuf."""
    rows: list[dict[str, Any]] = []
    widths = np.zeros(len(output.offsets) - 1, np.int64) if output.widths is None else output.widths
    for (start, end), width in zip(pairwise(output.offsets.tolist()), widths.tolist(), strict=True):
        parts = {name: _cut(array, start, end, width) for name, array in output.fields.items()}
        rows.append({name: _tensor_to_json(part) for name, part in parts.items()})
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": rows,
        "metrics": output.metrics,
    }


def _tensor_to_json(array: NDArray[np.float32]) -> dict[str, Any]:
    return {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}


def sample_to_proto(output: SampleOutput) -> bytes:
    """Encode as a protobuf SampleResponse."""
    message = schema.SampleResponse(prompt_cache_hit_tokens=output.cached_tokens)
    for sequence in output.sequences:
        added = message.sequences.add(
            stop_reason=schema.STOP if sequence.stop_reason == "stop" else schema.LENGTH,
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.shown_logprobs.astype("<f4").tobytes(),
        )
        if sequence.topk_ids is not None and sequence.topk_logprobs is not None:
            _set_topk(added.topk_sampled_logprobs, sequence.topk_ids, sequence.topk_logprobs)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs = output.prompt_logprobs.astype("<f4").tobytes()
    if output.topk_prompt_ids is not None and output.topk_prompt_logprobs is not None:
        _set_topk(message.topk_prompt_logprobs, output.topk_prompt_ids, output.topk_prompt_logprobs)
    if output.targets is not None:
        _set_tensor(
            message.target_prompt_logprobs,
            output.targets.values,
            output.targets.shape,
            output.targets.layout,
        )
    if output.alternatives is not None:
        both = output.alternatives
        _set_tensor(message.prompt_alt_tokens.tokens, both.tokens, both.tokens.shape)
        _set_tensor(message.prompt_alt_tokens.logprobs, both.logprobs, both.logprobs.shape)
    return message.SerializeToString()


def _set_tensor(
    message: Any, values: NDArray[Any], shape: ListLike[int], layout: SparseLayout | None = None
) -> None:
    """Write the tensor in the layout of the request: dense, or the listed cells only."""
    is_float = values.dtype.kind == "f"
    message.dtype = schema.FLOAT32 if is_float else schema.INT64
    message.shape.extend(shape)
    content = values.astype("<f4" if is_float else "<i8").tobytes()
    if layout is None:
        message.dense = content
        return
    message.sparse_csr.values = content
    message.sparse_csr.crow_indices = np.asarray(layout.crow, "<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray(layout.col, "<i8").tobytes()


def _set_topk(message: Any, ids: np.ndarray, logprobs: np.ndarray) -> None:
    message.token_ids = ids.astype("<i4").tobytes()
    message.logprobs = logprobs.astype("<f4").tobytes()
    message.length, message.k = ids.shape


def _sequence_to_json(sequence: Sequence) -> dict[str, Any]:
    content: dict[str, Any] = {
        "stop_reason": sequence.stop_reason,
        "tokens": sequence.tokens.tolist(),
        "logprobs": sequence.shown_logprobs.tolist(),
    }
    if sequence.topk_ids is not None and sequence.topk_logprobs is not None:
        content["topk_logprobs"] = _topk_to_json(sequence.topk_ids, sequence.topk_logprobs)
    return content


def _topk_to_json(
    ids: NDArray[Any], logprobs: NDArray[Any]
) -> list[list[tuple[int, float]] | None]:
    """Return (token, logprob) pairs of each position; None where there are none."""
    rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
    kept = [[(i, lp) for i, lp in zip(row, lps, strict=True) if lp > EMPTY] for row, lps in rows]
    return [row or None for row in kept]


def sample_to_json(output: SampleOutput) -> dict[str, Any]:
    """Encode as the JSON of a sample. Missing logprobs are null."""
    body: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence_to_json(sequence) for sequence in output.sequences],
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if math.isnan(x) else x for x in output.prompt_logprobs.tolist()
        ]
    if output.topk_prompt_ids is not None and output.topk_prompt_logprobs is not None:
        body["topk_prompt_logprobs"] = _topk_to_json(
            output.topk_prompt_ids, output.topk_prompt_logprobs
        )
    if output.targets is not None:
        layout = output.targets.layout
        body["target_prompt_logprobs"] = {
            "data": output.targets.values.tolist(),
            "dtype": "float32",
            "shape": list(output.targets.shape),
            **(
                {"sparse_crow_indices": list(layout.crow), "sparse_col_indices": list(layout.col)}
                if layout
                else {}
            ),
        }
    if output.alternatives is not None:
        tokens, logprobs = output.alternatives.tokens, output.alternatives.logprobs
        body["prompt_alt_tokens"] = {
            "tokens": {
                "data": tokens.ravel().tolist(),
                "dtype": "int64",
                "shape": list(tokens.shape),
            },
            "logprobs": _tensor_to_json(logprobs),
        }
    return body
