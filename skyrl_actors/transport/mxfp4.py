"""Numbers in MXFP4, as published weights of experts have them."""

import torch
from torch import Tensor

# The values of FP4 (E2M1), by their 4 bits (Open Compute Project, Microscaling Formats, 2023).
HALF: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (*HALF, *(-value for value in HALF))
EXPONENT_BIAS = 127  # of the scales of MXFP4 (E8M0)


def dequantized_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [n, 2 · b] bfloat16 from [n, b] uint8, lower bits first, and scales [n] uint8."""
    values = torch.tensor(FP4, dtype=torch.bfloat16, device=blocks.device)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    return torch.ldexp(pairs.flatten(-2), scales.int()[:, None] - EXPONENT_BIAS)
