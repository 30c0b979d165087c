"""Serve the console: one read-only page at `/`, its data as JSON, and its files."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import plotly
from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse

from skyrl_actors.api.console import Viewer, visible
from skyrl_actors.api.state import state_of
from skyrl_actors.api.tokens import grant_of_credential
from skyrl_actors.messages.catalog import CheckpointEntry
from skyrl_actors.messages.errors import NotFound, UserError
from skyrl_actors.messages.narrowing import is_object, is_sequence
from skyrl_actors.observe.figures import phase_periods
from skyrl_actors.observe.runs import METRICS, SAMPLES, last_samples, listed, rows_in

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
CHECKPOINTS = 20


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
            if what not in self._found or time.monotonic() - self._found[what][0] >= fresh_s:
                self._found[what] = time.monotonic(), await look()
            return self._found[what][1]


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


@router.get(PREFIX + "runs")
async def runs(request: Request) -> JSONResponse:
    """List jobs' runs in `http.console`; with keys configured, only for requests with a key."""
    folder = state_of(request).config.http.console
    if not (await viewer_of(request)).is_known or folder is None:
        return JSONResponse([])
    return JSONResponse(
        await request.app.state.answer_cache.at(
            "runs", SLOW_S, lambda: asyncio.to_thread(listed, folder)
        )
    )


@router.get(PREFIX + "runs/{name}")
async def curves(name: str, request: Request) -> JSONResponse:
    """Return rows of one run's metrics."""
    file = await _run_folder(name, request) / METRICS
    return JSONResponse(finite((await asyncio.to_thread(rows_in, file))[-ROWS:]))


@router.get(PREFIX + "runs/{name}/samples")
async def samples(name: str, request: Request) -> JSONResponse:
    """Return the samples of the last evaluation of one run."""
    file = await _run_folder(name, request) / SAMPLES
    return JSONResponse(finite(await asyncio.to_thread(last_samples, file)))


async def _run_folder(name: str, request: Request) -> Path:
    """Return the folder of a run that this viewer may see. Raises NotFound."""
    folder = state_of(request).config.http.console
    if (
        not (await viewer_of(request)).is_known
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
