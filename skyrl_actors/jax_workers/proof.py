"""Check that the programs compute what transformers computes, once for each base.

The base is refused unless log-probabilities of short rows, and the gradients of two adapters on
them, equal those of the torch network with the same weights. That network is proved by
`isolation.py` against transformers' own attention and output layer.
"""

import logging
import time

import torch
from torch import Tensor

from skyrl_actors.jax_workers.network import JaxNetwork
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers import adapter_proof
from skyrl_actors.workers.base_model import BaseModel
from skyrl_actors.workers.isolation import prove_isolated

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # one line at the start of a rank


def prove_equal(network: JaxNetwork, folder: str, dtype: torch.dtype) -> None:
    """Raise ConfigError unless a pass equals torch's. The base is loaded in torch for this."""
    began = time.perf_counter()
    torchs = BaseModel(folder, dtype, torch.device("cpu"))
    prove_isolated(torchs, dtype)
    logprobs, gradients = differences(network, torchs)
    allowed = adapter_proof.ALLOWED[dtype]
    if not (logprobs <= allowed.logprobs and gradients <= allowed.gradients):
        raise ConfigError(
            f"{network.arch.name} cannot be trained by strategy jax: logprobs differ from "
            f"transformers by {logprobs:.2g} nats a token ({allowed.logprobs:g} is allowed), "
            f"gradients by {gradients:.2g} of their size ({allowed.gradients:g} is allowed); use "
            "strategy replica, fsdp2 or deepspeed"
        )
    took = time.perf_counter() - began
    log.info("JAX computes %s as transformers does (checked in %.2f s)", network.arch.name, took)


def differences(network: JaxNetwork, torchs: BaseModel) -> tuple[float, float]:
    """Return the mean |Δ logprob| of the worst row, and |Δ| / |gradient| of the worse adapter."""
    generator = torch.Generator().manual_seed(0)
    size = (sum(adapter_proof.LENGTHS),)
    tokens, targets = (
        torch.randint(network.vocab_size, size, generator=generator) for _ in range(2)
    )
    adapters = [adapter_proof.adapter_on(network, generator) for _ in range(2)]
    rows = range(len(adapter_proof.LENGTHS))

    def computed(own: JaxNetwork | BaseModel) -> tuple[Tensor, list[Tensor]]:
        return adapter_proof.computed(own, adapters, (tokens, targets), rows, rows)

    (found, gradients), (wanted, wanted_gradients) = computed(network), computed(torchs)
    gaps = [float((found[span] - wanted[span]).abs().mean()) for span in adapter_proof.SPANS]
    pairs = zip(gradients, wanted_gradients, strict=True)
    return max(gaps), max(float((own - other).norm() / other.norm()) for own, other in pairs)
