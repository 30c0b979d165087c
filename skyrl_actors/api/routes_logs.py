"""Serve the newest lines of a part's log to the console, for admins."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from skyrl_actors.api.access import NotAllowed
from skyrl_actors.api.routes_console import FRESH_S, PREFIX, SLOW_S, AnswerCache, viewer_of
from skyrl_actors.api.state import LogSource, state_of
from skyrl_actors.messages.errors import NotFound, Unavailable

P = ParamSpec("P")
R = TypeVar("R")
LINES = 300
LONGEST = 2**18  # characters
PATIENCE_S = 10.0
# Threads of its own: one that waits for Ray's dashboard holds up no other work.
_THREADS = ThreadPoolExecutor(4, "logs")
router = APIRouter(include_in_schema=False)


def _in_thread(
    work: Callable[P, R], *arguments: P.args, **named: P.kwargs
) -> Callable[[], Awaitable[R]]:
    """Return a function that runs the work in a thread. It raises Unavailable if it takes long."""

    async def look() -> R:
        running = asyncio.get_running_loop().run_in_executor(
            _THREADS, partial(work, *arguments, **named)
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await running
        except TimeoutError:
            raise Unavailable(
                f"logs could not be read within {PATIENCE_S:g} s: Ray's dashboard does not answer"
            ) from None

    return look


def _shared(request: Request) -> AnswerCache:
    return request.app.state.answer_cache


async def _parts(request: Request, logs: LogSource) -> list[str]:
    return await _shared(request).at("parts", SLOW_S, _in_thread(logs.parts))


@router.get(PREFIX + "logs")
async def parts(request: Request) -> JSONResponse:
    """Return the parts whose logs this viewer may read; none for others than admins."""
    logs = state_of(request).logs
    if logs is None or not (await viewer_of(request)).all:
        return JSONResponse([])
    return JSONResponse(await _parts(request, logs))


@router.get(PREFIX + "logs/{part}")
async def newest(part: str, request: Request) -> JSONResponse:
    """Return the newest lines of a part's log."""
    logs = state_of(request).logs
    if not (await viewer_of(request)).all:
        raise NotAllowed("logs need a key of the role admin")
    if logs is None:
        raise Unavailable("this process has no access to logs")
    if part not in (known := await _parts(request, logs)):
        raise NotFound(f"the service has no part {part[:80]!r}; it has {', '.join(known)}")
    look = _in_thread(lambda: logs.newest(part, LINES)[-LONGEST:])
    return JSONResponse({"text": await _shared(request).at(f"log of {part}", FRESH_S, look)})
