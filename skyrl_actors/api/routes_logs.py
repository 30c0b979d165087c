"""Serve the newest lines of a part's log to the console, for admins."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from skyrl_actors.api.access import NotAllowed
from skyrl_actors.api.routes_console import FRESH_S, PREFIX, SLOW_S, AnswerCache, viewer_of
from skyrl_actors.api.state import state_of
from skyrl_actors.messages.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")
LINES = 300
LONGEST = 2**18  # characters
router = APIRouter(include_in_schema=False)


def _in_thread(
    work: Callable[P, R], *arguments: P.args, **named: P.kwargs
) -> Callable[[], Awaitable[R]]:
    return lambda: asyncio.to_thread(work, *arguments, **named)


def _shared(request: Request) -> AnswerCache:
    return request.app.state.answer_cache


@router.get(PREFIX + "logs")
async def parts(request: Request) -> JSONResponse:
    """Return the parts whose logs this viewer may read; none for others than admins."""
    own = state_of(request)
    if own.logs is None or not (await viewer_of(request)).all:
        return JSONResponse([])
    return JSONResponse(await _shared(request).at("parts", SLOW_S, _in_thread(own.logs.parts)))


@router.get(PREFIX + "logs/{part}")
async def newest(part: str, request: Request) -> JSONResponse:
    """Return the newest lines of a part's log."""
    own = state_of(request)
    if not (await viewer_of(request)).all:
        raise NotAllowed("logs need a key of the role admin")
    if own.logs is None:
        raise Unavailable("this process has no access to logs")
    look = _in_thread(own.logs.newest, part, LINES)
    text = await _shared(request).at(f"log of {part}", FRESH_S, look)
    return JSONResponse({"text": text[-LONGEST:]})
