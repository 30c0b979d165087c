"""Routes for sessions, health and capabilities."""

import asyncio
from contextlib import suppress
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from skyrl_actors.api import wire
from skyrl_actors.api.access import caller_of, note_admin
from skyrl_actors.api.state import ApiState, state_of
from skyrl_actors.api.tokens import token_for
from skyrl_actors.messages.catalog import SessionLabels
from skyrl_actors.messages.columns import MAX_DATUMS
from skyrl_actors.messages.errors import NotFound, Unavailable

KEYS_TIMEOUT_S = 1.0  # of a request for health
router = APIRouter()


@router.post("/client/config")
async def client_config(request: Request) -> dict[str, Any]:
    """Return flags for SDKs. Older SDKs ignore them."""
    limits, flags = state_of(request).config.limits, state_of(request).config.http.sdk
    credentials = state_of(request).credentials
    await credentials.refresh()
    return {
        **{name: value for name, value in flags.items() if name != "sample_cancel_enabled"},
        "pjwt_auth_enabled": credentials.required and flags["pjwt_auth_enabled"],
        "fwdbwd_max_chunk_len": MAX_DATUMS,
        "fwdbwd_max_chunk_bytes_count": min(limits.body_bytes // 2, 32 * 2**20),
        "sample_max_concurrent_requests": state_of(request).configs.samples_in_flight,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request) -> dict[str, Any]:
    """Return flags that can change while an SDK runs."""
    return {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": state_of(request).config.http.sdk["sample_cancel_enabled"],
    }


@router.post("/auth/token")
async def auth_token(request: Request) -> dict[str, Any]:
    """Exchange an API key, or a token that has not expired, for a token that expires later."""
    caller = caller_of(request)
    if caller.grant is None or not state_of(request).config.http.sdk["pjwt_auth_enabled"]:
        raise NotFound(
            "this service issues no tokens (http.sdk.pjwt_auth_enabled is off, or it has no keys)"
        )
    root = state_of(request).folders.root
    return {"jwt": await asyncio.to_thread(token_for, root, caller.grant)}


@router.get("/healthz")
async def healthz(request: Request) -> JSONResponse:
    """Answer 200 if a request would be served now, otherwise 503 with the reason."""
    return await health(state_of(request))


async def health(state: ApiState) -> JSONResponse:
    """Answer 200 only when a request would be served now.

    With keys the reason is cut to its first line, because this route needs no key and
    the rest may quote log lines.
    """
    reason = await state.fault()
    if reason is None:
        return JSONResponse({"status": "ok"})
    with suppress(Unavailable, TimeoutError):  # without an answer, details are hidden
        async with asyncio.timeout(KEYS_TIMEOUT_S):
            await state.credentials.refresh()
    if state.credentials.hide_faults:
        reason = reason.partition("\n")[0]
    return JSONResponse({"status": "unavailable", "reason": reason}, 503)


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    """Return the base models and the length of their longest rows. The first is the default."""
    models = [
        {
            "model_name": able.base_model,
            "max_context_length": able.max_sample_tokens,
            "trainable": True,
            "sampleable": True,
            "takes_images": able.images is not None,  # this service's addition
        }
        for able in (await state_of(request).bases()).bases
    ]
    return {"supported_models": models}


@router.post("/create_session")
async def create_session(body: wire.CreateSession, request: Request) -> dict[str, Any]:
    """Open a session. Its models and samplers are freed when it ends or its heartbeat stops.

    A read-only key gets an id only: it owns nothing, and must not take the place of a session.
    """
    if (caller := caller_of(request)).role == "read_only":
        return {"type": "create_session", "session_id": f"s{uuid4().hex[:16]}{caller.mark}"}
    labels = SessionLabels(
        user_metadata={key: str(value) for key, value in body.user_metadata.items()},
        display_name=body.display_name,
        tags=body.tags,
        project_id=body.project_id,
    )
    session_id = await state_of(request).client.create_session(labels, caller.mark)
    return {"type": "create_session", "session_id": session_id}


@router.post("/session_heartbeat")
async def session_heartbeat(body: wire.SessionRef, request: Request) -> JSONResponse:
    """Keep a session open. 410: the session has ended."""
    caller = caller_of(request)
    try:
        session_id = caller.own(body.session_id, "session")
        if caller.role != "read_only":  # which keeps no session alive
            await state_of(request).client.calls.heartbeat(session_id)
    except NotFound:
        return JSONResponse({"detail": f"session {body.session_id} has ended"}, 410)
    return JSONResponse({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: str, body: wire.FinishSession, request: Request) -> dict[str, Any]:
    """End a session, with its outcome. Its models and samplers are freed."""
    caller_of(request).own(session_id, "session")
    await note_admin(request, "end", session_id)
    await state_of(request).client.calls.finish_session(session_id, body.reason.type, body.detail)
    return {}


@router.post("/telemetry")
async def telemetry() -> dict[str, Any]:
    """Accept telemetry and discard it."""
    return {"status": "accepted"}
