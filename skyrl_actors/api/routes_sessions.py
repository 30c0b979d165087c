"""Routes that list, describe and search sessions."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from skyrl_actors.api import wire
from skyrl_actors.api.access import caller_of
from skyrl_actors.api.routes_catalog import Limit, Offset, iso
from skyrl_actors.api.state import state_of
from skyrl_actors.messages.catalog import SessionEntry

router = APIRouter()


async def _own(request: Request) -> list[SessionEntry]:
    caller = caller_of(request)
    return [
        entry
        for entry in await state_of(request).client.session_catalog.sessions(caller.scope)
        if caller.owns(entry.note.session_id)
    ]


@router.get("/sessions")
async def sessions(request: Request, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """List the ids of sessions, newest first, including ended ones."""
    return {
        "sessions": [entry.note.session_id for entry in await _own(request)][
            offset : offset + limit
        ]
    }


@router.get("/sessions/{session_id}")
async def session(session_id: str, request: Request) -> dict[str, Any]:
    """Return the runs, samplers, metadata and tags of a session."""
    entry = await state_of(request).client.session_catalog.session(
        caller_of(request).own(session_id, "session")
    )
    return {
        "training_run_ids": list(entry.run_ids),
        "sampler_ids": list(entry.sampler_ids),
        "user_metadata": entry.note.user_metadata,
        "display_name": entry.note.display_name,
        "tags": entry.note.tags,
        "project_id": entry.note.project_id,
    }


@router.post("/sessions/search")
async def search(body: wire.SearchSessions, request: Request) -> dict[str, Any]:
    """Search sessions, newest first. The cursor is the position where the page ended."""
    found = [
        entry
        for entry in await _own(request)
        if matches(entry, body) and _is_behind(entry, body.cursor)
    ]
    page, rest = found[: body.limit], found[body.limit :]
    last = page[-1].note if rest else None
    cursor = last and {"last_created_at": iso(last.created_at), "last_session_id": last.session_id}
    return {"sessions": [_summary(entry) for entry in page], "next_cursor": cursor}


def matches(entry: SessionEntry, wanted: wire.SearchSessions) -> bool:
    """Return whether a session matches a search. An id or all words of the name must match."""
    note = entry.note
    if wanted.session_id is not None or wanted.display_name is not None:
        name = (note.display_name or "").lower()
        is_named = wanted.display_name is not None and all(
            word in name for word in wanted.display_name.lower().split()
        )
        if note.session_id != wanted.session_id and not is_named:
            return False
    if wanted.project_ids is not None and note.project_id not in wanted.project_ids:
        return False
    if any(note.user_metadata.get(key) != value for key, value in wanted.user_metadata.items()):
        return False
    return wanted.statuses is None or any(_has_status(entry, status) for status in wanted.statuses)


def _has_status(entry: SessionEntry, wanted: wire.SessionStatusQuery) -> bool:
    if wanted.type == "active":
        return entry.status == "active"
    is_finished = entry.status not in (None, "active")
    return (
        wanted.type == "client_finished"
        and is_finished
        and entry.status in (wanted.reasons or [entry.status])
    )


def _is_behind(entry: SessionEntry, cursor: wire.SearchCursor | None) -> bool:
    if cursor is None:
        return True
    created = datetime.fromtimestamp(entry.note.created_at, UTC)
    last = (
        cursor.last_created_at
        if cursor.last_created_at.tzinfo
        else cursor.last_created_at.replace(tzinfo=UTC)
    )
    return (created, entry.note.session_id) < (last, cursor.last_session_id)


def _summary(entry: SessionEntry) -> dict[str, Any]:
    note, status = entry.note, None
    if entry.status == "active":
        status = {"type": "active"}
    elif entry.status is not None:
        status = {
            "type": "client_finished",
            "reason": {"type": entry.status},
            "detail": note.detail,
        }
    return {
        "session_id": note.session_id,
        "created_at": iso(note.created_at),
        "owner": "local",
        "project_id": note.project_id,
        "status": status,
        "checkpoints_count": entry.num_checkpoints,
        "checkpoint_storage_bytes": entry.num_bytes,
        "display_name": note.display_name,
        "user_metadata": note.user_metadata,
        "tags": note.tags,
    }
