"""One move on several parts at once: which of them finished it, so that the others can be made anew."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from skyrl_actors.messages.errors import InternalError, StateLost


class Resident(Protocol):
    """Something that has memory on the devices: an engine, or a group of ranks."""

    @property
    def name(self) -> str: ...

    def remake(self, reason: str) -> None:
        """End it at once and make it anew in the background. No attempt of its restart limit is spent on it."""
        ...


R = TypeVar("R", bound=Resident)


class PartMoves:
    """The moves of parts of one kind, one move at a time."""

    def __init__(self) -> None:
        self.unfinished: list[Resident] = []

    async def carry_out(self, parts: Sequence[R], work: Callable[[R], Awaitable[int]]) -> int | None:
        """The sum of what it returns for each; None when none was there. One that is lost meanwhile is no failure: its own
        supervision makes it anew. Raises InternalError when all have ended, naming those that failed."""
        self.unfinished = list(parts)

        async def one(part: R) -> int | None:
            try:
                moved = await work(part)
            except StateLost:
                moved = None
            self.unfinished.remove(part)
            return moved

        found = await asyncio.gather(*(one(part) for part in parts), return_exceptions=True)
        failed = [(part, e) for part, e in zip(parts, found, strict=True) if isinstance(e, BaseException)]
        if failed:
            raise InternalError("; ".join(f"{part.name}: {_said(error)}" for part, error in failed))
        moved = [each for each in found if isinstance(each, int)]
        return sum(moved) if moved else None


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
