"""Samplers, samples, and the answers to everything that was submitted."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from skyrl_actors.api import translate, wire
from skyrl_actors.api.state import ApiState, state_of
from skyrl_actors.messages.errors import InvalidRequest, NotFound
from skyrl_actors.messages.paths import checked_id, sampler_id_for
from skyrl_actors.messages.results import Failure, Waiting

router = APIRouter()


@router.post("/create_sampling_session")
async def create_sampling_session(body: wire.CreateSamplingSession, request: Request) -> dict[str, Any]:
    sampler_id = sampler_id_for(checked_id(body.session_id, "session id"), body.sampling_session_seq_id)
    await state_of(request).client.open_sampler(sampler_id, body.session_id, body.base_model, body.model_path)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, request: Request) -> dict[str, Any]:
    sampler = await state_of(request).client.get_sampler(sampler_id)
    return {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}


@router.post("/asample")
async def asample(body: wire.Asample, request: Request) -> dict[str, Any]:
    state = state_of(request)
    sampler_id = body.sampling_session_id or await _direct_sampler(state, body)
    able = await state.capabilities()
    wanted = translate.sample(body, sampler_id, able.max_sample_tokens, state.config.limits.body_bytes)
    request_id = await state.client.submit(wanted)
    return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)]}


async def _direct_sampler(state: ApiState, body: wire.Asample) -> str:
    """A sample without a sampling session names its weights itself."""
    if body.model_path is None and body.base_model is None:
        raise InvalidRequest("asample needs sampling_session_id, model_path or base_model")
    digest = translate.direct_sampler_id(body.base_model, body.model_path)
    await state.client.open_sampler(digest, None, body.base_model, body.model_path)
    return digest


@router.post("/retrieve_future")
async def retrieve_future(body: wire.RetrieveFuture, request: Request) -> Response:
    """Long poll: held until the answer is there or `long_poll_s` is over."""
    state = state_of(request)
    try:
        result = await state.client.retrieve(body.request_id, state.config.http.long_poll_s)
    except NotFound as error:
        return JSONResponse({"detail": str(error)}, 410)
    if isinstance(result, Waiting):
        answer = {"type": "try_again", "request_id": body.request_id, "queue_state": result.state}
        return JSONResponse(answer | ({"queue_state_reason": result.reason} if result.reason else {}), 408)
    answer = translate.result_body(result, "" if isinstance(result, Failure) else request.headers.get("accept", ""))
    if isinstance(answer, tuple):
        return Response(answer[0], media_type=answer[1])
    try:
        return JSONResponse(answer)
    except ValueError:
        return JSONResponse({"error": "the result has values that are not finite, which JSON can not say", "category": "user"})
