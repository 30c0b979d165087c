"""Proof at start that an engine computes, and computes the same after a live weight update.

vLLM keeps some weights in layouts of its own. An update that does not make these anew leaves an engine that samples from no
version at all, without an error. So a fresh engine scores a fixed prompt, is given the base's weights again in the way in which
updates come, and scores the prompt again. It starts only when both agree.
"""

import logging
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.engines.agreement import SCORING
from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.weights import WeightManifest

T = TypeVar("T")
log = logging.getLogger(__name__)
BOUNDS = {"float32": 1e-4}  # mean |Δ logprob|, nats; found: 0 for dense models, 0.08 for experts that an update garbles
LOWER_PRECISION = 0.02
ADVICE = "use another base model, or a vLLM server that serves this one (engine.external)"


class Reloads(Protocol):
    async def sample(
        self, request_id: str, prompt: tuple[int, ...], params: SamplingParams, adapter: WeightManifest | None, version: str
    ) -> SampleOutput: ...

    async def load_full(self, version: str, parts: tuple[WeightManifest, ...]) -> float: ...


async def prove_reload(
    engine: Reloads, model: str, dtype: str, prompt: tuple[int, ...], parts: tuple[WeightManifest, ...]
) -> None:
    """Raise ConfigError where it fails. `parts`: the base's weights; without them only the first pass is tried."""
    began = time.perf_counter()
    before = await _tried(f"computing {model}", _scores(engine, prompt))
    if not parts:
        return
    await _tried(f"a live weight update of {model}", engine.load_full(BASE_VERSION, parts))
    after = await _tried(f"computing {model} after a live weight update", _scores(engine, prompt))
    difference, allowed = float(np.abs(after - before).mean()), BOUNDS.get(dtype, LOWER_PRECISION)
    if not difference <= allowed:
        raise ConfigError(
            f"{model} can not be sampled here: after a live update with its own weights vLLM differs from itself by "
            f"{difference:.2g} nats a token ({allowed:g} is allowed). Set lora.max_full_models=0 (adapters alone), or {ADVICE}"
        )
    log.info("a live update leaves %s as it was (%.2g nats a token, %.1f s)", model, difference, time.perf_counter() - began)


async def _scores(engine: Reloads, prompt: tuple[int, ...]) -> NDArray[np.float32]:
    found = (await engine.sample("proof", prompt, SCORING, None, BASE_VERSION)).prompt_logprobs
    assert found is not None
    return found[1:]


async def _tried(what: str, work: Awaitable[T]) -> T:
    try:
        return await work
    except TimeoutError:
        raise  # no fault of the model
    except Exception as error:
        raise ConfigError(f"{what} fails in vLLM ({type(error).__name__}: {error}); {ADVICE}") from error
