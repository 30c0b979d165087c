"""Routes for samplers, samples, and the answers to all submitted requests."""

from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from skyrl_actors.api import codec, translate, wire
from skyrl_actors.api.access import caller_of, readable
from skyrl_actors.api.bodies import body_of, documented
from skyrl_actors.api.body_limits import check_sample
from skyrl_actors.api.cpu_bound import (
    THREAD_BYTES,
    run_in_process,
    run_in_thread,
    run_sized,
)
from skyrl_actors.api.paced import PacedResponse
from skyrl_actors.api.pictures import PictureReader
from skyrl_actors.api.state import shown, state_of
from skyrl_actors.losses.custom_graph import PREFIX, graph_of
from skyrl_actors.messages.errors import InvalidRequest, NotFound
from skyrl_actors.messages.paths import checked_id, parse_path, sampler_id_for
from skyrl_actors.messages.results import Failure, Ready, Result, Waiting
from skyrl_actors.messages.sizes import size_of

router = APIRouter()
PATIENCE_S = 10.0  # how long an answer waits for memory before the client is told to retry
COPIES_AS_PROTOBUF, COPIES_AS_JSON = 2, 6  # a number of 4 bytes has up to 20 characters in JSON
SampleBody = Annotated[wire.Asample, Depends(body_of(wire.Asample, check_sample))]


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: wire.CreateSamplingSession, request: Request
) -> dict[str, Any]:
    """Open a sampler of the base model or of a saved path.

    It samples from exactly those weights, or fails.
    """
    caller_of(request).own(body.session_id, "session")
    sampler_id = sampler_id_for(
        checked_id(body.session_id, "session id"), body.sampling_session_seq_id
    )
    if body.model_path is not None:
        await readable(request, parse_path(body.model_path))
    await state_of(request).client.calls.open_sampler(
        sampler_id, body.session_id, body.base_model, body.model_path
    )
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, request: Request) -> dict[str, Any]:
    """Return the weights that a sampler uses."""
    sampler = await state_of(request).client.calls.get_sampler(
        caller_of(request).own(sampler_id, "sampler")
    )
    return {
        "sampler_id": sampler.sampler_id,
        "base_model": sampler.base_model,
        "model_path": sampler.model_path,
    }


@router.post("/asample", openapi_extra=documented(wire.Asample))
async def asample(body: SampleBody, request: Request) -> dict[str, Any]:
    """Sample, and score the prompt."""
    state, caller = state_of(request), caller_of(request)
    if body.sampling_session_id is None:
        sampler_id = await _direct_sampler(request, body)
    else:
        sampler_id = caller.own(body.sampling_session_id, "sampler")
    able = await state.able_to_sample(sampler_id)
    limit, http = state.config.limits.body_bytes, state.config.http
    given = (
        body,
        sampler_id,
        able.max_sample_tokens,
        limit,
        PictureReader(able.images, state.config.limits, http.images),
        http.tempered_logprobs,
        http.processed_logprobs,
    )
    if able.images and codec.has_images(body.prompt.chunks):  # decoding takes long
        wanted = await run_in_process(translate.sample, *given)
    elif body.target_prompt_logprobs:
        wanted = await run_in_thread(translate.sample, *given)
    else:
        wanted = translate.sample(*given)
    request_id = await state.client.submit(wanted, caller.mark)
    return {
        "request_id": request_id,
        "sample_sequence_ids": [f"{request_id}:{i}" for i in range(body.num_samples)],
    }


async def _direct_sampler(request: Request, body: wire.Asample) -> str:
    """Open the sampler of a sample without a session, which names its weights itself."""
    if body.model_path is None and body.base_model is None:
        raise InvalidRequest("asample needs sampling_session_id, model_path or base_model")
    if body.model_path is not None:
        await readable(request, parse_path(body.model_path))
    return (
        await state_of(request).client.open_shared_sampler(
            body.base_model, body.model_path, caller_of(request).mark
        )
    ).sampler_id


@router.post("/join_sampling_session")
async def join_sampling_session(body: wire.SamplerRef, request: Request) -> dict[str, Any]:
    """Return a number for a copy of a sampling client."""
    sampler_id = caller_of(request).own(body.sampling_session_id, "sampler")
    return {
        "type": "join_sampling_session",
        "client_counter": await state_of(request).client.calls.join_sampler(sampler_id),
    }


@router.post("/cancel_future")
async def cancel_future(body: wire.RequestRef, request: Request) -> dict[str, Any]:
    """Cancel a sample that has no answer yet.

    It then fails. Other requests are not affected.
    """
    await state_of(request).client.calls.cancel_sample(
        caller_of(request).own(body.request_id, "request")
    )
    return {}


@router.post("/retrieve_futures")
async def retrieve_futures(body: wire.RetrieveFutures, request: Request) -> dict[str, Any]:
    """List the samples of a sampler that were answered since the cursor.

    Each answer is fetched separately.
    """
    state, target = state_of(request), body.target
    caller_of(request).own(target.sampling_session_id, "sampler")
    longest_s = state.long_poll_s
    timeout_s = longest_s if body.timeout is None else min(body.timeout, longest_s)
    found, cursor = await state.client.completed(
        target.sampling_session_id, target.cloned_sampler_id, body.prev_cursor, timeout_s
    )
    states = {False: "finished", True: "failed"}
    return {
        "completions": [
            {"state": states[one.failed], "request_id": one.request_id} for one in found
        ],
        "cursor": cursor,
    }


@router.post("/retrieve_future")
async def retrieve_future(body: wire.RetrieveFuture, request: Request) -> Response:
    """Return the result of a future.

    The request is held open until the result exists or 30 s have passed.
    """
    state = state_of(request)
    if body.request_id.startswith(PREFIX):
        graph_of(body.request_id)
        return JSONResponse({"type": "create_custom_loss", "loss_id": body.request_id})
    try:
        caller_of(request).own(body.request_id, "request")
        result = await state.client.retrieve(body.request_id, state.long_poll_s)
    except NotFound as error:
        return JSONResponse({"detail": str(error)}, 410)
    if isinstance(result, Waiting):
        answer = {"type": "try_again", "request_id": body.request_id, "queue_state": result.state}
        return JSONResponse(
            answer | ({"queue_state_reason": result.reason} if result.reason else {}), 408
        )
    if isinstance(result, Failure):
        return JSONResponse({"error": shown(state, result), "category": result.category})
    accept = request.headers.get("accept", "")
    if isinstance(result, Ready):
        return await _fetched(request, body.request_id, result, accept)
    content, media_type = await _rendered_apart(result, accept)
    return Response(content, media_type=media_type)


async def _fetched(request: Request, request_id: str, ready: Ready, accept: str) -> Response:
    """Fetch and render a large answer when there is enough memory for it."""
    state = state_of(request)
    factor = COPIES_AS_PROTOBUF if translate.PROTOBUF in accept else COPIES_AS_JSON
    try:
        lease = await state.answer_budget.take(
            caller_of(request).owner or "", factor * ready.num_bytes, PATIENCE_S
        )
    except TimeoutError:
        return JSONResponse(
            {"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408
        )
    with ExitStack() as undo:
        undo.callback(lease.release)
        result = await state.client.fetch(request_id, ready)
        content, media_type = await _rendered_apart(result, accept)
        undo.pop_all()
    return PacedResponse(content, media_type, lease)


async def _rendered_apart(result: Result, accept: str) -> tuple[bytes, str]:
    """Return an answer's body and media type, rendered outside the event loop when large."""
    if translate.PROTOBUF in accept:  # copies arrays, for which a thread suffices
        large = size_of(result) > THREAD_BYTES
        return (
            await run_in_thread(_rendered, result, accept) if large else _rendered(result, accept)
        )
    return await run_sized(size_of(result), _rendered, result, accept)


def _rendered(result: Result, accept: str) -> tuple[bytes, str]:
    answer = translate.result_body(result, accept)
    if isinstance(answer, tuple):
        return answer
    try:
        return bytes(JSONResponse(answer).body), "application/json"
    except ValueError:
        error = {
            "error": "the result has values that are not finite, which JSON cannot represent",
            "category": "user",
        }
        return bytes(JSONResponse(error).body), "application/json"
