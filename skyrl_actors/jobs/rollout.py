"""A finished episode as numbers, and many of them as training rows (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.jobs.environment import Task
from skyrl_actors.messages.columns import TARGETS, Columns, Example, columns_from


@dataclass(frozen=True, slots=True)
class Weights:
    """A sampler, and behind which iteration its weights were taken."""

    sampler_id: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Piece:
    """So many sampled tokens in a row, of one version of the weights."""

    version: str
    iteration: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """tokens [P+R-1] and targets [P+R-1] are shifted; the episode behind its first prompt is the last R targets."""

    task: Task
    group: int  # episodes of one prompt of a batch bear one number
    prompt: tuple[int, ...]
    answer: NDArray[np.int32]  # [R], end marks and what the environment said included
    sampled: NDArray[np.bool_]  # [R]: of the model
    logprobs: NDArray[np.float32]  # [R] of the engine at temperature 1, 0 where not sampled
    rewards: NDArray[np.float64]  # [R]
    text: str
    cut: bool = False  # the last answer ended at max_tokens, or the context did
    turns: int = 1
    pieces: tuple[Piece, ...] = ()  # of what was sampled, in order
    overlong: float = 0.0  # the part of the rewards that is for length alone
    tempered: NDArray[np.float32] | None = None  # [R], as `logprobs`, at the temperature of the samples; None: not asked for

    @property
    def reward(self) -> float:
        return float(self.rewards.sum())

    @property
    def sampling_logprobs(self) -> NDArray[np.float32]:
        """[R] of the distribution that each token was sampled from."""
        return self.logprobs if self.tempered is None else self.tempered

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate([np.asarray(self.prompt, np.int32), self.answer])[:-1]

    @property
    def targets(self) -> NDArray[np.int32]:
        return np.concatenate([np.asarray(self.prompt, np.int32), self.answer])[1:]

    @property
    def made_at(self) -> NDArray[np.int64]:
        """[sampled tokens]: the iteration of the weights each was sampled with."""
        return np.repeat([p.iteration for p in self.pieces], [p.num_tokens for p in self.pieces]).astype(np.int64)

    @property
    def start(self) -> int:
        """First position whose target belongs to the answer."""
        return len(self.prompt) - 1

    def spread(self, per_answer_token: NDArray[np.floating]) -> NDArray[np.float32]:
        """[R] -> [P+R-1], zero at prompt positions."""
        return np.concatenate([np.zeros(self.start, np.float32), per_answer_token.astype(np.float32)])


def rows_of(
    rollouts: Sequence[Rollout], fields: Mapping[str, Sequence[NDArray[np.floating]]], with_targets: bool = True
) -> Columns:
    """Training rows; `fields` holds one array [R] for each rollout and is zero at prompt positions."""
    examples = []
    for i, rollout in enumerate(rollouts):
        own: dict[str, NDArray] = {name: rollout.spread(parts[i]) for name, parts in fields.items()}
        if with_targets:
            own[TARGETS] = rollout.targets
        examples.append(Example(rollout.tokens, own))
    return columns_from(examples)


def answers_only(rollouts: Sequence[Rollout], per_token: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Flat per-token outputs of rows [ΣT] cut to each answer's positions [R]."""
    parts, start = [], 0
    for rollout in rollouts:
        length = len(rollout.tokens)
        parts.append(per_token[start + rollout.start : start + length])
        start += length
    return parts
