"""A frozen base model that a rank holds whole, for many adapters or one full fine-tune at a time.

A full fine-tune replaces the parameters of the base by its own. This moves pointers, so that a
switch takes microseconds. The weights of the base never change; they stay the reference of every
tenant.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, modeling_utils

from skyrl_actors.transport.device_memory import placed
from skyrl_actors.workers.adapter_terms import TOWER
from skyrl_actors.workers.auto_classes import attention_for, auto_class
from skyrl_actors.workers.base_files import quantization_of
from skyrl_actors.workers.buffers import fill_buffers, stored_buffers
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.meta_model import own_names, shell, weights_of
from skyrl_actors.workers.network import Network
from skyrl_actors.workers.published_names import StoredForm
from skyrl_actors.workers.tensor_files import whole


@contextmanager
def separate_blocks() -> Iterator[None]:
    """Keep transformers from allocating one block of GPU memory for all weights that it loads.

    When the weights leave the device, one other tensor in that block would keep all of it from the
    engines.
    """
    library: Any = modeling_utils
    warmup = library.caching_allocator_warmup
    library.caching_allocator_warmup = lambda *_, **__: None
    try:
        yield
    finally:
        library.caching_allocator_warmup = warmup


def _loaded(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    # With a device map, each tensor goes from its file to the device: the host never holds all.
    config = AutoConfig.from_pretrained(folder)
    with separate_blocks():
        return auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention_for(config),
            device_map=None if device.type == "cpu" else {"": device},
        )


def _dequantized(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load weights from quantized files, tensor by tensor. Transformers would keep some of them."""
    module = shell(folder, dtype)
    shapes = {n: tuple(t.shape) for n, t in (own_names(module) | stored_buffers(module)).items()}
    with weights_of(folder, dtype, StoredForm(module), shapes) as source, torch.no_grad():
        fill_buffers(module, source)
        for name, parameter in own_names(module).items():
            owner, _, leaf = name.rpartition(".")
            value = whole(source, name).to(device, parameter.dtype)
            module.get_submodule(owner)._parameters[leaf] = nn.Parameter(value)
    module.tie_weights()
    return module.to(device)


class BaseModel(Network):
    """The frozen base model, whose parameters a full fine-tune can replace."""

    def __init__(
        self,
        folder: str,
        dtype: torch.dtype,
        device: torch.device,
        activations: Activations = "keep",
    ):
        quantized = quantization_of(Path(folder)) is not None
        module = (_dequantized if quantized else _loaded)(folder, dtype, device)
        module.requires_grad_(False)
        super().__init__(module, device, activations)
        self.own: dict[str, nn.Parameter] = dict(self.module.named_parameters())  # tied names once
        self._sites = self._find_sites()
        self._bound: Mapping[str, nn.Parameter] = self.own
        self._on_host: dict[str, Tensor] = {}  # pinned, made when the weights first leave

    def _find_sites(self) -> dict[str, list[tuple[nn.Module, str]]]:
        names = {id(p): name for name, p in self.own.items()}
        sites: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.own}
        for module in self.module.modules():
            for attribute, parameter in module.named_parameters(
                recurse=False, remove_duplicate=False
            ):
                sites[names[id(parameter)]].append((module, attribute))
        return sites

    @property
    def tower_weights(self) -> dict[str, nn.Parameter]:
        """The base's own, also while a full fine-tune with a trained tower is placed."""
        return {name: weight for name, weight in self.own.items() if name.startswith(TOWER)}

    def place(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Compute with these parameters instead of the base's own. Missing ones stay the base's."""
        if parameters is self._bound:
            return
        for name, sites in self._sites.items():
            for module, attribute in sites:
                module._parameters[attribute] = parameters.get(name, self.own[name])
        self._bound = parameters

    def release(self) -> None:
        """Compute with the base's own weights again."""
        self.place(self.own)

    def move(self, device: torch.device) -> None:
        """Move the base's weights. They never change, so one host copy serves every phase."""
        if self.tower is not None:
            self.tower.forget()
        for name, parameter in self.own.items():
            if device.type == "cpu":
                if name not in self._on_host:
                    self._on_host[name] = placed(parameter.data, device)
                parameter.data = self._on_host[name]
            else:
                parameter.data = placed(parameter.data, device)
