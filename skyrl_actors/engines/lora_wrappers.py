"""vLLM's LoRA wrappers around the layers of a model.

Models find their layers by name when they load weights. A wrapper changes the names of the layers
inside it, so a load would fail or pass over them. An adapter finds the wrappers by name, and vLLM
ignores parts of it whose name no wrapper has.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

HEAD = "lm_head"
LARGEST_VOCABULARY = 258_048  # that vLLM 0.32 takes for an adapter on the output layer
PREFIX = "lora_base_layer_prefix"  # what experts add to names once they are wrapped


class Wrappers:
    """The wrappers of a model. Between `take_out` and `put_back`, the model has none."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Module]] = []
        self._prefixes: list[tuple[Any, str]] = []

    def take_out(self, model: nn.Module) -> None:
        for parent in list(model.modules()):
            if isinstance(parent, BaseLayerWithLoRA):
                continue
            for name, child in list(parent.named_children()):
                if isinstance(child, BaseLayerWithLoRA):
                    self._places.append((parent, name, child))
                    setattr(parent, name, child.base_layer)
        for module in model.modules():
            prefix = getattr(module, PREFIX, "")
            if prefix:
                self._prefixes.append((module, prefix))
                setattr(module, PREFIX, "")

    def put_back(self) -> None:
        for parent, name, child in self._places:
            setattr(parent, name, child)
        for module, prefix in self._prefixes:
            setattr(module, PREFIX, prefix)
        self._places, self._prefixes = [], []


class TiedHead(nn.Module):
    """The output layer of a model that computes logits with its embedding, and has no such layer.

    vLLM adds an adapter's part at the logits, and wraps them where it finds an output layer.
    """

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        self._of: tuple[Any] = (embedding,)  # in a tuple: its weight must not get a second name

    @property
    def weight(self) -> torch.Tensor:
        return self._of[0].weight

    @property
    def embedding_dim(self) -> int:
        return self._of[0].embedding_dim

    def get_sharded_to_full_mapping(self) -> list[int] | None:
        return self._of[0].get_sharded_to_full_mapping()


def admit_heads() -> None:
    """Make vLLM wrap the output layer of every class, with a vocabulary of any size.

    It can, but only some classes list the layer among those that adapters may name.
    """
    manager: Any = model_manager
    listed: Callable[[nn.Module], list[str]] = manager.get_supported_lora_modules

    def with_head(model: nn.Module) -> list[str]:
        has_head = give_head(getattr(model, "language_model", model))  # beside a vision tower
        return [*{*listed(model), *([HEAD] if has_head else [])}]

    manager.get_supported_lora_modules = with_head
    wrapper: Any = LogitsProcessorWithLoRA
    create: Callable[..., None] = wrapper.create_lora_weights

    def create_any_size(self: Any, max_loras: int, *others: Any, **named: Any) -> None:
        vocabulary = self.base_layer.vocab_size
        self.base_layer.vocab_size = min(vocabulary, LARGEST_VOCABULARY)
        try:
            create(self, max_loras, *others, **named)
        finally:
            self.base_layer.vocab_size = vocabulary
        if vocabulary > LARGEST_VOCABULARY:
            slots, one, _, rank = self.lora_b_stacked.shape
            self.lora_b_stacked = self.lora_b_stacked.new_zeros(slots, one, vocabulary, rank)

    wrapper.create_lora_weights = create_any_size


def admit_experts_without_gate() -> None:
    """Make vLLM take adapters with shared factors on experts that have no third projection."""
    packed: Any = PackedLoRALayerWeights
    pack: Callable[..., Any] = packed.pack_moe_stacked

    def pack_stacked(loras: Sequence[Any], module_name: str) -> Any:
        first, second, third = loras
        if third is not None or first is None:
            return pack(loras, module_name)
        found = pack([first, second, first], module_name)
        found.scaling[2] = 1  # nothing reads the third pair; the first must be scaled once
        return found

    packed.pack_moe_stacked = pack_stacked


def give_head(model: Any) -> bool:
    """Return whether vLLM can wrap the output layer. Add one if the model uses its embedding."""
    if getattr(model, "logits_processor", None) is None:
        return False
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    if not hasattr(model, HEAD) and isinstance(embedding, VocabParallelEmbedding):
        model.lm_head = TiedHead(embedding)
    return hasattr(model, HEAD)


def adapts_head(manager: Any) -> bool:
    """Return whether an adapter on the output layer is computed."""
    return any(name.rpartition(".")[2] == HEAD for name in manager.modules)


def refuse_unused(manager: Any) -> None:
    """Make vLLM refuse an adapter with a part that no layer of the model would compute."""
    add = manager._add_adapter

    def checked(adapter: Any) -> None:
        add(adapter)
        if unused := sorted(adapter.loras.keys() - manager.modules.keys()):
            manager._registered_adapters.pop(adapter.id, None)
            raise ValueError(
                f"vLLM does not compute {len(unused)} part(s) of the adapter: {unused[0]}"
            )

    manager._add_adapter = checked
