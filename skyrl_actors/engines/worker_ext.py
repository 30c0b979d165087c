"""Code that runs inside a vLLM worker process: the weight-transfer backend.

vLLM imports this module by name (`worker_extension_cls`). The import registers the backend
ALL_WEIGHTS. Weights arrive as one mapped file (shared memory) that a WeightManifest names, or as a
stream of tensors.
"""

import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from skyrl_actors.engines import vllm_patches, vllm_processed
from skyrl_actors.engines.hand_copies import HandCopies
from skyrl_actors.engines.interface import ALL_WEIGHTS, FLAG
from skyrl_actors.engines.lora_wrappers import (
    Wrappers,
    adapts_head,
    admit_experts_without_gate,
    admit_heads,
    refuse_unused,
)
from skyrl_actors.engines.split_projections import admit_splits
from skyrl_actors.messages.weights import TensorEntry, WeightStream
from skyrl_actors.transport.streams import received, tensor_in

ZEROS_RANK = 1


@dataclass
class FullWeightsInit(WeightTransferInitInfo):
    """The settings before the first update. There are none."""


@dataclass
class FullWeightsUpdate(WeightTransferUpdateInfo):
    """One version of the weights: a file to map, or a stream to receive."""

    path: str
    num_bytes: int
    tensors: list[list[Any]]  # fields of TensorEntry, in its order
    # Fields of WeightStream. If set, tensors arrive by broadcast and `path` is on another host.
    stream: list[Any] | None = None


class FullWeightsEngine(WeightTransferEngine[FullWeightsInit, FullWeightsUpdate]):
    """A loader of full weights into vLLM's model. An update that leaves out a layer fails."""

    init_info_cls = FullWeightsInit
    update_info_cls = FullWeightsUpdate

    def init_transfer_engine(self, init_info: FullWeightsInit) -> None:
        pass

    def start_weight_update(self) -> None:
        self._wrappers = Wrappers()
        self._wrappers.take_out(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FullWeightsUpdate) -> None:
        entries = [
            TensorEntry(name, tuple(shape), *rest) for name, shape, *rest in update_info.tensors
        ]
        if update_info.stream is None:
            arriving = _mapped_tensors(update_info, entries)
        else:
            stream = WeightStream(*update_info.stream)
            own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            arriving = received(stream, entries, stream.first_rank + own, self.device)
        with HandCopies(self.model):
            self.model.load_weights(arriving)  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        if missing := left_out(self.model):
            raise RuntimeError(
                f"a weight update left out {len(missing)} layer(s): {', '.join(missing[:5])}"
            )
        finalize_layerwise_reload(self.model, self.model_config)
        self._wrappers.put_back()
        vllm_patches.repack_tied_heads(self.model)

    def shutdown(self) -> None:
        pass


def left_out(model: torch.nn.Module) -> list[str]:
    """Return layers that the update sent no weights for.

    vLLM would keep their old weights and only log it. Must run before the update ends.
    """
    waiting: dict[str, list[torch.Tensor]] = {}
    arrived: set[int] = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        kept = (
            info.kernel_tensors[0]
            if info.can_load() and info.kernel_tensors
            else dict(layer.named_parameters(recurse=False))
        )
        weights = [weight for weight in kept.values() if weight is not None]
        if (
            info.can_load()
            and not info.load_numel
            and weights
            and not is_deferred_attention_layer(layer)
        ):
            waiting[name] = weights
        else:
            # A weight that is packed elsewhere is empty.
            arrived |= {weight.data_ptr() for weight in weights if weight.numel()}
    # A tied head shares its weight with the embedding, which has arrived.
    return [
        name
        for name, weights in waiting.items()
        if not all(weight.data_ptr() in arrived for weight in weights)
    ]


def _mapped_tensors(
    update: FullWeightsUpdate, entries: list[TensorEntry]
) -> Iterator[tuple[str, torch.Tensor]]:
    # Nothing writes here, so a private mapping copies nothing. A shared one would create a missing
    # file, filled with zeros.
    buffer = torch.from_file(update.path, shared=False, size=update.num_bytes, dtype=torch.uint8)
    for entry in entries:
        yield entry.name, tensor_in(buffer, entry)


class Extension:
    """Methods that vLLM adds to its worker class; names must not collide with the worker's."""

    model_runner: Any

    def skyrl_used_bytes(self) -> int:
        """Return the used memory of this worker's GPU in bytes."""
        free, total = torch.cuda.mem_get_info()
        return total - free

    def skyrl_trim(self) -> None:
        """Return memory that allocators cache. vLLM does this on sleep, not on a KV release."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL("libc.so.6").malloc_trim(0)

    def skyrl_adapts_head(self) -> bool:
        """Return whether an adapter on the output layer is computed."""
        manager = getattr(self.model_runner, "lora_manager", None)
        return manager is None or adapts_head(manager._adapter_manager)

    def skyrl_routed_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with routed experts."""
        modules = self.model_runner.get_model().modules()
        return tuple(sorted({m.layer_id for m in modules if isinstance(m, MoERunner)}))

    def skyrl_add_zeros(self, name: str, number: int) -> None:
        """Add an adapter whose factors are zeros."""
        manager = self.model_runner.lora_manager
        rank = manager.get_dummy_lora_warmup_rank(ZEROS_RANK)
        manager.add_dummy_lora(LoRARequest(name, number, name), rank)

    def skyrl_patch(self) -> list[str]:
        """Patch the running worker for this vLLM release; return the names of the patches."""
        lora = getattr(self.model_runner, "lora_manager", None)
        if lora is not None:
            refuse_unused(lora._adapter_manager)
        applied = vllm_patches.apply(self.model_runner)
        return (
            [*applied, FLAG]
            if vllm_patches.AFFECTED and vllm_processed.install(self.model_runner)
            else applied
        )


admit_heads()
admit_splits()
admit_experts_without_gate()
WeightTransferEngineFactory.register_engine(ALL_WEIGHTS, FullWeightsEngine)
