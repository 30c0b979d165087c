"""Prompts with images for vLLM.

vLLM gets each image in its final size. Its own filter for resizing is not that of the trainer, and
other pixels give other logprobs.
"""

from collections.abc import Sequence
from typing import Any

from vllm.inputs import TokensPrompt

from skyrl_actors.messages.errors import InternalError
from skyrl_actors.messages.images import Picture
from skyrl_actors.workers.pixels import ImagePixels


class VllmPictures:
    """The images of a base model, and the arguments that they need."""

    def __init__(self, folder: str, most: int):
        """`most`: images of a prompt. Raises ConfigError if the folder has no processor."""
        self._pixels = ImagePixels(folder)
        self._most = most

    @property
    def arguments(self) -> dict[str, Any]:
        return {"limit_mm_per_prompt": {"image": self._most, "video": 0}}

    @property
    def never_sampled(self) -> int:
        """The placeholder. No request could have it in a text."""
        assert self._pixels.form is not None
        return self._pixels.form.token

    def prompt(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> TokensPrompt:
        """Return vLLM's prompt: one placeholder for each image. Images are decoded here."""
        kept, at = list[int](), 0
        for picture in pictures:
            kept += tokens[at : picture.place + 1]
            at = picture.place + picture.num_tokens
        return TokensPrompt(
            prompt_token_ids=[*kept, *tokens[at:]],
            multi_modal_data={"image": [self._pixels.resized(one.content) for one in pictures]},
            multi_modal_uuids={"image": [one.digest for one in pictures]},
        )


def check_expanded(output: Any, prompt: Sequence[int]) -> None:
    """Raise InternalError unless vLLM gave each image the tokens that it has in the prompt."""
    if list(output.prompt_token_ids) != list(prompt):
        raise InternalError(
            f"vLLM made {len(output.prompt_token_ids)} tokens of a prompt with images that has "
            f"{len(prompt)}"
        )
