"""Keep activations for the backward pass in host memory. Weights stay on the device in any case."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from skyrl_actors.transport.device_memory import placed

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _OnHost:
    content: Tensor


def offloading(device: torch.device) -> saved_tensors_hooks:
    """Return a context in which a forward pass keeps its activations on the host."""

    def unpack(kept: Tensor | _OnHost) -> Tensor:
        return kept if isinstance(kept, Tensor) else placed(kept.content, device)

    return saved_tensors_hooks(_pack, unpack)


def _pack(tensor: Tensor) -> Tensor | _OnHost:
    """Pack a saved tensor. A weight is returned as it is, not as a copy.

    An engine that shards weights frees the weight and gathers it again.
    """
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    return tensor if is_weight else _OnHost(placed(tensor, HOST))
