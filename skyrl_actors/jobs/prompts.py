"""Prompts as tokens and the images that lie in them (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skyrl_actors.messages.images import Picture


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, and images in the order of their places. Tokens of an image are placeholders."""

    tokens: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def then(self, other: "Prompt") -> "Prompt":
        """Return this prompt with another one after it."""
        moved = [replace(one, place=one.place + len(self)) for one in other.pictures]
        return Prompt((*self.tokens, *other.tokens), (*self.pictures, *moved))

    def then_tokens(self, tokens: Sequence[int]) -> "Prompt":
        """Return this prompt with a text after it."""
        return Prompt((*self.tokens, *tokens), self.pictures)
