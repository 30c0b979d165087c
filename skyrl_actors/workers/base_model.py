"""A frozen base model that a rank holds whole, for many adapters or one full fine-tune at a time.

A full fine-tune replaces the parameters of the base by its own. This moves pointers, so that a
switch takes microseconds. The weights of the base never change; they stay the reference of every
tenant.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from skyrl_actors.transport.device_memory import placed
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.network import Network
from skyrl_actors.workers.packing import ATTENTION


class BaseModel(Network):
    """The frozen base model, whose parameters a full fine-tune can replace."""

    def __init__(
        self,
        folder: str,
        dtype: torch.dtype,
        device: torch.device,
        activations: Activations = "keep",
    ):
        module: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION
        )
        module.to(device).requires_grad_(False)
        super().__init__(module, device, activations)
        self.own: dict[str, nn.Parameter] = dict(self.module.named_parameters())  # tied names once
        self._sites = self._find_sites()
        self._bound: Mapping[str, nn.Parameter] = self.own

    def _find_sites(self) -> dict[str, list[tuple[nn.Module, str]]]:
        names = {id(p): name for name, p in self.own.items()}
        sites: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.own}
        for module in self.module.modules():
            for attribute, parameter in module.named_parameters(
                recurse=False, remove_duplicate=False
            ):
                sites[names[id(parameter)]].append((module, attribute))
        return sites

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
        for parameter in self.own.values():
            parameter.data = placed(parameter.data, device)
