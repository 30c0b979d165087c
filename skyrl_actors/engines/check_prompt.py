"""Choose the prompt on which the logprobs of engine and trainer are compared.

It is a natural text and the base model's own greedy continuation of it. A trained model is sure of
these tokens, so rounding changes their logprobs least, and other weights change them most. Random
token ids have logprobs near -15, where bfloat16 alone differs by more than a wrong adapter.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from skyrl_actors.engines.check_image import image_tokens, pictures_in
from skyrl_actors.engines.interface import BASE_VERSION
from skyrl_actors.messages.image_form import form_in
from skyrl_actors.messages.requests import SamplingParams
from skyrl_actors.messages.results import SampleOutput

OPENING_TOKENS = 32
CONTINUED_TOKENS = 32
TEXT = (
    "The library opens at nine in the morning. On most days the first visitors are students, who "
    "look for a quiet table near the window. After lunch, families arrive with their children,"
)


def fixed_prompt(
    vocab_size: int, max_model_len: int, without: int | None = None
) -> tuple[int, ...]:
    """Return random token ids that are the same in every process, `without` one of them."""
    length = min(OPENING_TOKENS, max_model_len // 2)
    drawn = np.random.default_rng(0).integers(0, vocab_size, length).tolist()
    return tuple((token + 1) % vocab_size if token == without else token for token in drawn)


def opening(
    base_folder: Path, vocab_size: int, max_model_len: int, with_image: bool = True
) -> tuple[int, ...]:
    """Return the first tokens of `TEXT`, or `fixed_prompt` if the base has no tokenizer.json.

    A base that takes images has one before the text; see check_image.py.
    """
    image = image_tokens(base_folder, max_model_len) if with_image else ()
    file = base_folder / "tokenizer.json"
    form = form_in(base_folder) if with_image else None
    random = image + fixed_prompt(vocab_size, max_model_len, form.token if form else None)
    if not file.is_file():
        return random
    ids = Tokenizer.from_file(str(file)).encode(TEXT).ids[: min(OPENING_TOKENS, max_model_len // 2)]
    if len(ids) < 2 or max(ids) >= vocab_size:
        return random
    return (*image, *ids)


def continuation(prompt: tuple[int, ...], max_model_len: int) -> SamplingParams:
    """Return how to continue the opening: greedy, past end-of-text, with room for one token."""
    length = min(CONTINUED_TOKENS, max_model_len - 1 - len(prompt))
    return SamplingParams(max_tokens=length, temperature=0.0, stop=())


async def continued(
    sample: Callable[..., Awaitable[SampleOutput]],
    base_folder: Path,
    vocab_size: int,
    max_model_len: int,
) -> tuple[int, ...]:
    """Return the opening with the base model's greedy continuation, by an engine's `sample`."""
    prompt = opening(base_folder, vocab_size, max_model_len)
    pictures = pictures_in(prompt, form_in(base_folder))
    how = continuation(prompt, max_model_len)
    output = await sample("continuation", prompt, how, None, BASE_VERSION, pictures)
    return prompt + tuple(output.sequences[0].tokens.tolist())
