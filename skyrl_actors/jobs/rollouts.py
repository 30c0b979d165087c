"""Prompts become samples become training rows."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.jobs.envs import Task
from skyrl_actors.messages.columns import TARGETS, Columns, Example, columns_from
from skyrl_actors.messages.requests import Sample, SamplingParams
from skyrl_actors.messages.results import SampleOutput


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer. tokens [P+R-1] and targets [P+R-1] are shifted; the answer is the last R targets."""

    task: Task
    prompt: tuple[int, ...]
    answer: NDArray[np.int32]  # [R], its end mark included
    logprobs: NDArray[np.float32]  # [R] of the engine
    text: str
    reward: float

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate([np.asarray(self.prompt, np.int32), self.answer])[:-1]

    @property
    def targets(self) -> NDArray[np.int32]:
        return np.concatenate([np.asarray(self.prompt, np.int32), self.answer])[1:]

    @property
    def start(self) -> int:
        """First position whose target belongs to the answer."""
        return len(self.prompt) - 1

    def spread(self, per_answer_token: NDArray[np.floating]) -> NDArray[np.float32]:
        """[R] -> [P+R-1], zero at prompt positions."""
        return np.concatenate([np.zeros(self.start, np.float32), per_answer_token.astype(np.float32)])


class Chat:
    """The tokenizer of the base model: questions to prompts, answers to text."""

    def __init__(self, folder: str):
        from transformers import AutoTokenizer  # seconds, that other commands than `train` need not wait for

        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def prompt(self, question: str) -> tuple[int, ...]:
        turn = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, answer: NDArray[np.int32]) -> str:
        return self.tokenizer.decode(answer.tolist(), skip_special_tokens=True)


async def roll_out(
    client: ControllerClient, chat: Chat, sampler_id: str, tasks: Sequence[Task], params: SamplingParams, seed: int
) -> list[Rollout]:
    """Sample every task `params.num_samples` times; the seed of each draw follows from `seed`."""

    async def one(index: int, task: Task) -> list[Rollout]:
        prompt = chat.prompt(task.question)
        drawn = _with_seed(params, (seed * 1_000_003 + index) * params.num_samples % 2**31)
        output = await client.run(Sample(sampler_id, prompt, drawn), SampleOutput)
        rollouts = []
        for s in output.sequences:
            text = chat.text(s.tokens)
            # An answer that was cut off is not an answer, even if its letters are right.
            reward = task.reward(text) if s.stop_reason == "stop" else 0.0
            rollouts.append(Rollout(task, prompt, s.tokens, s.logprobs, text, reward))
        return rollouts

    groups = await asyncio.gather(*(one(i, task) for i, task in enumerate(tasks)))
    return [rollout for group in groups for rollout in group]


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(params.max_tokens, params.num_samples, params.temperature, params.top_k, params.top_p, seed)


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
