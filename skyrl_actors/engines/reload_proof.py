"""Prove at start that an engine computes, also with an adapter and after a live weight update.

vLLM stores some weights in its own layouts. If an update does not rebuild these, the engine samples
from weights of no version, without an error. So a new engine scores a fixed prompt, reloads the
base's weights with a live update, and scores the prompt again. Then it scores the prompt with an
adapter of zeros. It starts only if all scores agree.
"""

import logging
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.engines.logprob_check import SCORING
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import WeightManifest

T = TypeVar("T")
log = logging.getLogger(__name__)
# Mean |Δ logprob| in nats. Measured: 0 for dense models, 0.08 for experts that an update corrupts.
BOUNDS = {"float32": 1e-4}
LOWER_PRECISION = 0.02
NEEDS_BF16 = "requires BF16"  # of vLLM's linear attention on a CPU
ADVICE = "use another base model, or a vLLM server that serves this one (engine.external)"


class Reloads(Protocol):
    """The two calls that the proofs make on an engine."""

    async def sample(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        adapter: WeightManifest | None,
        version: str,
    ) -> SampleOutput: ...

    async def load_full(self, version: str, parts: tuple[WeightManifest, ...]) -> float: ...


async def prove_reload(
    engine: Reloads,
    model: str,
    dtype: str,
    prompt: tuple[int, ...],
    parts: tuple[WeightManifest, ...],
) -> None:
    """Raise ConfigError if the engine fails or its scores change after an update.

    `parts`: the base's weights. Without them only the first pass runs.
    """
    began = time.perf_counter()
    before = await _attempt(f"computing {model}", _scores(engine, prompt))
    if not parts:
        return
    await _attempt(f"a live weight update of {model}", engine.load_full(BASE_VERSION, parts))
    after = await _attempt(f"computing {model} after a live weight update", _scores(engine, prompt))
    difference, allowed = float(np.abs(after - before).mean()), BOUNDS.get(dtype, LOWER_PRECISION)
    if not difference <= allowed:
        raise ConfigError(
            f"{model} cannot be sampled here: after a live update with its own weights vLLM "
            f"differs from itself by {difference:.2g} nats a token ({allowed:g} is allowed). "
            f"Set lora.max_full_models=0 (adapters alone), or {ADVICE}"
        )
    log.info(
        "a live update leaves %s as it was (%.2g nats a token, %.1f s)",
        model,
        difference,
        time.perf_counter() - began,
    )


async def prove_adapter(
    engine: Reloads, model: str, dtype: str, prompt: tuple[int, ...], zeros: WeightManifest
) -> None:
    """Raise ConfigError if the engine fails with an adapter of zeros, or if it changes scores."""
    alone = await _attempt(f"computing {model}", _scores(engine, prompt))
    found = await _attempt(
        f"computing {model} with an adapter", _scores(engine, prompt, zeros, zeros.version)
    )
    difference, allowed = float(np.abs(found - alone).mean()), BOUNDS.get(dtype, LOWER_PRECISION)
    if not difference <= allowed:
        raise ConfigError(
            f"{model} cannot be sampled with adapters here: an adapter of zeros changes its scores "
            f"by {difference:.2g} nats a token ({allowed:g} is allowed); {ADVICE}"
        )


async def _scores(
    engine: Reloads,
    prompt: tuple[int, ...],
    adapter: WeightManifest | None = None,
    version: str = BASE_VERSION,
) -> NDArray[np.float32]:
    found = (await engine.sample("proof", prompt, SCORING, adapter, version)).prompt_logprobs
    assert found is not None
    return found[1:]


async def _attempt(what: str, work: Awaitable[T]) -> T:
    try:
        return await work
    except TimeoutError:
        raise  # slow, which is not a defect of the model
    except Exception as error:
        advice = f"set engine.dtype=bfloat16, {ADVICE}" if NEEDS_BF16 in str(error) else ADVICE
        raise ConfigError(
            f"{what} fails in vLLM ({type(error).__name__}: {error}); {advice}"
        ) from error
