"""The proof of a base model for many families, as tiny random models.

    python -m bench.families

Prints a Markdown table, then one JSON line. Each figure is the larger one of two models: with their
initial weights, and with three times those. Columns: mean |Δ| of log-probabilities in nats, and
|Δ| / |gradient|, between packed rows and each row alone by transformers, in float32 and bfloat16.
"""

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from bench.harness import emit
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers import isolation
from skyrl_actors.workers.base_model import BaseModel
from tests.workers.tiny_models import (
    DELTA_NET,
    EXPERTS,
    FAMILIES,
    LONG_WINDOWS,
    MLA,
    MODELS,
    REFUSED,
    SIZE,
    WITHOUT_HEAD_DIM,
)

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 16}
LATENT = {**SIZE, "num_key_value_heads": 4}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DTYPES = (torch.float32, torch.bfloat16)
# Name of the config's class, and its fields.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("ArceeConfig", SIZE),
    "bamba": ("BambaConfig", {**WITHOUT_HEAD_DIM, **MAMBA, "attn_layer_indices": [1]}),
    "cohere": ("CohereConfig", {**WITHOUT_HEAD_DIM, "logit_scale": 0.25}),
    "deepseek-v2": ("DeepseekV2Config", {**LATENT, **MLA}),
    "ernie-4.5-moe": (
        "Ernie4_5_MoeConfig",
        {**SIZE, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "glm-4.7-flash": (
        "Glm4MoeLiteConfig",
        {**LATENT, **{name: value for name, value in MLA.items() if "dense" not in name}},
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        {**WITHOUT_HEAD_DIM, "logits_scaling": 8.0, "num_local_experts": 4},
    ),
    "granite-4": (
        "GraniteMoeHybridConfig",
        {
            **WITHOUT_HEAD_DIM,
            **MAMBA,
            "logits_scaling": 8.0,
            "num_local_experts": 4,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 64,
        },
    ),
    "hunyuan": ("HunYuanDenseV1Config", SIZE),
    "jamba": (
        "JambaConfig",
        {
            **WITHOUT_HEAD_DIM,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "lfm2-moe": (
        "Lfm2MoeConfig",
        {**SIZE, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "olmo-hybrid": ("OlmoHybridConfig", SIZE),
    "phi-moe": (
        "PhimoeConfig",
        {**SIZE, "num_local_experts": 4, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01},
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        {**SIZE, **EXPERTS, **DELTA_NET, **LINEAR, "shared_expert_intermediate_size": 32},
    ),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        {
            **{name: v for name, v in WITHOUT_HEAD_DIM.items() if name != "num_key_value_heads"},
            "lru_width": 48,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "starcoder2": ("Starcoder2Config", {**WITHOUT_HEAD_DIM, "residual_dropout": 0.1}),
}


def configs() -> dict[str, PreTrainedConfig]:
    more = {name: getattr(transformers, cls)(**fields) for name, (cls, fields) in MORE.items()}
    return MODELS | LONG_WINDOWS | FAMILIES | more | REFUSED


def differences(config: PreTrainedConfig, dtype: torch.dtype, scale: float) -> list[float]:
    """Return the differences of log-probabilities and gradients. Raises ConfigError if refused."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder))
        try:
            network = BaseModel(folder, dtype, torch.device("cpu"))
            found = isolation.differences(network)
        except isolation.BUILT_OTHERWISE as error:
            raise ConfigError(str(error)) from error
    if faults := isolation.faults_in(found, isolation.ALLOWED[dtype]):
        raise ConfigError("; ".join(faults))
    return [found.logprobs, found.gradients]


def row(name: str, config: PreTrainedConfig) -> dict[str, Any]:
    made: dict[str, Any] = {"family": name}
    try:
        for dtype in DTYPES:
            both = [differences(config, dtype, scale) for scale in (1.0, 3.0)]
            made[str(dtype).removeprefix("torch.")] = [
                max(pair) for pair in zip(*both, strict=True)
            ]
    except ConfigError as error:
        made["refused"] = str(error)
    return made


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| family | float32 | bfloat16 |", "|---|---|---|"]
    for found in rows:
        if "refused" in found:
            lines.append(f"| {found['family']} | refused | refused |")
            continue
        cells = [", ".join(f"{x:.1g}" for x in found[kind]) for kind in ("float32", "bfloat16")]
        lines.append(f"| {found['family']} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = [row(name, config) for name, config in configs().items()]
    print(table(rows))
    emit("families", {"rows": rows})


if __name__ == "__main__":
    main()
