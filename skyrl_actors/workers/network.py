"""A causal language model for training: packed tokens in, predictions out, in one forward pass.

All work from the embedding to the log-probabilities happens inside the forward of one module. So an
engine that shards weights gathers them around it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from skyrl_actors.losses.processing import Processing
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.activation_offload import offloading
from skyrl_actors.workers.adapter_terms import TOWER, UNEMBED, terms_of
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.expert_terms import attach_to_experts
from skyrl_actors.workers.head import HeadSegment, score
from skyrl_actors.workers.interface import Activations
from skyrl_actors.workers.low_rank import attach_to_linears
from skyrl_actors.workers.mixers import separate_rows
from skyrl_actors.workers.packing import Pass, plan_passes
from skyrl_actors.workers.published_names import StoredForm
from skyrl_actors.workers.routes import RoutedLayers
from skyrl_actors.workers.sequence import SequenceGroup
from skyrl_actors.workers.vision import Placed, tower_of

UNEMBED_WEIGHT = f"{UNEMBED}.weight"
VALUE_WEIGHT, VALUE_BIAS = "value_head.weight", "value_head.bias"
RANDOM = ("dropout", "jitter")  # in the names of numbers that make a pass random


@dataclass(frozen=True)
class Segment:
    """Adjacent tokens of one model, and the model's own tensors (low-rank terms, a value head)."""

    num_tokens: int
    views: Mapping[str, Tensor]
    scale: float
    processing: Processing | None = None  # of the logits


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """The inputs of one pass: [T] tokens of this rank; `blocks` cover the whole sequence group."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, index of each token in its row; of models with images [3, T]
    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]  # these, too, cover the whole sequence group
    targets: Tensor | None  # [T] or [T, K] int64; None: compute values
    counted: Tensor | None  # [T] bool: where a loss can have a gradient; None: everywhere
    entropy_gradient: bool = False
    routes: Tensor | None = None  # [T, layers · k], see Columns
    images: Placed | None = None


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
        self.config = module.config.get_text_config()
        self.tower = tower_of(module, device)
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
        self.segments: tuple[Segment, ...] = ()  # of the tokens that layers compute now
        self.all_segments: tuple[Segment, ...] = ()  # of the pass that runs, on all its ranks
        self.blocks: tuple[Block, ...] = ()  # of the pass that runs
        self.routes: Tensor | None = None  # of the pass that runs
        self._form = logits_form(self.config)
        module.lm_head.__class__ = ScoringHead
        make_deterministic(module)
        separate_rows(module, self)
        if activations == "recompute":
            module.gradient_checkpointing_enable({"use_reentrant": False})
        module.train()
        self.terms = terms_of(module)
        inside = [term for term in self.terms.values() if term.name != UNEMBED]
        attach_to_linears(module, inside, self)
        attach_to_experts(module, inside, self)
        self.routed = RoutedLayers(module, self)

    @property
    def max_context_tokens(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def layers(self) -> Any:
        """The decoder's layers."""
        model = self.module.model
        return (model if self.tower is None else model.language_model).layers

    @property
    def tower_weights(self) -> dict[str, nn.Parameter]:
        """The weights of the vision tower, which are never trained."""
        return {n: weight for n, weight in self.module.named_parameters() if n.startswith(TOWER)}

    @cached_property
    def stored_form(self) -> StoredForm:
        """The tensors of the family's files for each weight."""
        return StoredForm(self.module)

    def plan(self, parts: Sequence[tuple[Sequence[int], np.ndarray]], budget: int) -> list[Pass]:
        """Cut the rows of each part into passes; see `plan_passes`."""
        return plan_passes(parts, budget)

    def predict(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        """Return float32 logprobs of the targets and entropies [T], or values [T] and None."""
        return self.entry(partial(self._predict, inputs))

    def in_use(self, segments: tuple[Segment, ...]) -> AbstractContextManager[None]:
        """Use these segments of a pass from the forward to the end of the backward pass.

        The backward pass can compute parts of the forward again.
        """
        return _InUse(self, segments)

    @contextmanager
    def within(self, block: Block) -> Iterator[None]:
        """Compute the tokens of one block: the segments are those of its tokens."""
        outside, self.segments = (
            self.segments,
            segments_within(self.all_segments, block.start, block.stop),
        )
        try:
            yield
        finally:
            self.segments = outside

    def end_pass(self) -> None:
        """Clean up after a pass, also after a forward-only or a failed pass.

        Weights gathered from shards are dropped here, because the weights can change before the
        next pass.
        """

    def _predict(self, inputs: PassInputs) -> tuple[Tensor, Tensor | None]:
        self.blocks, self.routes = inputs.blocks, inputs.routes
        with offloading(self.device) if self.activations == "offload" else nullcontext():
            given: dict[str, Any] = {"position_ids": inputs.positions[None]}
            trunk = self.module.model
            if self.tower is not None:
                trunk = trunk.language_model
                given |= self._with_images(inputs)
            elif self.same_graph:
                given["inputs_embeds"] = self._embedded(inputs.tokens)
            else:
                given["input_ids"] = inputs.tokens[None]
            output = trunk(
                **given,
                attention_mask=None,
                use_cache=False,
                packed_blocks=inputs.blocks,
                sequence_group=self.sequence,
            )
            hidden = output.last_hidden_state[0]  # [T, H]
            if inputs.targets is None:
                return self._values(hidden), None
            if self._form.factor != 1.0:
                hidden = hidden * self._form.factor
            segments = [
                HeadSegment(
                    num_tokens=s.num_tokens,
                    a=s.views.get(f"{UNEMBED}.lora_A"),
                    b=s.views.get(f"{UNEMBED}.lora_B"),
                    scale=s.scale,
                    processing=s.processing,
                )
                for s in self.segments
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
                    self._form.softcap,
                )

            return self.module.lm_head(None, compute)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return embeddings [1, T, H]. With `same_graph` they require a gradient, as all layers."""
        embedded = self.module.get_input_embeddings()(tokens[None])
        needs = self.same_graph and torch.is_grad_enabled() and not embedded.requires_grad
        return embedded.requires_grad_() if needs else embedded

    def _with_images(self, inputs: PassInputs) -> dict[str, Any]:
        """Return the arguments of a model that takes images."""
        embedded, layers = self._embedded(inputs.tokens), dict[str, Any]()
        if inputs.images is not None:
            embedded, layers = inputs.images.into(embedded)
        positions = (
            inputs.positions if inputs.positions.ndim == 2 else inputs.positions.expand(3, -1)
        )
        return {"inputs_embeds": embedded, "position_ids": positions[:, None], **layers}

    def _values(self, hidden: Tensor) -> Tensor:
        """Return values [T] in float32: 8 bits of bfloat16 would round values near 20 to 1/8."""
        hidden = hidden.float()
        if hasattr(self.whole, "value_head"):
            return self.whole.value_head(hidden)[:, 0].clone()
        values = []
        for segment, piece in zip(
            self.segments, hidden.split([s.num_tokens for s in self.segments]), strict=True
        ):
            weight, bias = segment.views[VALUE_WEIGHT], segment.views[VALUE_BIAS]
            values.append((piece @ weight.float().t() + bias.float())[:, 0])
        return torch.cat(values)


class _InUse(AbstractContextManager[None]):
    def __init__(self, network: Network, segments: tuple[Segment, ...]):
        self._network, self._set = network, segments

    def __enter__(self) -> None:
        network, group = self._network, self._network.sequence
        network.all_segments = network.segments = self._set
        if group is not None and self._set:
            mine = group.stretch(sum(segment.num_tokens for segment in self._set))
            network.segments = segments_within(self._set, mine.start, mine.stop)

    def __exit__(self, *_: object) -> None:
        self._network.segments = self._network.all_segments = ()
        self._network.blocks, self._network.routes = (), None
        self._network.end_pass()


def check_plain(module: Any) -> None:
    """Raise ConfigError unless the logits are one linear layer over the last hidden state."""
    head = getattr(module, UNEMBED, None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ConfigError(
            f"{type(module).__name__} cannot be trained here: its output layer is not supported"
        )


@dataclass(frozen=True, kw_only=True)
class LogitsForm:
    """What a model does to the product of hidden state and output weight, x: softcap of factor·x.

    The start-up proof compares the result with the model's own logits, so a form that is not listed
    here is refused.
    """

    factor: float = 1.0
    softcap: float | None = None


def logits_form(config: Any) -> LogitsForm:
    """Return the form of a model's logits, by the names that transformers' configs have for it."""

    def number(name: str) -> float | None:
        return getattr(config, name, None)

    factor = (number("logit_scale") or 1.0) * (number("lm_head_multiplier") or 1.0)
    factor /= number("logits_scaling") or 1.0
    softcap = number("final_logit_softcapping") or number("logits_soft_cap")
    return LogitsForm(factor=factor, softcap=softcap)


def make_deterministic(module: nn.Module) -> None:
    """Turn dropout and jitter off in all layers, also where they are numbers and no layers.

    The gradient then belongs to the log-probabilities that were returned.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        for name, value in list(vars(layer).items()):
            if isinstance(value, float) and any(part in name for part in RANDOM):
                setattr(layer, name, 0.0)


def segments_within(segments: Sequence[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """Return the parts of adjacent segments between two tokens."""
    found: list[Segment] = []
    first = 0
    for segment in segments:
        overlap = min(stop, first + segment.num_tokens) - max(start, first)
        if overlap > 0:
            found.append(replace(segment, num_tokens=overlap))
        first += segment.num_tokens
    return tuple(found)
