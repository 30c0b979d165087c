"""Experts in MXFP4 (gpt-oss) on a CPU, with adapters. Only engines on CPUs import this module.

vLLM's own kernel for them needs AMX, and takes no adapters. Here they are computed with the numbers
that they stand for.
"""

import importlib
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

from skyrl_actors.engines.cpu_experts import CpuLoraExperts
from skyrl_actors.transport.mxfp4 import dequantized_mxfp4

MXFP4 = "vllm.model_executor.layers.quantization.mxfp4"


def admit() -> None:
    """Let vLLM compute models with such experts in float32 too, for which its kernels have none."""
    quantization: Any = importlib.import_module(MXFP4)
    quantization.Mxfp4Config.get_supported_act_dtypes = staticmethod(
        lambda: [torch.bfloat16, torch.float32]
    )


def register() -> None:
    """Make vLLM choose these experts on a CPU."""
    quantization: Any = importlib.import_module(MXFP4)

    def select(*_: Any, **__: Any) -> tuple[Mxfp4MoeBackend, type[mk.FusedMoEExperts]]:
        return Mxfp4MoeBackend.CPU, CpuMxfp4Experts

    def as_loaded(
        *,
        w13_weight: Tensor,
        w2_weight: Tensor,
        w13_weight_scale: Tensor,
        w2_weight_scale: Tensor,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        return w13_weight, w2_weight, w13_weight_scale, w2_weight_scale, w13_bias, w2_bias

    quantization.select_mxfp4_moe_backend = select
    quantization.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format = as_loaded


class CpuMxfp4Experts(CpuLoraExperts):
    """Experts in MXFP4 as bfloat16, which holds each of their numbers exactly."""

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key is not None and activation_key is None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed: Any = layer
        self._whole = tuple(
            _dequantized(weight.data, scale.data)
            for weight, scale in (
                (packed.w13_weight, packed.w13_weight_scale),
                (packed.w2_weight, packed.w2_weight_scale),
            )
        )

    def apply(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **rest: Any
    ) -> None:
        w1, w2 = (weight.to(hidden_states.dtype) for weight in self._whole)
        super().apply(output, hidden_states, w1, w2, **rest)


def _dequantized(packed: Tensor, scales: Tensor) -> Tensor:
    """Return [E, out, in] bfloat16 from [E, out, in / 2] and scales [E, out, in / 32], uint8."""
    blocks = packed.view(-1, packed.size(-1) // scales.size(-1))
    return dequantized_mxfp4(blocks, scales.reshape(-1)).view(*packed.shape[:-1], -1)
