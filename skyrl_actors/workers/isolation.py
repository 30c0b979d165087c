"""Proof that a packed pass computes each row as if the row were alone, run once for each network.

A trainer packs rows end to end. Its attention separates them. Whatever else a model does along the token axis does not:
recurrent state, convolutions, chunked attention, capped scores, sinks. Such a model trains without an error on wrong
numbers. So three short rows are computed before the first use, and the model is refused by name unless:

- no row depends on another: the gradient of its log-probabilities by another row's embeddings is exactly zero, and they
  stay when another row's tokens change;
- log-probabilities and gradients equal those of the row alone with transformers' own attention, up to rounding.

Sliding windows and attention chunks are made shorter than the rows meanwhile, on both sides, so that these rows meet them.
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
from skyrl_actors.workers.blocks import Block
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.packing import ATTENTION, plan_passes

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # ranks log warnings alone; this is one line at their start

LENGTHS = (5, 12, 12)  # of the rows; two of one length share a block, as in any pass
MIDDLE, OUTER = 1, (0, 2)
SPANS = tuple(slice(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS)))
SHORT_WINDOW = 4
WINDOWS = ("sliding_window", "attention_chunk_size")
OWN_ATTENTION = "eager"  # of transformers: computes caps, sinks, windows and chunks of every model
BUILT_OTHERWISE = (ConfigError, AttributeError, TypeError, ValueError, LookupError, NotImplementedError)

LogprobsAndGradient = tuple[Tensor, Tensor]  # [T], and [T, H] by the embeddings


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Those of the row that differs most."""

    leak: float  # largest |gradient| of a row's log-probabilities by another row's embeddings
    moved: float  # mean |Δ logprob| of a row when another row's tokens change
    logprobs: float  # mean |Δ logprob| between packed and alone, nats
    gradients: float  # |Δ| / |gradient| between packed and alone


# docs/models.md has what was measured. Right: float32 3e-6 nats and 6e-6 of the gradient at most; bfloat16 0.12 and 0.49, in a
# mixture whose routers tip over, else 0.034 and 0.1. Wrong without a leak (chunks, dropout): 0.086 and 0.78 at least.
ALLOWED = {
    torch.float64: Differences(leak=0, moved=1e-9, logprobs=1e-6, gradients=1e-6),
    torch.float32: Differences(leak=0, moved=1e-4, logprobs=1e-3, gradients=1e-2),
    torch.bfloat16: Differences(leak=0, moved=0.2, logprobs=0.2, gradients=0.6),
}


def prove_isolated(network: Network, dtype: torch.dtype) -> None:
    """Raise ConfigError when packed rows are not computed as each alone. Every rank of a sharded network takes part."""
    name, started = type(network.module).__name__, time.perf_counter()
    try:
        found = differences(network)
    except BUILT_OTHERWISE as error:
        raise _refused(name, f"a packed pass raises {type(error).__name__}: {error}") from error
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if dist.is_initialized():  # it may be of a collective, and no fault of the model
            raise RuntimeError(f"a packed pass of {name} failed: {error}") from error
        raise _refused(name, f"a packed pass raises {error}") from error
    if faults := faults_in(found, ALLOWED[dtype]):
        raise _refused(name, "; ".join(faults))
    took = time.perf_counter() - started
    log.info("%s computes packed rows as it does each alone (proved in %.2f s)", name, took)


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} can not be trained here: rows of one pass are not computed as each alone ({why}). Choose a base model in "
        "which only plain causal attention, full or with a sliding window, reads other tokens"
    )


def faults_in(found: Differences, allowed: Differences) -> list[str]:
    """What differs beyond what is allowed, in words. A number that is not finite is beyond it too."""
    texts = {
        "leak": "a row's logprobs have a gradient of {:.2g} by another row's tokens ({:g} is allowed)",
        "moved": "a row's logprobs change by {:.2g} nats a token with another row's tokens ({:g} is allowed)",
        "logprobs": "logprobs differ from the row alone by {:.2g} nats a token ({:g} is allowed)",
        "gradients": "gradients differ from the row alone by {:.2g} of their size ({:g} is allowed)",
    }
    pairs = {name: (getattr(found, name), getattr(allowed, name)) for name in texts}
    return [texts[name].format(*pair) for name, pair in pairs.items() if not pair[0] <= pair[1]]


def differences(network: Network) -> Differences:
    generator = torch.Generator().manual_seed(0)
    size = (sum(LENGTHS),)
    tokens, targets, others = (torch.randint(network.vocab_size, size, generator=generator) for _ in range(3))
    changed = tokens.clone()
    changed[SPANS[MIDDLE]] = others[SPANS[MIDDLE]]
    with _short_windows(network.module), _past_the_engine(network):
        # One backward for each pass: engines that shard weights do not take a second one.
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


def _packed(network: Network, tokens: Tensor, targets: Tensor, rows: tuple[int, ...]) -> LogprobsAndGradient:
    """All rows in one pass, with the gradient of the log-probabilities of `rows` alone."""
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
    """Each row in a pass of its own, by transformers' attention; in a sequence group whole on each rank."""
    found = []
    with _own_attention(network):
        for length, span in zip(LENGTHS, SPANS, strict=True):
            row = (tokens[span], torch.arange(length), targets[span], torch.ones(length))
            block = Block(0, 1, length)
            found.append(_computed(network, [x.to(network.device) for x in row], (block,)))
    logprobs, gradients = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(gradients)


def _computed(network: Network, row: list[Tensor], blocks: tuple[Block, ...]) -> LogprobsAndGradient:
    tokens, positions, targets, counted = row
    segments = (Segment(len(tokens), {}, 1.0),)
    inputs = PassInputs(tokens, positions, blocks, segments, targets, None)
    with network.in_use(segments), _embeddings(network) as seen, torch.enable_grad():
        logprobs, _ = network.predict(inputs)
        (gradient,) = torch.autograd.grad((logprobs * counted).sum(), seen)
    return logprobs.detach().float(), gradient[0].float()


@contextmanager
def _embeddings(network: Network) -> Iterator[list[Tensor]]:
    """What the embedding layer answers meanwhile, [1, T, H], as leaves that want a gradient."""
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
def _own_attention(network: Network) -> Iterator[None]:
    group, network.sequence = network.sequence, None
    network.module.set_attn_implementation(OWN_ATTENTION)
    try:
        yield
    finally:
        network.module.set_attn_implementation(ATTENTION)
        network.sequence = group


@contextmanager
def _past_the_engine(network: Network) -> Iterator[None]:
    """Call the module itself: DeepSpeed's engine would take the end of a backward for gradients to reduce."""
    entry, network.entry = network.entry, network.whole
    try:
        yield
    finally:
        network.entry = entry


@contextmanager
def _short_windows(module: Any) -> Iterator[None]:
    """Their lengths are attributes of configs, and of layers that copy them."""
    holders = {id(x): x for part in module.modules() for x in (part, getattr(part, "config", None))}
    lengths = [(holder, name, getattr(holder, name, None)) for holder in holders.values() for name in WINDOWS]
    longer = [entry for entry in lengths if isinstance(entry[2], int) and entry[2] > SHORT_WINDOW]
    for holder, name, _ in longer:
        setattr(holder, name, SHORT_WINDOW)
    try:
        yield
    finally:
        for holder, name, length in longer:
            setattr(holder, name, length)
