"""A client whose engine gives scripted answers, for episodes without a cluster."""

from collections.abc import Callable
from typing import Any

import numpy as np

from skyrl_actors.jobs.chat import Chat
from skyrl_actors.messages.requests import Sample
from skyrl_actors.messages.results import SampleOutput, Sequence


class ScriptedClient:
    """Answers each prompt with `answer(prompt text, draw)`.

    An answer that ends with … counts as cut off.
    """

    def __init__(self, chat: Chat, answer: Callable[[str, int], str]):
        self.chat = chat
        self.answer = answer
        self.asked: list[Sample] = []
        self._open: dict[str, Sample] = {}

    async def submit(self, request: Sample, mark: str = "", request_id: str = "") -> str:
        self.asked.append(request)
        self._open[request_id] = request
        return request_id

    async def result(self, request_id: str, expected: type) -> Any:
        request = self._open.pop(request_id)
        prompt = self.chat.tokenizer.decode(list(request.prompt))
        return SampleOutput(
            sequences=tuple(self._sequence(prompt, i) for i in range(request.params.num_samples)),
            version="v1",
        )

    def _sequence(self, prompt: str, draw: int) -> Sequence:
        text = self.answer(prompt, draw)
        cut = text.endswith("…")
        ids = self.chat.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        tokens = np.asarray([*ids, *([] if cut else [self.chat.tokenizer.eos_token_id])], np.int32)
        return Sequence(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.5, np.float32),
            stop_reason="length" if cut else "stop",
        )
