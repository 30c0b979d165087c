"""Layers that read earlier tokens by a state or a convolution, in packed passes.

A state-space, linear-attention or convolution layer would continue from one row into the next. Here
it gets the rows of each length as a batch, [1, n·L, H] -> [n, L, H], so each row starts with an
empty state. This needs no names of model families: it applies to every module that itself owns a
short convolution, or the weights of a decay.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.blocks import Block

DECAYS = ("A_log", "dt_bias", "slope_rate")  # parameters or buffers


class PassOfRows(Protocol):
    """The pass that a network computes."""

    blocks: tuple[Block, ...]  # empty between passes
    sequence: Any  # the ranks that share the tokens of a pass, or None

    def within(self, block: Block) -> AbstractContextManager[None]:
        """Return a context in which layers compute the tokens of one block."""
        ...


def mixers_of(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that carry a state from token to token."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for part in module.modules():  # an outer module comes before those in it
        if part not in inside and _has_state(part):
            found.append(part)
            inside.update(part.modules())
    return found


def _has_state(part: nn.Module) -> bool:
    own = {**part._parameters, **part._buffers}
    return any(name in own for name in DECAYS) or any(
        isinstance(child, nn.Conv1d) for child in part.children()
    )


def separate_rows(module: nn.Module, current: PassOfRows) -> None:
    """Make these layers of a model compute each row of a pass alone."""
    for layer in mixers_of(module):
        layer.forward = partial(_by_blocks, current, layer.forward)


def _by_blocks(
    current: PassOfRows, forward: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    blocks = current.blocks
    if current.sequence is not None:
        raise ConfigError(
            "a layer with a state needs whole rows, and sequence_parallel splits them; "
            "set sequence_parallel=1"
        )
    if not blocks or (len(blocks) == 1 and blocks[0].num_rows == 1):
        return forward(*arguments, **named)
    num_tokens = sum(block.num_rows * block.length for block in blocks)
    outputs: list[Any] = []
    for block in blocks:
        with current.within(block):
            own = [_cut(value, block, num_tokens) for value in arguments]
            by_name = {name: _cut(value, block, num_tokens) for name, value in named.items()}
            outputs.append(forward(*own, **by_name))
    return _joined(outputs)


def _cut(value: Any, block: Block, num_tokens: int) -> Any:
    """Return the rows of a block, [n, L, …], of each tensor [1, T, …]."""
    if isinstance(value, tuple):
        return tuple(_cut(each, block, num_tokens) for each in value)
    if not isinstance(value, Tensor) or value.shape[:2] != (1, num_tokens):
        return value
    stop = block.start + block.num_rows * block.length
    return value[0, block.start : stop].unflatten(0, (block.num_rows, block.length))


def _joined(outputs: Sequence[Any]) -> Any:
    """Return the reverse of `_cut` for what the blocks returned."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined([output[i] for output in outputs]) for i in range(len(first)))
    if not isinstance(first, Tensor):
        return first
    return torch.cat([output.flatten(0, 1) for output in outputs])[None]
