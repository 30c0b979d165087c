"""Work that holds Python's interpreter lock for long runs in another process, so that other requests are answered meanwhile.

Parsing JSON of many megabytes is one call into C that never gives up the lock: a thread does not help.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from anyio import to_process, to_thread
from anyio.lowlevel import RunVar

from skyrl_actors.messages.errors import Unavailable

R = TypeVar("R")
THREAD_BYTES = 128 * 2**10  # smaller inputs are handled on the event loop, in well under a millisecond
PROCESS_BYTES = 2**20  # smaller inputs are handled in a thread
DEADLINE_S = 40.0
NICENESS = 10
THREADS = 2  # more would only take the interpreter lock from each other and from the event loop
_processes: RunVar[anyio.CapacityLimiter] = RunVar("processes of large requests")
_threads: RunVar[anyio.CapacityLimiter] = RunVar("threads of large requests")


async def run_apart(function: Callable[..., R], *arguments: Any) -> R:
    """Run a function of a module in a worker process, one at a time; arguments and result are pickled.

    Raises what the function raises, and Unavailable when the process died or took more than DEADLINE_S.
    """
    limiter = _of_this_loop(_processes, 1)
    try:
        with anyio.fail_after(DEADLINE_S):
            return await to_process.run_sync(_with_low_priority, function, arguments, cancellable=True, limiter=limiter)
    except TimeoutError:
        raise Unavailable(f"other large requests took more than {DEADLINE_S:.0f} s; try again later") from None
    except anyio.BrokenWorkerProcess as error:
        raise Unavailable(f"the process that handles large requests died: {error}") from None


def _with_low_priority(function: Callable[..., R], arguments: tuple[Any, ...]) -> R:
    if os.nice(0) < NICENESS:
        os.nice(NICENESS)
    return function(*arguments)


async def run_in_thread(function: Callable[..., R], *arguments: Any) -> R:
    return await to_thread.run_sync(function, *arguments, limiter=_of_this_loop(_threads, THREADS))


async def run_sized(num_bytes: int, function: Callable[..., R], *arguments: Any) -> R:
    """Here, in a thread or in another process, by the size of the input."""
    if num_bytes > PROCESS_BYTES:
        return await run_apart(function, *arguments)
    if num_bytes > THREAD_BYTES:
        return await run_in_thread(function, *arguments)
    return function(*arguments)


def _of_this_loop(variable: RunVar[anyio.CapacityLimiter], most: int) -> anyio.CapacityLimiter:
    limiter = variable.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(most)
        variable.set(limiter)
    return limiter
