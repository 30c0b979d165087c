"""The protobuf schema against the SDK's generated messages, and JSON bodies of old SDKs."""

import json
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as sdk

from skyrl_actors.api import answers, codec, compression, schema
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.results import LossOutput, SampleOutput, Sequence

ROWS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), min_size=1, max_size=5)


def sdk_request(rows: list[list[int]], **fields) -> sdk.ForwardBackwardRequest:
    message = sdk.ForwardBackwardRequest(model_id="s:train:0", seq_id=3, loss_fn="ppo", **fields)
    for row in rows:
        datum = message.data.add()
        for half in (
            row[: len(row) // 2],
            row[len(row) // 2 :],
        ):  # a prompt often comes in several chunks
            if half:
                datum.model_input.add().encoded_text.tokens = np.asarray(half, "<i4").tobytes()
        for name, dtype, code in (
            ("target_tokens", "<i8", sdk.DTYPE_INT64),
            ("advantages", "<f4", sdk.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = np.asarray(row, dtype).tobytes()
            tensor.dtype = code
            tensor.shape.append(len(row))
    return message


@given(ROWS, st.booleans())
def test_requests_of_the_sdk_are_decoded(rows: list[list[int]], forward_only: bool):
    message = sdk_request(rows, forward_only=forward_only)
    message.loss_fn_config["clip_low_threshold"] = 0.9
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    request = codec.forward_backward_from_proto(message.SerializeToString())
    assert (request.model_id, request.seq_id, request.forward_only) == (
        "s:train:0",
        3,
        forward_only,
    )
    assert request.loss.name == "ppo" and request.loss.config == {"clip_low_threshold": 0.7}
    assert request.columns.lengths.tolist() == [len(row) for row in rows]
    flat = [token for row in rows for token in row]
    assert request.columns.tokens.tolist() == flat
    assert request.columns.fields["target_tokens"].tolist() == flat
    np.testing.assert_array_equal(
        request.columns.fields["advantages"], np.asarray(flat, np.float32)
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_sdk_decodes_loss_outputs(lengths: list[int]):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.arange(offsets[-1], dtype=np.float32) - 1.5
    output = LossOutput(offsets=offsets, fields={"logprobs": values}, metrics={"loss:sum": 2.5})
    message = sdk.ForwardBackwardOutput.FromString(answers.loss_output_to_proto(output))
    assert dict(message.metrics) == {"loss:sum": 2.5}
    record = message.loss_fn_outputs[0]
    assert record.num_datums == len(lengths)
    tensor = record.fields["logprobs"]
    ends = np.frombuffer(tensor.offsets, "<i8")
    parts = [np.frombuffer(tensor.data[a:b], "<f4") for a, b in pairwise(ends)]
    assert [len(p) for p in parts] == lengths
    np.testing.assert_array_equal(np.concatenate(parts), values)
    old = answers.loss_output_to_json(output)
    assert [row["logprobs"]["data"] for row in old["loss_fn_outputs"]] == [
        p.tolist() for p in parts
    ]
    json.dumps(old, allow_nan=False)


def test_the_sdk_decodes_a_sample():
    sequence = Sequence(
        tokens=np.asarray([5, 9], np.int32),
        logprobs=np.asarray([-0.5, -1.0], np.float32),
        stop_reason="length",
    )
    output = SampleOutput(
        sequences=(sequence,),
        version="v",
        prompt_logprobs=np.asarray([np.nan, -2.0], np.float32),
        topk_prompt_ids=np.asarray([[0, 0], [7, 8]], np.int32),
        topk_prompt_logprobs=np.asarray([[-99999, -99999], [-0.1, -3]], np.float32),
        cached_tokens=4,
    )
    message = sdk.SampleResponse.FromString(answers.sample_to_proto(output))
    assert message.sequences[0].stop_reason == sdk.STOP_REASON_LENGTH
    assert np.frombuffer(message.sequences[0].tokens, "<i4").tolist() == [5, 9]
    assert np.frombuffer(message.sequences[0].logprobs, "<f4").tolist() == [-0.5, -1.0]
    assert message.prompt_cache_hit_tokens == 4
    assert (message.topk_prompt_logprobs.k, message.topk_prompt_logprobs.length) == (2, 2)
    old = answers.sample_to_json(output)
    assert old["prompt_logprobs"] == [None, -2.0]
    assert old["topk_prompt_logprobs"][0] is None and [
        i for i, _ in old["topk_prompt_logprobs"][1]
    ] == [7, 8]
    json.dumps(old, allow_nan=False)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_raise_invalid_request(body: bytes):
    try:
        codec.forward_backward_from_proto(body)
    except InvalidRequest as error:
        assert str(error)


def test_errors_name_the_field_that_is_not_served():
    image = sdk.ForwardBackwardRequest(model_id="m", loss_fn="ppo")
    image.data.add().model_input.add().image.data = b"x"
    with pytest.raises(InvalidRequest, match="datum 0: image 0: the base model takes no images"):
        codec.forward_backward_from_proto(image.SerializeToString())
    wide = sdk_request([[1, 2]])
    wide.data[0].loss_fn_inputs["target_tokens"].shape[:] = [1, 2]
    with pytest.raises(
        InvalidRequest, match=r"target_tokens has shape \(1, 2\), model_input has 2 tokens"
    ):
        codec.forward_backward_from_proto(wide.SerializeToString())
    wrong = sdk_request([[1, 2]])
    wrong.data[0].loss_fn_inputs["advantages"].dense = b"12345"
    with pytest.raises(InvalidRequest, match="advantages"):
        codec.forward_backward_from_proto(wrong.SerializeToString())


@pytest.mark.parametrize("sparse", [False, True])
def test_a_shape_that_no_array_can_have_is_refused(sparse: bool):
    message = sdk_request([[1, 2]])
    tensor = message.data[0].loss_fn_inputs["advantages"]
    tensor.shape[:] = [0, 2**62]
    tensor.dense = b""
    if sparse:
        tensor.sparse_csr.crow_indices = bytes(8)
    with pytest.raises(InvalidRequest, match=rf"advantages.*\[0, {2**62}\]"):
        codec.forward_backward_from_proto(message.SerializeToString())


def test_tokens_beyond_32_bits_are_refused():
    message = sdk_request([[1, 2]])
    message.data[0].loss_fn_inputs["target_tokens"].dense = np.asarray(
        [2**32 + 5, 1], "<i8"
    ).tobytes()
    with pytest.raises(InvalidRequest, match="no token id: a whole number of 32 bits"):
        codec.forward_backward_from_proto(message.SerializeToString())
    datum = {"model_input": {"chunks": [{"tokens": [2**31]}]}, "loss_fn_inputs": {}}
    with pytest.raises(
        InvalidRequest, match="datum 0: tokens has a number that does not fit int32"
    ):
        codec.forward_backward_from_json(
            {"model_id": "m", "forward_backward_input": {"data": [datum], "loss_fn": "x"}}, False
        )


def test_json_bodies_of_old_sdks_are_decoded():
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2, 3, 4], "dtype": "int64"}},
    }
    body = {
        "model_id": "m",
        "seq_id": 1,
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
    }
    request = codec.forward_backward_from_json(body, forward_only=False)
    assert request.columns.tokens.tolist() == [1, 2, 3] and request.loss.config == {}
    with pytest.raises(InvalidRequest, match="datum 0 is not a Datum"):
        codec.forward_backward_from_json(
            {**body, "forward_backward_input": {"data": [{}], "loss_fn": "x"}}, False
        )
    with pytest.raises(InvalidRequest, match="needs model_id and forward_input"):
        codec.forward_backward_from_json(body, forward_only=True)


def test_datums_beyond_the_limit_are_refused_before_they_are_built():
    message = schema.ForwardBackwardRequest()
    for _ in range(1025):
        message.data.add()  # without a prompt, which is refused too
    with pytest.raises(InvalidRequest, match="1025 datums in one request; at most 1024"):
        codec.forward_backward_from_proto(message.SerializeToString())
    body = {"model_id": "m", "forward_input": {"data": [{}] * 1025, "loss_fn": "cross_entropy"}}
    with pytest.raises(InvalidRequest, match="1025 datums in one request; at most 1024"):
        codec.forward_backward_from_json(body, forward_only=True)


def test_decompression_is_limited():
    small = zstandard.compress(b"x" * 1000)
    assert compression.decompress(small, 1000) == b"x" * 1000
    with pytest.raises(compression.BodyTooLarge, match="more than 999 bytes"):
        compression.decompress(small, 999)
    bomb = zstandard.compress(b"\0" * 10**8)
    with pytest.raises(compression.BodyTooLarge):
        compression.decompress(bomb, 10**6)
    with pytest.raises(InvalidRequest, match="not valid zstd"):
        compression.decompress(b"nonsense", 100)


def test_the_schema_has_the_sdks_field_numbers():
    for name, ours in schema._CLASSES.items():
        whole = "ForwardBackwardRequest" if name == "ModelOfRequest" else name
        theirs = getattr(sdk, whole).DESCRIPTOR.fields_by_name
        for field in ours.DESCRIPTOR.fields:
            assert theirs[field.name].number == field.number, f"{name}.{field.name}"
            assert theirs[field.name].type == field.type, f"{name}.{field.name}"
