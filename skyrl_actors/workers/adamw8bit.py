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
# Weights of one parameter of bitsandbytes, whose kernels count in 32 bits. A multiple of BLOCK.
MOST_WEIGHTS = 2**30


class FlatAdamW8bit:
    """AdamW with 8-bit moments over one flat vector of weights."""

    def __init__(self, weights: Tensor):
        from bitsandbytes.optim.adamw import AdamW8bit  # optional, and slow to import

        self._parameters = [nn.Parameter(part) for part in weights.split(MOST_WEIGHTS)]
        smallest = SMALLEST if len(self._parameters) == 1 else 0
        self._inner = AdamW8bit(self._parameters, lr=0.0, min_8bit_size=smallest)

    @property
    def _states(self) -> list[dict[str, Any]]:
        """The state of each parameter; empty before the first step."""
        found = [self._inner.state[parameter] for parameter in self._parameters]
        return found if found[0] else []

    def step(self, gradients: Tensor, adam: AdamParams) -> None:
        self._inner.param_groups[0].update(adam_group(adam))
        for parameter, part in zip(self._parameters, gradients.split(MOST_WEIGHTS), strict=True):
            parameter.grad = part
        self._inner.step()
        for parameter in self._parameters:
            parameter.grad = None  # the owner moves it to other memory

    @property
    def num_steps(self) -> int:
        return int(self._states[0]["step"]) if self._states else 0

    def moment(self, kind: Kind) -> Tensor:
        return self._decoded(1 + MOMENTS.index(kind))

    def moments(self) -> dict[str, Tensor]:
        if not self._states:
            return {}
        found = {kind: self._decoded(index) for index, kind in enumerate(MOMENTS, 1)}
        return {**found, "step": torch.tensor(float(self.num_steps))}

    def _decoded(self, index: int) -> Tensor:
        parts = [_decoded_part(state, index) for state in self._states]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def load(self, moments: Mapping[str, Tensor]) -> None:
        for parameter in self._parameters:
            self._inner.init_state(self._inner.param_groups[0], parameter, 0, 0)
        for index, kind in enumerate(MOMENTS, 1):
            parts = moments[kind].split(MOST_WEIGHTS)
            for state, part in zip(self._states, parts, strict=True):
                _set_part(state, index, part)
        for state in self._states:
            state["step"] = int(moments["step"])

    def point_at(self, weights: Tensor) -> None:
        for parameter, part in zip(self._parameters, weights.split(MOST_WEIGHTS), strict=True):
            parameter.grad, parameter.data = None, part

    def move(self, device: torch.device) -> None:
        for state in self._states:
            tensors = {key: value for key, value in state.items() if torch.is_tensor(value)}
            state.update({key: placed(value, device) for key, value in tensors.items()})


def _decoded_part(state: Mapping[str, Any], index: int) -> Tensor:
    codes = state[f"state{index}"]
    if codes.dtype == torch.float32:
        return codes
    return decoded(codes, state[f"qmap{index}"], state[f"absmax{index}"])


def _set_part(state: Mapping[str, Any], index: int, values: Tensor) -> None:
    held = state[f"state{index}"]
    if held.dtype == torch.float32:
        held.copy_(values)
        return
    codes, scales = encoded(values.to(held.device), state[f"qmap{index}"])
    held.copy_(codes)
    state[f"absmax{index}"].copy_(scales)


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
