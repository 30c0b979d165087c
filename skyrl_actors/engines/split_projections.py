"""Adapters on layers that hold several projections, with a pair of factors for each.

vLLM packs the pairs of queries, keys and values into one layer by a table of the model's class. For
layers with a state, the tables have one pair for the whole layer. Here they get one for each
projection, as adapters of the Tinker service have.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora import model_manager
from vllm.lora.layers import MergedColumnParallelLinearVariableSliceWithLoRA
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

MAMBA2 = ("gate_proj", "x_proj", "in_proj_b", "in_proj_c", "in_proj_dt")
GATED_DELTA = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z")
FUSED = "in_proj_qkvz"


def admit_splits() -> None:
    """Make vLLM take a pair for each projection of Mamba 2 and of Gated DeltaNet."""
    manager: Any = model_manager
    table: Callable[..., dict[str, list[str]]] = manager.process_packed_modules_mapping
    wrapped: Callable[..., nn.Module] = manager.from_layer

    def with_splits(model: nn.Module, **settings: Any) -> dict[str, list[str]]:
        return table(model, **settings) | dict(_splits(model))

    def from_layer(
        layer: Any, slots: int, lora: Any, packed: list[str], model_config: Any
    ) -> nn.Module:
        if packed != list(GATED_DELTA) or len(layer.output_sizes) == len(packed):
            return wrapped(layer, slots, lora, packed, model_config)
        wrapper = InterleavedLoRA(layer)
        wrapper.create_lora_weights(slots, lora, model_config)
        return wrapper

    manager.process_packed_modules_mapping = with_splits
    manager.from_layer = from_layer


def _splits(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    inputs = [layer.in_proj for layer in model.modules() if isinstance(layer, MambaMixer2)]
    # With other numbers of devices than its groups allow, the layer is one matrix in another order.
    # An adapter on it is then refused.
    if inputs and all(isinstance(layer, MergedColumnParallelLinear) for layer in inputs):
        yield "in_proj", list(MAMBA2)
    if any(name.endswith(f".{FUSED}") for name, _ in model.named_modules()):
        yield FUSED, list(GATED_DELTA)
    # The files of GLM-4 have one matrix for both, and so have its adapters.
    if type(model).__name__ == "Glm4ForCausalLM":
        yield "gate_up_proj", ["gate_up_proj"]


class InterleavedLoRA(MergedColumnParallelLinearVariableSliceWithLoRA):
    """Pairs of queries, keys, values and gate where their heads alternate in the layer's outputs.

    The terms are computed one projection after another, and then put in the order of the layer.
    """

    def create_lora_weights(
        self, max_loras: int, lora_config: Any, model_config: Any = None
    ) -> None:
        sizes = _sizes(model_config)
        self.output_sizes = list(sizes)
        self.output_slices = tuple(size // self.tp_size for size in sizes)
        self.n_slices = len(sizes)
        self.output_ids = (self.tp_rank,) * self.n_slices
        groups = model_config.linear_num_key_heads // self.tp_size
        self._order = interleaved(self.output_slices, groups).to(self.device)
        self._enable_aux_cuda_stream = False  # it adds the terms in their own order
        super().create_lora_weights(max_loras, lora_config, model_config)

    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        terms = torch.zeros(len(rows), sum(self.output_slices), dtype=x.dtype, device=x.device)
        self.punica_wrapper.add_lora_linear(
            terms, rows, self.lora_a_stacked, self.lora_b_stacked, 1.0, self.output_slices
        )
        return output + terms.index_select(1, self._order).view_as(output)


def _sizes(config: Any) -> tuple[int, int, int, int]:
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    return key, key, value, value


def interleaved(sizes: tuple[int, ...], groups: int) -> Tensor:
    """Return where each output is in the projections one after another, [sum(sizes)] int64.

    The outputs are `groups` groups; each has an equal share of every projection.
    """
    parts = torch.arange(sum(sizes)).split(list(sizes))
    return torch.cat([part.view(groups, -1) for part in parts], 1).flatten()
