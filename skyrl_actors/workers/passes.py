"""Run forward_backward: rows of one or many models, pass by pass, with the loss of each model.

The gradient of every loss is first taken with respect to the predictions only. So a loss that is
not finite is found before anything is added to a gradient, and its model is left out. Rows of other
models in the same pass are not affected.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_actors.losses import REGISTRY
from skyrl_actors.losses.torch_ops import TorchOps
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.example import TARGETS
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import Network
from skyrl_actors.workers.packing import Pass, Share
from skyrl_actors.workers.pass_inputs import inputs_of, stretch_of
from skyrl_actors.workers.pass_part import PassPart
from skyrl_actors.workers.state import is_whole

SAMPLED_LOGPROBS = "logprobs"


def empty_pass(num_tokens: int) -> Pass:
    """Return a pass for a rank without rows, which takes part while weights are gathered."""
    return Pass(shares=(), blocks=(Block(0, 1, num_tokens),), num_tokens=0, padding=num_tokens)


class PassRunner:
    """Run passes over one network."""

    def __init__(self, network: Network, device: torch.device, forward_only: bool):
        self.network = network
        self.device = device
        self.forward_only = forward_only

    def run(self, parts: Sequence[PassPart], plan: Pass) -> None:
        """Run one pass, and add its results to the parts."""
        inputs = inputs_of(self.network, parts, plan, self.forward_only)
        with self.network.in_use(inputs.segments), torch.set_grad_enabled(not self.forward_only):
            predicted, entropy = self.network.predict(inputs)
            slopes, entropy_slopes = self._losses(parts, plan, predicted.detach(), entropy)
            if self.forward_only:
                return
            surrogate = (predicted * slopes).sum()
            if inputs.entropy_gradient and entropy is not None:
                surrogate = surrogate + (entropy * entropy_slopes).sum()
            self._backward(parts, surrogate)

    def _backward(self, parts: Sequence[PassPart], surrogate: Tensor) -> None:
        if not parts[0].model.shares_network:
            parts[0].model.state.backward(surrogate)
            return
        states = [part.model.state for part in parts if is_whole(part.model.state)]
        for state in states:
            state.begin()
        surrogate.backward()
        for state in states:
            state.collect()

    def _losses(
        self, parts: Sequence[PassPart], plan: Pass, predicted: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Record outputs and sums, and return the slopes of this rank's tokens.

        These are d loss / d predicted and d loss / d entropy, 0 for refused parts.
        """
        stretch, group = stretch_of(self.network, plan), self.network.sequence
        everywhere = group.gathered(predicted) if group else predicted
        entropies = (
            None
            if entropy is None
            else (group.gathered(entropy.detach()) if group else entropy.detach())
        )
        slopes = torch.zeros_like(everywhere)
        entropy_slopes = torch.zeros(len(everywhere), dtype=everywhere.dtype, device=self.device)
        for share in plan.shares:
            part = parts[share.part]
            where = part.columns.positions(share.rows)
            own = part.own_targets(everywhere[share.span])
            part.predicted[where] = own.float().cpu().numpy()
            if part.loss is None:
                continue
            leaf = own.clone().requires_grad_(not self.forward_only)
            try:
                elementwise = self._loss(part, share, where, leaf, entropies)
            except InvalidRequest as error:  # of its own loss: those of others go on
                part.refused = str(error)
                continue
            part.elementwise[where] = elementwise.detach().float().cpu().numpy()
            if self.forward_only or not elementwise.requires_grad:
                continue
            (slope,) = torch.autograd.grad(elementwise.sum(), leaf, allow_unused=True)
            if slope is not None and self._is_finite(part, share, elementwise.detach(), slope):
                part.own_targets(slopes[share.span]).copy_(slope)
                counted = self._tensor(part.counted(where)).to(entropy_slopes.dtype)
                entropy_slopes[share.span] = -part.entropy_coef * counted
        return slopes[stretch], entropy_slopes[stretch]

    def _loss(
        self,
        part: PassPart,
        share: Share,
        where: np.ndarray,
        predicted: Tensor,
        entropies: Tensor | None,
    ) -> Tensor:
        assert part.loss is not None
        entry = REGISTRY[part.loss.name]
        inputs = {
            name: torch.full_like(predicted, default, requires_grad=False)
            for name, default in entry.optional.items()
        }
        for name, array in part.columns.fields.items():
            if name != TARGETS:
                inputs[name] = self._tensor(array[where])
        terms = entry.terms(
            TorchOps(part.columns.lengths[list(share.rows)].tolist()),
            predicted,
            inputs,
            part.loss.config,
        )
        sums = {"loss:sum": terms.elementwise.detach().sum(), **terms.sums}
        counted = self._tensor(part.counted(where))
        if entropies is not None:
            sums["entropy:sum"] = (entropies[share.span] * counted).sum()
            sums["loss:sum"] = sums["loss:sum"] - part.entropy_coef * sums["entropy:sum"]
            sums["counted_tokens:sum"] = counted.sum()
        if (
            entropies is not None
            and SAMPLED_LOGPROBS in part.columns.fields
            and predicted.ndim == 1
        ):
            sums["kl:sum"] = _kl(predicted.detach(), inputs[SAMPLED_LOGPROBS])[counted].sum()
        for name, value in sums.items():
            part.sums[name] = part.sums.get(name, 0.0) + float(value)
        return terms.elementwise

    def _is_finite(self, part: PassPart, share: Share, elementwise: Tensor, slope: Tensor) -> bool:
        """Return whether a share's loss and gradient are finite. If not, refuse its part."""
        odd = ~(torch.isfinite(elementwise) & torch.isfinite(slope))
        if not bool(odd.any()):
            return part.refused is None
        token = int(odd.reshape(len(odd), -1).any(1).nonzero()[0, 0])
        ends = np.cumsum(part.columns.lengths[list(share.rows)])
        index = int(np.searchsorted(ends, token, side="right"))
        place = token - int(ends[index - 1] if index else 0)
        name = part.loss.name if part.loss else ""
        part.refused = (
            f"datum {share.rows[index]}: loss {name} or its gradient is not finite at token "
            f"{place} (loss {float(elementwise.reshape(len(odd), -1)[token].sum())}); no part of "
            "this request was applied: check its inputs"
        )
        return False

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _kl(logprobs: Tensor, sampled: Tensor) -> Tensor:
    """Estimate KL(sampler ‖ model) at each token with k3, never negative (Schulman, 2020)."""
    difference = logprobs - sampled
    return torch.exp(difference) - 1 - difference


def num_passes_of_all(own: int, device: torch.device) -> int:
    """Return the largest number of passes of any rank, as sharded weights are gathered together."""
    count = torch.tensor([own], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return int(count)
