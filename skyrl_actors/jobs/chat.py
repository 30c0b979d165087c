"""Convert chats to tokens and answers to text with the tokenizer of the base model.

Sampled tokens are never decoded and tokenized again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from skyrl_actors.api.chat_template import check_kwargs
from skyrl_actors.jobs.environment import Message
from skyrl_actors.messages.errors import ConfigError, InvalidRequest

PLACEHOLDER = "answer 7f3a"


class Chat:
    """The tokenizer and chat template of the model in a folder.

    `variables`: values for variables of the template, such as enable_thinking. Raises ConfigError
    for one that the template does not read.
    """

    def __init__(self, folder: str, variables: Mapping[str, Any] | None = None):
        # This import takes seconds. Only the command `train` needs it.
        from transformers import AutoTokenizer

        self.tokenizer: Any = cast(Any, AutoTokenizer).from_pretrained(folder)
        self.folder = folder
        self.variables = dict(variables or {})
        template = self.tokenizer.chat_template if self.variables else ""
        try:
            check_kwargs(template if isinstance(template, str) else "", self.variables)
        except InvalidRequest as error:
            raise ConfigError(f"job.{error}") from None

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a chat, up to the start of the assistant's next turn."""
        return self._encoded(self._template(messages, True))

    def conversation(
        self, messages: Sequence[Message]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens [T] of a whole chat, and a mask [T] of the assistant's tokens.

        The mask includes the end marks of the assistant's turns.

        Raises:
            ConfigError: The chat template changes earlier turns when a turn is added.
        """
        tokens: list[int] = []
        learned: list[bool] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            whole = self._encoded(self._template(messages[: i + 1], False))
            before = self.prompt(messages[:i])
            if whole[: len(before)] != before or tuple(tokens) != whole[: len(tokens)]:
                raise ConfigError(
                    f"the chat template of {self.folder} changes earlier turns of a chat; "
                    "use rows with one assistant turn"
                )
            end = len(before) + self._until_end_mark(whole[len(before) :])
            learned += (
                [False] * (len(before) - len(tokens))
                + [True] * (end - len(before))
                + [False] * (len(whole) - end)
            )
            tokens = list(whole)
        last = max((i for i, own in enumerate(learned) if own), default=-1)
        return np.asarray(tokens[: last + 1], np.int32), np.asarray(learned[: last + 1], bool)

    def following(self, messages: Sequence[Message], answer: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens between a sampled answer and the next answer.

        These are the rest of the answer's turn, `messages`, and the start of the next turn.

        Raises:
            ConfigError: The chat template leaves out earlier turns of the assistant.
        """
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        _, found, rest = self._template([*chat, *messages], True).rpartition(PLACEHOLDER)
        if not found:
            raise ConfigError(
                f"the chat template of {self.folder} leaves out earlier turns of the assistant; "
                "episodes of several turns need a template that keeps them"
            )
        end = self.tokenizer.eos_token or ""
        if answer and answer[-1] == self.tokenizer.eos_token_id:
            rest = rest.removeprefix(end)
        return self._encoded(rest)

    def text(self, answer: Sequence[int]) -> str:
        """Decode an answer without special tokens."""
        return self.tokenizer.decode(list(answer), skip_special_tokens=True)

    def _until_end_mark(self, tokens: Sequence[int]) -> int:
        end = self.tokenizer.eos_token_id
        return tokens.index(end) + 1 if end in tokens else len(tokens)

    def _template(self, messages: Sequence[Message], generate: bool) -> str:
        return self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            add_generation_prompt=generate,
            tokenize=False,
            **self.variables,
        )

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))
