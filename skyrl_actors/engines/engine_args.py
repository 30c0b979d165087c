"""The arguments of one vLLM engine."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from skyrl_actors.engines.interface import ALL_WEIGHTS, EngineSpec
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.quantization import KEY

KINDS = ("image", "video")  # of inputs beside text, by vLLM's names
# Those of adapters, by vLLM's names for its fused layers.
LORA_LAYERS = [
    *("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    *("fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    *("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
    *("gate_up_proj", "up_proj", "down_proj", "w1", "w2", "w13", "experts", "lm_head"),
]


def _admit_on_cpu(spec: EngineSpec) -> None:
    """Let this process's vLLM accept what its workers can compute on a CPU."""
    if spec.router_replay:
        from skyrl_actors.engines import cpu_routes

        cpu_routes.admit()
    if KEY in json.loads((Path(spec.base_folder) / "config.json").read_text()):
        from skyrl_actors.engines import cpu_mxfp4

        cpu_mxfp4.admit()


def most_adapters(spec: EngineSpec) -> int:
    """Return how many adapters vLLM keeps in host memory."""
    return max(spec.max_adapters, spec.max_loras)


def engine_args(spec: EngineSpec) -> AsyncEngineArgs:
    """Return what the spec means to vLLM."""
    literals: Any = spec  # vLLM types its choices as literals; the config has checked them
    on_cpu, images = spec.device == "cpu", spec.max_images
    if on_cpu:
        _admit_on_cpu(spec)
    on_device: dict[str, Any] = (
        # vLLM splits long prompts over steps, which rewinds a seeded generator. Torch cannot do
        # that on a CPU, and vLLM would crash.
        {
            "worker_cls": "skyrl_actors.engines.cpu_worker.SleepyCpuWorker",
            "enable_chunked_prefill": False,
        }
        if on_cpu
        else {"enable_sleep_mode": True, **_memory_share(spec)}
    )
    if spec.topology.num_devices > 1:
        on_device["distributed_executor_backend"] = "ray" if spec.over_nodes else "mp"
        if spec.device_ids:
            on_device["device_ids"] = list(spec.device_ids)
    args = AsyncEngineArgs(
        model=spec.base_folder,
        tensor_parallel_size=spec.topology.tensor_parallel,
        pipeline_parallel_size=spec.topology.pipeline_parallel,
        dtype=literals.dtype,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=max(spec.max_num_batched_tokens, spec.max_model_len),
        kv_cache_memory_bytes=spec.kv_cache_bytes,
        enforce_eager=spec.enforce_eager,
        enable_lora=True,
        max_loras=spec.max_loras,
        max_cpu_loras=most_adapters(spec),
        max_lora_rank=literals.max_lora_rank,
        lora_target_modules=LORA_LAYERS,
        enable_moe_shared_loras=spec.expert_layout == "shared_outer",
        enable_return_routed_experts=spec.router_replay,
        max_logprobs=-1,  # the controller bounds requests; prompt scores need all of the vocabulary
        generation_config="vllm",
        enable_log_requests=False,
        disable_log_stats=True,  # the stat logger of this package remains
        weight_transfer_config=WeightTransferConfig(backend=ALL_WEIGHTS),
        worker_extension_cls="skyrl_actors.engines.worker_ext.Extension",
        **on_device,
        **({"limit_mm_per_prompt": dict(zip(KINDS, (images, 0), strict=True))} if images else {}),
        **json.loads(spec.arguments),
    )
    if on_cpu:
        _fit_to_cpu(args)
    return args


def _fit_to_cpu(args: AsyncEngineArgs) -> None:
    """Set what vLLM chooses wrongly on a CPU for a kind of model."""
    model = args.create_model_config()
    if model.is_hybrid:
        args.enable_prefix_caching = False  # vLLM keeps states only if it may split prompts
    if model.use_mla and args.attention_backend is None and args.dtype != "bfloat16":
        # On a CPU with AMX, vLLM takes a kernel that has bfloat16 only.
        args.attention_backend = AttentionBackendEnum.CPU_MLA


def refused(error: ValueError) -> ConfigError:
    """Return the error for arguments that vLLM refuses, without pydantic's lines around it."""
    found = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return ConfigError(f"vLLM refuses this engine: {found.removeprefix('Value error, ')}")


def _memory_share(spec: EngineSpec) -> dict[str, float]:
    """Return the share of the GPU that the plan gives the engine.

    vLLM does not start if less is free. Its default, 0.92, is not free beside trainers.
    """
    from vllm.platforms import current_platform

    return share_of(spec.planned_bytes, current_platform.get_device_total_memory())


def share_of(planned_bytes: int, device_bytes: int) -> dict[str, float]:
    """Return vLLM's argument for this share of a device; none if the plan is not known."""
    if not planned_bytes:
        return {}
    return {"gpu_memory_utilization": min(1.0, planned_bytes / device_bytes)}
