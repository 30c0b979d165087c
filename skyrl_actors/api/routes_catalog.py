"""Routes that list and change training runs, checkpoints and sessions."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from skyrl_actors.api import wire
from skyrl_actors.api.access import Caller, caller_of, note_admin
from skyrl_actors.api.state import state_of
from skyrl_actors.messages.catalog import CheckpointEntry, RunEntry
from skyrl_actors.messages.errors import Corrupt, InvalidRequest, NotFound
from skyrl_actors.messages.paths import CHECKPOINT_KINDS, TinkerPath, checked_id, parse_path

router = APIRouter()
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]
Scope = Literal["owned", "accessible"]
TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
EXTERNAL_SINCE = (0, 28)  # older SDKs fail on this checkpoint type


@router.get("/training_runs")
async def training_runs(
    request: Request,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: Scope = "owned",
    project_id: wire.ProjectId | None = None,
) -> dict[str, Any]:
    """List training runs, newest first. `project_id`: only those of the caller's sessions in it."""
    caller, client = caller_of(request), state_of(request).client
    found = await client.catalog.runs(caller.scope, access_scope == "accessible")
    runs = _visible(found, caller, access_scope)
    if project_id is not None:
        of_project = {
            entry.note.session_id
            for entry in await client.session_catalog.sessions(caller.scope)
            if entry.note.project_id == project_id
        }
        runs = [run for run in runs if run.session_id in of_project]
    return {
        "training_runs": [_run(run) for run in runs[offset : offset + limit]],
        "cursor": _cursor(runs, limit, offset),
    }


def _visible(runs: Sequence[RunEntry], caller: Caller, scope: Scope) -> list[RunEntry]:
    """Return the caller's own runs.

    With scope "accessible", add other runs that have published checkpoints, with only those.
    """
    shown: list[RunEntry] = []
    for run in runs:
        if caller.owns(run.run_id):
            shown.append(run)
        elif scope == "accessible" and (public := tuple(c for c in run.checkpoints if c.public)):
            shown.append(replace(run, checkpoints=public, user_metadata={}))
    return shown


async def _one_run(run_id: str, request: Request, scope: Scope = "accessible") -> RunEntry:
    run = await state_of(request).client.catalog.run(checked_id(run_id, "training run"))
    found = _visible([run], caller_of(request), scope)
    if not found:
        raise NotFound(f"no training run {run_id!r}")
    return found[0]


@router.get("/training_runs/{run_id}")
async def training_run(
    run_id: str, request: Request, access_scope: Scope = "owned"
) -> dict[str, Any]:
    """Describe one training run."""
    return _run(await _one_run(run_id, request, access_scope))


@router.get("/training_runs/{run_id}/checkpoints")
@router.get("/models/{run_id}/checkpoints")  # the path in SDKs up to 0.3
async def run_checkpoints(run_id: str, request: Request) -> dict[str, Any]:
    """List the checkpoints of a run, newest first."""
    return {
        "checkpoints": [
            _checkpoint(entry)
            for entry in _known_to((await _one_run(run_id, request)).checkpoints, request)
        ]
    }


def _known_to(entries: Iterable[CheckpointEntry], request: Request) -> list[CheckpointEntry]:
    """Return the entries of kinds that the caller's SDK supports."""
    version = re.search(r"Tinker/Python (\d+)\.(\d+)", request.headers.get("user-agent", ""))
    is_old = version is not None and tuple(map(int, version.groups())) < EXTERNAL_SINCE
    return [entry for entry in entries if not (is_old and entry.kind == "external_weights")]


@router.get("/checkpoints")
async def checkpoints(request: Request, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """List the checkpoints of all runs, newest first."""
    caller = caller_of(request)
    found = await state_of(request).client.catalog.checkpoints(caller.scope)
    entries = [entry for entry in _known_to(found, request) if caller.owns(entry.run_id)]
    shown = [_checkpoint(entry) for entry in entries[offset : offset + limit]]
    return {"checkpoints": shown, "cursor": _cursor(entries, limit, offset)}


@router.post("/training_runs/{run_id}/checkpoints/{checkpoint:path}/publish")
async def publish(run_id: str, checkpoint: str, request: Request) -> dict[str, Any]:
    """Allow every API key to read a checkpoint."""
    return await _set_public(_own_path(run_id, checkpoint, request), True, request)


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint:path}/publish")
async def unpublish(run_id: str, checkpoint: str, request: Request) -> dict[str, Any]:
    """Allow only the owner to read a checkpoint."""
    return await _set_public(_own_path(run_id, checkpoint, request), False, request)


async def _set_public(path: TinkerPath, public: bool, request: Request) -> dict[str, Any]:
    client, owner = state_of(request).client, caller_of(request).owner or ""
    with suppress(Corrupt):  # then it is there
        await client.calls.checkpoint_spec(path)  # raises NotFound, and nothing is recorded
    if await client.catalog.is_public(path) != public:
        # First the record: nothing is published without one.
        await client.calls.note_access("publish" if public else "unpublish", owner, str(path))
    await client.catalog.set_public(path, public)  # also a repeat: the mirror may have failed
    return {}


@router.put("/training_runs/{run_id}/checkpoints/{checkpoint:path}/ttl")
async def set_ttl(run_id: str, checkpoint: str, body: wire.Ttl, request: Request) -> dict[str, Any]:
    """Set the time after which a checkpoint is removed; null = never."""
    path = _own_path(run_id, checkpoint, request)
    await note_admin(request, "expire", run_id, path)
    await state_of(request).client.catalog.set_ttl(path, body.ttl_seconds)
    return {}


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint:path}")
async def delete(run_id: str, checkpoint: str, request: Request) -> dict[str, Any]:
    """Remove a checkpoint."""
    path = _own_path(run_id, checkpoint, request)
    await note_admin(request, "delete", run_id, path)
    await state_of(request).client.catalog.delete(path)
    return {}


def _own_path(run_id: str, checkpoint: str, request: Request) -> TinkerPath:
    path = checkpoint_path(run_id, checkpoint)
    if not caller_of(request).owns(run_id):
        raise NotFound(f"no checkpoint {path}")
    return path


def checkpoint_path(run_id: str, checkpoint: str) -> TinkerPath:
    """Parse the route's tail, which equals the tail of a tinker path."""
    if "/" not in checkpoint:
        raise InvalidRequest(
            f"checkpoint {checkpoint[:80]!r} has no kind; "
            f"put the kind in front, as in weights/{checkpoint[:80]}"
        )
    path = parse_path(f"tinker://{run_id}/{checkpoint}")
    if path.kind not in CHECKPOINT_KINDS:
        raise InvalidRequest(
            f"{path} is no checkpoint; ids are weights/<name>, "
            "sampler_weights/<name> and external_weights/<name>"
        )
    return path


def _cursor(entries: Sequence[Any], limit: int, offset: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": len(entries)}


def iso(seconds: float) -> str:
    """Return seconds since the epoch as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _run(run: RunEntry) -> dict[str, Any]:
    last, last_sampler = run.last("weights"), run.last("sampler_weights")
    return {
        "training_run_id": run.run_id,
        "base_model": run.base_model,
        "model_owner": run.session_id,
        "is_lora": run.lora_rank is not None,
        "lora_rank": run.lora_rank,
        "corrupted": False,
        "last_request_time": iso(run.last_time),
        "user_metadata": run.user_metadata,
        "last_checkpoint": _checkpoint(last) if last else None,
        "last_sampler_checkpoint": _checkpoint(last_sampler) if last_sampler else None,
    }


def _checkpoint(entry: CheckpointEntry) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{entry.kind}/{entry.name}",
        "checkpoint_type": TYPES[entry.kind],
        "time": iso(entry.time),
        "tinker_path": entry.path,
        "size_bytes": entry.num_bytes,
        "public": entry.public,
        "user_metadata": entry.user_metadata,
        "expires_at": None if entry.expires_at is None else iso(entry.expires_at),
    }
