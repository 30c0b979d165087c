"""Finished episodes as arrays, and their conversion to training rows (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.jobs.environment import Task
from skyrl_actors.messages.columns import Columns, columns_from
from skyrl_actors.messages.example import TARGETS, Example
from skyrl_actors.messages.images import Picture


@dataclass(frozen=True, slots=True)
class Weights:
    """A sampler, and the iteration after which its weights were taken."""

    sampler_id: str
    iteration: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that were sampled with the same version of the weights."""

    version: str
    iteration: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished episode: a prompt of P tokens, and R tokens after it.

    Tokens [P+R-1] are the inputs and targets [P+R-1] the next tokens. The last R targets are the
    episode after its first prompt.
    """

    task: Task
    group: int  # the number of the prompt in its batch
    prompt: tuple[int, ...]
    answer: NDArray[np.int32]  # [R], with end marks and the texts of the environment
    sampled: NDArray[np.bool_]  # [R]: True for tokens that the model sampled
    logprobs: NDArray[np.float32]  # [R] of the engine at temperature 1, 0 where not sampled
    rewards: NDArray[np.float64]  # [R]
    text: str
    cut: bool = False  # the last answer ended at max_tokens, or the context was full
    turns: int = 1
    pieces: tuple[Piece, ...] = ()  # the sampled tokens, in order
    overlong: float = 0.0  # the part of the rewards that penalizes length
    # [R]: as `logprobs`, but at the temperature of the samples; None if not requested
    tempered: NDArray[np.float32] | None = None
    pictures: tuple[Picture, ...] = ()  # in the order of their places

    @property
    def reward(self) -> float:
        return float(self.rewards.sum())

    @property
    def sampling_logprobs(self) -> NDArray[np.float32]:
        """[R]: logprobs in the distribution that each token was sampled from."""
        return self.logprobs if self.tempered is None else self.tempered

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate([np.asarray(self.prompt, np.int32), self.answer])[:-1]

    @property
    def targets(self) -> NDArray[np.int32]:
        return np.concatenate([np.asarray(self.prompt, np.int32), self.answer])[1:]

    @property
    def made_at(self) -> NDArray[np.int64]:
        """[sampled tokens]: the iteration of the weights that sampled each token."""
        return np.repeat(
            [p.iteration for p in self.pieces], [p.num_tokens for p in self.pieces]
        ).astype(np.int64)

    @property
    def start(self) -> int:
        """The first position whose target belongs to the answer."""
        return len(self.prompt) - 1

    def spread(self, per_answer_token: NDArray[np.floating]) -> NDArray[np.float32]:
        """Extend [R] to [P+R-1] with zeros at prompt positions."""
        return np.concatenate(
            [np.zeros(self.start, np.float32), per_answer_token.astype(np.float32)]
        )


def rows_of(
    rollouts: Sequence[Rollout],
    fields: Mapping[str, Sequence[NDArray[np.floating]]],
    with_targets: bool = True,
) -> Columns:
    """Return training rows. `fields` holds one array [R] for each rollout.

    Fields are 0 at prompt positions.
    """
    examples: list[Example] = []
    for i, rollout in enumerate(rollouts):
        own: dict[str, NDArray[np.generic]] = {
            name: rollout.spread(parts[i]) for name, parts in fields.items()
        }
        if with_targets:
            own[TARGETS] = rollout.targets
        examples.append(Example(rollout.tokens, own, rollout.pictures))
    return columns_from(examples)


def answers_only(
    rollouts: Sequence[Rollout], per_token: NDArray[np.float32]
) -> list[NDArray[np.float32]]:
    """Cut flat outputs [ΣT] of the rows to the answer [R] of each rollout."""
    parts, start = list[NDArray[np.float32]](), 0
    for rollout in rollouts:
        length = len(rollout.tokens)
        parts.append(per_token[start + rollout.start : start + length])
        start += length
    return parts
