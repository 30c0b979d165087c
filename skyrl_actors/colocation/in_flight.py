"""What becomes of samples under way when training wants their devices: they end first, are frozen, or are begun anew."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from skyrl_actors.colocation.keeper import Keeper
from skyrl_actors.colocation.phases import Phase

T = TypeVar("T")
InFlight = Literal["drain", "keep", "abort"]


async def in_sample_phase(keeper: Keeper, policy: InFlight, slice_s: float, run: Callable[[], Awaitable[T]]) -> T:
    """The result of `run`, which works only while engines are awake. An engine that is asked to sleep with `keep` freezes what
    it has, so that `run` may go on in the next SAMPLE phase; with `abort` it is cancelled and called once more."""
    if policy == "drain":
        async with keeper.hold(Phase.SAMPLE):
            return await run()
    task: asyncio.Future[T] | None = None
    try:
        while True:
            async with keeper.hold(Phase.SAMPLE):
                task = task or asyncio.ensure_future(run())
                if await _ended(task, keeper, slice_s):
                    return task.result()
                if policy == "abort":
                    await _cancelled(task)
                    break
        async with keeper.hold(Phase.SAMPLE):  # to its end: else training could keep it from ever ending
            return await run()
    finally:
        if task is not None:
            await _cancelled(task)


async def _ended(task: asyncio.Future[T], keeper: Keeper, slice_s: float) -> bool:
    """False when somebody wants the devices first."""
    waiting = asyncio.ensure_future(keeper.contended(slice_s))
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancelled(waiting)
    return task.done()


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """It has ended when this returns, and nobody asks what of."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
