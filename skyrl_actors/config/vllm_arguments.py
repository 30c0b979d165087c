"""Check names of vLLM without importing it: arguments of its engine, and its tool parsers."""

import ast
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

BY_KEY = {
    "model": "base_model",
    "dtype": "engine.dtype",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "engine.pipeline_parallel",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "gpu_memory_utilization": "engine.kv_cache_bytes",
    "enforce_eager": "engine.enforce_eager",
    "max_loras": "engine.max_loras",
    "max_cpu_loras": "lora.max_adapters",
    "max_lora_rank": "lora.max_rank",
    "enable_moe_shared_loras": "lora.expert_layout",
    "enable_return_routed_experts": "router_replay",
    "aux_output_config": "router_replay",
    "limit_mm_per_prompt": "limits.images",
}
"""Arguments that other keys set."""

BY_SERVICE = (
    "device_ids",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_chunked_prefill",
    "enable_log_requests",
    "enable_lora",
    "enable_mm_embeds",
    "enable_sleep_mode",
    "enable_tower_connector_lora",
    "generation_config",
    "logprobs_mode",
    "lora_target_modules",
    "max_logprobs",
    "mm_processor_kwargs",
    "runner",
    "seed",
    "weight_transfer_config",
    "worker_cls",
    "worker_extension_cls",
)
"""Arguments that the service sets itself, because its answers depend on them."""

HARMONY = "openai"
"""vLLM's name for the format of gpt-oss, which other code of it parses with downloaded files."""


def check(names: Iterable[str]) -> None:
    """Raise ValueError for arguments that vLLM does not have, or that are set elsewhere.

    Without vLLM on this machine, unknown names are found when the engine starts.
    """
    known = known_arguments()
    for name in names:
        if key := BY_KEY.get(name):
            raise ValueError(f"vllm.{name} is set by {key}; use that key")
        if name in BY_SERVICE:
            raise ValueError(f"vllm.{name} is set by the service; leave it out")
        if known and name not in known:
            close = get_close_matches(name, sorted(known), 3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise ValueError(f"vllm.{name}: vLLM's engine has no such argument{hint}")


def check_tool_parser(name: str) -> None:
    """Raise ValueError for a parser that vLLM does not have."""
    known = _tool_parsers() - {HARMONY}
    if name == HARMONY:
        raise ValueError(
            f"tool_parser {name}: answers in gpt-oss's format are not parsed; leave it out"
        )
    if known and name not in known:
        raise ValueError(f"tool_parser {name}: use one of {', '.join(sorted(known))}")


@cache
def _tool_parsers() -> frozenset[str]:
    """Return the names of vLLM's tool parsers, read from its source; empty without vLLM."""
    for node in _parsed_source("tool_parsers", "__init__.py"):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            return frozenset(key for key in keys if isinstance(key, str))
    return frozenset()


@cache
def known_arguments() -> frozenset[str]:
    """Return the arguments of vLLM's engine, read from its source; empty without vLLM."""
    classes = [
        node
        for node in _parsed_source("engine", "arg_utils.py")
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    return frozenset(
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def _parsed_source(*path: str) -> list[ast.stmt]:
    """Return the statements of one of vLLM's files; none without vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return []
    return ast.parse(Path(spec.origin).parent.joinpath(*path).read_text()).body
