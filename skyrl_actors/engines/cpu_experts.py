"""Routed experts on a CPU with adapters. Only engines on CPUs import this module.

With LoRA enabled, vLLM 0.32 chooses Triton's experts also on a CPU, where they cannot run. These
experts compute in torch: (token, expert) pairs sorted by expert, one grouped product for each
projection. The weights stay as they were loaded, so a live update replaces what is computed with.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

METHOD = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
LIMIT, ALPHA = 7.0, 1.702  # of gpt-oss's activation
ALIGNED = 16  # bytes; torch's grouped products need rows of a multiple of it


def register() -> None:
    """Make vLLM choose these experts on a CPU."""
    method: Any = importlib.import_module(METHOD)

    def select(*_: Any, **__: Any) -> tuple[UnquantizedMoeBackend, type[mk.FusedMoEExperts]]:
        return UnquantizedMoeBackend.CPU, CpuLoraExperts

    method.select_unquantized_moe_backend = select
    _admit_experts_without_gate()


def _admit_experts_without_gate() -> None:
    """Make vLLM create experts without a gate on a CPU. Its own kernels there have none."""
    settings: Any = FusedMoEConfig
    check = settings.__post_init__

    def checked(config: FusedMoEConfig) -> None:
        try:
            check(config)
        except NotImplementedError as error:  # the last of the checks
            if "is_act_and_mul" not in str(error):
                raise

    settings.__post_init__ = checked


class CpuLoraExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Experts without quantization, with the low-rank terms of the adapters in a batch."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing: vLLM's own experts pack the weights, and an update would miss the copy."""

    def apply(  # pyright: ignore[reportIncompatibleMethodOverride]  called by keywords
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *,
        apply_router_weight_on_input: bool,
        **_: Any,
    ) -> None:
        """Compute [T, H] into `output` from [T, H], and from experts and weights [T, K]."""
        ids, order = topk_ids.reshape(-1).long().sort(stable=True)
        tokens = order // topk_ids.size(1)
        x, ends = hidden_states[tokens], _ends(ids, len(w1))
        y = _grouped(x, w1, ends, None if self.w1_bias is None else self.w1_bias[ids])
        lora = self._lora_context
        present = list(self._adapters(tokens, ids, len(w1)))
        for slot, rows, own_ends in present:
            assert lora is not None
            pairs = zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True)
            for part, (a, b) in zip(_parts(y, lora.w13_num_slices, activation), pairs, strict=True):
                part[rows] += _low_rank(x[rows], a[slot], b[slot], own_ends)
        z = _activated(y, activation)
        y = _grouped(z, w2, ends, None if self.w2_bias is None else self.w2_bias[ids])
        for slot, rows, own_ends in present:
            assert lora is not None
            a, b = lora.w2_lora_a_stacked[0][slot], lora.w2_lora_b_stacked[0][slot]
            y[rows] += _low_rank(z[rows], a, b, own_ends)
        if not apply_router_weight_on_input:
            y = y * topk_weights.reshape(-1)[order, None]
        total = torch.empty_like(y).index_copy_(0, order, y)
        output.copy_(total.view(len(hidden_states), topk_ids.size(1), -1).sum(1))

    def _adapters(
        self, tokens: Tensor, ids: Tensor, experts: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each adapter's slot, its rows of the sorted pairs, and their ends by expert."""
        if self._lora_context is None or self._lora_context.punica_wrapper.no_lora:
            return
        slots = self._lora_context.punica_wrapper.token_lora_indices[tokens]
        for slot in torch.unique(slots).tolist():
            if slot >= 0:
                rows = (slots == slot).nonzero()[:, 0]
                yield slot, rows, _ends(ids[rows], experts)


def _parts(y: Tensor, count: int, activation: MoEActivation) -> tuple[Tensor, ...]:
    """Return the outputs [n, I] of gate and up as views, or all outputs."""
    if count == 1:
        return (y,)
    if activation == MoEActivation.SWIGLUOAI:  # gpt-oss: gate and up alternate
        return y[:, ::2], y[:, 1::2]
    return tuple(y.chunk(2, -1))


def _activated(y: Tensor, activation: MoEActivation) -> Tensor:
    """Return the input [n, I] of the second projection."""
    if activation == MoEActivation.SWIGLUOAI:  # as in gpt-oss; vLLM has no kernel for CPUs
        gate, up = y[:, ::2].clamp(max=LIMIT), y[:, 1::2].clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(gate * ALPHA)
    z = y.new_empty(len(y), y.size(1) // 2 if activation.is_gated else y.size(1))
    return apply_moe_activation(activation, z, y)


def _low_rank(x: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return B A x [n, out], with A [1 or E, r, in] and B [1 or E, out, r]; B has the scale."""
    low = F.linear(x, a[0].to(x.dtype)) if len(a) == 1 else _grouped(x, a.to(x.dtype), ends)
    return F.linear(low, b[0].to(x.dtype)) if len(b) == 1 else _grouped(low, b.to(x.dtype), ends)


def _grouped(x: Tensor, weights: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ [n, out], with the weights [E, out, in] of each row's expert."""
    out = weights.size(1)
    step = ALIGNED // x.element_size()
    missing_in, missing_out = (-size % step for size in (x.size(-1), out))
    if missing_in or missing_out:
        x, weights = F.pad(x, (0, missing_in)), F.pad(weights, (0, missing_in, 0, missing_out))
    product = F.grouped_mm(x, weights.mT, offs=ends)[:, :out]
    return product if bias is None else product + bias.to(product.dtype)


def _ends(ids: Tensor, experts: int) -> Tensor:
    """Return where each expert's pairs end in sorted ids, [E] int32."""
    return torch.searchsorted(ids, torch.arange(experts), right=True).int()
