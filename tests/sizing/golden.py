"""Layouts of 20 pairs of a model and devices. `python -m tests.sizing.golden` prints the file."""

from pathlib import Path
from typing import Any

from placement.devices import nodes_of
from placement.shape import shape_of
from placement.types import Node
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.sizing.report import lines
from skyrl_actors.sizing.search import Request, choose

FILE = Path(__file__).parent / "golden.txt"
LAPTOP = [Node(name="laptop", cpus=2, gpus=0, host_bytes=24 * 2**30)]


def _dense(
    hidden: int, layers: int, heads: int, kv_heads: int, width: int, words: int, tied: bool = False
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": width,
        "vocab_size": words,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
    }


# From the models' config.json on the Hugging Face hub.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _dense(1024, 28, 16, 8, 3072, 151_936, tied=True),
    "Qwen3-1.7B": _dense(2048, 28, 16, 8, 6144, 151_936, tied=True),
    "Qwen3-4B": _dense(2560, 36, 32, 8, 9728, 151_936, tied=True),
    "Qwen3-8B": _dense(4096, 36, 32, 8, 12_288, 151_936),
    "Qwen3-14B": _dense(5120, 40, 40, 8, 17_408, 151_936),
    "Qwen3-32B": _dense(5120, 64, 64, 8, 25_600, 151_936),
    "Llama-3.3-70B": _dense(8192, 80, 64, 8, 28_672, 128_256)
    | {"max_position_embeddings": 131_072},
    "Qwen3-30B-A3B": _dense(2048, 48, 32, 4, 6144, 151_936)
    | {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    "Qwen3-235B-A22B": _dense(4096, 94, 64, 4, 12_288, 151_936)
    | {"moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8},
    "DeepSeek-V3": _dense(7168, 61, 128, 128, 18_432, 129_280)
    | {
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 163_840,
    },
}
PAIRS = (
    ("Qwen3-0.6B", "laptop"),
    ("Qwen3-0.6B", "1xRTX3090"),
    ("Qwen3-1.7B", "1xRTX4090"),
    ("Qwen3-4B", "1xRTX4090"),
    ("Qwen3-4B", "2xL4"),
    ("Qwen3-8B", "1xRTX4090"),
    ("Qwen3-8B", "1xH100"),
    ("Qwen3-8B", "4xRTX5090"),
    ("Qwen3-8B", "8xH100"),
    ("Qwen3-8B", "2x8xH100"),
    ("Qwen3-14B", "4xL40S"),
    ("Qwen3-14B", "8xA100-40G"),
    ("Qwen3-32B", "8xA100-80G"),
    ("Qwen3-32B", "8xB200"),
    ("Llama-3.3-70B", "8xH100"),
    ("Llama-3.3-70B", "16xH200"),
    ("Qwen3-30B-A3B", "8xH100"),
    ("Qwen3-235B-A22B", "32xH200"),
    ("DeepSeek-V3", "16xH200"),
    ("DeepSeek-V3", "64xH200"),
)


def request(model: str, devices: str, **keys: Any) -> Request:
    """Return the request for a model of this file."""
    return Request(
        base_model={"type": "pretrained", "name": model},
        shape=shape_of(MODELS[model]),
        nodes=LAPTOP if devices == "laptop" else nodes_of(devices),
        **keys,
    )


def report(model: str, devices: str) -> str:
    """Return the lines that `plan` prints for a pair."""
    asked = request(model, devices)
    try:
        return "\n".join(lines(asked, choose(asked)))
    except ConfigError as error:
        return f"{model} on {devices}: {error}"


if __name__ == "__main__":
    print("\n\n".join(report(*pair) for pair in PAIRS))
