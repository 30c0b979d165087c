"""Encoding and decoding against the SDK's own encoder and decoder."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from skyrl_actors.api import answers, codec, schema
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence
from skyrl_actors.messages.sampling import PromptAlternatives, SparseLayout, TargetLogprobs

TOKEN = st.integers(0, 2**31 - 1)
FLOAT = st.floats(width=32, allow_nan=True, allow_infinity=True)
SHAPE = st.tuples(st.integers(1, 5), st.one_of(st.none(), st.integers(1, 4)))  # (N,) or (N, K)


@st.composite
def datums(draw: st.DrawFn) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Tokens, targets and weights. Most cells are 0 if wide, so that the SDK sends some as CSR."""
    length, width = draw(SHAPE)
    shape = (length,) if width is None else (length, width)
    cells = length * (width or 1)
    empty = np.asarray(draw(st.lists(st.booleans(), min_size=cells, max_size=cells))).reshape(
        shape
    ) & (width is not None)
    targets = np.asarray(draw(st.lists(TOKEN, min_size=cells, max_size=cells)), np.int64).reshape(
        shape
    )
    weights = np.asarray(draw(st.lists(FLOAT, min_size=cells, max_size=cells)), np.float32).reshape(
        shape
    )
    return (
        draw(st.lists(TOKEN, min_size=length, max_size=length)),
        np.where(empty, 0, targets),
        np.where(empty, 0, weights),
    )


def as_sent(some: list[tuple[list[int], np.ndarray, np.ndarray]]) -> bytes:
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_torch_sparse(torch.from_numpy(targets)),
                "weights": types.TensorData.from_torch_sparse(torch.from_numpy(weights)),
            },
        )
        for tokens, targets, weights in some
    ]
    content = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    return forward_backward_request_to_proto(
        ForwardBackwardRequest(forward_backward_input=content, model_id="m", seq_id=1)
    ).SerializeToString()


@given(st.lists(datums(), min_size=1, max_size=4))
def test_dense_sparse_and_ragged_tensors_are_decoded(
    some: list[tuple[list[int], np.ndarray, np.ndarray]],
):
    columns = codec.forward_backward_from_proto(as_sent(some)).columns
    assert columns.num_rows == len(some)
    for row, (tokens, targets, weights) in enumerate(some):
        where = slice(columns.offsets[row], columns.offsets[row + 1])
        assert columns.tokens[where].tolist() == tokens
        for name, sent in (("target_tokens", targets), ("weights", weights)):
            got = columns.fields[name][where]
            assert columns.widths is None or columns.widths[row] == (
                sent.shape[1] if sent.ndim == 2 else 0
            )
            width = 1 if sent.ndim == 1 else sent.shape[1]
            wide = got[:, None] if got.ndim == 1 else got
            np.testing.assert_array_equal(wide[:, :width], sent.reshape(len(tokens), width))
            assert not wide[:, width:].any()  # what fills up a narrower row weighs nothing


@given(st.lists(SHAPE, min_size=1, max_size=6), st.data())
def test_the_sdk_decodes_any_loss_output(shapes: list[tuple[int, int | None]], data: st.DataObject):
    rows = []
    for length, width in shapes:
        shape = (length,) if width is None else (length, width)
        cells = data.draw(
            st.lists(FLOAT, min_size=length * (width or 1), max_size=length * (width or 1))
        )
        rows.append(np.asarray(cells, np.float32).reshape(shape))
    widths = np.asarray([width or 0 for _, width in shapes])
    widest = widths.max()
    flat = np.zeros(
        (sum(len(row) for row in rows), widest) if widest else sum(len(row) for row in rows),
        np.float32,
    )
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    for start, row in zip(offsets, rows, strict=False):
        if widest:
            flat[start : start + len(row), : row.shape[1] if row.ndim == 2 else 1] = row.reshape(
                len(row), -1
            )
        else:
            flat[start : start + len(row)] = row
    output = LossOutput(
        offsets=offsets,
        fields={"logprobs": flat},
        metrics={"loss:sum": 1.5},
        widths=widths if widest else None,
    )
    decoded = deserialize_forward_backward_output(answers.loss_output_to_proto(output))
    assert decoded.metrics == {"loss:sum": 1.5} and len(decoded.loss_fn_outputs) == len(rows)
    for fields, row in zip(decoded.loss_fn_outputs, rows, strict=True):
        np.testing.assert_array_equal(
            fields["logprobs"]._numpy.reshape(fields["logprobs"].shape), row
        )
    for fields, row in zip(
        answers.loss_output_to_json(output)["loss_fn_outputs"], rows, strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(fields["logprobs"]["data"], np.float32), row.ravel()
        )
        assert fields["logprobs"]["shape"] == list(row.shape)


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.data())
def test_the_sdk_decodes_any_sample(length: int, topk: int, alternatives: int, data: st.DataObject):
    def floats(*shape: int) -> np.ndarray:
        cells = int(np.prod(shape))
        return np.asarray(
            data.draw(st.lists(FLOAT, min_size=cells, max_size=cells)), np.float32
        ).reshape(shape)

    own, prompt = floats(length), floats(length)
    ids = np.arange(length * topk, dtype=np.int32).reshape(length, topk)
    tops = floats(length, topk)
    alts = PromptAlternatives(
        np.full((length, alternatives), -1, np.int64), floats(length, alternatives)
    )
    layout = SparseLayout((0, *range(1, length + 1)), (0,) * length)
    output = SampleOutput(
        sequences=(
            Sequence(
                tokens=np.arange(length, dtype=np.int32),
                logprobs=own,
                stop_reason="stop",
                topk_ids=ids if topk else None,
                topk_logprobs=tops if topk else None,
            ),
        )
        * 2,
        version="v",
        prompt_logprobs=prompt,
        topk_prompt_ids=ids if topk else None,
        topk_prompt_logprobs=tops if topk else None,
        cached_tokens=3,
        targets=TargetLogprobs(own, (length, 1), layout),
        alternatives=alts if alternatives else None,
    )
    decoded = deserialize_sample_response(answers.sample_to_proto(output))
    np.testing.assert_array_equal(decoded.sequences[1].logprobs_np, own)
    np.testing.assert_array_equal(decoded.prompt_logprobs_np, prompt)
    assert decoded.prompt_cache_hit_tokens == 3
    target = decoded.target_prompt_logprobs
    assert (target.shape, target.sparse_col_indices) == ([length, 1], [0] * length)
    np.testing.assert_array_equal(target._numpy, own)
    if topk:
        np.testing.assert_array_equal(decoded.topk_prompt_logprobs_np.logprobs, tops)
        np.testing.assert_array_equal(decoded.sequences[0].topk_logprobs_np.token_ids, ids)
    if alternatives:
        np.testing.assert_array_equal(decoded.prompt_alt_tokens.logprobs._numpy, alts.logprobs)
        assert decoded.prompt_alt_tokens.tokens.shape == [length, alternatives]


def sparse(crow: list[int], col: list[int], shape: list[int], values: int) -> bytes:
    message = schema.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(2, dtype="<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = schema.INT64
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.arange(values, dtype="<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(col, "<i8").tobytes()
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("crow", "col", "shape", "values", "expected"),
    [
        ([0, 1, 2], [0, 5], [2, 3], 2, "is not a CSR matrix"),
        ([0, 1, 2], [0, -1], [2, 3], 2, "is not a CSR matrix"),
        ([0, 2, 1], [0, 1], [2, 3], 2, "is not a CSR matrix"),
        ([0, 1], [0], [2, 3], 1, "is not a CSR matrix"),
        ([], [], [2, 3], 0, "is not a CSR matrix"),
        ([0, 1, 2], [0, 1], [2, 3], 1, "is not a CSR matrix"),
        ([0, 1, 2], [0, 1], [2], 2, "a sparse tensor has two dimensions"),
        ([0, 0, 0], [], [2, 2**40], 0, "as dense tensors, the request has more than"),
        ([0, 0, 0], [], [2, 0], 0, "send one value for each input token"),
    ],
)
def test_invalid_sparse_matrices_are_refused(
    crow: list[int], col: list[int], shape: list[int], values: int, expected: str
):
    with pytest.raises(InvalidRequest, match=expected):
        codec.forward_backward_from_proto(sparse(crow, col, shape, values), limit=10**6)


def test_padding_to_the_widest_row_is_limited():
    wide = (np.arange(2).tolist(), np.ones((2, 1000), np.int64), np.ones((2, 1000), np.float32))
    narrow = ([1] * 1000, np.ones((1000, 1), np.int64), np.ones((1000, 1), np.float32))
    with pytest.raises(
        InvalidRequest, match="1002 tokens with up to 1000 targets each need more than"
    ):
        codec.forward_backward_from_proto(as_sent([wide, narrow]), limit=10**6)
