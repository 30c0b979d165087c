"""Architectures as tiny random models: gradients against float64 transformers, and exports."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from skyrl_actors import losses
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams, LoraSpec, ModelSpec
from skyrl_actors.workers import checkpoint
from skyrl_actors.workers.buffers import stored_buffers
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import PartCall, RowOutput, WorkerSpec
from skyrl_actors.workers.tensor_files import TensorFiles
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.references import Reference, batch, relative
from tests.workers.tiny_models import FAMILIES, MODELS, make

CALL = losses.find("cross_entropy").checked({})
# With experts, latent attention, and layers with a state.
ADAPTED = ("gpt-oss", "nemotron-h-moe", "deepseek-v3", "qwen3-next", "qwen3.5", "lfm2")
LENGTHS = (5, 23, 9, 9)  # longer than the sliding windows


def worker_for(base: Path) -> TorchWorker:
    worker = TorchWorker(
        WorkerSpec(
            role="policy",
            rank=0,
            world_size=1,
            base_folder=str(base),
            dtype="float32",
            device="cpu",
            num_threads=1,
            microbatch_tokens=64,
            collective_timeout_s=60.0,
        )
    )
    worker.setup("127.0.0.1", 0)
    return worker


def computed(worker: TorchWorker, seed: int) -> RowOutput:
    columns = batch(seed, LENGTHS)
    (output,) = worker.forward_backward(
        (PartCall(model_id="m", rows=tuple(range(4)), columns=columns, loss=CALL),), False
    )
    assert isinstance(output, RowOutput)
    return output


@pytest.mark.parametrize("name", [*MODELS, *FAMILIES])
def test_gradients_and_export(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = make(name, tmp_path / "base")
    worker = worker_for(base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny"))
    output, reference, columns = computed(worker, 3), Reference(base), batch(3, LENGTHS)
    total = reference.backward("cross_entropy", columns)
    state = worker.models["m"].state
    assert isinstance(state, FlatState) and state.gradients is not None
    np.testing.assert_allclose(
        output.values, torch.cat(reference.rows(columns)).detach().numpy(), atol=1e-5
    )
    assert output.sums["loss:sum"] == pytest.approx(total, rel=1e-5)
    wanted = reference.gradients()
    for key, gradient in state.split(state.gradients).items():
        # The recurrences of transformers compute in float32, also in the reference.
        assert relative(gradient, wanted[key]) < (1e-5 if name in MODELS else 1e-4), key

    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100_000)  # several files, as for a large model
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    worker.save_checkpoint("m", str(tmp_path / "saved"), "training", "r1")
    assert len(list((tmp_path / "saved").glob("model-*-of-*.safetensors"))) > 1
    with TensorFiles(tmp_path / "saved") as ours, TensorFiles(base) as theirs:
        assert ours.shapes == theirs.shapes  # the names of the family's own files
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for key, parameter in opened.named_parameters():
        assert torch.equal(parameter, state.views[key]), key
    stored = stored_buffers(reference.model)
    for key, buffer in stored_buffers(opened).items():
        assert torch.allclose(buffer.double(), stored[key].double()), key
    again = worker_for(base)
    again.create_model(ModelSpec(model_id="m", base_model="tiny"))
    again.load_checkpoint("m", str(tmp_path / "saved"), True)
    computed(worker, 5)
    computed(again, 5)
    worker.optim_step("m", AdamParams(learning_rate=1e-3))
    again.optim_step("m", AdamParams(learning_rate=1e-3))
    assert torch.equal(state.weights, again.models["m"].state.weights)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*MODELS, *ADAPTED])
def test_a_merged_adapter_gives_the_same_logprobs(name: str, tmp_path: Path):
    base = make(name, tmp_path / "base")
    worker = worker_for(base)
    lora = LoraSpec(rank=4, train_unembed=name != "gemma3")
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=lora))
    computed(worker, 3)
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    output = computed(worker, 4)
    worker.save_checkpoint("m", str(tmp_path / "merged"), "merged", "r1")
    rows = torch.cat(Reference(tmp_path / "merged").rows(batch(4, LENGTHS)))
    np.testing.assert_allclose(output.values, rows.detach().numpy(), atol=5e-5)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-untied"])
def test_a_critic_starts_from_a_policy_or_a_reward_model(name: str, tmp_path: Path):
    """Only the trunk is loaded.

    Values start at zero over a policy's trunk, and are the scores of a reward model over its trunk.
    """
    base = make(name, tmp_path / "base")
    policy = worker_for(base)
    policy.create_model(ModelSpec(model_id="m", base_model="tiny"))
    computed(policy, 3)
    policy.optim_step("m", AdamParams(learning_rate=1e-2))
    policy.save_checkpoint("m", str(tmp_path / "policy"), "weights", "r1")
    config = AutoConfig.from_pretrained(tmp_path / "policy")
    config.num_labels, config.classifier_dropout, config.pad_token_id = 1, 0.0, 0
    reward: Any = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "policy", config=config, dtype=torch.float32
    )
    reward.save_pretrained(tmp_path / "reward")
    columns = batch(4, LENGTHS, ("values", "returns"), targets=False)
    call = PartCall(model_id="c", rows=tuple(range(4)), columns=columns, loss=None)
    critic = worker_for(base)
    for folder in ("policy", "reward"):
        critic.create_model(ModelSpec(model_id="c", base_model="tiny", role="critic"))
        critic.load_checkpoint("c", str(tmp_path / folder), False)
        (output,) = critic.forward_backward((call,), True)
        assert isinstance(output, RowOutput)
        if folder == "policy":
            assert not output.values.any()
            continue
        where = columns.positions([1])
        with torch.no_grad():
            hidden = reward.model(
                input_ids=torch.tensor(columns.tokens[where][None].astype(np.int64))
            ).last_hidden_state[0]
            np.testing.assert_allclose(
                output.values[where], reward.score(hidden)[:, 0].numpy(), atol=1e-5
            )
    saved = critic.models["c"].state
    assert isinstance(saved, FlatState) and "lm_head.weight" not in saved.shapes
    critic.save_checkpoint("c", str(tmp_path / "critic"), "training", "r1")
    critic.load_checkpoint("c", str(tmp_path / "critic"), True)
    (again,) = critic.forward_backward((call,), True)
    assert isinstance(again, RowOutput) and np.array_equal(again.values, output.values)


def test_a_critic_loads_an_adapter_without_terms_of_the_head(tmp_path: Path):
    base = make("qwen3", tmp_path / "base")
    policy, critic = worker_for(base), worker_for(base)
    policy.create_model(
        ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4, train_unembed=False))
    )
    computed(policy, 3)
    policy.optim_step("m", AdamParams(learning_rate=1e-2))
    policy.save_checkpoint("m", str(tmp_path / "policy"), "weights", "r1")
    critic.create_model(
        ModelSpec(model_id="c", base_model="tiny", role="critic", lora=LoraSpec(rank=4))
    )
    critic.load_checkpoint("c", str(tmp_path / "policy"), False)
    ours, theirs = critic.models["c"].state, policy.models["m"].state
    assert isinstance(ours, FlatState) and isinstance(theirs, FlatState)
    assert all(torch.equal(ours.views[name], view) for name, view in theirs.views.items())


def test_a_checkpoint_without_its_moments_changes_nothing(tmp_path: Path):
    base = make("qwen3", tmp_path / "base")
    worker = worker_for(base)
    worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))
    computed(worker, 3)
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    worker.save_checkpoint("m", str(tmp_path / "saved"), "training", "r1")
    save_file({"num_steps": torch.ones(1)}, tmp_path / "saved" / "optimizer.safetensors")
    computed(worker, 4)
    worker.optim_step("m", AdamParams(learning_rate=1e-2))
    state = worker.models["m"].state
    assert isinstance(state, FlatState)
    before = state.weights.clone()
    with pytest.raises(InvalidRequest, match="optimizer state of the checkpoint does not match"):
        worker.load_checkpoint("m", str(tmp_path / "saved"), True)
    assert torch.equal(state.weights, before)
