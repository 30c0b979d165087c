"""Build the HTTP application: routes, errors as JSON, API keys and limits of body sizes.

It imports neither Ray nor torch.
"""

import asyncio
import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyrl_actors.api import (
    not_served,
    routes_catalog,
    routes_console,
    routes_files,
    routes_logs,
    routes_metrics,
    routes_openai,
    routes_sampling,
    routes_service,
    routes_sessions,
    routes_training,
    routes_usage,
)
from skyrl_actors.api.access import Caller
from skyrl_actors.api.body_limits import limit_of
from skyrl_actors.api.cpu_bound import OWNER
from skyrl_actors.api.error_bodies import HOSTED, error_answer
from skyrl_actors.api.origins import OPEN_PATHS, has_foreign_host, is_of_another_site
from skyrl_actors.api.state import ARCHIVES, PATIENCE_S, ApiState, shown, state_of
from skyrl_actors.api.tokens import grant_of_credential
from skyrl_actors.messages.errors import SkyrlActorsError, Unavailable
from skyrl_actors.transport.byte_budget import ByteBudget

log = logging.getLogger(__name__)
# These routes come first in the route table, because every step and sample calls them.
HOT = {
    f"/api/v1/{path}"
    for path in ("retrieve_future", "asample", "forward_backward", "forward", "optim_step")
}
# The console's routes check the key themselves: without one they show totals only.
MOST_SHOWN = 20  # faults of a body
BODY_S = 60.0  # an SDK also gives up one attempt after this time
COMPRESSION = 16  # assumed ratio of zstd for token ids and floats; it can be higher
# Requests of a read-only key beside GET: an SDK needs a session to read anything.
READING = tuple(
    f"/api/v1/{name}"
    for name in (
        "create_session",
        "session_heartbeat",
        "sessions/search",
        "get_info",
        "weights_info",
        "retrieve_future",
        "telemetry",
        "auth/token",
    )
)


def build_app(state: ApiState | None = None) -> FastAPI:
    """Build the application. `app.state.api` may be set later, before the first request."""
    app = FastAPI(
        title="skyrl-actors", docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json"
    )
    app.state.api = state
    for module in (
        routes_service,
        routes_training,
        routes_sampling,
        routes_files,
        routes_catalog,
        routes_sessions,
        routes_usage,
        not_served,
    ):
        app.include_router(module.router, prefix="/api/v1")

    app.include_router(routes_metrics.router)
    app.include_router(routes_openai.router)
    app.include_router(routes_openai.router, prefix=HOSTED, include_in_schema=False)
    if state is None or state.config.http.console is not None:
        app.state.answer_cache = routes_console.AnswerCache()
        app.include_router(routes_console.router)
        app.include_router(routes_logs.router)

    @app.get("/healthz")
    async def healthz(request: Request) -> JSONResponse:
        """Answer 200 if a request would be served now, otherwise 503 with the reason."""
        return await routes_service.health(state_of(request))

    app.router.routes.sort(key=lambda route: getattr(route, "path", "") not in HOT)
    app.add_exception_handler(SkyrlActorsError, _known_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(404, _no_route)
    app.add_exception_handler(405, _no_route)
    app.add_exception_handler(Exception, _unknown_error)
    app.add_middleware(Guard)
    return app


async def _known_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, SkyrlActorsError)
    # The service's own faults get 503, which SDKs retry. A 4xx means that a retry is useless.
    status = error.status if error.category == "user" else 503
    if status == 409:
        status = 400  # SDKs repeat 409 for minutes, and this conflict is permanent
    if status == 503 and not isinstance(error, Unavailable):
        log.warning("%s %s: %s", request.method, request.url.path, error)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    text = shown(state_of(request), error)
    return error_answer(request.url.path, text, error.category, status, headers)


async def _invalid_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    shown_faults = found[:MOST_SHOWN]
    fields = [".".join(str(part) for part in e["loc"][1:]) for e in shown_faults]
    faults = [
        f"{field or 'body'}: {e['msg']}" for field, e in zip(fields, shown_faults, strict=True)
    ]
    if len(found) > MOST_SHOWN:
        faults.append(f"and {len(found) - MOST_SHOWN} more")
    return error_answer(
        request.url.path, "; ".join(faults), "user", 422, param=next(iter(fields), "") or None
    )


async def _gone(request: Request, error: Exception) -> JSONResponse:
    """Answer a request whose client has disconnected. Nothing was done."""
    return error_answer(request.url.path, "the body ended before it was complete", "user", 400)


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    text, status = (
        f"{request.method} {request.url.path} is not served; "
        "GET /api/v1/openapi.json lists the served paths",
        getattr(error, "status_code", 404),
    )
    return error_answer(request.url.path, text, "user", status)


async def _unknown_error(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    text = f"{type(error).__name__}: {shown(state_of(request), error)}"
    return error_answer(request.url.path, text, "server", 500)


class Guard:
    """Refuse unknown API keys, pages of other sites, and bodies declared too large."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state: ApiState = scope["app"].state.api
        headers = {
            key.decode("latin1").lower(): value.decode("latin1") for key, value in scope["headers"]
        }
        try:
            caller = await self._caller(state, headers, scope["path"])
        except Unavailable as error:
            text = f"API keys are not known now: {error}"
            await error_answer(scope["path"], text, "server", 503)(scope, receive, send)
            return
        limit = limit_of(scope["path"], state.config.limits, state.known_bases)
        length = headers.get("content-length", "0")
        if caller is None:
            # The header makes an SDK with a token fetch a new one.
            refusal = error_answer(
                scope["path"],
                "unknown API key or token (header X-API-Key)",
                "user",
                401,
                {"WWW-Authenticate": 'Bearer error="invalid_token"'},
            )
            await refusal(scope, receive, send)
        elif not state.credentials.required and has_foreign_host(
            scope["path"], headers, state.config.http
        ):
            text = (
                f"this service is on this machine only, but was asked for as {headers['host']!r}; "
                "use its address, or set http.public_url to the one that clients use"
            )
            await error_answer(scope["path"], text, "user", 403)(scope, receive, send)
        elif is_of_another_site(scope["method"], headers, state.config.http.public_url):
            text = f"a page of another site may not send {scope['method']} {scope['path']}"
            await error_answer(scope["path"], text, "user", 403)(scope, receive, send)
        elif caller.role == "read_only" and not is_reading(scope["method"], scope["path"]):
            text = f"this API key is read-only: {scope['method']} {scope['path']} needs another one"
            await error_answer(scope["path"], text, "user", 403)(scope, receive, send)
        elif not length.isdigit() or int(length) > limit:
            text = f"the body has {length} bytes; at most {limit} are allowed"
            await error_answer(scope["path"], text, "user", 413)(scope, receive, send)
        elif not state.open_requests.enter(owner := caller.owner or ""):
            text = (
                f"{state.open_requests.limit} requests of this API key are open; "
                "wait for some of their answers"
            )
            await _busy(scope["path"], text)(scope, receive, send)
        else:
            try:
                await self._admitted(scope, receive, send, caller, room_for(headers, limit), limit)
            finally:
                state.open_requests.leave(owner)

    async def _admitted(
        self, scope: Scope, receive: Receive, send: Send, caller: Caller, room: int, limit: int
    ) -> None:
        """Pass a request on when there is room for its body."""
        budget: ByteBudget = scope["app"].state.api.body_budget
        try:
            lease = await budget.take(caller.owner or "", room, PATIENCE_S)
        except TimeoutError:
            text = (
                f"{budget.taken} bytes of request bodies are being read; "
                f"at most {budget.limit} are allowed; try again later"
            )
            await _busy(scope["path"], text)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(caller=caller, body_lease=lease)
        OWNER.set(caller.owner or "")
        bounded = BoundedBody(scope["path"], receive, send, limit)
        try:
            await self.app(scope, bounded.receive, bounded.send)
        finally:
            lease.release()

    @staticmethod
    async def _caller(state: ApiState, headers: dict[str, str], path: str) -> Caller | None:
        """Return the caller, or None when a key is required and the request has no valid one."""
        if path in OPEN_PATHS or path.startswith((f"{ARCHIVES}/", routes_console.PREFIX)):
            return Caller()
        await state.credentials.refresh()
        if not state.credentials.required:
            return Caller()
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        grant = await grant_of_credential(state, given)
        return None if grant is None else Caller(grant)


def _busy(path: str, text: str) -> JSONResponse:
    return error_answer(path, text, "user", 429, {"Retry-After": "1"})


def is_reading(method: str, path: str) -> bool:
    """Return whether a read-only key may make this request."""
    return method in ("GET", "HEAD") or path in READING


def room_for(headers: dict[str, str], limit: int) -> int:
    """Return the bytes of memory that a body needs: its length, or an estimate if compressed."""
    if "transfer-encoding" in headers:
        return limit
    length = int(headers.get("content-length", "0"))
    return min(limit, COMPRESSION * length) if "content-encoding" in headers else length


class BoundedBody:
    """Limit a body's size and time, whatever its headers declare.

    A body that is too long is answered with 413. One that does not arrive within BODY_S is answered
    with 408.
    """

    def __init__(self, path: str, receive: Receive, send: Send, limit: int):
        self._path = path
        self._receive, self._send, self._limit = receive, send, limit
        self._taken = 0
        self._answered = False
        # None: the whole body has arrived.
        self._arrives_by: float | None = asyncio.get_running_loop().time() + BODY_S

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout_at(self._arrives_by):
                message = await self._receive()
        except TimeoutError:
            return await self._refused(408, f"the body did not arrive within {BODY_S:.0f} s")
        self._taken += len(message.get("body", b""))
        if not message.get("more_body", False):
            self._arrives_by = None
        if self._taken <= self._limit:
            return message
        return await self._refused(
            413, f"the body has more than {self._limit} bytes; at most {self._limit} are allowed"
        )

    async def _refused(self, status: int, text: str) -> Message:
        if not self._answered:
            answer = error_answer(self._path, text, "user", status, {"Connection": "close"})
            self._answered = True
            await self._send(
                {"type": "http.response.start", "status": status, "headers": answer.raw_headers}
            )
            await self._send({"type": "http.response.body", "body": answer.body})
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self._answered:
            await self._send(message)
