"""Chats and answers in the rows of a dataset."""

from collections.abc import Sequence
from typing import Any

from skyrl_actors.jobs.chat_messages import messages_with, normal_messages, text_of
from skyrl_actors.jobs.environment import Message
from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.messages.narrowing import is_mapping, is_sequence


def messages_of(
    prompt: Any, where: str, images: Sequence[bytes] | None = None
) -> tuple[Message, ...]:
    """Return the chat of a prompt: a string is one user turn, a list is a whole chat.

    `images`: of the row; None: the dataset has no column of images.

    Raises:
        ConfigError: The prompt is neither, or it does not fit its images.
    """
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not (is_sequence(chat) and chat and all(is_mapping(message) for message in chat)):
        raise ConfigError(
            f"{where}: the prompt is {str(prompt)[:80]!r}; "
            "it must be a string or a list of {role, content} with strings"
        )
    try:
        return normal_messages(chat) if images is None else messages_with(chat, images)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def answer_of(value: Any, prompt: Sequence[Message], where: str) -> str:
    """Return the answer to a prompt in a cell: a string, or the last turn of a chat.

    Preference datasets often store whole chats, which repeat the prompt.

    Raises:
        ConfigError: The cell is neither, or the chat has other turns than the prompt.
    """
    if isinstance(value, str):
        return value
    try:
        chat = normal_messages(value)
    except ValueError:
        chat = ()
    if chat and chat[-1]["role"] == "assistant":
        turns = [(turn["role"], text_of(turn)) for turn in chat[:-1]]
        if turns and turns != [(turn["role"], text_of(turn)) for turn in prompt][-len(turns) :]:
            raise ConfigError(
                f"{where}: the chat has turns before its answer that the prompt does not have; "
                "put all turns before the answer into the column of the prompt"
            )
        return text_of(chat[-1])
    raise ConfigError(
        f"{where}: the answer is {str(value)[:80]!r}; "
        "it must be a string, or a chat that ends with a turn of the assistant"
    )
