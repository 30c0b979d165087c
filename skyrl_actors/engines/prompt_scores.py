"""Compute the scores of a prompt that a request asks for, from whole distributions."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.sampling import PromptAlternatives, TargetLogprobs

EMPTY_CELL = (0, -99999.0)  # id and logprob where a table has no entry
LEAST_TEMPERATURE = 0.01  # vLLM raises smaller temperatures to this


def prompt_scores(logprobs: NDArray[np.float32], params: SamplingParams) -> dict[str, Any]:
    """Compute the requested scores from [P - 1, V] distributions over prompt tokens 1 to P - 1."""
    fields: dict[str, Any] = {}
    targets = params.prompt_targets
    if targets is not None:
        ids = np.asarray(targets.ids, np.int64)
        values = np.zeros(len(ids), np.float32)
        asked = ids >= 0
        values[asked] = logprobs[targets.rows[asked], ids[asked]]
        fields["targets"] = TargetLogprobs(values, targets.shape, targets.layout)
    if k := params.prompt_alternatives:
        tokens = np.zeros((len(logprobs), k), np.int64)
        for row, own in enumerate(logprobs):
            tokens[row] = _draw(
                own.astype(np.float64),
                params.temperature,
                k,
                np.random.default_rng([params.seed or 0, row]),
            )
        fields["alternatives"] = PromptAlternatives(
            tokens, np.take_along_axis(logprobs, tokens, 1) if len(logprobs) else tokens * 0.0
        )
    return fields


def _draw(
    logprobs: NDArray[np.float64], temperature: float, k: int, random: np.random.Generator
) -> NDArray[np.int64]:
    if temperature == 0:
        return np.full(k, logprobs.argmax())
    scaled = logprobs / temperature
    weights = np.exp(scaled - scaled.max())
    return random.choice(len(weights), k, p=weights / weights.sum())
