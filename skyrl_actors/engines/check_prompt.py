"""Choose the prompt on which the logprobs of engine and trainer are compared.

It is a natural text and the base model's own greedy continuation of it. A trained model is sure of
these tokens, so rounding changes their logprobs least, and other weights change them most. Random
token ids have logprobs near -15, where bfloat16 alone differs by more than a wrong adapter.
"""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from skyrl_actors.messages.requests import SamplingParams

OPENING_TOKENS = 32
CONTINUED_TOKENS = 32
TEXT = (
    "The library opens at nine in the morning. On most days the first visitors are students, who "
    "look for a quiet table near the window. After lunch, families arrive with their children,"
)


def fixed_prompt(vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """Return random token ids that are the same in every process."""
    length = min(OPENING_TOKENS, max_model_len // 2)
    return tuple(np.random.default_rng(0).integers(0, vocab_size, length).tolist())


def opening(base_folder: Path, vocab_size: int, max_model_len: int) -> tuple[int, ...]:
    """Return the first tokens of `TEXT`, or `fixed_prompt` if the base has no tokenizer.json."""
    file = base_folder / "tokenizer.json"
    if not file.is_file():
        return fixed_prompt(vocab_size, max_model_len)
    ids = Tokenizer.from_file(str(file)).encode(TEXT).ids[: min(OPENING_TOKENS, max_model_len // 2)]
    if len(ids) < 2 or max(ids) >= vocab_size:
        return fixed_prompt(vocab_size, max_model_len)
    return tuple(ids)


def continuation(prompt: tuple[int, ...], max_model_len: int) -> SamplingParams:
    """Return how to continue the opening: greedy, past end-of-text, with room for one token."""
    length = min(CONTINUED_TOKENS, max_model_len - 1 - len(prompt))
    return SamplingParams(max_tokens=length, temperature=0.0, stop=())
