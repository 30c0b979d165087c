"""Compare uploaded losses with the same loss run by the SDK, and refuse forged graphs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from skyrl_actors import losses
from skyrl_actors.losses.custom_graph import graph_of, loss_id_of
from skyrl_actors.losses.torch_ops import TorchOps
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec, LossCall, ModelSpec
from skyrl_actors.workers.interface import PartCall, Refused, RowOutput
from tests.workers.test_numbers import batch, worker_for


def dpo_like(logprobs, weights, margin):
    score = ((logprobs - margin) * weights).sum() / torch.clamp(weights.sum(), min=1.0)
    loss = -torch.nn.functional.logsigmoid(2 * score) + 0.1 * (logprobs[1:] ** 2).mean()
    return loss, {"custom/score:mean": score, "custom/loss:sum": loss}


def distillation(logprobs, weights):
    teacher = torch.softmax(weights, dim=-1)
    loss = torch.where(weights > 0, -teacher * logprobs, torch.zeros_like(logprobs)).sum()
    return loss, {"custom/entropy:sum": -(teacher * teacher.log()).sum()}


def uploaded(handle) -> str:
    graph = json.loads(encode_graph(handle).model_dump_json())
    return loss_id_of(handle.name, [one.model_dump() for one in handle.inputs], graph)


@pytest.mark.parametrize(
    ("function", "names", "shape"),
    [(dpo_like, ("weights", "margin"), ()), (distillation, ("weights",), (3,))],
)
def test_an_uploaded_loss_equals_the_loss_on_the_client(
    function, names: tuple[str, ...], shape: tuple[int, ...]
):
    rng, lengths = np.random.default_rng(1), (4, 7, 2)
    rank = 1 + len(shape)
    handle = trace_loss(function, dict.fromkeys(("logprobs", *names), rank), "s")
    logprobs = torch.tensor(rng.normal(-2, 1, (sum(lengths), *shape)), requires_grad=True)
    inputs = {name: torch.tensor(rng.normal(0.5, 1, (sum(lengths), *shape))) for name in names}
    entry = losses.find("custom")
    call = entry.checked({"loss_id": uploaded(handle)})
    terms = entry.terms(TorchOps(lengths), logprobs, inputs, call.config)
    (gradient,) = torch.autograd.grad(terms.elementwise.sum(), logprobs)

    again = logprobs.detach().clone().requires_grad_()
    parts = [
        handle.graph(again[a : a + n], *(inputs[k][a : a + n] for k in names))
        for a, n in zip((0, 4, 11), lengths, strict=True)
    ]
    total = torch.stack([loss for loss, _ in parts]).sum()
    assert terms.elementwise.shape == logprobs.shape
    torch.testing.assert_close(terms.elementwise.sum(), total)
    torch.testing.assert_close(gradient, torch.autograd.grad(total, again)[0])
    for key in parts[0][1]:
        torch.testing.assert_close(
            terms.sums[key], sum(metrics[key].detach() for _, metrics in parts)
        )


def graph_with(*nodes: dict) -> dict:
    first = {"op": "placeholder", "name": "p", "target": "logprobs"}
    last = {
        "op": "output",
        "name": "out",
        "target": "output",
        "args": [{"tuple": [{"ref": nodes[-1]["name"]}, {"dict": {}}]}],
    }
    return {"format": 1, "nodes": [first, *nodes, last]}


def call(target: str, *args, op: str = "call_function", name: str = "x") -> dict:
    return {"op": op, "name": name, "target": target, "args": list(args)}


P = {"ref": "p"}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([call("builtins.eval", "1")], "'builtins.eval' is not allowed"),
        ([call("torch.load", "/etc/passwd")], "'torch.load' is not allowed"),
        ([call("torch.zeros", 10**12)], "'torch.zeros' is not allowed"),
        ([call("builtins.getattr", P, "__class__")], "is not allowed"),
        ([call("__reduce__", P, op="call_method")], "is not allowed"),
        ([call("numpy", P, op="call_method")], "is not allowed"),
        ([call("weight", op="get_attr")], "is not allowed"),
        ([call("torch.exp", {"ref": "later"})], "used before its definition"),
        ([call("torch.exp", [[[[[[[[[[1]]]]]]]]]])], "nested deeper"),
    ],
)
def test_operations_other_than_arithmetic_are_refused(nodes: list[dict], message: str):
    with pytest.raises(InvalidRequest, match=message):
        loss_id_of("bad", [{"name": "logprobs", "rank": 1}], graph_with(*nodes))


@pytest.mark.parametrize(
    "nodes",
    [
        [call("operator.pow", 9.0, 9999.0)],
        [call("operator.mul", [1], 10**9)],
        [call("sum", 3, op="call_method")],
        [call("torch.exp", P, P)],
        [call("torch.exp", P)],  # not a scalar
        [call("operator.getitem", P, 99)],
    ],
)
def test_a_failing_graph_is_a_user_error(nodes: list[dict]):
    loss_id = loss_id_of("bad", [{"name": "logprobs", "rank": 1}], graph_with(*nodes))
    with pytest.raises(InvalidRequest, match="custom loss 'bad'"):
        losses.find("custom").function(TorchOps([2]), torch.zeros(2), {}, loss_id=loss_id)


@pytest.mark.parametrize(
    "loss_id", ["", "loss-", "loss-x", "loss-eJwDAAAAAAE=", "cross_entropy", "loss-" + "A" * 5000]
)
def test_invalid_loss_ids_are_refused(loss_id: str):
    with pytest.raises(InvalidRequest, match="is not an answer of create_custom_loss"):
        graph_of(loss_id)


def test_a_loss_that_fails_on_some_rows_refuses_only_its_own_request(random_base: Path):
    def tenth(logprobs, weights):
        return -(logprobs * weights).sum() - logprobs[10], {}

    loss_id = uploaded(trace_loss(tenth, {"logprobs": 1, "weights": 1}, "s"))
    worker, once_again = worker_for(random_base, budget=400), (5, 17, 9)
    for name in ("a", "b"):
        worker.create_model(ModelSpec(model_id=name, base_model="tiny", lora=LoraSpec(rank=2)))

    def call(name: str, lengths: tuple[int, ...], loss: LossCall) -> PartCall:
        columns = batch(3, lengths)
        rows = tuple(range(columns.num_rows))
        return PartCall(model_id=name, rows=rows, columns=columns, loss=loss)

    plain = call("a", once_again, losses.find("cross_entropy").checked({}))
    (alone,) = worker.forward_backward((plain,), False)
    gradients = worker.models["a"].state.copied_gradients()
    worker.drop_gradients("a")
    custom = losses.find("custom").checked({"loss_id": loss_id})
    wide = batch(3, (5,))
    for field in list(wide.fields):
        wide.fields[field] = np.stack([wide.fields[field]] * 2, axis=1)
    wide.fields["sequence_ratio_mask"] = np.zeros((5, 2), np.float32)  # any name, any shape
    wide = replace(wide, widths=np.full(1, 2, np.int64))
    odd = PartCall(model_id="b", rows=(0,), columns=wide, loss=custom)
    assert [type(one) for one in worker.forward_backward((plain, odd), True)] == [
        RowOutput,
        Refused,
    ]
    found, refused = worker.forward_backward((plain, call("b", (12, 7), custom)), False)
    assert isinstance(refused, Refused) and refused.clean
    assert "custom loss" in str(refused.error) and "IndexError" in str(refused.error)
    assert isinstance(alone, RowOutput) and isinstance(found, RowOutput)
    np.testing.assert_allclose(found.values, alone.values, atol=1e-5)
    shared = worker.models["a"].state.copied_gradients()
    assert gradients is not None and shared is not None
    torch.testing.assert_close(shared, gradients, rtol=1e-4, atol=1e-6)
    assert worker.models["b"].state.copied_gradients() is None
