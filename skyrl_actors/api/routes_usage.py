"""Routes for what keys used, what their checkpoints take, and the audit log.

They have the form of the hosted service's billing routes. Nothing is charged, so costs are null.
"""

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from skyrl_actors.api.access import NotAllowed, caller_of
from skyrl_actors.api.cpu_bound import run_in_thread
from skyrl_actors.api.routes_catalog import iso
from skyrl_actors.api.state import state_of
from skyrl_actors.messages.catalog import CheckpointEntry, SessionEntry
from skyrl_actors.messages.errors import InvalidRequest
from skyrl_actors.messages.keys import ACCESSES, Act, AuditEntry
from skyrl_actors.messages.paths import owner_of
from skyrl_actors.messages.usage import HOUR_S, Usage

router = APIRouter()
LONGEST = timedelta(days=14)
MOST_ACTS = 10_000  # of a day: acts of operators, and as many accesses to checkpoints
LAST_YEAR = 9000
RESOURCES: dict[Act, str] = {
    "add": "api_key",
    "revoke": "api_key",
    "rotate": "api_key",
    "limit": "api_key",
    "end": "session",
    "cancel": "request",
    "pause": "service",
    "drain": "service",
    "resume": "service",
    "unload": "model",
    **dict.fromkeys((*ACCESSES, "delete", "expire"), "checkpoint"),
}
EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/billing/usage/events")
async def usage_events(
    request: Request, starting_on: datetime, ending_before: datetime
) -> JSONResponse:
    """List what the caller's requests used in each hour; an admin sees those of all keys."""
    state, caller = state_of(request), caller_of(request)
    since, until = _hour(starting_on, "starting_on"), _hour(ending_before, "ending_before")
    if not timedelta(0) < until - since <= LONGEST:
        raise InvalidRequest("ending_before must be after starting_on, by at most 14 days")
    names = await state.client.calls.owner_names()
    rows = await state.client.calls.usage(since.timestamp(), until.timestamp(), caller.scope)
    sessions = {
        entry.note.session_id: entry
        for entry in await state.client.session_catalog.sessions(caller.scope)
    }
    return await run_in_thread(_answer, rows, names, sessions)


def _answer(
    rows: list[Usage], names: dict[str, str], sessions: dict[str, SessionEntry]
) -> JSONResponse:
    events = [event for row in rows for event in _events(row, names, sessions)]
    events.sort(key=lambda event: (event["bucket_start"], -_amount(event)))
    used = {row.session_id for row in rows if row.session_id}
    shown = {
        name: {"user_metadata": sessions[name].note.user_metadata if name in sessions else None}
        for name in sorted(used)
    }
    return JSONResponse({"data": events, "sessions": shown, "cost_data_through": None})


def _hour(at: datetime, field: str) -> datetime:
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    if at.timestamp() % HOUR_S:
        raise InvalidRequest(f"{field} is {at.isoformat()}; use the begin of an hour in UTC")
    return at


def _events(
    row: Usage, names: dict[str, str], sessions: dict[str, SessionEntry]
) -> Iterator[dict[str, Any]]:
    """Yield an event for each kind of usage, as `BillingUsageEvent` of the SDK."""
    session = sessions.get(row.session_id)
    common = {
        "bucket_start": iso(row.hour),
        "bucket_end": iso(row.hour + HOUR_S),
        "base_model": row.base_model,
        "user_id": row.owner or None,
        "user_name": names.get(row.owner),
        "session_id": row.session_id or None,
        "project_id": session.note.project_id if session else None,
    }
    for info in (
        {"type": "training", "token_count": row.trained_tokens},
        {"type": "sampling_prefill", "cached": False, "token_count": row.prompt_tokens},
        {"type": "sampling_sample", "token_count": row.sampled_tokens},
        {"type": "checkpoint", "count": row.checkpoints},
    ):
        event = {**common, "event_info": info}
        if _amount(event):
            yield event


def _amount(event: dict[str, Any]) -> int:
    info = event["event_info"]
    return info.get("token_count", info.get("count", 0))


@router.get("/billing/usage/checkpoints/current")
async def checkpoint_usage(request: Request, project_id: str | None = None) -> dict[str, Any]:
    """Return the number and bytes of the caller's checkpoints; an admin sees those of all keys."""
    state, caller = state_of(request), caller_of(request)
    names = await state.client.calls.owner_names()
    sessions = await state.client.session_catalog.sessions(caller.scope)
    projects = {entry.note.session_id: entry.note.project_id for entry in sessions}
    groups: dict[tuple[str | None, str], list[CheckpointEntry]] = defaultdict(list)
    for run in await state.client.catalog.runs(caller.scope):
        project = projects.get(run.session_id)
        if project_id in (None, project) and caller.owns(run.run_id):
            groups[project, owner_of(run.run_id)] += run.checkpoints
    return {
        "effective_rate_usd_per_gigabyte_month": None,
        "data": [
            {
                "project_id": project,
                "org_user_urn": owner or None,
                "user_name": names.get(owner),
                "checkpoint_count": len(checkpoints),
                "size_bytes": (size := sum(one.num_bytes for one in checkpoints)),
                "size_gigabytes": size / 1e9,
            }
            for (project, owner), checkpoints in groups.items()
            if checkpoints
        ],
    }


@router.get("/audit")
async def audit(
    request: Request, event_type: EventType = "all", day: date | None = None
) -> dict[str, Any]:
    """List administrative acts and access to published checkpoints of a day; for admins."""
    if caller_of(request).scope is not None:
        raise NotAllowed("the audit log needs a key of the role admin")
    begin = datetime.combine(day or datetime.now(UTC).date(), datetime.min.time(), UTC)
    if begin.year > LAST_YEAR:
        raise InvalidRequest(f"day is {day}; use a day up to the year {LAST_YEAR}")
    end = begin + timedelta(days=1)
    acts = await state_of(request).client.calls.audit(MOST_ACTS, begin.timestamp(), end.timestamp())
    shown = {
        "all": acts,
        "checkpoints": [entry for entry in acts if entry.act in ACCESSES],
        "organizations": [entry for entry in acts if entry.act not in ACCESSES],
    }
    return {"entries": [_act(entry) for entry in shown.get(event_type, [])]}


def _act(entry: AuditEntry) -> dict[str, Any]:
    is_checkpoint = entry.act in ACCESSES
    return {
        "timestamp": iso(entry.at),
        "event": f"{RESOURCES[entry.act]}_{entry.act}",
        "event_details": {"actor": entry.actor, "subject": entry.subject},
        "tinker_path": entry.subject if is_checkpoint else None,
    }
