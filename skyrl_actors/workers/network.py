"""A causal language model as training sees it: packed tokens in, predictions out, in one forward of one module.

Everything from the embedding to the log-probabilities happens inside that forward, so that an engine which shards the
weights gathers them around it. Low-rank terms of many models are added by hooks on linear layers, segment by segment; their
tensors are no parameters of the module, so a sharding engine never sees them.
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
    """Neighbouring tokens of one model, and the tensors that it brings along (low-rank terms, a value head)."""

    num_tokens: int
    views: Mapping[str, Tensor]
    scale: float


@dataclass(frozen=True)
class PassInputs:
    """One pass: [T] of this rank's tokens; `blocks` are of all tokens of the sequence group."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, of each token in its row
    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]  # of this rank's tokens
    targets: Tensor | None  # [T] or [T, K] int64; None: values are asked for
    counted: Tensor | None  # [T] bool: where a loss may have a gradient; None: everywhere
    entropy_gradient: bool = False


class ScoringHead(nn.Linear):
    """An output layer that lends its weight to whoever computes with it, in its forward: there a sharding engine has it whole."""

    def forward(self, input: Tensor | None, compute: Callable[[Tensor], Any] | None = None) -> Any:
        if compute is not None:
            return compute(self.weight)
        assert input is not None
        return super().forward(input)


class Whole(nn.Module):
    """The one module whose forward sharding engines see."""

    def __init__(self, causal_lm: nn.Module, value_head: nn.Linear | None):
        super().__init__()
        self.causal_lm = causal_lm
        if value_head is not None:
            self.value_head = value_head

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class Network:
    def __init__(self, module: Any, device: torch.device, activations: Activations, value_head: nn.Linear | None = None):
        check_plain(module)
        self.module = module
        self.device = device
        self.config = module.config
        self.vocab_size = int(self.config.vocab_size)
        self.hidden_size = int(self.config.hidden_size)
        self.activations: Activations = activations
        self.sequence: SequenceGroup | None = None
        self.score_uncounted = True
        self.same_graph = False  # on all ranks, whose backward passes meet in collectives, whatever adapters their rows have
        self.whole = Whole(module, value_head)
        self.entry: Callable[..., Any] = self.whole  # a sharding engine may put itself here
        self._segments: tuple[Segment, ...] = ()
        module.lm_head.__class__ = ScoringHead
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0  # a gradient is the gradient of the log-probabilities that were answered
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
                layer.register_forward_hook(partial(self._add_low_rank, f"{name}.lora_A", f"{name}.lora_B"))
        return linears

    def _add_low_rank(self, key_a: str, key_b: str, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        segments = self._segments
        if not any(key_a in segment.views for segment in segments):
            return None
        x = args[0]  # [1, T, in]
        pieces = x.split([segment.num_tokens for segment in segments], dim=-2) if len(segments) > 1 else (x,)
        terms = []
        for segment, piece in zip(segments, pieces, strict=True):
            if key_a in segment.views:
                a, b = segment.views[key_a].to(x.dtype), segment.views[key_b].to(x.dtype)
                terms.append(F.linear(F.linear(piece, a), b) * segment.scale)
            else:
                terms.append(output.new_zeros(*piece.shape[:-1], output.size(-1)))
        return output + (torch.cat(terms, dim=-2) if len(terms) > 1 else terms[0])

    def predict(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        """Logprobs of targets and entropies [T], or values [T] and None. float32."""
        return self.entry(partial(self._predict, inputs))

    def in_use(self, segments: tuple[Segment, ...]) -> AbstractContextManager[None]:
        """From the forward to the end of the backward pass, which may compute parts of the forward again."""
        return _InUse(self, segments)

    def end_pass(self) -> None:
        """Called after each pass, also after one without a backward and one that failed. The weights may change before the next
        pass, so whatever was gathered from shards is dropped here."""

    def _predict(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        with offloading(self.device) if self.activations == "offload" else nullcontext():
            given = {"inputs_embeds": self._embedded(inputs.tokens)} if self.same_graph else {"input_ids": inputs.tokens[None]}
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
                HeadSegment(s.num_tokens, s.views.get(f"{UNEMBED}.lora_A"), s.views.get(f"{UNEMBED}.lora_B"), s.scale)
                for s in inputs.segments
            ]

            def compute(weight: Tensor) -> tuple[Tensor, Tensor]:
                assert inputs.targets is not None
                return score(
                    hidden, weight, inputs.targets, segments, inputs.counted, inputs.entropy_gradient, self.score_uncounted
                )

            return self.module.lm_head(None, compute)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[1, T, H] that wants a gradient, so that every layer's backward runs."""
        embedded = self.module.get_input_embeddings()(tokens[None])
        return embedded.requires_grad_() if torch.is_grad_enabled() and not embedded.requires_grad else embedded

    def _values(self, hidden: Tensor) -> Tensor:
        if hasattr(self.whole, "value_head"):
            return self.whole.value_head(hidden.to(self.whole.value_head.weight.dtype))[:, 0].float().clone()
        values = []
        for segment, piece in zip(self._segments, hidden.split([s.num_tokens for s in self._segments]), strict=True):
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
    """Raises ConfigError for a model that computes its logits otherwise than by one linear layer over the last hidden state."""
    head = getattr(module, UNEMBED, None)
    odd = [name for name in NOT_PLAIN if getattr(module.config, name, None) not in (None, 1, 1.0)]
    if not isinstance(head, nn.Linear) or head.bias is not None or odd:
        why = odd[0] if odd else "its output layer"
        raise ConfigError(f"{type(module).__name__} can not be trained here: {why} is not supported")
