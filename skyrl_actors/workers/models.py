"""The trained models of a rank: LoRA adapters or full fine-tunes, policies or critics."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.coverage import check_covered
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.network import (
    ATTENTION_LAYERS,
    MLP_LAYERS,
    UNEMBED,
    VALUE_BIAS,
    VALUE_WEIGHT,
    Network,
    Segment,
)
from skyrl_actors.workers.state import TrainState
from skyrl_actors.workers.versions import LiveVersions


class TrainedModel:
    """A trained model: its state (weights, gradients, optimizer) and its network.

    With `shares_network`, its tensors are passed with the rows, and models of one network can share
    a pass.
    """

    def __init__(self, spec: ModelSpec, network: Network, state: TrainState):
        self.spec = spec
        self.network = network
        self.state = state
        self.versions = LiveVersions()

    @property
    def shares_network(self) -> bool:
        return self.spec.lora is not None

    def segment(self, num_tokens: int) -> Segment:
        views = self.state.views if isinstance(self.state, FlatState) else {}
        scale = self.spec.lora.alpha / self.spec.lora.rank if self.spec.lora else 1.0
        return Segment(num_tokens, views, scale)


def adapter_states(models: Iterable[TrainedModel]) -> dict[str, FlatState]:
    """Return the states of the adapters among these models, by model id."""
    return {
        model.spec.model_id: model.state
        for model in models
        if model.shares_network and isinstance(model.state, FlatState)
    }


def value_head_tensors(network: Network) -> dict[str, Tensor]:
    """Return a value head of zeros, because zero values do not disturb the first advantages."""
    return {VALUE_WEIGHT: torch.zeros(1, network.hidden_size), VALUE_BIAS: torch.zeros(1)}


def lora_tensors(lora: LoraSpec, seed: int, network: Network) -> dict[str, Tensor]:
    """Return the initial tensors of an adapter, drawn layer by layer from `seed`.

    A is uniform in ±1/√fan_in (Kaiming with a = √5, as in peft and nn.Linear), and B is zero.
    """
    layers = {
        *(ATTENTION_LAYERS if lora.train_attn else ()),
        *(MLP_LAYERS if lora.train_mlp else ()),
        *([UNEMBED] if lora.train_unembed else []),
    }
    check_covered(lora, network.module, network.linears)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, layer in network.linears.items():
        if name.rsplit(".", 1)[-1] not in layers:
            continue
        bound = 1 / math.sqrt(layer.in_features)
        tensors[f"{name}.lora_A"] = (
            torch.rand(lora.rank, layer.in_features, generator=generator) * 2 - 1
        ) * bound
        tensors[f"{name}.lora_B"] = torch.zeros(layer.out_features, lora.rank)
    if not tensors:
        raise InvalidRequest(
            "the LoRA spec trains nothing: set at least one of train_attn, train_mlp, train_unembed"
        )
    for asked, names, flag in (
        (lora.train_attn, ATTENTION_LAYERS, "train_attn"),
        (lora.train_mlp, MLP_LAYERS, "train_mlp"),
    ):
        if asked and not any(name.rsplit(".", 2)[-2] in names for name in tensors):
            raise InvalidRequest(
                f"this base model has no linear layers for {flag}; set {flag}=false"
            )
    return tensors
