"""Prompts for vLLM, also with images.

vLLM gets each image in its final size. Its own filter for resizing is not that of the trainer, and
other pixels give other logprobs.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.inputs import TokensPrompt

from skyrl_actors.messages.errors import InternalError, InvalidRequest
from skyrl_actors.messages.images import Picture
from skyrl_actors.workers.pixels import ImagePixels

THREADS = 2


class VllmPrompts:
    """Prompts of a base model that takes up to `max_images` images in each."""

    def __init__(self, folder: str, max_images: int):
        """Raises ConfigError if images are taken and the folder has no processor for them."""
        self._pixels = ImagePixels(folder) if max_images else None
        # Decoding takes memory, and must not delay other work in threads.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="images")
        self.form = self._pixels.form if self._pixels else None

    @property
    def placeholder(self) -> int | None:
        """The token of images. It is not sampled, because no request could have it in a text."""
        return self.form.token if self.form else None

    async def given(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> TokensPrompt:
        """Return a prompt for vLLM. Raises InvalidRequest if the base takes no images."""
        if not pictures:
            return TokensPrompt(prompt_token_ids=list(tokens))
        if self._pixels is None:
            raise InvalidRequest("the base model takes no images; leave them out")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, _with_images, self._pixels, tokens, pictures
        )


def _with_images(
    pixels: ImagePixels, tokens: Sequence[int], pictures: Sequence[Picture]
) -> TokensPrompt:
    """Return a prompt with one placeholder for each image. Each image is decoded once."""
    kept, at = list[int](), 0
    for picture in pictures:
        kept += tokens[at : picture.place + 1]
        at = picture.place + picture.num_tokens
    sized = {one.digest: one.content for one in pictures}
    images = {digest: pixels.resized(content) for digest, content in sized.items()}
    return TokensPrompt(
        prompt_token_ids=[*kept, *tokens[at:]],
        multi_modal_data={"image": [images[one.digest] for one in pictures]},
        multi_modal_uuids={"image": [one.digest for one in pictures]},
    )


def check_expanded(output: Any, prompt: Sequence[int], pictures: Sequence[Picture]) -> None:
    """Raise InternalError unless vLLM gave each image the tokens that it has in the prompt."""
    if pictures and list(output.prompt_token_ids) != list(prompt):
        raise InternalError(
            f"vLLM made {len(output.prompt_token_ids)} tokens of a prompt with images that has "
            f"{len(prompt)}"
        )
