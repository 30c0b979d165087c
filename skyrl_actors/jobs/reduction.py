"""Compute the weight of each token of a minibatch (pure).

The weights come from the reduction to one number and from the correction between engine and
trainer.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.algorithms import Correction, Overlong, Reduction

Floats = NDArray[np.floating]
PENALTY = 1.0  # largest one for the length of an answer
Masks = Sequence[NDArray[np.bool_]]


def token_weights(config: Reduction, learned: Masks, longest: int) -> list[Floats]:
    """Return weights [R] for each answer that turn a sum over tokens into the configured mean.

    `learned` masks the tokens that count. An answer without such tokens does not count.
    `longest` is the maximal length of an answer, in tokens; only the reduction `fixed` uses it.
    """
    counts = [int(mask.sum()) for mask in learned]
    answers = sum(count > 0 for count in counts)
    if config.type == "token_mean":
        shares = [1 / max(sum(counts), 1)] * len(counts)
    elif config.type == "sequence_mean":
        shares = [1 / (max(count, 1) * max(answers, 1)) for count in counts]
    else:
        shares = [1 / (max(answers, 1) * longest)] * len(counts)
    return [mask * share for mask, share in zip(learned, shares, strict=True)]


def correction_weights(
    config: Correction, trainer: Sequence[Floats], engine: Sequence[Floats], sampled: Masks
) -> list[Floats]:
    """Return [R] for each answer: r = exp(log p_trainer − log p_engine), truncated or masked.

    Without a correction all weights are 1. `engine` holds the logprobs of the distribution that
    the tokens were sampled from, so at its temperature.

    Truncated: r is at most `high` (truncated importance sampling; Yao et al., 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"). Masked: r is 0 outside
    [low, high] (IcePop; Ling Team, 2025). For a sequence, r is exp(mean of the differences), as
    in GSPO.
    """
    found: list[Floats] = []
    for ours, theirs, mask in zip(trainer, engine, sampled, strict=True):
        if config.type == "none":
            found.append(np.ones(len(ours)))
            continue
        drift = np.where(mask, ours.astype(np.float64) - theirs, 0.0)
        if config.level == "sequence":
            drift = np.where(mask, drift.sum() / max(int(mask.sum()), 1), 0.0)
        ratio = np.exp(drift)
        if config.type == "truncated":
            found.append(np.minimum(ratio, config.high))
        else:
            found.append(np.where((ratio >= config.low) & (ratio <= config.high), ratio, 0.0))
    return found


def overlong_penalty(config: Overlong, length: int, longest: int) -> float:
    """Return the reward for the length of an answer (DAPO; Yu et al., 2025, eq. 13).

    It is 0 up to longest − buffer_tokens, and then falls linearly to −PENALTY at `longest`.
    """
    if not config.buffer_tokens:
        return 0.0
    excess = length - (longest - config.buffer_tokens)
    return -PENALTY * min(max(excess / config.buffer_tokens, 0.0), 1.0)


def varied(rewards: Floats, groups: NDArray[np.integer]) -> set[int]:
    """Return the groups whose rewards are not all equal."""
    return {int(g) for g in np.unique(groups) if np.ptp(rewards[groups == g]) > 0}
