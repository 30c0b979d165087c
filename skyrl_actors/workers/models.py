"""The trained models of a rank: LoRA adapters or full fine-tunes, policies or critics."""

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

from skyrl_actors.losses.processing import Processing
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.adapter_terms import TOWER, chosen
from skyrl_actors.workers.coverage import check_covered
from skyrl_actors.workers.network import (
    VALUE_BIAS,
    VALUE_WEIGHT,
    Network,
    Segment,
)
from skyrl_actors.workers.paging import Adapter
from skyrl_actors.workers.state import TrainState, is_whole
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

    @cached_property
    def trains_tower(self) -> bool:
        """Whether the weights of the vision tower are among the trained ones."""
        return any(name.startswith(TOWER) for name in self.state.shapes)

    def segment(self, num_tokens: int, processing: Processing | None = None) -> Segment:
        views = self.state.views if is_whole(self.state) else {}
        scale = self.spec.lora.alpha / self.spec.lora.rank if self.spec.lora else 1.0
        return Segment(num_tokens, views, scale, processing)


def adapters_of(models: Iterable[TrainedModel]) -> dict[str, Adapter]:
    """Return the adapters among these models, by model id."""
    return {
        model.spec.model_id: Adapter(model.state, model.spec.lora.rank)
        for model in models
        if model.spec.lora is not None and is_whole(model.state)
    }


def value_head_tensors(network: Network) -> dict[str, Tensor]:
    """Return a value head of zeros, because zero values do not disturb the first advantages."""
    return {VALUE_WEIGHT: torch.zeros(1, network.hidden_size), VALUE_BIAS: torch.zeros(1)}


def lora_tensors(lora: LoraSpec, seed: int, network: Network) -> dict[str, Tensor]:
    """Return the initial tensors of an adapter, drawn term by term from `seed`.

    A is uniform in ±1/√fan_in (Kaiming with a = √5, as in peft and nn.Linear), and B is zero.
    """
    check_covered(lora, network.module, network.terms)
    terms = chosen(network.terms, lora)
    network.stored_form.of_adapter(terms, lora.rank, lora.expert_layout)  # it can be saved
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for term in terms:
        first, second = term.shapes(lora.rank, lora.expert_layout)
        bound = 1 / math.sqrt(term.in_features)
        tensors[term.a] = (torch.rand(first, generator=generator) * 2 - 1) * bound
        tensors[term.b] = torch.zeros(second)
    return tensors
