"""Check that a packed pass computes each row as if it were alone, once for each network.

A trainer packs rows end to end, and its attention separates them. Other operations along the token
axis can connect them: recurrent state, convolutions, masks. Such a model would train on wrong
numbers without an error, and so would one whose logits have an unknown form. So three short rows
are computed before the first use. The model is refused by name unless both conditions hold:

- No row depends on another. The gradient of its log-probabilities by another row's embeddings is
  exactly zero, and they stay the same when another row's tokens change.
- Log-probabilities and gradients equal those of the row alone by transformers' own attention and
  output layer, up to rounding.

During the check, sliding windows and attention chunks are shorter than the rows on both sides, so
that the rows exceed them.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.auto_classes import attention_for
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.packing import plan_passes

log = logging.getLogger(__name__)
# Ranks log only warnings. This logger adds one line at their start.
log.setLevel(logging.INFO)

LENGTHS = (5, 12, 12)  # of the rows; rows of equal length share a block, as in any pass
MIDDLE, OUTER = 1, (0, 2)
SPANS = tuple(slice(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS)))
SHORT_WINDOW = 4
WINDOWS = ("sliding_window", "attention_chunk_size")
# Transformers' own attention computes caps, sinks, windows and chunks of every model.
OWN_ATTENTION = "eager"
BUILT_OTHERWISE = (
    ConfigError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    NotImplementedError,
)

LogprobsAndGradient = tuple[Tensor, Tensor]  # [T], and [T, H] by the embeddings


@dataclass(frozen=True, kw_only=True)
class Differences:
    """The largest difference of any row, by kind."""

    leak: float  # largest |gradient| of a row's log-probabilities by another row's embeddings
    moved: float  # mean |Δ logprob| of a row when another row's tokens change
    logprobs: float  # mean |Δ logprob| between packed and alone, nats
    gradients: float  # |Δ| / |gradient| between packed and alone


# docs/reference/models.md has the measurements. Correct models: in float32 at most 3e-6 nats and
# 6e-6 of the gradient. In bfloat16 at most 0.12 and 0.49, for a mixture whose routing flips;
# otherwise 0.034 and 0.1. Wrong models without a leak (chunks, dropout): at least 0.086 and 0.78.
ALLOWED = {
    torch.float64: Differences(leak=0, moved=1e-9, logprobs=1e-6, gradients=1e-6),
    torch.float32: Differences(leak=0, moved=1e-4, logprobs=1e-3, gradients=1e-2),
    torch.bfloat16: Differences(leak=0, moved=0.2, logprobs=0.2, gradients=0.6),
}


def prove_isolated(network: Network, dtype: torch.dtype) -> None:
    """Raise ConfigError unless packed rows are computed as if each row were alone.

    Every rank of a sharded network takes part.
    """
    name, started = type(network.module).__name__, time.perf_counter()
    try:
        found = differences(network)
    except BUILT_OTHERWISE as error:
        raise _refused(name, f"a packed pass raises {type(error).__name__}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # The error can come from a collective, and then the model is not its cause.
        if dist.is_initialized():
            raise RuntimeError(f"a packed pass of {name} failed: {error}") from error
        raise _refused(name, f"a packed pass raises {error}") from error
    if faults := faults_in(found, ALLOWED[dtype]):
        raise _refused(name, "; ".join(faults))
    took = time.perf_counter() - started
    log.info("%s computes packed rows as if each were alone (checked in %.2f s)", name, took)


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be trained here: a packed pass does not compute each row as if it were "
        f"alone ({why}). Choose a base model of another family; docs/reference/models.md lists "
        "what can be trained"
    )


def faults_in(found: Differences, allowed: Differences) -> list[str]:
    """Describe each difference beyond its allowed value, or not finite."""
    texts = {
        "leak": "the logprobs of a row have a gradient of {:.2g} by another row's tokens "
        "({:g} is allowed)",
        "moved": "the logprobs of a row change by {:.2g} nats a token with another row's tokens "
        "({:g} is allowed)",
        "logprobs": "logprobs differ from the row alone by {:.2g} nats a token ({:g} is allowed)",
        "gradients": "gradients differ from the row alone by {:.2g} of their size "
        "({:g} is allowed)",
    }
    pairs = {name: (getattr(found, name), getattr(allowed, name)) for name in texts}
    return [texts[name].format(*pair) for name, pair in pairs.items() if not pair[0] <= pair[1]]


def differences(network: Network) -> Differences:
    """Compute the differences between packed rows and each row alone."""
    generator = torch.Generator().manual_seed(0)
    size = (sum(LENGTHS),)
    tokens, targets, others = (
        torch.randint(network.vocab_size, size, generator=generator) for _ in range(3)
    )
    changed = tokens.clone()
    changed[SPANS[MIDDLE]] = others[SPANS[MIDDLE]]
    with _short_windows(network.module), past_the_engine(network):
        # One backward for each pass, because engines that shard weights do not support a second
        # one.
        middle = _packed(network, tokens, targets, (MIDDLE,))
        outer = _packed(network, changed, targets, OUTER)
        alone = _alone(network, tokens, targets)
    leaks, logprobs, gradients = [], [], []
    for row, span in enumerate(SPANS):
        own, without = (middle, outer) if row == MIDDLE else (outer, middle)
        leaks.append(without[1][span].abs().max())
        logprobs.append((own[0][span] - alone[0][span]).abs().mean())
        gradients.append((own[1][span] - alone[1][span]).norm() / alone[1][span].norm())
    moved = [(middle[0][SPANS[row]] - outer[0][SPANS[row]]).abs().mean() for row in OUTER]
    most = [float(torch.stack(numbers).max()) for numbers in (leaks, moved, logprobs, gradients)]
    return Differences(leak=most[0], moved=most[1], logprobs=most[2], gradients=most[3])


def _packed(
    network: Network, tokens: Tensor, targets: Tensor, rows: tuple[int, ...]
) -> LogprobsAndGradient:
    """Compute all rows in one pass, with the gradient of the log-probabilities of `rows` only."""
    (plan,) = plan_passes([(range(len(LENGTHS)), np.asarray(LENGTHS))], sum(LENGTHS))
    group = network.sequence
    plan = plan.padded_to(group.size if group else 1)
    counted = torch.zeros(len(tokens))
    for row in rows:
        counted[SPANS[row]] = 1
    tokens, targets, counted = (F.pad(x, (0, plan.padding)) for x in (tokens, targets, counted))
    stretch = group.stretch(len(tokens)) if group else slice(None)
    mine = [x[stretch].to(network.device) for x in (tokens, plan.positions(), targets, counted)]
    logprobs, gradient = _computed(network, mine, plan.blocks)
    if group:
        logprobs, gradient = group.gathered(logprobs), group.gathered(gradient)
    return logprobs[: plan.num_tokens], gradient[: plan.num_tokens]


def _alone(network: Network, tokens: Tensor, targets: Tensor) -> LogprobsAndGradient:
    """Compute each row in its own pass, from the logits of transformers' own forward.

    In a sequence group, every rank computes the whole row.
    """
    found = []
    with own_attention(network):
        for span in SPANS:
            row = (tokens[span].to(network.device), targets[span].to(network.device))
            found.append(_by_transformers(network, *row))
    logprobs, gradients = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(gradients)


def _by_transformers(network: Network, tokens: Tensor, targets: Tensor) -> LogprobsAndGradient:
    def logits() -> Tensor:
        return network.module(
            input_ids=tokens[None],
            position_ids=torch.arange(len(tokens), device=tokens.device)[None],
            use_cache=False,
        ).logits[0]

    with network.in_use(()), embeddings(network) as seen, torch.enable_grad():
        logprobs = network.entry(logits).float().log_softmax(-1)
        logprobs = logprobs.gather(1, targets[:, None])[:, 0]
        (gradient,) = torch.autograd.grad(logprobs.sum(), seen)
    return logprobs.detach(), gradient[0].float()


def _computed(
    network: Network, row: list[Tensor], blocks: tuple[Block, ...]
) -> LogprobsAndGradient:
    tokens, positions, targets, counted = row
    segments = (Segment(blocks[-1].stop, {}, 1.0),)
    inputs = PassInputs(
        tokens=tokens,
        positions=positions,
        blocks=blocks,
        segments=segments,
        targets=targets,
        counted=None,
    )
    with network.in_use(segments), embeddings(network) as seen, torch.enable_grad():
        logprobs, _ = network.predict(inputs)
        (gradient,) = torch.autograd.grad((logprobs * counted).sum(), seen)
    return logprobs.detach().float(), gradient[0].float()


@contextmanager
def embeddings(network: Network) -> Iterator[list[Tensor]]:
    """Capture outputs of the embedding layer, [1, T, H], as leaves that require a gradient."""
    seen: list[Tensor] = []

    def keep(layer: nn.Module, args: object, output: Tensor) -> Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1]

    hook = network.module.get_input_embeddings().register_forward_hook(keep)
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def own_attention(network: Network) -> Iterator[None]:
    """Compute with transformers' own attention, each rank whole rows."""
    group, network.sequence = network.sequence, None
    network.module.set_attn_implementation(attention_for(network.module.config, OWN_ATTENTION))
    try:
        yield
    finally:
        network.module.set_attn_implementation(attention_for(network.module.config))
        network.sequence = group


@contextmanager
def past_the_engine(network: Network) -> Iterator[None]:
    """Call the module itself, not the engine.

    After a backward pass, DeepSpeed's engine would try to reduce gradients.
    """
    entry, network.entry = network.entry, network.whole
    try:
        yield
    finally:
        network.entry = entry


@contextmanager
def _short_windows(module: Any) -> Iterator[None]:
    """Shorten windows and chunks. Their lengths are attributes of configs and of layers."""
    holders = {id(x): x for part in module.modules() for x in (part, getattr(part, "config", None))}
    lengths = [
        (holder, name, getattr(holder, name, None))
        for holder in holders.values()
        for name in WINDOWS
    ]
    longer = [entry for entry in lengths if isinstance(entry[2], int) and entry[2] > SHORT_WINDOW]
    for holder, name, _ in longer:
        setattr(holder, name, SHORT_WINDOW)
    try:
        yield
    finally:
        for holder, name, length in longer:
            setattr(holder, name, length)
