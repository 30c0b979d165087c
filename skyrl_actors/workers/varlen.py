"""Attention over packed rows in one GPU kernel: torch's variable-length attention, after a test."""

import logging
import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from skyrl_actors.workers.blocks import Block

log = logging.getLogger(__name__)
# Times the error of the slower way in the same dtype, both against float32, plus one rounding.
MOST_ERROR, ROUNDING = 2.0, 2.0**-8
Attention = Callable[[Tensor, Tensor, Tensor, tuple[Block, ...], float | None, int | None], Tensor]


@lru_cache(maxsize=8)
def row_bounds(blocks: tuple[Block, ...], device: torch.device) -> tuple[Tensor, int]:
    """Return the bounds of each row in the packed axis, [N+1] int32, and the longest row."""
    ends, at = [0], 0
    for block in blocks:
        for _ in range(block.num_rows):
            at += block.length
            ends.append(at)
    return torch.tensor(ends, dtype=torch.int32, device=device), max(
        block.length for block in blocks
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Block, ...],
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Compute causal attention inside each row.

    query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [T, Hq, D].
    """
    bounds, longest = row_bounds(blocks, query.device)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, H, D]
    left = -1 if window is None else window - 1
    out = varlen_attn(
        q,
        k,
        v,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=q.size(1) != k.size(1),
    )
    assert isinstance(out, Tensor)
    return out


_proved: dict[tuple[torch.device, torch.dtype, int], bool] = {}


def prove(reference: Attention, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Test the kernel once for heads of this kind, outside of any pass."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        _proved[(device, dtype, head_dim)] = agrees(reference, device, dtype, head_dim)


def path() -> str:
    """Return what attention over packed rows computes with."""
    if any(_proved.values()):
        return "variable-length kernel"
    return "by blocks, the kernel failed its test" if _proved else "by blocks"


def can_attend(query: Tensor) -> bool:
    """Return whether the kernel has passed its test for these heads."""
    if query.device.type != "cuda":
        return False
    device = torch.device("cuda")  # each rank has one visible device
    return _proved.get((device, query.dtype, query.size(-1)), False)


def agrees(reference: Attention, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the kernel computes as exactly as `reference`, forward and backward.

    Both are compared with `reference` in float32 on three short rows, by relative norms.
    """
    blocks = (Block(0, 2, 5), Block(10, 1, 19))
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, 4, 29, head_dim), (1, 2, 29, head_dim), (1, 2, 29, head_dim))
    inputs = [
        torch.randn(shape, device=device, dtype=dtype, generator=generator).requires_grad_()
        for shape in shapes
    ]
    try:
        exact = _results(reference, [x.detach().float().requires_grad_() for x in inputs], blocks)
        errors = [
            [_relative(a, b) for a, b in zip(_results(way, inputs, blocks), exact, strict=True)]
            for way in (attend, reference)
        ]
        same = all(new <= MOST_ERROR * old + ROUNDING for new, old in zip(*errors, strict=True))
    except (RuntimeError, ValueError) as error:  # the kernel lacks this device, dtype or head
        log.warning("variable-length attention is not used on %s: %s", device, error)
        return False
    if not same:
        log.warning("variable-length attention is not used on %s: its results differ", device)
    return same


def _results(way: Attention, inputs: list[Tensor], blocks: tuple[Block, ...]) -> list[Tensor]:
    """Return the attention and the gradients of its squares."""
    with torch.enable_grad():
        out = way(inputs[0], inputs[1], inputs[2], blocks, None, None)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def _relative(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the error over the norm of the exact values; infinite for NaN."""
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    return error if math.isfinite(error) else math.inf
