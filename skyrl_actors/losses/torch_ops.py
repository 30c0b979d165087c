"""`Ops` over torch tensors: the torch side of the losses, used by the workers."""

import torch
from torch import Tensor


class TorchOps:
    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def clip(self, x: Tensor, low: float, high: float) -> Tensor:
        return torch.clamp(x, low, high)

    def clip_around(self, x: Tensor, centre: Tensor, radius: float) -> Tensor:
        return torch.clamp(x, centre - radius, centre + radius)

    def minimum(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.minimum(x, y)

    def maximum(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x, y)

    def detach(self, x: Tensor) -> Tensor:
        return x.detach()

    def count(self, condition: Tensor, like: Tensor) -> Tensor:
        return condition.to(like.dtype).sum()


TORCH_OPS = TorchOps()
