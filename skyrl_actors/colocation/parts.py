"""Carry out one move on several parts at once, and record which parts did not finish it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from skyrl_actors.messages.errors import InternalError, StateLost


class Resident(Protocol):
    """A part with memory on the devices: an engine, or a group of ranks."""

    @property
    def name(self) -> str: ...

    def restart_now(self, reason: str) -> None:
        """End the part and restart it in the background, without using up its restart limit."""
        ...


R = TypeVar("R", bound=Resident)


class PartMoves:
    """Moves of parts of one kind, one move at a time."""

    def __init__(self) -> None:
        self.unfinished: list[Resident] = []

    async def carry_out(
        self, parts: Sequence[R], work: Callable[[R], Awaitable[int]]
    ) -> int | None:
        """Run `work` on all parts; return the sum of its results, None if no part moved.

        A part that is lost meanwhile is no failure; its own supervision restarts it. After all
        parts ended, failures raise InternalError with the names of the failed parts.
        """
        self.unfinished = list(parts)

        async def one(part: R) -> int | None:
            try:
                moved = await work(part)
            except StateLost:
                moved = None
            self.unfinished.remove(part)
            return moved

        found = await asyncio.gather(*(one(part) for part in parts), return_exceptions=True)
        failed = [
            (part, e) for part, e in zip(parts, found, strict=True) if isinstance(e, BaseException)
        ]
        if failed:
            raise InternalError(
                "; ".join(f"{part.name}: {_error_text(error)}" for part, error in failed)
            )
        moved = [each for each in found if isinstance(each, int)]
        return sum(moved) if moved else None


def _error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__
