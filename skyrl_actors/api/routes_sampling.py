"""Samplers, samples, and the answers to everything that was submitted."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from skyrl_actors.api import translate, wire
from skyrl_actors.api.access import caller_of, readable
from skyrl_actors.api.apart import THREAD_BYTES, run_in_thread, run_sized
from skyrl_actors.api.bodies import body_of, documented
from skyrl_actors.api.body_limits import check_sample
from skyrl_actors.api.state import shown, state_of
from skyrl_actors.losses.custom_graph import PREFIX, graph_of
from skyrl_actors.messages.errors import InvalidRequest, NotFound
from skyrl_actors.messages.paths import checked_id, parse_path, sampler_id_for
from skyrl_actors.messages.results import Failure, Result, Waiting
from skyrl_actors.messages.sizes import size_of

router = APIRouter()
SampleBody = Annotated[wire.Asample, Depends(body_of(wire.Asample, check_sample))]


@router.post("/create_sampling_session")
async def create_sampling_session(body: wire.CreateSamplingSession, request: Request) -> dict[str, Any]:
    """A sampler of the base model or of a saved path. It answers from the weights it was opened from, or not at all."""
    caller_of(request).own(body.session_id, "session")
    sampler_id = sampler_id_for(checked_id(body.session_id, "session id"), body.sampling_session_seq_id)
    if body.model_path is not None:
        await readable(request, parse_path(body.model_path))
    await state_of(request).client.open_sampler(sampler_id, body.session_id, body.base_model, body.model_path)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, request: Request) -> dict[str, Any]:
    """What a sampler is pinned to."""
    sampler = await state_of(request).client.get_sampler(caller_of(request).own(sampler_id, "sampler"))
    return {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}


@router.post("/asample", openapi_extra=documented(wire.Asample))
async def asample(body: SampleBody, request: Request) -> dict[str, Any]:
    """Samples, and scores of the prompt."""
    state, caller = state_of(request), caller_of(request)
    if body.sampling_session_id is None:
        sampler_id = await _direct_sampler(request, body)
    else:
        sampler_id = caller.own(body.sampling_session_id, "sampler")
    able = await state.capabilities()
    limit, tempered = state.config.limits.body_bytes, state.config.http.tempered_logprobs
    wanted = translate.sample(body, sampler_id, able.max_sample_tokens, limit, tempered)
    request_id = await state.client.submit(wanted, caller.mark)
    return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)]}


async def _direct_sampler(request: Request, body: wire.Asample) -> str:
    """A sample without a sampling session names its weights itself."""
    if body.model_path is None and body.base_model is None:
        raise InvalidRequest("asample needs sampling_session_id, model_path or base_model")
    if body.model_path is not None:
        await readable(request, parse_path(body.model_path))
    return (await state_of(request).client.open_sampler(None, None, body.base_model, body.model_path)).sampler_id


@router.post("/join_sampling_session")
async def join_sampling_session(body: wire.SamplerRef, request: Request) -> dict[str, Any]:
    """A number for a copy of a sampling client."""
    sampler_id = caller_of(request).own(body.sampling_session_id, "sampler")
    return {"type": "join_sampling_session", "client_counter": await state_of(request).client.join_sampler(sampler_id)}


@router.post("/cancel_future")
async def cancel_future(body: wire.RequestRef, request: Request) -> dict[str, Any]:
    """A sample that is not answered yet fails; anything else stays as it is."""
    await state_of(request).client.cancel_sample(caller_of(request).own(body.request_id, "request"))
    return {}


@router.post("/retrieve_futures")
async def retrieve_futures(body: wire.RetrieveFutures, request: Request) -> dict[str, Any]:
    """Which samples of a sampler were answered since the cursor; the answers are fetched one by one."""
    state, target = state_of(request), body.target
    caller_of(request).own(target.sampling_session_id, "sampler")
    longest_s = state.config.http.long_poll_s
    timeout_s = longest_s if body.timeout is None else min(body.timeout, longest_s)
    found, cursor = await state.client.completed(
        target.sampling_session_id, target.cloned_sampler_id, body.prev_cursor, timeout_s
    )
    states = {False: "finished", True: "failed"}
    return {"completions": [{"state": states[one.failed], "request_id": one.request_id} for one in found], "cursor": cursor}


@router.post("/retrieve_future")
async def retrieve_future(body: wire.RetrieveFuture, request: Request) -> Response:
    """Long poll: held until the answer is there or `long_poll_s` is over."""
    state = state_of(request)
    if body.request_id.startswith(PREFIX):
        graph_of(body.request_id)
        return JSONResponse({"type": "create_custom_loss", "loss_id": body.request_id})
    try:
        caller_of(request).own(body.request_id, "request")
        result = await state.client.retrieve(body.request_id, state.config.http.long_poll_s)
    except NotFound as error:
        return JSONResponse({"detail": str(error)}, 410)
    if isinstance(result, Waiting):
        answer = {"type": "try_again", "request_id": body.request_id, "queue_state": result.state}
        return JSONResponse(answer | ({"queue_state_reason": result.reason} if result.reason else {}), 408)
    if isinstance(result, Failure):
        return JSONResponse({"error": shown(state, result), "category": result.category})
    accept = request.headers.get("accept", "")
    if translate.PROTOBUF in accept:  # copies of arrays, which need no process of their own
        large = size_of(result) > THREAD_BYTES
        content, media_type = await run_in_thread(_rendered, result, accept) if large else _rendered(result, accept)
    else:
        content, media_type = await run_sized(size_of(result), _rendered, result, accept)
    return Response(content, media_type=media_type)


def _rendered(result: Result, accept: str) -> tuple[bytes, str]:
    """The body of an answer, and its media type."""
    answer = translate.result_body(result, accept)
    if isinstance(answer, tuple):
        return answer
    try:
        return bytes(JSONResponse(answer).body), "application/json"
    except ValueError:
        error = {"error": "the result has values that are not finite, which JSON can not say", "category": "user"}
        return bytes(JSONResponse(error).body), "application/json"
