"""The base model of a rank: loaded once, frozen, and lent to one trained model at a time.

A LoRA model adds its low-rank term through forward hooks on linear layers; a full fine-tune puts its own parameters
in the place of the base's. Either is bound by moving pointers, so switching tenants costs microseconds, and the base's
own weights never change: they stay the reference of every tenant.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from skyrl_actors.workers.packing import ATTENTION, Pass, packed_hidden

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj")
UNEMBED = "lm_head"


class BaseModel:
    def __init__(self, folder: str, dtype: torch.dtype, device: torch.device):
        self.module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
        self.module.to(device).train().requires_grad_(False)
        self.device = device
        self.config = self.module.config
        self.vocab_size = int(self.config.vocab_size)
        self.hidden_size = int(self.config.hidden_size)
        self.own: dict[str, nn.Parameter] = dict(self.module.named_parameters())  # tied names appear once
        self._sites = self._find_sites()
        self._bound: Mapping[str, nn.Parameter] = self.own
        self._low_rank: Mapping[str, nn.Parameter] | None = None
        self._scale = 1.0
        self.linears = self._hook_linears()

    @property
    def max_context_tokens(self) -> int:
        return int(self.config.max_position_embeddings)

    def _find_sites(self) -> dict[str, list[tuple[nn.Module, str]]]:
        names = {id(p): name for name, p in self.own.items()}
        sites: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self.own}
        for module in self.module.modules():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                sites[names[id(parameter)]].append((module, attribute))
        return sites

    def _hook_linears(self) -> dict[str, nn.Linear]:
        wanted = {*ATTENTION_LAYERS, *MLP_LAYERS, UNEMBED}
        linears = {
            name: layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, nn.Linear) and name.rsplit(".", 1)[-1] in wanted
        }
        for name, layer in linears.items():
            layer.register_forward_hook(self._low_rank_hook(name))
        return linears

    def _low_rank_hook(self, name: str) -> Any:
        key_a, key_b = f"{name}.lora_A", f"{name}.lora_B"

        def add(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if self._low_rank is None or key_a not in self._low_rank:
                return None
            x = args[0]
            a, b = self._low_rank[key_a].to(x.dtype), self._low_rank[key_b].to(x.dtype)
            return output + F.linear(F.linear(x, a), b) * self._scale

        return add

    def bind_lora(self, tensors: Mapping[str, nn.Parameter], scale: float) -> None:
        self._place(self.own)
        self._low_rank, self._scale = tensors, scale

    def bind_full(self, tensors: Mapping[str, nn.Parameter]) -> None:
        self._low_rank = None
        self._place(tensors)

    def release(self) -> None:
        """Back to the base's own weights."""
        self._low_rank = None
        self._place(self.own)

    def _place(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if parameters is self._bound:
            return
        for name, sites in self._sites.items():
            for module, attribute in sites:
                module._parameters[attribute] = parameters[name]
        self._bound = parameters

    def hidden(self, tokens: Tensor, plan: Pass) -> Tensor:
        return packed_hidden(self.module.model, tokens, plan)

    def own_weight(self, layer: str) -> nn.Parameter:
        """The base's own weight of a linear layer, whatever is bound; a tied one is the weight that it shares."""
        module = self.linears[layer]
        return next(self.own[name] for name, sites in self._sites.items() if (module, "weight") in sites)

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.lm_head(hidden)

    def move(self, device: torch.device) -> None:
        for parameter in self.own.values():
            parameter.data = parameter.data.to(device)
