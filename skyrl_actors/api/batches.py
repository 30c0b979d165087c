"""Read the batch of /forward_backward or /forward: here if it is small, else elsewhere.

Sparse tensors and images can be large for few bytes, so what they become counts too.
"""

import json
from dataclasses import replace
from typing import Any

from fastapi import Request

from skyrl_actors.api import codec, translate
from skyrl_actors.api.access import caller_of
from skyrl_actors.api.compression import BodyTooLarge
from skyrl_actors.api.cpu_bound import run_in_process, run_in_thread_if_large, run_sized
from skyrl_actors.api.parts import check_json_size, check_proto_size
from skyrl_actors.api.pictures import PictureReader
from skyrl_actors.api.state import make_room, read_body, state_of
from skyrl_actors.api.tensors import may_be_sparse, sparse_bytes_of_json, sparse_bytes_of_proto
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.image_form import ImageForm
from skyrl_actors.messages.narrowing import is_object
from skyrl_actors.messages.requests import ForwardBackward


async def read_batch(request: Request, forward_only: bool) -> ForwardBackward:
    """Return the batch of a request. A body may also say itself that it is `forward_only`."""
    state = state_of(request)
    body = await read_body(request, state.config.limits.body_bytes)
    is_proto = translate.PROTOBUF in request.headers.get("content-type", "")
    form = await _image_form(request, body, is_proto)
    reader = PictureReader(form, state.config.limits, state.config.http.images)
    if not is_proto:
        return await _decoded_json(request, body, forward_only, reader)
    wanted = await _decoded_proto(request, body, reader)
    return replace(wanted, forward_only=wanted.forward_only or forward_only)


async def _image_form(request: Request, body: bytes, is_proto: bool) -> ImageForm | None:
    """Return how the base model of a batch takes images. Raises NotFound for an unknown model."""
    bases = (await state_of(request).bases()).bases
    if all(base.images == bases[0].images for base in bases):
        return bases[0].images
    model_id = await run_sized(len(body), codec.model_id_in, body, is_proto)
    if not model_id:
        return None
    model_id = caller_of(request).own(model_id, "model")
    return (await state_of(request).able_to_train(model_id)).images


async def _decoded_proto(request: Request, body: bytes, reader: PictureReader) -> ForwardBackward:
    message, sparse_bytes = await run_in_thread_if_large(len(body), _parsed, body)
    await _make_room(request, body, sparse_bytes)
    limit = reader.limits.body_bytes
    if reader.may_decode(body, is_json=False):
        return await run_in_process(codec.forward_backward_from_proto, body, limit, reader)
    size = len(body) + sparse_bytes
    return await run_in_thread_if_large(size, codec.forward_backward_of, message, limit, reader)


def _parsed(body: bytes) -> tuple[Any, int]:
    """Return the message, and the bytes of its sparse tensors as dense ones."""
    check_proto_size(body)
    message = codec.batch_of(body)
    return message, sparse_bytes_of_proto(message)


async def _decoded_json(
    request: Request, body: bytes, forward_only: bool, reader: PictureReader
) -> ForwardBackward:
    limit, sparse_bytes = reader.limits.body_bytes, 0
    check_json_size(body, limit)
    if may_be_sparse(body):
        sparse_bytes = await run_sized(len(body), _sparse_bytes, body, forward_only)
        await _make_room(request, body, sparse_bytes)
    given = (body, forward_only, limit, sparse_bytes, reader)
    if reader.may_decode(body, is_json=True):
        return await run_in_process(_from_json, *given)
    return await run_sized(len(body) + sparse_bytes, _from_json, *given)


async def _make_room(request: Request, body: bytes, sparse_bytes: int) -> None:
    """Wait for the memory of the sparse tensors. Raises BodyTooLarge, or CapacityError."""
    limit = state_of(request).config.limits.body_bytes
    if sparse_bytes > limit:
        raise BodyTooLarge(
            f"the sparse tensors have {sparse_bytes} bytes as dense ones; "
            f"at most {limit} are allowed (limits.body_bytes)"
        )
    if sparse_bytes:
        await make_room(request, len(body) + sparse_bytes)


def _from_json(
    body: bytes, forward_only: bool, limit: int, sparse_bytes: int, reader: PictureReader
) -> ForwardBackward:
    return codec.forward_backward_from_json(
        _content(body), forward_only, limit, reader, sparse_bytes
    )


def _sparse_bytes(body: bytes, forward_only: bool) -> int:
    """Return the bytes of the sparse tensors of a JSON batch as dense ones."""
    given = codec.input_of(_content(body), forward_only)
    return sparse_bytes_of_json(given["data"])


def _content(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not is_object(content):
        raise InvalidRequest("the body is not a JSON object")
    return content
