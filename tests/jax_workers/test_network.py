"""JAX passes equal torch's: families, adapters of several ranks, targets, distributions, values."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from skyrl_actors.jax_workers import head
from skyrl_actors.losses.processing import Processing
from skyrl_actors.messages.model import ExpertLayout
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.models import value_head_tensors
from tests.engines.test_vllm_start import saved
from tests.jax_workers.networks import (
    Views,
    adapter,
    computed,
    inputs_for,
    jax_network,
    largest_difference,
    torch_network,
)

SIZE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING, FULL = "sliding_attention", "full_attention"
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZE),
    "llama-tied": LlamaConfig(**SIZE, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=16),
    "qwen3-moe": Qwen3MoeConfig(**SIZE, **EXPERTS),
    "qwen3-moe-normed": Qwen3MoeConfig(**SIZE, **EXPERTS, norm_topk_prob=True),
    "mistral": MistralConfig(**SIZE, sliding_window=6),
    "gemma3": Gemma3TextConfig(
        **SIZE, head_dim=16, sliding_window=6, layer_types=[SLIDING, SLIDING, FULL], pad_token_id=0
    ),
}
ROWS = (5, 30, 9, 9, 70)
LOGPROBS, GRADIENTS = 2e-5, 5e-5


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(CONFIGS["qwen3"], tmp_path_factory.mktemp("qwen3"))


SLOW = pytest.mark.slow
FAST = ("qwen3",)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=SLOW) for n in CONFIGS])
def test_adapters_and_full_fine_tunes_equal_torch(name: str, tmp_path: Path):
    base = saved(CONFIGS[name], tmp_path)
    ours, theirs = jax_network(base), torch_network(base)
    owners = [adapter(theirs, 4, 1), adapter(theirs, 8, 2, train_unembed=False)]
    inputs = inputs_for([(n, owners[i // 3]) for i, n in enumerate(ROWS)])
    found, entropy, gradients = computed(ours, inputs)
    wanted, wanted_entropy, wanted_gradients = computed(theirs, inputs)
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)
    torch.testing.assert_close(entropy, wanted_entropy, atol=LOGPROBS, rtol=0)
    assert largest_difference(gradients, wanted_gradients) < GRADIENTS
    full: Views = {n: torch.nn.Parameter(p.detach().clone()) for n, p in theirs.own.items()}
    theirs.place(full)  # type: ignore[arg-type]  they are parameters
    inputs = inputs_for([(n, full) for n in ROWS], entropy_gradient=True)
    found, entropy, gradients = computed(ours, inputs, 0.3)
    wanted, wanted_entropy, wanted_gradients = computed(theirs, inputs, 0.3)
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)
    torch.testing.assert_close(entropy, wanted_entropy, atol=LOGPROBS, rtol=0)
    assert largest_difference(gradients, wanted_gradients) < GRADIENTS


CASES = {
    "many targets": {"targets": 3},
    "temperature": {"processing": {0: Processing(temperature=0.6), 2: Processing(temperature=1.5)}},
    "top_k": {"processing": {1: Processing(top_k=7, temperature=0.8)}},
    "top_p": {"processing": {0: Processing(top_p=0.7), 1: Processing(top_k=20, top_p=0.9)}},
    "entropy": {"entropy_gradient": True},
}


@pytest.mark.parametrize(
    ("case", "unembed", "chunked"),
    [
        pytest.param(*each, marks=SLOW)
        for each in itertools.product(CASES, (False, True), (False, True))
    ],
)
def test_ways_of_the_output_layer_equal_torch(
    qwen3: Path, case: str, unembed: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
):
    if chunked:
        monkeypatch.setattr(head, "CHUNK_LOGITS", 64 * 64)
        monkeypatch.setattr(head, "KEPT_LOGITS", 0)
    ours, theirs = jax_network(qwen3), torch_network(qwen3)
    owners = [adapter(theirs, 4, number, train_unembed=unembed) for number in range(2)]
    inputs = inputs_for([(n, owners[i // 3]) for i, n in enumerate(ROWS)], **CASES[case])
    slope = 0.3 if inputs.entropy_gradient else 0.0
    found, entropy, gradients = computed(ours, inputs, slope)
    wanted, wanted_entropy, wanted_gradients = computed(theirs, inputs, slope)
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)
    torch.testing.assert_close(entropy, wanted_entropy, atol=LOGPROBS, rtol=0)
    assert largest_difference(gradients, wanted_gradients) < GRADIENTS


@SLOW
def test_values_of_critics_equal_torch(qwen3: Path):
    ours, theirs = jax_network(qwen3), torch_network(qwen3)
    owners: list[Views] = []
    for number in range(2):
        heads = value_head_tensors(theirs)
        drawn = {n: (torch.randn_like(t) * 0.2).requires_grad_() for n, t in heads.items()}
        owners.append(adapter(theirs, 4, number, train_unembed=False) | drawn)
    inputs = inputs_for([(n, owners[i // 3]) for i, n in enumerate(ROWS)], targets=None)
    found, entropy, gradients = computed(ours, inputs)
    wanted, _, wanted_gradients = computed(theirs, inputs)
    assert entropy is None
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)
    assert largest_difference(gradients, wanted_gradients) < GRADIENTS


@SLOW
def test_recomputation_and_passes_without_a_gradient_change_no_number(qwen3: Path):
    ours, again = jax_network(qwen3), jax_network(qwen3, "recompute")
    own = adapter(ours, 4, 1)
    inputs = inputs_for([(n, own) for n in ROWS])
    found, _, gradients = computed(ours, inputs)
    wanted, _, wanted_gradients = computed(again, inputs)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert largest_difference(gradients, wanted_gradients) < 1e-5
    with torch.no_grad():
        plain, _ = ours.predict(inputs)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_no_more_adapters_are_on_the_device_than_allowed(qwen3: Path):
    ours = jax_network(qwen3)
    ours.max_adapters = 2
    owners = [adapter(ours, 4, number) for number in range(4)]
    found = [computed(ours, inputs_for([(9, own)]))[0] for own in owners]
    again = [computed(ours, inputs_for([(9, own)]))[0] for own in owners]
    assert len(ours._cache) == 3  # with the empty place
    assert all((one == other).all() for one, other in zip(found, again, strict=True))
    together = inputs_for([(9, own) for own in owners])
    _, _, gradients = computed(ours, together)  # more in one pass than are kept
    assert all(any(bool(g.any()) for g in own.values()) for own in gradients)


@SLOW
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe-normed"])
def test_a_weight_that_is_not_finite_changes_rows_of_its_adapter_alone(name: str, tmp_path: Path):
    ours = jax_network(saved(CONFIGS[name], tmp_path))
    good, bad = adapter(ours, 4, 1), adapter(ours, 4, 2)
    rows = [(30, good), (30, bad), (9, good)]
    wanted, _, wanted_gradients = computed(ours, inputs_for(rows))
    with torch.no_grad():
        for tensor in bad.values():
            tensor.fill_(torch.inf)
    found, _, gradients = computed(ours, inputs_for(rows))
    assert not found[30:60].isfinite().any()
    # The rows of an expert lie elsewhere among others, which rounds their sums differently.
    rounding = 0 if name == "qwen3" else 1e-6
    torch.testing.assert_close(found[:30], wanted[:30], atol=rounding, rtol=0)
    torch.testing.assert_close(found[60:], wanted[60:], atol=rounding, rtol=0)
    assert largest_difference([gradients[0]], [wanted_gradients[0]]) <= rounding


@SLOW
@pytest.mark.parametrize("layout", ["shared_outer", "per_expert"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_factors_of_experts_equal_torch(
    tmp_path: Path, layout: ExpertLayout, activations: Activations
):
    """Of many models, some without terms on experts, and some whose rows are few."""
    base = saved(CONFIGS["qwen3-moe-normed"], tmp_path)
    ours, theirs = jax_network(base, activations), torch_network(base)
    owners = [
        adapter(theirs, 2 + number % 3, number, layout, train_mlp=number != 2)
        for number in range(5)
    ]
    inputs = inputs_for([(n, owners[i % 5]) for i, n in enumerate((30, 5, 9, 2, 70))])
    found, _, gradients = computed(ours, inputs)
    wanted, _, wanted_gradients = computed(theirs, inputs)
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)
    assert largest_difference(gradients, wanted_gradients) < GRADIENTS


@SLOW
def test_given_experts_are_computed(tmp_path: Path):
    base = saved(CONFIGS["qwen3-moe-normed"], tmp_path)
    ours, theirs = jax_network(base), torch_network(base)
    own = adapter(theirs, 4, 1)
    plain = inputs_for([(n, own) for n in ROWS])
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(3, len(plain.tokens), 6, generator=generator).topk(2).indices + 1
    chosen[:, ::7] = 0  # not known
    inputs = replace(plain, routes=chosen.movedim(0, 1).flatten(1))
    found, _, gradients = computed(ours, inputs)
    wanted, _, wanted_gradients = computed(theirs, inputs)
    torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)
    assert largest_difference(gradients, wanted_gradients) < GRADIENTS
    assert (computed(ours, plain)[0] - found).abs().max() > 1e-3


@SLOW
def test_models_come_and_go_without_a_new_program(qwen3: Path):
    ours = jax_network(qwen3)
    for number in range(4):
        owners = [adapter(ours, 3 + i, 10 * number + i) for i in range(number + 1)]
        computed(ours, inputs_for([(9, own) for own in owners]))
        for own in owners:
            ours.forget(own)
    sizes = {shape.tokens for shape in ours.programs.shapes}
    assert len(ours.programs.shapes) == len(sizes)  # none for other models or ranks
    made = ours.programs.counters.programs
    computed(ours, inputs_for([(9, adapter(ours, 7, 99))]))
    assert ours.programs.counters.programs == made


@SLOW
def test_changed_weights_are_used_by_the_next_pass(qwen3: Path):
    ours = jax_network(qwen3)
    own = adapter(ours, 4, 1)
    inputs = inputs_for([(9, own)])
    first, _, _ = computed(ours, inputs)
    with torch.no_grad():
        next(iter(own.values())).add_(0.1)
    second, _, _ = computed(ours, inputs)
    assert (first - second).abs().max() > 1e-4
