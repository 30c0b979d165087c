"""Sessions, health, capabilities: what a client asks before and around its work."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from skyrl_actors.api import wire
from skyrl_actors.api.access import caller_of
from skyrl_actors.api.state import ApiState, state_of
from skyrl_actors.api.tokens import token_for
from skyrl_actors.messages.errors import NotFound

router = APIRouter()


@router.post("/client/config")
async def client_config(request: Request) -> dict[str, Any]:
    """Flags that newer SDKs follow and older ones ignore."""
    limits, flags = state_of(request).config.limits, state_of(request).config.http.sdk
    return {
        **flags.model_dump(exclude={"sample_cancel_enabled"}),
        "pjwt_auth_enabled": bool(state_of(request).owners) and state_of(request).config.http.tokens,
        "fwdbwd_max_chunk_len": limits.datums,
        "fwdbwd_max_chunk_bytes_count": min(limits.body_bytes // 2, 32 * 2**20),
        "sample_max_concurrent_requests": limits.samples_in_flight,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request) -> dict[str, Any]:
    """Flags that may change while an SDK runs."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": state_of(request).config.http.sdk.sample_cancel_enabled}


@router.post("/auth/token")
async def auth_token(request: Request) -> dict[str, Any]:
    """A key, or a token that has not ended, for a token that ends later."""
    owner = caller_of(request).owner
    if owner is None or not state_of(request).config.http.tokens:
        raise NotFound("this service gives no tokens (http.tokens is off, or no keys are configured)")
    return {"jwt": await asyncio.to_thread(token_for, state_of(request).folders.root, owner)}


@router.get("/healthz")
async def healthz(request: Request) -> JSONResponse:
    """200 when a request would be served now, else 503 with the reason."""
    return await health(state_of(request))


async def health(state: ApiState) -> JSONResponse:
    """200 only when a request would be served. With keys configured anybody may ask still, and last lines of a process are not for anybody."""
    reason = await state.fault()
    if reason is not None and state.owners:
        reason = reason.partition("\n")[0]
    return JSONResponse({"status": "ok"}) if reason is None else JSONResponse({"status": "unavailable", "reason": reason}, 503)


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    """The base model, and how long its rows may be."""
    able = await state_of(request).capabilities()
    model = {
        "model_name": able.base_model,
        "max_context_length": able.max_sample_tokens,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


@router.post("/create_session")
async def create_session(body: wire.CreateSession, request: Request) -> dict[str, Any]:
    """A session: what belongs to it is freed when it ends or falls silent."""
    metadata = {key: str(value) for key, value in body.user_metadata.items()}
    mark = caller_of(request).mark
    session_id = await state_of(request).client.create_session(metadata, body.display_name, mark)
    return {"type": "create_session", "session_id": session_id}


@router.post("/session_heartbeat")
async def session_heartbeat(body: wire.SessionRef, request: Request) -> JSONResponse:
    """The client lives. 410: its session is over."""
    try:
        await state_of(request).client.heartbeat(caller_of(request).own(body.session_id, "session"))
    except NotFound:
        return JSONResponse({"detail": f"session {body.session_id} is over"}, 410)
    return JSONResponse({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: str, body: wire.FinishSession, request: Request) -> dict[str, Any]:
    """The session ended, and how: its models and samplers are freed."""
    caller_of(request).own(session_id, "session")
    await state_of(request).client.finish_session(session_id, body.reason.type, body.detail)
    return {}


@router.post("/telemetry")
async def telemetry() -> dict[str, Any]:
    """Taken, and not kept."""
    return {"status": "accepted"}
