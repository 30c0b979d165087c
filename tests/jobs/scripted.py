"""A client whose engine answers from a script, for episodes without a cluster."""

from collections.abc import Callable
from typing import Any

import numpy as np

from skyrl_actors.jobs.chat import Chat
from skyrl_actors.messages.requests import Sample
from skyrl_actors.messages.results import SampleOutput, Sequence


class ScriptedClient:
    """`answer(prompt text, draw)` is what the engine says; an answer that ends with … was cut."""

    def __init__(self, chat: Chat, answer: Callable[[str, int], str]):
        self.chat = chat
        self.answer = answer
        self.asked: list[Sample] = []

    async def run(self, request: Sample, expected: type) -> Any:
        self.asked.append(request)
        told = self.chat.tokenizer.decode(list(request.prompt))
        return SampleOutput(tuple(self._sequence(told, i) for i in range(request.params.num_samples)), "v1")

    def _sequence(self, told: str, draw: int) -> Sequence:
        text = self.answer(told, draw)
        cut = text.endswith("…")
        ids = self.chat.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        tokens = np.asarray([*ids, *([] if cut else [self.chat.tokenizer.eos_token_id])], np.int32)
        return Sequence(tokens, np.full(len(tokens), -0.5, np.float32), "length" if cut else "stop")
