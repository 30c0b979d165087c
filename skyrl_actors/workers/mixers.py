"""Layers that read earlier tokens by a state or a convolution, in packed passes.

A state-space, linear-attention or convolution layer would continue from one row into the next. Here
it gets the rows of each length as a batch, [1, n·L, H] -> [n, L, H], so each row starts with an
empty state. Ranks that share the tokens of a pass first exchange them, so that each has whole rows.
This needs no names of model families: it applies to every module that itself owns a short
convolution, or the weights of a decay.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from skyrl_actors.workers.blocks import Block, blocks_between, row_cuts
from skyrl_actors.workers.sequence import SequenceGroup

DECAYS = ("A_log", "dt_bias", "slope_rate")  # parameters or buffers


class PassOfRows(Protocol):
    """The pass that a network computes."""

    blocks: tuple[Block, ...]  # empty between passes
    sequence: SequenceGroup | None  # the ranks that share the tokens of the pass

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
    blocks, group = current.blocks, current.sequence
    if group is not None and blocks:
        return _by_ranks(current, group, forward, arguments, named)
    if not blocks or (len(blocks) == 1 and blocks[0].num_rows == 1):
        return forward(*arguments, **named)
    return _computed(current, blocks, forward, arguments, named)


def _by_ranks(
    current: PassOfRows,
    group: SequenceGroup,
    forward: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Compute whole rows on each rank, from the tokens that the ranks hold, [1, T/S, …]."""
    blocks = current.blocks
    cuts = row_cuts(blocks, group.size)
    held, own = cuts[-1] // group.size, slice(*cuts[group.index : group.index + 2])
    without_rows = own.start == own.stop

    def exchanged(x: Tensor) -> Tensor:
        rows = group.whole_rows(x[0], cuts)
        # A rank without rows computes a token of zeros, because the backward pass has collectives.
        return (torch.cat([rows, x.new_zeros(x[0, :1].shape)]) if without_rows else rows)[None]

    def returned(x: Tensor) -> Tensor:
        return group.stretches(x[0, :0] if without_rows else x[0], cuts)[None]

    own_blocks = (Block(0, 1, 1),) if without_rows else blocks_between(blocks, own.start, own.stop)
    given = [_mapped(exchanged, value, held) for value in arguments]
    by_name = {name: _mapped(exchanged, value, held) for name, value in named.items()}
    output = _computed(current, own_blocks, forward, tuple(given), by_name)
    return _mapped(returned, output, own_blocks[-1].stop - own_blocks[0].start)


def _computed(
    current: PassOfRows,
    blocks: tuple[Block, ...],
    forward: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Compute adjacent blocks, whose tokens are [1, n, …] in arguments and result."""
    first, count = blocks[0].start, blocks[-1].stop - blocks[0].start
    outputs: list[Any] = []
    for block in blocks:

        def cut(x: Tensor, block: Block = block) -> Tensor:
            rows = x[0, block.start - first : block.stop - first]
            return rows.unflatten(0, (block.num_rows, block.length))

        with current.within(block):
            own = [_mapped(cut, value, count) for value in arguments]
            by_name = {name: _mapped(cut, value, count) for name, value in named.items()}
            outputs.append(forward(*own, **by_name))
    return _joined(outputs)


def _mapped(change: Callable[[Tensor], Tensor], value: Any, num_tokens: int) -> Any:
    """Change each tensor of a layer's tokens, [1, num_tokens, …], and leave other values."""
    if isinstance(value, tuple):
        return tuple(_mapped(change, each, num_tokens) for each in value)
    if not isinstance(value, Tensor) or value.shape[:2] != (1, num_tokens):
        return value
    return change(value)


def _joined(outputs: Sequence[Any]) -> Any:
    """Join what the blocks returned, [n, L, …] each, to [1, T, …]."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_joined([output[i] for output in outputs]) for i in range(len(first)))
    if not isinstance(first, Tensor):
        return first
    return torch.cat([output.flatten(0, 1) for output in outputs])[None]
