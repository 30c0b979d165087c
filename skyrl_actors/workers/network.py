"""A causal language model for training: packed tokens in, predictions out, in one forward pass.

All work from the embedding to the log-probabilities happens inside the forward of one module. So an
engine that shards weights gathers them around it. Hooks on linear layers add the low-rank terms of
many models, segment by segment. Their tensors are not parameters of the module, so a sharding
engine never handles them.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.activation_offload import offloading
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.head import HeadSegment, score
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.sequence import SequenceGroup

ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
MLP_LAYERS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2")
UNEMBED = "lm_head"
UNEMBED_WEIGHT = f"{UNEMBED}.weight"
VALUE_WEIGHT, VALUE_BIAS = "value_head.weight", "value_head.bias"
NOT_PLAIN = ("final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale")


@dataclass(frozen=True)
class Segment:
    """Adjacent tokens of one model, and the model's own tensors (low-rank terms, a value head)."""

    num_tokens: int
    views: Mapping[str, Tensor]
    scale: float


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """The inputs of one pass: [T] tokens of this rank; `blocks` cover the whole sequence group."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, index of each token in its row
    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]  # of this rank's tokens
    targets: Tensor | None  # [T] or [T, K] int64; None: compute values
    counted: Tensor | None  # [T] bool: where a loss can have a gradient; None: everywhere
    entropy_gradient: bool = False


class ScoringHead(nn.Linear):
    """An output layer whose forward passes its weight to a function.

    Inside the forward, a sharding engine has gathered the whole weight.
    """

    def forward(self, input: Tensor | None, compute: Callable[[Tensor], Any] | None = None) -> Any:
        if compute is not None:
            return compute(self.weight)
        assert input is not None
        return super().forward(input)


class Whole(nn.Module):
    """The module whose forward sharding engines wrap."""

    def __init__(self, causal_lm: nn.Module, value_head: nn.Linear | None):
        super().__init__()
        self.causal_lm = causal_lm
        if value_head is not None:
            self.value_head = value_head

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class Network:
    """A causal language model with low-rank terms of many models."""

    def __init__(
        self,
        module: Any,
        device: torch.device,
        activations: Activations,
        value_head: nn.Linear | None = None,
    ):
        check_plain(module)
        self.module = module
        self.device = device
        self.config = module.config
        self.vocab_size = int(self.config.vocab_size)
        self.hidden_size = int(self.config.hidden_size)
        self.activations: Activations = activations
        self.sequence: SequenceGroup | None = None
        self.score_uncounted = True
        # On all ranks, whatever adapters their rows have, because backward passes meet in
        # collectives.
        self.same_graph = False
        self.whole = Whole(module, value_head)
        self.entry: Callable[..., Any] = self.whole  # a sharding engine can replace it
        self._segments: tuple[Segment, ...] = ()
        module.lm_head.__class__ = ScoringHead
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                # Without dropout, the gradient belongs to the log-probabilities that were returned.
                layer.p = 0.0
        if activations == "recompute":
            module.gradient_checkpointing_enable({"use_reentrant": False})
        module.train()
        self.linears = self._hook_linears()

    @property
    def max_context_tokens(self) -> int:
        return int(self.config.max_position_embeddings)

    def _hook_linears(self) -> dict[str, nn.Linear]:
        wanted = {*ATTENTION_LAYERS, *MLP_LAYERS, UNEMBED}
        linears = {
            name: layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, nn.Linear) and name.rsplit(".", 1)[-1] in wanted
        }
        for name, layer in linears.items():
            if name != UNEMBED:
                layer.register_forward_hook(
                    partial(self._add_low_rank, f"{name}.lora_A", f"{name}.lora_B")
                )
        return linears

    def _add_low_rank(
        self, key_a: str, key_b: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        segments = self._segments
        if not any(key_a in segment.views for segment in segments):
            return None
        x = args[0]  # [1, T, in]
        pieces = (
            x.split([segment.num_tokens for segment in segments], dim=-2)
            if len(segments) > 1
            else (x,)
        )
        terms = []
        for segment, piece in zip(segments, pieces, strict=True):
            if key_a in segment.views:
                a, b = segment.views[key_a].to(x.dtype), segment.views[key_b].to(x.dtype)
                terms.append(F.linear(F.linear(piece, a), b) * segment.scale)
            else:
                terms.append(output.new_zeros(*piece.shape[:-1], output.size(-1)))
        return output + (torch.cat(terms, dim=-2) if len(terms) > 1 else terms[0])

    def predict(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        """Return float32 logprobs of the targets and entropies [T], or values [T] and None."""
        return self.entry(partial(self._predict, inputs))

    def in_use(self, segments: tuple[Segment, ...]) -> AbstractContextManager[None]:
        """Use these segments from the forward to the end of the backward pass.

        The backward pass can compute parts of the forward again.
        """
        return _InUse(self, segments)

    def end_pass(self) -> None:
        """Clean up after a pass, also after a forward-only or a failed pass.

        Weights gathered from shards are dropped here, because the weights can change before the
        next pass.
        """

    def _predict(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        with offloading(self.device) if self.activations == "offload" else nullcontext():
            given = (
                {"inputs_embeds": self._embedded(inputs.tokens)}
                if self.same_graph
                else {"input_ids": inputs.tokens[None]}
            )
            output = self.module.model(
                **given,
                position_ids=inputs.positions[None],
                attention_mask=None,
                use_cache=False,
                packed_blocks=inputs.blocks,
                sequence_group=self.sequence,
            )
            hidden = output.last_hidden_state[0]  # [T, H]
            if inputs.targets is None:
                return self._values(hidden), None
            segments = [
                HeadSegment(
                    num_tokens=s.num_tokens,
                    a=s.views.get(f"{UNEMBED}.lora_A"),
                    b=s.views.get(f"{UNEMBED}.lora_B"),
                    scale=s.scale,
                )
                for s in inputs.segments
            ]

            def compute(weight: Tensor) -> tuple[Tensor, Tensor]:
                assert inputs.targets is not None
                return score(
                    hidden,
                    weight,
                    inputs.targets,
                    segments,
                    inputs.counted,
                    inputs.entropy_gradient,
                    self.score_uncounted,
                )

            return self.module.lm_head(None, compute)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return embeddings [1, T, H] that require a gradient, so that every layer has one."""
        embedded = self.module.get_input_embeddings()(tokens[None])
        return (
            embedded.requires_grad_()
            if torch.is_grad_enabled() and not embedded.requires_grad
            else embedded
        )

    def _values(self, hidden: Tensor) -> Tensor:
        if hasattr(self.whole, "value_head"):
            return (
                self.whole.value_head(hidden.to(self.whole.value_head.weight.dtype))[:, 0]
                .float()
                .clone()
            )
        values = []
        for segment, piece in zip(
            self._segments, hidden.split([s.num_tokens for s in self._segments]), strict=True
        ):
            weight, bias = segment.views[VALUE_WEIGHT], segment.views[VALUE_BIAS]
            values.append((piece.to(weight.dtype) @ weight.t() + bias)[:, 0])
        return torch.cat(values).float()


class _InUse(AbstractContextManager[None]):
    def __init__(self, network: Network, segments: tuple[Segment, ...]):
        self._network, self._set = network, segments

    def __enter__(self) -> None:
        self._network._segments = self._set

    def __exit__(self, *_: object) -> None:
        self._network._segments = ()
        self._network.end_pass()


def check_plain(module: Any) -> None:
    """Raise ConfigError unless the logits are one linear layer over the last hidden state."""
    head = getattr(module, UNEMBED, None)
    odd = [name for name in NOT_PLAIN if getattr(module.config, name, None) not in (None, 1, 1.0)]
    if not isinstance(head, nn.Linear) or head.bias is not None or odd:
        why = odd[0] if odd else "its output layer"
        raise ConfigError(f"{type(module).__name__} cannot be trained here: {why} is not supported")
