"""A model is refused before training if packed rows affect each other or differ from rows alone."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skyrl_actors.messages.errors import ConfigError, InvalidRequest
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers import attention, isolation
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.interface import WorkerSpec
from skyrl_actors.workers.network import LogitsForm, Network, PassInputs, Segment
from skyrl_actors.workers.torch_worker import TorchWorker
from tests.workers.tiny_models import FAMILIES, LONG_WINDOWS, MODELS, REFUSED, make

CPU = torch.device("cpu")


def network(folder: Path, dtype: torch.dtype = torch.float32) -> Network:
    return BaseModel(str(folder), dtype, CPU)


def worker_for(base: Path, **options: Any) -> TorchWorker:
    return TorchWorker(
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
            **options,
        )
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*MODELS, *FAMILIES, *LONG_WINDOWS])
def test_models_that_pack_correctly_are_accepted(name: str, dtype: torch.dtype, tmp_path: Path):
    found = isolation.differences(network(make(name, tmp_path / "base"), dtype))
    allowed = isolation.ALLOWED[dtype]
    assert not isolation.faults_in(found, allowed)
    assert found.leak == 0
    assert found.logprobs < allowed.logprobs / 4 and found.gradients < allowed.gradients / 4


# For each model: what makes it right, and what replaces it here.
WRONGLY: dict[str, tuple[str, Any]] = {
    "qwen3-next": ("network.separate_rows", lambda *_: None),
    "lfm2": ("network.separate_rows", lambda *_: None),
    "nemotron-h": ("network.separate_rows", lambda *_: None),
    "falcon-h1": ("network.separate_rows", lambda *_: None),
    "minimax": ("network.separate_rows", lambda *_: None),
    "llama4": ("attention._chunk_of", lambda _: None),
    "gpt-oss": ("attention.Special", lambda **_: attention.PLAIN),
    "gemma2": ("network.logits_form", lambda _: LogitsForm()),
    "granite": ("network.logits_form", lambda _: LogitsForm()),
    "seed-oss": ("network.make_deterministic", lambda _: None),
}


@pytest.mark.parametrize("name", [*REFUSED, *WRONGLY])
def test_models_that_pack_wrongly_are_refused_by_name_at_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if name in WRONGLY:
        place, instead = WRONGLY[name]
        monkeypatch.setattr(f"skyrl_actors.workers.{place}", instead)
    base = make(name, tmp_path / "base")
    (architecture,) = json.loads((base / "config.json").read_text())["architectures"]
    with pytest.raises(ConfigError, match=rf"^{architecture}.* cannot be trained here: \w"):
        worker_for(base).setup("127.0.0.1", 0)


@pytest.mark.parametrize("name", ["qwen3-next", "lfm2", "nemotron-h", "falcon-h1"])
def test_a_leak_is_found_in_bfloat16(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rounding is as large as a short convolution's leak; only a zero gradient separates them."""
    monkeypatch.setattr("skyrl_actors.workers.network.separate_rows", lambda *_: None)
    found = isolation.differences(network(make(name, tmp_path / "base"), torch.bfloat16))
    assert isolation.faults_in(found, isolation.ALLOWED[torch.bfloat16])
    assert found.leak > 0


def test_without_preload_a_model_is_refused_with_its_first_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("skyrl_actors.workers.network.separate_rows", lambda *_: None)
    worker = worker_for(make("lfm2", tmp_path / "base"), preload=False)
    worker.setup("127.0.0.1", 0)
    with pytest.raises(
        InvalidRequest, match=r"Lfm2ForCausalLM cannot be trained here: .*another row's tokens"
    ):
        worker.create_model(ModelSpec(model_id="m", base_model="tiny", lora=LoraSpec(rank=4)))


def test_attention_across_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = network(make("qwen3", tmp_path / "base"))
    right = attention.attend_by_blocks
    monkeypatch.setattr(
        attention,
        "attend_by_blocks",
        lambda q, k, v, blocks, *rest: right(q, k, v, (Block(0, 1, q.size(2)),), *rest),
    )
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM cannot be trained here"):
        isolation.prove_isolated(made, torch.float32)


def previous_token(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


@pytest.mark.parametrize(
    ("leak", "text"),
    [
        (lambda x: 1e-6 * previous_token(x), "have a gradient of"),
        (lambda x: 0.1 * previous_token(x).detach(), "change by"),
        (lambda x: 0.1 * x.mean(dim=1, keepdim=True).detach(), "change by"),
    ],
    ids=["of a millionth", "without a gradient", "by a mean over the pass"],
)
def test_a_layer_that_reads_other_rows_is_refused(leak: Any, text: str, tmp_path: Path):
    made = network(make("qwen3", tmp_path / "base"))

    def mixed(layer: nn.Module, args: object, output: Tensor) -> Tensor:
        return output + leak(output)

    made.module.model.layers[0].mlp.register_forward_hook(mixed)
    with pytest.raises(ConfigError, match=text):
        isolation.prove_isolated(made, torch.float32)


def test_a_missing_sliding_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The window is found although it is longer than the rows of the check."""
    made = network(make("mistral-4096", tmp_path / "base"))
    right = attention.attend_by_blocks
    monkeypatch.setattr(
        attention,
        "attend_by_blocks",
        lambda q, k, v, blocks, scale, window, _: right(q, k, v, blocks, scale, None),
    )
    with pytest.raises(ConfigError, match="differ from the row alone"):
        isolation.prove_isolated(made, torch.float32)


def test_the_check_leaves_the_network_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    made = network(make("mistral-4096", tmp_path / "base"))
    hooks = len(made.module.get_input_embeddings()._forward_hooks)
    with caplog.at_level(logging.INFO, "skyrl_actors.workers.isolation"):
        logging.getLogger("skyrl_actors").propagate = True
        isolation.prove_isolated(made, torch.float32)
    assert "computes packed rows as if each were alone (checked in" in caplog.text
    assert (
        made.config.sliding_window == 4096
        and made.config._attn_implementation == attention.ATTENTION
    )
    assert len(made.module.get_input_embeddings()._forward_hooks) == hooks
    assert all(parameter.grad is None for parameter in made.module.parameters())


def scored(
    made: Network, tokens: torch.Tensor, positions: torch.Tensor, blocks: tuple[Block, ...]
) -> torch.Tensor:
    inputs = PassInputs(
        tokens=tokens[: len(positions)],
        positions=positions,
        blocks=blocks,
        segments=(Segment(len(positions), {}, 1.0),),
        targets=tokens[: len(positions)],
        counted=None,
    )
    with made.in_use(inputs.segments), torch.no_grad():
        return made.predict(inputs)[0]


def test_rows_are_limited_to_the_original_length_of_a_long_rope(
    tmp_path: Path,
):
    base = make("phi3-longrope", tmp_path / "base")
    assert worker_for(base).setup("127.0.0.1", 0).max_context_tokens == 32
    made, rows = network(base), (Block(0, 1, 10), Block(10, 1, 40))
    cases = [
        (torch.cat([torch.arange(block.length) for block in blocks]), blocks)
        for blocks in (rows[:1], rows)
    ]
    tokens = torch.arange(50) % 128
    alone, packed = (scored(made, tokens, at, blocks)[:10] for at, blocks in cases)
    assert not torch.allclose(alone, packed, atol=1e-3)  # a row of 40 tokens beside it
