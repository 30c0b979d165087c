"""What happens to running samples when training needs their devices: drain, keep or abort."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from skyrl_actors.colocation.phase_lock import PhaseLock
from skyrl_actors.colocation.phases import Phase

T = TypeVar("T")
InFlight = Literal["drain", "keep", "abort"]


async def in_sample_phase(
    phase_lock: PhaseLock, policy: InFlight, slice_s: float, run: Callable[[], Awaitable[T]]
) -> T:
    """Return the result of `run`, which works only while engines are awake.

    * `drain`: the phase lasts until the sample ends.
    * `keep`: a sleeping engine freezes the sample; `run` continues in the next SAMPLE phase.
    * `abort`: the sample is cancelled, and `run` is called once more.
    """
    if policy == "drain":
        async with phase_lock.hold(Phase.SAMPLE):
            return await run()
    task: asyncio.Future[T] | None = None
    try:
        while True:
            async with phase_lock.hold(Phase.SAMPLE):
                task = task or asyncio.ensure_future(run())
                if await _ends_first(task, phase_lock, slice_s):
                    return task.result()
                if policy == "abort":
                    await _cancel(task)
                    break
        # Hold the phase until the end. Otherwise training could interrupt the sample forever.
        async with phase_lock.hold(Phase.SAMPLE):
            return await run()
    finally:
        if task is not None:
            await _cancel(task)


async def _ends_first(task: asyncio.Future[T], phase_lock: PhaseLock, slice_s: float) -> bool:
    """Return False if another phase requests the devices before the task ends."""
    waiting = asyncio.ensure_future(phase_lock.contended(slice_s))
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(waiting)
    return task.done()


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, wait for its end, and discard its error."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
