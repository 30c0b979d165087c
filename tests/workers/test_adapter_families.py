"""Adapters inside layers of any kind: routed experts, latent attention, layers with a state.

The reference computes with transformers in float64, one row at a time, with B A added to the
weights. Its indices of experts and outputs are written out here, apart from the trainer's.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from skyrl_actors import losses
from skyrl_actors.config.strategies import ReplicaStrategy
from skyrl_actors.messages.columns import Columns
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.messages.model import ExpertLayout, LoraSpec, ModelSpec
from skyrl_actors.workers.adapter_terms import Term, terms_of
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.interface import RowOutput
from skyrl_actors.workers.tensor_files import TensorFiles
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers import family_runs
from tests.workers.family_runs import disturb
from tests.workers.ranks import Ranks
from tests.workers.references import batch, relative
from tests.workers.strategy_runs import STRATEGIES, run, worker_of
from tests.workers.tiny_models import make

CALL = losses.find("cross_entropy").checked({})
LENGTHS = {"a": (5, 9, 23), "b": (9, 3, 12)}  # the rows of nine tokens share a block
RANKS = {"a": 4, "b": 2}
# Experts, with shared experts, interleaved and transposed with biases, without a gate; latent
# attention; Gated DeltaNet in both orders, Mamba 2, linear attention, convolutions.
NAMES = (
    *("qwen3-moe", "qwen2-moe", "gpt-oss", "nemotron-h-moe", "deepseek-v3"),
    *("qwen3-next", "qwen3.5", "nemotron-h", "falcon-h1", "minimax", "lfm2"),
)
MIXTURES = ("qwen3-moe", "nemotron-h-moe", "minimax", "deepseek-v3")


def specs(layout: ExpertLayout) -> dict[str, ModelSpec]:
    return {
        name: ModelSpec(
            model_id=name,
            base_model="tiny",
            lora=LoraSpec(rank=rank, expert_layout=layout),
            seed=number,
        )
        for number, (name, rank) in enumerate(RANKS.items())
    }


def worker_for(base: Path, layout: ExpertLayout, **options: Any) -> TorchWorker:
    worker = worker_of(0, 1, 0, str(base), ReplicaStrategy(), **{"budget": 128, **options})
    for name, spec in specs(layout).items():
        worker.create_model(spec)
        disturb(worker, name)
    return worker


def state_of(worker: TorchWorker, name: str) -> FlatState:
    state = worker.models[name].state
    assert isinstance(state, FlatState)
    return state


def together(worker: TorchWorker) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return the logprobs and the gradients of both models, whose rows share passes."""
    found = {}
    calls = [(name, columns_of(name), CALL) for name in RANKS]
    for name, output in zip(RANKS, run(worker, calls), strict=True):
        assert isinstance(output, RowOutput), output
        state = state_of(worker, name)
        assert state.gradients is not None
        found[name] = (torch.tensor(output.values), state.split(state.gradients))
    return found


def columns_of(name: str) -> Columns:
    return batch(3 + list(RANKS).index(name), LENGTHS[name])


def outputs_of(term: Term, out_features: int) -> list[int]:
    if term.part is None:
        return list(range(out_features))
    width = out_features // term.part.groups
    starts = range(0, out_features, width)
    return [start + i for start in starts for i in range(term.part.start, term.part.stop)]


def added(term: Term, weight: Tensor, transposed: bool, a: Tensor, b: Tensor) -> Tensor:
    """Return B A in the shape of the whole weight, expert by expert."""
    if not term.experts:
        rows = torch.tensor(outputs_of(term, weight.size(0)))
        return torch.zeros_like(weight).index_copy(0, rows, b @ a)
    found = []
    for expert in range(term.experts):
        own = weight[expert].t() if transposed else weight[expert]
        product = b[min(expert, len(b) - 1)] @ a[min(expert, len(a) - 1)]
        rows = torch.tensor(outputs_of(term, own.size(0)))
        full = torch.zeros_like(own).index_copy(0, rows, product)
        found.append(full.t() if transposed else full)
    return torch.stack(found)


def reference(base: Path, worker: TorchWorker, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval().requires_grad_(False)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    state = state_of(worker, name)
    leaves = {
        key: value.detach().double().requires_grad_()
        for key, value in state.split(state.weights).items()
    }
    weights = dict(model.named_parameters())
    for term in terms_of(model).values():
        if term.a not in leaves:
            continue
        owner = model.get_submodule(term.weight.removesuffix(".weight").rpartition(".")[0])
        transposed = bool(term.experts and owner.is_transposed)
        product = added(term, weights[term.weight], transposed, leaves[term.a], leaves[term.b])
        weights[term.weight] = weights[term.weight] + 32.0 / RANKS[name] * product
    columns = columns_of(name)
    rows, total = [], torch.zeros((), dtype=torch.float64)
    for i in range(columns.num_rows):
        where = columns.positions([i])
        tokens = torch.tensor(columns.tokens[where][None].astype(np.int64))
        logits = functional_call(
            model, weights, (), {"input_ids": tokens, "use_cache": False}
        ).logits[0]
        targets = torch.tensor(columns.fields[TARGETS][where].astype(np.int64))
        rows.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
        total = total - (rows[-1] * torch.tensor(columns.fields["weights"][where])).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    return torch.cat(rows).detach(), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_two_models_in_one_pass_equal_merged_weights(name: str, tmp_path: Path):
    base = make(name, tmp_path / "base")
    check(base, "shared_outer")


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_with_own_factors_equal_merged_weights(name: str, tmp_path: Path):
    base = make(name, tmp_path / "base")
    check(base, "per_expert", activations="recompute")


def check(base: Path, layout: ExpertLayout, **options: Any) -> None:
    worker = worker_for(base, layout, **options)
    for name, (logprobs, gradients) in together(worker).items():
        wanted, expected = reference(base, worker, name)
        assert (logprobs - wanted).abs().max() < 1e-5
        check_gradients(gradients, expected)


def check_gradients(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert expected[key].norm() > 0, key
        assert relative(gradient, expected[key]) < 1e-4, key


@pytest.mark.parametrize(
    ("name", "strategy", "sequence"),
    [
        ("qwen2-moe", "fsdp2", 1),
        ("deepseek-v3", "replica", 2),
        ("qwen3-next", "fsdp2", 2),
        pytest.param("nemotron-h-moe", "replica", 2, marks=pytest.mark.slow),
        pytest.param("falcon-h1", "fsdp2", 2, marks=pytest.mark.slow),
        pytest.param("lfm2", "replica", 2, marks=pytest.mark.slow),
        pytest.param("nemotron-h-moe", "replica", 1, marks=pytest.mark.slow),
        pytest.param("qwen2-moe", "zero3", 1, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_rank_computes(
    ranks: dict[int, Ranks], name: str, strategy: str, sequence: int, tmp_path: Path
):
    base = make(name, tmp_path / "base")
    models = {name: (spec, columns_of(name)) for name, spec in specs("shared_outer").items()}
    options = {"sequence_parallel": sequence}
    found = ranks[2].run(
        family_runs.adapter_gradients, str(base), STRATEGIES[strategy], models, options
    )
    worker = worker_for(base, "shared_outer")
    for name in RANKS:
        wanted, expected = reference(base, worker, name)
        rows = found[0][name][0] | found[1][name][0]
        logprobs = np.concatenate([rows[i] for i in range(len(LENGTHS[name]))])
        np.testing.assert_allclose(logprobs, wanted.numpy(), atol=1e-5)
        check_gradients(found[0][name][1], expected)


def test_rows_without_experts_in_their_adapter_share_a_pass(tmp_path: Path):
    """One model trains attention alone; the other's experts still get only its own tokens."""
    base = make("qwen3-moe", tmp_path / "base")
    worker = worker_for(base, "shared_outer")
    off = LoraSpec(rank=4, train_mlp=False)
    worker.create_model(ModelSpec(model_id="c", base_model="tiny", lora=off))
    calls = [(name, columns_of("a"), CALL) for name in ("c", "b", "c")]
    between = run(worker, calls)
    alone = run(worker, [("b", columns_of("a"), CALL)], forward_only=True)
    np.testing.assert_allclose(between[1].values, alone[0].values, atol=1e-6)


def test_in_bfloat16(tmp_path: Path):
    base = make("qwen2-moe", tmp_path / "base")
    worker = worker_for(base, "shared_outer", dtype="bfloat16")
    for name, (logprobs, gradients) in together(worker).items():
        wanted, expected = reference(base, worker, name)
        # The routing of a few tokens flips in bfloat16.
        assert (logprobs - wanted).abs().mean() < 0.1
        norms = [relative(gradients[key], expected[key]) for key in gradients]
        assert float(np.median(norms)) < 0.3


def test_an_adapter_of_another_layout_is_refused(tmp_path: Path):
    base = make("qwen3-moe", tmp_path / "base")
    worker = worker_for(base, "shared_outer")
    worker.save_checkpoint("a", str(tmp_path / "saved"), "training", "r1")
    other = worker_for(base, "per_expert")
    with pytest.raises(InvalidRequest, match=r"do not match the model.*experts\.w1\.lora_A"):
        other.load_checkpoint("a", str(tmp_path / "saved"), True)
    worker.load_checkpoint("a", str(tmp_path / "saved"), True)


@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
def test_an_adapter_is_reopened_from_its_files(layout: ExpertLayout, tmp_path: Path):
    """Experts are stacked as in Tinker's files, or one by one as in peft's."""
    base = make("qwen3-moe", tmp_path / "base")
    worker = worker_for(base, layout)
    worker.save_checkpoint("a", str(tmp_path / "saved"), "training", "r1")
    before = state_of(worker, "a").weights.clone()
    state_of(worker, "a").weights.zero_()
    worker.load_checkpoint("a", str(tmp_path / "saved"), True)
    assert torch.equal(state_of(worker, "a").weights, before)
    with TensorFiles(tmp_path / "saved" / "adapter_model.safetensors") as files:
        experts = {
            name.partition(".experts.")[2]: shape
            for name, shape in files.shapes.items()
            if "layers.1.mlp.experts" in name
        }
    stacked = {
        "w1.lora_A.weight": (1, 4, 48),
        "w1.lora_B.weight": (4, 32, 4),
        "w2.lora_A.weight": (4, 4, 32),
        "w2.lora_B.weight": (1, 48, 4),
        "w3.lora_A.weight": (1, 4, 48),
        "w3.lora_B.weight": (4, 32, 4),
    }
    sizes = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    single = {
        f"{expert}.{layer}.lora_{half}.weight": (4, inner) if half == "A" else (outer, 4)
        for expert in range(4)
        for layer, (inner, outer) in sizes.items()
        for half in "AB"
    }
    assert experts == (stacked if layout == "shared_outer" else single)


def test_a_layout_that_the_files_of_a_family_cannot_hold_is_refused(tmp_path: Path):
    base = make("gpt-oss", tmp_path / "base")
    worker = worker_of(0, 1, 0, str(base), ReplicaStrategy())
    with pytest.raises(InvalidRequest, match=r"per_expert: .* do not hold single experts"):
        worker.create_model(specs("per_expert")["a"])
