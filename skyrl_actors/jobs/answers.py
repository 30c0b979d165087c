"""Sample the answers of episodes, whole or in slices."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from skyrl_actors.api.client import ControllerClient
from skyrl_actors.jobs.patience import submitted
from skyrl_actors.jobs.prompts import Prompt
from skyrl_actors.jobs.rollout import Piece, Weights
from skyrl_actors.messages.requests import Sample, SamplingParams
from skyrl_actors.messages.results import SampleOutput
from skyrl_actors.messages.results import Sequence as Sampled
from skyrl_actors.messages.seeds import derived_seed

T = TypeVar("T")
Newest = Callable[[], Weights]


@dataclass(slots=True, kw_only=True)
class Answer:
    """The sampled tokens of one turn. An answer can consist of several slices."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    tempered: list[float] = field(default_factory=list[float])
    pieces: list[Piece] = field(default_factory=list[Piece])
    stop_reason: str = ""

    def add(self, sequence: Sampled, version: str, weights: Weights) -> None:
        self.tokens += sequence.tokens.tolist()
        self.logprobs += sequence.logprobs.tolist()
        self.tempered += sequence.shown_logprobs.tolist()
        self.stop_reason = sequence.stop_reason
        self.pieces.append(Piece(version, weights.iteration, len(sequence.tokens)))


class AnswerSampler:
    """Samples answers with the newest weights.

    With `slice_tokens`, an answer is sampled in slices of so many tokens. Each slice uses the
    newest weights.
    """

    def __init__(self, client: ControllerClient, slice_tokens: int | None = None):
        self._client = client
        self._slice_tokens = slice_tokens

    async def first(
        self, weights: Newest, prompts: list[Prompt], params: SamplingParams
    ) -> list[Answer]:
        """Sample the first answers of episodes, one for each prompt."""
        if len(set(prompts)) > 1:
            return await together(
                [self.one(weights, prompt, params, i) for i, prompt in enumerate(prompts)]
            )
        # With one request, the engine computes the common prompt once.
        asked = replace(
            params, num_samples=len(prompts), max_tokens=self._slice_of(params.max_tokens)
        )
        answers = [Answer() for _ in prompts]
        await self._slice(weights, prompts[0], asked, answers)
        seeds = [
            replace(params, num_samples=1, seed=(params.seed or 0) + draw)
            for draw in range(len(prompts))
        ]
        await together(
            [
                self._finish(weights, prompts[0], own, each)
                for own, each in zip(seeds, answers, strict=True)
            ]
        )
        return answers

    async def one(
        self, weights: Newest, prompt: Prompt, params: SamplingParams, draw: int
    ) -> Answer:
        """Sample one answer. `draw` distinguishes answers to the same prompt."""
        own, answer = replace(params, num_samples=1, seed=(params.seed or 0) + draw), Answer()
        await self._slice(
            weights, prompt, replace(own, max_tokens=self._slice_of(own.max_tokens)), [answer]
        )
        await self._finish(weights, prompt, own, answer)
        return answer

    async def _finish(
        self, weights: Newest, prompt: Prompt, params: SamplingParams, answer: Answer
    ) -> None:
        while answer.stop_reason == "length" and (have := len(answer.tokens)) < params.max_tokens:
            # Each slice has its own seed: the same seed would repeat the same random numbers.
            asked = replace(
                params,
                max_tokens=self._slice_of(params.max_tokens - have),
                seed=derived_seed(params.seed or 0, have),
            )
            await self._slice(weights, prompt.then_tokens(answer.tokens), asked, [answer])

    def _slice_of(self, left: int) -> int:
        return min(left, self._slice_tokens or left)

    async def _slice(
        self,
        weights: Newest,
        prompt: Prompt,
        params: SamplingParams,
        answers: list[Answer],
    ) -> None:
        asked = weights()
        request = Sample(
            sampler_id=asked.sampler_id,
            prompt=prompt.tokens,
            params=params,
            pictures=prompt.pictures,
        )
        output = await self._client.result(await submitted(self._client, request), SampleOutput)
        for answer, sequence in zip(answers, output.sequences, strict=True):
            answer.add(sequence, output.version, asked)


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time and return their results. If one fails, cancel the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
