"""Trained weights as one flat float32 vector on each rank, with gradients and AdamW moments.

One vector needs one all-reduce, one norm and one optimizer kernel, and its checkpoint is
independent of the number of ranks. The tensors of the module are leaf views of it, and autograd
accumulates into views of the gradient vector. With a lower compute precision, the module's tensors
are views of a copy, and their gradients are added to the float32 gradients after every pass.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from skyrl_actors.messages.model import AdamParams, OptimizerName
from skyrl_actors.transport.device_memory import placed
from skyrl_actors.workers import optimizers
from skyrl_actors.workers.optimizers import FlatOptimizer
from skyrl_actors.workers.sharded_files import Piece
from skyrl_actors.workers.state import (
    HOST,
    MOMENTS,
    Kind,
    check_names,
    check_norm,
    on_host,
    sum_of_squares,
)
from skyrl_actors.workers.tensor_files import Source, whole

Reduce = Callable[[Tensor], None]  # sums a vector over the ranks, in place


class FlatState:
    """Trained weights that every rank holds whole, as one vector: a `WholeState`.

    `tensors` gives names, shapes and initial values; they are copied. Passes compute with those
    named in `wide` in float32, and with the others in `compute_dtype`.
    """

    whole = True

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
        reduce: Reduce = lambda vector: None,
        writes: bool = True,
        optimizer: OptimizerName = "adamw",
        wide: Collection[str] = (),
    ):
        self.shapes = {name: tuple(t.shape) for name, t in tensors.items()}
        # [P]. Some tensors can be on the host, as a new value head is, and others on the device.
        self.weights = torch.cat(
            [t.detach().to(device, torch.float32).reshape(-1) for t in tensors.values()]
        )
        self.gradients: Tensor | None = None  # [P] float32, created at the first backward
        self.compute_dtype = compute_dtype
        self._lower = (
            self.weights.to(compute_dtype) if compute_dtype != torch.float32 else None
        )  # [P]
        self._lower_gradients: Tensor | None = None
        self._wide = frozenset(wide)
        self.views = {name: nn.Parameter(view) for name, view in self._computed().items()}
        self.optimizer: FlatOptimizer | None = None
        self._optimizer_name: OptimizerName = optimizer
        self.pending = False
        self._reduce = reduce
        self._writes = writes

    @property
    def _computed_with(self) -> Tensor:
        return self.weights if self._lower is None else self._lower

    def _computed(self) -> dict[str, Tensor]:
        """Return the tensors that passes compute with: in float32 those of `wide`."""
        return self._chosen(self._computed_with, self.weights)

    def _chosen(self, usual: Tensor, of_wide: Tensor) -> dict[str, Tensor]:
        whole = self.split(of_wide) if self._wide else {}
        return {
            name: whole[name] if name in self._wide else view
            for name, view in self.split(usual).items()
        }

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return named views of a vector with this layout."""
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
            if self._lower is not None:
                self._lower_gradients = torch.zeros_like(self._lower)
            self._attach_gradients()
        return self.gradients

    def begin(self) -> None:
        self.ensure_gradients()

    def _attach_gradients(self) -> None:
        """Let autograd add into views of the gradient vector, while both vectors share a device."""
        into = self.gradients if self._lower is None else self._lower_gradients
        if (
            into is not None
            and self.gradients is not None
            and into.device == self._computed_with.device
        ):
            for name, view in self._chosen(into, self.gradients).items():
                self.views[name].grad = view

    def _detach_gradients(self) -> None:
        for view in self.views.values():
            view.grad = None

    def backward(self, surrogate: Tensor) -> None:
        self.ensure_gradients()
        surrogate.backward()
        self.collect()

    def collect(self) -> None:
        """Add the gradients in lower precision to the float32 gradients, after a backward pass."""
        self.pending = True
        if self._lower_gradients is not None and self.gradients is not None:
            self.gradients.add_(self._lower_gradients)
            self._lower_gradients.zero_()

    def saved_gradients(self) -> Tensor | None:
        return self.gradients.clone() if self.gradients is not None and self.pending else None

    def live(self) -> Tensor:
        return self.weights

    def copied(self) -> dict[str, Tensor]:
        own = {"weights": self.weights, **self.optimizer_tensors()}
        return {name: on_host(tensor) for name, tensor in own.items()}

    def copied_gradients(self) -> Tensor | None:
        gradients = self.gradients
        return None if gradients is None or not bool(gradients.any()) else on_host(gradients)

    def add_gradients(self, gradients: Tensor) -> None:
        own = self.ensure_gradients()
        own.add_(gradients.to(own.device))
        self.pending = True

    def put_back(self, saved: Tensor | None) -> None:
        """Restore the gradients that `saved_gradients` returned."""
        self.drop_gradients()
        if saved is not None:
            self.ensure_gradients().copy_(saved)
            self.pending = True

    def step(self, adam: AdamParams) -> float:
        gradients = self.ensure_gradients()
        self._reduce(gradients)
        norm = float(sum_of_squares(gradients).sqrt())
        check_norm(norm, self, adam.grad_clip_norm)
        if adam.grad_clip_norm > 0 and norm > adam.grad_clip_norm:
            gradients.mul_(adam.grad_clip_norm / norm)
        self.ensure_optimizer().step(gradients, self._decayed(adam))
        increment_version(self.weights)  # fused kernels do not tell that they changed it
        self._refresh()
        self.drop_gradients()
        return norm

    def _decayed(self, adam: AdamParams) -> AdamParams:
        """Apply the decay of a step that leaves vectors out, and return what remains to be done.

        The optimizers see one vector of all weights. AdamW, too, decays before it adds the update.
        """
        if adam.decay_vectors or not adam.weight_decay:
            return adam
        for view in self.split(self.weights).values():
            if view.dim() > 1:
                view.mul_(1 - adam.learning_rate * adam.weight_decay)
        return replace(adam, weight_decay=0.0)

    def _refresh(self) -> None:
        if self._lower is not None:
            self._lower.copy_(self.weights)

    def ensure_optimizer(self) -> FlatOptimizer:
        if self.optimizer is None:
            starts = itertools.accumulate(
                (math.prod(shape) for shape in self.shapes.values()), initial=0
            )
            spans = {
                name: (start, shape)
                for (name, shape), start in zip(self.shapes.items(), starts, strict=False)
            }
            self.optimizer = optimizers.make(self._optimizer_name, self.weights, spans)
        return self.optimizer

    @property
    def num_steps(self) -> int:
        return self.optimizer.num_steps if self.optimizer else 0

    def tensors(
        self,
        kind: Kind,
        dtype: torch.dtype = torch.float32,
        device: torch.device = HOST,
        everywhere: bool = False,
    ) -> Iterator[tuple[str, Tensor | None]]:
        receives = self._writes or everywhere
        flat = self.weights if kind == "weights" else self.ensure_optimizer().moment(kind)
        for name, view in self.split(flat).items():
            yield name, view.detach().to(dtype).to(device) if receives else None

    def own_pieces(self, kind: Kind) -> Iterator[Piece]:
        for name, tensor in self.tensors(kind):
            if tensor is not None:
                yield name, 0, tensor

    def load(self, source: Source) -> None:
        check_names(self.shapes, source.shapes)
        with torch.no_grad():
            for name, view in self.split(self.weights).items():
                view.copy_(whole(source, name))
        self._refresh()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return exp_avg [P], exp_avg_sq [P] and step []; nothing before the first step."""
        return self.optimizer.moments() if self.optimizer else {}

    def load_moments(self, sources: Mapping[Kind, Source], num_steps: int) -> None:
        self.optimizer = None
        if not sources:
            return
        moments: dict[str, Tensor] = {}
        for kind in MOMENTS:
            check_names(self.shapes, sources[kind].shapes)
            moments[kind] = torch.empty_like(self.weights)
            for name, view in self.split(moments[kind]).items():
                view.copy_(whole(sources[kind], name))
        self.ensure_optimizer().load({**moments, "step": torch.tensor(float(num_steps))})

    def drop_gradients(self) -> None:
        self.pending = False
        for gradients in (self.gradients, self._lower_gradients):
            if gradients is not None:
                gradients.zero_()

    def free_empty_gradients(self) -> None:
        """Free the gradient vector if no gradients are pending. The next backward recreates it."""
        if not self.pending:
            self._detach_gradients()
            self.gradients = self._lower_gradients = None

    def close(self) -> None:
        self.optimizer = None

    def move(self, part: str, device: torch.device) -> None:
        """Move one part between host and device. Views point at the moved vector."""
        if part == "weights":
            self._detach_gradients()
            self.weights = placed(self.weights, device)
            if self._lower is not None:
                self._lower = placed(self._lower, device)
            for name, view in self._computed().items():
                self.views[name].data = view
            if self.optimizer:
                self.optimizer.point_at(self.weights)
            self._attach_gradients()
        elif part == "gradients" and self.gradients is not None:
            self._detach_gradients()
            self.gradients = placed(self.gradients, device)
            if self._lower_gradients is not None:
                self._lower_gradients = placed(self._lower_gradients, device)
            self._attach_gradients()
        elif part == "optimizer" and self.optimizer:
            self.optimizer.move(device)
