"""The trained models of a rank: a LoRA adapter or a full fine-tune, policy or critic, over one base model."""

import math

import torch
from torch import Tensor

from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.model import LoraSpec, ModelSpec
from skyrl_actors.workers.base_model import ATTENTION_LAYERS, MLP_LAYERS, UNEMBED, BaseModel
from skyrl_actors.workers.flat import FlatState
from skyrl_actors.workers.logprobs import token_logprobs
from skyrl_actors.workers.packing import Pass

VALUE_WEIGHT, VALUE_BIAS = "value_head.weight", "value_head.bias"


class TrainedModel:
    """Its weights, gradients and optimizer (`state`), and how the base computes with them."""

    def __init__(self, spec: ModelSpec, base: BaseModel):
        self.spec = spec
        tensors = full_tensors(base) if spec.lora is None else lora_tensors(spec.lora, spec.seed, base)
        if spec.role == "critic":
            # Zero values at the start give no shock to the first advantages.
            tensors[VALUE_WEIGHT] = torch.zeros(1, base.hidden_size)
            tensors[VALUE_BIAS] = torch.zeros(1)
        self.state = FlatState(tensors, base.device)

    def bind(self, base: BaseModel) -> None:
        if self.spec.lora is None:
            base.bind_full(self.state.views)
        else:
            base.bind_lora(self.state.views, self.spec.lora.alpha / self.spec.lora.rank)

    def predict(self, base: BaseModel, tokens: Tensor, targets: Tensor | None, plan: Pass) -> Tensor:
        """[T] float32: logprobs of targets for a policy (of their shape), values for a critic. The model must be bound."""
        hidden = base.hidden(tokens, plan)
        if self.spec.role == "critic":
            weight, bias = self.state.views[VALUE_WEIGHT], self.state.views[VALUE_BIAS]
            return (hidden.to(weight.dtype) @ weight.t() + bias)[:, 0]
        assert targets is not None
        return token_logprobs(hidden, targets, base.head, base.vocab_size)


def full_tensors(base: BaseModel) -> dict[str, Tensor]:
    if next(iter(base.own.values())).dtype == torch.bfloat16:
        raise InvalidRequest("a full fine-tune needs dtype float32 in its group's config; with bfloat16 use a LoRA model")
    return {name: parameter.data for name, parameter in base.own.items()}


def lora_tensors(lora: LoraSpec, seed: int, base: BaseModel) -> dict[str, Tensor]:
    """A uniform in ±1/√fan_in (Kaiming with a = √5, as peft and nn.Linear), B zero, drawn layer by layer from `seed`."""
    layers = {
        *(ATTENTION_LAYERS if lora.train_attn else ()),
        *(MLP_LAYERS if lora.train_mlp else ()),
        *([UNEMBED] if lora.train_unembed else []),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, layer in base.linears.items():
        if name.rsplit(".", 1)[-1] not in layers:
            continue
        bound = 1 / math.sqrt(layer.in_features)
        tensors[f"{name}.lora_A"] = (torch.rand(lora.rank, layer.in_features, generator=generator) * 2 - 1) * bound
        tensors[f"{name}.lora_B"] = torch.zeros(layer.out_features, lora.rank)
    if not tensors:
        raise InvalidRequest("the LoRA spec trains nothing: set at least one of train_attn, train_mlp, train_unembed")
    return tensors
