"""What each token of a minibatch weighs: reduction to one number, and correction between engine and trainer (pure)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.config.algorithms import Correction, Overlong, Reduction

Floats = NDArray[np.floating]
Masks = Sequence[NDArray[np.bool_]]


def token_weights(config: Reduction, learned: Masks, longest: int) -> list[Floats]:
    """[R] for each answer: with them a sum over tokens is the mean that `config` names. `learned`: tokens that count at all;
    an answer without any does not count as an answer either. `longest`: what an answer may have (of reduction fixed)."""
    counts = [int(mask.sum()) for mask in learned]
    answers = sum(count > 0 for count in counts)
    if config.type == "token_mean":
        shares = [1 / max(sum(counts), 1)] * len(counts)
    elif config.type == "sequence_mean":
        shares = [1 / (max(count, 1) * max(answers, 1)) for count in counts]
    else:
        shares = [1 / (max(answers, 1) * longest)] * len(counts)
    return [mask * share for mask, share in zip(learned, shares, strict=True)]


def correction_weights(config: Correction, trainer: Sequence[Floats], engine: Sequence[Floats], sampled: Masks) -> list[Floats]:
    """[R] for each answer: r = exp(log p_trainer − log p_engine), truncated or masked; 1 without a correction. `engine`: logprobs of
    the distribution that was sampled from, so at its temperature.

    Truncated importance sampling (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training");
    masked likewise, but 0 outside [low, high] (IcePop; Ling Team, 2025). Of a sequence r is exp(mean of the differences), as in GSPO.
    """
    found = []
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
    """0 up to longest − buffer_tokens, then linearly to −penalty at `longest` (DAPO; Yu et al., 2025, eq. 13)."""
    if not config.buffer_tokens:
        return 0.0
    excess = length - (longest - config.buffer_tokens)
    return -config.penalty * min(max(excess / config.buffer_tokens, 0.0), 1.0)


def varied(rewards: Floats, groups: NDArray[np.integer]) -> set[int]:
    """The groups whose rewards are not all the same."""
    return {int(g) for g in np.unique(groups) if np.ptp(rewards[groups == g]) > 0}
