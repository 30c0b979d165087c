"""Serve the console: one page at `/`, its data as JSON, its files, and acts of operators."""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import plotly
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel

from skyrl_actors.api.access import NotAllowed
from skyrl_actors.api.bodies import body_of
from skyrl_actors.api.console import Viewer, visible
from skyrl_actors.api.routes_files import signed_links
from skyrl_actors.api.state import ApiState, state_of
from skyrl_actors.api.tokens import grant_of_credential
from skyrl_actors.messages.catalog import CheckpointEntry
from skyrl_actors.messages.errors import NotFound, UserError
from skyrl_actors.messages.narrowing import is_object, is_sequence
from skyrl_actors.messages.operating import Mode
from skyrl_actors.messages.paths import owner_of, parse_path
from skyrl_actors.observe.figures import phase_periods
from skyrl_actors.observe.runs import METRICS, SAMPLES, last_rows, last_samples, listed

T = TypeVar("T")
router = APIRouter(include_in_schema=False)
FILES = Path(__file__).parent.parent / "console"
PREFIX = "/console/"
CHARTS = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
SERVED = {name: FILES / name for name in ("console.js", "console.css")} | {"plotly.min.js": CHARTS}
# Only the service's own files, and no embedding in other pages. Charts set inline styles.
POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; frame-ancestors 'none'"
)
FRESH_S, SLOW_S = 1.0, 8.0  # how old shared answers may be, however many pages are open
ROWS = 2000  # of a run's curves
MOST_ANSWERS = 32  # that the cache keeps
CHECKPOINTS = 20
SHOWN = 20  # sessions, requests and failures
MODES_OF: dict[str, Mode] = {"pause": "paused", "drain": "draining", "resume": "running"}


class UnknownKey(UserError):
    """The request has an unknown API key."""

    status = 401


class AnswerCache:
    """A cache that open pages share: an answer is at most `fresh_s` seconds old."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def at(self, what: str, fresh_s: float, look: Callable[[], Awaitable[T]]) -> T:
        async with self._locks.setdefault(what, asyncio.Lock()):
            known = self._found.get(what)
            if known is None or time.monotonic() - known[0] >= fresh_s:
                known = time.monotonic(), await look()
                self._found.pop(what, None)
                self._found[what] = known
                while len(self._found) > MOST_ANSWERS:
                    del self._found[next(iter(self._found))]
            return known[1]

    def forget(self) -> None:
        """Read everything again, because something was changed."""
        self._found.clear()


async def viewer_of(request: Request) -> Viewer:
    """Return the viewer. An admin sees everything. Raises UnknownKey for an unknown key."""
    state = state_of(request)
    await state.credentials.refresh()
    if not state.credentials.required:
        return Viewer(True)
    given = request.headers.get("x-api-key")
    if given is None:
        return Viewer(False)
    grant = await grant_of_credential(state, given)
    if grant is None:
        raise UnknownKey("unknown API key")
    return Viewer(grant.role == "admin", grant.owner)


@router.get("/")
async def page() -> FileResponse:
    """Return the console page."""
    return FileResponse(
        FILES / "index.html",
        headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"},
    )


@router.get(PREFIX + "files/{name}")
async def file(name: str) -> FileResponse:
    """Return a script or style of the page."""
    if name not in SERVED:
        raise NotFound(f"the console has no file {name[:80]!r}")
    return FileResponse(
        SERVED[name],
        headers={"Cache-Control": "max-age=3600" if SERVED[name] == CHARTS else "no-cache"},
    )


@router.get(PREFIX + "state")
async def state(request: Request) -> JSONResponse:
    """Return the status that this viewer may see, and the viewer's newest checkpoints."""
    viewer, own = await viewer_of(request), state_of(request)
    answer_cache: AnswerCache = request.app.state.answer_cache
    shown = visible(await answer_cache.at("status", FRESH_S, own.client.once.status), viewer)
    entries: list[CheckpointEntry] = []
    if viewer.is_known:
        of_owner = f"checkpoints of {viewer.scope}"
        entries = await answer_cache.at(
            of_owner, SLOW_S, lambda: own.client.catalog.checkpoints(viewer.scope)
        )
    checkpoints = [_checkpoint(entry) for entry in entries if viewer.sees(entry.run_id)][
        :CHECKPOINTS
    ]
    timeline, at = shown.get("phase_timeline", []), time.time()
    phases = [
        {**entered, "ended": period.ended}
        for entered, period in zip(timeline, phase_periods(timeline, at), strict=True)
    ]
    more = {"at": at, "phase_timeline": phases, "checkpoints": checkpoints}
    return JSONResponse(finite({**shown, **more}))


@router.get(PREFIX + "operating")
async def operating(request: Request) -> JSONResponse:
    """Return the last 24 hours, and the viewer's sessions, open requests and failures."""
    viewer, own = await viewer_of(request), state_of(request)
    answer_cache: AnswerCache = request.app.state.answer_cache
    calls = own.client.calls
    points = await answer_cache.at("history", SLOW_S, calls.history)
    shown: dict[str, Any] = {"history": [asdict(point) for point in points]}
    if viewer.is_known:
        scope = viewer.scope
        parts = await answer_cache.at(f"operating of {scope}", FRESH_S, lambda: _parts(own, scope))
        shown |= parts
    return JSONResponse(finite({"may_act": viewer.all, **shown}))


async def _parts(state: ApiState, scope: str | None) -> dict[str, Any]:
    calls = state.client.calls
    names = await calls.owner_names()
    sessions = await state.client.session_catalog.sessions(scope)
    return {
        "sessions": [
            {
                "session_id": entry.note.session_id,
                "tenant": _named(entry.note.session_id, names),
                "opened": entry.note.created_at,
                "models": len(entry.run_ids),
            }
            for entry in sessions
            if entry.status == "active"
        ][:SHOWN],
        "requests": [
            {**asdict(one), "tenant": names.get(one.owner, one.owner)}
            for one in await calls.list_requests(scope, SHOWN)
        ],
        "failures": [
            {**asdict(one), "tenant": names.get(one.owner, one.owner)}
            for one in await calls.list_failures(scope, SHOWN)
        ],
    }


def _named(text: str, names: Mapping[str, str]) -> str:
    owner = owner_of(text)
    return names.get(owner, owner)


@router.get(PREFIX + "link")
async def link(path: str, request: Request) -> JSONResponse:
    """Return a signed link to the archive of a checkpoint that this viewer may see.

    The audit log has the links that admins ask for to checkpoints of other keys.
    """
    viewer, where = await viewer_of(request), parse_path(path)
    if not viewer.sees(where.model_id) or where.kind == "steps":
        raise NotFound(f"no checkpoint {where}")
    calls, owner = state_of(request).client.calls, viewer.owner
    await calls.checkpoint_spec(where)  # raises without one
    if owner is not None and owner_of(where.model_id) != owner:
        await calls.note_access("read", owner, str(where))
    (found,), _ = await signed_links(request, where, [""])
    return JSONResponse({"url": found})


class Act(BaseModel, extra="forbid"):
    """An act of an operator: what is done, and to which session or request."""

    act: Literal["end", "cancel", "pause", "drain", "resume"]
    of: str = ""


_act_of = body_of(Act)


@router.post(PREFIX + "acts")
async def act(request: Request) -> JSONResponse:
    """Do what an operator asks for; for admins, or for everybody while no keys are required."""
    viewer, calls = await viewer_of(request), state_of(request).client.calls
    if not viewer.all:  # before the body is read
        raise NotAllowed("acts of operators need a key of the role admin")
    body = await _act_of(request)
    names = await calls.owner_names()
    who = f"key of {names.get(viewer.owner, viewer.owner)}" if viewer.owner else "without a key"
    actor = f"{who}, in the console"
    if body.act == "end":
        await calls.end_session(body.of, actor)
    elif body.act == "cancel":
        await calls.cancel_request(body.of, actor)
    else:
        await calls.set_mode(MODES_OF[body.act], actor)
    request.app.state.answer_cache.forget()
    return JSONResponse({})


@router.get(PREFIX + "runs")
async def runs(request: Request) -> JSONResponse:
    """List jobs' runs in `http.console`; with keys configured, only for admins."""
    folder = state_of(request).config.http.console
    if not (await viewer_of(request)).all or folder is None:
        return JSONResponse([])
    return JSONResponse(
        await request.app.state.answer_cache.at(
            "runs", SLOW_S, lambda: asyncio.to_thread(listed, folder)
        )
    )


@router.get(PREFIX + "runs/{name}")
async def curves(name: str, request: Request) -> Response:
    """Return rows of one run's metrics."""
    file = await _run_folder(name, request) / METRICS
    return await _rendered(request, file, lambda: last_rows(file, ROWS))


@router.get(PREFIX + "runs/{name}/samples")
async def samples(name: str, request: Request) -> Response:
    """Return the samples of the last evaluation of one run."""
    file = await _run_folder(name, request) / SAMPLES
    return await _rendered(request, file, lambda: last_samples(file))


async def _rendered(
    request: Request, file: Path, rows: Callable[[], list[dict[str, Any]]]
) -> Response:
    """Answer with rows of a file. They are read and rendered in a thread, once for open pages."""

    def made() -> bytes:
        return json.dumps(finite(rows()), separators=(",", ":")).encode()

    content = await request.app.state.answer_cache.at(
        str(file), SLOW_S, lambda: asyncio.to_thread(made)
    )
    return Response(content, media_type="application/json")


async def _run_folder(name: str, request: Request) -> Path:
    """Return the folder of a run that this viewer may see. Raises NotFound."""
    folder = state_of(request).config.http.console
    if (
        not (await viewer_of(request)).all
        or folder is None
        or name not in await asyncio.to_thread(_names, folder)
    ):
        raise NotFound(f"no run {name[:80]!r}")
    return folder / name


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _checkpoint(entry: CheckpointEntry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "kind": entry.kind,
        "time": entry.time,
        "bytes": entry.num_bytes,
        "expires_at": entry.expires_at,
    }


def finite(content: Any) -> Any:
    """Replace numbers that are not finite by null, because JSON has no NaN."""
    if is_object(content):
        return {key: finite(value) for key, value in content.items()}
    if is_sequence(content):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
