"""The same tiny model as a torch network and as a JAX network, and passes over both."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import torch
from torch import Tensor

from skyrl_actors.jax_workers.architecture import architecture_of
from skyrl_actors.jax_workers.arrays import OneDevice
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.losses.processing import Processing
from skyrl_actors.messages.model import ExpertLayout, LoraSpec
from skyrl_actors.workers.adapter_terms import chosen
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.meta_model import own_names, shell, weights_of
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.published_names import StoredForm
from skyrl_actors.workers.tensor_files import whole

CPU = torch.device("cpu")
Views = dict[str, Tensor]


def torch_network(base: Path) -> BaseModel:
    return BaseModel(str(base), torch.float32, CPU)


def jax_network(base: Path, activations: Activations = "keep") -> JaxNetwork:
    module = shell(str(base), torch.float32)
    shapes = {name: tuple(weight.shape) for name, weight in own_names(module).items()}
    with weights_of(str(base), torch.float32, StoredForm(module), shapes) as source:
        return JaxNetwork(
            module,
            architecture_of(str(base)),
            lambda name: whole(source, name),
            torch.float32,
            activations,
            OneDevice(jax.devices()[0]),
        )


def adapter(
    network: Network,
    rank: int,
    seed: int,
    layout: ExpertLayout = "shared_outer",
    **switches: bool,
) -> Views:
    generator = torch.Generator().manual_seed(seed)
    views: Views = {}
    for term in chosen(network.terms, LoraSpec(rank=rank, **switches)):
        for name, shape in zip((term.a, term.b), term.shapes(rank, layout), strict=True):
            views[name] = (torch.randn(shape, generator=generator) * 0.1).requires_grad_()
    return views


def inputs_for(
    rows: Sequence[tuple[int, Views]],
    targets: int | None = 0,
    processing: Mapping[int, Processing] | None = None,
    entropy_gradient: bool = False,
    vocab: int = 64,
) -> PassInputs:
    """Return the inputs for rows of (length, adapter). `targets` None: values."""
    generator = torch.Generator().manual_seed(1)
    blocks: list[Block] = []
    for length, _ in rows:
        blocks.append(Block(blocks[-1].stop if blocks else 0, 1, length))
    total = blocks[-1].stop
    shape = (total, targets) if targets else (total,)
    wanted = torch.randint(vocab, shape, generator=generator)
    return PassInputs(
        tokens=torch.randint(vocab, (total,), generator=generator),
        positions=torch.cat([torch.arange(length) for length, _ in rows]),
        blocks=tuple(blocks),
        segments=tuple(
            Segment(length, views, 0.7, (processing or {}).get(number))
            for number, (length, views) in enumerate(rows)
        ),
        targets=None if targets is None else wanted,
        counted=None,
        entropy_gradient=entropy_gradient,
    )


def computed(
    network: Network, inputs: PassInputs, entropy: float = 0.0
) -> tuple[Tensor, Tensor | None, list[Views]]:
    """Return predictions, entropies, and the gradients by each segment's tensors."""
    segments = [segment.views for segment in inputs.segments]
    for tensor in {id(t): t for views in segments for t in views.values()}.values():
        tensor.grad = torch.zeros_like(tensor)
    with network.in_use(inputs.segments), torch.enable_grad():
        found, entropies = network.predict(inputs)
        slopes = torch.linspace(-1, 2, found.numel()).view(found.shape)
        total = (found * slopes).sum()
        if entropy and entropies is not None:
            total = total + entropy * (entropies * torch.linspace(1, -1, len(entropies))).sum()
        total.backward()
    gradients = [
        {name: tensor.grad.clone() for name, tensor in views.items() if tensor.grad is not None}
        for views in segments
    ]
    return found.detach(), None if entropies is None else entropies.detach(), gradients


def largest_difference(ours: list[Views], theirs: list[Views]) -> float:
    """Return the largest |Δ| / |gradient| of any tensor; 0 where both are zero."""
    return max(
        float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-6))
        for one, other in zip(ours, theirs, strict=True)
        for name in other
    )
