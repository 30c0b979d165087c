"""Check that the programs compute what transformers computes, once for each base.

The base is refused unless log-probabilities of short rows, and the gradients of two adapters on
them, equal those of the torch network with the same weights. That network is proved by
`isolation.py` against transformers' own attention and output layer.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers import adapter_proof
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.isolation import prove_isolated
from skyrl_actors.workers.replay_proof import drawn_routes, prove_replay, replayed

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # one line at the start of a rank


def prove_equal(
    network: JaxNetwork,
    folder: str,
    dtype: torch.dtype,
    compares: bool = True,
    replays: bool = False,
) -> None:
    """Raise ConfigError unless a pass equals torch's. The base is loaded in torch for this.

    With `replays`, so must a pass that is computed by given experts. All ranks of a mesh compute in
    JAX. One of them compares.
    """
    began = time.perf_counter()
    call = _call_for(network)
    found = call.of(network)
    routes = drawn_routes(network.routed) if replays else None
    by_routes = None if routes is None else replayed(network, routes)
    if not compares:
        return
    torchs = BaseModel(folder, dtype, torch.device("cpu"))
    prove_isolated(torchs, dtype)
    logprobs, gradients = _differences(found, call.of(torchs))
    allowed = adapter_proof.ALLOWED[dtype]
    if not (logprobs <= allowed.logprobs and gradients <= allowed.gradients):
        raise ConfigError(
            f"{network.arch.name} cannot be trained by strategy jax: logprobs differ from "
            f"transformers by {logprobs:.2g} nats a token ({allowed.logprobs:g} is allowed), "
            f"gradients by {gradients:.2g} of their size ({allowed.gradients:g} is allowed); use "
            "strategy replica, fsdp2 or deepspeed"
        )
    if routes is not None and by_routes is not None:
        prove_replay(torchs)
        gap = float((by_routes - replayed(torchs, routes)).abs().mean())
        if not gap <= allowed.logprobs:
            raise ConfigError(
                f"router_replay=true, but strategy jax does not compute {network.arch.name} with "
                f"given experts as torch does: logprobs differ by {gap:.2g} nats a token "
                f"({allowed.logprobs:g} is allowed); set router_replay=false"
            )
    took = time.perf_counter() - began
    log.info("JAX computes %s as transformers does (checked in %.2f s)", network.arch.name, took)


Computed = tuple[Tensor, list[Tensor]]  # logprobs, and the gradients of both adapters


@dataclass(frozen=True, slots=True)
class _Call:
    """Short rows of two adapters."""

    adapters: Sequence[adapter_proof.Factors]
    tokens: Tensor
    targets: Tensor

    def of(self, network: JaxNetwork | BaseModel) -> Computed:
        rows = range(len(adapter_proof.LENGTHS))
        return adapter_proof.computed(
            network, self.adapters, (self.tokens, self.targets), rows, rows
        )


def _call_for(network: JaxNetwork) -> _Call:
    generator = torch.Generator().manual_seed(0)
    size = (sum(adapter_proof.LENGTHS),)
    tokens, targets = (
        torch.randint(network.vocab_size, size, generator=generator) for _ in range(2)
    )
    adapters = [adapter_proof.adapter_on(network, generator) for _ in range(2)]
    return _Call(adapters, tokens, targets)


def differences(network: JaxNetwork, torchs: BaseModel) -> tuple[float, float]:
    """Return the mean |Δ logprob| of the worst row, and |Δ| / |gradient| of the worse adapter."""
    call = _call_for(network)
    return _differences(call.of(network), call.of(torchs))


def _differences(found: Computed, wanted: Computed) -> tuple[float, float]:
    logprobs = (found[0] - wanted[0]).abs()
    pairs = zip(found[1], wanted[1], strict=True)
    return max(float(logprobs[span].mean()) for span in adapter_proof.SPANS), max(
        float((own - other).norm() / other.norm()) for own, other in pairs
    )
