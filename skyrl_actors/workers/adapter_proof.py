"""Check that two models' adapters in one pass are computed as if each were alone, once for a base.

Rows of several models share passes, so a layer that mixed their low-rank terms would train each on
the other's weights without an error. Three short rows are computed together: two of one model, and
one of another that shares a block with the second. The base is refused by name unless both hold:

- The gradient of a model's rows by the other model's factors is exactly zero.
- Log-probabilities, and gradients by the own factors, equal those of each row in its own pass.

With it run whatever the trainer's config sets: recomputation, ranks that share rows, sharding.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.isolation import BUILT_OTHERWISE, past_the_engine
from skyrl_actors.workers.network import Network, PassInputs, Segment
from skyrl_actors.workers.packing import plan_passes

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # one line at the start of a rank

LENGTHS = (5, 9, 9)  # of the rows; the last two share a block
OWNERS = (0, 0, 1)  # the model of each row
SPANS = tuple(slice(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])) for i in range(len(LENGTHS)))
RANK, SCALE, SPREAD = 2, 1.0, 0.05  # of the adapters; SPREAD: standard deviation of B
Factors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class AdapterDifferences:
    """The largest difference, by kind."""

    leak: float  # largest |gradient| of a model's rows by the other model's factors
    logprobs: float  # mean |Δ logprob| of a row between together and alone, nats
    gradients: float  # |Δ| / |gradient| of a model's factors between together and alone


ALLOWED = {
    torch.float64: AdapterDifferences(leak=0, logprobs=1e-6, gradients=1e-6),
    torch.float32: AdapterDifferences(leak=0, logprobs=1e-3, gradients=1e-2),
    torch.bfloat16: AdapterDifferences(leak=0, logprobs=0.2, gradients=0.6),
}


def prove_adapters(network: Network, dtype: torch.dtype) -> None:
    """Raise ConfigError unless two models' rows in one pass are computed as if each were alone.

    Every rank of a sharded network takes part.
    """
    if not network.terms:
        return
    name, started = type(network.module).__name__, time.perf_counter()
    try:
        found, allowed = adapter_differences(network), ALLOWED[dtype]
    except BUILT_OTHERWISE as error:
        raise _refused(name, f"a pass raises {type(error).__name__}: {error}") from error
    faults = [
        f"{kind} {getattr(found, kind):.2g} ({getattr(allowed, kind):g} is allowed)"
        for kind in ("leak", "logprobs", "gradients")
        if not getattr(found, kind) <= getattr(allowed, kind)
    ]
    if faults:
        raise _refused(name, "; ".join(faults))
    took = time.perf_counter() - started
    log.info("%s computes adapters of two models apart (checked in %.2f s)", name, took)


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be trained here: rows of two adapters in one pass differ from each row "
        f"alone ({why}). Choose a base model of another family; docs/reference/models.md lists "
        "what can be trained"
    )


def adapter_differences(network: Network) -> AdapterDifferences:
    """Compute the differences between rows of two models together and each row alone."""
    generator = torch.Generator().manual_seed(0)
    size = (sum(LENGTHS),)
    tokens, targets = (
        torch.randint(network.vocab_size, size, generator=generator) for _ in range(2)
    )
    adapters = [adapter_on(network, generator) for _ in range(2)]

    def run(rows: Sequence[int], counted: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        return computed(network, adapters, (tokens, targets), rows, counted)

    every = range(len(LENGTHS))
    with past_the_engine(network):
        together = [run(every, [row for row in every if OWNERS[row] == owner]) for owner in (0, 1)]
        alone = [run([row], [row]) for row in every]
    logprobs = torch.cat([own for own, _ in alone])
    gaps = [(together[0][0][span] - logprobs[span]).abs().mean() for span in SPANS]
    leaks, gradients = [], []
    for owner, (_, found) in enumerate(together):
        leaks.append(found[1 - owner].abs().max())
        wanted = torch.stack([alone[row][1][owner] for row in every if OWNERS[row] == owner]).sum(0)
        gradients.append((found[owner] - wanted).norm() / wanted.norm())
    most = [float(torch.stack(numbers).max()) for numbers in (leaks, gaps, gradients)]
    return AdapterDifferences(leak=most[0], logprobs=most[1], gradients=most[2])


def adapter_on(network: Network, generator: torch.Generator) -> Factors:
    """Draw the factors of an adapter on every layer, with a gradient to add to."""
    factors: Factors = {}
    for term in network.terms.values():
        first, second = term.shapes(RANK, "shared_outer")
        spread = (term.in_features**-0.5, SPREAD)
        for name, shape, deviation in zip((term.a, term.b), (first, second), spread, strict=True):
            drawn = torch.randn(shape, generator=generator) * deviation
            factors[name] = drawn.to(network.device).requires_grad_()
            factors[name].grad = torch.zeros_like(factors[name])
    return factors


def computed(
    network: Network,
    adapters: Sequence[Factors],
    batch: tuple[Tensor, Tensor],
    rows: Sequence[int],
    counted: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """Compute rows in one pass. Return their logprobs, and both adapters' gradients, flat.

    The gradients are of the log-probabilities of the rows in `counted`.
    """
    lengths = [LENGTHS[row] for row in rows]
    (plan,) = plan_passes([(range(len(rows)), np.asarray(lengths))], sum(lengths))
    group = network.sequence
    plan = plan.padded_to(group.size if group else 1)
    mask = torch.cat([torch.full((LENGTHS[row],), float(row in counted)) for row in rows])
    tokens, targets = (torch.cat([x[SPANS[row]] for row in rows]) for x in batch)
    tokens, targets, mask = (F.pad(x, (0, plan.padding)) for x in (tokens, targets, mask))
    mine = group.stretch(len(tokens)) if group else slice(0, len(tokens))
    owners = [OWNERS[row] for row in rows for _ in range(LENGTHS[row])]
    owners += owners[-1:] * plan.padding
    segments = [Segment(len(list(own)), adapters[owner], SCALE) for owner, own in groupby(owners)]
    inputs = PassInputs(
        tokens=tokens[mine].to(network.device),
        positions=plan.positions()[mine].to(network.device),
        blocks=plan.blocks,
        segments=tuple(segments),
        targets=targets[mine].to(network.device),
        counted=None,
    )
    with network.in_use(inputs.segments), torch.enable_grad():
        logprobs, _ = network.predict(inputs)
        (logprobs * mask[mine].to(network.device)).sum().backward()
    logprobs = logprobs.detach().float()
    gathered = group.gathered(logprobs) if group else logprobs
    return gathered[: plan.num_tokens].cpu(), [_taken(network, each) for each in adapters]


def _taken(network: Network, factors: Factors) -> Tensor:
    """Return the gradient of an adapter, summed over ranks that share rows, and set it to zero."""
    gradients = [factor.grad for factor in factors.values() if factor.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    for gradient in gradients:
        gradient.zero_()
    if network.sequence is not None:
        dist.all_reduce(flat, group=network.sequence.ranks)
    return flat.cpu()
