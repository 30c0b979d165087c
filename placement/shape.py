"""The numbers of weights and activations of a causal language model, from its config.json.

This module is pure. It needs neither a download nor torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from placement.types import DoesNotFit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of gated blocks with grouped-query attention: Llama, Mistral, Qwen, Gemma.

    `experts` is above 1 for a mixture of experts.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of one expert in a mixture of experts
    vocab: int
    tied: bool
    experts: int = 1
    active_experts: int = 1

    @property
    def attention_parameters(self) -> int:
        """Parameters of q, k, v and o in one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of gate, up and down of every expert, and of the router, in one layer."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return 3 * self.hidden * self.intermediate * self.experts + router

    @property
    def num_parameters(self) -> int:
        words = self.vocab * self.hidden * (1 if self.tied else 2)
        norms = self.hidden * (2 * self.layers + 1) + 2 * self.head_dim * self.layers
        return words + norms + self.layers * (self.attention_parameters + self.mlp_parameters)

    def kv_bytes_per_token(
        self, number_bytes: int, tensor_parallel: int = 1, pipeline_parallel: int = 1
    ) -> int:
        """Return the bytes of keys and values of one token on one device."""
        heads, layers = -(-self.kv_heads // tensor_parallel), -(-self.layers // pipeline_parallel)
        return 2 * number_bytes * layers * heads * self.head_dim

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of one adapter on every linear layer and the head.

        Experts have no adapter.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (self.hidden + q) + 2 * (self.hidden + kv) + (q + self.hidden)
        mlp = 3 * (self.hidden + self.intermediate) if self.experts == 1 else 0
        return rank * (self.layers * (attention + mlp) + self.hidden + self.vocab)

    def layer_activation_bytes(self, number_bytes: int) -> int:
        """Return the bytes that one layer keeps for the backward pass of one token.

        Two norms keep their inputs, also in float32, and their outputs. Attention keeps q, k and v
        before and after position and norm, and its result, but no scores. The gated MLP keeps four
        vectors. An expert also keeps its input and output.
        """
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        routed = 2 * self.hidden if self.experts > 1 else 0
        numbers = (
            4 * self.hidden + 5 * (q + kv) + (4 * self.intermediate + routed) * self.active_experts
        )
        return numbers * number_bytes + 8 * self.hidden


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape for a parsed config.json.

    Raises:
        DoesNotFit: A needed key is missing or not a number.
    """
    text: Mapping[str, Any] = config.get("text_config", config)
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 1)
        intermediate = (
            text["moe_intermediate_size"]
            if experts > 1 and "moe_intermediate_size" in text
            else text["intermediate_size"]
        )
        return ModelShape(
            hidden=hidden,
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=int(intermediate),
            vocab=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            experts=experts,
            active_experts=int(text.get("num_experts_per_tok") or 1),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DoesNotFit(
            f"this config.json does not contain the size of its model ({error}); "
            "expected a causal language model's"
        ) from None
