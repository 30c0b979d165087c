"""Sessions, health, capabilities: what a client asks before and around its work."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from skyrl_actors.api import wire
from skyrl_actors.api.state import ApiState, state_of

router = APIRouter()


@router.post("/client/config")
async def client_config(request: Request) -> dict[str, Any]:
    """Flags that newer SDKs follow and older ones ignore."""
    limits = state_of(request).config.limits
    return {
        "parallel_fwdbwd_chunks": False,
        "fwdbwd_max_chunk_len": limits.datums,
        "fwdbwd_max_chunk_bytes_count": min(limits.body_bytes // 2, 32 * 2**20),
        "sample_max_concurrent_requests": limits.samples_in_flight,
    }


@router.post("/client/dynamic_config")
async def dynamic_config() -> dict[str, Any]:
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": False}


@router.get("/healthz")
async def healthz(request: Request) -> JSONResponse:
    return await health(state_of(request))


async def health(state: ApiState) -> JSONResponse:
    """200 only when a request would be served."""
    reason = await state.fault()
    return JSONResponse({"status": "ok"}) if reason is None else JSONResponse({"status": "unavailable", "reason": reason}, 503)


@router.get("/get_server_capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
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
    metadata = {key: str(value) for key, value in body.user_metadata.items()}
    return {"type": "create_session", "session_id": await state_of(request).client.create_session(metadata)}


@router.post("/session_heartbeat")
async def session_heartbeat(body: wire.SessionRef, request: Request) -> JSONResponse:
    state = state_of(request)
    if not await state.known_session(body.session_id):
        return JSONResponse({"detail": f"session {body.session_id} is over"}, 410)
    return JSONResponse({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish(session_id: str, request: Request) -> dict[str, Any]:
    await state_of(request).client.finish_session(session_id)
    return {}


@router.post("/telemetry")
async def telemetry() -> dict[str, Any]:
    return {"status": "accepted"}
