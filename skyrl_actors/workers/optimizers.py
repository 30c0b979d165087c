"""Optimizers over one flat float32 vector of weights.

AdamW is one kernel over the whole vector. Muon (Jordan et al., 2024; `torch.optim.Muon`)
orthogonalises the momentum of each hidden matrix separately. Its rate is adjusted to AdamW's (Liu
et al., 2025, arXiv:2502.16982). AdamW trains the embeddings, heads and vectors. In a call, beta1 is
the momentum of Muon; beta2 and eps apply to AdamW.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from skyrl_actors.messages.model import AdamParams, OptimizerName
from skyrl_actors.transport.device_memory import placed
from skyrl_actors.workers.adamw8bit import FlatAdamW8bit
from skyrl_actors.workers.state import MOMENTS, Kind, adam_group

NOT_HIDDEN = ("embed_tokens", "lm_head", "value_head")


class FlatOptimizer(Protocol):
    """An optimizer over one flat vector of weights [P]."""

    def step(self, gradients: Tensor, adam: AdamParams) -> None: ...

    @property
    def num_steps(self) -> int: ...

    def moment(self, kind: Kind) -> Tensor:
        """Return one of `moments`, [P]."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """Return exp_avg [P], exp_avg_sq [P] and step []; nothing before the first step.

        The momentum of Muon is returned as exp_avg.
        """
        ...

    def load(self, moments: Mapping[str, Tensor]) -> None: ...

    def point_at(self, weights: Tensor) -> None:
        """Use this vector, because the weights have moved."""
        ...

    def move(self, device: torch.device) -> None:
        """Move the moments."""
        ...


def make(
    name: OptimizerName, weights: Tensor, spans: Mapping[str, tuple[int, tuple[int, ...]]]
) -> FlatOptimizer:
    """Create an optimizer. `spans` gives the offset in `weights` and the shape of each tensor."""
    match name:
        case "adamw":
            return FlatAdamW(weights)
        case "adamw8bit":
            return FlatAdamW8bit(weights)
        case "muon":
            return FlatMuon(weights, spans)


class FlatAdamW:
    """torch's fused AdamW over the whole vector."""

    def __init__(self, weights: Tensor):
        self._parameter = nn.Parameter(weights)
        self._inner = torch.optim.AdamW([self._parameter], lr=0.0, fused=True)

    def step(self, gradients: Tensor, adam: AdamParams) -> None:
        self._inner.param_groups[0].update(adam_group(adam))
        self._parameter.grad = gradients
        self._inner.step()
        self._parameter.grad = None  # the owner moves it to other memory

    @property
    def num_steps(self) -> int:
        state = self._inner.state.get(self._parameter)
        return int(state["step"]) if state else 0

    def moment(self, kind: Kind) -> Tensor:
        return self._inner.state[self._parameter][kind]

    def moments(self) -> dict[str, Tensor]:
        state = self._inner.state.get(self._parameter)
        return {} if not state else {key: state[key] for key in (*MOMENTS, "step")}

    def load(self, moments: Mapping[str, Tensor]) -> None:
        self._inner.state[self._parameter] = {
            **moments,
            "step": moments["step"].to(self._parameter.device),
        }

    def point_at(self, weights: Tensor) -> None:
        self._parameter.grad, self._parameter.data = None, weights

    def move(self, device: torch.device) -> None:
        for state in self._inner.state.values():
            state.update({key: placed(value, device) for key, value in state.items()})


class FlatMuon:
    """Muon for hidden matrices, AdamW for the other tensors."""

    def __init__(self, weights: Tensor, spans: Mapping[str, tuple[int, tuple[int, ...]]]):
        self._spans = [
            (start, shape, _is_hidden(name, shape)) for name, (start, shape) in spans.items()
        ]
        self._size = len(weights)
        self._parameters = [nn.Parameter(self._view(weights, i)) for i in range(len(self._spans))]
        hidden = [p for p, (_, _, muon) in zip(self._parameters, self._spans, strict=True) if muon]
        others = [
            p for p, (_, _, muon) in zip(self._parameters, self._spans, strict=True) if not muon
        ]
        self._muon = (
            torch.optim.Muon(hidden, lr=0.0, adjust_lr_fn="match_rms_adamw") if hidden else None
        )
        self._adamw = torch.optim.AdamW(others, lr=0.0, fused=True) if others else None
        self._steps = 0

    def _view(self, flat: Tensor, index: int) -> Tensor:
        start, shape, _ = self._spans[index]
        return flat[start : start + torch.Size(shape).numel()].view(shape)

    def step(self, gradients: Tensor, adam: AdamParams) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad = self._view(gradients, i)
        if self._muon is not None:
            own = {
                "lr": adam.learning_rate,
                "weight_decay": adam.weight_decay,
                "momentum": adam.beta1,
            }
            self._muon.param_groups[0].update(own)
            self._muon.step()
        if self._adamw is not None:
            self._adamw.param_groups[0].update(adam_group(adam))
            self._adamw.step()
        for parameter in self._parameters:
            parameter.grad = None  # the owner moves it to other memory
        self._steps += 1

    @property
    def num_steps(self) -> int:
        return self._steps

    def moment(self, kind: Kind) -> Tensor:
        return self.moments()[kind]

    def moments(self) -> dict[str, Tensor]:
        if not self._steps:
            return {}
        flat = {
            kind: torch.zeros(self._size, device=self._parameters[0].device) for kind in MOMENTS
        }
        for i, (parameter, (_, _, muon)) in enumerate(
            zip(self._parameters, self._spans, strict=True)
        ):
            state = self._state_of(parameter, muon)
            self._view(flat["exp_avg"], i).copy_(state["momentum_buffer" if muon else "exp_avg"])
            if not muon:
                self._view(flat["exp_avg_sq"], i).copy_(state["exp_avg_sq"])
        return {**flat, "step": torch.tensor(float(self._steps))}

    def _state_of(self, parameter: nn.Parameter, muon: bool) -> dict[str, Tensor]:
        inner = self._muon if muon else self._adamw
        assert inner is not None
        return inner.state[parameter]

    def load(self, moments: Mapping[str, Tensor]) -> None:
        self._steps = int(moments["step"])
        for i, (parameter, (_, _, muon)) in enumerate(
            zip(self._parameters, self._spans, strict=True)
        ):
            state = self._state_of(parameter, muon)
            if muon:
                state["momentum_buffer"] = self._view(moments["exp_avg"], i).clone()
            else:
                state |= {kind: self._view(moments[kind], i).clone() for kind in MOMENTS}
                state["step"] = moments["step"].to(parameter.device, copy=True)

    def point_at(self, weights: Tensor) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad, parameter.data = None, self._view(weights, i)

    def move(self, device: torch.device) -> None:
        for inner in (self._muon, self._adamw):
            for state in inner.state.values() if inner else ():
                state.update({key: placed(value, device) for key, value in state.items()})


def _is_hidden(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and not any(part in name for part in NOT_HIDDEN)
