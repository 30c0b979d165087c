"""Run forward_backward: rows of one or many models, pass by pass, with the loss of each model.

The gradient of every loss is first taken with respect to the predictions only. So a loss that is
not finite is found before anything is added to a gradient, and its model is left out. Rows of other
models in the same pass are not affected.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_actors.losses import REGISTRY
from skyrl_actors.losses.loss import ENTROPY_COEF
from skyrl_actors.losses.processing import Processing, processing_of
from skyrl_actors.losses.torch_ops import TorchOps
from skyrl_actors.messages.columns import TARGETS, WEIGHTS, Columns
from skyrl_actors.messages.model import LossCall
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.models import TrainedModel
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.packing import Pass, Share
from skyrl_actors.workers.routes import misfit
from skyrl_actors.workers.state import is_whole

SAMPLED_LOGPROBS = "logprobs"


@dataclass(kw_only=True)
class PassPart:
    """One model's rows in a call, and their results."""

    model: TrainedModel
    columns: Columns
    rows: tuple[int, ...]
    loss: LossCall | None  # None: a critic's plain forward
    predicted: np.ndarray = field(init=False)  # float32 of columns.shape, at flat positions
    elementwise: np.ndarray = field(init=False)
    sums: dict[str, float] = field(init=False)
    refused: str | None = None

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset the results."""
        self.predicted = np.zeros(self.columns.shape, np.float32)
        self.elementwise = np.zeros(self.columns.shape, np.float32)
        self.sums = {}

    def in_row_order(self) -> tuple[np.ndarray, np.ndarray]:
        where = self.columns.positions(self.rows)
        return self.predicted[where], self.elementwise[where]

    @property
    def num_targets(self) -> int:
        """The number of targets a token, K; 0 for a single target without the axis."""
        return 0 if self.columns.widths is None else self.columns.shape[1]

    def own_targets(self, x: Tensor) -> Tensor:
        """Return the targets of this part from a tensor with more targets a token."""
        if x.ndim == 1:
            return x
        return x[:, : self.num_targets] if self.num_targets else x[:, 0]

    @property
    def entropy_coef(self) -> float:
        return float(self.loss.config.get(ENTROPY_COEF, 0.0)) if self.loss else 0.0

    @property
    def processing(self) -> Processing | None:
        """The distribution that the loss is about; None for the model's own."""
        return processing_of(self.loss.config) if self.loss else None

    def counted(self, where: np.ndarray) -> np.ndarray:
        """Return [n] bool: the positions whose weight is not 0.

        A loss without weights, or with inputs of its own, counts all positions.
        """
        weights = self.columns.fields.get(WEIGHTS)
        if self.loss is None or weights is None or REGISTRY[self.loss.name].any_inputs:
            return np.ones(len(where), bool)
        own = weights[where] != 0
        return own if own.ndim == 1 else own.any(1)


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
        inputs = self._inputs(parts, plan)
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

    def _stretch(self, plan: Pass) -> slice:
        """Return the slice of this rank's tokens."""
        total = plan.num_tokens + plan.padding
        return self.network.sequence.stretch(total) if self.network.sequence else slice(0, total)

    def _inputs(self, parts: Sequence[PassPart], plan: Pass) -> PassInputs:
        total, stretch = plan.num_tokens + plan.padding, self._stretch(plan)
        tokens = np.zeros(total, np.int64)
        counted = np.zeros(total, bool)
        is_critic = parts[0].model.spec.role == "critic"
        width = max(part.num_targets for part in parts)
        targets = None if is_critic else np.zeros((total, width) if width else total, np.int64)
        for share in plan.shares:
            part = parts[share.part]
            where = part.columns.positions(share.rows)
            tokens[share.span] = part.columns.tokens[where]
            counted[share.span] = part.counted(where)
            if targets is not None:
                given = part.columns.fields[TARGETS][where]
                wide = given[:, None] if width and given.ndim == 1 else given
                targets[(share.span, slice(0, wide.shape[1])) if width else share.span] = wide
        return PassInputs(
            tokens=self._tensor(tokens[stretch]),
            positions=plan.positions()[stretch].to(self.device),
            blocks=plan.blocks,
            segments=tuple(_segments(parts, plan)),
            targets=None if targets is None else self._tensor(targets[stretch]),
            counted=None if counted.all() else self._tensor(counted[stretch]),
            entropy_gradient=any(part.entropy_coef for part in parts) and not self.forward_only,
            routes=self._routes(parts, plan, stretch),
        )

    def _routes(self, parts: Sequence[PassPart], plan: Pass, stretch: slice) -> Tensor | None:
        """Return the routes of this rank's tokens, 0 for rows without; None if no row has any."""
        routed, found = self.network.routed, None
        for share in plan.shares:
            part = parts[share.part]
            own = part.columns.routes
            if own is None:
                continue
            if fault := misfit(own, routed):
                part.refused = fault
                continue
            if found is None:
                found = np.zeros((plan.num_tokens + plan.padding, routed.width), np.int16)
            found[share.span] = own[part.columns.positions(share.rows)]
        return None if found is None else self._tensor(found[stretch])

    def _losses(
        self, parts: Sequence[PassPart], plan: Pass, predicted: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Record outputs and sums, and return the slopes of this rank's tokens.

        These are d loss / d predicted and d loss / d entropy, 0 for refused parts.
        """
        stretch, group = self._stretch(plan), self.network.sequence
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
            elementwise = self._loss(part, share, where, leaf, entropies)
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


def _segments(parts: Sequence[PassPart], plan: Pass) -> list[Segment]:
    """Return each model's tokens. Padding belongs to the last segment."""
    if not plan.shares:
        return [parts[0].model.segment(plan.num_tokens + plan.padding)]
    return [
        parts[share.part].model.segment(
            share.num_tokens + (plan.padding if share is plan.shares[-1] else 0),
            parts[share.part].processing,
        )
        for share in plan.shares
    ]


def num_passes_of_all(own: int, device: torch.device) -> int:
    """Return the largest number of passes of any rank, as sharded weights are gathered together."""
    count = torch.tensor([own], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return int(count)
