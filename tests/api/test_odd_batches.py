"""Bodies whose values have other types, and sparse tensors that are large for few bytes."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_actors.api import batches, codec, schema
from skyrl_actors.messages.errors import InvalidRequest
from tests.api.local import MODEL, AnsweringBackend, config_for, edge, model_in

PROTO = {"content-type": "application/x-protobuf"}


class Recording(AnsweringBackend):
    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.is_forward: list[bool] = []

    async def forward_backward(
        self,
        spec: Any,
        precondition: Any,
        columns: Any,
        loss: Any,
        forward_only: bool,
        weight: float = 1.0,
    ) -> Any:
        self.is_forward.append(forward_only)
        return await super().forward_backward(
            spec, precondition, columns, loss, forward_only, weight
        )


def asample(tokens: str, more: str = "") -> str:
    return (
        f'{{"base_model": "{MODEL}", "prompt": {{"chunks": [{{"tokens": {tokens}}}]}}, '
        f'"sampling_params": {{"max_tokens": 1}}{more}}}'
    )


@pytest.mark.parametrize(
    "tokens",
    ["[1.5]", "[NaN]", "[1.0, 2]", "[true, 2]", "[null]", '"12"', '["1"]', "[[1]]", "5", "null"],
)
async def test_no_engine_gets_a_token_id_of_another_type(tmp_path: Path, tokens: str):
    """The input of a vLLM engine ends at a number that is not whole."""
    backend = Recording(tmp_path)
    async with edge(config_for(tmp_path), backend) as http:
        answer = await http.post("/asample", content=asample(tokens))
        assert answer.status_code == 422, answer.text
        assert "tokens must be a list of whole numbers" in answer.text
        good = await http.post("/asample", content=asample("[1, 2]"))
        assert good.status_code == 200, good.text


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ('{"data": [[1], [2, 3]], "dtype": "int64", "shape": [1, 1]}', "list of whole numbers"),
        ('{"data": [true], "dtype": "int64", "shape": [1, 1]}', "list of whole numbers"),
        ('{"data": [1], "dtype": "int64", "shape": [true, 1]}', "has shape"),
        (
            '{"data": [1], "dtype": "int64", "shape": [1, 1], "sparse_crow_indices": 5, '
            '"sparse_col_indices": [0]}',
            "must be a list of numbers",
        ),
    ],
)
async def test_damaged_targets_of_a_prompt_are_refused(tmp_path: Path, targets: str, said: str):
    async with edge(config_for(tmp_path)) as http:
        body = asample("[1, 2]", f', "target_prompt_logprobs": {targets}')
        answer = await http.post("/asample", content=body)
        assert answer.status_code == 422 and said in answer.text, answer.text


def sparse_batch(model: str, width: int, seq_id: int) -> Any:
    message = schema.ForwardBackwardRequest(model_id=model, loss_fn="cross_entropy", seq_id=seq_id)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1], "<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dtype = schema.INT64
    tensor.shape.extend([1, width])
    tensor.sparse_csr.crow_indices = np.asarray([0, 0], "<i8").tobytes()
    return message


def json_batch(model: str, seq_id: int, tensor: dict[str, Any], **more: Any) -> str:
    datum = {
        "model_input": {"chunks": [{"tokens": [1]}]},
        "loss_fn_inputs": {"target_tokens": tensor},
    }
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    return json.dumps(
        {"model_id": model, "seq_id": seq_id, "forward_backward_input": given, **more}
    )


def sparse_tensor(width: int) -> dict[str, Any]:
    empty = {"data": [], "sparse_crow_indices": [0, 0], "sparse_col_indices": []}
    return {"dtype": "int64", "shape": [1, width], **empty}


@pytest.mark.parametrize("is_proto", [True, False])
async def test_sparse_tensors_count_with_the_bytes_of_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_proto: bool
):
    """A body of 80 bytes can become 64 MB, which took the event loop and counted as 80 bytes."""
    seen: list[tuple[bool, int]] = []
    width = 10**5
    async with edge(config_for(tmp_path)) as http:
        budget = http._transport.app.state.api.body_budget  # type: ignore[attr-defined]
        _, model = await model_in(http)
        real = codec.SparseBound.dense

        def dense(*arguments: Any) -> Any:
            in_loop = threading.current_thread() is threading.main_thread()
            seen.append((in_loop, budget.taken))
            return real(*arguments)

        monkeypatch.setattr(codec.SparseBound, "dense", dense)
        if is_proto:
            body: Any = sparse_batch(model, width, 1).SerializeToString()
        else:
            body = json_batch(model, 1, sparse_tensor(width)).encode()
        answer = await http.post(
            "/forward_backward", content=body, headers=PROTO if is_proto else {}
        )
        assert answer.status_code == 200, answer.text
        assert seen == [(False, len(body) + 8 * width)]
        if is_proto:
            body = sparse_batch(model, 10**8, 2).SerializeToString()
        else:
            body = json_batch(model, 2, sparse_tensor(10**8)).encode()
        answer = await http.post(
            "/forward_backward", content=body, headers=PROTO if is_proto else {}
        )
        assert answer.status_code == 413 and "as dense ones" in answer.text, answer.text
        assert len(seen) == 1


async def test_a_sparse_tensor_cannot_be_hidden_from_the_count(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        _, model = await model_in(http)
        body = json_batch(model, 1, sparse_tensor(10**5))
        hidden = body.replace("sparse_crow", "\\u0073parse_crow")
        assert hidden != body and json.loads(hidden) == json.loads(body)
        answer = await http.post("/forward_backward", content=hidden)
        assert answer.status_code == 413, answer.text


async def test_forward_only_is_kept_however_it_is_said(tmp_path: Path):
    backend = Recording(tmp_path)
    async with edge(config_for(tmp_path), backend) as http:
        _, model = await model_in(http)
        dense = {"data": [1], "dtype": "int64"}
        message = sparse_batch(model, 1, 1)
        sent = (
            ("/forward", message.SerializeToString(), PROTO),
            ("/forward_backward", json_batch(model, 2, dense, forward_only=True).encode(), {}),
            ("/forward_backward", json_batch(model, 3, dense).encode(), {}),
        )
        for route, body, headers in sent:
            answer = await http.post(route, content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            while (await http.post("/retrieve_future", json=answer.json())).status_code == 408:
                pass
        refused = await http.post(
            "/forward_backward", content=json_batch(model, 4, dense, forward_only="yes")
        )
    assert backend.is_forward == [True, True, False]
    assert refused.status_code == 422 and "forward_only must be true or false" in refused.text


@pytest.mark.parametrize("value", [1.9, float("nan"), 2.0**31])
def test_target_tokens_in_floats_are_whole_numbers(value: float):
    def decoded(wanted: float) -> Any:
        body = json_batch("m", 1, {"data": [wanted], "dtype": "float32"})
        return codec.forward_backward_from_json(json.loads(body), forward_only=False)

    assert decoded(2.0).columns.fields["target_tokens"].tolist() == [2]
    with pytest.raises(InvalidRequest, match="target_tokens has a value that is no token id"):
        decoded(value)


def test_numbers_with_booleans_among_them_are_refused():
    body = json_batch("m", 1, {"data": [True], "dtype": "int64"})
    with pytest.raises(InvalidRequest, match="must be a list of whole numbers"):
        codec.forward_backward_from_json(json.loads(body), forward_only=False)


def test_an_image_with_other_dimensions_is_refused():
    message = schema.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy")
    message.data.add().model_input.add().image.override_dimensions.width = 8
    with pytest.raises(InvalidRequest, match="override_dimensions; resize the image"):
        codec.forward_backward_from_proto(message.SerializeToString())


def test_only_sparse_tensors_count_with_the_size_of_their_numbers():
    tensors = {
        "dense": {"dtype": "float32", "shape": [1000], "data": [], "sparse_crow_indices": None},
        "weights": {"dtype": "float32", "shape": [2, 5], "sparse_crow_indices": [0, 0, 0]},
        "target_tokens": {"dtype": "int64", "shape": [2, 5], "sparse_crow_indices": [0, 0, 0]},
    }
    assert batches.sparse_bytes_of_json([{"loss_fn_inputs": tensors}]) == 10 * 4 + 10 * 8
    message = sparse_batch("m", 5, 1)
    weights = message.data[0].loss_fn_inputs["weights"]
    weights.CopyFrom(message.data[0].loss_fn_inputs["target_tokens"])
    weights.dtype = schema.FLOAT32
    assert batches.sparse_bytes_of_proto(message) == 5 * 4 + 5 * 8


def test_damaged_datums_have_no_sparse_bytes():
    for data in ([5], [{"loss_fn_inputs": 1}], [{"loss_fn_inputs": {"a": 1}}], "x"):
        assert batches.sparse_bytes_of_json(data) == 0
