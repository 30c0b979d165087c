"""Engines: imports, arguments on the CUDA platform, and the classes that patches rely on."""

import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_actors import engines, transport, workers
from skyrl_actors.engines import vllm_patches, vllm_processed, worker_ext
from skyrl_actors.engines.interface import EngineSpec, EngineTopology
from tests.gpu_check import NEEDS_CUDA_BUILD

pytestmark = NEEDS_CUDA_BUILD
GIB = 2**30
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


def modules() -> list[str]:
    packages = (engines, transport, workers)
    names = [f"{p.__name__}.{m.name}" for p in packages for m in pkgutil.iter_modules(p.__path__)]
    return [name for name in names if not name.endswith(".cpu_worker")]


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM see H100s, without their driver."""
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    capability: Any = importlib.import_module("vllm.platforms.interface").DeviceCapability

    class H100(cuda.NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, *_: Any, **__: Any) -> Any:
            return capability(9, 0)

        @classmethod
        def get_device_name(cls, *_: Any, **__: Any) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, *_: Any, **__: Any) -> int:
            return 80 * GIB

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def set_device(cls, *_: Any) -> None:
            pass

    platform = H100()
    monkeypatch.setattr(platforms, "_current_platform", platform)
    for module in (m for n, m in list(sys.modules.items()) if n.startswith("vllm")):
        if "current_platform" in vars(module):
            monkeypatch.setitem(vars(module), "current_platform", platform)


def spec_of(folder: Path, **keys: Any) -> EngineSpec:
    (folder / "config.json").write_text(json.dumps(QWEN3))
    given: dict[str, Any] = {
        "name": "engine[0]",
        "base_folder": str(folder),
        "device": "gpu",
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "kv_cache_bytes": 8 * GIB,
        "max_loras": 4,
        "max_lora_rank": 32,
        "max_adapters": 8,
        "enforce_eager": False,
        "call_timeout_s": 60.0,
        "planned_bytes": 40 * GIB,
    }
    return EngineSpec(**given | keys)


@pytest.mark.parametrize("name", modules())
def test_modules_of_a_gpu_process_import(name: str):
    importlib.import_module(name)


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
def test_engine_arguments_become_a_config_of_the_cuda_platform(
    has_triton: bool, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from skyrl_actors.engines import engine_args

    vllm_config: Any = importlib.import_module("vllm.config.vllm")
    monkeypatch.setattr(vllm_config, "HAS_TRITON", has_triton)
    spec = spec_of(tmp_path, topology=EngineTopology(tensor_parallel=devices))
    made = engine_args.engine_args(spec).create_engine_config()
    assert made.use_v2_model_runner == has_triton
    assert made.parallel_config.worker_cls == "vllm.v1.worker.gpu_worker.Worker"
    assert made.parallel_config.tensor_parallel_size == devices
    assert made.model_config.enable_sleep_mode
    assert made.cache_config.kv_cache_memory_bytes == 8 * GIB
    assert made.cache_config.gpu_memory_utilization == 0.5
    assert made.lora_config.max_loras == 4
    assert made.weight_transfer_config.backend == worker_ext.ALL_WEIGHTS


@pytest.mark.usefixtures("h100")
def test_further_arguments_reach_vllm(tmp_path: Path):
    from skyrl_actors.engines import engine_args

    arguments = {"kv_cache_dtype": "fp8", "enable_prefix_caching": False}
    spec = spec_of(tmp_path, arguments=json.dumps(arguments))
    made = engine_args.engine_args(spec).create_engine_config()
    assert made.cache_config.cache_dtype == "fp8"
    assert not made.cache_config.enable_prefix_caching


def test_the_extension_adds_only_new_names_to_the_gpu_worker():
    worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    own = [name for name in vars(worker_ext.Extension) if not name.startswith("__")]
    assert own and not [name for name in own if hasattr(worker, name)]


def test_the_weight_engine_has_the_methods_and_arguments_of_vllm():
    base: Any = importlib.import_module("vllm.distributed.weight_transfer").WeightTransferEngine
    made = worker_ext.FullWeightsEngine
    assert not inspect.isabstract(made)
    for name in ("init_transfer_engine", "start_weight_update", "receive_weights", "shutdown"):
        theirs, ours = (inspect.signature(getattr(c, name)) for c in (base, made))
        assert list(theirs.parameters) == list(ours.parameters), name


def test_calls_of_the_engine_exist_with_their_arguments():
    llm: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    client: Any = importlib.import_module("vllm.v1.engine.core_client").AsyncMPClient
    calls = {
        "sleep": {"level", "mode"},
        "wake_up": {"tags"},
        "update_weights": {"request"},
        "finish_weight_update": {"weight_version"},
        "collective_rpc": {"method"},
        "generate": {"prompt", "sampling_params", "request_id", "lora_request"},
        "start_weight_update": set(),
        "get_weight_version": set(),
        "add_lora": {"lora_request"},
        "remove_lora": {"lora_id"},
        "reset_prefix_cache": set(),
    }
    for name, arguments in calls.items():
        assert arguments <= set(inspect.signature(getattr(llm, name)).parameters), name
    pause = inspect.signature(client.pause_scheduler_async).parameters
    assert {"mode", "clear_cache"} <= set(pause)
    assert hasattr(client, "release_kv_cache_memory_async")


def test_both_model_runners_have_what_the_patches_replace():
    v1: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    v2: Any = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    prompts: Any = importlib.import_module("vllm.v1.worker.gpu.sample.prompt_logprob")
    found = list(inspect.signature(v1._get_prompt_logprobs_dict).parameters)
    assert found == ["self", "hidden_states", "num_scheduled_tokens"]
    for name in ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"):
        found = list(inspect.signature(getattr(prompts.PromptLogprobsWorker, name)).parameters)
        assert found[1:3] == ["logits_fn", "hidden_states"], name
    source = inspect.getsource(v2)
    assert "self.prompt_logprobs_worker = PromptLogprobsWorker(" in source
    assert "self.prompt_logprobs_worker.compute_prompt_logprobs(\n" in source
    assert "self.model.compute_logits" in source
    for runner in (v1, v2):
        assert any(base.__name__ == "LoRAModelRunnerMixin" for base in runner.__mro__)


def test_adapters_of_rows_reach_the_kernels_of_the_gpu_wrapper(monkeypatch: pytest.MonkeyPatch):
    """The wrapper's bookkeeping is torch code, which runs on a CPU too."""
    punica: Any = importlib.import_module("vllm.lora.punica_wrapper.punica_gpu")
    layers: Any = importlib.import_module("vllm.lora.layers")
    utils: Any = importlib.import_module("vllm.utils.torch_utils")
    monkeypatch.setattr(utils, "is_pin_memory_available", lambda: False)
    config = SimpleNamespace(max_loras=2, specialize_active_lora=False)
    wrapper = punica.PunicaWrapperGPU(16, 4, "cpu", lora_config=config)
    mapping = layers.LoRAMapping((7, 7, 7, 0, 9), (7, 0, 9), is_prefill=True)
    wrapper.update_metadata(mapping, [9, 7], 2, 64)
    hidden, seen = torch.randn(5, 3), list[list[int]]()

    def compute_logits(rows: torch.Tensor) -> torch.Tensor:
        meta = wrapper.prompt_mapping_meta
        seen.append(meta.token_lora_mapping[: len(rows)].tolist())
        return rows

    with vllm_patches._adapters_of_tokens(compute_logits, hidden, [wrapper]) as logits_of:
        logits_of(hidden[:2])
        logits_of(hidden[2:5])
    assert seen == [[1, 1], [1, -1, 0]]
    assert wrapper.prompt_mapping_meta.token_lora_mapping[:3].tolist() == [1, -1, 0]


def test_logprobs_at_the_sampling_temperature_fit_the_sampler_of_v2():
    module: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler")
    source = inspect.getsource(module.Sampler)
    assert "self.sampling_states" in source and "compute_topk_scores(" in source
    assert len(inspect.signature(module.Sampler.add_request).parameters) == 3
    assert hasattr(module, "compute_topk_scores")
    assert "expanded_idx_mapping" in inspect.signature(module.compute_topk_scores).parameters
    fake = SimpleNamespace(
        sampler=SimpleNamespace(sampling_states=None, add_request=lambda *_: None)
    )
    kept = module.compute_topk_scores
    try:
        assert vllm_processed.install(fake)
        assert module.compute_topk_scores is not kept
    finally:
        module.compute_topk_scores = kept
