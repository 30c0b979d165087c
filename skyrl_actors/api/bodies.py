"""Read JSON bodies with prompts: bounded, and parsed outside the event loop when large."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from skyrl_actors.api.body_limits import limit_of
from skyrl_actors.api.cpu_bound import run_sized
from skyrl_actors.api.parts import check_json_size
from skyrl_actors.api.state import read_body, state_of

M = TypeVar("M", bound=BaseModel)


MOST_FAULTS = 1000
Check = Callable[[Any, int, int], None]
"""Called with a parsed body, the most tokens of a prompt and the most prompts.

Raises InvalidRequest.
"""


def unchecked(body: Any, most_tokens: int, most_prompts: int) -> None:
    """Check nothing more than the body's fields."""


def body_of(model: type[M], check: Check = unchecked) -> Callable[[Request], Awaitable[M]]:
    """Return a dependency that reads the JSON body as `model`.

    A large body is parsed and checked outside the event loop, so that a body that is too long never
    blocks it.
    """

    async def parsed(request: Request) -> M:
        state = state_of(request)
        limits, bases = state.config.limits, await state.bases()
        limit = limit_of(request.url.path, limits, bases)
        body = await read_body(request, limit)
        check_json_size(body, limit)
        longest, most = bases.max_sample_tokens, state.configs.samples_in_flight
        found = await run_sized(len(body), _validated, model, body, check, longest, most)
        request.state.body_lease.release()
        if isinstance(found, Faults):
            raise RequestValidationError(found)
        return found

    return parsed


class Faults(list[dict[str, Any]]):
    """What is wrong with a body, as pydantic lists it."""


def _validated(
    model: type[M], body: bytes, check: Check, most_tokens: int, most_prompts: int
) -> M | Faults:
    """Return the model, or the faults: pydantic's error cannot be pickled between processes."""
    try:
        found = model.model_validate_json(body)
        check(found, most_tokens, most_prompts)
        return found
    except ValidationError as error:
        if (count := error.error_count()) > MOST_FAULTS:  # a list of them would take seconds
            return Faults([{"loc": ("body",), "msg": f"it has {count} faults", "type": "faults"}])
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        return Faults({**fault, "loc": ("body", *fault["loc"])} for fault in faults)


def documented(model: type[BaseModel]) -> dict[str, object]:
    """Return the `openapi_extra` of a route that reads its body with `body_of`."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
