"""The tokenizer of the base model: chats to tokens, answers to text. What was sampled is never tokenized again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.jobs.environment import Message
from skyrl_actors.messages.errors import ConfigError

STAND_IN = "answer 7f3a"


class Chat:
    def __init__(self, folder: str):
        from transformers import AutoTokenizer  # seconds, that other commands than `train` need not wait for

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.folder = folder

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._encoded(self._template(messages, True))

    def conversation(self, messages: Sequence[Message]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A whole chat [T], and where the assistant's own tokens are, end marks included."""
        tokens: list[int] = []
        learned: list[bool] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            whole = self._encoded(self._template(messages[: i + 1], False))
            before = self.prompt(messages[:i])
            if whole[: len(before)] != before or tuple(tokens) != whole[: len(tokens)]:
                raise ConfigError(f"the chat template of {self.folder} writes earlier turns anew: learn from rows of one answer")
            end = len(before) + self._until_end_mark(whole[len(before) :])
            learned += [False] * (len(before) - len(tokens)) + [True] * (end - len(before)) + [False] * (len(whole) - end)
            tokens = list(whole)
        last = max((i for i, own in enumerate(learned) if own), default=-1)
        return np.asarray(tokens[: last + 1], np.int32), np.asarray(learned[: last + 1], bool)

    def following(self, messages: Sequence[Message], answer: Sequence[int]) -> tuple[int, ...]:
        """What stands between a sampled answer and the next one: the rest of its turn, `messages`, the head of the next."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": STAND_IN}]
        _, found, rest = self._template([*chat, *messages], True).rpartition(STAND_IN)
        if not found:
            raise ConfigError(
                f"the chat template of {self.folder} does not repeat the assistant's turns: episodes of several turns need that"
            )
        end = self.tokenizer.eos_token or ""
        if answer and answer[-1] == self.tokenizer.eos_token_id:
            rest = rest.removeprefix(end)
        return self._encoded(rest)

    def text(self, answer: Sequence[int]) -> str:
        return self.tokenizer.decode(list(answer), skip_special_tokens=True)

    def _until_end_mark(self, tokens: Sequence[int]) -> int:
        end = self.tokenizer.eos_token_id
        return tokens.index(end) + 1 if end in tokens else len(tokens)

    def _template(self, messages: Sequence[Message], generate: bool) -> str:
        return self.tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=generate, tokenize=False)

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
