"""Run work that holds Python's interpreter lock for long in another process.

Other requests are answered meanwhile. Parsing JSON of many megabytes is one call into C that never
releases the lock, so a thread does not help.
"""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import anyio
from anyio import to_process, to_thread
from anyio.lowlevel import RunVar

from skyrl_actors.fair_slots import FairSlots
from skyrl_actors.messages.errors import Unavailable

R = TypeVar("R")
T = TypeVar("T")
THREAD_BYTES = 128 * 2**10  # smaller inputs take well under 1 ms, on the event loop
PROCESS_BYTES = 2**20  # smaller inputs are handled in a thread
DEADLINE_S = 40.0
NICENESS = 10
THREADS = 2  # more would only compete for the interpreter lock
USUAL_MS = 1000  # of a large request; how long it really took is counted when it ends
OWNER: ContextVar[str] = ContextVar("owner of the API key of this request", default="")
_turns: RunVar[FairSlots] = RunVar("turns of the process")
_thread_turns: RunVar[FairSlots] = RunVar("turns of the threads")
_processes: RunVar[anyio.CapacityLimiter] = RunVar("processes of large requests")
_threads: RunVar[anyio.CapacityLimiter] = RunVar("threads of large requests")


async def run_in_process(function: Callable[..., R], *arguments: Any) -> R:
    """Run a module-level function in a worker process, one at a time.

    The owners of API keys share its time fairly. Arguments and result are pickled. Raises the
    function's errors, and Unavailable when the process died or took more than DEADLINE_S.
    """
    limiter = _of_this_loop(_processes, lambda: anyio.CapacityLimiter(1))
    deadline = anyio.current_time() + DEADLINE_S
    try:
        with anyio.fail_after(DEADLINE_S + 1):
            async with _turn(_turns, 1):
                # Its own deadline, so that a request that is ended counts for its owner too.
                with anyio.fail_after(deadline - anyio.current_time()):
                    return await to_process.run_sync(
                        _with_low_priority, function, arguments, cancellable=True, limiter=limiter
                    )
    except TimeoutError:
        raise Unavailable(
            f"other large requests took more than {DEADLINE_S:.0f} s; try again later"
        ) from None
    except anyio.BrokenWorkerProcess as error:
        raise Unavailable(f"the process that handles large requests died: {error}") from None


@asynccontextmanager
async def _turn(turns: RunVar[FairSlots], places: int) -> AsyncGenerator[None]:
    """Hold one of the places, and charge the time to the owner of this request's key."""
    slots = _of_this_loop(turns, lambda: FairSlots(places))
    async with slots.hold(OWNER.get(), 1, USUAL_MS) as place:
        began = anyio.current_time()
        try:
            yield
        finally:
            place.tokens = 1 + int(1000 * (anyio.current_time() - began))


def _with_low_priority(function: Callable[..., R], arguments: tuple[Any, ...]) -> R:
    if os.nice(0) < NICENESS:
        os.nice(NICENESS)
    return function(*arguments)


async def run_in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """Run the function in one of THREADS worker threads.

    The owners of API keys share their time fairly.
    """
    limiter = _of_this_loop(_threads, lambda: anyio.CapacityLimiter(THREADS))
    async with _turn(_thread_turns, THREADS):
        return await to_thread.run_sync(function, *arguments, limiter=limiter)


async def run_in_thread_if_large(num_bytes: int, function: Callable[..., R], *arguments: Any) -> R:
    """Run the function here, or in a thread by the size of its input."""
    if num_bytes > THREAD_BYTES:
        return await run_in_thread(function, *arguments)
    return function(*arguments)


async def run_sized(num_bytes: int, function: Callable[..., R], *arguments: Any) -> R:
    """Run the function here, in a thread or in another process, by the size of its input."""
    if num_bytes > PROCESS_BYTES:
        return await run_in_process(function, *arguments)
    if num_bytes > THREAD_BYTES:
        return await run_in_thread(function, *arguments)
    return function(*arguments)


def _of_this_loop(variable: RunVar[T], make: Callable[[], T]) -> T:
    found = variable.get(None)
    if found is None:
        found = make()
        variable.set(found)
    return found
