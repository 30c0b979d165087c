"""AdamW with moments of 8 bits: 2 bytes for each weight instead of 8.

The method is by Dettmers et al., 2022, arXiv:2110.02861; the kernels come from bitsandbytes. A
block of 256 values is stored as codes and one scale, the block's largest magnitude. Each code is an
index into a table of 256 numbers in [-1, 1].

Moments leave as float32, so checkpoints and snapshots have the same form for every optimizer. They
return exactly: the scale of a block is derived from its values, because the table contains 1 and
its largest negative number is known.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_actors.messages.model import AdamParams
from skyrl_actors.transport.device_memory import placed
from skyrl_actors.workers.state import MOMENTS, Kind, adam_group

BLOCK = 256
AT_ONCE = 2**16 * BLOCK  # weights whose codes change at a time
SMALLEST = 4096  # shorter vectors keep float32 moments


class FlatAdamW8bit:
    """AdamW with 8-bit moments over one flat vector of weights."""

    def __init__(self, weights: Tensor):
        from bitsandbytes.optim.adamw import AdamW8bit  # optional, and slow to import

        self._parameter = nn.Parameter(weights)
        self._inner = AdamW8bit([self._parameter], lr=0.0, min_8bit_size=SMALLEST)

    @property
    def _state(self) -> dict[str, Any]:
        return self._inner.state[self._parameter]

    def step(self, gradients: Tensor, adam: AdamParams) -> None:
        self._inner.param_groups[0].update(adam_group(adam))
        self._parameter.grad = gradients
        self._inner.step()

    @property
    def num_steps(self) -> int:
        return int(self._state["step"]) if self._state else 0

    def moment(self, kind: Kind) -> Tensor:
        return self._decoded(1 + MOMENTS.index(kind))

    def moments(self) -> dict[str, Tensor]:
        if not self._state:
            return {}
        found = {kind: self._decoded(index) for index, kind in enumerate(MOMENTS, 1)}
        return {**found, "step": torch.tensor(float(self._state["step"]))}

    def _decoded(self, index: int) -> Tensor:
        codes = self._state[f"state{index}"]
        if codes.dtype == torch.float32:
            return codes
        return decoded(codes, self._state[f"qmap{index}"], self._state[f"absmax{index}"])

    def load(self, moments: Mapping[str, Tensor]) -> None:
        self._inner.init_state(self._inner.param_groups[0], self._parameter, 0, 0)
        for index, kind in enumerate(MOMENTS, 1):
            held = self._state[f"state{index}"]
            if held.dtype == torch.float32:
                held.copy_(moments[kind])
            else:
                codes, scales = encoded(moments[kind].to(held.device), self._state[f"qmap{index}"])
                held.copy_(codes)
                self._state[f"absmax{index}"].copy_(scales)
        self._state["step"] = int(moments["step"])

    def point_at(self, weights: Tensor) -> None:
        self._parameter.grad, self._parameter.data = None, weights

    def move(self, device: torch.device) -> None:
        self._state.update(
            {
                key: placed(value, device)
                for key, value in self._state.items()
                if torch.is_tensor(value)
            }
        )


def decoded(codes: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    """Decode: codes [P] uint8, table [256], scales [ceil(P / 256)] -> [P] float32."""
    values = torch.empty(len(codes), device=codes.device)
    # In slices: int64 indices take eight times the memory of the codes.
    for start in range(0, len(codes), AT_ONCE):
        own = slice(start, start + AT_ONCE)
        by_block = scales[start // BLOCK : (start + AT_ONCE) // BLOCK].repeat_interleave(BLOCK)
        torch.mul(table[codes[own].long()], by_block[: len(codes[own])], out=values[own])
    return values


def encoded(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Encode: values [P] -> codes [P] uint8 and scales [ceil(P / 256)].

    Codes and scales that `decoded` has turned into values are recovered bit by bit.
    """
    parts = [_encoded(part, table) for part in values.split(AT_ONCE)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def _encoded(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    highest, lowest = blocks.amax(1), -blocks.amin(1)
    scales = torch.where(highest > lowest, highest, lowest / -table[0]) if table[0] < 0 else highest
    # For other values, the scale of a block is its largest magnitude, as the table lacks −1.
    plain = blocks.abs().amax(1)
    up, down = (
        torch.nextafter(scales, torch.full_like(scales, end)) for end in (float("inf"), 0.0)
    )
    # [4, blocks]; the division of `lowest` by the table can be one bit off.
    candidates = torch.stack([scales, up, down, plain])
    codes = torch.stack([_nearest(blocks, table, scale) for scale in candidates])
    errors = (table[codes.long()] * candidates[:, :, None] - blocks).abs().amax(2)
    best = errors.argmin(0)
    chosen = torch.arange(len(blocks), device=values.device)
    return codes[best, chosen].view(-1)[: len(values)], candidates[best, chosen]


def _nearest(blocks: Tensor, table: Tensor, scales: Tensor) -> Tensor:
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(
        blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None], middles
    ).to(torch.uint8)
