"""Trained weights as one flat float32 vector, with gradients and AdamW moments beside it.

One vector means: one all-reduce, one norm, one optimizer kernel, a checkpoint that is free of rank counts. The tensors a
module computes with are leaf views of it, and autograd accumulates into views of the gradient vector.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import AdamParams


class FlatState:
    """`tensors` gives names, shapes and starting values; they are copied."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device):
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        self.weights = torch.cat([t.detach().float().reshape(-1) for t in tensors.values()]).to(device)
        self.gradients: Tensor | None = None  # [P] float32, made at the first backward
        self.views = {name: nn.Parameter(view) for name, view in self.split(self.weights).items()}
        self.optimizer: torch.optim.AdamW | None = None

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a vector with this layout."""
        views, start = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            views[name] = flat[start : start + size].view(shape)
            start += size
        return views

    @property
    def num_parameters(self) -> int:
        return self.weights.numel()

    def ensure_gradients(self) -> Tensor:
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.weights)
            self._attach_gradients()
        return self.gradients

    def _attach_gradients(self) -> None:
        """Autograd adds into views of the gradient vector, while both vectors are in the same place."""
        if self.gradients is not None and self.gradients.device == self.weights.device:
            for name, view in self.split(self.gradients).items():
                self.views[name].grad = view

    def _detach_gradients(self) -> None:
        for view in self.views.values():
            view.grad = None

    def step(self, adam: AdamParams) -> float:
        """Clip to the global norm, apply AdamW, clear the gradients; returns the norm before clipping.

        A norm that is not finite changes no weight: the gradients are dropped and InvalidRequest is raised.
        """
        gradients = self.ensure_gradients()
        norm = float(torch.linalg.vector_norm(gradients, dtype=torch.float64))
        if not math.isfinite(norm):
            gradients.zero_()
            raise InvalidRequest(
                f"gradient norm is {norm}: the step was not applied and the gradients were dropped; check the data"
            )
        if adam.grad_clip_norm > 0 and norm > adam.grad_clip_norm:
            gradients.mul_(adam.grad_clip_norm / norm)
        optimizer = self.ensure_optimizer()
        optimizer.param_groups[0].update(
            lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps, weight_decay=adam.weight_decay
        )
        optimizer.param_groups[0]["params"][0].grad = gradients
        optimizer.step()
        gradients.zero_()
        return norm

    def ensure_optimizer(self) -> torch.optim.AdamW:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([nn.Parameter(self.weights)], lr=0.0, fused=True)
        return self.optimizer

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the weights. Raises InvalidRequest when names or shapes differ; then nothing was changed."""
        given = {name: tuple(t.shape) for name, t in tensors.items()}
        if given != self.shapes:
            odd = sorted({*given.items()} ^ {*self.shapes.items()})[:4]
            raise InvalidRequest(f"the checkpoint's tensors are not this model's: {odd}")
        for name, view in self.split(self.weights).items():
            view.copy_(tensors[name])

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """exp_avg [P], exp_avg_sq [P], step []; empty before the first step."""
        state = next(iter(self.optimizer.state.values()), None) if self.optimizer else None
        return {} if state is None else {key: state[key] for key in ("exp_avg", "exp_avg_sq", "step")}

    def load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        self.optimizer = None
        if not tensors:
            return
        if tensors["exp_avg"].shape != self.weights.shape:
            raise InvalidRequest("the checkpoint's optimizer state is not this model's")
        optimizer = self.ensure_optimizer()
        parameter = optimizer.param_groups[0]["params"][0]
        moments = {key: tensors[key].to(self.weights.device, copy=True) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": tensors["step"].clone().to(self.weights.device), **moments}

    def drop_gradients(self) -> None:
        if self.gradients is not None:
            self.gradients.zero_()

    def move(self, part: str, device: torch.device) -> None:
        """Move one part between host and device; views keep pointing at the moved vector."""
        if part == "weights":
            self._detach_gradients()
            self.weights = self.weights.to(device)
            for name, view in self.split(self.weights).items():
                self.views[name].data = view
            if self.optimizer:
                parameter = self.optimizer.param_groups[0]["params"][0]
                parameter.grad, parameter.data = None, self.weights
            self._attach_gradients()
        elif part == "gradients" and self.gradients is not None:
            self._detach_gradients()
            self.gradients = self.gradients.to(device)
            self._attach_gradients()
        elif part == "optimizer" and self.optimizer:
            for state in self.optimizer.state.values():
                state.update({key: value.to(device) for key, value in state.items()})
