"""What the backward pass needs waits in host memory, except weights, which stay on the device anyway."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from skyrl_actors.device_memory import placed

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _OnHost:
    content: Tensor


def offloading(device: torch.device) -> saved_tensors_hooks:
    """A forward pass inside of it keeps its activations on the host until the backward pass."""

    def unpack(kept: Tensor | _OnHost) -> Tensor:
        return kept if isinstance(kept, Tensor) else placed(kept.content, device)

    return saved_tensors_hooks(_pack, unpack)


def _pack(tensor: Tensor) -> Tensor | _OnHost:
    """A weight is kept as it is, not as a copy: an engine that shards weights frees it and gathers it again."""
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    return tensor if is_weight else _OnHost(placed(tensor, HOST))
