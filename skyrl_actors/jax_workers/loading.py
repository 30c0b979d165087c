"""Load a base model, and for engines also adapters and later versions of all weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from skyrl_actors.config.strategies import JaxStrategy
from skyrl_actors.jax_workers.architecture import architecture_of
from skyrl_actors.jax_workers.arrays import Devices
from skyrl_actors.jax_workers.devices import cache_of, configure, device_for
from skyrl_actors.jax_workers.draws import LoadedAdapter
from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.jax_workers.proof import prove_equal
from skyrl_actors.jax_workers.weights import base_of
from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.model import ExpertLayout
from skyrl_actors.messages.weights import ADAPTER_FILE, TensorEntry, WeightManifest
from skyrl_actors.transport.streams import tensor_in
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.meta_model import own_names, shell, weights_of
from skyrl_actors.workers.published_names import Published, StoredForm
from skyrl_actors.workers.tensor_files import Shape, TensorFiles, whole


def load_network(
    folder: str,
    dtype: torch.dtype,
    activations: Activations,
    devices: Devices,
    cache: Path | None = None,
) -> JaxNetwork:
    """Return the base model, whose programs are kept in `cache`.

    Raises ConfigError for a family that has no description.
    """
    arch = architecture_of(folder)
    module = shell(folder, dtype)
    shapes = shapes_of(module)
    with weights_of(folder, dtype, StoredForm(module), shapes) as source:
        return JaxNetwork(
            module, arch, lambda name: whole(source, name), dtype, activations, devices, cache
        )


def shapes_of(module: torch.nn.Module) -> dict[str, Shape]:
    """Return the shapes of a model's weights."""
    return {name: tuple(weight.shape) for name, weight in own_names(module).items()}


def load_for_sampling(
    folder: str, dtype: str, kind: Literal["cpu", "gpu"], max_adapters: int
) -> JaxNetwork:
    """Return a base model for an engine, proved against transformers."""
    configure()
    own: torch.dtype = getattr(torch, dtype)
    network = load_network(folder, own, "keep", device_for(kind), cache_of(JaxStrategy()))
    network.max_adapters = max_adapters
    prove_equal(network, folder, own)
    return network


def read_adapter(network: JaxNetwork, folder: Path, layout: ExpertLayout) -> LoadedAdapter:
    """Read an adapter in peft's format. Raises InvalidRequest if it does not fit the model."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = int(config["r"])
    terms = list(network.terms.values())
    parts = network.stored_form.of_adapter(terms, rank, layout)
    shapes = {
        name: shape
        for term in terms
        for name, shape in zip((term.a, term.b), term.shapes(rank, layout), strict=True)
    }
    with TensorFiles(folder / ADAPTER_FILE) as files:
        found = Published(files, parts, shapes)
        if unknown := sorted(files.shapes.keys() - found.read):
            raise InvalidRequest(
                f"the adapter has {unknown[0]}, which this base model cannot take "
                f"({len(unknown)} such tensors)"
            )
        views = {name: whole(found, name).float().clone() for name in found.shapes}
    return LoadedAdapter(views, float(config["lora_alpha"]) / rank)


class _FlatFiles:
    """The tensors of a version's files, which are mapped."""

    def __init__(self, parts: Sequence[WeightManifest]):
        self._entries: dict[str, tuple[Tensor, TensorEntry]] = {}
        for part in parts:
            # A private mapping of a file that nothing writes; a shared one would create the file.
            buffer = torch.from_file(
                part.path, shared=False, size=part.num_bytes, dtype=torch.uint8
            )
            self._entries |= {entry.name: (buffer, entry) for entry in part.tensors}
        self.shapes = {name: entry.shape for name, (_, entry) in self._entries.items()}

    def range(self, name: str, start: int, stop: int) -> Tensor:
        return tensor_in(*self._entries[name]).reshape(-1)[start:stop]


def replace_weights(network: JaxNetwork, parts: Sequence[WeightManifest]) -> None:
    """Replace all weights by those of a version. Raises InternalError if one is missing."""
    files, shapes = _FlatFiles(parts), shapes_of(network.module)
    found = Published(files, network.stored_form.of_weights(shapes), shapes)
    if missing := sorted(shapes.keys() - found.shapes.keys()):
        raise InternalError(f"a weight update left out {missing[0]} ({len(missing)} such tensors)")
    network.base = base_of(
        network.names,
        list(shapes),
        lambda name: whole(found, name).clone(),
        network.dtype,
        network.devices,
    )
