"""`Ops` with torch tensors, for the workers."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skyrl_actors.losses import torch_graph
from skyrl_actors.losses.custom_graph import Graph


class TorchOps:
    """Array functions for a pass over concatenated rows of these lengths."""

    def __init__(self, lengths: Sequence[int]):
        self._lengths = lengths

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

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition, x, y)

    def count(self, condition: Tensor, like: Tensor) -> Tensor:
        return condition.to(like.dtype).sum()

    def each_row(
        self, graph: Graph, predicted: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, sums, start = list[Tensor](), dict[str, Tensor](), 0
        for length in self._lengths:
            rows = slice(start, start + length)
            loss, metrics = torch_graph.run(
                graph,
                {"logprobs": predicted[rows], **{name: x[rows] for name, x in inputs.items()}},
            )
            rest = torch.zeros_like(predicted[rows]).flatten()[1:]
            losses.append(torch.cat([loss.reshape(1), rest]).reshape(predicted[rows].shape))
            sums = {key: sums.get(key, 0.0) + value for key, value in metrics.items()}
            start += length
        return torch.cat(losses), sums

    def row_mean(self, x: Tensor, mask: Tensor) -> Tensor:
        lengths = torch.tensor(self._lengths, device=x.device)
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=x.device), lengths)
        counts = (mask != 0).to(x.dtype)
        sums = torch.zeros(len(lengths), dtype=x.dtype, device=x.device).index_add(
            0, rows, x * counts
        )
        totals = torch.zeros_like(sums).index_add(0, rows, counts)
        return (sums / totals.clamp(min=1))[rows]
