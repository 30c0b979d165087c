"""Serve the metrics of the whole service in the text format of Prometheus."""

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from skyrl_actors.api.access import caller_of
from skyrl_actors.api.state import state_of

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> PlainTextResponse:
    """Return the metrics. Those of other tenants are shown to keys of the role admin only."""
    text = await state_of(request).client.calls.metrics(caller_of(request).scope)
    return PlainTextResponse(text, media_type=CONTENT_TYPE)
